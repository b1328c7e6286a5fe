#!/usr/bin/env bash
# Installs what is missing on a Debian 12 machine that has the Rust toolchain and make. Skips what is there, which takes no time.
#   scripts/setup.sh demo    what the demo needs: a C linker
#   scripts/setup.sh test    what the tests need: a C and C++ compiler, CMake, ninja, GoogleTest, pkg-config, binutils
set -euo pipefail
purpose=${1:?demo or test}

command -v cargo >/dev/null || {
  echo "cargo is missing: install the Rust toolchain (rustup.rs), 1.88 or later" >&2
  exit 1
}

packages=()
need() { command -v "$1" >/dev/null || packages+=("$2"); }
need cc gcc
[ -e /usr/include/stdlib.h ] || packages+=(libc6-dev)
if [ "$purpose" = test ]; then
  need c++ g++
  need cmake cmake
  need ninja ninja-build
  need pkg-config pkg-config
  need nm binutils
  [ -e /usr/include/gtest/gtest.h ] || packages+=(libgtest-dev)
fi
[ ${#packages[@]} -gt 0 ] || exit 0

echo "installing ${packages[*]}"
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo)
export DEBIAN_FRONTEND=noninteractive
"${as_root[@]}" apt-get update -qq
"${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"

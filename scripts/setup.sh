#!/usr/bin/env bash
# Installs missing tools on a Debian 12 machine with the Rust toolchain and make. Skips installed
# ones, in no time.
#   scripts/setup.sh demo    for the demo: a C linker
#   scripts/setup.sh wheel   for a Python wheel: a C and C++ compiler, CMake, ninja, binutils, and
#                            the build tools of Python in .venv
#   scripts/setup.sh test    for the tests: also GoogleTest, pkg-config, Chromium (for the page
#                            map), and a pip torch in .venv to build the libtorch component (no CUDA
#                            toolkit)
#   scripts/setup.sh docs    for the documentation site: a C linker, Python and mdBook in .tools
set -euo pipefail
purpose=${1:?demo, wheel, test or docs}
cd "$(dirname "$0")/.."

command -v cargo >/dev/null || {
  echo "cargo is missing: install the Rust toolchain (rustup.rs), 1.88 or later" >&2
  exit 1
}

packages=()
need() { command -v "$1" >/dev/null || packages+=("$2"); }
need cc gcc
[ -e /usr/include/stdlib.h ] || packages+=(libc6-dev)
if [ "$purpose" = test ]; then
  need pkg-config pkg-config
  need chromium chromium
  [ -e /usr/include/gtest/gtest.h ] || packages+=(libgtest-dev)
fi
if [ "$purpose" = test ] || [ "$purpose" = wheel ]; then
  need c++ g++
  need cmake cmake
  need ninja ninja-build
  need nm binutils
  python3 -c 'import ensurepip, venv' 2>/dev/null || packages+=(python3 python3-venv)
fi
[ "$purpose" != docs ] || need python3 python3
if [ ${#packages[@]} -gt 0 ]; then
  echo "installing ${packages[*]}"
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo)
  export DEBIAN_FRONTEND=noninteractive
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" apt-get install -y -qq --no-install-recommends "${packages[@]}"
fi
if [ "$purpose" = docs ]; then
  # Without its server and file watcher, which take most of its compile time.
  mdbook=0.5.4
  [ "$(.tools/bin/mdbook --version 2>/dev/null)" = "mdbook v$mdbook" ] ||
    cargo install --quiet --locked mdbook --version "$mdbook" --no-default-features --features search --root .tools
fi
case $purpose in demo | docs) exit 0 ;; esac

# Builds a wheel. With all dependencies, since --no-deps installs none.
wheels=(build==1.6.1 pyproject_hooks==1.3.3 scikit-build-core==1.1.2 packaging==26.3 pathspec==1.1.1)
if [ "$purpose" = test ]; then
  # Without torch's dependencies (2.5 GB of CUDA libraries): the component is only built, not run.
  # Versions are those of the GPU machine; the formatters' versions are fixed because their output
  # differs between releases.
  wheels+=(torch==2.11.0 nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88 clang-format==19.1.7 ruff==0.17.6)
  wheels+=(pytest==9.2.0 iniconfig==2.3.1 pluggy==1.7.0 pygments==2.21.0)
  # Python dependencies for importing torch without a GPU (tests/torch/standins.py replaces CUDA's
  # libraries).
  wheels+=(typing_extensions==4.16.0 sympy==1.14.0 mpmath==1.3.0 networkx==3.6.1 jinja2==3.1.6 markupsafe==3.0.4 fsspec==2026.9.0
    filelock==4.2.11)
fi
# The stamp makes a repeated set-up free.
stamp=.venv/set-up-$(echo "${wheels[*]}" | sha256sum | cut -c1-16)
if [ ! -e "$stamp" ]; then
  echo "installing ${wheels[*]} into .venv"
  python3 -m venv .venv
  .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps "${wheels[@]}"
  touch "$stamp"
fi
[ "$purpose" = test ] || exit 0
# The viewer of torch's memory snapshots, used by one test. A failed download must not prevent the
# tests.
scripts/memory-viz.sh || echo "no MemoryViz.js: its test will say SKIPPED" >&2

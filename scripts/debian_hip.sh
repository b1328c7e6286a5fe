#!/usr/bin/env bash
# Loads AMD's own libamdhip64 through the driver: Debian 12's, HIP 5.2, which has other structures and must be refused in words and without harm
# (conformance/tests/debian_hip.rs). It and what it is linked with go into build/debian-hip, about 5 MB, and are not installed. What compiles kernels for
# it (libamd-comgr2 and LLVM, 36 MB more) it loads only once there is a device. Where it cannot be had, that is counted as SKIPPED.
set -euo pipefail
cd "$(dirname "$0")/.."

into=build/debian-hip
library=usr/lib/x86_64-linux-gnu/libamdhip64.so.5
skip() {
  echo "SKIPPED: 2 tests of AMD's own library: $1"
  exit
}

if [ ! -e "$into/$library" ]; then
  { command -v apt-get && command -v dpkg-deb; } >/dev/null || skip "this is no Debian"
  # Those of its dependencies that are not installed, and never the compiler.
  packages=$(apt-get -s install --no-install-recommends libamdhip64-5 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p' |
    grep -v -e '^libamd-comgr' -e '^libllvm' || true)
  rm -rf "$into.new"
  mkdir -p "$into.new/packages"
  # Also where it is installed: a GPU's machine may have another one.
  (cd "$into.new/packages" && apt-get -qq -o APT::Sandbox::User=root download $(printf '%s\n' libamdhip64-5 $packages | sort -u)) ||
    skip "libamdhip64-5 is not to be had from Debian's archive"
  for package in "$into.new"/packages/*.deb; do
    dpkg-deb -x "$package" "$into.new"
  done
  rm -r "$into.new/packages"
  [ -e "$into.new/$library" ] || skip "libamdhip64-5 is of another version here"
  rm -rf "$into"
  mv "$into.new" "$into"
fi

cargo build --locked --release --quiet -p vmmgraph-demo
# --workspace: as scripts/test.sh has built it.
VMMGRAPH_DEBIAN_HIP=$PWD/$(dirname "$into/$library") VMMGRAPH_DEMO=${CARGO_TARGET_DIR:-$PWD/target}/release/vmmgraph-demo \
  cargo test --locked --workspace --features bridge --test debian_hip -- --include-ignored --nocapture
echo "SKIPPED: 0 tests of AMD's own library"

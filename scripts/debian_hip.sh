#!/usr/bin/env bash
# Tests the driver with AMD's own libamdhip64 from Debian 12: HIP 5.2 has different structures and
# must be refused without side effects (conformance/tests/debian_hip.rs). Unpacks the library and
# its dependencies to build/debian-hip, about 5 MB, without installing. Omits the kernel compiler
# (libamd-comgr2 and LLVM, 36 MB), loaded only with a device. If unavailable, counted as SKIPPED.
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
  # Its dependencies that are not installed, except the compiler.
  packages=$(apt-get -s install --no-install-recommends libamdhip64-5 2>/dev/null | sed -n 's/^Inst \([^ ]*\).*/\1/p' |
    grep -v -e '^libamd-comgr' -e '^libllvm' || true)
  rm -rf "$into.new"
  mkdir -p "$into.new/packages"
  # Also if installed: a GPU machine may have a different version.
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
# --workspace: reuses the build of scripts/test.sh.
VMMGRAPH_DEBIAN_HIP=$PWD/$(dirname "$into/$library") VMMGRAPH_DEMO=${CARGO_TARGET_DIR:-$PWD/target}/release/vmmgraph-demo \
  cargo test --locked --workspace --test debian_hip -- --include-ignored --nocapture
echo "SKIPPED: 0 tests of AMD's own library"

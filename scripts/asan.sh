#!/usr/bin/env bash
# The Rust tests under the address sanitizer, which only a nightly toolchain has; says SKIPPED where there is none.
set -euo pipefail
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
if ! cargo +nightly --version >/dev/null 2>&1; then
  echo "SKIPPED: address sanitizer for Rust (no nightly toolchain)"
  exit 0
fi
# The stand-in is loaded with dlopen and cannot find the sanitizer's functions then, so it goes in as it is; cargo's own folders
# come first on the path, and the instrumented libcuda.so there is passed over because it does not load.
cargo build --locked --package standin-cuda
plain=$(realpath -m "${CARGO_TARGET_DIR:-target}")
mkdir -p "$plain/standin"
cp "$plain/debug/libcuda.so" "$plain/standin/libcuda.so.1"
export LD_LIBRARY_PATH="$plain/standin"
# The children of tests/spaces.rs die by SIGSEGV on purpose; handle_segv=0 leaves that to the kernel.
export RUSTFLAGS="-Zsanitizer=address" ASAN_OPTIONS="detect_leaks=1:handle_segv=0" CARGO_TARGET_DIR="$plain/asan"
cargo +nightly test --locked --target "$host" --lib --test faults --test spaces --test order --test c_abi --test trace

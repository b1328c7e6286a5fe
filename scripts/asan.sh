#!/usr/bin/env bash
# Runs the Rust tests under the address sanitizer, and the stress test under the thread sanitizer.
# Needs a nightly toolchain, and its rust-src for the thread sanitizer, to rebuild the standard
# library. Prints SKIPPED for missing tools.
set -euo pipefail
cd "$(dirname "$0")/.."
host=$(rustc -vV | sed -n 's/^host: //p')
if ! cargo +nightly --version >/dev/null 2>&1; then
  echo "SKIPPED: address and thread sanitizer for Rust (no nightly toolchain)"
  exit 0
fi
export VMMGRAPH_STRESS_SECONDS="${VMMGRAPH_STRESS_SECONDS:-30}"
# Single call failures only. Tests without a sanitizer also run pairs, four times as many runs.
export VMMGRAPH_FAULT_PAIRS="${VMMGRAPH_FAULT_PAIRS:-0}"
# Stand-ins loaded with dlopen cannot find the sanitizer's functions, so use uninstrumented ones.
# Cargo's folders come first on the path, and the loader skips the instrumented ones there because
# they fail to load.
cargo build --locked --package standin-cuda --package standin-hip --package standin-ascend --package standin-mlu
plain=$(realpath -m "${CARGO_TARGET_DIR:-target}")
mkdir -p "$plain/standin"
cp "$plain/debug/libcuda.so" "$plain/standin/libcuda.so.1"
cp "$plain/debug/libstandin_hip.so" "$plain/standin/libamdhip64.so.7"
cp "$plain/debug/libstandin_ascend.so" "$plain/standin/libascendcl.so"
cp "$plain/debug/libstandin_mlu.so" "$plain/standin/libcndrv.so"
export LD_LIBRARY_PATH="$plain/standin" VMMGRAPH_STANDINS_ON_PATH=1
# Child processes of tests/arena/spaces.rs die by SIGSEGV on purpose; handle_segv=0 leaves the
# signal to the kernel.
export ASAN_OPTIONS="detect_leaks=1:handle_segv=0"
tests=(--lib --test faults --test arena --test capi --test fuzz)
sanitized() { RUSTFLAGS="-Zsanitizer=$1" CARGO_TARGET_DIR="$plain/$1" cargo +nightly test --locked --target "$host" "${@:2}"; }
if [[ -d "$(rustc +nightly --print sysroot)/lib/rustlib/src/rust/library" ]]; then
  sanitized address "${tests[@]}"
  sanitized thread -Zbuild-std --test arena stress:: -- --nocapture
else
  echo "SKIPPED: thread sanitizer for Rust (no rust-src in the nightly toolchain)"
  sanitized address "${tests[@]}"
fi

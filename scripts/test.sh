#!/usr/bin/env bash
# Every test that needs no GPU. Those that do are counted as ignored, with the word SKIPPED; scripts/gpu.sh runs them.
set -euo pipefail
cd "$(dirname "$0")/.."

# The traces are slow without optimisation, and optimised code is what ships: overflow checks and debug assertions stay on.
export CARGO_PROFILE_TEST_OPT_LEVEL=1
log=$(mktemp)
cargo test --locked --workspace 2>&1 | tee "$log"

cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=ON
cmake --build build/cmake
ctest --test-dir build/cmake --output-on-failure -j"$(nproc)" 2>&1 | tee -a "$log"

echo
echo "SKIPPED: $(grep -c 'ignored, SKIPPED' "$log") tests need a GPU (scripts/gpu.sh)"
sum() { grep -oE "$1" "$log" | grep -oE '[0-9]+' | awk '{ n += $1 } END { print n + 0 }'; }
passed=$(($(sum '[0-9]+ passed;') + $(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed' "$log" || true)))
echo "$passed passed, 0 failed, $(sum '[0-9]+ ignored;') skipped"

#!/usr/bin/env bash
# Runs every test that needs no GPU. GPU tests are counted as ignored, marked SKIPPED;
# scripts/gpu.sh runs them.
set -euo pipefail
cd "$(dirname "$0")/.."
# Incremental compilation would cost a tenth more.
export CARGO_INCREMENTAL=0

log=$(mktemp -d)
touch "$log"/{rust,c,python}
step() { printf '\n=== %s (%ss)\n' "$1" "$SECONDS"; }

# The core is compiled once: for the Rust tests, and as archives for C and C++, which thereby run
# with its assertions. `make demo` runs a release build; .ci/full builds one with CMake.
step "the Rust tests compile"
cargo build --locked --workspace --lib --tests --profile test
built=$(realpath -m "${CARGO_TARGET_DIR:-target}")/debug

c_tests() {
  # Lower optimisation than a release: without a GPU, C++ time is mostly compilation.
  for_tests=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DVMMGRAPH_TESTS=ON
    -DVMMGRAPH_PREBUILT_ARCHIVE="$built/libvmmgraph.a")
  step "the C and C++ tests compile"
  # Without debug information, as an installed one.
  mkdir -p build
  strip --strip-debug -o build/conformance "$built/conformance"
  cmake -S . -B build/cmake "${for_tests[@]}" -DVMMGRAPH_EXAMPLES=ON -DVMMGRAPH_PREBUILT_STANDINS="$built/deps" \
    -DVMMGRAPH_CONFORMANCE=ON -DVMMGRAPH_PREBUILT_CONFORMANCE="$PWD/build/conformance"
  cmake --build build/cmake
  step "the C and C++ tests run"
  ctest --test-dir build/cmake --output-on-failure -j"$(nproc)"

  # The libtorch component, against the pip torch of scripts/setup.sh. Unity builds, since torch's
  # headers dominate the compile time.
  step "the libtorch tests compile"
  torch=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
  cmake -S . -B build/torch "${for_tests[@]}" -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$torch" \
    -DVMMGRAPH_PREBUILT_TORCH_ARCHIVE="$built/libvmmgraph_bridge.a" -DVMMGRAPH_EXAMPLES=OFF \
    -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
  cmake --build build/torch
  step "the libtorch tests run"
  ctest --test-dir build/torch --output-on-failure -j"$(nproc)" -LE 'slow|release'

  # The Python package, with stand-ins of torch and the library from above. The wheel's own tests
  # need a wheel, built by .ci/run.
  step "the Python tests run"
  VMMGRAPH_CORE_LIBRARY=$PWD/build/cmake/libvmmgraph.so .venv/bin/python -m pytest -q -rs -p no:cacheprovider tests/python >"$log/python"
  step "the C, C++ and Python tests are over"
}

# At the same time: each of the two alone leaves a core idle for a fifth of its time.
(set -e; c_tests) >"$log/c" 2>&1 &
beside=$!
step "the Rust tests run"
failed=0
cargo test --locked --workspace 2>&1 | tee "$log/rust" || failed=$?
step "the C, C++ and Python tests: what they said"
wait "$beside" || failed=$?
cat "$log"/{c,python}
[ "$failed" = 0 ] || exit "$failed"

of_python() { grep -oE "[0-9]+ $1" "$log/python" | tail -1 | grep -oE '[0-9]+' || echo 0; }
echo
skipped=$(($(cat "$log"/{rust,c} | grep -cE 'ignored, SKIPPED|\*\*\*Skipped') + $(of_python skipped)))
echo "SKIPPED: $skipped tests need a GPU (scripts/gpu.sh) or the vendors' headers and libraries (scripts/abi.sh, scripts/debian_hip.sh)"
sum() { cat "$log"/{rust,c} | grep -oE "$1" | grep -oE '[0-9]+' | awk '{ n += $1 } END { print n + 0 }'; }
passed=$(($(sum '[0-9]+ passed;') + $(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed' "$log/c" || true) + $(of_python passed)))
echo "$passed passed, 0 failed, $skipped skipped"

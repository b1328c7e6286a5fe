#!/usr/bin/env bash
# Runs every test that needs no GPU. GPU tests are counted as ignored, marked SKIPPED;
# scripts/gpu.sh runs them.
set -euo pipefail
cd "$(dirname "$0")/.."

# No times are checked: link-time optimisation takes up to a quarter of the core's three
# compilations.
export CARGO_PROFILE_RELEASE_LTO=off

log=$(mktemp)
# With the cxx bridge, to include its tests. clippy, and CMake below, check the build without the
# bridge.
cargo test --locked --workspace --features bridge 2>&1 | tee "$log"

# Lower optimisation than a release: without a GPU, C++ time is mostly compilation. Builds
# conformance in the demo's target folder, to reuse its core.
for_tests=(-G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DVMMGRAPH_TESTS=ON)
cmake -S . -B build/cmake "${for_tests[@]}" -DVMMGRAPH_EXAMPLES=ON \
  -DVMMGRAPH_CONFORMANCE=ON -DVMMGRAPH_CONFORMANCE_TARGET_DIR="$PWD/target"
cmake --build build/cmake
ctest --test-dir build/cmake --output-on-failure -j"$(nproc)" 2>&1 | tee -a "$log"

# The libtorch component, against the pip torch of scripts/setup.sh; reuses the core without the
# bridge from above. Unity builds, since torch's headers dominate the compile time.
torch=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
cmake -S . -B build/torch "${for_tests[@]}" -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$torch" \
  -DVMMGRAPH_PREBUILT_ARCHIVE="$PWD/build/cmake/cargo/release/libvmmgraph.a" -DVMMGRAPH_EXAMPLES=OFF \
  -DCMAKE_UNITY_BUILD=ON -DCMAKE_UNITY_BUILD_BATCH_SIZE=0
cmake --build build/torch
ctest --test-dir build/torch --output-on-failure -j"$(nproc)" -LE 'slow|release' 2>&1 | tee -a "$log"

# The Python package, with stand-ins of torch and the library from above. The wheel's own tests need
# a wheel, built by .ci/run.
python=$(mktemp)
VMMGRAPH_CORE_LIBRARY=$PWD/build/cmake/libvmmgraph.so .venv/bin/python -m pytest -q -rs -p no:cacheprovider tests/python 2>&1 | tee "$python"
of_python() { grep -oE "[0-9]+ $1" "$python" | tail -1 | grep -oE '[0-9]+' || echo 0; }

echo
skipped=$(($(grep -cE 'ignored, SKIPPED|\*\*\*Skipped' "$log") + $(of_python skipped)))
echo "SKIPPED: $skipped tests need a GPU (scripts/gpu.sh) or the vendors' headers and libraries (scripts/abi.sh, scripts/debian_hip.sh)"
sum() { grep -oE "$1" "$log" | grep -oE '[0-9]+' | awk '{ n += $1 } END { print n + 0 }'; }
passed=$(($(sum '[0-9]+ passed;') + $(grep -cE '^ *[0-9]+/[0-9]+ Test .* Passed' "$log" || true) + $(of_python passed)))
echo "$passed passed, 0 failed, $skipped skipped"

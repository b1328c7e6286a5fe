#!/usr/bin/env bash
# Every GPU test and benchmark, in two steps, since a GPU machine may have no Rust:
#   scripts/gpu.sh build   here: puts the test binaries, the demo, the library and the test data into build/gpu
#   scripts/gpu.sh run     there: runs every test and prints one table; build/gpu is all it needs
#   scripts/gpu.sh bench   there: the shoot-out of bench/shootout, about three minutes; more arguments go to it
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/gpu

build() {
  rm -rf "$out"
  mkdir -p "$out/tests"
  cp -r tests/data "$out/tests/data"
  # The newest binary of each test, as cargo reports it.
  binaries=$(cargo test --locked --release --no-run --test conformance --test gpu --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
  for binary in $binaries; do
    name=$(basename "$binary" | sed 's/-[0-9a-f]*$//')
    strip -o "$out/$name" "$binary"
  done
  cargo build --locked --release -p vmmgraph-demo
  strip -o "$out/demo" target/release/vmmgraph-demo
  cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TESTS=ON >/dev/null
  cmake --build build/cmake --target vmmgraph driver_test
  cp -P build/cmake/libvmmgraph.so* build/cmake/tests/cpp/driver_test "$out/"
  torch=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
  cmake -S . -B build/torch -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$torch" \
    -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=OFF >/dev/null
  cmake --build build/torch --target vmmgraph_torch torch_test engine_test
  strip -o "$out/libvmmgraph_torch.so.0.1" build/torch/libvmmgraph_torch.so.0.1.0
  strip -o "$out/torch_test" build/torch/tests/torch/torch_test
  strip -o "$out/engine_test" build/torch/tests/engine/engine_test
  cp tests/torch/run.sh "$out/"
  cmake -S bench/shootout -B build/shootout -G Ninja -DTORCH_ROOT="$torch" \
    -DVMMGRAPH_TORCH_LIB="$PWD/build/torch/libvmmgraph_torch.so" >/dev/null
  cmake --build build/shootout
  strip -o "$out/shootout" build/shootout/shootout
  du -sh "$out"
}

run() {
  log=$(mktemp)
  table=()
  failed=0
  row() { # row NAME COMMAND...
    local name=$1
    shift
    echo "=== $name"
    if "$@" 2>&1 | tee "$log"; then status=passed; else status=FAILED failed=1; fi
    local counts
    counts=$(grep -E '^test result:|wrong or lost$|^passed$|^failed$|tests ran|^\[  PASSED' "$log" | tail -1 || true)
    table+=("$(printf '%-34s %-7s %s' "$name" "$status" "$counts")")
  }
  nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader || { echo "no GPU here" >&2; exit 1; }
  export VMMGRAPH_TEST_ROOT=$PWD/$out VMMGRAPH_TEST_DRIVER=real VMMGRAPH_DRIVER=cuda
  row "driver conformance" "$out/conformance" --nocapture --test-threads=1
  row "library on the GPU" "$out/gpu" --include-ignored --nocapture --test-threads=1
  row "demo, cuda driver" "$out/demo" --data "$out/tests/data" --json "$out/demo-cuda.json"
  torch=$(python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  row "captures through libtorch" env LD_LIBRARY_PATH="$PWD/$out" "$out/run.sh" "$out/torch_test" "$torch"
  row "persistent inputs and executor" env LD_LIBRARY_PATH="$PWD/$out" "$out/run.sh" "$out/engine_test" "$torch"
  row "C++ over the shared library" env LD_LIBRARY_PATH="$PWD/$out" "$out/driver_test" cuda
  echo
  date -u '+%Y-%m-%d %H:%M UTC'
  printf '%s\n' "${table[@]}"
  exit $failed
}

bench() {
  torch=$(python3 -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])")
  LD_LIBRARY_PATH=$PWD/$out "$out/run.sh" "$out/shootout" "$torch" --json "$out/shootout.json" "$@"
}

case ${1:-} in
build) build ;;
run) run ;;
bench) bench "${@:2}" ;;
*)
  echo "usage: scripts/gpu.sh build|run|bench" >&2
  exit 2
  ;;
esac

#!/usr/bin/env bash
# Builds and runs all GPU tests and benchmarks in two steps, since a GPU machine may have no Rust:
#   scripts/gpu.sh build     on the build machine: collects test binaries, demo, library and test
#                            data in build/gpu
# All other commands run on the GPU machine and need only build/gpu:
#   scripts/gpu.sh run       runs every test and prints one table
#   scripts/gpu.sh bench     runs bench/shootout, about three minutes; passes arguments on
#   scripts/gpu.sh behind    measures captures behind the traffic, about two minutes; passes arguments
#                            on
#   scripts/gpu.sh reports   runs programs from public reports under stock torch and under vmmgraph,
#                            about fifteen minutes; passes arguments to run_all.py
#   scripts/gpu.sh saver CHECKOUT  runs torch_memory_saver's own tests, from a checkout, against
#                            vmmgraph.memory_saver, about five minutes; needs pytest
#   scripts/gpu.sh sanitize  runs compute-sanitizer over the tests, at most nineteen minutes; a line
#                            for each tool and binary
#   scripts/gpu.sh poison    runs the libtorch and engine tests with VMMGRAPH_POISON=1, which fills
#                            the shared pages before every replay
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/gpu
. scripts/gpu.bash

build() {
  rm -rf "$out"
  mkdir -p "$out/tests"
  cp -r tests/data "$out/tests/data"
  # The newest binary of each test, as cargo reports it.
  binaries=$(cargo test --locked --release --no-run --test gpu --message-format=json 2>/dev/null |
    sed -n 's/.*"executable":"\([^"]*\)".*/\1/p')
  for binary in $binaries; do
    name=$(basename "$binary" | sed 's/-[0-9a-f]*$//')
    strip -o "$out/$name" "$binary"
  done
  cargo build --locked --release -p vmmgraph-demo
  strip -o "$out/demo" target/release/vmmgraph-demo
  cmake -S . -B build/cmake -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O3 -DNDEBUG" -DVMMGRAPH_TESTS=ON >/dev/null
  cmake --build build/cmake --target vmmgraph driver_test ring_test vmmgraph_memory_saver
  cp -P build/cmake/libvmmgraph.so* build/cmake/tests/cpp/{driver,ring}_test "$out/"
  strip "$(readlink -f "$out/libvmmgraph.so")"
  cp build/cmake/libvmmgraph_memory_saver.so tests/memory_saver/gpu.py "$out/"
  torch=$(echo "$PWD"/.venv/lib/python3*/site-packages/torch)
  cmake -S . -B build/torch -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$torch" \
    -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=OFF -DCMAKE_CXX_FLAGS_RELEASE="-O3 -DNDEBUG" -DCMAKE_UNITY_BUILD=OFF >/dev/null
  cmake --build build/torch --target vmmgraph_torch vmmgraph_torch_keeps_no_graphs torch_test trust_test executables_test regions_test elastic_test eager_test serving_test rings_test share_test ranks_test differential_test engine_test xllm_shape_test \
    sleep_example all_reduce_example offload_example libtorch_quickstart
  strip -o "$out/libvmmgraph_torch.so.0.1" build/torch/libvmmgraph_torch.so.0.1.0
  mkdir "$out/keeps_no_graphs"
  strip -o "$out/keeps_no_graphs/libvmmgraph_torch.so.0.1" build/torch/tests/torch/keeps_no_graphs/libvmmgraph_torch.so.0.1
  for program in torch/{torch,trust,executables,regions,elastic,eager,serving,rings,share,ranks}_test torch/libtorch_quickstart torch/differential/differential_test engine/{engine_test,xllm_shape_test,sleep_example,all_reduce_example,offload_example}; do
    strip -o "$out/$(basename "$program")" "build/torch/tests/$program"
  done
  cp tests/torch/run.sh "$out/"
  mkdir -p "$out/python"
  cp -r python/vmmgraph "$out/python/vmmgraph"
  cp -r tests/python/reports "$out/reports"
  cp -r examples/shared_pool "$out/shared_pool"
  cp tests/python/test_gpu.py tests/python/test_around_gpu.py tests/python/test_soak_gpu.py tests/python/test_threads_gpu.py tests/python/test_ops_gpu.py tests/python/test_cli_gpu.py tests/python/test_memory_saver_gpu.py tests/python/torch_memory_saver_suite.py bench/python/{engine,vllm,sglang}_run.py examples/rl/rollout.py "$out/"
  cmake -S bench/shootout -B build/shootout -G Ninja -DTORCH_ROOT="$torch" \
    -DVMMGRAPH_TORCH_LIB="$PWD/build/torch/libvmmgraph_torch.so" >/dev/null
  cmake --build build/shootout
  strip -o "$out/shootout" build/shootout/shootout
  strip -o "$out/behind" build/shootout/behind
  du -sh "$out"
}

# Like libtorch(), with a torch that keeps no captured graphs (up to 2.7).
keeps_no_graphs() {
  local name=$1 program=$2
  shift 2
  row "$name" env LD_LIBRARY_PATH="$PWD/$out/keeps_no_graphs:$PWD/$out" "$out/run.sh" "$out/$program" "$torch" "$@"
}

trust() {
  libtorch "replays of 4 threads" trust_test --gtest_filter='Trust.ReplaysOfFourThreads*'
  libtorch "around the guard" trust_test --gtest_filter='Trust.LaunchesAroundTheGuard*'
  libtorch "captures and evictions" trust_test --gtest_filter='Trust.ThousandsOfCaptures*'
  libtorch "captures racing replays" trust_test --gtest_filter='Trust.CapturesAndEvictionsMayRace*'
}

run() {
  begin
  row "driver conformance" "$out/gpu" conformance:: --nocapture --test-threads=1
  row "library on the GPU" "$out/gpu" graphs:: --include-ignored --nocapture --test-threads=1
  row "regions on the GPU" "$out/gpu" regions:: --include-ignored --nocapture --test-threads=1
  row "demo, cuda driver" "$out/demo" --data "$out/tests/data" --json "$out/demo-cuda.json"
  libtorch "captures through libtorch" torch_test
  trust
  libtorch "shared executables" executables_test
  libtorch "tensors in regions" regions_test
  libtorch "KV caches as tensors" elastic_test
  libtorch "eager work in the graphs' memory" eager_test
  libtorch "lending, and serving under a budget" serving_test
  libtorch "rings in graphs" rings_test
  libtorch "graphs and another process" share_test
  libtorch "a decoder on two ranks" ranks_test
  libtorch "as torch's own captures" differential_test
  libtorch "persistent inputs and executor" engine_test
  libtorch "steps in the shape of xLLM" xllm_shape_test
  keeps_no_graphs "captures, as up to torch 2.7" torch_test
  keeps_no_graphs "executables, as up to torch 2.7" executables_test
  keeps_no_graphs "rings, as up to torch 2.7" rings_test
  keeps_no_graphs "executor, as up to torch 2.7" engine_test --gtest_filter='Update.*:Offload.*:Ahead.*'
  row "captures from Python" env VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    python3 "$out/test_gpu.py"
  row "around captures, as stock torch" env VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    python3 "$out/test_around_gpu.py"
  row "random use from Python" env VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    python3 "$out/test_soak_gpu.py"
  row "random use by threads from Python" env VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    python3 "$out/test_threads_gpu.py"
  row "torch's operators and modules" env VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    python3 "$out/test_ops_gpu.py"
  row "memory saver under torch" python3 "$out/gpu.py" "$out/libvmmgraph_memory_saver.so"
  row "memory saver from Python" env VMMGRAPH_MEMORY_SAVER_LIBRARY="$PWD/$out/libvmmgraph_memory_saver.so" \
    VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" VMMGRAPH_TEST_PACKAGE="$PWD/$out/python" python3 "$out/test_memory_saver_gpu.py"
  row "torch's histories replayed" env VMMGRAPH_CORE_LIBRARY="$PWD/$out/libvmmgraph.so" VMMGRAPH_TEST_PACKAGE="$PWD/$out/python" \
    python3 "$out/test_cli_gpu.py"
  libtorch "an engine that sleeps" sleep_example
  libtorch "the quickstart of libtorch" libtorch_quickstart
  row "the quickstart of RL" env VMMGRAPH_MEMORY_SAVER_LIBRARY="$PWD/$out/libvmmgraph_memory_saver.so" \
    VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" python3 "$out/rollout.py"
  libtorch "layers that stream" offload_example
  [ "$(nvidia-smi -L | wc -l)" -lt 2 ] || libtorch "all-reduce over graph memory" all_reduce_example
  row "C++ over the shared library" env LD_LIBRARY_PATH="$PWD/$out" "$out/driver_test" cuda
  row "rings from C++" env LD_LIBRARY_PATH="$PWD/$out" "$out/ring_test"
  end
}

poison() {
  begin
  export VMMGRAPH_POISON=1 VMMGRAPH_TRUST_REPLAYS=20000
  libtorch "captures through libtorch" torch_test
  libtorch "persistent inputs and executor" engine_test --gtest_filter='-Measure.*'
  trust
  end
}

# sanitizer SECONDS NAME TOOL COMMAND...: adds a row with a tool's error count. CUDA calls that
# return errors are counted but are no failure: torch and cuBLAS make some at start-up, and the
# tests check the results of the library's calls.
sanitizer() {
  local seconds=$1 name=$2 tool=$3 code=0
  shift 3
  echo "=== $name"
  # Set the library path inside the tool, so that it applies to the program only.
  LD_LIBRARY_PATH=$PWD/$out timeout -k 10 "$seconds" "$out/run.sh" "$tools/compute-sanitizer" "$torch" \
    --tool "$tool" --print-limit 10000 "$@" >"$log" 2>&1 || code=$?
  grep -E '^=========|FAILED|^test result:|^RESULT|^\[  PASSED' "$log" | head -150 || true
  local calls summary errors status=passed
  calls=$(grep -c 'Program hit' "$log" || true)
  summary=$(grep -oE '(ERROR|RACECHECK) SUMMARY: .*' "$log" | grep -v 'not printed' | tail -1 || true)
  errors=$(grep -oE '[0-9]+' <<<"$summary" | head -1 || true)
  [ "$code" != 124 ] || summary="no end within $seconds s"
  if [ "$code" != 0 ] || [ -z "$errors" ] || [ "$errors" -gt "$calls" ]; then status=FAILED failed=1; fi
  [ "$calls" = 0 ] || summary="$summary, $calls of them calls that CUDA answered with an error"
  table+=("$(printf '%-34s %-7s %s' "$name" "$status" "${summary:-no summary}, exit status $code")")
}

# Excluded because they provoke errors: out of memory (the driver or the budget refuses), broken
# captures (CUDA refuses calls and the capture), launches around the guard (the graphs race).
# Excluded because they check times, which the tools stretch: the trace with its limit on driver
# work, the costs, and measurements of the engine tests. The engine's idle cache and streaming
# decoder run in a separate last row: memcheck takes minutes for each, and a timeout gives no result
# for later tests of its row.
sanitize() {
  begin
  tools=$(dirname "$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | tail -1 || true)")
  [ -x "$tools/compute-sanitizer" ] || { echo "no compute-sanitizer here" >&2; exit 1; }
  local provoking='*OutOfMemory*:*ShortOfMemory*:*ABrokenCapture*:*AFailureBetweenPieces*:*CannotBeInstantiated*:*LaunchesAroundTheGuard*:*ALaunchCosts*'
  export VMMGRAPH_TRUST_REPLAYS=2000 VMMGRAPH_TRUST_CYCLES=100 VMMGRAPH_TRUST_SECONDS=20 VMMGRAPH_FORKED_CAPTURES=20
  export VMMGRAPH_ENGINE_STEPS=30 VMMGRAPH_READER_PRODUCTS=4
  sanitizer 90 "memcheck, library" memcheck "$out/gpu" graphs:: --include-ignored --nocapture --test-threads=1 \
    --skip out_of_memory --skip the_trace_takes --skip costs_on_this_machine
  sanitizer 240 "memcheck, libtorch" memcheck "$out/torch_test" --gtest_filter="-$provoking"
  sanitizer 150 "memcheck, engine" memcheck "$out/engine_test" --gtest_filter="-Measure.*:Idle.*:Offload.*:$provoking"
  sanitizer 130 "memcheck, trust" memcheck "$out/trust_test" --gtest_filter="-$provoking"
  # Hazards between threads of a block, in kernels of small graphs.
  export VMMGRAPH_TRUST_REPLAYS=200
  sanitizer 80 "racecheck, trust" racecheck "$out/trust_test" --gtest_filter='*ReplaysOfFourThreads*'
  sanitizer 420 "memcheck, engine, long" memcheck "$out/engine_test" --gtest_filter='Idle.*:Offload.*'
  end
}

bench() {
  torch=$(torch_folder)
  LD_LIBRARY_PATH=$PWD/$out "$out/run.sh" "$out/shootout" "$torch" --json "$out/shootout.json" "$@"
}

behind() {
  torch=$(torch_folder)
  LD_LIBRARY_PATH=$PWD/$out "$out/run.sh" "$out/behind" "$torch" "$@"
}

reports() {
  OUT=$out VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" PYTHONPATH="$PWD/$out/python" \
    VMMGRAPH_MEMORY_SAVER_LIBRARY="$PWD/$out/libvmmgraph_memory_saver.so" python3 "$out/reports/run_all.py" "$@"
}

saver() {
  PYTHONPATH="$PWD/$out/python" VMMGRAPH_LIBRARY="$PWD/$out/libvmmgraph_torch.so.0.1" \
    VMMGRAPH_MEMORY_SAVER_LIBRARY="$PWD/$out/libvmmgraph_memory_saver.so" python3 "$out/torch_memory_saver_suite.py" "$@"
}

case ${1:-} in
build) build ;;
run) run ;;
bench) bench "${@:2}" ;;
behind) behind "${@:2}" ;;
reports) reports "${@:2}" ;;
saver) saver "${@:2}" ;;
sanitize) sanitize ;;
poison) poison ;;
*)
  echo "usage: scripts/gpu.sh build|run|bench|behind|reports|saver|sanitize|poison" >&2
  exit 2
  ;;
esac

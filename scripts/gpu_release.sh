#!/usr/bin/env bash
# Runs the libtorch tests with a torch release different from the GPU machine's, in two steps like
# scripts/gpu.sh:
#   scripts/gpu_release.sh build RELEASE   on the build machine: splits the release's wheel into
#                                          pieces of 48 MiB, and builds library and tests for the
#                                          release, in build/gpu-RELEASE
#   scripts/gpu_release.sh run RELEASE     on the GPU machine: unpacks, runs the tests, prints one
#                                          table; needs only build/gpu-RELEASE
# RELEASE is like 2.15.0, with the CUDA major version of the GPU machine's torch. Uses its CUDA
# libraries: missing NCCL functions fail. Needs the tools of scripts/setup.sh test; the GPU machine
# needs Python 3.12, a C compiler and nm.
set -euo pipefail
cd "$(dirname "$0")/.."
release=${2:?a release of torch, such as 2.15.0}
out=build/gpu-$release
. scripts/gpu.bash
tests=(torch_test regions_test eager_test elastic_test executables_test rings_test)

build() {
  . scripts/wheels.bash
  local from=$PWD/build/torch-wheels/$release made=build/release-$release
  if [ ! -e "$from/complete" ]; then
    download --python-version 3.12 --platform manylinux_2_28_x86_64 "torch==$release"
    unpack "$from" torch torchgen functorch
    touch "$from/complete"
  fi
  cmake -S . -B "$made" -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$from/torch" \
    -DVMMGRAPH_CUDA_INCLUDE="$(echo "$PWD"/.venv/lib/python3*/site-packages/nvidia/cu13/include)" -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=OFF >/dev/null
  cmake --build "$made" --target vmmgraph_torch "${tests[@]}"
  rm -rf "$out"
  mkdir -p "$out/python" "$out/pieces"
  strip -o "$out/libvmmgraph_torch.so.0.1" "$made/libvmmgraph_torch.so.0.1.0"
  for test in "${tests[@]}"; do strip -o "$out/$test" "$made/tests/torch/$test"; done
  echo "functions that are looked for, and that this release has not:"
  comm -23 <(nm -D "$out/libvmmgraph_torch.so.0.1" | awk '$1 == "w" { print $2 }' | grep -E '^_ZN(2at|3c10)' | sort -u) \
    <(nm -D --defined-only "$from"/torch/lib/*.so | awk '{ print $3 }' | sort -u) | c++filt
  cp tests/torch/run.sh tests/python/test_gpu.py tests/python/test_around_gpu.py tests/python/test_soak_gpu.py tests/python/test_threads_gpu.py "$out/"
  cp -r python/vmmgraph "$out/python/vmmgraph"
  tar -C "$from" -cz --exclude=torch/include --exclude=torch/share --exclude='*.a' torch torchgen functorch | split -b 48M -d -a 2 - "$out/pieces/"
  du -sh "$out" "$out/pieces"
}

# Defines missing NCCL and NVSHMEM functions of the release's libraries as functions returning an
# error: Python loads no library with undefined functions.
stand_ins() {
  local wanted had
  wanted=$(for lib in "$1"/torch/lib/libtorch_*.so; do nm -D --undefined-only "$lib"; done | awk '{ print $2 }' | sed 's/@.*//' | grep -E '^(nccl|nvshmem)' | sort -u)
  had=$(for lib in "$1"/nvidia/*/lib/*.so* "$1"/torch/lib/*.so; do nm -D --defined-only "$lib"; done | awk '{ print $3 }' | sed 's/@.*//' | sort -u)
  comm -23 <(echo "$wanted") <(echo "$had") | sed 's/.*/int &(void) { return 1; }/' | cc -shared -fPIC -x c - -o "$2"
}

run() {
  nvidia-smi -L >/dev/null 2>&1 || { echo "no GPU here" >&2; exit 1; }
  local own into=${TMPDIR:-/tmp}/torch-$release
  own=$(dirname "$(torch_folder)")
  if [ ! -e "$into/complete" ]; then
    mkdir -p "$into"
    cat "$out"/pieces/* | tar -xz -C "$into"
    ln -sfn "$own/nvidia" "$into/nvidia"
    stand_ins "$into" "$into/stand_ins.so"
    touch "$into/complete"
  fi
  export PYTHONPATH=$into:$PWD/$out/python VMMGRAPH_LIBRARY=$PWD/$out/libvmmgraph_torch.so.0.1 LD_PRELOAD=$into/stand_ins.so
  # The machine's cuDNN may be older than the release's.
  export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1
  begin
  for test in "${tests[@]}"; do libtorch "$test" "$test" --gtest_filter=-RingCosts.*; done
  for test in test_gpu test_around_gpu test_soak_gpu test_threads_gpu; do row "$test" python3 "$out/$test.py"; done
  end
}

case $1 in
build) build ;;
run) run ;;
*)
  echo "usage: scripts/gpu_release.sh build|run RELEASE" >&2
  exit 2
  ;;
esac

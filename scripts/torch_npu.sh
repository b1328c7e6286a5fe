#!/usr/bin/env bash
# Builds the torch_npu component against torch_npu's own wheel, and runs its captures through
# torch_npu's code, with stand-ins of CANN (tests/standin-ascend) and of torch's CUDA libraries.
# Unpacks the needed parts of the wheels (0.6 GB) to build/torch_npu-wheels (0.6 GB) without
# installing. If unavailable, counted as SKIPPED. Needs .venv (scripts/setup.sh test).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/wheels.bash

wheels=build/torch_npu-wheels
if [ ! -e "$wheels/complete" ]; then
  rm -rf "$wheels"
  if ! download --platform manylinux_2_28_x86_64 torch==2.14.0 torch-npu==2.14.0; then
    echo "SKIPPED: the tests of the torch_npu component: torch 2.14.0 and torch-npu 2.14.0 are not to be had from the Python index"
    exit
  fi
  # Without the CUDA libraries: they must not be loaded beside torch_npu (both set the same options
  # of torch's allocators), and need a GPU's libraries.
  unpack "$wheels" torch/include/ torch_npu/include/ torch_npu/lib/ torch_npu/version.py \
    torch/lib/libc10.so torch/lib/libtorch.so torch/lib/libtorch_cpu.so torch/lib/libtorch_python.so torch/lib/libshm.so torch/lib/libgomp
  touch "$wheels/complete"
fi

# The stand-in of the tests of scripts/test.sh: build with the same options, or the build would
# replace it.
cargo test --locked --workspace --test platforms --no-run
standins=$PWD/build/torch_npu-standins
mkdir -p "$standins/cann"
ln -sfn "${CARGO_TARGET_DIR:-$PWD/target}/debug/deps/libstandin_ascend.so" "$standins/cann/libascendcl.so"
cc -shared -fPIC -Wl,-soname,libacl_op_compiler.so -o "$standins/cann/libacl_op_compiler.so" tests/torch_npu/nothing.c
python3 tests/torch/standins.py "$standins/rest" "$wheels/torch/lib" "$wheels/torch_npu/lib" "$standins/cann"

# The archive of scripts/test.sh, if present; VMMGRAPH_ARCHIVE overrides.
archive=${VMMGRAPH_ARCHIVE:-$PWD/target/debug/libvmmgraph.a}
[ -e "$archive" ] || archive=
cmake -S . -B build/torch_npu -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TORCH_NPU=ON -DVMMGRAPH_TORCH_NPU_ROOT="$PWD/$wheels" \
  -DVMMGRAPH_PREBUILT_ARCHIVE="$archive" -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=OFF -DVMMGRAPH_MEMORY_SAVER=OFF \
  -DVMMGRAPH_TORCH_NPU_PYTHON="$PWD/.venv/bin/python" \
  -DVMMGRAPH_TORCH_NPU_LIBRARIES="$PWD/$wheels/torch/lib:$PWD/$wheels/torch_npu/lib:$standins/cann:$standins/rest"
cmake --build build/torch_npu
ctest --test-dir build/torch_npu --output-on-failure
echo "SKIPPED: 0 tests of the torch_npu component"

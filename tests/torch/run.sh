#!/bin/sh
# run.sh PROGRAM TORCH_FOLDER [ARGUMENTS]: runs a libtorch program with the pip torch's libraries,
# or prints SKIPPED without a GPU.
program=$1
torch=$2
shift 2
if ! nvidia-smi -L >/dev/null 2>&1; then
  echo "SKIPPED: needs a GPU, scripts/gpu.sh runs it"
  exit 77
fi
path=$torch/lib
for folder in "$torch"/../nvidia/*/lib; do path=$path:$folder; done
LD_LIBRARY_PATH=$path${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH} VMMGRAPH_DRIVER=cuda exec "$program" "$@"

#!/usr/bin/env bash
# Fetches the headers of a torch release or CUDA major version, without libraries, unless present.
#   scripts/torch-headers.sh torch RELEASE  build/torch-headers/RELEASE/torch: include, graphs.py
#   scripts/torch-headers.sh cuda MAJOR     build/cuda-headers/MAJOR: include; the runtime in lib
# Needs .venv (scripts/setup.sh wheel), or a pip in PIP. HEADERS names a folder in place of build.
#
# Wheels of torch for macOS are small and have all CUDA-related headers.
set -euo pipefail
cd "$(dirname "$0")/.."
headers=${HEADERS:-build}
. scripts/wheels.bash

case ${1:-} in
torch)
  into=$headers/torch-headers/$2
  [ -e "$into/complete" ] && [ -e "$into/torch/cuda/graphs.py" ] && exit
  rm -rf "$into"
  download --python-version 3.12 --platform macosx_11_0_arm64 --platform macosx_14_0_arm64 "torch==$2"
  unpack "$into" torch/include/ torch/cuda/graphs.py
  touch "$into/complete"
  ;;
cuda)
  into=$headers/cuda-headers/$2
  [ -e "$into/complete" ] && exit
  # The oldest release of the major version used by a torch in torch-releases.txt: later ones
  # contain all of its functions.
  case $2 in
  12) wheels=(nvidia-cuda-runtime-cu12==12.6.77 nvidia-cuda-nvcc-cu12==12.6.77) folder=nvidia/cuda_runtime ;;
  13) wheels=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88) folder=nvidia/cu13 ;;
  *) echo "CUDA $2: there are 12 and 13" >&2 && exit 2 ;;
  esac
  download "${wheels[@]}"
  rm -rf "$into" "$into.new"
  # Before 13, crt is part of the compiler package.
  unpack "$into.new" "$folder/include/" "$folder/lib/" nvidia/cuda_nvcc/include/crt/
  mv "$into.new/$folder" "$into"
  [ ! -e "$into.new/nvidia/cuda_nvcc" ] || mv "$into.new/nvidia/cuda_nvcc/include/crt" "$into/include/"
  rm -rf "$into.new"
  touch "$into/complete"
  ;;
*)
  sed -n '2,4s/^# *//p' "$0" >&2
  exit 2
  ;;
esac

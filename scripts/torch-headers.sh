#!/usr/bin/env bash
# The headers of a torch release or of a CUDA major version, without its libraries; what is there already is not fetched again.
#   scripts/torch-headers.sh torch RELEASE    build/torch-headers/RELEASE/torch/include, and the one file in Python that ours stands under
#   scripts/torch-headers.sh cuda MAJOR       build/cuda-headers/MAJOR: include, and the runtime to link with, in lib
# Needs .venv (scripts/setup.sh test), or a pip in PIP. HEADERS names another folder than build.
#
# Wheels of torch for macOS are small and have all CUDA-facing headers.
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
  # The oldest of the major version that a release in torch-releases.txt was built with: what it has, all later ones have.
  case $2 in
  12) wheels=(nvidia-cuda-runtime-cu12==12.6.77 nvidia-cuda-nvcc-cu12==12.6.77) folder=nvidia/cuda_runtime ;;
  13) wheels=(nvidia-cuda-runtime==13.0.96 nvidia-cuda-crt==13.0.88) folder=nvidia/cu13 ;;
  *) echo "CUDA $2: there are 12 and 13" >&2 && exit 2 ;;
  esac
  download "${wheels[@]}"
  rm -rf "$into" "$into.new"
  # Before 13, crt is part of the compiler.
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

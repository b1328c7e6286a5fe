#!/usr/bin/env bash
# toolkit.sh TORCH: prints the folder of a CUDA 13.0 toolkit sufficient for find_package(Torch),
# created once in .venv-toolkit from pip packages (300 MB, half a minute). An installed nvcc takes
# precedence.
#
# nvcc, its headers, the CUDA runtime and its compiler parts are real. The other libraries (cuBLAS,
# cuDNN, NVRTC, …; 2.5 GB) are stand-ins that abort when called: programs only link and load.
set -euo pipefail
torch=${1:?the folder of a pip torch}
if nvcc=$(command -v nvcc); then
  dirname "$(dirname "$(readlink -f "$nvcc")")"
  exit
fi
here=$(cd "$(dirname "$0")" && pwd)
venv=$here/../../.venv-toolkit
wheels=(nvidia-cuda-nvcc==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-cccl==13.0.85 nvidia-cuda-runtime==13.0.96)
stamp=$venv/$(IFS=_; echo "${wheels[*]}")
mkdir -p "$venv"
venv=$(cd "$venv" && pwd)
# Prevents concurrent installations.
exec 9>"$venv/lock"
flock 9
if [ ! -e "$stamp" ]; then
  echo "installing ${wheels[*]} into .venv-toolkit" >&2
  python3 -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps "${wheels[@]}"
  touch "$stamp"
fi
root=$(echo "$venv"/lib/python3*/site-packages/nvidia/cu13)
# Folders and names expected by CMake and linkers.
ln -sfn lib "$root/lib64"
ln -sf libcudart.so.13 "$root/lib/libcudart.so"
python3 "$here/standins.py" "$root/lib/standins" "$torch/lib" "$root/lib" >&2
if [ ! -e "$root/lib/libnvrtc.so" ]; then
  # torch::nvrtc is in TORCH_LIBRARIES, but none of its functions is linked.
  echo 'int nvrtc_standin;' | cc -shared -fPIC -x c -Wl,-soname,libnvrtc.so.13 -o "$root/lib/libnvrtc.so.13" -
  ln -s libnvrtc.so.13 "$root/lib/libnvrtc.so"
fi
echo "$root"

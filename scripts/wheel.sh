#!/usr/bin/env bash
# wheel.sh [RELEASE...]: builds a Python wheel in build/wheels. RELEASE is a minor version of torch:
# 2.11 for every CUDA major version of its wheels, or 2.11-cu13 for one; default: all of
# torch-releases.txt. Needs the tools of scripts/setup.sh wheel.
#
# VMMGRAPH_ARCHIVE and VMMGRAPH_TORCH_ARCHIVE name prebuilt archives of the core, without and with
# the bridge. VMMGRAPH_TORCH_BUILT names a build folder with objects for one release
# ("2.11-cu13=build/torch"). VMMGRAPH_WHEEL_FOR_TESTS=1 treats warnings as errors, and packs the
# core faster and larger.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
arguments=("--config-setting=wheel.tags=py3-none-manylinux_2_28_x86_64" "--config-setting=cmake.define.VMMGRAPH_RELEASES=${*:-all}")
for name in ARCHIVE TORCH_ARCHIVE; do
  from=VMMGRAPH_$name
  [ -z "${!from:-}" ] || arguments+=("--config-setting=cmake.define.VMMGRAPH_PREBUILT_$name=${!from}")
done
[ -z "${VMMGRAPH_TORCH_BUILT:-}" ] || arguments+=("--config-setting=cmake.define.VMMGRAPH_TORCH_BUILT=$VMMGRAPH_TORCH_BUILT")
if [ -n "${VMMGRAPH_WHEEL_FOR_TESTS:-}" ]; then
  arguments+=("--config-setting=cmake.define.VMMGRAPH_WHEEL_WERROR=ON" "--config-setting=cmake.define.VMMGRAPH_PACK_LEVEL=0")
fi
mkdir -p build/wheels
rm -f build/wheels/vmmgraph-*.whl
# CMake searches for python3 and must find .venv's, with its modules.
PATH=$PWD/.venv/bin:$PATH "$python" -m build --wheel --no-isolation --skip-dependency-check --outdir build/wheels "${arguments[@]}" .
ls -l build/wheels/vmmgraph-*.whl

#!/usr/bin/env bash
# wheel.sh [RELEASE...]: a Python wheel in build/wheels. RELEASE is a minor version of torch, such as 2.11, with every CUDA major version of
# its wheels, or 2.11-cu13 with one; none: all of torch-releases.txt. Needs what scripts/setup.sh test installs.
#
# VMMGRAPH_ARCHIVE and VMMGRAPH_TORCH_ARCHIVE name archives of the core that were built already, without and with the bridge;
# VMMGRAPH_TORCH_BUILT a build folder whose objects serve one release ("2.11-cu13=build/torch"). VMMGRAPH_WHEEL_FOR_TESTS=1: warnings are
# errors, and the packed core is larger, which takes less time.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
arguments=("--config-setting=wheel.tags=py3-none-manylinux_2_28_x86_64" "--config-setting=cmake.define.VMMGRAPH_RELEASES=$*")
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
# CMake looks for python3, as .venv's modules are the ones that are there.
PATH=$PWD/.venv/bin:$PATH "$python" -m build --wheel --no-isolation --skip-dependency-check --outdir build/wheels "${arguments[@]}" python
ls -l build/wheels/vmmgraph-*.whl

#!/usr/bin/env bash
# wheel.sh [RELEASE...]: a Python wheel in build/wheels. RELEASE is a minor version of torch, such as 2.11, with every CUDA major version of
# its wheels, or 2.11-cu13 with one; none: all of torch-releases.txt. Needs what scripts/setup.sh test installs.
#
# VMMGRAPH_ARCHIVE and VMMGRAPH_TORCH_ARCHIVE name archives of the core that were built already, without and with the bridge.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$PWD/.venv/bin/python
arguments=("--config-setting=wheel.tags=py3-none-manylinux_2_28_x86_64" "--config-setting=cmake.define.VMMGRAPH_RELEASES=$*")
for name in ARCHIVE TORCH_ARCHIVE; do
  from=VMMGRAPH_$name
  [ -z "${!from:-}" ] || arguments+=("--config-setting=cmake.define.VMMGRAPH_PREBUILT_$name=${!from}")
done
mkdir -p build/wheels
rm -f build/wheels/vmmgraph-*.whl
# CMake looks for python3, as .venv's modules are the ones that are there.
PATH=$PWD/.venv/bin:$PATH "$python" -m build --wheel --no-isolation --skip-dependency-check --outdir build/wheels "${arguments[@]}" python
ls -l build/wheels/vmmgraph-*.whl

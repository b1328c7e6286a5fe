#!/usr/bin/env bash
# Holds what VmmGraph declares of the vendors' libraries against the vendors' headers, of several versions: prototypes, sizes, offsets and
# constants (conformance/tests/abi.rs). The headers come out of Python packages that carry them, into build/abi; none is in the repository.
# What cannot be had is counted as SKIPPED; what is there already is not fetched again. Needs .venv (scripts/setup.sh test).
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/wheels.bash

missing=0
# fetch PLATFORM-VERSION PACKAGE FOLDER-IN-IT: the folder becomes build/abi/PLATFORM-VERSION.
fetch() {
  local into=build/abi/$1
  [ -e "$into" ] && return
  rm -rf "${work:?}"/* "$into.new"
  if download --python-version 3.11 --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux2014_x86_64 "$2"; then
    unpack "$into.new" "$3/"
    mv "$into.new/$3" "$into"
    rm -rf "$into.new"
  else
    echo "SKIPPED header proof $1: $2 is not to be had from the Python index"
    missing=$((missing + 1))
  fi
}
# These must be the rows of conformance/tests/abi.rs.
fetch hip-6.2 triton==3.5.0 triton/backends/amd/include
fetch hip-7.1 triton==3.9.0 triton/backends/amd/include
fetch ascend-2.11 torch-npu==2.11.0.post3 torch_npu/include/third_party/acl/inc
fetch ascend-2.14 torch-npu==2.14.0 torch_npu/include/third_party/acl/inc

# No package carries Cambricon's: only where CNToolkit is installed, in its usual folder or in that of its own variable.
neuware=${NEUWARE_HOME:-/usr/local/neuware}/include
if [ -e "$neuware/cn_api.h" ]; then
  ln -sfn "$neuware" build/abi/mlu-installed
else
  rm -f build/abi/mlu-installed
  echo "SKIPPED header proof mlu installed: no CNToolkit here (NEUWARE_HOME)"
  missing=$((missing + 1))
fi

# --workspace: as scripts/test.sh has built it.
VMMGRAPH_ABI_HEADERS=$PWD/build/abi cargo test --locked --workspace --features bridge --test abi -- --include-ignored --nocapture
echo "SKIPPED: $missing header proofs need the Python index or an installed toolkit"

#!/usr/bin/env bash
# Checks VmmGraph's declarations of vendor libraries against the vendors' headers, in several
# versions: prototypes, sizes, offsets and constants (conformance/tests/abi.rs). Extracts the
# headers from Python packages into build/abi; the repository has none. Counts unavailable packages
# as SKIPPED; keeps existing downloads. Needs .venv (scripts/setup.sh test).
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
# Must match the rows of conformance/tests/abi.rs.
fetch hip-6.2 triton==3.5.0 triton/backends/amd/include
fetch hip-7.1 triton==3.9.0 triton/backends/amd/include
fetch ascend-2.11 torch-npu==2.11.0.post3 torch_npu/include/third_party/acl/inc
fetch ascend-2.14 torch-npu==2.14.0 torch_npu/include/third_party/acl/inc

# Cambricon publishes no package: needs an installed CNToolkit, in its default folder or in
# NEUWARE_HOME.
neuware=${NEUWARE_HOME:-/usr/local/neuware}/include
if [ -e "$neuware/cn_api.h" ]; then
  ln -sfn "$neuware" build/abi/mlu-installed
else
  rm -f build/abi/mlu-installed
  echo "SKIPPED header proof mlu installed: no CNToolkit here (NEUWARE_HOME)"
  missing=$((missing + 1))
fi

# --workspace: reuses the build of scripts/test.sh.
VMMGRAPH_ABI_HEADERS=$PWD/build/abi cargo test --locked --workspace --test abi -- --include-ignored --nocapture
echo "SKIPPED: $missing header proofs need the Python index or an installed toolkit"

#!/usr/bin/env bash
# Compiles cpp/torch from its one source against the headers of every torch release that is supported, and of the newest one on the
# index, and checks that no virtual function of any of them is left to torch (forwards.sh). Nothing is linked or run.
#
# The releases are those of scripts/torch-releases.txt; their headers stay in build/torch-headers. VMMGRAPH_COMPILED names build folders that
# have compiled these very sources with the same warnings ("2.11.0=build/torch"): of those releases only what forwards.sh reads is compiled.
set -euo pipefail
cd "$(dirname "$0")/../.."

mapfile -t releases < <(sed -nE 's/^([0-9][^ ]*) .*/\1/p' scripts/torch-releases.txt)
headers=build/torch-headers
objects=build/torch-matrix
site=$(echo .venv/lib/python3*/site-packages)
bridge=build/torch/cargo-torch/cxxbridge

if [ ! -e "$bridge/vmmgraph/src/bridge.rs.h" ]; then
  cmake -S . -B build/torch -G Ninja -DCMAKE_BUILD_TYPE=Release -DVMMGRAPH_TORCH=ON -DVMMGRAPH_TORCH_ROOT="$PWD/$site/torch" \
    -DVMMGRAPH_TESTS=ON -DVMMGRAPH_EXAMPLES=OFF
  cmake --build build/torch --target vmmgraph_torch_archive
fi

fetch() { scripts/torch-headers.sh torch "$1"; }

# The flags of a release, and the headers that nearly every file needs, read once a release.
flags() {
  local include=$headers/$1/torch/include
  echo "-std=c++20 -O0 -fPIC -Wall -Wextra -Werror -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -Iinclude -I$bridge \
    -isystem $include -isystem $include/torch/csrc/api/include -isystem $site/nvidia/cu13/include"
}

precompile() {
  printf '#include <%s>\n' ATen/core/Tensor.h ATen/cuda/CUDAGraph.h c10/cuda/CUDACachingAllocator.h c10/cuda/CUDAGuard.h \
    torch/csrc/cuda/CUDAPluggableAllocator.h >"$objects/$1/common.hpp"
  # shellcheck disable=SC2046
  "${CXX:-g++}" $(flags "$1") -x c++-header "$objects/$1/common.hpp" -o "$objects/$1/common.hpp.gch"
}

compile() {
  # shellcheck disable=SC2046
  "${CXX:-g++}" $(flags "$1") -include "$objects/$1/common.hpp" -c "$2" -o "$objects/$1/$(basename "$2" .cpp).o"
}
export -f flags compile
export headers objects site bridge

# elsewhere RELEASE: whether a folder of VMMGRAPH_COMPILED has compiled everything as it is now.
elsewhere() {
  local one folder=''
  for one in ${VMMGRAPH_COMPILED:-}; do
    [ "${one%%=*}" != "$1" ] || folder=${one#*=}
  done
  [ -n "$folder" ] && grep -q '^VMMGRAPH_WERROR:BOOL=ON$' "$folder/CMakeCache.txt" 2>/dev/null || return 1
  [[ $(ninja -C "$folder" -n vmmgraph_torch 2>&1) == *"no work to do"* ]] || return 1
  echo "compiled in $folder"
}

# build RELEASE
build() {
  mkdir -p "$objects/$1"
  if elsewhere "$1"; then
    : >"$objects/$1/common.hpp"
    rm -f "$objects/$1/common.hpp.gch"
    compile "$1" cpp/torch/block_allocator.cpp && tests/torch/forwards.sh check "$objects/$1/block_allocator.o"
    return
  fi
  precompile "$1" &&
    printf '%s\0' cpp/torch/*.cpp cpp/engine/*.cpp | xargs -0 -P"$(nproc)" -I{} bash -c "compile $1 {}" &&
    tests/torch/forwards.sh check "$objects/$1/block_allocator.o"
}

failed=()
skipped=0
for release in "${releases[@]}"; do
  echo "--- torch $release"
  { fetch "$release" && build "$release"; } || failed+=("$release")
done

newest=$(.venv/bin/python -m pip --disable-pip-version-check index versions torch 2>/dev/null | sed -nE "1s/^torch \\((.*)\\)$/\\1/p" || true)
if [[ -z $newest ]]; then
  echo "--- newest torch: SKIPPED, the index does not answer"
  skipped=1
elif [[ " ${releases[*]} " == *" $newest "* ]]; then
  echo "--- newest torch: $newest, see above"
else
  echo "--- torch $newest, the newest"
  if fetch "$newest"; then
    build "$newest" || failed+=("$newest")
  else
    echo "SKIPPED: its headers cannot be had"
    skipped=1
  fi
fi

echo "${#failed[@]} releases failed${failed[*]:+: ${failed[*]}}; $skipped skipped"
[ ${#failed[@]} = 0 ]

#!/usr/bin/env bash
# Compiles cpp/torch and cpp/engine against the headers of every supported torch release and of the
# newest one on the index. Checks virtual functions (forwards.sh) and Python names (names.py). Links
# and runs nothing.
#
# Releases: scripts/torch-releases.txt; headers stay in build/torch-headers. All files form one
# translation unit, because parsing torch's headers dominates, so unnamed namespaces must not repeat
# a name.
set -euo pipefail
cd "$(dirname "$0")/../.."

mapfile -t releases < <(sed -nE 's/^([0-9][^ ]*) .*/\1/p' scripts/torch-releases.txt)
objects=build/torch-matrix
site=$(echo .venv/lib/python3*/site-packages)
bridge=target/cxxbridge

# Writes the bridge's headers.
cargo check --locked -p vmmgraph-bridge

newest=$(.venv/bin/python -m pip --disable-pip-version-check index versions torch 2>/dev/null | sed -nE "1s/^torch \\((.*)\\)$/\\1/p" || true)
skipped=0
if [[ -z $newest ]]; then
  echo "--- newest torch: SKIPPED, the index does not answer"
  skipped=1
elif [[ " ${releases[*]} " == *" $newest "* ]]; then
  echo "--- newest torch: $newest, one of those below"
elif scripts/torch-headers.sh torch "$newest"; then
  echo "--- newest torch: $newest, which is not in scripts/torch-releases.txt"
  releases+=("$newest")
else
  echo "--- newest torch: $newest, SKIPPED, its headers cannot be had"
  skipped=1
fi

mkdir -p "$objects"
printf "#include \"$PWD/%s\"\n" cpp/torch/*.cpp cpp/engine/*.cpp >"$objects/all.cpp"
cat >>"$objects/all.cpp" <<'END'
#ifdef TORCHS_WORKSPACES
static_assert(std::is_same_v<vmmgraph::torch::compat::WorkspaceMap, TORCHS_WORKSPACES>);
static_assert(vmmgraph::torch::compat::workspaces_have_mutex == TORCHS_WORKSPACES_HAVE_MUTEX);
#endif
END

# workspaces HEADER: options describing torch's tables of cuBLAS workspaces, which compat.hpp
# redeclares to avoid cuBLAS's headers. Empty before 2.8.
workspaces() {
  local map mutex=false
  map=$(sed -nE 's/^.*(std::map<std::tuple<void ?\*, void ?\*>, .*>)(&| map;).*$/\1/p' "$1" | head -1)
  ! grep -q 'struct WorkspaceMapWithMutex' "$1" || mutex=true
  [ -z "$map" ] || printf -- '-DTORCHS_WORKSPACES=%s\n' "$map"
  [ -z "$map" ] || printf -- '-DTORCHS_WORKSPACES_HAVE_MUTEX=%s\n' "$mutex"
}
export -f workspaces

# build RELEASE: prints at the end, because builds run in parallel.
build() {
  local include=build/torch-headers/$1/torch/include object=$objects/$1.o result=0 tables=()
  {
    scripts/torch-headers.sh torch "$1" && mapfile -t tables < <(workspaces "$include/ATen/cuda/CUDAContextLight.h") &&
      [[ ${#tables[@]} = 2 || $1 == 2.[67].* ]] &&
      "${CXX:-g++}" "${tables[@]}" -std=c++20 -O0 -fPIC -Wall -Wextra -Werror -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -Iinclude "-I$bridge" \
        -isystem "$include" -isystem "$include/torch/csrc/api/include" -isystem "$site/nvidia/cu13/include" -c "$objects/all.cpp" -o "$object" &&
      tests/torch/forwards.sh check "$object" && python3 tests/torch/names.py "build/torch-headers/$1/torch/cuda/graphs.py"
  } >"$objects/$1.log" 2>&1 || result=1
  printf -- '--- torch %s\n%s\n' "$1" "$(<"$objects/$1.log")"
  [ $result = 0 ] || : >"$objects/$1.failed"
}
export -f build
export objects site bridge

rm -f "$objects"/*.failed
printf '%s\0' "${releases[@]}" | xargs -0 -P"$(nproc)" -I{} bash -c 'build {}'
failed=()
for release in "${releases[@]}"; do
  [ ! -e "$objects/$release.failed" ] || failed+=("$release")
done
echo "${#releases[@]} releases, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}; $skipped skipped"
[ ${#failed[@]} = 0 ]

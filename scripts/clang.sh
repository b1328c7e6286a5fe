#!/usr/bin/env bash
# Compiles C++ for users with Clang: the public headers, the memory saver, and cpp/torch with
# cpp/engine as one unit. Prints SKIPPED if clang is missing and cannot be installed. Needs the
# build of make test.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v clang++ >/dev/null; then
  as_root=()
  [ "$(id -u)" = 0 ] || as_root=(sudo -n)
  if ! DEBIAN_FRONTEND=noninteractive "${as_root[@]}" apt-get install -y -qq --no-install-recommends clang >/dev/null 2>&1; then
    echo "SKIPPED: clang (it is not there and cannot be installed)"
    exit 0
  fi
fi
clang++ --version | head -1
read_by() { "$1" "${@:2}" -Wall -Wextra -Werror -Iinclude -fsyntax-only; }

shopt -s extglob
for header in include/vmmgraph/!(torch*|engine|inputs).hpp; do
  for standard in 17 20; do
    read_by clang++ -x c++ -std=c++$standard -Wpedantic -Wno-pragma-once-outside-header "$header"
  done
done
for header in include/vmmgraph/{vmmgraph,torch_c}.h; do
  read_by clang -x c -std=c99 -Wpedantic "$header"
done
for source in cpp/memory_saver/*.cpp; do
  read_by clang++ -std=c++17 -DVMMGRAPH_CORE_FILE='"libvmmgraph.so"' "$source"
done

site=$(echo .venv/lib/python3*/site-packages)
printf "#include \"$PWD/%s\"\n" cpp/torch/*.cpp cpp/engine/*.cpp >build/clang.cpp
read_by clang++ -std=c++20 -DC10_CUDA_NO_CMAKE_CONFIGURE_FILE -Itarget/cxxbridge -isystem "$site/torch/include" \
  -isystem "$site/torch/include/torch/csrc/api/include" -isystem "$site/nvidia/cu13/include" build/clang.cpp
echo "0 errors, 0 warnings"

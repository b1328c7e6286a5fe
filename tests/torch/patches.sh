#!/usr/bin/env bash
# Compares the headers of patch releases which share a library (cpp/torch/release.hpp). Fails if a
# header differs, except version numbers and declarations of native kernels (ATen/ops/*_native.h),
# which this library does not include.
set -euo pipefail
cd "$(dirname "$0")/../.."
found=0
while read -r one other; do
  for release in "$one" "$other"; do scripts/torch-headers.sh torch "$release"; done
  differing=$(diff -rq "build/torch-headers/$one/torch/include" "build/torch-headers/$other/torch/include" |
    grep -vE '/(torch/headeronly/version|caffe2/core/macros|ATen/ops/[a-z_]+_native)\.h( |$)' || true)
  [ -z "$differing" ] || { echo "headers of torch $one and $other differ:"; echo "$differing"; exit 1; }
  echo "headers of torch $one and $other are equal"
  found=$((found + 1))
done < <(sed -nE 's/^ *\{"([0-9.]+)", "([0-9.]+)"\},$/\1 \2/p' cpp/torch/release.hpp)
[ "$found" -ge 2 ]

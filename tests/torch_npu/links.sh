#!/usr/bin/env bash
# links.sh LIBRARY WHEELS OBJECT...: torch_npu's own libraries define all symbols the component
# needs, and the component overrides all virtual functions of torch_npu's allocator.
set -euo pipefail
library=$1 wheels=$2
shift 2

defined() { nm -D --defined-only "$@" | awk 'NF > 1 { sub(/@.*/, "", $NF); print $NF }' | sort -u; }
undefined() { nm -D --undefined-only "$1" | awk '$(NF - 1) == "U" { sub(/@.*/, "", $NF); print $NF }' | sort -u; }

missing=$(comm -23 <(undefined "$library" | grep -E 'c10|3c10|2at|5torch|at_npu|Ascend|op_plugin|formatErrorCode' | grep -v '^_ZTI') \
  <(defined "$wheels/torch/lib/libc10.so" "$wheels/torch/lib/libtorch_cpu.so" "$wheels/torch_npu/lib/libtorch_npu.so"))
if [ -n "$missing" ]; then
  echo "not in the wheels' libraries:" && c++filt <<<"$missing"
  exit 1
fi
# Must not be exported.
if defined "$library" | c++filt | grep -vE '^(typeinfo|vtable|vmmgraph::torch_npu::|VMMGRAPH|_)' | grep -E 'c10_npu|formatErrorCode'; then
  echo "the lines above are exported"
  exit 1
fi

# Overrides are local symbols; functions of the base have names.
object=$(printf '%s\n' "$@" | grep 'allocator\.cpp')
read -r offset size index < <(readelf -sW "$object" | awk '/_ZTVN8vmmgraph9torch_npu12_GLOBAL__N_114BlockAllocator/ { print $2, $3, $7 }')
section=$(readelf -SW "$object" | sed -nE "s/^ *\[ *$index\] ([^ ]+) .*/\1/p")
slots=$(readelf -rW "$object" | awk -v section="'.rela$section'" -v begin="$((16#$offset))" -v size="$size" '
  function number(hex,  i, n) { n = 0; for (i = 1; i <= length(hex); i++) n = n * 16 + index("0123456789abcdef", substr(hex, i, 1)) - 1; return n }
  /^Relocation section/ { inside = ($3 == section); next }
  inside && $3 == "R_X86_64_64" { at = number($1) - begin; if (at > 8 && at < size) print $5 }')
inherited=$(grep -vE '^\.text|BlockAllocator' <<<"$slots" || true)
if [ -n "$inherited" ]; then
  echo "left to torch_npu's base:" && c++filt <<<"$inherited"
  exit 1
fi
count=$(wc -l <<<"$slots")
# torch_npu 2.14 has 59, with two destructors.
[ "$count" -gt 50 ] || { echo "$count slots read: the check reads its object wrongly"; exit 1; }
echo "$count virtual functions, none of them torch_npu's own"

#!/usr/bin/env bash
# Reads from an object file the function in each virtual slot of BlockAllocator.
#   forwards.sh check OBJECT                 fails if a slot has torch's own function, or forwards a
#                                            function in `ours`
#   forwards.sh self-test SOURCES COMPILER…  compiles broken copies of cpp/torch with the command, and
#                                            fails if the check accepts one
# Compile objects with -O0, which keeps the vtable of Forwarding with the slots' names.
set -euo pipefail

# Final in torch: a cudaMemcpyAsync on the current stream, as in the native allocator.
allowed='::copy_data\(void\*, void const\*, unsigned long\) const$'
# Must distinguish blocks and capture pools from torch's, if the release has the function.
ours='allocate|allocateWithAddress|raw_alloc|raw_alloc_with_stream|raw_delete|raw_deleter|getBaseAllocation|shareIpcHandle'
ours+='|beginAllocateToPool|endAllocateToPool|releasePool|ensureExistsAndIncrefPool|createOrIncrefPool|setUseOnOOM'
ours+='|markCaptureBegin|markCaptureEnd|setNoSplit|checkPoolLiveAllocations|getCheckpointState|getContextForPointer|annotateMemory'

# slots OBJECT VTABLE: "offset target" of each slot of the vtable with this mangled prefix.
slots() {
  local index offset size section
  read -r offset size index < <(readelf -sW "$1" | awk -v name="$2" 'index($8, name) == 1 { print $2, $3, $7; exit }')
  section=$(readelf -SW "$1" | sed -nE "s/^ *\[ *$index\] ([^ ]+) .*/\1/p")
  readelf -rW "$1" | awk -v section="'.rela$section'" -v begin="$((16#$offset))" -v size="$size" '
    function number(hex,  i, n) { n = 0; for (i = 1; i <= length(hex); i++) n = n * 16 + index("0123456789abcdef", substr(hex, i, 1)) - 1; return n }
    /^Relocation section/ { inside = ($3 == section); next }
    inside && $3 == "R_X86_64_64" {
      at = number($1) - begin
      if (at > 8 && at < size) print at, $5   # the first slot is the type
    }'
}

check() {
  local object=$1 bad=0 count=0 slot forwarded target
  declare -A own=()
  while read -r slot target; do own[$slot]=$target; done < <(slots "$object" _ZTVN8vmmgraph5torch12_GLOBAL__N_114BlockAllocator)
  while read -r slot forwarded; do
    count=$((count + 1))
    target=${own[$slot]:?the two tables differ}
    forwarded=$(c++filt "$forwarded")
    if [[ ! $forwarded =~ ^vmmgraph::torch::Forwarding\< && ! $forwarded =~ $allowed && $target != .text* ]]; then
      echo "not forwarded: $forwarded"
      bad=1
    fi
    if [[ $forwarded =~ \>::($ours)\( || $forwarded =~ recordStream.*CUDAStream\) ]] && [[ $target != .text* ]]; then
      echo "passed on, whatever it is about: $forwarded"
      bad=1
    fi
  done < <(slots "$object" _ZTVN8vmmgraph5torch10Forwarding)
  # Torch 2.6 has 41.
  if [ "$count" -lt 40 ] || [ "$count" != "${#own[@]}" ]; then
    echo "$object: $count and ${#own[@]} virtual functions read; the check reads its object wrongly"
    bad=1
  fi
  echo "$count virtual functions"
  return $bad
}

self_test() {
  local sources=$1 work
  shift
  work=$(mktemp -d)
  # shellcheck disable=SC2064
  trap "rm -rf '$work'" EXIT
  # Each line: a file, a sed command, and the expected complaint.
  while IFS='|' read -r file spoil complaint; do
    rm -rf "${work:?}"/*
    cp "$sources"/* "$work"
    sed -i "$spoil" "$work/$file"
    cmp -s "$sources/$file" "$work/$file" && { echo "$spoil changes nothing in $file"; return 1; }
    "$@" -c "$work/block_allocator.cpp" -o "$work/spoilt.o"
    if check "$work/spoilt.o" >"$work/said"; then
      echo "the check accepts $file after $spoil"
      return 1
    fi
    grep -q "$complaint" "$work/said" || { echo "another complaint than '$complaint':"; cat "$work/said"; return 1; }
  done <<'END'
forwarding.hpp|/bool isHistoryEnabled()/d|not forwarded: .*::isHistoryEnabled()
forwarding.hpp|s/void setMemoryFraction(double fraction, Device device)/void setMemoryFraction(double fraction, int device)/|not forwarded: .*::setMemoryFraction
block_allocator.cpp|s/void releasePool(Device device, Pool pool) override/void poolIsOver(Device device, Pool pool)/|passed on.*::releasePool
END
  echo "every spoilt copy was refused"
}

case $1 in
check) check "$2" ;;
self-test) shift && self_test "$@" ;;
esac

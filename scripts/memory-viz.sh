#!/usr/bin/env bash
# Fetches MemoryViz.js, torch's browser viewer for memory snapshots, and its dependency d3 to
# build/memory-viz, unless present. Torch's wheels omit the viewer; Debian's source of torch 2.6 has
# it, and mpld3's wheel has d3 5.
set -euo pipefail
cd "$(dirname "$0")/.."
out=build/memory-viz
[ -e "$out/complete" ] && exit
. scripts/wheels.bash
source=https://deb.debian.org/debian/pool/main/p/pytorch/pytorch_2.6.0+dfsg.orig.tar.xz
python3 -c 'import sys, urllib.request; urllib.request.urlretrieve(sys.argv[1], sys.argv[2])' "$source" "$work/torch.tar.xz"
echo "099a9601bc40d67656e75735c44abedb0fbe92d08817852ab7472eebb7e6ddff  $work/torch.tar.xz" | sha256sum --quiet -c
tar xJf "$work/torch.tar.xz" -C "$work" pytorch-v2.6.0/torch/utils/viz/MemoryViz.js
download mpld3==0.5.12
unpack "$work" mpld3/js/d3.v5.min.js
mkdir -p "$out"
cp "$work/pytorch-v2.6.0/torch/utils/viz/MemoryViz.js" "$work/mpld3/js/d3.v5.min.js" "$out"
touch "$out/complete"

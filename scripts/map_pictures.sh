#!/usr/bin/env bash
# Draws docs/map-*.png: the page maps of two arenas, from the traces in tests/data on the host
# driver. Needs Chromium (scripts/setup.sh test).
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -r "$folder"' EXIT
cargo run --locked --quiet --example map -- "$folder" >"$folder/reports.txt"

# picture NAME TRACE HASH HEIGHT: draws at 1440 pixels, legible on a page of text and small in the
# repository.
picture() {
  chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1 --window-size="1440,$4" \
    --user-data-dir="$folder/profile" --screenshot="$PWD/docs/map-$1.png" "file://$folder/$2.html$3" 2>"$folder/chromium.log" ||
    { cat "$folder/chromium.log" >&2; exit 1; }
  echo "docs/map-$1.png: $(stat -c %s "docs/map-$1.png") bytes"
}
picture qwen3-8b capture-trace-65 '#light' 1745
shape=$(grep -o '"id":[0-9]*,"label":"prefill 6400"' "$folder/capture-trace-vision.json" | grep -o '[0-9]*' | head -1)
picture vision capture-trace-vision "#light&shape=$shape" 1180

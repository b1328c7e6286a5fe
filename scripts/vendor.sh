#!/usr/bin/env bash
# Makes a source tarball for builds without a network: the committed tree, every crate of
# Cargo.lock, and the third-party notices.
#
#   scripts/vendor.sh [FOLDER]     FOLDER/vmmgraph-VERSION.tar.gz; default: build
#
# CMake needs only cargo: .cargo/config.toml names the crates' folder, and cmake
# -DVMMGRAPH_CARGO_OFFLINE=ON keeps cargo off the network.
set -euo pipefail
cd "$(dirname "$0")/.."

out=${1:-build}
version=$(sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
name=vmmgraph-$version
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

mkdir -p "$out" "$work/$name"
git archive HEAD | tar -x -C "$work/$name"
(
  cd "$work/$name"
  mkdir -p .cargo
  cargo vendor --locked third_party/crates > .cargo/config.toml
)
python3 scripts/notices.py vmmgraph-bridge > "$work/$name/THIRD_PARTY_NOTICES.txt"
# Reproducible: the same bytes for the same commit.
tar --sort=name --owner=0 --group=0 --numeric-owner --mtime="@$(git log -1 --format=%ct)" -C "$work" -c "$name" | gzip -n > "$out/$name.tar.gz"
ls -l "$out/$name.tar.gz"

#!/usr/bin/env bash
# Compiles everything with the oldest Rust that Cargo.toml promises, and the core for aarch64; says SKIPPED for what rustup has not and cannot get.
set -euo pipefail
cd "$(dirname "$0")/.."
# Apart from what the tests' toolchain has compiled.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/other"

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if cargo "+$oldest" --version >/dev/null 2>&1 || rustup toolchain install "$oldest" --profile minimal >/dev/null 2>&1; then
  echo "Rust $oldest"
  # The tests too: make test is promised with it.
  cargo "+$oldest" check --locked --workspace --features bridge --all-targets
else
  echo "SKIPPED: Rust $oldest, the oldest that is promised"
fi

if rustup target add aarch64-unknown-linux-gnu >/dev/null 2>&1; then
  echo "aarch64"
  cargo check --locked --target aarch64-unknown-linux-gnu --workspace --exclude vmmgraph-benches --exclude vmmgraph-header
else
  echo "SKIPPED: the core for aarch64"
fi

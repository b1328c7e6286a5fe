#!/usr/bin/env bash
# Compiles everything with the oldest Rust supported by Cargo.toml, and the core for aarch64. Prints
# SKIPPED for toolchains rustup cannot install.
set -euo pipefail
cd "$(dirname "$0")/.."
# A separate target folder from the tests' toolchain.
export CARGO_TARGET_DIR="${CARGO_TARGET_DIR:-target}/other"

oldest=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)
if cargo "+$oldest" --version >/dev/null 2>&1 || rustup toolchain install "$oldest" --profile minimal >/dev/null 2>&1; then
  echo "Rust $oldest"
  # Includes the tests: make test supports this version.
  cargo "+$oldest" check --locked --workspace --all-targets
else
  echo "SKIPPED: Rust $oldest, the oldest that is promised"
fi

if rustup target add aarch64-unknown-linux-gnu >/dev/null 2>&1; then
  echo "aarch64"
  cargo check --locked --target aarch64-unknown-linux-gnu --workspace --exclude vmmgraph-benches --exclude vmmgraph-header --exclude vmmgraph-bridge
else
  echo "SKIPPED: the core for aarch64"
fi

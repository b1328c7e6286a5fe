//! The library on a CUDA device: `cargo test` runs the conformance and context tests on the
//! stand-in libcuda.so, `scripts/gpu.sh` all tests on a GPU.

mod conformance;
mod contexts;
mod graphs;
mod green;
mod regions;

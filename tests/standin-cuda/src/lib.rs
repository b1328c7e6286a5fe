//! A stand-in for libcuda.so, for tests only: the CUDA driver's memory, streams and capture without a GPU.
//!
//! The model is `tests/standin`, shared with the other platforms' stand-ins; CUDA's names, numbers and contexts are here. What CUDA refuses is refused here with the same code; `tests/conformance.rs` of the root package runs on both.
//!
//! Where it is stricter than CUDA: addresses belong to the device whose context was current when they were reserved, only that
//! device's pages go there, an imported page is one of the device that was current, and a handle to anything destroyed is refused instead of crashing.
//!
//! Environment, read by the first `cuInit`: `STANDIN_CUDA_DEVICES` (default 2; 0 is a machine without a GPU) and
//! `STANDIN_CUDA_MEMORY` (bytes of each device, default 64 GiB).
//!
//! Load it as a shared library. The rlib exists for this crate's own tests: a copy linked into a program has statics of its
//! own and knows nothing of the loaded one.

#![allow(non_snake_case, reason = "the functions have CUDA's names")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is the CUDA driver's")]

use standin::Answer;

mod code;
mod faults;
mod state;

pub mod control;
pub mod device;
pub mod graph;
pub mod green;
pub mod host;
pub mod stream;
pub mod vmm;

use code::Code;

/// Runs the body of an exported function and turns what it says, or its panic, into a result code.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

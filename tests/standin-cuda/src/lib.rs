//! Stand-in for libcuda.so, for tests only: the CUDA driver's memory, streams and captures without
//! a GPU.
//!
//! The model is `tests/standin`; this crate adds CUDA's names, numbers and contexts. Refusals have
//! CUDA's codes; `tests/gpu/conformance.rs` of the root package runs on both.
//!
//! Stricter than CUDA: addresses belong to the device current at their reservation and accept only
//! its pages. An imported page belongs to the current device. Handles of destroyed objects are
//! refused instead of crashing.
//!
//! Environment, read by the first `cuInit`: `STANDIN_CUDA_DEVICES` (default 2; 0 is a machine
//! without a GPU) and `STANDIN_CUDA_MEMORY` (bytes of each device, default 64 GiB).
//!
//! Load it as a shared library. The rlib serves this crate's own tests: a linked copy has separate
//! statics.

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

/// As [`standin::answer`], with CUDA's codes.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

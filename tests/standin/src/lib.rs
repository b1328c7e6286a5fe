//! Shared model of the stand-ins for vendors' libraries, for tests only. Each stand-in
//! (`tests/standin-*`) adds its vendor's names, numbers and rules.
//!
//! Memory is the source of the host driver, so aliasing, contents and faults after unmap are real.
//! Streams work at once and in order. Captured work becomes graph nodes, which use the mappings of
//! the launch. Broken rules are refused with a [`Why`], mapped to the vendor's number.
//!
//! State is static: each stand-in is a library with its own copy.

use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

mod control;
mod why;

pub mod capture;
pub mod faults;
pub mod graph;
pub mod host;
#[allow(missing_docs, reason = "the host driver compiles the same file as its own module")]
#[path = "../../../src/driver/host/memory.rs"]
pub mod memory;
pub mod state;

pub use control::{CStr, host_leftovers, leftovers};
pub use why::{Answer, Why, refused};

/// Runs an exported function's body; converts its result or panic to the vendor's code (success:
/// 0).
pub fn answer(code_of: impl Fn(Why) -> c_int, body: impl FnOnce() -> Answer) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Why::Injected(code))) => code,
        Ok(Err(why)) => code_of(why),
        Err(_) => code_of(Why::Unknown),
    }
}

/// Stores a result for the caller.
///
/// # Errors
/// [`Why::Invalid`] for a null pointer.
///
/// # Safety
/// `to` is null or writable.
pub unsafe fn give<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(Why::Invalid);
    }
    // SAFETY: not null; writable by the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

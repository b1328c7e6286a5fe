//! What the stand-ins for vendors' libraries share, for tests only: a device's memory, streams, events, capture, graphs, and calls that
//! fail on purpose. It knows no platform. Each stand-in (`tests/standin-*`) puts its vendor's names, numbers and rules over it.
//!
//! Memory is the source of the host driver, so aliasing, contents and faults after unmap are real. Streams do their work at once
//! and in order; while one is captured its work becomes graph nodes, which act on whatever is mapped when the graph is launched.
//! What breaks a rule is refused with a [`Why`], which the stand-in turns into its vendor's number.
//!
//! Its state is static: each stand-in is a library of its own that has all of it once.

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

/// Runs the body of an exported function and turns what it says, or its panic, into a result by the vendor's numbers; success is 0.
pub fn answer(code_of: impl Fn(Why) -> c_int, body: impl FnOnce() -> Answer) -> c_int {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(Why::Injected(code))) => code,
        Ok(Err(why)) => code_of(why),
        Err(_) => code_of(Why::Unknown),
    }
}

/// Stores a result where the caller wants it.
///
/// # Errors
/// [`Why::Invalid`] if that is nowhere.
///
/// # Safety
/// `to` is null or may be written.
pub unsafe fn give<T>(to: *mut T, value: T) -> Answer {
    if to.is_null() {
        return Err(Why::Invalid);
    }
    // SAFETY: not null, and then writable by the caller's contract.
    unsafe { to.write(value) };
    Ok(())
}

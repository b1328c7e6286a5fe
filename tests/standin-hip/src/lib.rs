//! Stand-in for libamdhip64.so.7, for tests only: the HIP calls of VmmGraph and its tests, without
//! a GPU.
//!
//! The model is `tests/standin`; this crate adds HIP's names, numbers and rules, as read in ROCm's
//! sources (not compared with a device):
//!
//! * Calls act on the current device: pages, reservations and events belong to the current device.
//!   A location with a different device is refused.
//! * `hipMemcpy` and `hipDeviceSynchronize` invalidate **every** capture of the process, in any
//!   mode (906 and 900). Waiting for events and streams does so unless the thread's mode is
//!   RELAXED.
//! * `hipMemSetAccess` takes whole mappings; in ROCm 7.0 to 7.13 (`STANDIN_HIP_VERSION`) only from
//!   the first mapping of the reservation on.
//! * `hipMemUnmap` takes one mapping and waits for the device, which is idle afterwards.
//!
//! Environment, read by the first `hipInit`: `STANDIN_HIP_DEVICES` (default 2; 0 is a machine
//! without a GPU), `STANDIN_HIP_MEMORY` (bytes of each device, default 64 GiB) and
//! `STANDIN_HIP_VERSION` (the result of `hipDriverGetVersion`; default 71400000, 7.14).
//!
//! Load it as a shared library: a linked copy has separate statics.

#![allow(non_snake_case, reason = "the functions have HIP's names")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is the HIP runtime's")]

use std::cell::Cell;
use std::ffi::{c_int, c_void};

use standin::capture::{self, Target};
use standin::state::{Device, device};
use standin::{Answer, Why};

mod code;
mod faults;

pub mod control;
pub mod device;
pub mod stream;
pub mod vmm;
pub mod work;

use code::Code;

thread_local! {
    /// The thread's current device.
    static CURRENT: Cell<c_int> = const { Cell::new(0) };
}

fn current() -> Answer<(usize, &'static Device)> {
    device(CURRENT.get())
}

fn target(stream: *mut c_void) -> Answer<Target> {
    capture::target(stream, || Ok(current()?.0))
}

/// As [`standin::answer`], with HIP's codes.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

/// Checks calls that wait: outside the mode RELAXED they invalidate every capture of the process.
fn may_wait() -> Answer {
    let relaxed = standin::state::capture_mode() == standin::state::RELAXED;
    if !relaxed && capture::table().invalidate_all() { Err(Why::CaptureUnsupported) } else { Ok(()) }
}

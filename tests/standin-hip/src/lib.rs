//! A stand-in for libamdhip64.so.7, for tests only: what VmmGraph and its tests call of HIP, without a GPU.
//!
//! The model is `tests/standin`, shared with the other platforms' stand-ins; HIP's names, numbers and rules are here, as read in ROCm's sources (nobody
//! has held it against a device):
//!
//! * Calls act on the current device: a page, a reservation or an event is of the device that was current, whatever a location says, and a location
//!   that says something else is refused.
//! * `hipMemcpy` and `hipDeviceSynchronize` spoil **every** capture of the process while there is one, in any mode (906 and 900). Waiting for events and streams
//!   does so unless the thread's mode is RELAXED.
//! * `hipMemSetAccess` takes whole mappings; as ROCm 7.0 to 7.13 (`STANDIN_HIP_VERSION`), those from the reservation's first one on only.
//! * `hipMemUnmap` takes one mapping, and waits for the device: what the tests keep busy is done then.
//!
//! Environment, read by the first `hipInit`: `STANDIN_HIP_DEVICES` (default 2; 0 is a machine without a GPU), `STANDIN_HIP_MEMORY` (bytes of each device,
//! default 64 GiB) and `STANDIN_HIP_VERSION` (what `hipDriverGetVersion` says; default 71400000, 7.14).
//!
//! Load it as a shared library: a copy linked into a program has statics of its own.

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

/// The thread's current device.
fn current() -> Answer<(usize, &'static Device)> {
    device(CURRENT.get())
}

/// What a stream handle names.
fn target(stream: *mut c_void) -> Answer<Target> {
    capture::target(stream, || Ok(current()?.0))
}

/// Runs the body of an exported function and turns what it says, or its panic, into a result code.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

/// What calls that wait begin with: in another mode than RELAXED they spoil every capture of the process.
fn may_wait() -> Answer {
    let relaxed = standin::state::capture_mode() == standin::state::RELAXED;
    if !relaxed && capture::table().invalidate_all() { Err(Why::CaptureUnsupported) } else { Ok(()) }
}

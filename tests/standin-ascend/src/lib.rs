//! A stand-in for libascendcl.so, for tests only: CANN's ACL runtime, its memory, streams and capture, without an NPU.
//!
//! The model is `tests/standin`, shared with the other platforms' stand-ins; ACL's names, numbers and rules are here. The rules are those of CANN's
//! documentation and of its open runtime, as far as they are known; nobody has held this against a device. What it proves is that the library keeps
//! to them:
//!
//! * A page is mapped whole, at offset 0, and can be used at once. A map is taken away by its head, one a call.
//! * A location is `id` first, then `type`.
//! * Memory needs a device that was set once; events, streams and copies a context of the thread, and streams and events that of their device.
//! * While anything of a device is captured, nobody may wait or ask for its events and streams, in any mode: that is refused, and the capture lost.
//!   Synchronous copies are refused, and the capture lost, unless the thread's mode is relaxed.
//! * The default stream cannot be captured, and using it meanwhile is refused.
//! * `aclInit` a second time says so. Errors have no names, but the last one has words.
//!
//! Where it is stricter than ACL: addresses belong to the device whose context was current when they were reserved, and a handle to anything destroyed is
//! refused instead of crashing.
//!
//! Environment, read by `aclInit`: `STANDIN_ASCEND_DEVICES` (default 2), `STANDIN_ASCEND_MEMORY` (bytes of each device, default 64 GiB),
//! `STANDIN_ASCEND_SOC` (the device's name), and `STANDIN_ASCEND_D32` (`refuse`: the 32-bit fill takes no memory that was mapped, as its documentation has it).

#![allow(non_snake_case, reason = "the functions have ACL's names")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is ACL's")]

use std::cell::Cell;

use standin::Answer;

mod code;
mod faults;
mod state;

pub mod control;
pub mod copy;
pub mod device;
pub mod stream;
pub mod torch_npu;
pub mod vmm;

use code::Code;

/// Runs the body of an exported function and turns what it says, or its panic, into a result code.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    let code = standin::answer(code::code_of, body);
    if code != 0 {
        LAST.set(code);
    }
    code
}

thread_local! {
    /// The thread's last failure.
    static LAST: Cell<Code> = const { Cell::new(0) };
}

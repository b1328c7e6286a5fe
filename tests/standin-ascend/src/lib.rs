//! Stand-in for libascendcl.so, for tests only: memory, streams and captures of CANN's ACL runtime,
//! without an NPU.
//!
//! The model is `tests/standin`; this crate adds ACL's names, numbers and rules, from CANN's
//! documentation and open runtime (not compared with a device). Tests prove that the library keeps
//! these rules:
//!
//! * A page is mapped whole, at offset 0, and is accessible at once. Each unmap call removes one
//!   mapping, by its first address.
//! * A location is `id` first, then `type`.
//! * Memory needs a device that was set once. Events, streams and copies need a current context,
//!   streams and events the context of their device.
//! * During a capture on a device, waits and queries of its events and streams are refused in any
//!   mode, and invalidate the capture. Synchronous copies do so unless the thread's mode is
//!   relaxed.
//! * The default stream cannot be captured, and is refused during a capture.
//! * A second `aclInit` returns an error. Errors have no names; the last error has a message.
//!
//! Stricter than ACL: addresses belong to the device current at their reservation, and handles of
//! destroyed objects are refused instead of crashing.
//!
//! Environment, read by `aclInit`: `STANDIN_ASCEND_DEVICES` (default 2), `STANDIN_ASCEND_MEMORY`
//! (bytes of each device, default 64 GiB), `STANDIN_ASCEND_SOC` (the device's name), and
//! `STANDIN_ASCEND_D32` (`refuse`: the 32-bit fill refuses mapped memory, as documented).

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

/// As [`standin::answer`], with ACL's codes.
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

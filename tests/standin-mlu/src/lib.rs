//! A stand-in for libcndrv.so, for tests only: Cambricon's CNDrv, its memory, queues and capture, without an MLU.
//!
//! The model is `tests/standin`, shared with the other platforms' stand-ins; CNDrv's names, numbers and rules are here. The rules are those of the text of
//! CNDrv 2.15.5's `cn_api.h` and of CNToolkit's guide; nobody has held this against a device. What it proves is that the library keeps to them:
//!
//! * Queues, notifiers and copies need a context of the thread, and queues and notifiers that of their device; pages, captures and what they make do not. There may
//!   be none, which is null.
//! * A page is mapped whole, at offset 0. A map has to be given access, by one description, of the device that has the page; reading and writing is 0.
//!   It is taken away as it was made.
//! * What allocates, copies at once or waits is refused while anything is captured, and the capture lost, unless the thread's mode is relaxed.
//! * The default queue cannot be captured.
//!
//! Where it is stricter than CNDrv, or the text is silent: addresses belong to the device whose context was current when they were reserved; the default queue
//! is refused while anything of the device is captured; a notifier that was never placed is invalid to wait for or to ask about; the numbers 1 and
//! 2 are no queues; a handle to anything destroyed is refused instead of crashing.
//!
//! Environment, read by `cnInit`: `STANDIN_MLU_DEVICES` (default 2; 0 is a machine without one), `STANDIN_MLU_MEMORY` (bytes of each device, default 64 GiB), and
//! `STANDIN_MLU_VMM` (`none`: devices without virtual memory management; `unknown`: a driver that does not know the question).

#![allow(non_snake_case, reason = "the functions have CNDrv's names")]
#![allow(clippy::missing_safety_doc, reason = "the contract of each function is CNDrv's")]

use standin::Answer;

mod code;
mod faults;
mod state;

pub mod control;
pub mod copy;
pub mod device;
pub mod queue;
pub mod topo;
pub mod vmm;

use code::Code;

/// Runs the body of an exported function and turns what it says, or its panic, into a result code.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

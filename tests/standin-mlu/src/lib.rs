//! Stand-in for libcndrv.so, for tests only: memory, queues and captures of Cambricon's CNDrv,
//! without an MLU.
//!
//! The model is `tests/standin`; this crate adds CNDrv's names, numbers and rules, from CNDrv
//! 2.15.5's `cn_api.h` and CNToolkit's guide (not compared with a device). Tests prove that the
//! library keeps these rules:
//!
//! * Queues, notifiers and copies need a current context, queues and notifiers the context of their
//!   device. Pages, captures and captured graphs need none. No context is null.
//! * A page is mapped whole, at offset 0. A mapping needs access, by one description of the page's
//!   device; read and write is 0. Unmap takes one mapping as created.
//! * Calls that allocate, copy at once or wait are refused during a capture, and invalidate the
//!   capture, unless the thread's mode is relaxed.
//! * The default queue cannot be captured.
//!
//! Stricter than CNDrv, or undocumented: addresses belong to the device current at their
//! reservation; the default queue is refused during a capture on the device; waiting for or
//! querying an unplaced notifier is refused; the numbers 1 and 2 are not queues; handles of
//! destroyed objects are refused instead of crashing.
//!
//! Environment, read by `cnInit`: `STANDIN_MLU_DEVICES` (default 2; 0 is a machine without one),
//! `STANDIN_MLU_MEMORY` (bytes of each device, default 64 GiB), and `STANDIN_MLU_VMM` (`none`:
//! devices without virtual memory management; `unknown`: a driver without this attribute).

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

/// As [`standin::answer`], with CNDrv's codes.
fn answer(body: impl FnOnce() -> Answer) -> Code {
    standin::answer(code::code_of, body)
}

//! Shared helpers of VmmGraph's tests, benches and demo: allocation traces of real and random
//! models, their capture and replay, torch's segment rules for comparison, and test drivers.
//!
//! The drivers: [`FaultyDriver`] fails on purpose, [`BrokenDriver`] breaks a rule,
//! [`CopyingDriver`] has graphs of copies, [`LateDriver`] works at the last wait,
//! [`ReorderingDriver`] works in any order allowed by events.

mod bench;
mod borrower;
mod broken;
mod copying;
mod fault;
pub mod growth;
mod late;
mod model;
mod passing;
mod process;
mod random;
mod random_model;
mod reordering;
mod replay;
mod timing;
mod torch;
mod trace;

pub use bench::Bench;
pub use borrower::IdleBorrower;
pub use broken::{BrokenDriver, Flaw};
pub use copying::CopyingDriver;
pub use fault::FaultyDriver;
pub use late::{Delay, LateDriver};
pub use model::Model;
pub use process::{alone, child_command};
pub use random::{Random, seeds};
pub use random_model::random_model;
pub use reordering::{Losing, ReorderingDriver, lossy};
pub use replay::{Captured, Replayed, Stamps, capture, capture_by, capture_with, replay};
pub use timing::median;
pub use torch::{private_pools_bytes, published_design};
pub use trace::{Event, Order, Shape, Trace, shuffle};

/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// Returns a stream with a made-up handle, or with the real handle of a GPU. Handles below 16 are
/// shifted: some mean default streams.
#[must_use]
pub const fn stream(handle: u64) -> vmmgraph::Stream {
    // SAFETY: the host driver ignores the handle; tests on a GPU keep the stream.
    unsafe { vmmgraph::Stream::from_raw(if handle < 16 { 0x100 + handle } else { handle }) }
}

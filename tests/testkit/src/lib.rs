//! What VmmGraph's tests, benches and demo share: allocation traces of real and of made-up models, capturing and replaying them, torch's
//! segment rules for comparison, a driver that fails on purpose, one that
//! breaks a rule, one whose graphs are copies, and two that work as late as they may: `LateDriver` when somebody waits, `ReorderingDriver` in any order that events allow.

mod bench;
mod borrower;
mod broken;
mod copying;
mod fault;
pub mod growth;
mod late;
mod model;
mod passing;
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
pub use random::{Random, seeds};
pub use random_model::random_model;
pub use reordering::{Losing, ReorderingDriver, lossy};
pub use replay::{Captured, Replayed, Stamps, capture, capture_by, capture_with, replay};
pub use timing::median;
pub use torch::{private_pools_bytes, published_design};
pub use trace::{Event, Order, Shape, Trace, shuffle};

/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

/// A stream with a handle of the test's own, for drivers that do not look at it, or the real one of a GPU. Small numbers, some of which
/// mean default streams, become larger ones.
#[must_use]
pub const fn stream(handle: u64) -> vmmgraph::Stream {
    // SAFETY: the host driver does not look at it; tests on a GPU pass the handles of streams that they keep.
    unsafe { vmmgraph::Stream::from_raw(if handle < 16 { 0x100 + handle } else { handle }) }
}

//! What VmmGraph's tests, benches and demo share: allocation traces of a real model, capturing and replaying them, torch's
//! segment rules for comparison, and a driver that fails on purpose.

mod fault;
mod replay;
mod timing;
mod torch;
mod trace;

pub use fault::FaultyDriver;
pub use replay::{Captured, Replayed, Stamps, capture, replay};
pub use timing::median;
pub use torch::{private_pools_bytes, published_design};
pub use trace::{Event, Order, Shape, Trace, shuffle};

/// 2^20 bytes.
pub const MIB: u64 = 1 << 20;

//! Options and statistics of a ring, and runs of a source.

use std::sync::Arc;

use super::{HostBuffer, Remainder};
use crate::pages::{Account, AccountStats};

/// Options of a ring.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingOptions<'a> {
    /// Name for messages.
    pub name: &'a str,
    /// Slots shared by the streaming units. 0: three (one read, one being filled, one ready).
    pub slots: usize,
    /// Handling of streaming units which the slots do not divide.
    pub remainder: Remainder,
    /// Bytes of a page, a multiple of the device's granularity. 0: the longest unit, if this costs
    /// no memory; else about an eighth of it, a power of two times the granularity, at most 16 MiB.
    /// Driver calls cost per page; a place has whole pages.
    pub page_bytes: u64,
    /// Limit in bytes of physical memory. `None`: only the limits of the ancestors.
    pub budget_bytes: Option<u64>,
    /// Parent account. `None`: the device's account.
    pub account: Option<&'a Account>,
    /// Copy nothing ahead for the next step, because its sources will change.
    pub within_step: bool,
    /// Measured speeds. If set, the [ceiling](super::ceiling) is logged before the ring is built.
    pub pace: Option<Pace>,
}

/// Measured speeds of the link and of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// GiB a second of the link from pinned host memory.
    pub link_gib_per_second: f64,
    /// Seconds of a step with all units resident.
    pub compute_seconds: f64,
    /// Tokens of a step, over all sequences.
    pub tokens: u64,
}

/// Bytes of a host buffer, copied to an offset of a unit.
#[derive(Clone, Debug)]
pub struct HostRun {
    /// Buffer of the ring's device.
    pub source: Arc<HostBuffer>,
    /// Offset in the buffer, in bytes.
    pub from: u64,
    /// Offset in the unit, in bytes.
    pub to: u64,
    /// Number of bytes. 0: no copy.
    pub bytes: u64,
}

/// Current state and counters of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStats {
    /// Number in the process; also in the [`Owner`](crate::pages::Owner).
    pub id: u64,
    /// Number of units.
    pub units: u64,
    /// Streaming units.
    pub streamed: u64,
    /// Slots.
    pub slots: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Bytes of device memory: slots and resident units.
    pub device_bytes: u64,
    /// Units acquired now.
    pub acquired: u64,
    /// Copies submitted.
    pub copies: u64,
    /// Bytes of `copies`.
    pub copied_bytes: u64,
    /// Acquires.
    pub acquires: u64,
    /// Units filled before their acquire.
    pub filled_ahead: u64,
    /// Units filled by their acquire, which then waits for the copy.
    pub filled_late: u64,
    /// Failed prefetches. The acquire repeats the copy and reports a second failure.
    pub ahead_failed: u64,
    /// Calls of [`abort`](crate::Ring::abort).
    pub aborts: u64,
    /// Launches of captured steps. Their copies count in `copies`; their units in no other counter.
    pub launches: u64,
    /// Account of the ring.
    pub account: AccountStats,
}

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
    /// Bytes of a page; 0: derived: `vmmgraph_ring_options_t`.
    pub page_bytes: u64,
    /// Limit of physical bytes. `None`: only the limits of the ancestors.
    pub budget_bytes: Option<u64>,
    /// Parent account. `None`: the device's.
    pub account: Option<&'a Account>,
    /// Copy nothing ahead for the next step, because its sources will change.
    pub within_step: bool,
    /// If set, the [ceiling](super::ceiling) is logged.
    pub pace: Option<Pace>,
}

/// Measured speeds of the link and of a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// GiB a second from pinned host memory.
    pub link_gib_per_second: f64,
    /// Seconds of a step with all units resident.
    pub compute_seconds: f64,
    /// Tokens of a step, over all sequences.
    pub tokens: u64,
}

/// Bytes of a host buffer, copied to an offset of a unit.
#[derive(Clone, Debug)]
pub struct HostRun {
    /// On the ring's device.
    pub source: Arc<HostBuffer>,
    /// Offset in the buffer.
    pub from: u64,
    /// Offset in the unit.
    pub to: u64,
    /// 0: no copy.
    pub bytes: u64,
}

/// Current state and counters of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStats {
    /// Number in the process.
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
    /// Bytes of slots and resident units.
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
    /// Units filled by their acquire.
    pub filled_late: u64,
    /// Failed prefetches, repeated by the acquire.
    pub ahead_failed: u64,
    /// Calls of [`abort`](crate::Ring::abort).
    pub aborts: u64,
    /// Launches of captured steps, whose copies count in `copies`.
    pub launches: u64,
    /// Account of the ring.
    pub account: AccountStats,
}

//! What a ring is made like, what a unit is copied from, and what a ring says of itself.

use std::sync::Arc;

use super::{HostBuffer, Remainder};
use crate::pages::{Account, AccountStats};

/// What a ring is made like.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingOptions<'a> {
    /// Its name, for messages.
    pub name: &'a str,
    /// Slots that the streamed units share; 0: three, of which one is read, one is filled and one is ready.
    pub slots: usize,
    /// What to do with units that the slots do not divide.
    pub remainder: Remainder,
    /// Bytes of every page, a multiple of the device's granularity; 0: the longest unit, if all places together are no longer then; else about an eighth of
    /// it, a power of two times the granularity, 16 MiB at most. Calls cost per page and not per byte; a place is as long as whole pages.
    pub page_bytes: u64,
    /// The most bytes of physical memory it may hold; `None`: no limit but those above.
    pub budget_bytes: Option<u64>,
    /// The account that its own is below; `None`: the device's.
    pub account: Option<&'a Account>,
    /// Nothing is copied ahead for the next step, since its sources will be others.
    pub within_step: bool,
    /// What is known of the machine and of a step: the [ceiling](super::ceiling) is logged then before anything is built.
    pub pace: Option<Pace>,
}

/// How fast the link and a step are, as they were measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    /// GiB a second that the link brings from pinned host memory.
    pub link_gib_per_second: f64,
    /// Seconds that a step takes with everything resident.
    pub compute_seconds: f64,
    /// Tokens of a step, all sequences together.
    pub tokens: u64,
}

/// Bytes of host memory that go to a place in a unit.
#[derive(Clone, Debug)]
pub struct HostRun {
    /// The host memory, of the ring's device.
    pub source: Arc<HostBuffer>,
    /// From its beginning, in bytes.
    pub from: u64,
    /// From the unit's beginning, in bytes.
    pub to: u64,
    /// How many; 0: nothing is to be copied.
    pub bytes: u64,
}

/// What a ring holds, and what it did since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingStats {
    /// Its number, unique in the process: that of its [`Holder`](crate::pages::Holder).
    pub id: u64,
    /// Its units.
    pub units: u64,
    /// Those of them that stream.
    pub streamed: u64,
    /// The slots they share.
    pub slots: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Bytes of the device: slots and resident units.
    pub device_bytes: u64,
    /// Units that are acquired now.
    pub acquired: u64,
    /// Copies that were given.
    pub copies: u64,
    /// Their bytes.
    pub copied_bytes: u64,
    /// Units that were acquired.
    pub acquires: u64,
    /// Units that were filled ahead of their acquire.
    pub filled_ahead: u64,
    /// Units that were filled by their acquire, which then waits for the copy.
    pub filled_late: u64,
    /// Fillings ahead that failed. The acquire tries again, and says so if that fails too.
    pub ahead_failed: u64,
    /// How often it was [aborted](crate::Ring::abort).
    pub aborts: u64,
    /// Captured steps that were launched. Their copies are among the copies, their units among nothing else.
    pub launches: u64,
    /// What counts toward its budget.
    pub account: AccountStats,
}

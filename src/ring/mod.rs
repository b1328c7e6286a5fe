//! Rings: units (mostly layers) with fixed addresses, streamed from the host through few slots. See
//! docs/design/rings.md. A streaming unit maps the pages of its slot; its contents are defined from
//! its `acquire` to its `release` only.
//!
//! ```text
//!   undefined ── copy submitted ──> holds (unit, stamp) ── acquire ──> read by a stream
//!       ^                             │        ^                             │
//!       └──── copy failed, abort ─────┘        └───────── release ───────────┘
//! ```
//!
//! Invariants:
//!
//! * A slot has at most one reader at a time. A copy to the slot runs after its last reader.
//! * A slot with an old stamp (unit, change of its source) is copied again before use.
//! * Eager copies use one stream of the library, so they form one chain in the order of use.
//! * No call of a ring waits on the host, except for copies of unregistered memory.
//!
//! The mutex `Ring::state` is held while copies are submitted and marks are recorded. Lock order:
//! see `graph.rs`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, Owner, Reservation};
use crate::sync::Mutex;
use crate::units::Address;

mod acquire;
mod build;
mod capture;
mod graph;
mod host;
mod options;
mod plan;
mod runs;
mod schedule;
mod state;

pub(crate) use build::SLOTS;
pub use capture::RingCaptureOptions;
pub use graph::RingGraph;
pub use host::{HostBuffer, Pinning};
pub use options::{HostRun, Pace, RingOptions, RingStats};
pub use plan::{Bound, Ceiling, Demand, Residency, RingUnit, ceiling};
pub use schedule::{Adjustment, Edge, Held, Node, Remainder, Schedule, Why};
use state::RingState;

/// Units read in one order, again and again, with only some of them on the device. Thread-safe; one
/// step runs at a time. Dropping does not block: see `vmmgraph_ring_destroy`.
pub struct Ring {
    id: u64,
    name: String,
    schedule: Schedule,
    units: Vec<RingUnit>,
    page: u64,
    offsets: Vec<u64>,
    across_steps: bool,
    /// `None` during the drop.
    range: Option<Reservation>,
    account: Account,
    state: Mutex<RingState>,
    device: Arc<Device>,
}

impl Ring {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// Returns the account.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Returns the first address of a unit, which never changes.
    pub fn address(&self, unit: usize) -> Result<Address> {
        let offset = self.offsets.get(unit).ok_or_else(|| no_unit(unit))?;
        let range = self.range.as_ref().ok_or_else(gone)?;
        Ok(range.base().plus(*offset))
    }

    /// Returns the current state and counters.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        let state = self.state.lock();
        let counts = state.counts;
        RingStats {
            id: self.id,
            units: self.units.len() as u64,
            streamed: self.schedule.streamed().len() as u64,
            slots: self.schedule.slots() as u64,
            page_bytes: self.page,
            reserved_bytes: self.range.as_ref().map_or(0, Reservation::bytes),
            device_bytes: self.place_bytes().iter().sum(),
            acquired: state.acquired(),
            copies: counts.copies,
            copied_bytes: counts.copied_bytes,
            acquires: counts.acquires,
            filled_ahead: counts.filled_ahead,
            filled_late: counts.filled_late,
            ahead_failed: counts.ahead_failed,
            aborts: counts.aborts,
            launches: counts.launches,
            account: self.account.stats(),
        }
    }

    /// Checks that every unit maps exactly the pages of its place, and places share no page. No
    /// other call may run.
    pub fn audit(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::Internal { what: format!("ring {}: {what}", self.id) });
        let pool = self.device.pool();
        pool.audit()?;
        let expected: u64 = self.place_bytes().iter().sum();
        let (held, pages) = pool.held(Owner::Ring { ring: self.id });
        let charged = self.account.stats().charged_bytes;
        if (held, pages, charged) != (expected, expected / self.page, expected) {
            return wrong(format!(
                "{expected} bytes of places, {held} held in {pages} pages, {charged} charged"
            ));
        }
        let range = self.range.as_ref().ok_or_else(gone)?;
        let mut shown: Vec<Vec<_>> = vec![Vec::new(); self.schedule.places()];
        for (unit, (offset, RingUnit { bytes, .. })) in self.offsets.iter().zip(&self.units).enumerate() {
            let mapped = pool.mapped_in(range.id(), *offset, bytes.next_multiple_of(self.page));
            let pages: Vec<_> = mapped.iter().map(|at| at.page).collect();
            let Some(place) = self.schedule.place_of(unit).and_then(|place| shown.get_mut(place)) else {
                return wrong(format!("unit {unit} has no place"));
            };
            let both = pages.len().min(place.len());
            if pages.len() as u64 != bytes.div_ceil(self.page) || pages[..both] != place[..both] {
                return wrong(format!("unit {unit} shows {} pages, or others than its slot's", pages.len()));
            }
            if pages.len() > place.len() {
                *place = pages;
            }
        }
        let mut all: Vec<_> = shown.into_iter().flatten().collect();
        let count = all.len();
        all.sort_unstable();
        all.dedup();
        if all.len() != count {
            return wrong("two places show one page".to_owned());
        }
        self.state.lock().audit(&self.schedule).or_else(wrong)
    }

    fn place_bytes(&self) -> Vec<u64> {
        plan::place_bytes(&self.schedule, &self.units, self.page)
    }
}

fn no_unit(unit: usize) -> Error {
    Error::InvalidArgument { what: "a ring's unit", value: unit as i128, expected: "a unit of the ring" }
}

fn gone() -> Error {
    Error::Internal { what: "a ring lacks its addresses".to_owned() }
}

impl Drop for Ring {
    fn drop(&mut self) {
        if self.schedule.slots() > 0 {
            self.device.streaming().fetch_sub(1, Ordering::Relaxed);
        }
        let pool = self.device.pool();
        let mut fence = Fence::default();
        self.state.get_mut().leave(pool.events(), &mut fence);
        if let Some(range) = self.range.take() {
            pool.unmap_after(fence, range.leave());
        }
        pool.check();
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

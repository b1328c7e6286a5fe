//! Rings: many addresses over few slots, filled from the host in the order of use.
//!
//! ```text
//!   Ring              addresses, pages, accounts, audit, the end        mod.rs  build.rs  options.rs
//!   acquire, release  eager work: copies ahead, waits, marks            turns.rs
//!   capture_begin     a step in a captured graph: copies on a branch    capture.rs
//!   RingGraph         what a captured step is told before a launch      graph.rs
//!   books             what a place holds, who reads it                  books.rs
//!   HostBuffer        where the bytes come from                         host.rs
//!   Schedule          which unit, which slot, what behind what          schedule.rs        plain code
//!   ceiling           the best that can be had, before it is built      plan.rs            plain code
//!   merge             runs of bytes as few copies                       runs.rs            plain code
//! ```
//!
//! Every unit (mostly a layer) has addresses of its own, which never change. Those that stream show the pages of their slot; so writes through one unit's
//! addresses are another unit's bytes, and a unit's contents are there from its `acquire` to its `release` only.
//!
//! ```text
//!   slot   unknown ── copy given ──> holds (unit, stamp) ── acquire ──> read by a stream ── release ──> holds, behind a mark
//!             ^ a copy failed, abort '                 ^ refilled behind the last reader, and not before   '
//! ```
//!
//! Outside graphs all copies are on the library's one stream of copies to the device, so they are one chain, in the order of use, and a copy waits on the device
//! for the last reader of its slot. Nobody waits on the host, but for memory that is not registered. A ring's own lock is held while copies are given.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, Holder, Reservation};
use crate::sync::Mutex;
use crate::units::Address;

mod books;
mod build;
mod capture;
mod graph;
mod host;
mod options;
mod plan;
mod runs;
mod schedule;
mod turns;

use books::Books;
pub(crate) use build::SLOTS;
pub use capture::RingCaptureOptions;
pub use graph::RingGraph;
pub use host::{HostBuffer, Pinning};
pub use options::{HostRun, Pace, RingOptions, RingStats};
pub use plan::{Bound, Ceiling, Demand, Residency, RingUnit, ceiling};
pub use schedule::{Adjustment, Edge, Held, Node, Remainder, Schedule, Why};

/// Units that are read in one order, again and again, and are not all on the device.
///
/// Thread-safe; one step is under way at a time, as a slot has one user at a time. Dropping it blocks nobody: addresses and pages go behind the copies and the
/// readers there are, a unit that is still acquired behind everything that its stream has been given by then.
pub struct Ring {
    id: u64,
    name: String,
    schedule: Schedule,
    units: Vec<RingUnit>,
    page: u64,
    /// By unit: where in the range its addresses begin.
    offsets: Vec<u64>,
    across_steps: bool,
    /// `None`: it is going.
    range: Option<Reservation>,
    account: Account,
    books: Mutex<Books>,
    device: Arc<Device>,
}

impl Ring {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Which units stream, and through which slots, with what is otherwise than asked.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.page
    }

    /// Its account, to ask what counts toward it.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The first address of a unit. It never changes, resident or streamed.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a unit that there is not.
    pub fn address(&self, unit: usize) -> Result<Address> {
        let offset = self.offsets.get(unit).ok_or_else(|| no_unit(unit))?;
        let range = self.range.as_ref().ok_or_else(gone)?;
        Ok(range.base().plus(*offset))
    }

    /// What it holds now, and what it did since it was made.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        let books = self.books.lock();
        let counts = books.counts;
        RingStats {
            id: self.id,
            units: self.units.len() as u64,
            streamed: self.schedule.streamed().len() as u64,
            slots: self.schedule.slots() as u64,
            page_bytes: self.page,
            reserved_bytes: self.range.as_ref().map_or(0, Reservation::bytes),
            device_bytes: self.place_bytes().iter().sum(),
            acquired: books.acquired(),
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

    /// Whether its books, the pool's and its account's agree, while no other call is under way: every unit shows exactly the pages of its place, and no
    /// two places have a page in common. Walks everything.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first thing that disagrees.
    pub fn audit(&self) -> Result<()> {
        let wrong = |what: String| Err(Error::Internal { what: format!("ring {}: {what}", self.id) });
        let pool = self.device.pool();
        pool.audit()?;
        let expected: u64 = self.place_bytes().iter().sum();
        let (held, pages) = pool.held(Holder::Ring { ring: self.id });
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
        self.books.lock().audit(&self.schedule).or_else(wrong)
    }

    fn place_bytes(&self) -> Vec<u64> {
        plan::place_bytes(&self.schedule, &self.units, self.page)
    }
}

fn no_unit(unit: usize) -> Error {
    Error::InvalidArgument { what: "a ring's unit", value: unit as i128, expected: "one that the ring has" }
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
        self.books.get_mut().leave(pool.events(), &mut fence);
        if let Some(range) = self.range.take() {
            pool.finish(fence, range.leave());
        }
        pool.check();
    }
}

impl fmt::Debug for Ring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ring").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

//! Changes of several steps: a journal that either commits or is undone in reverse, exactly what succeeded.
//!
//! | step | its inverse |
//! |---|---|
//! | reserve | close |
//! | take | unpin; what was created goes back |
//! | rely on | unpin |
//! | map | unmap |
//! | unmap | map again what was there, which stays pinned until the commit |
//! | hand over | hand back, if it is still there |
//! | come back | step aside |
//!
//! Nothing is given away before the commit, so undoing never meets a stranger. An inverse that the driver refuses leaves the pool's
//! books true; the object it belonged to is broken, and its teardown tries again.

use std::fmt;
use std::sync::Arc;

use super::{AccountId, Holder, PageId, PagePool, RangeId, Reservation};
use crate::error::Result;
use crate::units::{Address, Peers};

#[derive(Debug)]
enum Step {
    Reserved(RangeId, Address, u64),
    Taken { page: PageId, created: bool },
    Relied(PageId),
    Mapped(RangeId, u64, u64),
    Unmapped(RangeId, Vec<(u64, PageId)>),
    HandedOver { page: PageId, from: Holder, to: Holder },
    CameBack(PageId),
}

/// Calls to the driver that a change made, undone ones left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// All of them.
    pub all: u64,
    /// Pages mapped.
    pub maps: u64,
    /// Bytes mapped.
    pub mapped_bytes: u64,
    /// Bytes unmapped.
    pub unmapped_bytes: u64,
}

/// A change of several steps (the design's `MapTransaction`). Dropped without [`commit`](Self::commit), it is undone.
pub struct Change<'a> {
    pool: &'a Arc<PagePool>,
    journal: Vec<Step>,
    calls: Calls,
    /// Bytes of the pages that are still to come.
    announced: u64,
}

impl<'a> Change<'a> {
    /// Nothing is changed yet.
    #[must_use]
    pub fn on(pool: &'a Arc<PagePool>) -> Self {
        Self { pool, journal: Vec::new(), calls: Calls::default(), announced: 0 }
    }

    /// Says that pages of so many bytes more will be taken or relied on, so that an error says how much is missing for all of them and not for one:
    /// whoever is asked to give memory back may give no more than that.
    pub(crate) fn announce(&mut self, bytes: u64) {
        self.announced = self.announced.saturating_add(bytes);
    }

    /// The pool.
    #[must_use]
    pub fn pool(&self) -> &'a Arc<PagePool> {
        self.pool
    }

    /// Reserves addresses, under a tag of the caller's own; [`commit`](Self::commit) returns the reservations.
    ///
    /// # Errors
    /// [`Error::OutOfAddresses`](crate::Error::OutOfAddresses) or what the driver says.
    pub fn reserve(&mut self, bytes: u64, tag: u64, peers: Peers) -> Result<RangeId> {
        self.reserve_at(bytes, tag, peers).map(|(id, _)| id)
    }

    /// As [`reserve`](Self::reserve); and where they begin.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub(crate) fn reserve_at(&mut self, bytes: u64, tag: u64, peers: Peers) -> Result<(RangeId, Address)> {
        let (id, base) = self.pool.reserve(bytes, tag, peers)?;
        self.journal.push(Step::Reserved(id, base, bytes));
        self.calls.all += 1;
        Ok((id, base))
    }

    /// Takes a page of `bytes` for a holder: a free one, or a new one.
    ///
    /// # Errors
    /// [`Error::OverBudget`](crate::Error::OverBudget), of the account or of one above it, or what the driver says.
    pub fn take(&mut self, bytes: u64, holder: Holder, account: AccountId) -> Result<PageId> {
        let taken = self.pool.take(bytes, holder, account);
        let (page, created) = taken.map_err(|error| error.of_at_least(self.announced))?;
        self.announced = self.announced.saturating_sub(bytes);
        self.journal.push(Step::Taken { page, created });
        self.calls.all += u64::from(created);
        Ok(page)
    }

    /// Makes sure that a holder's page stays until the commit; its bytes. `None`: the holder does not have it any more.
    pub fn rely_on(&mut self, page: PageId, holder: Holder) -> Option<u64> {
        let bytes = self.pool.pin(page, holder)?;
        self.announced = self.announced.saturating_sub(bytes);
        self.journal.push(Step::Relied(page));
        Some(bytes)
    }

    /// Maps pages that were taken or relied on at a free place, one behind the other, readable and writable.
    ///
    /// # Errors
    /// What the driver says.
    pub fn map(&mut self, range: RangeId, offset: u64, pages: &[PageId]) -> Result<()> {
        let (result, bytes) = self.pool.map(range, offset, pages);
        if bytes > 0 {
            self.journal.push(Step::Mapped(range, offset, bytes));
        }
        if result.is_ok() {
            self.calls.all += 2 * pages.len() as u64;
            self.calls.maps += pages.len() as u64;
            self.calls.mapped_bytes += bytes;
        }
        result
    }

    /// Takes away every mapping that begins in a part of a range. The device does not use them.
    ///
    /// # Errors
    /// What the driver says.
    pub fn unmap(&mut self, range: RangeId, offset: u64, bytes: u64) -> Result<()> {
        let before = self.pool.mapped_in(range, offset, bytes);
        // They must not go to anybody as long as this may be undone.
        before.iter().for_each(|mapped| self.pool.pin_any(mapped.page));
        let (count, length) = (before.len() as u64, before.iter().map(|mapped| mapped.bytes).sum::<u64>());
        self.journal.push(Step::Unmapped(range, before.into_iter().map(|at| (at.offset, at.page)).collect()));
        self.pool.unmap(range, offset, bytes)?;
        self.calls.all += count;
        self.calls.unmapped_bytes += length;
        Ok(())
    }

    /// Gives a page another holder, if it has this one and, with `sole`, shows at one address and nobody else relies on it; whether
    /// it did.
    pub fn hand_over(&mut self, page: PageId, from: Holder, to: Holder, sole: bool) -> bool {
        let done = self.pool.hand_over(page, from, to, sole).is_some();
        if done {
            self.journal.push(Step::HandedOver { page, from, to });
        }
        done
    }

    /// Gives an absent page the memory of another one that was taken for it, and maps it wherever it shows. `None`: it went or came
    /// half-way, and has its memory. Its ranges are [held](PagePool::hold).
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn come_back(&mut self, page: PageId, memory: Option<PageId>) -> Result<()> {
        // Also if it fails half-way.
        self.journal.push(Step::CameBack(page));
        let (result, (maps, bytes)) = self.pool.come_back(page, memory);
        self.calls.all += 2 * maps;
        self.calls.maps += maps;
        self.calls.mapped_bytes += bytes;
        result
    }

    /// It is done: returns the calls it made, and the ranges it reserved, in order.
    pub fn commit(mut self) -> (Calls, Vec<Reservation>) {
        let mut reserved = Vec::new();
        for step in std::mem::take(&mut self.journal) {
            match step {
                Step::Reserved(id, base, bytes) => {
                    reserved.push(Reservation::new(self.pool, id, base, bytes));
                }
                Step::Taken { page, .. } | Step::Relied(page) => self.pool.unpin(page),
                Step::Unmapped(_, before) => before.iter().for_each(|(_, page)| self.pool.unpin(*page)),
                Step::Mapped(..) | Step::HandedOver { .. } | Step::CameBack(_) => {}
            }
        }
        (self.calls, reserved)
    }

    /// It is done, and the pages that were unmapped go back to the driver unless somebody else needs them, not to the device's free
    /// ones; whether the driver took them. What it refuses is kept for another try.
    pub(crate) fn commit_to_driver(mut self) -> bool {
        let mut taken = true;
        let steps = std::mem::take(&mut self.journal);
        for step in &steps {
            if let Step::Unmapped(_, before) = step {
                for (_, page) in before {
                    taken &= self.pool.unpin_and_release(*page);
                }
            }
        }
        self.journal = steps.into_iter().filter(|step| !matches!(step, Step::Unmapped(..))).collect();
        self.commit();
        taken
    }

    /// Undoes it, last step first; whether everything is as it was before.
    #[must_use]
    pub fn undo(mut self) -> bool {
        self.roll_back()
    }

    fn roll_back(&mut self) -> bool {
        let mut restored = true;
        while let Some(step) = self.journal.pop() {
            if let Err(error) = self.invert(step) {
                tracing::error!(%error, "undoing a change failed");
                restored = false;
            }
        }
        restored
    }

    fn invert(&self, step: Step) -> Result<()> {
        match step {
            Step::Reserved(id, ..) => self.pool.close(id)?,
            Step::Taken { page, created: true } => {
                self.pool.unpin_and_release(page);
            }
            Step::Taken { page, .. } | Step::Relied(page) => self.pool.unpin(page),
            Step::Mapped(range, offset, bytes) => self.pool.unmap(range, offset, bytes)?,
            Step::Unmapped(range, before) => {
                let mut result = Ok(());
                for (offset, page) in &before {
                    // What the driver had not unmapped yet is still there.
                    if result.is_ok() && !self.pool.shows(range, *offset, *page) {
                        result = self.pool.map(range, *offset, &[*page]).0;
                    }
                }
                before.iter().for_each(|(_, page)| self.pool.unpin(*page));
                result?;
            }
            // What the driver does not take back then waits with the pool.
            Step::CameBack(page) => drop(self.pool.step_aside(page)?),
            Step::HandedOver { page, from, to } => {
                self.pool.hand_over(page, to, from, false);
            }
        }
        Ok(())
    }
}

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.roll_back();
    }
}

impl fmt::Debug for Change<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.journal).finish()
    }
}

//! Transactions: a journal of steps that commits, or is undone in reverse order.
//!
//! | step | undo |
//! |---|---|
//! | reserve | close |
//! | take | unpin; a created page is released |
//! | pin (`pin_owned`) | unpin |
//! | map | unmap |
//! | unmap | map the previous pages, pinned until the commit |
//! | hand over | hand back, unless the owner changed since |
//! | resume a page (`make_resident`) | make the page non-resident again |
//!
//! No page becomes free before the commit, so an undo never finds a page of a new owner. Free pages
//! released, or pending unmaps reaped, by `take` are not restored. If the driver refuses an undo
//! step, the tables stay true; the affected object is unusable, and its teardown retries.

use std::fmt;
use std::sync::Arc;

use super::{AccountId, Owner, PageId, PagePool, RangeId, Reservation};
use crate::error::Result;
use crate::units::{Address, Peers};

#[derive(Debug)]
enum Step {
    Reserved(RangeId, Address, u64),
    Taken { page: PageId, created: bool },
    Pinned(PageId),
    Mapped(RangeId, u64, u64),
    Unmapped(RangeId, Vec<(u64, PageId)>),
    HandedOver { page: PageId, from: Owner, to: Owner },
    MadeResident(PageId),
}

/// Driver calls of a transaction, without undone calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// All driver calls.
    pub all: u64,
    /// Pages mapped.
    pub maps: u64,
    /// Bytes mapped.
    pub mapped_bytes: u64,
    /// Bytes unmapped.
    pub unmapped_bytes: u64,
}

/// Transaction over several steps (`MapTransaction` in the published design), undone at drop unless
/// [committed](Self::commit).
pub struct Transaction<'a> {
    pool: &'a Arc<PagePool>,
    journal: Vec<Step>,
    calls: Calls,
    /// Bytes still to be taken or pinned.
    expected_bytes: u64,
}

impl<'a> Transaction<'a> {
    /// Begins an empty transaction.
    #[must_use]
    pub fn on(pool: &'a Arc<PagePool>) -> Self {
        Self { pool, journal: Vec::new(), calls: Calls::default(), expected_bytes: 0 }
    }

    /// Announces the total bytes: an error then reports all missing bytes, and reclaimers free
    /// enough for the whole transaction.
    pub(crate) fn expect_bytes(&mut self, bytes: u64) {
        self.expected_bytes = self.expected_bytes.saturating_add(bytes);
    }

    /// Returns the pool.
    #[must_use]
    pub fn pool(&self) -> &'a Arc<PagePool> {
        self.pool
    }

    /// Reserves addresses under the caller's tag; [`commit`](Self::commit) returns the
    /// reservations.
    ///
    /// # Errors
    /// [`Error::OutOfAddresses`](crate::Error::OutOfAddresses); driver errors.
    pub fn reserve(&mut self, bytes: u64, tag: u64, peers: Peers) -> Result<RangeId> {
        self.reserve_at(bytes, tag, peers).map(|(id, _)| id)
    }

    /// Reserves as above. Also returns the base address.
    pub(crate) fn reserve_at(&mut self, bytes: u64, tag: u64, peers: Peers) -> Result<(RangeId, Address)> {
        let (id, base) = self.pool.reserve(bytes, tag, peers)?;
        self.journal.push(Step::Reserved(id, base, bytes));
        self.calls.all += 1;
        Ok((id, base))
    }

    /// Takes a free or a new page for an owner.
    ///
    /// # Errors
    /// [`Error::OverBudget`](crate::Error::OverBudget) of the account or an ancestor; driver
    /// errors.
    pub fn take(&mut self, bytes: u64, owner: Owner, account: AccountId) -> Result<PageId> {
        let taken = self.pool.take(bytes, owner, account);
        let (page, created) = taken.map_err(|error| error.of_at_least(self.expected_bytes))?;
        self.expected_bytes = self.expected_bytes.saturating_sub(bytes);
        self.journal.push(Step::Taken { page, created });
        self.calls.all += u64::from(created);
        Ok(page)
    }

    /// Pins an owner's page until the commit and returns its bytes. `None`: a different owner or
    /// key.
    pub fn pin_owned(&mut self, page: PageId, owner: Owner) -> Option<u64> {
        let bytes = self.pool.pin(page, owner)?;
        self.expected_bytes = self.expected_bytes.saturating_sub(bytes);
        self.journal.push(Step::Pinned(page));
        Some(bytes)
    }

    /// Maps taken or pinned pages one after the other at unmapped addresses, readable and writable.
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

    /// Unmaps every mapping that begins in a part of a range, unused by the device.
    pub fn unmap(&mut self, range: RangeId, offset: u64, bytes: u64) -> Result<()> {
        let before = self.pool.mapped_in(range, offset, bytes);
        // So no other owner takes these pages while an undo is possible.
        before.iter().for_each(|mapped| self.pool.pin_any(mapped.page));
        let (count, length) = (before.len() as u64, before.iter().map(|mapped| mapped.bytes).sum::<u64>());
        self.journal.push(Step::Unmapped(range, before.into_iter().map(|at| (at.offset, at.page)).collect()));
        self.pool.unmap(range, offset, bytes)?;
        self.calls.all += count;
        self.calls.unmapped_bytes += length;
        Ok(())
    }

    /// Changes the owner of a page. With `sole`, only if it has one mapping and no pin. Returns
    /// whether the owner changed.
    pub fn hand_over(&mut self, page: PageId, from: Owner, to: Owner, sole: bool) -> bool {
        let done = self.pool.hand_over(page, from, to, sole).is_some();
        if done {
            self.journal.push(Step::HandedOver { page, from, to });
        }
        done
    }

    /// Moves the memory of `memory` into a page and maps all its addresses. `None`: the page still
    /// has memory after an incomplete pause or resume. The caller [holds](PagePool::hold) its
    /// ranges.
    pub(crate) fn make_resident(&mut self, page: PageId, memory: Option<PageId>) -> Result<()> {
        // First, so a partial failure is undone too.
        self.journal.push(Step::MadeResident(page));
        let (result, (maps, bytes)) = self.pool.make_resident(page, memory);
        self.calls.all += 2 * maps;
        self.calls.maps += maps;
        self.calls.mapped_bytes += bytes;
        result
    }

    /// Commits. Returns the driver calls and the reservations, in order.
    pub fn commit(mut self) -> (Calls, Vec<Reservation>) {
        let mut reserved = Vec::new();
        for step in std::mem::take(&mut self.journal) {
            match step {
                Step::Reserved(id, base, bytes) => {
                    reserved.push(Reservation::new(self.pool, id, base, bytes));
                }
                Step::Taken { page, .. } | Step::Pinned(page) => self.pool.unpin(page),
                Step::Unmapped(_, before) => before.iter().for_each(|(_, page)| self.pool.unpin(*page)),
                Step::Mapped(..) | Step::HandedOver { .. } | Step::MadeResident(_) => {}
            }
        }
        (self.calls, reserved)
    }

    /// Releases pages without other users to the driver instead of the free lists. Returns false if
    /// the driver refused; the pool retries.
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

    /// Undoes all steps, last first. Returns whether the previous state is restored.
    #[must_use]
    pub fn undo(mut self) -> bool {
        self.roll_back()
    }

    fn roll_back(&mut self) -> bool {
        let mut restored = true;
        while let Some(step) = self.journal.pop() {
            if let Err(error) = self.invert(step) {
                tracing::error!(%error, "undoing a transaction failed");
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
            Step::Taken { page, .. } | Step::Pinned(page) => self.pool.unpin(page),
            Step::Mapped(range, offset, bytes) => self.pool.unmap(range, offset, bytes)?,
            Step::Unmapped(range, before) => {
                let mut result = Ok(());
                for (offset, page) in &before {
                    // After a partial unmap, some mappings still exist.
                    if result.is_ok() && !self.pool.shows(range, *offset, *page) {
                        result = self.pool.map(range, *offset, &[*page]).0;
                    }
                }
                before.iter().for_each(|(_, page)| self.pool.unpin(*page));
                result?;
            }
            // The pool keeps memory refused by the driver.
            Step::MadeResident(page) => drop(self.pool.make_non_resident(page)?),
            Step::HandedOver { page, from, to } => {
                self.pool.hand_over(page, to, from, false);
            }
        }
        Ok(())
    }
}

impl Drop for Transaction<'_> {
    fn drop(&mut self) {
        self.roll_back();
    }
}

impl fmt::Debug for Transaction<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.journal).finish()
    }
}

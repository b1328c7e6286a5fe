//! Pages that show at another holder's place as well, on lease, as long as they show there; and what of an account is never lent.
//!
//! The pool's books say what is on lease: it is noted before a page is mapped there, and goes when it is unmapped, whoever does that.

use std::collections::HashMap;

use super::{Account, AccountId, PageId, PagePool, RangeId};
use crate::error::{Error, Result};
use crate::sync::atomic::Ordering;

/// A page on lease.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lent {
    lease: u64,
    /// Where it shows.
    range: RangeId,
    offset: u64,
    bytes: u64,
    from: AccountId,
    to: AccountId,
}

impl Lent {
    /// The number of its lease.
    pub(super) fn lease(&self) -> u64 {
        self.lease
    }
}

/// What is on lease on a device.
pub(super) type LentPages = HashMap<PageId, Lent>;

/// Where a page is shown that is lent.
pub(crate) type LentPlace = (RangeId, u64);

impl PagePool {
    /// Pages of an account are on lease from now on, each at its place, to somebody with another account. They count for the first one;
    /// of that, and of those above it that are not above the second one too, only what is beyond their [least](super::Limits) is lent.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if that is not so much, [`Error::Exported`] if others have one of them, with nothing changed.
    pub(crate) fn lend(
        &self,
        lease: u64,
        (from, to): (&Account, &Account),
        page_bytes: u64,
        pages: &[(PageId, LentPlace)],
    ) -> Result<()> {
        let bytes = page_bytes * pages.len() as u64;
        let mut state = self.lock();
        pages.iter().try_for_each(|(page, _)| state.require_unexported(*page))?;
        if state.accounts.lendable(from.id(), to.id()) < bytes {
            let expected = "no more than the arena has above what it is sure to get";
            return Err(Error::InvalidArgument { what: "bytes of a lease", value: bytes.into(), expected });
        }
        state.accounts.lend(from.id(), to.id(), bytes as i64);
        for (page, (range, offset)) in pages {
            let (range, offset, from, to) = (*range, *offset, from.id(), to.id());
            // It stays as long as something is on lease to it.
            state.accounts.join(to);
            state.lent.insert(*page, Lent { lease, range, offset, bytes: page_bytes, from, to });
        }
        self.lent.store(state.lent.len() as u64, Ordering::SeqCst);
        Ok(())
    }

    /// Takes back what was noted of a lease's pages that do not show at their places: they could not be mapped there.
    pub(crate) fn unlend(&self, lease: u64) {
        let state = &mut *self.lock();
        let ranges = &state.ranges;
        let shows = |page: &PageId, lent: &Lent| {
            let there = ranges.get(lent.range).and_then(|range| range.mapped.get(&lent.offset));
            there.is_some_and(|(there, _)| there == page)
        };
        let gone = state.lent.extract_if(|page, lent| lent.lease == lease && !shows(page, lent));
        for (_, lent) in gone {
            state.accounts.lend(lent.from, lent.to, -(lent.bytes as i64));
            state.accounts.leave(lent.to);
        }
        self.lent.store(state.lent.len() as u64, Ordering::SeqCst);
    }

    /// How many bytes an account could lend to another one.
    pub(crate) fn lendable(&self, from: &Account, to: Option<&Account>) -> u64 {
        let state = self.lock();
        state.accounts.lendable(from.id(), to.map_or(state.accounts.root(), Account::id))
    }

    /// The leases on any of these pages. Without any lease on the device, one look at a number.
    pub(crate) fn leases<'a>(&self, pages: impl Iterator<Item = &'a PageId>) -> Vec<u64> {
        if self.lent.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let state = self.lock();
        let mut leases: Vec<u64> =
            pages.filter_map(|page| state.lent.get(page)).map(|lent| lent.lease).collect();
        leases.sort_unstable();
        leases.dedup();
        leases
    }

    /// Whether anything on the device is on lease. One look at a number.
    pub(crate) fn any_lent(&self) -> bool {
        self.lent.load(Ordering::SeqCst) > 0
    }

    /// Where the pages of a lease show.
    pub(crate) fn lent_places(&self, lease: u64) -> Vec<LentPlace> {
        let state = self.lock();
        let of = state.lent.values().filter(|lent| lent.lease == lease);
        let mut places: Vec<_> = of.map(|lent| (lent.range, lent.offset)).collect();
        places.sort_unstable();
        places
    }

    /// Bytes on lease, of one lease or of an account's own pages.
    pub(crate) fn lent_bytes(&self, lease: Option<u64>, from: &Account) -> u64 {
        if !self.any_lent() {
            return 0;
        }
        let state = self.lock();
        let of = |lent: &&Lent| lease.map_or(lent.from == from.id(), |lease| lent.lease == lease);
        state.lent.values().filter(of).map(|lent| lent.bytes).sum()
    }

    /// A page does not show there any more: if it was on lease there, that is over.
    pub(super) fn unmapped_from(&self, state: &mut super::pool::State, page: PageId, place: LentPlace) {
        if state.lent.get(&page).is_none_or(|lent| (lent.range, lent.offset) != place) {
            return;
        }
        if let Some(lent) = state.lent.remove(&page) {
            state.accounts.lend(lent.from, lent.to, -(lent.bytes as i64));
            state.accounts.leave(lent.to);
        }
        self.lent.store(state.lent.len() as u64, Ordering::SeqCst);
    }
}

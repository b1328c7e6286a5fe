//! Pages on lease: arena pages also mapped at a borrower's addresses. A lease is recorded before
//! that mapping, and removed at its unmap, by any caller. An atomic counter answers "no leases"
//! without the pool's mutex. An account lends only bytes above its guarantee.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Bound;

use super::{Account, AccountId, Owner, PageId, PagePool, RangeId};
use crate::error::{Error, Result};
use crate::sync::atomic::Ordering;

#[derive(Clone, Copy, Debug)]
pub(super) struct Lent {
    lease: u64,
    range: RangeId,
    offset: u64,
    bytes: u64,
    from: AccountId,
    to: AccountId,
}

impl Lent {
    pub(super) fn lease(&self) -> u64 {
        self.lease
    }
}

pub(crate) type LentPlace = (RangeId, u64);

/// Indexed by page, lease and lending account, so the cost of a query does not grow with the
/// leases.
#[derive(Debug, Default)]
pub(super) struct LentPages {
    pages: HashMap<PageId, Lent>,
    leases: HashMap<u64, Leased>,
    lenders: HashMap<AccountId, u64>,
    candidates: HashMap<AccountId, Candidates>,
    /// Changes of shared pages, except by leases.
    shared_changes: u64,
}

#[derive(Debug, Default)]
struct Leased {
    bytes: u64,
    places: BTreeMap<LentPlace, PageId>,
}

/// Lending order: spaces that map the page, page number descending, page.
pub(crate) type Rank = (usize, u32, PageId);

/// Pages that an arena may lend, in lending order. Leases update the order; other changes require a
/// new ranking.
#[derive(Debug, Default)]
struct Candidates {
    ready: BTreeSet<Rank>,
    ranks: HashMap<PageId, Rank>,
    /// `LentPages::shared_changes` at the ranking.
    ranked_at: u64,
}

impl LentPages {
    /// A page of an arena's shared set has changed: its rankings are out of date.
    pub(super) fn note_change(&mut self, owner: Owner) {
        self.shared_changes += u64::from(matches!(owner, Owner::Shared { .. }));
    }

    pub(super) fn get(&self, page: &PageId) -> Option<&Lent> {
        self.pages.get(page)
    }

    fn len(&self) -> u64 {
        self.pages.len() as u64
    }

    /// Whether a mapping of a page belongs to its lease.
    pub(super) fn is_at(&self, page: PageId, place: LentPlace) -> bool {
        self.pages.get(&page).is_some_and(|lent| (lent.range, lent.offset) == place)
    }

    fn insert(&mut self, page: PageId, lent: Lent) {
        let Lent { lease, range, offset, bytes, from, .. } = lent;
        self.remove(page);
        self.pages.insert(page, lent);
        let leased = self.leases.entry(lease).or_default();
        leased.bytes += bytes;
        leased.places.insert((range, offset), page);
        *self.lenders.entry(from).or_default() += bytes;
        if let Some(Candidates { ready, ranks, .. }) = self.candidates.get_mut(&from)
            && let Some(rank) = ranks.get(&page)
        {
            ready.remove(rank);
        }
    }

    fn remove(&mut self, page: PageId) -> Option<Lent> {
        let lent = self.pages.remove(&page)?;
        if let Some(leased) = self.leases.get_mut(&lent.lease) {
            leased.bytes -= lent.bytes;
            leased.places.remove(&(lent.range, lent.offset));
            if leased.places.is_empty() {
                self.leases.remove(&lent.lease);
            }
        }
        if let Some(bytes) = self.lenders.get_mut(&lent.from) {
            *bytes -= lent.bytes;
            if *bytes == 0 {
                self.lenders.remove(&lent.from);
            }
        }
        if let Some(Candidates { ready, ranks, .. }) = self.candidates.get_mut(&lent.from)
            && let Some(rank) = ranks.get(&page)
        {
            ready.insert(*rank);
        }
        Some(lent)
    }
}

impl PagePool {
    /// Records pages of account `from` as on lease to account `to`, each at its place. They stay
    /// charged to `from`. Each account up to the first ancestor shared with `to` lends at most its
    /// bytes above the [guarantee](super::Limits).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for more bytes; [`Error::Exported`]. Nothing has changed.
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
            let expected = "at most the arena's bytes above its guarantee";
            return Err(Error::InvalidArgument { what: "bytes of a lease", value: bytes.into(), expected });
        }
        state.accounts.lend(from.id(), to.id(), bytes as i64);
        for (page, (range, offset)) in pages {
            let (range, offset, from, to) = (*range, *offset, from.id(), to.id());
            state.accounts.join(to);
            state.lent.insert(*page, Lent { lease, range, offset, bytes: page_bytes, from, to });
        }
        self.lent.store(state.lent.len(), Ordering::SeqCst);
        Ok(())
    }

    /// Removes the records of a lease whose pages could not be mapped.
    pub(crate) fn unlend(&self, lease: u64) {
        let state = &mut *self.lock();
        let shows = |page: &PageId| {
            let lent = state.lent.get(page);
            let range = lent.and_then(|lent| Some((state.ranges.get(lent.range)?, lent.offset)));
            let there = range.and_then(|(range, offset)| range.mapped.get(&offset));
            there.is_some_and(|(there, _)| there == page)
        };
        let leased = state.lent.leases.get(&lease).into_iter().flat_map(|leased| &leased.places);
        let gone: Vec<PageId> = leased.map(|(_, page)| *page).filter(|page| !shows(page)).collect();
        for lent in gone.into_iter().filter_map(|page| state.lent.remove(page)).collect::<Vec<_>>() {
            state.accounts.lend(lent.from, lent.to, -(lent.bytes as i64));
            state.accounts.leave(lent.to);
        }
        self.lent.store(state.lent.len(), Ordering::SeqCst);
    }

    /// `None`: an account without common ancestors.
    pub(crate) fn lendable(&self, from: &Account, to: Option<&Account>) -> u64 {
        let state = self.lock();
        state.accounts.lendable(from.id(), to.map_or(state.accounts.root(), Account::id))
    }

    /// Leases on these pages. Without leases on the device, reads one counter.
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

    /// Reads one counter.
    pub(crate) fn any_lent(&self) -> bool {
        self.lent.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn lent_places(&self, lease: u64) -> Vec<LentPlace> {
        let state = self.lock();
        state.lent.leases.get(&lease).map_or(Vec::new(), |leased| leased.places.keys().copied().collect())
    }

    /// Bytes of one lease, or of an account's own pages.
    pub(crate) fn lent_bytes(&self, lease: Option<u64>, from: &Account) -> u64 {
        if !self.any_lent() {
            return 0;
        }
        let state = self.lock();
        match lease {
            Some(lease) => state.lent.leases.get(&lease).map_or(0, |leased| leased.bytes),
            None => state.lent.lenders.get(&from.id()).copied().unwrap_or(0),
        }
    }

    /// Whether the account's pages are [ranked](Self::rank_candidates), and only leases have
    /// changed them since.
    pub(crate) fn is_ranked(&self, from: &Account) -> bool {
        let state = self.lock();
        let candidates = state.lent.candidates.get(&from.id());
        candidates.is_some_and(|known| known.ranked_at == state.lent.shared_changes)
    }

    pub(crate) fn rank_candidates(&self, from: &Account, pages: &[(u32, PageId)]) {
        let state = &mut *self.lock();
        let rank = |(number, page): &(u32, PageId)| (state.shown_by(*page), u32::MAX - number, *page);
        let ranks: HashMap<PageId, Rank> = pages.iter().map(|named| (named.1, rank(named))).collect();
        let there = ranks.iter().filter(|(page, _)| state.lent.get(page).is_none());
        let ready = there.map(|(_, rank)| *rank).collect();
        let ranked_at = state.lent.shared_changes;
        state.lent.candidates.insert(from.id(), Candidates { ready, ranks, ranked_at });
    }

    pub(crate) fn next_candidate(&self, from: &Account, after: Option<Rank>) -> Option<Rank> {
        let behind = after.map_or(Bound::Unbounded, Bound::Excluded);
        let state = self.lock();
        let candidates = state.lent.candidates.get(&from.id())?;
        candidates.ready.range((behind, Bound::Unbounded)).next().copied()
    }

    pub(crate) fn forget_candidates(&self, from: &Account) {
        self.lock().lent.candidates.remove(&from.id());
    }

    /// Called at every unmap: ends the lease of the page at this place, if any.
    pub(super) fn unmapped_from(
        &self,
        state: &mut super::pool::State,
        page: PageId,
        place: LentPlace,
    ) -> bool {
        let lent = if state.lent.is_at(page, place) { state.lent.remove(page) } else { None };
        let Some(lent) = lent else { return false };
        state.accounts.lend(lent.from, lent.to, -(lent.bytes as i64));
        state.accounts.leave(lent.to);
        self.lent.store(state.lent.len(), Ordering::SeqCst);
        true
    }
}

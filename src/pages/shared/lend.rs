use std::collections::BTreeSet;

use super::super::{Class, PageId, Transaction};
use super::{Numbers, SharedSet};
use crate::error::{Error, Result};
use crate::sync::atomic::Ordering;

/// Leases on pages, each once, ascending.
fn leases_of<'a>(pages: impl Iterator<Item = &'a (u32, PageId, Option<u64>)>) -> Vec<u64> {
    pages.filter_map(|(.., lease)| *lease).collect::<BTreeSet<_>>().into_iter().collect()
}

impl SharedSet {
    /// Returns the number of large pages not on lease and not [bound to their
    /// number](Self::is_pinned).
    #[must_use]
    pub fn lendable(&self) -> u64 {
        self.free_large_ones().len() as u64
    }

    /// Large pages which may be lent, mapped by the fewest spaces first.
    #[must_use]
    pub(crate) fn free_large_pages(&self) -> Vec<PageId> {
        let free = self.free_large_ones().into_iter();
        let mut ranked: Vec<_> =
            free.map(|(number, page)| (self.pool.shown_by(page), u32::MAX - number, page)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(.., page)| page).collect()
    }

    fn free_large_ones(&self) -> Vec<(u32, PageId)> {
        let numbers = self.numbers.lock();
        let free =
            |page: PageId| !self.keeps_number(&numbers, page) && self.pool.leases([page].iter()).is_empty();
        self.large_ones(&numbers).filter(|(_, page)| free(*page)).collect()
    }

    fn large_ones(&self, numbers: &Numbers) -> impl Iterator<Item = (u32, PageId)> {
        let large = numbers.pages.iter().filter(|(no, _)| no.class == Class::Large);
        large.filter(|(_, page)| self.is_ours(**page)).map(|(no, page)| (no.index, *page))
    }

    /// Takes large pages to lend, pinned by the transaction, mapped by the fewest spaces first:
    /// `wanted` or all available ones. Pages are ranked again only if pages of an arena changed
    /// since the last lease.
    pub(crate) fn to_lend(&self, transaction: &mut Transaction<'_>, wanted: usize) -> Vec<PageId> {
        let (numbers, pool) = (self.numbers.lock(), &self.pool);
        if !pool.is_ranked(&self.account) {
            pool.rank_candidates(&self.account, &self.large_ones(&numbers).collect::<Vec<_>>());
        }
        let (mut taken, mut after) = (Vec::new(), None);
        while taken.len() < wanted {
            after = pool.next_candidate(&self.account, after);
            let Some((.., page)) = after else { break };
            // A trim or seal on a different thread may have taken the page.
            let may_leave = self.is_ours(page) && !self.keeps_number(&numbers, page);
            if may_leave && transaction.pin_owned(page, self.owner()) == Some(self.geometry.large()) {
                taken.push(page);
            }
        }
        taken
    }

    /// Returns the numbers of large pages on lease.
    #[must_use]
    pub fn on_lease(&self) -> BTreeSet<u32> {
        if !self.pool.any_lent() {
            return BTreeSet::new();
        }
        self.large().into_iter().filter(|(_, _, lease)| lease.is_some()).map(|(index, ..)| index).collect()
    }

    /// Returns the numbers on lease, for work that needs `bytes` of other large pages. A number
    /// without a page counts as available, since graphs need a new page anyway.
    ///
    /// # Errors
    /// [`Error::Lent`] with enough leases, on the lowest numbers, to cover the difference.
    pub fn beside_leases(&self, bytes: u64) -> Result<BTreeSet<u32>> {
        if !self.pool.any_lent() {
            return Ok(BTreeSet::new());
        }
        let (all, page) = (self.large(), self.geometry.large());
        let lent = || all.iter().filter(|(_, _, lease)| lease.is_some());
        let numbers = self.numbers.lock();
        let stay = all
            .iter()
            .filter(|(_, page, lease)| lease.is_none() && self.keeps_number(&numbers, *page))
            .count();
        drop(numbers);
        let most = all.last().map_or(0, |(index, ..)| u64::from(*index) + 1);
        let there = most - (lent().count() + stay) as u64;
        let short = bytes.div_ceil(page).saturating_sub(there);
        if short > 0 && lent().next().is_some() {
            return Err(Error::Lent {
                leases: leases_of(lent().take(usize::try_from(short).unwrap_or(usize::MAX))),
            });
        }
        Ok(lent().map(|(index, ..)| *index).collect())
    }

    /// Whether a large page has a number above `index`.
    #[must_use]
    pub fn listed_above(&self, index: u32) -> bool {
        self.large().last().is_some_and(|(last, ..)| *last > index)
    }

    /// Returns the leases on the first `pages` lent large pages, by number.
    #[must_use]
    pub fn leases(&self, pages: usize) -> Vec<u64> {
        leases_of(self.large().iter().filter(|(_, _, lease)| lease.is_some()).take(pages))
    }

    fn large(&self) -> Vec<(u32, PageId, Option<u64>)> {
        let numbers = self.numbers.lock();
        let lease = |page: PageId| self.pool.leases([page].iter()).first().copied();
        let mut all: Vec<_> =
            self.large_ones(&numbers).map(|(index, page)| (index, page, lease(page))).collect();
        all.sort_unstable();
        all
    }

    /// Called after a lease: spaces with a lent page must check before the device uses it.
    pub fn lent(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }
}

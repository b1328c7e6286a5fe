//! Leases: pages of an arena, also mapped in elastic memory.

use super::super::Committed;
use super::super::page_states::{Place, Run};
use super::Backing;
use super::moving::Marks;
use crate::error::{Error, Result};
use crate::pages::{Fence, LentPlace, Owner, PageId, Reservation, Transaction};

type Choose<'a> = dyn FnMut(&mut Transaction<'_>, &[LentPlace]) -> Result<Vec<PageId>> + 'a;

/// Lender of a lease. The caller owns the lender's replay slot.
pub(crate) struct Lender<'a> {
    /// Chooses pages, pins the pages in the transaction, and records the lease at these places.
    pub(crate) choose: &'a mut Choose<'a>,
    /// Earlier work of the lender on the pages.
    pub(crate) fence: Fence,
}

impl Backing {
    /// Maps a lender's pages at all absent places: all or none. Waits for pages being moved. With
    /// `whole`, fails if any page has memory.
    pub(in super::super) fn borrow(&self, runs: &[Run], whole: bool, lender: Lender<'_>) -> Result<()> {
        let there = |reason| {
            Error::wrong_state(format!(
                "cannot lend pages to that part of elastic memory: pages there are {reason}; decommit or recall them first"
            ))
        };
        self.settle();
        let plan = self.when_at_rest(runs, |states| {
            if states.is_recalled(runs) {
                return Err(there("being recalled"));
            }
            if whole && !states.is_empty(runs) { Err(there("committed")) } else { Ok(states.begin(runs)) }
        })??;
        let marked = Marks { backing: self, plan: Some(plan) };
        let Some(plan) = &marked.plan else { return Ok(()) };
        let absent = plan.absent.clone();
        let mut places = Vec::new();
        for (range, page) in absent.iter().flat_map(|run| run.places()) {
            let range = self.range(range)?;
            places.push((range.id(), page * self.page));
        }
        let mut transaction = Transaction::on(self.device.pool());
        let pages = (lender.choose)(&mut transaction, &places)?;
        self.read(|states| states.borrow(absent.iter().flat_map(|run| run.places())));
        let mut rest = pages.as_slice();
        for run in &absent {
            let Some((these, others)) = rest.split_at_checked(run.pages() as usize) else {
                return Err(Error::Internal { what: "fewer pages were lent than were asked for".to_owned() });
            };
            transaction.map(self.range(run.range)?.id(), run.first * self.page, these)?;
            rest = others;
        }
        let revived = plan.revived_pages();
        let calls = transaction.commit().0;
        let done =
            Committed { pages: calls.maps, bytes: calls.mapped_bytes, revived, ..Committed::default() };
        self.notify(&absent, false);
        self.read(|states| states.lent(absent.into_iter().flat_map(Run::places), lender.fence));
        marked.finish(&done);
        self.device.pool().check();
        Ok(())
    }

    fn range(&self, range: usize) -> Result<&Reservation> {
        let lacks = || Error::Internal { what: "an elastic buffer lacks a range".to_owned() };
        self.ranges.get(range).ok_or_else(lacks)
    }

    /// Converts places of the pool to places of this backing.
    pub(in super::super) fn places(&self, lent: &[LentPlace]) -> Vec<Place> {
        let number = |id| self.ranges.iter().position(|range| range.id() == id);
        lent.iter().filter_map(|(id, offset)| Some((number(*id)?, offset / self.page))).collect()
    }

    pub(in super::super) fn recall(&self, places: &[Place]) {
        self.read(|states| states.recall(places.iter().copied()));
    }

    pub(in super::super) fn owned(&self, runs: &[Run]) -> Vec<Run> {
        self.read(|states| states.owned(runs))
    }

    fn owner(&self) -> Owner {
        Owner::Elastic { buffer: self.id }
    }

    /// Returns the bytes of mapped pages with other owners.
    pub(super) fn borrowed(&self) -> u64 {
        let pool = self.device.pool();
        let mapped = self.ranges.iter().flat_map(|range| range.mapped());
        mapped.filter(|at| pool.owner(at.page) != Some(self.owner())).map(|at| at.bytes).sum()
    }
}

//! Pages of another holder that show here too, on lease.

use super::super::Committed;
use super::super::books::{Place, Run};
use super::Backing;
use super::moving::Marks;
use crate::error::{Error, Result};
use crate::pages::{Change, Fence, Holder, LentPlace, PageId, Reservation};

type Choose<'a> = dyn FnMut(&mut Change<'_>, &[LentPlace]) -> Result<Vec<PageId>> + 'a;

/// Who lends, in his own order's turn.
pub(crate) struct Lender<'a> {
    /// Chooses pages, has the change rely on them, so that nobody takes them away meanwhile, and notes that they are on lease at these places.
    pub(crate) choose: &'a mut Choose<'a>,
    /// What used them before.
    pub(crate) fence: Fence,
}

impl Backing {
    /// Shows a lender's pages wherever nothing is of these; all or none. What is there is to be at rest, and may be its own pages only.
    /// `whole`: nothing may be there.
    pub(in super::super) fn borrow(&self, runs: &[Run], whole: bool, lender: Lender<'_>) -> Result<()> {
        let there = |reason| {
            Error::wrong_state(format!(
                "cannot lend pages to that part of elastic memory: pages there are {reason}; decommit or recall them first"
            ))
        };
        self.settle();
        let plan = self.when_at_rest(runs, |books| {
            if books.is_recalled(runs) {
                return Err(there("being recalled"));
            }
            if whole && !books.is_empty(runs) { Err(there("committed")) } else { Ok(books.begin(runs)) }
        })??;
        let marked = Marks { backing: self, plan: Some(plan) };
        let Some(plan) = &marked.plan else { return Ok(()) };
        let absent = plan.absent.clone();
        let mut places = Vec::new();
        for (range, page) in absent.iter().flat_map(|run| run.places()) {
            let range = self.range(range)?;
            places.push((range.id(), page * self.page));
        }
        let mut change = Change::on(self.device.pool());
        let pages = (lender.choose)(&mut change, &places)?;
        self.read(|books| books.borrow(absent.iter().flat_map(|run| run.places())));
        let mut rest = pages.as_slice();
        for run in &absent {
            let Some((these, others)) = rest.split_at_checked(run.pages() as usize) else {
                return Err(Error::Internal { what: "fewer pages were lent than were asked for".to_owned() });
            };
            change.map(self.range(run.range)?.id(), run.first * self.page, these)?;
            rest = others;
        }
        let revived = plan.revived_pages();
        let calls = change.commit().0;
        let done =
            Committed { pages: calls.maps, bytes: calls.mapped_bytes, revived, ..Committed::default() };
        self.tell(&absent, false);
        self.read(|books| books.lent(absent.into_iter().flat_map(Run::places), lender.fence));
        marked.finish(&done);
        self.device.pool().check();
        Ok(())
    }

    fn range(&self, range: usize) -> Result<&Reservation> {
        let lacks = || Error::Internal { what: "an elastic buffer lacks a range".to_owned() };
        self.ranges.get(range).ok_or_else(lacks)
    }

    /// Which of its pages these are.
    pub(in super::super) fn places(&self, lent: &[LentPlace]) -> Vec<Place> {
        let number = |id| self.ranges.iter().position(|range| range.id() == id);
        lent.iter().filter_map(|(id, offset)| Some((number(*id)?, offset / self.page))).collect()
    }

    /// Nothing is committed at these places any more until what is there has gone.
    pub(in super::super) fn recall(&self, places: &[Place]) {
        self.read(|books| books.recall(places.iter().copied()));
    }

    /// Which of the pages that are there are its own.
    pub(in super::super) fn owned(&self, runs: &[Run]) -> Vec<Run> {
        self.read(|books| books.owned(runs))
    }

    fn holder(&self) -> Holder {
        Holder::Elastic { buffer: self.id }
    }

    /// Bytes that show here and are others'.
    pub(super) fn borrowed(&self) -> u64 {
        let pool = self.device.pool();
        let mapped = self.ranges.iter().flat_map(|range| range.mapped());
        mapped.filter(|at| pool.holder(at.page) != Some(self.holder())).map(|at| at.bytes).sum()
    }
}

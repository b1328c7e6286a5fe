//! Commit: pages for all requested blocks or for none, from the device or from a lender. Waits for
//! pages on their way, marks absent pages as committing, maps the pages in one transaction,
//! notifies observers, backs the blocks.

use std::sync::Arc;

use super::super::planes::Run;
use super::super::table::{Obstacle, Plan, Request, Table};
use super::super::{Committed, Pending};
use super::Backing;
use crate::error::{Error, Result};
use crate::pages::{Fence, LentPlace, PageId, Transaction};

type Choose<'a> = dyn FnMut(&mut Transaction<'_>, &[LentPlace]) -> Result<Vec<PageId>> + 'a;

/// The caller owns the lender's replay slot.
pub(crate) struct Lender<'a> {
    /// Chooses and pins the pages, and records the lease at these places.
    pub(crate) choose: &'a mut Choose<'a>,
    /// Earlier work of the lender on the pages.
    pub(crate) fence: Fence,
}

impl Backing {
    /// Calls reclaimers before failing, without a lock.
    pub(in super::super) fn commit(&self, request: &Request) -> Result<Committed> {
        let mut memory_retry = self.device.pool().memory_retry();
        loop {
            match self.map(self.mark(request)?, None) {
                Err(error) if memory_retry.helps(&error) => {}
                result => return result,
            }
        }
    }

    /// Commits on the worker thread, without reclaimers. The caller's thread marks the pages of a
    /// buffer, unless some are on their way.
    pub(in super::super) fn commit_async(self: &Arc<Self>, request: Request) -> Pending {
        let hopeless = self.refuse_hopeless(&request).is_err();
        let (there, marked) = (Arc::clone(self), request.clone());
        let mark = || {
            let Request { blocks, ahead, .. } = &marked;
            let free = |table: &Table| {
                !hopeless && ahead.is_none() && !table.is_moving(blocks) && table.obstacle(&marked).is_none()
            };
            self.table.change(|table| free(table).then(|| table.begin(&marked)))
        };
        self.worker.push(mark, move |plan| {
            let plan = plan.map_or_else(|| there.mark(&request), Ok);
            let done = plan.and_then(|plan| there.map(plan, None));
            if let Some(number) = request.ahead {
                there.read(|table| table.limits().end_ahead(number));
            }
            done
        })
    }

    /// Maps a lender's pages at all absent places. With `whole`, fails if a page has memory;
    /// otherwise, if a block has.
    pub(in super::super) fn borrow(&self, request: &Request, whole: bool, lender: Lender<'_>) -> Result<()> {
        let blocks = &request.blocks;
        let begin = |table: &mut Table| {
            let reason = match table.obstacle(request) {
                Some(obstacle @ Obstacle::BeyondLimit { .. }) => return Err(self.refusal(request, obstacle)),
                Some(Obstacle::Recalled) => "being recalled",
                None if whole && !table.is_absent(blocks) => "committed",
                None if table.is_backed(blocks) => {
                    return Err(Error::wrong_state(format!(
                        "cannot lend pages to blocks {}..{}: some have memory already; decommit them first",
                        blocks.start, blocks.end
                    )));
                }
                None => return Ok(table.begin(request)),
            };
            Err(Error::wrong_state(format!(
                "cannot lend pages to that part of elastic memory: pages there are {reason}; decommit or recall them first"
            )))
        };
        self.reap();
        let plan = self.when_not(|table| table.is_in_the_way(request), begin)??;
        self.map(plan, Some(lender)).map(drop)
    }

    fn refuse_hopeless(&self, request: &Request) -> Result<()> {
        let pages = self.shape.pages(&request.blocks);
        let pages = pages.iter().fold(0_u64, |pages, run| pages.saturating_add(run.pages()));
        self.device.pool().refuse_hopeless(pages.saturating_mul(self.page()))
    }

    /// Marks absent pages, once no other thread moves them.
    fn mark(&self, request: &Request) -> Result<Plan> {
        self.refuse_hopeless(request)?;
        let begin = |table: &mut Table| match table.obstacle(request) {
            Some(obstacle) => Err(obstacle),
            None => Ok(table.begin(request)),
        };
        let mut plan = self.when_not(|table| table.is_in_the_way(request), begin)?;
        if plan.as_ref().err() == Some(&Obstacle::Recalled) {
            self.reap();
            plan = self.when_not(|table| table.is_in_the_way(request), begin)?;
        }
        plan.map_err(|obstacle| self.refusal(request, obstacle))
    }

    fn refusal(&self, request: &Request, obstacle: Obstacle) -> Error {
        let bytes = |blocks: u64| blocks * self.shape.block();
        match obstacle {
            Obstacle::Recalled => Error::wrong_state(
                "cannot commit that part of elastic memory: pages lent there are being recalled; try again when the recall is over",
            ),
            Obstacle::BeyondLimit { limit, backed } => Error::OverBudget {
                requested: bytes(request.blocks.end - limit),
                held: bytes(backed),
                budget: bytes(limit),
                device: self.device.driver().info().ordinal,
                account: Some(format!("the block limit of elastic buffer {}", self.id)),
                lowest: Some(0),
                space: None,
            },
        }
    }

    fn map(&self, plan: Plan, lender: Option<Lender<'_>>) -> Result<Committed> {
        let marks = Marks { backing: self, plan: Some(plan) };
        let Some(plan) = &marks.plan else { return Ok(Committed::default()) };
        let mut transaction = Transaction::on(self.device.pool());
        let own = lender.is_none();
        let (pages, work) = match lender {
            None => (self.take_pages(&mut transaction, plan)?, Fence::default()),
            Some(lender) => {
                let mut places = Vec::new();
                for (range, page) in plan.absent_places() {
                    places.push((self.range(range)?.id(), page * self.page()));
                }
                let pages = (lender.choose)(&mut transaction, &places)?;
                self.read(|table| table.lend(plan.absent_places()));
                (pages, lender.fence)
            }
        };
        let mut rest = pages.as_slice();
        for run in plan.absent() {
            let Some((these, others)) = rest.split_at_checked(run.pages() as usize) else {
                return Err(Error::Internal { what: "fewer pages were lent than were asked for".to_owned() });
            };
            transaction.map(self.range(run.range)?.id(), run.first * self.page(), these)?;
            rest = others;
        }
        let calls = transaction.commit().0;
        // A mapped page costs two calls, a created one three.
        let created = if own { calls.all - 2 * calls.maps } else { 0 };
        let revived = plan.revived_pages();
        let done = Committed { bytes: calls.mapped_bytes, pages: calls.maps, created, revived };
        self.notify(plan.absent(), false);
        if marks.finish(&done, work) {
            self.reap();
        }
        self.device.pool().check();
        Ok(done)
    }

    fn take_pages(&self, transaction: &mut Transaction<'_>, plan: &Plan) -> Result<Vec<PageId>> {
        // After the marks, so pages committed again stay mapped.
        self.reap();
        let pages: u64 = plan.absent().iter().map(Run::pages).sum();
        transaction.expect_bytes(pages * self.page());
        (0..pages).map(|_| transaction.take(self.page(), self.owner(), self.account.id())).collect()
    }
}

/// Dropping without `finish`, also after a panic, restores the previous states.
struct Marks<'a> {
    backing: &'a Backing,
    plan: Option<Plan>,
}

impl Marks<'_> {
    fn finish(mut self, done: &Committed, work: Fence) -> bool {
        let Some(plan) = self.plan.take() else { return false };
        self.backing.table.change(|table| table.finish(plan, done, work))
    }
}

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        let (Some(plan), backing) = (self.plan.take(), self.backing) else { return };
        backing.table.change(|table| table.abort(plan, |place| backing.is_mapped(place)));
    }
}

//! Guards of pages being moved: at their drop, also after a panic, the page states equal the
//! mappings.

use super::super::Committed;
use super::super::books::{Plan, Run};
use super::Backing;

/// Coming pages. Dropping without `finish` restores the previous states.
pub(super) struct Marks<'a> {
    pub(super) backing: &'a Backing,
    pub(super) plan: Option<Plan>,
}

impl Marks<'_> {
    pub(super) fn finish(mut self, done: &Committed) {
        let Some(plan) = self.plan.take() else { return };
        self.backing.books.change(|books| {
            books.finish(plan);
            books.counts.mapped += done.pages;
            books.counts.created += done.created;
        });
    }
}

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        let backing = self.backing;
        let kept =
            plan.absent.iter().flat_map(|run| run.places()).filter(|at| backing.is_mapped(*at)).count();
        backing.books.change(|books| {
            books.abort(plan, |place| backing.is_mapped(place));
            // Pages with a failed undo stay mapped.
            books.counts.mapped += kept as u64;
        });
    }
}

pub(super) struct Leaving<'a> {
    pub(super) backing: &'a Backing,
    pub(super) runs: Vec<Run>,
}

impl Leaving<'_> {
    pub(super) fn end(mut self) -> u64 {
        self.note()
    }

    fn note(&mut self) -> u64 {
        let (backing, runs) = (self.backing, std::mem::take(&mut self.runs));
        backing.books.change(|books| {
            let gone = books.unmapped(&runs, |place| backing.is_mapped(place));
            books.counts.unmapped += gone;
            gone
        })
    }
}

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.note();
    }
}

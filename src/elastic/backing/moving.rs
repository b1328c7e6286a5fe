//! Guards of pages being moved: at their drop, also after a panic, the page states equal the
//! mappings.

use super::super::Committed;
use super::super::page_states::{Plan, Run};
use super::Backing;

/// Committing pages. Dropping without `finish` restores the previous states.
pub(super) struct Marks<'a> {
    pub(super) backing: &'a Backing,
    pub(super) plan: Option<Plan>,
}

impl Marks<'_> {
    pub(super) fn finish(mut self, done: &Committed) {
        let Some(plan) = self.plan.take() else { return };
        self.backing.states.change(|states| {
            states.finish(plan);
            states.counts.mapped += done.pages;
            states.counts.created += done.created;
        });
    }
}

impl Drop for Marks<'_> {
    fn drop(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        let backing = self.backing;
        let kept =
            plan.absent.iter().flat_map(|run| run.places()).filter(|at| backing.is_mapped(*at)).count();
        backing.states.change(|states| {
            states.abort(plan, |place| backing.is_mapped(place));
            // Pages with a failed undo stay mapped.
            states.counts.mapped += kept as u64;
        });
    }
}

pub(super) struct UnmapGuard<'a> {
    pub(super) backing: &'a Backing,
    pub(super) runs: Vec<Run>,
}

impl UnmapGuard<'_> {
    pub(super) fn end(mut self) -> u64 {
        self.note()
    }

    fn note(&mut self) -> u64 {
        let (backing, runs) = (self.backing, std::mem::take(&mut self.runs));
        backing.states.change(|states| {
            let gone = states.unmapped(&runs, |place| backing.is_mapped(place));
            states.counts.unmapped += gone;
            gone
        })
    }
}

impl Drop for UnmapGuard<'_> {
    fn drop(&mut self) {
        self.note();
    }
}

//! State of each page of a backing: absent, committing, committed, decommitted or unmapping.
//!
//! Makes no driver calls, except queries of fences. The monitor of `Backing` guards the state.
//! Invariants:
//!
//! * A page in `Committing` or `Unmapping` belongs to the thread which moves it.
//! * A page in `Decommitted` is in exactly one batch, and is unmapped after the batch's fence.
//! * `tally` counts the pages of each state.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::pages::{Events, Fence, Poll};

/// Place of a page: range number, and page number in the range.
pub(super) type Place = (usize, u64);

/// Consecutive pages of one range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) range: usize,
    pub(super) first: u64,
    /// One past the last page.
    pub(super) end: u64,
}

impl Run {
    pub(super) fn pages(&self) -> u64 {
        self.end - self.first
    }

    pub(super) fn places(self) -> impl Iterator<Item = Place> {
        (self.first..self.end).map(move |page| (self.range, page))
    }
}

/// Joins sorted places to runs.
pub(super) fn runs_of(places: impl IntoIterator<Item = Place>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (range, page) in places {
        match runs.last_mut() {
            Some(run) if run.range == range && run.end == page => run.end += 1,
            _ => runs.push(Run { range, first: page, end: page + 1 }),
        }
    }
    runs
}

/// State of a page. Absent pages have no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PageState {
    Committing,
    Committed,
    /// Decommitted; mapped until the fence of this batch is done.
    Decommitted(u64),
    Unmapping,
}

/// Pages and the fence of the work that may use them.
#[derive(Debug)]
struct Batch {
    fence: Fence,
    pages: BTreeSet<Place>,
}

impl Batch {
    /// Returns `None` without pages or without a fence.
    fn of(pages: impl IntoIterator<Item = Place>, fence: Fence) -> Option<Self> {
        let pages: BTreeSet<Place> = pages.into_iter().collect();
        (!pages.is_empty() && !fence.is_empty()).then_some(Self { fence, pages })
    }
}

/// Steps of a commit. All its pages are `Committing` until the commit ends.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) absent: Vec<Run>,
    /// Decommitted pages which stay mapped.
    revived: Vec<(u64, Fence, Vec<Place>)>,
}

impl Plan {
    pub(super) fn absent_pages(&self) -> u64 {
        self.absent.iter().map(Run::pages).sum()
    }

    pub(super) fn revived_pages(&self) -> u64 {
        self.revived.iter().map(|(.., pages)| pages.len() as u64).sum()
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) committed: u64,
    pub(super) committing: u64,
    pub(super) decommitted: u64,
}

#[derive(Debug, Default)]
pub(super) struct PageStates {
    slots: BTreeMap<Place, PageState>,
    /// Pages decommitted together, by batch number.
    batches: BTreeMap<u64, Batch>,
    next: u64,
    tally: Tally,
    /// Mapped pages that a previous user may still access. Unmapped after that user's fence.
    previous_users: Vec<Batch>,
    /// Mapped pages of lenders and the lenders' own work, at other addresses. Users of the pages
    /// wait for the work; the unmap does not.
    lent: Vec<Batch>,
    /// Mapped pages of lenders.
    borrowed: BTreeSet<Place>,
    /// Recalled pages of lenders. Commits at these places fail until the unmap.
    recalled: BTreeSet<Place>,
    pub(super) counts: Counts,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Counts {
    pub(super) commits: u64,
    pub(super) refused: u64,
    pub(super) decommits: u64,
    pub(super) mapped: u64,
    pub(super) created: u64,
    pub(super) revived: u64,
    pub(super) unmapped: u64,
    pub(super) most_committed: u64,
}

impl PageStates {
    pub(super) fn tally(&self) -> Tally {
        self.tally
    }

    fn set(&mut self, place: Place, state: Option<PageState>) {
        let old = match state {
            Some(state) => self.slots.insert(place, state),
            None => {
                self.borrowed.remove(&place);
                self.recalled.remove(&place);
                self.slots.remove(&place)
            }
        };
        if let Some(old) = old {
            *self.count(old) -= 1;
        }
        if let Some(state) = state {
            *self.count(state) += 1;
        }
    }

    fn count(&mut self, state: PageState) -> &mut u64 {
        match state {
            PageState::Committing => &mut self.tally.committing,
            PageState::Committed => &mut self.tally.committed,
            PageState::Decommitted(_) | PageState::Unmapping => &mut self.tally.decommitted,
        }
    }

    fn slots_in(&self, run: Run) -> impl Iterator<Item = (Place, PageState)> {
        let found = self.slots.range((run.range, run.first)..(run.range, run.end));
        found.map(|(place, state)| (*place, *state))
    }

    pub(super) fn moving(&self, runs: &[Run]) -> bool {
        let mut all = runs.iter().flat_map(|run| self.slots_in(*run));
        all.any(|(_, state)| matches!(state, PageState::Committing | PageState::Unmapping))
    }

    pub(super) fn is_empty(&self, runs: &[Run]) -> bool {
        runs.iter().all(|run| self.slots_in(*run).next().is_none())
    }

    pub(super) fn recall(&mut self, places: impl IntoIterator<Item = Place>) {
        let slots = &self.slots;
        self.recalled.extend(places.into_iter().filter(|place| slots.contains_key(place)));
    }

    pub(super) fn is_recalled(&self, runs: &[Run]) -> bool {
        !self.recalled.is_empty()
            && runs
                .iter()
                .any(|run| self.recalled.range((run.range, run.first)..(run.range, run.end)).next().is_some())
    }

    pub(super) fn committed(&self, runs: &[Run]) -> Vec<Run> {
        let all = runs.iter().flat_map(|run| self.slots_in(*run));
        runs_of(all.filter(|(_, state)| *state == PageState::Committed).map(|(place, _)| place))
    }

    /// As [`committed`](Self::committed), without lenders' pages. Returns early if all mapped pages
    /// are lent.
    pub(super) fn owned(&self, runs: &[Run]) -> Vec<Run> {
        if self.borrowed.len() == self.slots.len() {
            return Vec::new();
        }
        let all = runs.iter().flat_map(|run| self.slots_in(*run));
        let own =
            all.filter(|(place, state)| *state == PageState::Committed && !self.borrowed.contains(place));
        runs_of(own.map(|(place, _)| place))
    }

    pub(super) fn borrow(&mut self, places: impl IntoIterator<Item = Place>) {
        self.borrowed.extend(places);
    }

    /// Begins a commit. No page of the runs may be [moving](Self::moving).
    pub(super) fn begin(&mut self, runs: &[Run]) -> Plan {
        let mut absent = BTreeSet::new();
        let mut revived: BTreeMap<u64, Vec<Place>> = BTreeMap::new();
        for place in runs.iter().flat_map(|run| run.places()) {
            match self.slots.get(&place) {
                None => {
                    absent.insert(place);
                }
                Some(PageState::Decommitted(batch)) => revived.entry(*batch).or_default().push(place),
                Some(_) => {}
            }
        }
        let mut plan = Plan { absent: runs_of(absent.iter().copied()), revived: Vec::new() };
        for (number, places) in revived {
            let Some(batch) = self.batches.get_mut(&number) else { continue };
            places.iter().for_each(|place| {
                batch.pages.remove(place);
            });
            plan.revived.push((number, batch.fence.clone(), places));
        }
        let committing = plan.revived.iter().flat_map(|(.., places)| places.iter().copied());
        for place in absent.into_iter().chain(committing.collect::<Vec<_>>()) {
            self.set(place, Some(PageState::Committing));
        }
        self.batches.retain(|_, batch| !batch.pages.is_empty());
        plan
    }

    pub(super) fn finish(&mut self, plan: Plan) {
        self.counts.revived += plan.revived_pages();
        for place in plan.absent.iter().flat_map(|run| run.places()) {
            self.set(place, Some(PageState::Committed));
        }
        for (_, fence, places) in plan.revived {
            places.iter().for_each(|place| self.set(*place, Some(PageState::Committed)));
            self.previous_users(places, fence);
        }
        self.counts.commits += 1;
        self.counts.most_committed = self.counts.most_committed.max(self.tally.committed);
    }

    /// Restores the states before a failed commit. `mapped`: the undo of the page failed.
    pub(super) fn abort(&mut self, plan: Plan, mapped: impl Fn(Place) -> bool) {
        self.counts.refused += 1;
        self.unmapped(&plan.absent, &mapped);
        for (number, fence, places) in plan.revived {
            for place in &places {
                self.set(*place, Some(PageState::Decommitted(number)));
            }
            let batch = self.batches.entry(number).or_insert(Batch { fence, pages: BTreeSet::new() });
            batch.pages.extend(places);
        }
    }

    pub(super) fn previous_users(&mut self, places: impl IntoIterator<Item = Place>, fence: Fence) {
        self.previous_users.extend(Batch::of(places, fence));
    }

    pub(super) fn lent(&mut self, places: impl IntoIterator<Item = Place>, fence: Fence) {
        self.lent.extend(Batch::of(places, fence));
    }

    /// Returns the fences of previous users and lenders of mapped pages.
    pub(super) fn earlier(&self) -> Fence {
        let mut fence = Fence::default();
        self.previous_users.iter().chain(&self.lent).for_each(|batch| fence.join(batch.fence.clone()));
        fence
    }

    /// Decommits present pages and returns their number. No page may be [moving](Self::moving).
    pub(super) fn decommit(&mut self, runs: &[Run], fence: Fence) -> u64 {
        let mut pages: BTreeSet<Place> = self.committed(runs).iter().flat_map(|run| run.places()).collect();
        let count = pages.len() as u64;
        if count == 0 {
            return 0;
        }
        self.counts.decommits += 1;
        // `fence` does not cover earlier users of some pages. Only these pages also wait for their
        // users' fences.
        let mut again = Batch { fence: fence.clone(), pages: BTreeSet::new() };
        self.previous_users.retain_mut(|batch| {
            let shared: Vec<Place> = batch.pages.intersection(&pages).copied().collect();
            if !shared.is_empty() {
                again.fence.join(batch.fence.clone());
                batch.pages.retain(|place| !pages.contains(place));
                again.pages.extend(shared);
            }
            !batch.pages.is_empty()
        });
        pages.retain(|place| !again.pages.contains(place));
        self.add_batch(again.fence, again.pages);
        self.add_batch(fence, pages);
        count
    }

    fn add_batch(&mut self, fence: Fence, pages: BTreeSet<Place>) {
        if pages.is_empty() {
            return;
        }
        let number = self.next;
        self.next += 1;
        pages.iter().for_each(|place| self.set(*place, Some(PageState::Decommitted(number))));
        self.batches.insert(number, Batch { fence, pages });
    }

    /// Marks decommitted pages with finished fences as unmapping and returns their runs.
    pub(super) fn take_done(&mut self, events: &Arc<Events>) -> Vec<Run> {
        // Drops finished fences. A fence whose query fails stays.
        let mut poll = Poll::new(events);
        let mut is_over = |batch: &mut Batch| batch.fence.done_at(&mut poll).unwrap_or(false);
        self.previous_users.retain_mut(|batch| !is_over(batch));
        self.lent.retain_mut(|batch| !is_over(batch));
        let mut done = BTreeSet::new();
        self.batches.retain(|_, batch| {
            let over = is_over(batch);
            if over {
                done.append(&mut batch.pages);
            }
            !over
        });
        done.iter().for_each(|place| self.set(*place, Some(PageState::Unmapping)));
        runs_of(done)
    }

    /// Ends an unmap and returns the number of unmapped pages. Pages refused by the driver
    /// (`mapped`) are decommitted again.
    pub(super) fn unmapped(&mut self, runs: &[Run], mapped: impl Fn(Place) -> bool) -> u64 {
        let (mut left, mut gone) = (BTreeSet::new(), 0);
        for place in runs.iter().flat_map(|run| run.places()) {
            if mapped(place) {
                left.insert(place);
            } else {
                self.set(place, None);
                gone += 1;
            }
        }
        let slots = &self.slots;
        self.lent.retain_mut(|batch| {
            batch.pages.retain(|place| slots.contains_key(place));
            !batch.pages.is_empty()
        });
        self.add_batch(Fence::default(), left);
        gone
    }

    pub(super) fn fences(&self) -> Vec<Fence> {
        self.batches.values().map(|batch| batch.fence.clone()).collect()
    }

    /// Returns all mapped pages. No other call may run.
    pub(super) fn all(&self) -> Vec<Run> {
        runs_of(self.slots.keys().copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: Run = Run { range: 0, first: 0, end: 8 };

    fn run(first: u64, end: u64) -> Run {
        Run { range: 0, first, end }
    }

    #[test]
    fn a_commit_marks_what_is_absent_and_comes_back_whole_or_not_at_all() {
        let mut states = PageStates::default();
        let plan = states.begin(&[run(2, 5)]);
        assert_eq!((plan.absent.clone(), plan.absent_pages()), (vec![run(2, 5)], 3));
        assert!(states.moving(&[ALL]) && !states.moving(&[run(5, 8), run(0, 2)]));
        states.abort(plan, |_| false);
        assert_eq!((states.tally(), states.all()), (Tally::default(), Vec::new()));
        let plan = states.begin(&[run(2, 5)]);
        states.finish(plan);
        // Only the absent pages are planned, in two runs.
        let plan = states.begin(&[ALL]);
        assert_eq!(plan.absent, [run(0, 2), run(5, 8)]);
        states.finish(plan);
        assert_eq!(states.tally(), Tally { committed: 8, committing: 0, decommitted: 0 });
        assert_eq!((states.counts.commits, states.counts.refused, states.counts.most_committed), (2, 1, 8));
    }

    #[test]
    fn a_page_that_is_committed_again_before_it_went_stays_and_what_the_driver_kept_is_tried_again() {
        let mut states = PageStates::default();
        let plan = states.begin(&[run(0, 4)]);
        states.finish(plan);
        assert_eq!(states.decommit(&[ALL], Fence::default()), 4);
        assert_eq!((states.decommit(&[ALL], Fence::default()), states.tally().decommitted), (0, 4));
        let plan = states.begin(&[run(1, 3)]);
        assert_eq!((plan.absent_pages(), plan.revived_pages()), (0, 2));
        states.abort(plan, |_| false);
        assert_eq!(states.tally(), Tally { committed: 0, committing: 0, decommitted: 4 });
        let plan = states.begin(&[run(1, 3)]);
        states.finish(plan);
        assert_eq!(states.tally(), Tally { committed: 2, committing: 0, decommitted: 2 });
        // The undo of this commit failed at one page.
        let plan = states.begin(&[run(4, 6)]);
        states.abort(plan, |place| place == (0, 5));
        assert_eq!(states.tally(), Tally { committed: 2, committing: 0, decommitted: 3 });
        assert_eq!(states.all(), [run(0, 4), run(5, 6)]);
    }
}

//! Pages in transit. A page in `Committing` or `Unmapping` belongs to the thread which moves it;
//! one in `Decommitted` is in exactly one batch, and is unmapped after the batch's fence.

use std::collections::{BTreeMap, BTreeSet};

use super::planes::{Place, Run, runs_of};
use super::users::Batch;
use crate::pages::{Fence, Poll};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Committing,
    /// Mapped until the fence of this batch is done.
    Decommitted(u64),
    Unmapping,
}

#[derive(Debug)]
pub(super) struct Revived {
    batch: u64,
    pub(super) fence: Fence,
    pub(super) places: Vec<Place>,
}

#[derive(Debug, Default)]
pub(super) struct Transit {
    states: BTreeMap<Place, State>,
    batches: BTreeMap<u64, Batch>,
    next: u64,
    committing: u64,
}

impl Transit {
    pub(super) fn committing(&self) -> u64 {
        self.committing
    }

    pub(super) fn pending_unmaps(&self) -> u64 {
        self.states.len() as u64 - self.committing
    }

    pub(super) fn contains(&self, place: Place) -> bool {
        self.states.contains_key(&place)
    }

    pub(super) fn places(&self) -> impl Iterator<Item = Place> {
        self.states.keys().copied()
    }

    fn within(&self, runs: &[Run]) -> impl Iterator<Item = State> {
        let range = |run: &Run| self.states.range((run.range, run.first)..(run.range, run.end));
        runs.iter().flat_map(range).map(|(_, state)| *state)
    }

    pub(super) fn is_empty(&self, runs: &[Run]) -> bool {
        self.within(runs).next().is_none()
    }

    pub(super) fn is_moving(&self, runs: &[Run]) -> bool {
        self.within(runs).any(|state| !matches!(state, State::Decommitted(_)))
    }

    fn set(&mut self, place: Place, state: Option<State>) -> Option<State> {
        let old = match state {
            Some(state) => self.states.insert(place, state),
            None => self.states.remove(&place),
        };
        self.committing += u64::from(state == Some(State::Committing));
        self.committing -= u64::from(old == Some(State::Committing));
        old
    }

    /// Returns the absent and the decommitted pages.
    pub(super) fn commit(&mut self, runs: &[Run]) -> (Vec<Run>, Vec<Revived>) {
        let (mut absent, mut again) = (Vec::new(), BTreeMap::<u64, Vec<Place>>::new());
        for place in runs.iter().flat_map(|run| run.places()) {
            match self.set(place, Some(State::Committing)) {
                Some(State::Decommitted(batch)) => again.entry(batch).or_default().push(place),
                _ => absent.push(place),
            }
        }
        let mut revived = Vec::new();
        for (number, places) in again {
            let Some(batch) = self.batches.get_mut(&number) else { continue };
            places.iter().for_each(|place| {
                batch.pages.remove(place);
            });
            revived.push(Revived { batch: number, fence: batch.fence.clone(), places });
        }
        self.batches.retain(|_, batch| !batch.pages.is_empty());
        (runs_of(absent), revived)
    }

    pub(super) fn remove(&mut self, place: Place) {
        self.set(place, None);
    }

    pub(super) fn restore(&mut self, revived: Revived) {
        let Revived { batch: number, fence, places } = revived;
        for place in &places {
            self.set(*place, Some(State::Decommitted(number)));
        }
        let batch = self.batches.entry(number).or_insert(Batch { fence, pages: BTreeSet::new() });
        batch.pages.extend(places);
    }

    pub(super) fn decommit(&mut self, Batch { fence, pages }: Batch) {
        if pages.is_empty() {
            return;
        }
        let number = self.next;
        self.next += 1;
        for place in &pages {
            self.set(*place, Some(State::Decommitted(number)));
        }
        self.batches.insert(number, Batch { fence, pages });
    }

    /// Marks decommitted pages with finished fences as unmapping.
    pub(super) fn take_done(&mut self, poll: &mut Poll<'_>) -> Vec<Run> {
        let mut done = BTreeSet::new();
        self.batches.retain(|_, batch| {
            let over = batch.is_over(poll);
            if over {
                done.append(&mut batch.pages);
            }
            !over
        });
        for place in &done {
            self.set(*place, Some(State::Unmapping));
        }
        runs_of(done)
    }

    pub(super) fn fences(&self) -> Vec<Fence> {
        self.batches.values().map(|batch| batch.fence.clone()).collect()
    }
}

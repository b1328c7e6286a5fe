//! State of a cache's blocks: limits, backed blocks, queued releases.
//!
//! Guarded by the mutex `states` of `KvCache`. Makes no driver calls, except queries of fences.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::super::page_states::{Place, Run};
use super::super::planes::Shape;
use super::super::spans::Spans;
use crate::pages::{Events, Fence};

/// Result of setting an external limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitChange {
    /// The limit holds, and no block beyond has memory.
    Applied,
    /// The limit holds for grants. Blocks beyond keep their memory until their release.
    Deferred,
    /// Ignored: a later revision is known.
    Stale,
    /// Ignored: this revision had a different limit before.
    Conflict,
}

#[derive(Debug)]
pub(super) struct BlockStates {
    /// Usable blocks.
    pub(super) blocks: u64,
    pub(super) limit: u64,
    pub(super) revision: Option<u64>,
    /// Blocks with memory in all planes.
    pub(super) backed: Spans,
    /// Queued releases in call order. For a block released twice, the first fence counts.
    pub(super) released: VecDeque<(Range<u64>, Fence)>,
    /// Pages kept for a backed block, and the fences of released blocks on the page.
    shared: BTreeMap<Place, Fence>,
    /// Maximum number of blocks.
    most: u64,
    /// Requests ahead of need, and the smallest size of the cache since each request.
    ahead: BTreeMap<u64, u64>,
    next: u64,
}

pub(super) fn count(spans: &[Range<u64>]) -> u64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

impl BlockStates {
    pub(super) fn new(most: u64) -> Self {
        Self {
            blocks: 0,
            limit: most,
            revision: None,
            backed: Spans::default(),
            released: VecDeque::new(),
            shared: BTreeMap::new(),
            most,
            ahead: BTreeMap::new(),
            next: 0,
        }
    }

    /// Registers a request ahead of need, until [`end_ahead`](Self::end_ahead), and returns its
    /// number.
    pub(super) fn begin_ahead(&mut self) -> u64 {
        self.next += 1;
        self.ahead.insert(self.next, u64::MAX);
        self.next
    }

    /// Returns the maximum size a request may grow the cache to: a later shrink is final.
    pub(super) fn cap(&self, ahead: Option<u64>) -> u64 {
        ahead.and_then(|number| self.ahead.get(&number).copied()).unwrap_or(u64::MAX)
    }

    pub(super) fn end_ahead(&mut self, number: u64) {
        self.ahead.remove(&number);
    }

    /// Marks `missing` blocks as backed and blocks below `end` as usable. Returns pages which had
    /// stayed for other blocks, and the fences of their earlier users.
    pub(super) fn note_committed(
        &mut self,
        shape: &Shape,
        end: u64,
        missing: &[Range<u64>],
        ahead: Option<u64>,
    ) -> (Vec<Place>, Fence) {
        missing.iter().for_each(|span| self.backed.insert(span));
        let (mut stayed, mut users) = (Vec::new(), Fence::default());
        for run in missing.iter().flat_map(|span| shape.pages(span)) {
            for (place, fence) in self.shared.range((run.range, run.first)..(run.range, run.end)) {
                stayed.push(*place);
                users.join(fence.clone());
            }
        }
        let most = self.limit.min(self.cap(ahead));
        self.blocks = self.blocks.max(end.min(most));
        // The limit fell during the commit: release the unused blocks beyond.
        for span in missing.iter().filter(|span| span.end > most) {
            self.released.push_back((span.start.max(most)..span.end, Fence::default()));
        }
        (stayed, users)
    }

    /// Releases idle blocks beyond `blocks` and returns the number of busy ones.
    pub(super) fn shrink(&mut self, blocks: u64, busy: &[Range<u64>], fence: &Fence) -> u64 {
        self.blocks = self.blocks.min(blocks);
        self.ahead.values_mut().for_each(|cap| *cap = (*cap).min(blocks));
        let mut going = Spans::default();
        going.insert(&(blocks..self.most));
        busy.iter().for_each(|range| going.remove(range));
        let beyond = self.backed.within(&(blocks..self.most));
        let leaving: Vec<_> = beyond.iter().flat_map(|span| going.within(span)).collect();
        let left = count(&beyond) - count(&leaving);
        self.released.extend(leaving.into_iter().map(|span| (span, fence.clone())));
        left
    }

    pub(super) fn set_limit(&mut self, blocks: u64, revision: u64) -> LimitChange {
        let blocks = blocks.min(self.most);
        match self.revision {
            Some(known) if revision < known => return LimitChange::Stale,
            Some(known) if revision == known && blocks != self.limit => return LimitChange::Conflict,
            _ => {}
        }
        (self.limit, self.revision) = (blocks, Some(revision));
        self.blocks = self.blocks.min(blocks);
        if self.beyond_of(blocks).is_empty() { LimitChange::Applied } else { LimitChange::Deferred }
    }

    pub(super) fn beyond(&self) -> Vec<Range<u64>> {
        self.beyond_of(self.blocks)
    }

    fn beyond_of(&self, blocks: u64) -> Vec<Range<u64>> {
        self.backed.within(&(blocks..self.most))
    }

    /// Removes backed blocks. Returns the pages without backed blocks, the part of these which had
    /// stayed for other blocks, and the fences of their earlier users.
    pub(super) fn unback(
        &mut self,
        shape: &Shape,
        events: &Arc<Events>,
        blocks: &Range<u64>,
        fence: &Fence,
    ) -> (Vec<Run>, Vec<Place>, Fence) {
        let spans = self.backed.within(blocks);
        self.backed.remove(blocks);
        let (mut going, mut stayed, mut users) = (Vec::new(), Vec::new(), Fence::default());
        for mut run in spans.iter().flat_map(|span| shape.pages(span)) {
            // Only the first and last page can have other blocks.
            if self.keeps(shape, (run.range, run.first), events, fence) {
                run.first += 1;
            }
            if run.first < run.end && self.keeps(shape, (run.range, run.end - 1), events, fence) {
                run.end -= 1;
            }
            let places: Vec<Place> = self
                .shared
                .range((run.range, run.first)..(run.range, run.end))
                .map(|(place, _)| *place)
                .collect();
            places.iter().filter_map(|place| self.shared.remove(place)).for_each(|fence| users.join(fence));
            stayed.extend(places);
            going.push(run);
        }
        (going, stayed, users)
    }

    /// Returns all pages kept for a backed block, and the fences of their earlier users.
    pub(super) fn stayed(&self) -> (Vec<Place>, Fence) {
        let mut users = Fence::default();
        self.shared.values().for_each(|fence| users.join(fence.clone()));
        (self.shared.keys().copied().collect(), users)
    }

    /// Returns true if a backed block keeps the page. Then records `fence` for the released blocks.
    fn keeps(&mut self, shape: &Shape, place: Place, events: &Arc<Events>, fence: &Fence) -> bool {
        let kept = !self.backed.within(&shape.blocks_on(place.0, place.1)).is_empty();
        if kept {
            let shared = self.shared.entry(place).or_default();
            shared.join(fence.clone());
            // Drops finished fences, so a page with a long-lived block does not collect fences.
            let _ = shared.done(events);
        }
        kept
    }
}

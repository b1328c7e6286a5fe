//! What a cache knows of its blocks: how many it may have, which have memory, and what is to go. Bookkeeping; the driver is asked for
//! nothing but whether a fence is over.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use super::super::books::{Place, Run};
use super::super::planes::Shape;
use super::super::spans::Spans;
use crate::pages::{Events, Fence};

/// What became of a limit that was set from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitChange {
    /// It holds, and no block beyond it has memory.
    Applied,
    /// It holds for all that is granted from now on; blocks beyond it have memory until they are released.
    Deferred,
    /// A later revision is known: ignored.
    Stale,
    /// This revision said something else before: ignored.
    Conflict,
}

#[derive(Debug)]
pub(super) struct Books {
    /// Blocks that it may be used with.
    pub(super) blocks: u64,
    pub(super) limit: u64,
    pub(super) revision: Option<u64>,
    /// Those that have memory in all planes.
    pub(super) backed: Spans,
    /// What was released and is to go, in the order of the calls: of a block that is named twice the first fence counts, as later callers had it no more.
    pub(super) released: VecDeque<(Range<u64>, Fence)>,
    /// Pages that stay for a block that is backed, and what may still use released blocks on them.
    shared: BTreeMap<Place, Fence>,
    /// Blocks there are addresses for.
    most: u64,
    /// Commits that were asked for ahead of need, and the fewest blocks that the cache shrank to since then.
    ahead: BTreeMap<u64, u64>,
    next: u64,
}

/// How many blocks these are.
pub(super) fn count(spans: &[Range<u64>]) -> u64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

impl Books {
    /// None is backed.
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

    /// A commit ahead of need is asked for; its number, until [`end_ahead`](Self::end_ahead).
    pub(super) fn begin_ahead(&mut self) -> u64 {
        self.next += 1;
        self.ahead.insert(self.next, u64::MAX);
        self.next
    }

    /// The most blocks that a commit may make of the cache: what was asked for before the cache shrank does not undo that.
    pub(super) fn cap(&self, ahead: Option<u64>) -> u64 {
        ahead.and_then(|number| self.ahead.get(&number).copied()).unwrap_or(u64::MAX)
    }

    /// It is over.
    pub(super) fn end_ahead(&mut self, number: u64) {
        self.ahead.remove(&number);
    }

    /// Those that were `missing` have memory now, and the blocks below `end` may be used; the pages of these that had stayed, and what may still use
    /// them.
    pub(super) fn came(
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
        // Somebody may have lowered it meanwhile: nobody has used these.
        for span in missing.iter().filter(|span| span.end > most) {
            self.released.push_back((span.start.max(most)..span.end, Fence::default()));
        }
        (stayed, users)
    }

    /// Releases what is beyond and not busy; how many blocks stay there.
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

    /// Those that have memory beyond what it may be used with.
    pub(super) fn beyond(&self) -> Vec<Range<u64>> {
        self.beyond_of(self.blocks)
    }

    fn beyond_of(&self, blocks: u64) -> Vec<Range<u64>> {
        self.backed.within(&(blocks..self.most))
    }

    /// Blocks are not backed any more: the pages that nobody needs now, and which of them had stayed, with what may still use those.
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
            // Only the pages at the ends can have other blocks.
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

    /// The pages that stayed, and what may still use them.
    pub(super) fn stayed(&self) -> (Vec<Place>, Fence) {
        let mut users = Fence::default();
        self.shared.values().for_each(|fence| users.join(fence.clone()));
        (self.shared.keys().copied().collect(), users)
    }

    /// Whether a page stays because of a backed block, behind a fence for those that it does not stay for.
    fn keeps(&mut self, shape: &Shape, place: Place, events: &Arc<Events>, fence: &Fence) -> bool {
        let kept = !self.backed.within(&shape.blocks_on(place.0, place.1)).is_empty();
        if kept {
            let shared = self.shared.entry(place).or_default();
            shared.join(fence.clone());
            // Forgets what is over, so that a page with one block that stays does not gather fences.
            let _ = shared.done(events);
        }
        kept
    }
}

//! Table of a backing, under the monitor of `Backing`: the blocks with memory, and the pages in
//! transit. In an elastic buffer, each page is a block. Makes no driver calls, except queries of
//! fences.
//!
//! The pages of backed blocks are committed: no other record of these pages exists. No page of a
//! backed block is in transit; `committed` counts them.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::limits::{LimitChange, Limits};
use super::planes::{Place, Run, Shape, runs_of};
use super::spans::Spans;
use super::transit::{Revived, Transit};
use super::users::{Batch, Kind, Users};
use super::{Committed, ElasticStats, KvStats};
use crate::pages::{AccountStats, Events, Fence, Poll};

#[derive(Clone, Debug)]
pub(super) struct Request {
    pub(super) blocks: Range<u64>,
    /// Running commits of these blocks end first.
    pub(super) after: Range<u64>,
    /// Number of a request ahead of need.
    pub(super) ahead: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    BeyondLimit { limit: u64, backed: u64 },
    Recalled,
}

/// Absent and revived pages are committing until its end.
#[derive(Debug, Default)]
pub(super) struct Plan {
    missing: Vec<Range<u64>>,
    absent: Vec<Run>,
    revived: Vec<Revived>,
    /// Pages of the missing blocks which are committed for a neighbour.
    shared: BTreeSet<Place>,
    end: u64,
    ahead: Option<u64>,
}

impl Plan {
    pub(super) fn absent(&self) -> &[Run] {
        &self.absent
    }

    pub(super) fn absent_places(&self) -> impl Iterator<Item = Place> {
        self.absent.iter().flat_map(|run| run.places())
    }

    pub(super) fn revived_pages(&self) -> u64 {
        self.revived.iter().map(|revived| revived.places.len() as u64).sum()
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Counts {
    commits: u64,
    refused: u64,
    decommits: u64,
    mapped: u64,
    created: u64,
    revived: u64,
    unmapped: u64,
    most_committed: u64,
}

#[derive(Debug)]
pub(super) struct Table {
    shape: Shape,
    limits: Limits,
    /// In all planes.
    backed: Spans,
    /// Of running commits, not backed yet.
    coming: Spans,
    transit: Transit,
    users: Users,
    /// Mapped pages of lenders.
    lent: BTreeSet<Place>,
    /// Recalled pages of lenders: commits there fail until the unmap.
    recalled: BTreeSet<Place>,
    committed: u64,
    /// A running commit unmaps released pages at its end.
    late: bool,
    counts: Counts,
}

impl Table {
    pub(super) fn new(shape: Shape) -> Self {
        Self {
            limits: Limits::new(shape.most()),
            shape,
            backed: Spans::default(),
            coming: Spans::default(),
            transit: Transit::default(),
            users: Users::default(),
            lent: BTreeSet::new(),
            recalled: BTreeSet::new(),
            committed: 0,
            late: false,
            counts: Counts::default(),
        }
    }

    fn all_blocks(&self) -> Range<u64> {
        0..self.shape.most()
    }

    pub(super) fn backed(&self) -> Vec<Range<u64>> {
        self.backed.within(&self.all_blocks())
    }

    pub(super) fn is_backed(&self, blocks: &Range<u64>) -> bool {
        self.backed.touches(blocks)
    }

    /// Backed blocks at and beyond the usable number.
    pub(super) fn beyond(&self) -> Vec<Range<u64>> {
        self.backed.within(&(self.limits.usable()..self.shape.most()))
    }

    /// The backed blocks on these pages, and all other backed blocks.
    pub(super) fn backed_on(&self, places: &[Place]) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let mut others = self.backed.clone();
        let on = self.blocks_on(places);
        let on: Vec<_> = on.iter().flat_map(|span| self.backed.within(span)).collect();
        on.iter().for_each(|span| others.remove(span));
        (on, others.within(&self.all_blocks()))
    }

    pub(super) fn blocks_on(&self, places: &[Place]) -> Vec<Range<u64>> {
        let mut on = Spans::default();
        places.iter().for_each(|place| on.insert(&self.shape.blocks_on(*place)));
        on.within(&self.all_blocks())
    }

    /// Backed pages without lenders' pages.
    pub(super) fn owned(&self) -> Vec<Range<u64>> {
        if self.lent.len() as u64
            == self.committed + self.transit.committing() + self.transit.pending_unmaps()
        {
            return Vec::new();
        }
        let mut owned = self.backed.clone();
        self.lent.iter().for_each(|(_, page)| owned.remove(&(*page..page + 1)));
        owned.within(&self.all_blocks())
    }

    pub(super) fn limits(&mut self) -> &mut Limits {
        &mut self.limits
    }

    pub(super) fn set_limit(&mut self, blocks: u64, revision: u64) -> LimitChange {
        let blocks = blocks.min(self.shape.most());
        match self.limits.set(blocks, revision) {
            LimitChange::Applied if self.is_backed(&(blocks..self.shape.most())) => LimitChange::Deferred,
            change => change,
        }
    }

    /// Leaves the unmap of released pages to a running commit; false if none runs.
    pub(super) fn leave_to_commit(&mut self) -> bool {
        let runs = self.coming.count() > 0;
        self.late |= runs;
        runs
    }

    pub(super) fn is_coming(&self, blocks: &Range<u64>) -> bool {
        self.coming.touches(blocks)
    }

    /// Whether a thread moves a page of these blocks, or commits one of them.
    pub(super) fn is_moving(&self, blocks: &Range<u64>) -> bool {
        self.is_coming(blocks) || self.transit.is_moving(&self.shape.pages(blocks))
    }

    /// Whether a commit must wait: for a turn, or for pages on their way.
    pub(super) fn is_in_the_way(&self, request: &Request) -> bool {
        self.is_coming(&request.after) || self.is_moving(&request.blocks)
    }

    pub(super) fn is_absent(&self, blocks: &Range<u64>) -> bool {
        !self.is_backed(blocks) && self.transit.is_empty(&self.shape.pages(blocks))
    }

    /// Whether a block on the page is backed or coming.
    fn has_blocks(&self, place: Place) -> bool {
        let blocks = self.shape.blocks_on(place);
        self.backed.touches(&blocks) || self.coming.touches(&blocks)
    }

    /// Pages of unbacked spans: those without other blocks, and those with.
    fn pages_of(&self, spans: &[Range<u64>]) -> (Vec<Run>, BTreeSet<Place>) {
        let (mut alone, mut shared) = (Vec::new(), BTreeSet::new());
        for mut run in spans.iter().flat_map(|span| self.shape.pages(span)) {
            // Only the first and last page can have other blocks.
            if self.has_blocks((run.range, run.first)) {
                shared.insert((run.range, run.first));
                run.first += 1;
            }
            if run.first < run.end && self.has_blocks((run.range, run.end - 1)) {
                run.end -= 1;
                shared.insert((run.range, run.end));
            }
            if run.first < run.end {
                alone.push(run);
            }
        }
        alone.sort_unstable();
        (alone, shared)
    }

    /// Reason against a commit, once no page is [moving](Self::is_moving).
    pub(super) fn obstacle(&self, request: &Request) -> Option<Obstacle> {
        let limit = self.limits.limit();
        if request.blocks.end > limit {
            return Some(Obstacle::BeyondLimit { limit, backed: self.backed.count() });
        }
        let recalled = &self.recalled;
        let is_recalled =
            |run: &Run| recalled.range((run.range, run.first)..(run.range, run.end)).next().is_some();
        let found = !recalled.is_empty() && self.shape.pages(&request.blocks).iter().any(is_recalled);
        found.then_some(Obstacle::Recalled)
    }

    /// Begins a commit without [obstacle](Self::obstacle).
    pub(super) fn begin(&mut self, request: &Request) -> Plan {
        let (end, ahead) = (request.blocks.end, request.ahead);
        let missing = self.backed.missing(&(request.blocks.start..end.min(self.limits.cap(ahead))));
        let (pages, shared) = self.pages_of(&missing);
        let (absent, revived) = self.transit.commit(&pages);
        missing.iter().for_each(|span| self.coming.insert(span));
        Plan { missing, absent, revived, shared, end, ahead }
    }

    /// `lender`: the lender's earlier work on absent pages. Returns whether released pages were
    /// left to the commit.
    pub(super) fn finish(&mut self, plan: Plan, done: &Committed, lender: Fence) -> bool {
        self.users.add(Kind::Lender, plan.absent_places(), lender);
        for span in &plan.missing {
            self.coming.remove(span);
            self.backed.insert(span);
        }
        let revived = plan.revived.iter().flat_map(|revived| revived.places.iter().copied());
        for place in plan.absent_places().chain(revived) {
            self.transit.remove(place);
            self.committed += 1;
        }
        for Revived { fence, places, .. } in plan.revived {
            self.users.add(Kind::Previous, places, fence);
        }
        for Batch { fence, pages } in self.users.take(&[Kind::Neighbour], &plan.shared) {
            self.users.add(Kind::Previous, pages, fence);
        }
        self.counts.commits += 1;
        self.counts.mapped += done.pages;
        self.counts.created += done.created;
        self.counts.revived += done.revived;
        self.counts.most_committed = self.counts.most_committed.max(self.committed);
        // The limit fell during the commit.
        let most = self.limits.raise(plan.end, plan.ahead);
        for span in plan.missing.iter().filter(|span| span.end > most) {
            self.late |= self.release(&(span.start.max(most)..span.end), &Fence::default()) > 0;
        }
        std::mem::take(&mut self.late)
    }

    /// `mapped`: the undo of the page failed.
    pub(super) fn abort(&mut self, plan: Plan, mapped: impl Fn(Place) -> bool) {
        self.counts.refused += 1;
        plan.missing.iter().for_each(|span| self.coming.remove(span));
        self.counts.mapped += plan.absent.iter().map(Run::pages).sum::<u64>();
        self.counts.mapped -= self.end_pages(&plan.absent, mapped);
        plan.revived.into_iter().for_each(|revived| self.transit.restore(revived));
        // Neighbours released during the commit.
        let alone: BTreeSet<Place> =
            plan.shared.into_iter().filter(|place| !self.has_blocks(*place)).collect();
        self.decommit(alone, &Fence::default());
    }

    pub(super) fn lend(&mut self, places: impl IntoIterator<Item = Place>) {
        self.lent.extend(places);
    }

    /// Previous users and lenders of committed pages.
    pub(super) fn earlier(&self) -> Fence {
        self.users.fence(&[Kind::Previous, Kind::Lender])
    }

    /// Returns the number of busy blocks.
    pub(super) fn shrink(&mut self, blocks: u64, busy: &[Range<u64>], fence: &Fence) -> u64 {
        self.limits.shrink(blocks);
        let mut going = Spans::default();
        going.insert(&(blocks..self.shape.most()));
        busy.iter().for_each(|range| going.remove(range));
        let beyond = blocks..self.shape.most();
        for span in self.backed.within(&beyond).iter().flat_map(|span| going.within(span)) {
            self.release(&span, fence);
        }
        count(&self.backed.within(&beyond))
    }

    /// Decommits pages without other blocks, and returns their number.
    pub(super) fn release(&mut self, blocks: &Range<u64>, fence: &Fence) -> u64 {
        let spans = self.backed.within(blocks);
        self.backed.remove(blocks);
        let (going, shared) = self.pages_of(&spans);
        self.users.add(Kind::Neighbour, shared, fence.clone());
        let going: BTreeSet<Place> = going.into_iter().flat_map(Run::places).collect();
        let pages = going.len() as u64;
        self.counts.decommits += u64::from(pages > 0);
        self.decommit(going, fence);
        pages
    }

    fn decommit(&mut self, mut pages: BTreeSet<Place>, fence: &Fence) {
        self.committed -= pages.len() as u64;
        // `fence` does not cover earlier users of some pages: only these wait for them too.
        let mut earlier = Batch { fence: fence.clone(), pages: BTreeSet::new() };
        for part in self.users.take(&[Kind::Previous, Kind::Neighbour], &pages) {
            earlier.fence.join(part.fence);
            earlier.pages.extend(part.pages);
        }
        pages.retain(|place| !earlier.pages.contains(place));
        self.transit.decommit(earlier);
        self.transit.decommit(Batch { fence: fence.clone(), pages });
    }

    /// Recalls the pages. Returns the number without backed blocks, including pages which had none
    /// before.
    pub(super) fn give_back(&mut self, places: &[Place], given: &[Range<u64>], fence: &Fence) -> u64 {
        let (mut all, mut pages) = (Spans::default(), 0);
        given.iter().for_each(|blocks| all.insert(blocks));
        for place in places {
            let backed = self.backed.within(&self.shape.blocks_on(*place));
            if backed.iter().all(|span| all.missing(span).is_empty()) {
                pages += 1;
                if !backed.is_empty() || self.transit.contains(*place) {
                    self.recalled.insert(*place);
                }
            }
        }
        for span in self.blocks_on(places).iter().flat_map(|span| all.within(span)) {
            self.release(&span, fence);
        }
        pages
    }

    /// Marks decommitted pages with finished fences as unmapping.
    pub(super) fn take_done(&mut self, events: &Arc<Events>) -> Vec<Run> {
        let mut poll = Poll::new(events);
        self.users.drop_done(&mut poll);
        self.transit.take_done(&mut poll)
    }

    pub(super) fn unmapped(&mut self, runs: &[Run], mapped: impl Fn(Place) -> bool) -> u64 {
        let gone = self.end_pages(runs, mapped);
        self.counts.unmapped += gone;
        gone
    }

    /// Pages still mapped, because the driver refused, are decommitted.
    fn end_pages(&mut self, runs: &[Run], mapped: impl Fn(Place) -> bool) -> u64 {
        let places = runs.iter().flat_map(|run| run.places());
        let (left, gone): (BTreeSet<Place>, BTreeSet<Place>) = places.partition(|place| mapped(*place));
        for place in &gone {
            self.transit.remove(*place);
            self.lent.remove(place);
            self.recalled.remove(place);
        }
        self.users.take(&[Kind::Lender], &gone);
        self.transit.decommit(Batch { fence: Fence::default(), pages: left });
        gone.len() as u64
    }

    pub(super) fn fences(&self) -> Vec<Fence> {
        self.transit.fences()
    }

    pub(super) fn users(&self) -> Fence {
        let mut fence = self.users.fence(&[Kind::Previous, Kind::Neighbour, Kind::Lender]);
        self.fences().into_iter().for_each(|waiting| fence.join(waiting));
        fence
    }

    /// Pages of backed blocks, and all mapped pages. No other call may run.
    pub(super) fn mapped(&self) -> (u64, Vec<Run>) {
        let pages = self.backed().into_iter().flat_map(|span| self.shape.pages(&span));
        let mut places: BTreeSet<Place> = pages.flat_map(Run::places).collect();
        let committed = places.len() as u64;
        places.extend(self.transit.places());
        (committed, runs_of(places))
    }

    pub(super) fn stats(&self, id: u64, reserved_bytes: u64, account: AccountStats) -> ElasticStats {
        let (counts, page_bytes) = (self.counts, self.shape.page());
        ElasticStats {
            id,
            page_bytes,
            reserved_bytes,
            committed_bytes: self.committed * page_bytes,
            peak_committed_bytes: counts.most_committed * page_bytes,
            coming_bytes: self.transit.committing() * page_bytes,
            pending_unmap_bytes: self.transit.pending_unmaps() * page_bytes,
            commits: counts.commits,
            refused: counts.refused,
            decommits: counts.decommits,
            pages_mapped: counts.mapped,
            pages_created: counts.created,
            pages_revived: counts.revived,
            pages_unmapped: counts.unmapped,
            account,
        }
    }

    pub(super) fn kv_stats(&self, memory: ElasticStats) -> KvStats {
        KvStats {
            blocks: self.limits.usable(),
            limit_blocks: self.limits.limit(),
            revision: self.limits.revision(),
            most_blocks: self.shape.most(),
            backed_blocks: self.backed.count(),
            beyond_blocks: count(&self.beyond()),
            block_bytes: self.shape.block(),
            memory,
        }
    }
}

fn count(spans: &[Range<u64>]) -> u64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

#[cfg(test)]
mod tests;

//! Teardown: unmaps ranges or parts, and frees their addresses, without the pool's lock. So one
//! thread at a time tears down a part: a second could unmap addresses already mapped for a new
//! user. Nothing is torn down while its pages are paused, resumed or written by copies. A
//! conflicting request joins the pending unmaps, which the active thread runs at its end.

use std::collections::BTreeMap;

use super::pool::State;
use super::{Fence, PagePool, RangeId};
use crate::error::Result;

/// A pending unmap: ranges and parts of ranges, to be torn down after a fence.
#[derive(Clone, Debug, Default)]
pub struct PendingUnmap {
    pub(super) ranges: Vec<RangeId>,
    /// Range, offset and bytes.
    pub(super) parts: Vec<(RangeId, u64, u64)>,
}

impl PendingUnmap {
    /// Creates a pending unmap of a whole range.
    #[must_use]
    pub fn range(range: RangeId) -> Self {
        Self { ranges: vec![range], parts: Vec::new() }
    }

    /// Adds the mappings that begin in a part of a range.
    pub fn add_part(&mut self, range: RangeId, offset: u64, bytes: u64) {
        self.parts.push((range, offset, bytes));
    }

    /// Adds the parts of `other`.
    pub fn join(&mut self, other: Self) {
        self.ranges.extend(other.ranges);
        self.parts.extend(other.parts);
    }

    /// Returns true if there is nothing to unmap.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.parts.is_empty()
    }

    fn spans(&self) -> impl Iterator<Item = (RangeId, u64, u64)> {
        let ranges = self.ranges.iter().map(|range| (*range, 0, u64::MAX));
        let parts =
            self.parts.iter().map(|(range, from, bytes)| (*range, *from, from.saturating_add(*bytes)));
        ranges.chain(parts)
    }

    /// All parts in order, merged.
    fn apart(&self) -> Vec<(RangeId, u64, u64)> {
        let mut apart: Vec<_> = self.spans().filter(|(_, from, to)| from < to).collect();
        apart.sort_unstable();
        apart.dedup_by(|next, last| {
            let joins = next.0 == last.0 && next.1 <= last.2;
            if joins {
                last.2 = last.2.max(next.2);
            }
            joins
        });
        apart
    }

    /// Whether a part maps a page that the arena's pause releases.
    pub(super) fn show(&self, state: &State, arena: u64) -> bool {
        let mut pages = self.spans().flat_map(|(range, from, to)| {
            let mapped = state.ranges.get(range).map(|range| range.mapped.range(from..to));
            mapped.into_iter().flatten().map(|(_, (page, _))| *page)
        });
        pages.any(|page| state.pages.get(page).is_some_and(|page| page.owner.movable_arena() == Some(arena)))
    }
}

/// Running teardowns by range and start; parts do not overlap.
#[derive(Debug, Default)]
pub(super) struct RunningTeardowns(BTreeMap<(RangeId, u64), RunningTeardown>);

#[derive(Debug)]
struct RunningTeardown {
    to: u64,
    /// An overlapping request joined the pending unmaps.
    awaited: bool,
}

pub(super) struct TornDown {
    /// False if the parts are in use.
    pub(super) done: bool,
    /// Requests arrived meanwhile: poll the pending unmaps again.
    pub(super) awaited: bool,
    /// First driver error; the pool retries.
    pub(super) refused: Result<()>,
}

impl State {
    pub(super) fn is_in_teardown(&self, range: RangeId) -> bool {
        self.teardowns.0.range((range, 0)..=(range, u64::MAX)).next().is_some()
    }

    /// Registers [merged](PendingUnmap::apart) parts. Returns false if one is in use; with `keep`,
    /// that teardown then polls the pending unmaps at its end.
    pub(super) fn begin_teardown(&mut self, apart: &[(RangeId, u64, u64)], keep: bool) -> bool {
        for (range, from, to) in apart {
            if self.ranges.get(*range).is_some_and(|range| range.held) {
                return false;
            }
            // Parts do not overlap, so the last one before `to` also ends last.
            let before = self.teardowns.0.range_mut((*range, 0)..(*range, *to)).next_back();
            if let Some((_, other)) = before.filter(|(_, other)| other.to > *from) {
                other.awaited |= keep;
                return false;
            }
        }
        let leaving = |(range, from, to): &(RangeId, u64, u64)| {
            ((*range, *from), RunningTeardown { to: *to, awaited: false })
        };
        self.teardowns.0.extend(apart.iter().map(leaving));
        true
    }

    /// Returns whether conflicting requests arrived.
    fn end_teardown(&mut self, apart: &[(RangeId, u64, u64)]) -> bool {
        let mut awaited = false;
        for (range, from, _) in apart {
            awaited |= self.teardowns.0.remove(&(*range, *from)).is_some_and(|leaving| leaving.awaited);
        }
        awaited
    }
}

impl PagePool {
    /// Tears down now, unless a part is in use: by a different teardown, a pause, a resume or
    /// copies. With `keep`, a refused request joins the pending unmaps. The caller has waited for
    /// the device.
    pub(super) fn tear_down(&self, pending: PendingUnmap, keep: bool) -> TornDown {
        let apart = pending.apart();
        let wait = |state: &mut State, pending| {
            if keep {
                state.pending.add(Fence::default(), pending);
            }
        };
        {
            let state = &mut *self.lock();
            if !state.begin_teardown(&apart, keep) {
                // Under the same lock, so the conflicting teardown finds it.
                wait(state, pending);
                return TornDown { done: false, awaited: false, refused: Ok(()) };
            }
        }
        // After the registration: a resume holds the ranges before its copies, and the hold waits
        // for this teardown.
        let done = self.arrived(&pending);
        let mut refused = Ok(());
        if done {
            for (range, offset, bytes) in pending.parts.iter().copied() {
                // A refused part is unmapped with its range.
                if let Err(error) = self.unmap(range, offset, bytes) {
                    tracing::warn!(%error, "the driver did not unmap a part of a range; it goes with the range");
                }
            }
            for range in pending.ranges.iter().copied() {
                let closed = self.close_now(range);
                if closed.is_err() {
                    self.lock().pending.add_refused(range);
                }
                refused = refused.and(closed);
            }
        }
        let state = &mut *self.lock();
        let awaited = state.end_teardown(&apart);
        if !done {
            wait(state, pending);
        }
        TornDown { done, awaited, refused }
    }

    /// Tears down for a caller that keeps the request: false if a part is in use.
    pub(crate) fn unmap_now(&self, pending: PendingUnmap) -> bool {
        let torn = self.tear_down(pending, false);
        self.poll_pending(&torn);
        torn.done
    }

    /// Unmaps a whole range and frees its addresses, at once or after its other users. The caller
    /// has waited for the device. The pool retries driver errors.
    pub(super) fn close(&self, range: RangeId) -> Result<()> {
        let torn = self.tear_down(PendingUnmap::range(range), true);
        self.poll_pending(&torn);
        torn.refused
    }

    pub(super) fn poll_pending(&self, torn: &TornDown) {
        if torn.awaited {
            self.reap();
        }
    }

    fn close_now(&self, range: RangeId) -> Result<()> {
        self.unmap(range, 0, u64::MAX)?;
        let begun = self.lock().begin_free(range);
        let Some((base, len)) = begun else { return Ok(()) };
        // SAFETY: our reservation without mappings or users.
        let freed = unsafe { self.driver().free_addresses(base, len) };
        self.lock().end_free(range, freed.is_ok());
        freed
    }
}

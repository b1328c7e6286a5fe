//! What is left of something that is gone: its mappings are taken away, and its addresses go back.
//!
//! Any part of a range is torn down by one thread at a time: the driver is asked without the pool's lock, between a look at the books and their
//! change, and what another has unmapped meanwhile may be a stranger's by then. Nothing is torn down either where pages or their contents come or
//! go. Who comes at such a time does not wait: what he brings goes on the pool's list, and whoever was there before looks there again at his end.

use super::deferred::Deferred;
use super::pool::State;
use super::{Fence, PagePool, RangeId};
use crate::error::Result;

/// What is left of something, to be torn down behind a fence.
#[derive(Clone, Debug, Default)]
pub struct Remains {
    /// Ranges that go as a whole.
    pub(super) ranges: Vec<RangeId>,
    /// Parts of ranges that stay: where from, and how many bytes.
    pub(super) parts: Vec<(RangeId, u64, u64)>,
}

impl Remains {
    /// A whole range.
    #[must_use]
    pub fn range(range: RangeId) -> Self {
        Self { ranges: vec![range], parts: Vec::new() }
    }

    /// The mappings that begin in a part of a range.
    pub fn add_part(&mut self, range: RangeId, offset: u64, bytes: u64) {
        self.parts.push((range, offset, bytes));
    }

    /// What else is left.
    pub fn join(&mut self, other: Self) {
        self.ranges.extend(other.ranges);
        self.parts.extend(other.parts);
    }

    /// Whether it is nothing.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty() && self.parts.is_empty()
    }

    /// All of it: the range, where from, and where to.
    fn spans(&self) -> impl Iterator<Item = (RangeId, u64, u64)> {
        let ranges = self.ranges.iter().map(|range| (*range, 0, u64::MAX));
        let parts =
            self.parts.iter().map(|(range, from, bytes)| (*range, *from, from.saturating_add(*bytes)));
        ranges.chain(parts)
    }

    /// The same, in order; what overlaps or touches is one.
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

    /// Whether a page of an arena shows in it that would step aside.
    pub(super) fn show(&self, state: &State, arena: u64) -> bool {
        let mut pages = self.spans().flat_map(|(range, from, to)| {
            let mapped = state.ranges.get(range).map(|range| range.mapped.range(from..to));
            mapped.into_iter().flatten().map(|(_, (page, _))| *page)
        });
        pages.any(|page| state.pages.get(page).is_some_and(|page| page.holder.movable_arena() == Some(arena)))
    }
}

/// A part of a range that somebody tears down, listed under where it begins.
#[derive(Debug, Default)]
pub(super) struct Leaving {
    /// Where it ends.
    to: u64,
    /// Something that overlaps it has been put on the list since.
    awaited: bool,
}

/// How a teardown went.
pub(super) struct TornDown {
    /// Not if others are at work there.
    pub(super) done: bool,
    /// Others came meanwhile: the list is to be looked at again.
    pub(super) awaited: bool,
    /// What the driver said first of the ranges that it did not take back; they are kept for another try.
    pub(super) refused: Result<()>,
}

impl State {
    /// Whether something of a range is being torn down.
    pub(super) fn is_leaving(&self, range: RangeId) -> bool {
        self.leaving.range((range, 0)..=(range, u64::MAX)).next().is_some()
    }

    /// Begins to tear something down that is [apart](Remains::apart); not if others are at work there. `keep`: they look at the list at their end.
    fn begin_teardown(&mut self, apart: &[(RangeId, u64, u64)], keep: bool) -> bool {
        for (range, from, to) in apart {
            if self.ranges.get(*range).is_some_and(|range| range.held) {
                return false;
            }
            // The last one that begins before the end of this ends last of those, as they do not overlap.
            let before = self.leaving.range_mut((*range, 0)..(*range, *to)).next_back();
            if let Some((_, other)) = before.filter(|(_, other)| other.to > *from) {
                other.awaited |= keep;
                return false;
            }
        }
        let leaving =
            |(range, from, to): &(RangeId, u64, u64)| ((*range, *from), Leaving { to: *to, awaited: false });
        self.leaving.extend(apart.iter().map(leaving));
        true
    }

    /// Whether others came meanwhile.
    fn end_teardown(&mut self, apart: &[(RangeId, u64, u64)]) -> bool {
        let mut awaited = false;
        for (range, from, _) in apart {
            awaited |= self.leaving.remove(&(*range, *from)).is_some_and(|leaving| leaving.awaited);
        }
        awaited
    }
}

impl PagePool {
    /// Tears something down now, unless others tear down some of it, pages that show there go or come just now, or contents come to them;
    /// with `keep` it then waits on the list. Whoever asks has waited for the device.
    pub(super) fn tear_down(&self, remains: Remains, keep: bool) -> TornDown {
        let apart = remains.apart();
        let wait = |state: &mut State, remains| {
            if keep {
                state.deferred.insert(Deferred { fence: Fence::default(), remains });
            }
        };
        {
            let state = &mut *self.lock();
            if !state.begin_teardown(&apart, keep) {
                // Before the lock goes, so that whoever is at work there finds it at his end.
                wait(state, remains);
                return TornDown { done: false, awaited: false, refused: Ok(()) };
            }
        }
        // Only now: whoever holds them from here on, to bring contents, waits for the end of this.
        let done = self.arrived(&remains);
        let mut refused = Ok(());
        if done {
            for (range, offset, bytes) in remains.parts.iter().copied() {
                // What is refused goes with its range.
                if let Err(error) = self.unmap(range, offset, bytes) {
                    tracing::warn!(%error, "the driver did not unmap a part of a range; it goes with the range");
                }
            }
            for range in remains.ranges.iter().copied() {
                let closed = self.close_now(range);
                if closed.is_err() {
                    self.lock().stuck.push(range);
                }
                refused = refused.and(closed);
            }
        }
        let state = &mut *self.lock();
        let awaited = state.end_teardown(&apart);
        if !done {
            wait(state, remains);
        }
        TornDown { done, awaited, refused }
    }

    /// Tears something down now, for whoever keeps it otherwise; whether it did: not while others are at work there.
    pub(crate) fn finish_now(&self, remains: Remains) -> bool {
        let torn = self.tear_down(remains, false);
        self.look_again(&torn);
        torn.done
    }

    /// Unmaps everything in a range and gives its addresses back, as soon as nobody is at work there. Whoever closes it has waited for the
    /// device.
    ///
    /// # Errors
    /// What the driver says; the range is kept for another try.
    pub(super) fn close(&self, range: RangeId) -> Result<()> {
        let torn = self.tear_down(Remains::range(range), true);
        self.look_again(&torn);
        torn.refused
    }

    /// What others put on the list during a teardown.
    pub(super) fn look_again(&self, torn: &TornDown) {
        if torn.awaited {
            self.finish_done();
        }
    }

    fn close_now(&self, range: RangeId) -> Result<()> {
        self.unmap(range, 0, u64::MAX)?;
        let (base, len) = {
            let mut state = self.lock();
            let Some(found) = state.ranges.get(range) else { return Ok(()) };
            let (base, len) = (found.base, found.len);
            // Before the driver is asked: once it has the addresses back, another thread may be given them.
            state.bases.remove(&base.0);
            (base, len)
        };
        // SAFETY: a reservation of this driver in which nothing is mapped any more; its one user is gone.
        let freed = unsafe { self.driver().free_addresses(base, len) };
        let mut state = self.lock();
        if freed.is_ok() {
            state.ranges.remove(range);
            state.stats.reserved_bytes -= len;
        } else {
            state.bases.insert(base.0, range);
        }
        freed
    }
}

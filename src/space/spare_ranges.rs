//! Address ranges of spaces that are gone, which still show shared pages. The next capture of the arena begins
//! in them: a program that drops small graphs and captures them again needs no driver call for that.
//!
//! A range is used again once its space's fence is done, since the seal may exchange pages in it. It is torn down
//! behind that fence when the next capture of the arena ends without it, at a trim, and when memory is short.

use super::{Common, Core, State};
use crate::error::Result;
use crate::pages::{Change, Fence, Mapping, PageId, PagePool, Remains, Reservation};
use crate::sync::Mutex;
use crate::units::Peers;

/// The most ranges that an arena keeps, and the most bytes that they show together.
const MOST_RANGES: usize = 4;
const MOST_BYTES: u64 = 16 << 20;

/// The spare ranges of an arena, the oldest first.
#[derive(Debug, Default)]
pub(crate) struct SpareRanges(Mutex<Vec<Spare>>);

/// A range, and what may still use its addresses.
#[derive(Debug)]
pub(super) struct Spare {
    range: Reservation,
    fence: Fence,
    bytes: u64,
}

impl Spare {
    fn leave(self, pool: &PagePool) {
        let mut remains = Remains::default();
        remains.join(self.range.leave());
        pool.finish(self.fence, remains);
    }

    /// Whether pages are mapped here one behind the other from the beginning on, and nobody uses them.
    fn begins_with(&mut self, pool: &PagePool, pages: &[PageId]) -> bool {
        let mapped = self.range.mapped();
        let mut end = 0;
        let fits = mapped.len() >= pages.len()
            && mapped.iter().zip(pages).all(|(at, page)| {
                let fits = at.offset == end && at.page == *page;
                end += at.bytes;
                fits
            });
        fits && self.fence.done(pool.events()).unwrap_or(false)
    }

    /// Unmaps what is behind so many pages; the bytes that were mapped before.
    pub(super) fn cut(&self, change: &mut Change<'_>, pages: usize) -> Result<u64> {
        let mapped = self.range.mapped();
        if let Some(first) = mapped.get(pages) {
            change.unmap(self.range.id(), first.offset, self.range.bytes() - first.offset)?;
        }
        Ok(mapped.iter().map(|at| at.bytes).sum())
    }

    pub(super) fn into_range(self) -> Reservation {
        self.range
    }
}

impl SpareRanges {
    fn put(&self, pool: &PagePool, spare: Spare) {
        let gone = {
            let all = &mut *self.0.lock();
            all.push(spare);
            let too_many = |all: &[Spare]| {
                all.len() > MOST_RANGES || all.iter().map(|spare| spare.bytes).sum::<u64>() > MOST_BYTES
            };
            let mut gone = Vec::new();
            while too_many(all) {
                gone.push(all.remove(0));
            }
            gone
        };
        gone.into_iter().for_each(|spare| spare.leave(pool));
    }

    /// A range of so many bytes for these peers that shows these pages from its beginning on; it is the
    /// space's of this number from now on.
    pub(super) fn take(
        &self,
        pool: &PagePool,
        (bytes, peers): (u64, Peers),
        pages: &[PageId],
        space: u64,
    ) -> Option<Spare> {
        let all = &mut *self.0.lock();
        let fits = |spare: &mut Spare| {
            spare.range.bytes() == bytes
                && spare.begins_with(pool, pages)
                && pool.hand_range(spare.range.id(), peers, space)
        };
        let found = all.iter_mut().position(fits)?;
        Some(all.remove(found))
    }

    /// Gives all of them up.
    pub(crate) fn clear(&self, pool: &PagePool) {
        let all = std::mem::take(&mut *self.0.lock());
        all.into_iter().for_each(|spare| spare.leave(pool));
    }
}

impl Common {
    /// One that was taken and is not used after all.
    pub(super) fn drop_spare(&self, spare: Spare) {
        spare.leave(self.pool());
    }
}

impl Core {
    /// Takes the ranges out of a state without live blocks in them, behind a fence: those that the next
    /// capture can begin in are kept for it, and what is left of the others is returned.
    pub(super) fn leave_ranges(common: &Common, state: &mut State, fence: &Fence, keep: bool) -> Remains {
        let pool = common.pool();
        let keep = keep && state.holes.is_empty() && common.require_resident().is_ok();
        let mut remains = Remains::default();
        for range in state.ranges.drain(..) {
            let mapped = range.mapped();
            let bytes: u64 = mapped.iter().map(|at| at.bytes).sum();
            let shared = |at: &Mapping| {
                pool.holder(at.page) == Some(common.shared.holder()) && !pool.is_exported(at.page)
            };
            if keep && bytes > 0 && bytes <= MOST_BYTES && mapped.iter().all(shared) {
                common.spare_ranges.put(pool, Spare { range, fence: fence.clone(), bytes });
            } else {
                remains.join(range.leave());
            }
        }
        remains
    }
}

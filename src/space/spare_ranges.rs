//! Spare ranges: address ranges of dropped spaces which still map shared pages. The next capture of
//! the arena begins there, so dropping and recapturing small graphs makes no driver call.
//!
//! A range is reused after the old space's fence, because the seal may replace its pages. Unused
//! ranges are freed when the next capture ends, at a trim, and when memory is short.

use super::{Common, Core, State};
use crate::error::Result;
use crate::pages::{Fence, Mapping, PageId, PagePool, PendingUnmap, Reservation, Transaction};
use crate::sync::Mutex;
use crate::units::Peers;

/// Limits per arena: number of ranges, and bytes mapped by all.
const MOST_RANGES: usize = 4;
const MOST_BYTES: u64 = 16 << 20;

/// Oldest first.
#[derive(Debug, Default)]
pub(crate) struct SpareRanges(Mutex<Vec<Spare>>);

#[derive(Debug)]
pub(super) struct Spare {
    range: Reservation,
    fence: Fence,
    bytes: u64,
}

impl Spare {
    fn leave(self, pool: &PagePool) {
        let mut pending = PendingUnmap::default();
        pending.join(self.range.leave());
        pool.unmap_after(self.fence, pending);
    }

    /// Whether the range begins with exactly these pages, without gaps, and its fence is done.
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

    /// Unmaps everything after `pages`. Returns the bytes mapped before.
    pub(super) fn cut(&self, transaction: &mut Transaction<'_>, pages: usize) -> Result<u64> {
        let mapped = self.range.mapped();
        if let Some(first) = mapped.get(pages) {
            transaction.unmap(self.range.id(), first.offset, self.range.bytes() - first.offset)?;
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

    /// Takes a range which begins with these pages for `space`.
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

    pub(crate) fn clear(&self, pool: &PagePool) {
        let all = std::mem::take(&mut *self.0.lock());
        all.into_iter().for_each(|spare| spare.leave(pool));
    }
}

impl Common {
    pub(super) fn drop_spare(&self, spare: Spare) {
        spare.leave(self.pool());
    }
}

impl Core {
    /// Frees the ranges of a space after `fence`. With `keep`, stores suitable ranges of a space
    /// without live blocks as spares.
    pub(super) fn leave_ranges(common: &Common, state: &mut State, fence: &Fence, keep: bool) {
        let pool = common.pool();
        let keep = keep && state.holes.is_empty() && common.require_resident().is_ok();
        common.totals.note_reserved(state.ranges.iter().map(Reservation::bytes).sum(), 0);
        state.note_mapped(common, state.work.mapped_bytes(), 0);
        let mut pending = PendingUnmap::default();
        for range in state.ranges.drain(..) {
            let mapped = range.mapped();
            let bytes: u64 = mapped.iter().map(|at| at.bytes).sum();
            let shared = |at: &Mapping| {
                pool.owner(at.page) == Some(common.shared.owner()) && !pool.is_exported(at.page)
            };
            if keep && bytes > 0 && bytes <= MOST_BYTES && mapped.iter().all(shared) {
                common.spare_ranges.put(pool, Spare { range, fence: fence.clone(), bytes });
            } else {
                pending.join(range.leave());
            }
        }
        pool.unmap_after(fence.clone(), pending);
    }
}

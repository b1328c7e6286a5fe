//! Life of a sealed space: frees live-out blocks, and the graph's memory when the graph ends.
//!
//! The graph owns the [`Space`], and each torch block holds the [`Core`]. Either may end first:
//!
//! * A block is freed after the seal: `give_back` handles the pages under the block.
//! * The graph ends while blocks are live: `retire` keeps the pages under live blocks, and the
//!   phase becomes [`Phase::Retired`].
//! * The last of both ends: `leave` frees the remaining memory.
//!
//! Effect of each event, and its fence:
//!
//! 1. A block is freed, all captures of the device had ended at the seal, none began since, and the
//!    graph was not launched (known only if launches are observed): the slots map their [pages from
//!    before the seal](super::replaced)
//!    again, after the block's recorded streams and the captured streams.
//! 2. The same, but captures began since the seal: the slots map pages of [passed
//!    blocks](super::replaced) of earlier graphs, after the same streams and the arena's replays.
//!    Without such pages, case 3 applies.
//! 3. A block is freed and the graph exists: its pages become shared and stay mapped, after the
//!    recorded streams of all blocks freed since the seal. If captures began since the seal, only
//!    spaces opened later use the pages.
//! 4. The graph ends: all mappings except under live blocks are unmapped, after the arena's
//!    replays. If launches are replays only and no placed block is live, suitable ranges become
//!    spare ranges instead.
//! 5. A block is freed after its graph: mappings needed only by this block are unmapped, after the
//!    block's recorded streams and the arena's replays.
//! 6. The last of both ends: all remaining memory is freed, after all of the above.
//!
//! The module owns no data. It works on [`State`], guarded by the space's lock, and takes the locks
//! of the persistent heap, shared set, replay order and pool inside. `leave` has exclusive access
//! and takes no space lock. No call waits for the device: the pool and the shared set keep each
//! page until its fence is done.
//!
//! Invariants:
//!
//! * No call here unmaps a page under a live block or gives the page to the shared set.
//! * While the graph exists, the addresses of freed blocks stay mapped, because the graph writes
//!   there. Bytes of freed persistent blocks stay reserved for the same reason.
//! * Every known use of the space's memory is in a fence of the space, the persistent heap or the
//!   pool. A space leaves the tables of [`Common`] only after its fences are stored in the heap or
//!   pool, so a pause waits for all users.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::Place;
use super::{Common, Core, Phase, Space, State, spaces_from_now_on};
use crate::pages::{Fence, PendingUnmap, Reservation};
use crate::units::Address;

impl Core {
    /// Takes the streams recorded for a block, and returns a fence after their work.
    pub(super) fn behind_users(&self, state: &mut State, address: Address) -> Fence {
        state.users.take(address, self.common.pool().events())
    }

    /// Polls the fences of freed blocks, which records deferred events.
    pub(crate) fn settle_readers(&self) {
        let state = &mut *self.state.lock();
        state.users.poll_freed(self.common.pool().events());
        state.kept.settle(self.common.pool());
    }

    /// Returns a fence after all known users of live blocks, and of blocks freed since the seal.
    pub(super) fn users(&self) -> Fence {
        let state = &*self.state.lock();
        let mut fence = state.users.fence(self.common.pool().events());
        state.kept.readers(&mut fence);
        fence
    }

    /// Releases the pages of a block freed after the seal, except pages under other live blocks.
    pub(super) fn give_back(&self, state: &mut State, freed: Place, address: Address, bytes: u64) {
        let mut fence = state.users.free(address, self.common.pool().events());
        let retired = state.stage.phase() == Phase::Retired;
        if retired {
            fence.join(self.common.order.fence());
        }
        // Graphs captured during the block's life may read the block at any time. Existing spaces
        // must not write transient data there.
        let since = if self.is_alone(state) { 0 } else { spaces_from_now_on() };
        let (from, to) = (freed.offset, freed.offset + bytes);
        if since > 0 {
            state.pass(freed.range, from, to);
        }
        let range = &state.ranges[freed.range];
        let mut pending = PendingUnmap::default();
        let mut unmapped = 0;
        for mapped in range.mapped_under(from, bytes) {
            let end = mapped.offset + mapped.bytes;
            if state.placement.covered(freed.range, mapped.offset, end) {
                continue;
            }
            if retired {
                pending.add_part(range.id(), mapped.offset, mapped.bytes);
                unmapped += mapped.bytes;
            } else if self.common.pool().owner(mapped.page) == Some(self.own())
                && !state.may_be_restored(freed.range, mapped.offset)
            {
                self.common.shared.give(mapped.page, self.own(), fence.clone(), since);
            }
        }
        state.note_mapped(&self.common, unmapped, 0);
        self.common.pool().unmap_after(fence, pending);
        self.note_captured_work(state);
        self.restore_replaced(state);
    }

    /// Unmaps everything except pages under live blocks, after the graph has ended.
    fn retire(&self) {
        let state = &mut *self.state.lock();
        if !matches!(state.stage.phase(), Phase::Open | Phase::Sealed) {
            return;
        }
        // An open space was never replayed, but may have live blocks.
        let fence = behind_replays(&self.common, state.stage.phase(), state.users.of_freed());
        if state.stage.phase() == Phase::Open {
            state.end_placement();
        }
        state.stage.retire();
        self.common.shared.gone(self.own());
        state.replaced.clear();
        if self.recycles.load(Ordering::Relaxed) && state.usage().blocks == 0 {
            // Only persistent blocks are left, on pages of the arena.
            let reserved: u64 = state.ranges.iter().map(Reservation::bytes).sum();
            self.common.totals.reserved.fetch_sub(reserved, Ordering::Relaxed);
            let mapped = state.work.mapped_bytes();
            let pending = Self::leave_ranges(&self.common, state, &fence, true);
            state.note_mapped(&self.common, mapped, 0);
            self.common.pool().unmap_after(fence.clone(), pending);
        }
        let mut pending = PendingUnmap::default();
        let mut unmapped = 0;
        for (number, range) in state.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                if !state.placement.covered(number, mapped.offset, mapped.offset + mapped.bytes) {
                    pending.add_part(range.id(), mapped.offset, mapped.bytes);
                    unmapped += mapped.bytes;
                }
            }
        }
        state.note_mapped(&self.common, unmapped, 0);
        self.common.pool().unmap_after(fence.clone(), pending);
        let mut fence = fence;
        let freed = state.kept.take(false, &mut fence);
        self.common.heap.free_all(self.common.pool(), freed, &fence);
    }
}

/// Returns a fence after `readers`, and, unless the space is open, after the arena's replays.
fn behind_replays(common: &Common, phase: Phase, readers: Fence) -> Fence {
    let mut fence = match phase {
        Phase::Open => Fence::default(),
        _ => common.order.fence(),
    };
    fence.join(readers);
    fence
}

impl Drop for Space {
    fn drop(&mut self) {
        // If no block holds the core, the core ends now and frees everything at once.
        if Arc::strong_count(&self.core) > 1 {
            let common = &self.core.common;
            // Inserted while this space still holds the core.
            common.retired.lock().insert(self.core.id, Arc::downgrade(&self.core));
            self.core.retire();
            common.spaces.lock().remove(&self.core.id);
        }
    }
}

impl Core {
    /// Frees the remaining memory after all users.
    fn leave(&mut self) {
        let own = self.own();
        let common = &self.common;
        let state = self.state.get_mut();
        if let Some(live_count) = &state.live_count {
            common.live_counts.give(live_count);
        }
        if state.ranges.is_empty() && state.kept.usage().allocations == 0 {
            return;
        }
        let reserved: u64 = state.ranges.iter().map(Reservation::bytes).sum();
        common.totals.reserved.fetch_sub(reserved, Ordering::Relaxed);
        common.totals.mapped.fetch_sub(state.work.mapped_bytes(), Ordering::Relaxed);

        let users = std::mem::take(&mut state.users).fence(common.pool().events());
        let mut fence = behind_replays(common, state.stage.phase(), users);
        let whole = matches!(state.stage.phase(), Phase::Open | Phase::Sealed) && state.usage().blocks == 0;
        let keep = whole && self.recycles.load(Ordering::Relaxed);
        let pending = Self::leave_ranges(common, state, &fence, keep);
        common.pool().unmap_after(fence.clone(), pending);
        let kept = state.kept.take(true, &mut fence);
        common.heap.free_all(common.pool(), kept, &fence);
        common.shared.gone(own);
        common.shared.forget();
        common.forget_copies();
        common.pool().check();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.leave();
        // Removed last: a concurrent pause finds the fences in the space, or afterwards in the heap
        // and pool.
        self.common.spaces.lock().remove(&self.id);
        // Otherwise the core was never entered in `retired`.
        if !matches!(self.state.get_mut().stage.phase(), Phase::Open | Phase::Sealed) {
            self.common.retired.lock().remove(&self.id);
        }
    }
}

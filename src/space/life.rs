//! Life of a sealed space: frees live-out blocks, and the graph's memory when the graph ends.
//!
//! The graph owns the [`Space`], and each torch block holds the [`Core`]. Either may end first:
//!
//! * A block is freed after the seal: `give_back` handles the pages under the block.
//! * The graph ends while blocks are live: `retire` keeps the pages under live blocks.
//! * The last of both ends: `leave` frees the remaining memory.
//!
//! docs/design/capture.md (seal and teardown) lists the effect and the fence of each event. No call
//! waits for the device: the pool and the shared set keep each page until its fence is done. The
//! locks of the persistent heap, shared set, replay order and pool are taken inside the space's
//! lock.
//!
//! Invariants:
//!
//! * No call here unmaps a page under a live block or gives the page to the shared set.
//! * While the graph exists, the addresses of freed blocks stay mapped, and bytes of freed
//!   persistent blocks reserved, because the graph writes there.
//! * Every known use of the space's memory is in a fence of the space, the persistent heap or the
//!   pool.
//! * A space leaves the [`Registry`](super::registry::Registry) only after its fences are stored in
//!   the heap or pool, so a pause waits for all users.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::Place;
use super::{Common, Core, Phase, Space, State, spaces_from_now_on};
use crate::pages::{Fence, PendingUnmap};
use crate::units::Address;

impl Core {
    pub(super) fn behind_users(&self, state: &mut State, address: Address) -> Fence {
        state.users.take(address, self.common.pool().events())
    }

    /// Polls the fences of freed blocks, which records deferred events.
    pub(crate) fn poll_freed(&self) {
        let state = &mut *self.state.lock();
        state.users.poll_freed(self.common.pool().events());
        state.kept.poll_freed(self.common.pool());
    }

    /// Fence after users of live blocks, and of blocks freed since the seal.
    pub(super) fn users(&self) -> Fence {
        let state = &*self.state.lock();
        let mut fence = state.users.fence(self.common.pool().events());
        state.kept.readers(&mut fence);
        fence
    }

    pub(super) fn give_back(&self, state: &mut State, freed: Place, address: Address, bytes: u64) {
        let mut fence = state.users.free(address, self.common.pool().events());
        let retired = state.stage.phase() == Phase::Retired;
        if retired {
            fence.join(self.common.order.fence());
        }
        // Graphs captured during or after the seal may read the block at any time: only spaces from
        // number `since` on may write there.
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

    /// Runs after the graph has ended.
    fn retire(&self) {
        let state = &mut *self.state.lock();
        if !matches!(state.stage.phase(), Phase::Open | Phase::Sealed) {
            return;
        }
        // An open space was never replayed.
        let fence = behind_replays(&self.common, state.stage.phase(), state.users.of_freed());
        if state.stage.phase() == Phase::Open {
            state.end_placement();
        }
        state.stage.retire();
        self.common.shared.gone(self.own());
        state.replaced.clear();
        if self.recycles.load(Ordering::Relaxed) && state.usage().blocks == 0 {
            Self::leave_ranges(&self.common, state, &fence, true);
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
        if Arc::strong_count(&self.core) > 1 {
            let common = &self.core.common;
            common.registry.add_retired(&self.core);
            self.core.retire();
            common.registry.remove(self.core.id);
        }
    }
}

impl Core {
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
        let users = std::mem::take(&mut state.users).fence(common.pool().events());
        let mut fence = behind_replays(common, state.stage.phase(), users);
        let whole = matches!(state.stage.phase(), Phase::Open | Phase::Sealed) && state.usage().blocks == 0;
        let keep = whole && self.recycles.load(Ordering::Relaxed);
        Self::leave_ranges(common, state, &fence, keep);
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
        // Removed last, so a concurrent pause finds the fences here or in the heap and pool.
        self.common.registry.remove(self.id);
        if !matches!(self.state.get_mut().stage.phase(), Phase::Open | Phase::Sealed) {
            self.common.registry.remove_retired(self.id);
        }
    }
}

//! The end of a graph and of its blocks: what goes when, and behind which fence.
//!
//! | who goes | what goes | behind |
//! |---|---|---|
//! | a retained block, its graph was not launched yet and no capture began since | its pages: [those from before the seal](super::exchanged) come back | the streams noted for it |
//! | the same, and captures began since | the same pages as [passed blocks](super::exchanged) of earlier graphs, else as below | the streams noted for it, the arena's replays |
//! | a retained block, its graph lives | its pages become shared ones, and where other captures began since the seal those of later spaces only; they stay mapped, as the graph writes there | the streams noted for it |
//! | the graph | all mappings but those under live blocks | the arena's replays |
//! | a block, its graph is gone | the mappings that only it needs | the streams noted for it, the arena's replays |
//! | the last of both | the rest | all of them |

use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::layout::Place;
use super::{Common, Core, Phase, Space, State, spaces_from_now_on};
use crate::pages::{Fence, Remains, Reservation};
use crate::units::Address;

impl Core {
    /// Behind the streams noted for a block, which are forgotten.
    pub(super) fn behind_users(&self, state: &mut State, address: Address) -> Fence {
        state.users.take(address, self.common.pool().events())
    }

    /// Asks whether those who read what was freed are done, which records what could not be before.
    pub(crate) fn settle_readers(&self) {
        let state = &mut *self.state.lock();
        // What cannot be found out now is asked again.
        let _ = state.readers.done(self.common.pool().events());
        state.kept.settle(self.common.pool());
    }

    /// Behind what everybody was given who is known to use its blocks, or used those that were freed since the seal.
    pub(super) fn users(&self) -> Fence {
        let state = &*self.state.lock();
        let mut fence = state.readers.clone();
        state.users.all().for_each(|stream| fence.add_kept(self.common.pool().events(), *stream));
        state.kept.readers(&mut fence);
        fence
    }

    /// A block was freed after the seal: its pages are for others, those apart that other blocks still cover.
    pub(super) fn give_back(&self, state: &mut State, freed: Place, address: Address, bytes: u64) {
        let users = self.behind_users(state, address);
        // What is over is forgotten; what cannot be asked now is asked again with the pages.
        let _ = state.readers.done(self.common.pool().events());
        state.readers.join(users);
        let mut fence = state.readers.clone();
        let retired = state.phase == Phase::Retired;
        if retired {
            fence.join(self.common.order.fence());
        }
        // Graphs that were captured while it was alive may read it wherever they run: what passes in others is not to lie there.
        let since = if self.is_alone(state) { 0 } else { spaces_from_now_on() };
        let (from, to) = (freed.offset, freed.offset + bytes);
        if since > 0 {
            state.pass(freed.range, from, to);
        }
        let range = &state.ranges[freed.range];
        let mut remains = Remains::default();
        let mut unmapped = 0;
        for mapped in range.mapped_under(from, bytes) {
            let end = mapped.offset + mapped.bytes;
            if state.placement.covered(freed.range, mapped.offset, end) {
                continue;
            }
            if retired {
                remains.add_part(range.id(), mapped.offset, mapped.bytes);
                unmapped += mapped.bytes;
            } else if self.common.pool().holder(mapped.page) == Some(self.own())
                && !state.may_come_back(freed.range, mapped.offset)
            {
                self.common.shared.give(mapped.page, self.own(), fence.clone(), since);
            }
        }
        state.note_mapped(&self.common, unmapped, 0);
        self.common.pool().finish(fence, remains);
        self.note_captured_work(state);
        self.exchange_back(state);
    }

    /// The graph is gone: only the pages under live blocks stay.
    fn retire(&self) {
        let state = &mut *self.state.lock();
        if !matches!(state.phase, Phase::Open | Phase::Sealed) {
            return;
        }
        // An open space was never replayed, but blocks may be live in it all the same.
        let fence = behind_replays(&self.common, state.phase, state.readers.clone());
        if state.phase == Phase::Open {
            state.end_placement();
        }
        state.phase = Phase::Retired;
        self.common.shared.gone(self.own());
        state.exchanged = Vec::new();
        state.opened = None;
        state.capture = None;
        if self.recycles.load(Ordering::Relaxed) && state.usage().blocks == 0 {
            // Only kept blocks are left, which lie elsewhere.
            let reserved: u64 = state.ranges.iter().map(Reservation::bytes).sum();
            self.common.totals.reserved.fetch_sub(reserved, Ordering::Relaxed);
            let mapped = state.work.mapped_bytes;
            let remains = Self::leave_ranges(&self.common, state, &fence, true);
            state.note_mapped(&self.common, mapped, 0);
            self.common.pool().finish(fence.clone(), remains);
        }
        let mut remains = Remains::default();
        let mut unmapped = 0;
        for (number, range) in state.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                if !state.placement.covered(number, mapped.offset, mapped.offset + mapped.bytes) {
                    remains.add_part(range.id(), mapped.offset, mapped.bytes);
                    unmapped += mapped.bytes;
                }
            }
        }
        state.note_mapped(&self.common, unmapped, 0);
        self.common.pool().finish(fence.clone(), remains);
        let mut fence = fence;
        let freed = state.kept.take(false, &mut fence);
        self.common.heap.free_all(self.common.pool(), freed, &fence);
    }
}

/// Behind the arena's replays, if this space can have been in one, and behind those who read what was freed.
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
        // If nobody holds a block, the core goes now, and all of it at once.
        if Arc::strong_count(&self.core) > 1 {
            let common = &self.core.common;
            // Before the core can go, since this space holds it still.
            common.retired.lock().insert(self.core.id, Arc::downgrade(&self.core));
            self.core.retire();
            common.spaces.lock().remove(&self.core.id);
        }
    }
}

impl Core {
    /// What is left goes behind what may still use it.
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
        common.totals.mapped.fetch_sub(state.work.mapped_bytes, Ordering::Relaxed);

        let readers = std::mem::take(&mut state.readers);
        let mut fence = behind_replays(common, state.phase, readers);
        let users = std::mem::take(&mut state.users);
        users.all().for_each(|stream| fence.add_kept(common.pool().events(), *stream));
        let whole = matches!(state.phase, Phase::Open | Phase::Sealed) && state.usage().blocks == 0;
        let keep = whole && self.recycles.load(Ordering::Relaxed);
        let remains = Self::leave_ranges(common, state, &fence, keep);
        common.pool().finish(fence.clone(), remains);
        let kept = state.kept.take(true, &mut fence);
        common.heap.free_all(common.pool(), kept, &fence);
        common.shared.gone(own);
        common.shared.forget();
        common.presence.forget(common.pool(), common.device.host_pool());
        common.pool().check();
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.leave();
        // Only now: a pause that finds one on its way waits until its fences are where they can be found.
        self.common.spaces.lock().remove(&self.id);
        // Else no graph of it went before.
        if !matches!(self.state.get_mut().phase, Phase::Open | Phase::Sealed) {
            self.common.retired.lock().remove(&self.id);
        }
    }
}

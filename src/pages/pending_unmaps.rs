//! Pending unmaps: memory still in use by the device (a fence), and memory refused by the driver.
//!
//! Both lists have only keys and marks, so neither keeps the pool alive. The mutex of [`PagePool`]
//! guards the lists.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::pool::State;
use super::teardown::TornDown;
use super::{Fence, PagePool, PendingUnmap, Poll, RangeId, events};
use crate::driver::{SharedDriver, same_device};
use crate::error::Result;
use crate::sync::ProcessMutex;

slotmap::new_key_type! {
    /// Key of a pending unmap.
    pub(super) struct FencedUnmapId;
    /// Key of a resumed arena with running copies.
    pub(super) struct ArrivingId;
}

#[derive(Debug)]
pub(super) struct FencedUnmap {
    pub(super) fence: Fence,
    pub(super) pending: PendingUnmap,
}

/// A resumed arena and the fence of the copies of its contents.
#[derive(Clone, Debug)]
pub(super) struct Arriving {
    arena: u64,
    contents: Fence,
}

impl State {
    /// Returns the fence of all running copies to pages mapped in these parts. Teardown waits for
    /// this fence too.
    fn arriving(&self, pending: &PendingUnmap) -> Fence {
        let mut fence = Fence::default();
        let arenas = self.arriving.values().filter(|arriving| pending.show(self, arriving.arena));
        arenas.for_each(|arriving| fence.join(arriving.contents.clone()));
        fence
    }

    /// Returns the complete fence of a pending unmap.
    fn behind(&self, item: &FencedUnmap) -> Fence {
        let mut fence = self.arriving(&item.pending);
        fence.join(item.fence.clone());
        fence
    }

    /// Iterates over the ranges in pending unmaps and refused teardowns.
    pub(super) fn pending_ranges(&self) -> impl Iterator<Item = RangeId> {
        let waiting = self.pending_unmaps.values().flat_map(|item| item.pending.ranges.iter());
        waiting.chain(&self.stuck).copied()
    }

    /// Iterates over the parts of other ranges in pending unmaps: range, offset and bytes.
    pub(super) fn pending_parts(&self) -> impl Iterator<Item = (RangeId, u64, u64)> {
        self.pending_unmaps.values().flat_map(|item| item.pending.parts.iter().copied())
    }
}

fn warn_of(torn: &TornDown) {
    if let Err(error) = &torn.refused {
        tracing::warn!(%error, "the driver did not take a range back; kept for another try");
    }
}

impl PagePool {
    /// Tears down after a fence: at once if the fence is done, else in a later call. Pending unmaps
    /// are reaped by a refused [`take`](super::Transaction::take), a [`trim`](Self::trim), the
    /// begin of a capture, the end of a hold, and a teardown with a conflicting request. Does not
    /// block.
    pub fn unmap_after(&self, mut fence: Fence, pending: PendingUnmap) {
        if pending.is_empty() {
            return;
        }
        {
            let state = self.lock();
            fence.join(state.arriving(&pending));
        }
        match fence.done(self.events()) {
            Ok(true) => {
                let torn = self.tear_down(pending, true);
                warn_of(&torn);
                self.poll_pending(&torn);
            }
            other => {
                if let Err(error) = other {
                    tracing::warn!(%error, "whether something is still in use cannot be found out; asked again later");
                }
                self.lock().pending_unmaps.insert(FencedUnmap { fence, pending });
            }
        }
    }

    /// Returns the fence of all pending unmaps with pages that this arena's pause releases.
    pub(crate) fn pending_fence(&self, arena: u64) -> Fence {
        let (state, mut fence) = (self.lock(), Fence::default());
        let items = state.pending_unmaps.values().filter(|item| item.pending.show(&state, arena));
        items.for_each(|item| fence.join(item.fence.clone()));
        fence
    }

    /// Records running copies to the pages of a resumed arena. No mapping of these pages is torn
    /// down before `contents`. The caller holds the ranges.
    pub(crate) fn arrives(&self, arena: u64, mut contents: Fence) {
        if !contents.done(self.events()).unwrap_or(false) {
            self.lock().arriving.insert(Arriving { arena, contents });
        }
    }

    /// Returns true if no running copy writes pages mapped in these parts.
    pub(super) fn arrived(&self, pending: &PendingUnmap) -> bool {
        let mut arriving = self.lock().arriving(pending);
        arriving.done(self.events()).unwrap_or(false)
    }

    fn forget_arrived(&self) {
        let (arriving, mut poll) = (self.lock().arriving.clone(), Poll::new(self.events()));
        for (id, Arriving { mut contents, .. }) in arriving {
            if contents.done_at(&mut poll).unwrap_or(false) {
                // Dropped without the lock, as its marks may destroy events.
                let _contents = self.lock().arriving.remove(id);
            }
        }
    }

    /// Reaps pending unmaps with a finished fence. Returns true if there was one.
    pub(crate) fn reap(&self) -> bool {
        let mut any = false;
        loop {
            let (some, awaited) = self.poll_once();
            any |= some;
            if !awaited {
                return any;
            }
        }
    }

    /// As [`reap`](Self::reap), once. Also returns whether requests arrived
    /// meanwhile.
    fn poll_once(&self) -> (bool, bool) {
        self.reap_peers();
        self.forget_arrived();
        // The items stay in the list during the driver calls, so `pending_fence` sees all fences.
        let waiting: Vec<_> = {
            let state = self.lock();
            state.pending_unmaps.iter().map(|(id, item)| (id, state.behind(item))).collect()
        };
        let (mut done, mut poll) = (Vec::new(), Poll::new(self.events()));
        for (id, mut fence) in waiting {
            let over = fence.done_at(&mut poll).unwrap_or(false);
            if over {
                let item = self.lock().pending_unmaps.remove(id);
                done.extend(item);
            } else {
                // Dropped without the lock: the last reference to a mark may destroy its event.
                let _previous = {
                    let state = &mut *self.lock();
                    state.pending_unmaps.get_mut(id).map(|item| std::mem::replace(&mut item.fence, fence))
                };
            }
        }
        let (mut any, mut awaited) = (false, false);
        for item in done {
            let torn = self.tear_down(item.pending, true);
            warn_of(&torn);
            any |= torn.done;
            awaited |= torn.awaited;
        }
        (any, awaited)
    }

    /// Waits for the fences of pending unmaps, at most for `limit`, and reaps. Returns true if
    /// there was one. Does not wait for fences that depend on the end of a capture.
    pub(crate) fn wait_and_reap(&self, limit: Duration) -> bool {
        let fences: Vec<Fence> = {
            let state = self.lock();
            let of_peers = state.foreign.fences();
            let of_stuck = state.stuck.iter().map(|range| state.arriving(&PendingUnmap::range(*range)));
            let of_pending = state.pending_unmaps.values().map(|item| state.behind(item));
            of_pending.chain(of_stuck).chain(of_peers).collect()
        };
        let start = Instant::now();
        for mut fence in fences {
            let left = if limit == Duration::MAX { limit } else { limit.saturating_sub(start.elapsed()) };
            // A failed wait leaves the item pending.
            let _ = fence.block(self.events(), left);
        }
        self.reap()
    }

    /// Retries everything the driver refused earlier.
    ///
    /// # Errors
    /// Driver errors; the memory stays pending.
    pub fn retry(&self) -> Result<()> {
        self.reap();
        let mut first = Ok(());
        let stuck = std::mem::take(&mut self.lock().stuck);
        for range in stuck {
            first = first.and(self.close(range));
        }
        let pages = self.retry_pages();
        self.check();
        first.and(pages)
    }

    /// Releases unused memory to the driver: waits for fences, retries refused calls and releases
    /// free pages. Returns the released bytes.
    ///
    /// # Errors
    /// Driver errors of the last retry.
    pub fn trim(&self) -> Result<u64> {
        self.wait_and_reap(Duration::MAX);
        // Errors of the first retry are repeated by the last one.
        let _ = self.retry();
        let released = self.release_free(u64::MAX);
        self.retry()?;
        Ok(released)
    }
}

/// Pools without users but with memory in use or refused by the driver. Retried at the next opening
/// of their device.
fn orphans() -> &'static ProcessMutex<Vec<Arc<PagePool>>> {
    static ORPHANS: OnceLock<ProcessMutex<Vec<Arc<PagePool>>>> = OnceLock::new();
    ORPHANS.get_or_init(ProcessMutex::default)
}

/// Retries the orphaned pools of a driver's device.
pub(crate) fn retry_orphans(driver: &SharedDriver) {
    let left: Vec<_> = orphans().lock().extract_if(.., |pool| same_device(pool.driver(), driver)).collect();
    left.into_iter().for_each(PagePool::retire);
    events::retry_events(driver);
}

impl PagePool {
    /// Called when the last user of the device is gone: releases all possible memory. A pool with
    /// remaining memory becomes an orphan.
    pub(crate) fn retire(self: Arc<Self>) {
        self.reap();
        self.events().forget_kept();
        self.forget_exports();
        let refused = self.retry();
        self.release_free(u64::MAX);
        let stats = self.stats();
        if stats.pages == 0 && stats.reservations == 0 && self.lock().foreign.is_empty() {
            return;
        }
        let (bytes, pending) = (stats.physical_bytes, stats.pending);
        tracing::warn!(?refused, bytes, pending, "a device closes with memory that cannot go back yet");
        orphans().lock().push(self);
    }
}

//! Pending unmaps: memory in use by the device (a fence), and memory refused by the driver. The
//! lists hold only keys and marks, so neither keeps the pool alive.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use slotmap::SlotMap;

use super::pool::State;
use super::teardown::TornDown;
use super::{Fence, PagePool, PendingUnmap, Poll, RangeId, events};
use crate::driver::{SharedDriver, same_device};
use crate::error::Result;
use crate::sync::ProcessMutex;

slotmap::new_key_type! {
    struct FencedUnmapId;
    struct ArrivingId;
}

#[derive(Debug)]
struct FencedUnmap {
    fence: Fence,
    pending: PendingUnmap,
}

/// A resumed arena and the fence of the copies of its contents.
#[derive(Clone, Debug)]
struct Arriving {
    arena: u64,
    contents: Fence,
}

/// Pending unmaps of a pool, and the copies that teardown waits for.
#[derive(Debug, Default)]
pub(super) struct PendingUnmaps {
    fenced: SlotMap<FencedUnmapId, FencedUnmap>,
    /// Ranges whose teardown the driver refused.
    refused: Vec<RangeId>,
    arriving: SlotMap<ArrivingId, Arriving>,
}

impl PendingUnmaps {
    pub(super) fn add(&mut self, fence: Fence, pending: PendingUnmap) {
        self.fenced.insert(FencedUnmap { fence, pending });
    }

    pub(super) fn add_refused(&mut self, range: RangeId) {
        self.refused.push(range);
    }

    pub(super) fn len(&self) -> usize {
        self.fenced.len() + self.refused.len()
    }

    pub(super) fn ranges(&self) -> impl Iterator<Item = RangeId> {
        let waiting = self.fenced.values().flat_map(|item| item.pending.ranges.iter());
        waiting.chain(&self.refused).copied()
    }

    pub(super) fn parts(&self) -> impl Iterator<Item = (RangeId, u64, u64)> {
        self.fenced.values().flat_map(|item| item.pending.parts.iter().copied())
    }
}

impl State {
    /// The fence of running copies to pages in these parts. Teardown waits for it too.
    fn arriving(&self, pending: &PendingUnmap) -> Fence {
        let mut fence = Fence::default();
        let arenas = self.pending.arriving.values().filter(|arriving| pending.show(self, arriving.arena));
        arenas.for_each(|arriving| fence.join(arriving.contents.clone()));
        fence
    }

    fn behind(&self, item: &FencedUnmap) -> Fence {
        let mut fence = self.arriving(&item.pending);
        fence.join(item.fence.clone());
        fence
    }
}

fn warn_of(torn: &TornDown) {
    if let Err(error) = &torn.refused {
        tracing::warn!(%error, "the driver did not take a range back; kept for another try");
    }
}

impl PagePool {
    /// Tears down after a fence: at once if done, else when pending unmaps are reaped: by a refused
    /// [`take`](super::Transaction::take), a [`trim`](Self::trim), the begin of a capture, the end
    /// of a hold, or a conflicting teardown. Does not block.
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
                self.lock().pending.add(fence, pending);
            }
        }
    }

    /// Fence of pending unmaps with pages that this arena's pause releases.
    pub(crate) fn pending_fence(&self, arena: u64) -> Fence {
        let (state, mut fence) = (self.lock(), Fence::default());
        let items = state.pending.fenced.values().filter(|item| item.pending.show(&state, arena));
        items.for_each(|item| fence.join(item.fence.clone()));
        fence
    }

    /// Records running copies to the pages of a resumed arena: no mapping of these pages is torn
    /// down before `contents`. The caller holds the ranges.
    pub(crate) fn arrives(&self, arena: u64, mut contents: Fence) {
        if !contents.done(self.events()).unwrap_or(false) {
            self.lock().pending.arriving.insert(Arriving { arena, contents });
        }
    }

    /// Whether no running copy writes pages in these parts.
    pub(super) fn arrived(&self, pending: &PendingUnmap) -> bool {
        let mut arriving = self.lock().arriving(pending);
        arriving.done(self.events()).unwrap_or(false)
    }

    fn forget_arrived(&self) {
        let (arriving, mut poll) = (self.lock().pending.arriving.clone(), Poll::new(self.events()));
        for (id, Arriving { mut contents, .. }) in arriving {
            if contents.done_at(&mut poll).unwrap_or(false) {
                // Without the lock: its marks may destroy events.
                let _contents = self.lock().pending.arriving.remove(id);
            }
        }
    }

    /// Runs pending unmaps with a finished fence. Returns whether there was one.
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

    /// Polls once. Also returns whether requests arrived meanwhile.
    fn poll_once(&self) -> (bool, bool) {
        self.reap_peers();
        self.forget_arrived();
        // Items stay listed during the driver calls, so `pending_fence` sees all fences.
        let waiting: Vec<_> = {
            let state = self.lock();
            state.pending.fenced.iter().map(|(id, item)| (id, state.behind(item))).collect()
        };
        let (mut done, mut poll) = (Vec::new(), Poll::new(self.events()));
        for (id, mut fence) in waiting {
            let over = fence.done_at(&mut poll).unwrap_or(false);
            if over {
                let item = self.lock().pending.fenced.remove(id);
                done.extend(item);
            } else {
                // Without the lock: the last reference to a mark may destroy its event.
                let _previous = {
                    let state = &mut *self.lock();
                    state.pending.fenced.get_mut(id).map(|item| std::mem::replace(&mut item.fence, fence))
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

    /// Waits at most for `limit`, and reaps. Returns whether there was one. Does not wait for the
    /// end of a capture.
    pub(crate) fn wait_and_reap(&self, limit: Duration) -> bool {
        let fences: Vec<Fence> = {
            let state = self.lock();
            let of_peers = state.foreign.fences();
            let of_refused =
                state.pending.refused.iter().map(|range| state.arriving(&PendingUnmap::range(*range)));
            let of_pending = state.pending.fenced.values().map(|item| state.behind(item));
            of_pending.chain(of_refused).chain(of_peers).collect()
        };
        let start = Instant::now();
        for mut fence in fences {
            let left = if limit == Duration::MAX { limit } else { limit.saturating_sub(start.elapsed()) };
            let _ = fence.block(self.events(), left);
        }
        self.reap()
    }

    /// Retries everything the driver refused; memory refused again stays pending.
    pub fn retry(&self) -> Result<()> {
        self.reap();
        let mut first = Ok(());
        let refused = std::mem::take(&mut self.lock().pending.refused);
        for range in refused {
            first = first.and(self.close(range));
        }
        let pages = self.retry_pages();
        self.check();
        first.and(pages)
    }

    /// Releases unused memory: waits for fences, retries refused calls and releases free pages.
    /// Returns the released bytes.
    ///
    /// # Errors
    /// Driver errors of the last retry.
    pub fn trim(&self) -> Result<u64> {
        self.wait_and_reap(Duration::MAX);
        // The last retry repeats the errors.
        let _ = self.retry();
        let released = self.release_free(u64::MAX);
        self.retry()?;
        Ok(released)
    }
}

/// Pools without users but with memory in use or refused by the driver, retried at the next opening
/// of their device.
fn orphans() -> &'static ProcessMutex<Vec<Arc<PagePool>>> {
    static ORPHANS: OnceLock<ProcessMutex<Vec<Arc<PagePool>>>> = OnceLock::new();
    ORPHANS.get_or_init(ProcessMutex::default)
}

pub(crate) fn retry_orphans(driver: &SharedDriver) {
    let left: Vec<_> = orphans().lock().extract_if(.., |pool| same_device(pool.driver(), driver)).collect();
    left.into_iter().for_each(PagePool::retire);
    events::retry_events(driver);
}

impl PagePool {
    /// Called when the last user of the device is gone. A pool with remaining memory becomes an
    /// orphan.
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

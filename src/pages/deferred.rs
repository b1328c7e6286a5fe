//! What cannot go yet: because the device may still use it (a fence), or because the driver would not take it back.
//!
//! Both are plain data, keys of this pool and marks of its events, so that nothing here keeps the pool alive.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::pool::State;
use super::teardown::TornDown;
use super::{Fence, Look, PagePool, RangeId, Remains, events};
use crate::driver::{SharedDriver, same_device};
use crate::error::Result;
use crate::sync::ProcessMutex;

slotmap::new_key_type! {
    /// One thing that waits for its fence.
    pub(super) struct DeferredId;
    /// The contents of one arena on their way.
    pub(super) struct ArrivingId;
}

#[derive(Debug)]
pub(super) struct Deferred {
    pub(super) fence: Fence,
    pub(super) remains: Remains,
}

/// An arena that came back, and what its contents are copied by.
#[derive(Clone, Debug)]
pub(super) struct Arriving {
    arena: u64,
    contents: Fence,
}

impl State {
    /// What has to be over before something is torn down, whatever else: copies to pages that show there.
    fn arriving(&self, remains: &Remains) -> Fence {
        let mut fence = Fence::default();
        let arenas = self.arriving.values().filter(|arriving| remains.show(self, arriving.arena));
        arenas.for_each(|arriving| fence.join(arriving.contents.clone()));
        fence
    }

    /// Behind which one thing goes.
    fn behind(&self, item: &Deferred) -> Fence {
        let mut fence = self.arriving(&item.remains);
        fence.join(item.fence.clone());
        fence
    }

    /// Ranges that go as a whole as soon as they can.
    pub(super) fn leaving_ranges(&self) -> impl Iterator<Item = RangeId> {
        let waiting = self.deferred.values().flat_map(|item| item.remains.ranges.iter());
        waiting.chain(&self.stuck).copied()
    }

    /// Parts of other ranges whose mappings go: the range, where from, and how many bytes.
    pub(super) fn leaving_parts(&self) -> impl Iterator<Item = (RangeId, u64, u64)> {
        self.deferred.values().flat_map(|item| item.remains.parts.iter().copied())
    }
}

fn warn_of(torn: &TornDown) {
    if let Err(error) = &torn.refused {
        tracing::warn!(%error, "the driver did not take a range back; kept for another try");
    }
}

impl PagePool {
    /// Tears something down behind a fence: at once if that is done, else as soon as somebody comes by who finds it done
    /// ([`take`](super::Change::take) when memory is short, [`trim`](Self::trim), the end of something else). Does not block.
    pub fn finish(&self, mut fence: Fence, remains: Remains) {
        if remains.is_empty() {
            return;
        }
        {
            let state = self.lock();
            fence.join(state.arriving(&remains));
        }
        match fence.done(self.events()) {
            Ok(true) => {
                let torn = self.tear_down(remains, true);
                warn_of(&torn);
                self.look_again(&torn);
            }
            other => {
                if let Err(error) = other {
                    tracing::warn!(%error, "whether something is still in use cannot be found out; asked again later");
                }
                self.lock().deferred.insert(Deferred { fence, remains });
            }
        }
    }

    /// Behind what the device may still do with an arena's pages at addresses that are on their way out.
    pub(crate) fn leaving(&self, arena: u64) -> Fence {
        let (state, mut fence) = (self.lock(), Fence::default());
        let items = state.deferred.values().filter(|item| item.remains.show(&state, arena));
        items.for_each(|item| fence.join(item.fence.clone()));
        fence
    }

    /// The contents of an arena come behind its pages: nothing that shows those is torn down before. The caller holds its ranges.
    pub(crate) fn arrives(&self, arena: u64, mut contents: Fence) {
        if !contents.done(self.events()).unwrap_or(false) {
            self.lock().arriving.insert(Arriving { arena, contents });
        }
    }

    /// Whether no contents are on their way to pages that show there.
    pub(super) fn arrived(&self, remains: &Remains) -> bool {
        let mut arriving = self.lock().arriving(remains);
        arriving.done(self.events()).unwrap_or(false)
    }

    /// Forgets contents that are there.
    fn forget_arrived(&self) {
        let (arriving, mut look) = (self.lock().arriving.clone(), Look::new(self.events()));
        for (id, Arriving { mut contents, .. }) in arriving {
            if contents.done_at(&mut look).unwrap_or(false) {
                self.lock().arriving.remove(id);
            }
        }
    }

    /// Tears down what waits for a fence that is done; whether there was any.
    pub(crate) fn finish_done(&self) -> bool {
        let mut any = false;
        loop {
            let (some, awaited) = self.look_once();
            any |= some;
            if !awaited {
                return any;
            }
        }
    }

    /// The same; and whether others came meanwhile, so that something may be on the list again.
    fn look_once(&self) -> (bool, bool) {
        self.finish_peers_done();
        self.forget_arrived();
        // They stay in the list while the driver is asked, for whoever has to know what is waited for.
        let waiting: Vec<_> = {
            let state = self.lock();
            state.deferred.iter().map(|(id, item)| (id, state.behind(item))).collect()
        };
        let (mut done, mut look) = (Vec::new(), Look::new(self.events()));
        for (id, mut fence) in waiting {
            let over = fence.done_at(&mut look).unwrap_or(false);
            let state = &mut *self.lock();
            if over {
                done.extend(state.deferred.remove(id));
            } else if let Some(item) = state.deferred.get_mut(id) {
                item.fence = fence;
            }
        }
        let (mut any, mut awaited) = (false, false);
        for item in done {
            let torn = self.tear_down(item.remains, true);
            warn_of(&torn);
            any |= torn.done;
            awaited |= torn.awaited;
        }
        (any, awaited)
    }

    /// Blocks until what waits for fences may go, at most for so long, and tears it down; whether there was any. What waits for the
    /// end of a capture is not waited for.
    pub(crate) fn finish_waiting(&self, limit: Duration) -> bool {
        let fences: Vec<Fence> = {
            let state = self.lock();
            let of_peers = state.foreign.fences();
            let of_stuck = state.stuck.iter().map(|range| state.arriving(&Remains::range(*range)));
            let of_deferred = state.deferred.values().map(|item| state.behind(item));
            of_deferred.chain(of_stuck).chain(of_peers).collect()
        };
        let start = Instant::now();
        for mut fence in fences {
            let left = if limit == Duration::MAX { limit } else { limit.saturating_sub(start.elapsed()) };
            // What cannot be waited for stays.
            let _ = fence.block(self.events(), left);
        }
        self.finish_done()
    }

    /// Tries again to give back everything the driver refused earlier.
    ///
    /// # Errors
    /// A refusal; what is refused again is kept.
    pub fn retry(&self) -> Result<()> {
        self.finish_done();
        let mut first = Ok(());
        let stuck = std::mem::take(&mut self.lock().stuck);
        for range in stuck {
            first = first.and(self.close(range));
        }
        let pages = self.retry_pages();
        self.check();
        first.and(pages)
    }

    /// Gives back to the driver what nobody uses: waits for the fences, retries what was refused, releases the free pages. Returns
    /// their bytes.
    ///
    /// # Errors
    /// What the driver refuses again.
    pub fn trim(&self) -> Result<u64> {
        self.finish_waiting(Duration::MAX);
        // What this try leaves, the last one reports.
        let _ = self.retry();
        let released = self.release_free(u64::MAX);
        self.retry()?;
        Ok(released)
    }
}

/// Pools whose last user is gone while the driver still refuses to take something back, or the device may still use it: the next
/// opening of the device tries again.
fn orphans() -> &'static ProcessMutex<Vec<Arc<PagePool>>> {
    static ORPHANS: OnceLock<ProcessMutex<Vec<Arc<PagePool>>>> = OnceLock::new();
    ORPHANS.get_or_init(ProcessMutex::default)
}

/// Tries again what pools without users have left on the device of a driver.
pub(crate) fn retry_orphans(driver: &SharedDriver) {
    let left: Vec<_> = orphans().lock().extract_if(.., |pool| same_device(pool.driver(), driver)).collect();
    left.into_iter().for_each(PagePool::retire);
    events::retry_events(driver);
}

impl PagePool {
    /// The last user of the device leaves: everything that can go back does; a pool with something left is kept, as an orphan.
    pub(crate) fn retire(self: Arc<Self>) {
        self.finish_done();
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

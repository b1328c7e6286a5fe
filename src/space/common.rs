use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::exclusive::Exclusives;
use super::kept::Heap;
use super::lifetime_profile::LifetimeProfile;
use super::live_count::LiveCounts;
use super::recall::Recalls;
use super::registry::Registry;
use super::replaced::PendingRestores;
use super::seal::RetainPolicy;
use super::spare_ranges::SpareRanges;
use super::totals::Totals;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::order::ReplayOrder;
use crate::pages::{Capturing, PagePool, SharedSet};
use crate::pause::PauseState;

/// State of an arena, also used by its spaces, leases and eager scopes. Open to the crate are
/// options, fixed once the arena exists, and objects with private, synchronized fields.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) shared: SharedSet,
    pub(crate) order: ReplayOrder,
    pub(crate) heap: Heap,
    pub(crate) exclusives: Exclusives,
    pub(crate) pause_state: PauseState,
    pub(crate) recalls: Recalls,
    /// Selects the arena for pause and resume; empty: only calls without tags.
    pub(crate) tag: String,
    pub(crate) retain: RetainPolicy,
    pub(crate) poison: bool,
    /// Records time and call stack of allocations.
    pub(crate) trace_blocks: bool,
    /// Whether new spaces record allocations and frees.
    trace_events: AtomicBool,
    /// Set after an internal error: only destruction is left.
    closed: AtomicBool,
    pub(crate) totals: Totals,
    pub(crate) live_counts: LiveCounts,
    pub(crate) registry: Registry,
    pub(crate) pending_restores: PendingRestores,
    pub(crate) spare_ranges: SpareRanges,
    own_captures: AtomicU64,
    pub(crate) lifetime_profile: LifetimeProfile,
    /// Last, so the device closes after everything above.
    pub(crate) device: Arc<Device>,
}

impl Common {
    /// State of an arena without spaces, with the default options.
    pub(crate) fn new(device: &Arc<Device>, shared: SharedSet, order: ReplayOrder) -> Self {
        Self {
            shared,
            order,
            heap: Heap::default(),
            exclusives: Exclusives::default(),
            pause_state: PauseState::new("the arena"),
            recalls: Recalls::default(),
            tag: String::new(),
            retain: RetainPolicy::default(),
            poison: false,
            trace_blocks: false,
            trace_events: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            totals: Totals::default(),
            live_counts: LiveCounts::default(),
            registry: Registry::default(),
            pending_restores: PendingRestores::default(),
            spare_ranges: SpareRanges::default(),
            own_captures: AtomicU64::new(0),
            lifetime_profile: LifetimeProfile::default(),
            device: Arc::clone(device),
        }
    }

    pub(crate) fn pool(&self) -> &Arc<PagePool> {
        self.device.pool()
    }

    pub(crate) fn require_resident(&self) -> Result<()> {
        self.pause_state.require(crate::pause::Phase::Resident)
    }

    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    pub(crate) fn require_usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) { Err(Error::Closed { what: "the arena" }) } else { Ok(()) }
    }

    pub(crate) fn trace_events(&self, on: bool) {
        self.trace_events.store(on, Ordering::Relaxed);
    }

    pub(super) fn traces_events(&self) -> bool {
        self.trace_events.load(Ordering::Relaxed)
    }

    /// Counts a capture of the arena, which ends when the result is dropped.
    pub(super) fn begin_capture(&self) -> Capturing {
        self.own_captures.fetch_add(1, Ordering::SeqCst);
        self.pool().capture()
    }

    /// Captures of the arena begun so far.
    pub(super) fn own_captures(&self) -> u64 {
        self.own_captures.load(Ordering::SeqCst)
    }
}

impl Drop for Common {
    fn drop(&mut self) {
        self.pause_state.forget_if(self.device.host_pool(), |_| true);
        self.spare_ranges.clear(self.pool());
        self.heap.end(self.pool());
        self.exclusives.end(self.pool(), self.order.fence());
        self.pool().reap();
        self.pool().release_free(u64::MAX);
        self.pool().check();
    }
}

//! Arena: one set of physical pages, the spaces that map them, and the order of their replays. The
//! state shared with spaces is `Common`. The mutex of the current space (`serial`) is taken before
//! all other locks; that of `eager` is held only to find or create the eager space.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::lending::Leases;
use crate::map::{self, ArenaMap};
use crate::order::ReplayOrder;
use crate::pages::{Account, Fence, Limits, Owner, SetPeers, SharedSet, next_number};
use crate::pause::{self, PauseReport, ResumeReport};
use crate::space::{Common, EagerBlocks, EagerScope, EagerSpace, EagerStats, Recall, Space, disjoint};
use crate::stats::{ArenaStats, Snapshot};
use crate::sync::Mutex;
use crate::units::{Peers, Stream};

mod exclusive;
mod lending;
mod options;
mod order;
mod serial;

pub use options::Options;
use serial::Serial;

fn asked_for(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// A set of pages on one device, shared by graphs that never run at the same time. Open a [`Space`]
/// for each capture. The methods of the published design
/// ([`switch_to_new_virtual_space`](Self::switch_to_new_virtual_space),
/// [`allocate`](Self::allocate), …) work on one current space, for strictly serial captures.
///
/// Thread-safe. Spaces may outlive the arena: a page is freed when unused.
pub struct SharedVmmAllocator {
    common: Arc<Common>,
    reserve_bytes: u64,
    /// Of the published design, with its predecessors.
    serial: Mutex<Serial>,
    eager: Eager,
    leases: Arc<Leases>,
}

/// Eager work from the first scope on. Dropped with the arena, except addresses of live blocks.
#[derive(Default)]
struct Eager(Mutex<Option<Arc<EagerSpace>>>);

impl Drop for Eager {
    fn drop(&mut self) {
        if let Some(space) = self.0.get_mut() {
            space.release();
        }
    }
}

impl SharedVmmAllocator {
    /// Creates an arena without pages.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`]; [`Error::InvalidArgument`] for an impossible peer; driver errors
    /// while reserving `reserve_bytes`.
    pub fn new(device: &Arc<Device>, options: &Options) -> Result<Self> {
        Self::in_account(device, options, None)
    }

    /// Like [`new`](Self::new), in the arena's account below an account of the device.
    pub fn in_account(device: &Arc<Device>, options: &Options, above: Option<&Account>) -> Result<Self> {
        let id = next_number();
        let own = Peers::one(device.driver().info().ordinal);
        let (peers, remote) = (options.peers.without(own), options.remote_peers.without(own));
        device.driver().capabilities().require_peers(peers.and(remote))?;
        let peers = SetPeers { all: peers, remote: peers.and(remote) };
        let geometry = options.geometry(device.driver().capabilities().granularity)?;
        let limits = Limits { most: options.budget_bytes, least: options.least_bytes };
        let account = device.account(&format!("arena {id}"), above, limits)?;
        let events = device.pool().events();
        let order = if options.serial { ReplayOrder::serial(events) } else { ReplayOrder::new(events) };
        let shared = SharedSet::new(device.pool(), id, account, geometry, peers);
        let mut common = Common::new(device, shared, order);
        common.tag.clone_from(&options.tag);
        common.retain = options.retain;
        common.poison = options.poison || asked_for("VMMGRAPH_POISON");
        common.trace_blocks = options.trace_blocks || asked_for("VMMGRAPH_TRACE_BLOCKS");
        common.trace_events(asked_for("VMMGRAPH_TRACE_EVENTS"));
        let common = Arc::new(common);
        let weak = Arc::downgrade(&common);
        device.pausables().add(weak);
        let arena = Self {
            common,
            reserve_bytes: {
                let granularity = device.driver().capabilities().granularity;
                options.reserve_bytes.checked_next_multiple_of(granularity).unwrap_or(options.reserve_bytes)
            },
            serial: Mutex::default(),
            eager: Eager::default(),
            leases: Arc::default(),
        };
        let leases: Arc<dyn Recall> = arena.leases.clone();
        arena.common.recalls.by(Arc::downgrade(&leases));
        if options.reserve_bytes > 0 {
            arena.begin_serial()?;
        }
        tracing::info!(arena = id, small = geometry.small(), large = geometry.large(), "arena created");
        Ok(arena)
    }

    /// Returns the arena's number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.common.shared.arena()
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.common.device
    }

    /// Opens a space for a capture: `vmmgraph_space_open`.
    pub fn open_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open(&self.common)
    }

    /// Opens a bump space, for the segments of a torch `MemPool`: `vmmgraph_space_open_bump`.
    pub fn open_bump_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open_bump(&self.common, 0)
    }

    /// Begins eager work on `stream`: see [`EagerScope`]. Waits for the end of a replay or scope of
    /// a different thread.
    ///
    /// # Errors
    /// [`Error::WrongState`] inside a launch or scope of this arena, or while paused; otherwise as
    /// [`Space::replay`].
    pub fn eager_scope(&self, stream: Stream) -> Result<EagerScope> {
        self.common.require_usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, None)
    }

    /// Like [`eager_scope`](Self::eager_scope), for at most `bytes` of live blocks, each rounded up
    /// to 512 bytes (allow a little for the ends of pages). Pages on lease stay so if `bytes` fit
    /// without; otherwise enough leases are refused ([`Error::Lent`]) or
    /// [recalled](Self::set_recall).
    pub fn eager_scope_of(&self, stream: Stream, bytes: u64) -> Result<EagerScope> {
        self.common.require_usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, Some(bytes))
    }

    /// Returns the handle that frees blocks after their scope.
    #[must_use]
    pub fn eager_blocks(&self) -> EagerBlocks {
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        EagerBlocks::new(space)
    }

    /// Returns the statistics of eager work.
    #[must_use]
    pub fn eager_stats(&self) -> EagerStats {
        let space = self.eager.0.lock().clone();
        space.map_or_else(EagerStats::default, |space| space.stats())
    }

    fn prepare(&self) -> Result<()> {
        self.common.require_usable()?;
        // Reaped pages serve this capture.
        self.common.pool().reap();
        match self.common.order.mark() {
            // Under capture, or impossible to capture; the next replay reports this.
            Err(Error::StreamCapturing { .. }) => Ok(()),
            result => result,
        }
    }

    /// Marks all replays so far: `vmmgraph_arena_mark`. Records events deferred during a capture.
    pub fn mark(&self) -> Result<()> {
        self.common.order.mark()?;
        let pool = self.common.pool();
        pool.reap();
        self.common.heap.reap(pool);
        self.common.shared.reap_returning();
        self.common.registry.spaces().iter().for_each(|space| space.core().poll_freed());
        Ok(())
    }

    /// Releases unused memory, and returns its bytes: `vmmgraph_arena_trim`.
    pub fn trim(&self) -> Result<u64> {
        let pool = self.common.pool();
        self.common.order.mark()?;
        let eager = self.eager.0.lock().clone();
        if let Some(eager) = eager {
            eager.release();
        }
        self.common.order.fence().block(pool.events(), Duration::MAX)?;
        self.common.heap.reap(pool);
        self.common.restore_replaced();
        self.common.spare_ranges.clear(pool);
        let released = pool.trim();
        self.common.shared.forget();
        released
    }

    /// Replaces little-used large pages by small pages, and returns the saved bytes:
    /// `vmmgraph_arena_shrink_to_fit`.
    pub fn shrink_to_fit(&self, fence: Fence) -> Result<u64> {
        self.common.require_usable()?;
        self.common.shrink_to_fit(fence)
    }

    /// Releases the arena's memory until [`resume`](Self::resume): `vmmgraph_arena_pause`. `fence`
    /// covers the caller's work on the arena's blocks.
    ///
    /// # Errors
    /// Also [`Error::NotOffered`] if the platform cannot replace memory under a graph.
    pub fn pause(&self, fence: Fence) -> Result<PauseReport> {
        self.common.require_usable()?;
        pause::pause(&*self.common, fence)
    }

    /// Restores the memory at the same addresses with its contents: `vmmgraph_arena_resume`.
    pub fn resume(&self, deadline: Duration) -> Result<ResumeReport> {
        self.common.require_usable()?;
        pause::resume(self.device().pausables(), &[&*self.common], deadline, true)
    }

    /// Limits the physical bytes: `vmmgraph_arena_set_budget`. `None`: only the limits of
    /// ancestors.
    pub fn set_budget(&self, bytes: Option<u64>) {
        let account = self.common.shared.account();
        account.set_limits(Limits { most: bytes, least: account.stats().least_bytes });
    }

    /// Closes the arena after a caught bug: only destruction is left.
    pub fn close(&self) {
        self.common.close();
    }

    /// Returns a snapshot of the arena, its spaces and the device.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let info = self.device().driver().info();
        let mut spaces: Vec<_> = self.common.registry.spaces().iter().map(|space| space.stats()).collect();
        spaces.sort_unstable_by_key(|space| space.id);
        Snapshot {
            driver: info.platform,
            device: info.ordinal,
            device_name: info.name.clone(),
            pool: self.device().stats(),
            owners: self.device().pool().owned_pages(),
            arena: self.stats(),
            spaces,
        }
    }

    /// Returns the current page map, without stopping other threads.
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        map::take(&self.common, self.high_water_mark())
    }

    /// Turns event tracing on or off: `vmmgraph_arena_trace_events`. Persistent blocks are not
    /// recorded.
    pub fn trace_events(&self, on: bool) {
        self.common.trace_events(on);
    }

    /// Checks that all live blocks of the arena are disjoint ([`Space::audit`]), and audits the
    /// device's pool. For tests.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first violation.
    pub fn audit(&self) -> Result<()> {
        let spaces = self.common.registry.spaces();
        spaces.iter().try_for_each(|space| space.audit())?;
        let mut kept: Vec<_> = spaces.iter().flat_map(|space| space.core().kept()).collect();
        kept.extend(self.common.exclusives.all().iter().map(|(at, bytes)| (at.0, at.0 + bytes)));
        kept.sort_unstable();
        disjoint(&kept)?;
        let eager = self.eager.0.lock().clone();
        eager.map_or(Ok(()), |eager| eager.audit())?;
        self.device().pool().audit()
    }

    /// Returns the current statistics.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let (common, pool) = (&self.common, self.common.pool());
        let (shared_bytes, shared_pages) = pool.held(common.shared.owner());
        let (kept_bytes, _) = pool.held(Owner::Kept { arena: self.id() });
        let (exclusive_bytes, _) = pool.held(common.exclusive_owner());
        let account = common.shared.account().stats();
        let (blocks, live_bytes) = common.live_counts.sum();
        let physical_bytes = pool.account_bytes(common.shared.account());
        ArenaStats {
            id: self.id(),
            physical_bytes,
            shared_bytes,
            shared_pages,
            retained_bytes: physical_bytes.saturating_sub(shared_bytes + kept_bytes + exclusive_bytes),
            kept_bytes,
            exclusive_bytes,
            lent_bytes: self.lent_bytes(),
            account,
            reserved_bytes: self.reserved_size(),
            mapped_bytes: common.totals.mapped(),
            live_bytes,
            blocks,
            high_water_bytes: self.high_water_mark(),
            spaces: common.registry.count() as u64,
            replays: common.order.replays(),
            paused: common.pause_state.phase() == pause::Phase::Paused,
        }
    }
}

impl fmt::Debug for SharedVmmAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedVmmAllocator")
            .field("id", &self.id())
            .field("device", self.device())
            .finish_non_exhaustive()
    }
}

//! Arena: one set of physical pages, the spaces that map these pages, and the order of their
//! replays.
//!
//! [`SharedVmmAllocator`] is the handle of an arena. The state shared with spaces is `Common`, kept
//! alive by the handle and by each space. The mutex of the current space (`serial`) is taken before
//! all other locks. The mutex of `eager` is held only to find or create the eager space.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::lending::Leases;
use crate::map::{self, ArenaMap};
use crate::order::ReplayOrder;
use crate::pages::{
    Account, Fence, Limits, Owner, Pausable, PauseReport, ResumeReport, SetPeers, SharedSet, next_number,
    resume,
};
use crate::space::{
    Common, EagerBlocks, EagerScope, EagerSpace, EagerStats, Exclusives, Heap, LifetimeProfile, LiveCounts,
    PendingRestores, Phase, Recall, Recalls, Residency, RetainPolicy, Space, SpareRanges, Totals, disjoint,
};
use crate::stats::{ArenaStats, Snapshot};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, Geometry, Peers, Stream};

mod exclusive;
mod lending;
mod order;

const MIB: u64 = 1 << 20;

/// Options of an arena. The defaults are measured (docs/performance.md).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a small page. 0: 2 MiB or the device's granularity, whichever is larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small page size. 0: derived from `expected_bytes`.
    /// Compared with 16 MiB, pages of 32 MiB took 40 to 51 % fewer maps. They held 1.002 to 1.029
    /// of the lower bound on three models with a peak graph of 900 MiB or more. On eight models of
    /// 390 to 722 MiB they held up to 1.11, and more below (docs/performance.md, Page sizes).
    pub large_page_bytes: u64,
    /// Policy for blocks live at the seal.
    pub retain: RetainPolicy,
    /// Fills the shared pages of a space before each replay, which exposes graphs relying on
    /// leftover contents. Also enabled by `VMMGRAPH_POISON=1` in the environment. For debugging, as
    /// the fills cost time.
    pub poison: bool,
    /// Records time and call stack of each allocation, for lists of live blocks. Also enabled by
    /// `VMMGRAPH_TRACE_BLOCKS=1`. Costs microseconds per block.
    pub trace_blocks: bool,
    /// Limit of the arena's physical memory in bytes. `None`: only the device's limit. See
    /// [`SharedVmmAllocator::set_budget`].
    pub budget_bytes: Option<u64>,
    /// Guaranteed bytes, among accounts below one with a limit. Guaranteed memory is never
    /// [lent](SharedVmmAllocator::lend).
    pub least_bytes: u64,
    /// Bytes of addresses reserved at once for the current space of the published design, rounded
    /// up to the device's granularity. 0: reserved as needed. More is reserved when these are used
    /// up.
    pub reserve_bytes: u64,
    /// Approximate peak of live bytes of the largest graph, which determines the large page size.
    /// The size is the largest power of two up to a forty-eighth of this peak, at least a small
    /// page and at most 16 MiB. From 8 GiB on, the size is 32 MiB. 0: unknown, so 16 MiB or the
    /// small page size, whichever is larger. Larger pages need fewer driver calls; smaller pages
    /// waste less at their ends.
    pub expected_bytes: u64,
    /// Refuses replays and eager scopes on a different stream or thread than the first one's
    /// ([`Error::WrongState`]), before any preparation. So the replay order is the program order of
    /// one thread. Ends with [`SharedVmmAllocator::lift_serial`], not with the thread or a pause.
    /// For cooperating ranks: waits between streams of an arena can deadlock ranks with different
    /// replay orders.
    pub serial: bool,
    /// Other devices of the platform with access to the arena's pages; the arena's own device is
    /// ignored. For programs with several devices in one process. Each peer adds cost to every map.
    pub peers: Peers,
    /// As [`peers`](Self::peers), only for pages of [peer-visible](crate::Space::allocate_remote)
    /// and [private](SharedVmmAllocator::allocate_exclusive) blocks: the memory that other devices
    /// read in collectives. Other maps cost no more.
    pub remote_peers: Peers,
    /// Tag for [`Device::pause`](crate::Device::pause) and
    /// [`Device::resume`](crate::Device::resume), as for regions; need not be unique. With an empty
    /// tag, the arena is paused only by a pause of everything or by [`SharedVmmAllocator::pause`].
    pub tag: String,
}

impl Default for Options {
    /// 2 MiB and 16 MiB pages, live-out blocks retained, no budget.
    fn default() -> Self {
        Self {
            small_page_bytes: 0,
            large_page_bytes: 0,
            retain: RetainPolicy::Retain,
            poison: false,
            trace_blocks: false,
            budget_bytes: None,
            least_bytes: 0,
            reserve_bytes: 0,
            expected_bytes: 0,
            serial: false,
            peers: Peers::NONE,
            remote_peers: Peers::NONE,
            tag: String::new(),
        }
    }
}

impl Options {
    /// Returns the page sizes for a device of this granularity.
    fn geometry(&self, granularity: u64) -> Result<Geometry> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let small = or(self.small_page_bytes, granularity.max(2 * MIB));
        let fitting = match self.expected_bytes {
            0 => 16 * MIB,
            // A larger page than without a hint must not cost memory: from 8 GiB on, 32 MiB is at
            // most half a percent of the held memory.
            expected if expected >= 8192 * MIB => 32 * MIB,
            // 48: from tests/arena/trace.rs and tests/arena/packing.rs.
            expected => 1 << (expected / 48).clamp(1, 16 * MIB).ilog2(),
        };
        let large = or(self.large_page_bytes, small.max(fitting));
        Geometry::new(small, large, granularity)
    }
}

/// Returns true if an environment variable is "1".
fn asked_for(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// A set of pages on one device, shared by graphs that never run at the same time.
///
/// New code opens a [`Space`] for each capture. The methods of the published design
/// ([`switch_to_new_virtual_space`](Self::switch_to_new_virtual_space),
/// [`allocate`](Self::allocate), …) work on one current space, for engines with strictly serial
/// captures.
///
/// Thread-safe. Spaces may outlive the arena: a page is freed when unused.
pub struct SharedVmmAllocator {
    common: Arc<Common>,
    reserve_bytes: u64,
    /// Current space of the published design, and its predecessors.
    serial: Mutex<Serial>,
    eager: Eager,
    leases: Arc<Leases>,
}

/// Addresses of eager work, from the first scope on. Dropped with the arena, except those of live
/// blocks.
#[derive(Default)]
struct Eager(Mutex<Option<Arc<EagerSpace>>>);

impl Drop for Eager {
    fn drop(&mut self) {
        if let Some(space) = self.0.get_mut() {
            space.release();
        }
    }
}

#[derive(Default)]
struct Serial {
    current: Option<Arc<Space>>,
    sealed: HashMap<u64, Arc<Space>>,
}

impl SharedVmmAllocator {
    /// Creates an arena without pages.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`] for sizes that do not fit the device; [`Error::InvalidArgument`]
    /// for an impossible peer; driver errors while reserving `reserve_bytes`.
    pub fn new(device: &Arc<Device>, options: &Options) -> Result<Self> {
        Self::in_account(device, options, None)
    }

    /// As [`new`](Self::new), with the arena's account below an account of the device, for example
    /// a tenant's or a model's.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::OverBudget`] if an ancestor has no room for the guarantee;
    /// [`Error::InvalidArgument`] for an account of a different device.
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
        let common = Common {
            shared: SharedSet::new(device.pool(), id, account, geometry, peers),
            order,
            heap: Heap::default(),
            exclusives: Exclusives::default(),
            residency: Residency::default(),
            recalls: Recalls::default(),
            tag: options.tag.clone(),
            retain: options.retain,
            poison: options.poison || asked_for("VMMGRAPH_POISON"),
            trace_blocks: options.trace_blocks || asked_for("VMMGRAPH_TRACE_BLOCKS"),
            trace_events: AtomicBool::new(asked_for("VMMGRAPH_TRACE_EVENTS")),
            closed: AtomicBool::new(false),
            totals: Totals::default(),
            live_counts: LiveCounts::default(),
            spaces: Mutex::default(),
            retired: Mutex::default(),
            pending_restores: PendingRestores::default(),
            spare_ranges: SpareRanges::default(),
            own_captures: AtomicU64::new(0),
            lifetime_profile: LifetimeProfile::default(),
            eager: Mutex::default(),
            device: Arc::clone(device),
        };
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
            let first = arena.open_serial()?;
            arena.serial.lock().current = Some(first);
        }
        tracing::info!(arena = id, small = geometry.small(), large = geometry.large(), "arena created");
        Ok(arena)
    }

    /// Returns the arena's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.common.shared.arena()
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.common.device
    }

    /// Opens a space for a capture. Makes no driver call, except to [`mark`](Self::mark) replays
    /// since the last mark. So the stream of the last replay may be captured, unless already under
    /// capture.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::WrongState`] inside a launch of this arena, or while paused.
    pub fn open_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open(&self.common)
    }

    /// Opens a bump space for a capture: blocks lie one after the other, and no address is reused.
    /// For the segments of a torch `MemPool`, which live as long as the graph. The arena then holds
    /// the memory of the longest bump space, plus at most a sixteenth or half a large page,
    /// whichever is less.
    ///
    /// # Errors
    /// As [`open_space`](Self::open_space).
    pub fn open_bump_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open_bump(&self.common, 0)
    }

    /// Begins eager work on `stream`, with blocks on the arena's shared pages: see [`EagerScope`].
    /// Waits for the end of a replay or scope of a different thread. Once the arena has the pages,
    /// makes only the driver calls of a replay and an event.
    ///
    /// # Errors
    /// Nothing changed, and the call can be repeated: [`Error::WrongState`] inside a launch or
    /// scope of this arena, or while paused; otherwise as [`Space::replay`].
    pub fn eager_scope(&self, stream: Stream) -> Result<EagerScope> {
        self.usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, None)
    }

    /// As [`eager_scope`](Self::eager_scope), for work with at most `bytes` of live blocks, each
    /// rounded up to 512 bytes. Allow a little more for the ends of pages.
    /// [`eager_scope`](Self::eager_scope) needs every page ever used by the arena's eager work.
    /// This scope avoids pages on lease that are not needed for `bytes`: they stay on lease, and no
    /// block is placed on them. If too few other pages exist, enough leases are refused or
    /// [recalled](Self::set_recall), at the start and whenever the scope needs more.
    ///
    /// # Errors
    /// As [`eager_scope`](Self::eager_scope); [`Error::Lent`] with enough leases for `bytes`.
    pub fn eager_scope_of(&self, stream: Stream, bytes: u64) -> Result<EagerScope> {
        self.usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, Some(bytes))
    }

    /// Returns the handle that frees blocks of eager work after their scope.
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
        self.usable()?;
        // Reaped pages serve this capture before new pages are created.
        self.common.pool().reap();
        match self.common.order.mark() {
            // The stream needs no mark: it is under capture, or cannot be captured. The next replay
            // reports the obstacle.
            Err(Error::StreamCapturing { .. }) => Ok(()),
            result => result,
        }
    }

    /// Marks all replays so far. Afterwards the stream of the last replay may be captured or
    /// destroyed, and so may streams recorded for freed blocks. Records events deferred during a
    /// capture.
    ///
    /// # Errors
    /// As [`ReplayOrder::mark`].
    pub fn mark(&self) -> Result<()> {
        self.common.order.mark()?;
        let pool = self.common.pool();
        pool.reap();
        self.common.heap.settle(pool);
        self.common.shared.settle_returning();
        self.living().iter().for_each(|space| space.core().settle_readers());
        Ok(())
    }

    /// Releases unused memory to the driver, and returns the bytes of the released pages. Waits for
    /// the arena's replays and for pending unmaps, releases all free pages of the device, and
    /// retries calls refused earlier.
    ///
    /// # Errors
    /// As [`ReplayOrder::mark`]; driver errors of the retry.
    pub fn trim(&self) -> Result<u64> {
        let pool = self.common.pool();
        self.common.order.mark()?;
        let eager = self.eager.0.lock().clone();
        if let Some(eager) = eager {
            eager.release();
        }
        self.common.order.fence().block(pool.events(), Duration::MAX)?;
        self.common.heap.settle(pool);
        self.common.restore_replaced();
        self.common.spare_ranges.clear(pool);
        let released = pool.trim();
        self.common.shared.forget();
        released
    }

    /// Replaces little-used large pages by small pages, if this saves at least a thirty-second of
    /// the shared pages. Returns the saved bytes. For arenas without a chosen page size
    /// ([`Options::expected_bytes`]); call once after all captures. Addresses and instantiated
    /// graphs stay valid. Contents of shared pages are lost, as between replays. The large pages
    /// become free pages of the device: [`trim`](Self::trim) releases free pages to the driver.
    ///
    /// Waits for `fence`, the arena's replays and the streams recorded for blocks. The caller adds
    /// other work that uses the arena's blocks to `fence`. Meanwhile replays and new spaces return
    /// [`Error::WrongState`], as during a pause. The small pages are taken before the large pages
    /// are free. Later spaces use large pages.
    ///
    /// # Errors
    /// Nothing changed: as [`pause`](Self::pause); [`Error::WrongState`] if paused. Out of memory
    /// or budget, driver errors: some spaces have small pages, and the call can be repeated.
    pub fn shrink_to_fit(&self, fence: Fence) -> Result<u64> {
        self.usable()?;
        self.common.shrink_to_fit(fence)
    }

    /// Releases the arena's memory to the driver, except [private](Self::allocate_exclusive)
    /// blocks. Addresses and instantiated graphs stay valid. Contents of live-out and persistent
    /// blocks are copied to the host and restored by [`resume`](Self::resume). Contents of shared
    /// pages are lost, including blocks left on shared pages by [`RetainPolicy::Share`] or by bump
    /// spaces.
    ///
    /// Waits for `fence`, the arena's replays and the streams [recorded](Space::record_stream) for
    /// blocks. The caller adds other work that uses the arena's blocks to `fence`.
    ///
    /// While paused, replays and new spaces return [`Error::WrongState`]. Blocks may be freed, and
    /// spaces and the arena dropped. Continues after failures and reports all of them: failed pages
    /// keep their memory, and the next pause retries. No effect if paused.
    ///
    /// # Errors
    /// Nothing changed: [`Error::WrongState`] while a space is open (also the unsealed current
    /// space of the published design), inside a launch of this arena, or in one of its hooks;
    /// [`Error::StreamCapturing`] if a stream to wait for is under capture; [`Error::Closed`];
    /// [`Error::NotOffered`] if the platform cannot replace memory under a graph
    /// ([`Capabilities::replace_under_graph`](crate::driver::Capabilities::replace_under_graph));
    /// driver errors of the fence.
    pub fn pause(&self, fence: Fence) -> Result<PauseReport> {
        self.usable()?;
        self.common.pause_pages(fence)
    }

    /// Restores the memory at the same addresses, and returns when the contents are complete. If
    /// memory is short, retries until the deadline, at least once, and asks reclaimers as an
    /// allocation does. No effect if resident.
    ///
    /// # Errors
    /// The arena stays paused with its contents on the host, and the call can be repeated: out of
    /// memory or budget; driver errors. [`Error::WrongState`] in a hook; [`Error::Closed`].
    pub fn resume(&self, deadline: Duration) -> Result<ResumeReport> {
        self.usable()?;
        let device = self.device();
        resume(device.pool(), device.host_pool(), &[&*self.common as &dyn Pausable], deadline)
    }

    /// Limits the physical bytes of the arena: shared pages, pages of its spaces, and persistent
    /// and private blocks. `None`: only the limits of ancestors. No memory is released: if the
    /// arena exceeds a lower limit, new pages are refused with [`Error::OverBudget`] until enough
    /// spaces are dropped. Blocks that need no new page are still served.
    ///
    /// Exact under concurrency: pages in creation count. Unmapped pages belong to the device and do
    /// not count.
    pub fn set_budget(&self, bytes: Option<u64>) {
        let account = self.common.shared.account();
        account.set_limits(Limits { most: bytes, least: account.stats().least_bytes });
    }

    /// Closes the arena after a caught bug: later calls return [`Error::Closed`], except
    /// destruction.
    pub fn close(&self) {
        self.common.closed.store(true, Ordering::Relaxed);
    }

    fn usable(&self) -> Result<()> {
        if self.common.closed.load(Ordering::Relaxed) {
            Err(Error::Closed { what: "the arena" })
        } else {
            Ok(())
        }
    }

    /// Returns the live spaces.
    fn living(&self) -> Vec<Arc<Space>> {
        self.common.spaces.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// Returns a snapshot of the arena, its spaces and the device. Queries every space.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let info = self.device().driver().info();
        let mut spaces: Vec<_> = self.living().iter().map(|space| space.stats()).collect();
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

    /// Returns the current page map: mapped pages by space, blocks at each space's peak, and bytes
    /// freed by dropping a space. Queries every space and walks the device's pages, without
    /// stopping other threads.
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        map::take(&self.common, self.high_water_mark())
    }

    /// Turns the recording of allocations and frees on or off for spaces opened from now on, for
    /// the map's view of one capture. Also enabled from the start by `VMMGRAPH_TRACE_EVENTS=1` in
    /// the environment. Uses host memory per block as long as the space lives. Persistent blocks
    /// are not recorded.
    pub fn trace_events(&self, on: bool) {
        self.common.trace_events.store(on, Ordering::Relaxed);
    }

    /// Checks that all live blocks of the arena are disjoint ([`Space::audit`]), also against
    /// persistent and private blocks of other spaces, and audits the device's pool. Walks all
    /// tables: for tests.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first violation.
    pub fn audit(&self) -> Result<()> {
        let spaces = self.living();
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
            mapped_bytes: common.totals.mapped.load(Ordering::Relaxed),
            live_bytes,
            blocks,
            high_water_bytes: self.high_water_mark(),
            spaces: common.spaces.lock().len() as u64,
            replays: common.order.replays(),
            paused: common.residency.paused(),
        }
    }
}

/// Methods of the published design, with the meaning defined by the paper: one current space at a
/// time, a bump space.
impl SharedVmmAllocator {
    /// Seals the current space, if any, and opens the next one at offset 0. Blocks of earlier
    /// spaces stay valid until the arena is dropped.
    ///
    /// # Errors
    /// As [`Space::seal`] (the current space stays) and [`open_space`](Self::open_space).
    pub fn switch_to_new_virtual_space(&self) -> Result<()> {
        let mut serial = self.serial.lock();
        if let Some(current) = &serial.current
            && current.phase() == Phase::Open
        {
            current.seal()?;
        }
        let next = self.open_serial()?;
        if let Some(last) = serial.current.replace(next) {
            serial.sealed.insert(last.id(), last);
        }
        Ok(())
    }

    fn open_serial(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open_bump(&self.common, self.reserve_bytes)
    }

    /// Allocates in the current space, opened if there is none. See [`Space::allocate`].
    ///
    /// # Errors
    /// As [`Space::allocate`] and [`open_space`](Self::open_space).
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        // An invalid size is refused before a space is opened.
        BlockBytes::round_up(size)?;
        let current = {
            let mut serial = self.serial.lock();
            match &serial.current {
                Some(current) => Arc::clone(current),
                None => Arc::clone(serial.current.insert(self.open_serial()?)),
            }
        };
        current.allocate(size, stream)
    }

    /// Frees a block of the current space or an earlier one. See [`Space::free`].
    ///
    /// # Errors
    /// As [`Space::free`].
    pub fn deallocate(&self, address: Address) -> Result<()> {
        let foreign = Error::ForeignPointer { address };
        let (_, space) = self.common.pool().range_at(address).ok_or(foreign.clone())?;
        let found = {
            let serial = self.serial.lock();
            let current = serial.current.as_ref().filter(|current| current.id() == space);
            current.or_else(|| serial.sealed.get(&space)).map(Arc::clone)
        };
        found.ok_or(foreign)?.free(address)
    }

    /// Returns the current space, if one was opened.
    #[must_use]
    pub fn current_space(&self) -> Option<Arc<Space>> {
        self.serial.lock().current.clone()
    }

    /// Returns the largest need of any space in bytes: allocated bytes of a bump space, peak of
    /// live bytes of a space of [`open_space`](Self::open_space).
    #[must_use]
    pub fn high_water_mark(&self) -> u64 {
        self.common.totals.high_water.load(Ordering::Relaxed)
    }

    /// Returns the offset of the next block in the current space: all bytes allocated so far, freed
    /// or not. 0 after a switch.
    #[must_use]
    pub fn current_offset(&self) -> u64 {
        self.current_space().map_or(0, |space| space.offset())
    }

    /// Returns the arena's physical bytes: shared, live-out, persistent and private pages. A page
    /// counts once, at however many addresses.
    #[must_use]
    pub fn mapped_size(&self) -> u64 {
        self.common.pool().account_bytes(self.common.shared.account())
    }

    /// Returns the bytes of addresses reserved by all spaces, at least `reserve_bytes` if
    /// requested.
    #[must_use]
    pub fn reserved_size(&self) -> u64 {
        self.common.totals.reserved.load(Ordering::Relaxed)
    }

    /// Returns true unless a caught bug closed the arena.
    #[must_use]
    pub fn is_initialized(&self) -> bool {
        self.usable().is_ok()
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

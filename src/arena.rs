//! The arena: one set of physical pages, the spaces over it, and the order of their replays.

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
    Account, Fence, Holder, Limits, Pausable, PauseReport, ResumeReport, SetPeers, SharedSet, next_number,
    resume,
};
use crate::space::{
    ComingBack, Common, EagerBlocks, EagerScope, EagerSpace, EagerStats, Exclusives, Heap, LiveCounts,
    Outliving, Phase, Presence, Recall, Recalls, RetainPolicy, Space, SpareRanges, Totals, disjoint,
};
use crate::stats::{ArenaStats, Snapshot};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, Geometry, Peers, Stream};

mod exclusive;
mod lending;
mod order;

const MIB: u64 = 1 << 20;

/// What an arena is made like. The defaults are measured (docs/performance.md).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a small page; 0: 2 MiB or the device's granularity, whichever is larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small page's; 0: as `expected_bytes` says. 32 MiB took 40 to 51 % fewer maps than 16,
    /// and held 1.002 to 1.029 of the floor on three models whose hungriest graph has 900 MiB and more, but up to 1.11 on eight of 390 to 722 MiB, and
    /// more below (docs/performance.md, Page sizes).
    pub large_page_bytes: u64,
    /// What becomes of blocks that are live at the seal.
    pub retain: RetainPolicy,
    /// Fills the shared pages of a space before each of its replays, so that a graph which relies on what is left there shows. Also
    /// on with `VMMGRAPH_POISON=1` in the environment. For finding bugs: it costs time.
    pub poison: bool,
    /// Blocks remember when and by which call stack they were allocated, for the lists of what is live. Also on with
    /// `VMMGRAPH_TRACE_BLOCKS=1`. Costs microseconds a block.
    pub trace_blocks: bool,
    /// The most bytes of physical memory the arena may hold; `None`: no limit but the device's. See
    /// [`SharedVmmAllocator::set_budget`].
    pub budget_bytes: Option<u64>,
    /// Bytes that it is sure to get, among accounts with a limit above them: so much of what it has is never
    /// [lent](SharedVmmAllocator::lend) either.
    pub least_bytes: u64,
    /// Bytes of addresses that the current space of the published design has from its beginning on; 0: addresses are reserved as they
    /// are needed. Rounded up to what the device reserves in; more is reserved when those are used up.
    pub reserve_bytes: u64,
    /// About how many bytes the hungriest graph has live at once, which says how large the large pages are: the largest power of two
    /// that is at most a forty-eighth of it, but no less than a small page and no more than 16 MiB; 32 MiB from 8 GiB on. 0: not known,
    /// 16 MiB or the small page's bytes, whichever is larger. Larger pages take fewer driver calls, smaller ones waste less where they end.
    pub expected_bytes: u64,
    /// Replays and eager scopes on another stream or another thread than the first one's are refused ([`Error::WrongState`]) before
    /// anything of them is prepared or recorded, so that the order is that of one thread's program; until
    /// [`SharedVmmAllocator::lift_serial`], and not by the end of that thread or by a pause. For ranks that work together: the waits between streams that order
    /// an arena's replays can deadlock ranks that replay in different orders.
    pub serial: bool,
    /// Each replay is noted, for ranks to [compare](SharedVmmAllocator::compare_order) what they launched. Also on with `VMMGRAPH_CHECK_ORDER=1` in the
    /// environment. For finding bugs, and for ranks that must not launch before they [agree](SharedVmmAllocator::agree_on).
    pub check_order: bool,
    /// Other devices of the platform that may read and write the arena's pages; the arena's own counts for nothing. Every map costs
    /// more for each, so only on request: for programs that use several devices in one process.
    pub peers: Peers,
    /// As [`peers`](Self::peers), for the pages of [remote](crate::Space::allocate_remote) and [exclusive](SharedVmmAllocator::allocate_exclusive) blocks
    /// only: all that other devices read of a collective. What else the arena maps costs no more then.
    pub remote_peers: Peers,
    /// What [`Device::pause`](crate::Device::pause) and [`Device::resume`](crate::Device::resume) find the arena by, as regions; several may have
    /// one. Empty: only when they are asked for everything, and by [`SharedVmmAllocator::pause`].
    pub tag: String,
}

impl Default for Options {
    /// 2 MiB and 16 MiB pages, live blocks retained, no budget.
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
            check_order: false,
            peers: Peers::NONE,
            remote_peers: Peers::NONE,
            tag: String::new(),
        }
    }
}

impl Options {
    /// The page sizes on a device of this granularity.
    fn geometry(&self, granularity: u64) -> Result<Geometry> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let small = or(self.small_page_bytes, granularity.max(2 * MIB));
        let fitting = match self.expected_bytes {
            0 => 16 * MIB,
            // A larger page than without a hint must not cost memory: 32 MiB are half a percent of what one holds from here on.
            expected if expected >= 8192 * MIB => 32 * MIB,
            // Forty-eight: tests/trace.rs and tests/packing.rs.
            expected => 1 << (expected / 48).clamp(1, 16 * MIB).ilog2(),
        };
        let large = or(self.large_page_bytes, small.max(fitting));
        Geometry::new(small, large, granularity)
    }
}

/// Whether an environment variable turns something on.
fn asked_for(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| value == "1")
}

/// A set of pages shared by graphs that never run at the same time, on one device.
///
/// New code opens a [`Space`] for each capture. The methods of the published design
/// ([`switch_to_new_virtual_space`](Self::switch_to_new_virtual_space), [`allocate`](Self::allocate), …) work on one current
/// space and suit engines whose captures are strictly serial.
///
/// Thread-safe. Spaces may outlive the arena: its pages go when nothing needs them.
pub struct SharedVmmAllocator {
    common: Arc<Common>,
    reserve_bytes: u64,
    /// The current space of the published design, and the ones before it.
    serial: Mutex<Serial>,
    eager: Eager,
    leases: Arc<Leases>,
}

/// The addresses of the arena's eager work, from the first scope on. When the arena goes they go too, but for those of live blocks.
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
    /// An arena without pages.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`] for sizes that do not fit the device; [`Error::InvalidArgument`] for a peer that cannot be one; what the driver says of reserving `reserve_bytes`.
    pub fn new(device: &Arc<Device>, options: &Options) -> Result<Self> {
        Self::in_account(device, options, None)
    }

    /// As [`new`](Self::new), with the arena's account below one of the device's: a tenant's, a model's.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::OverBudget`] if the accounts above have no room for its least, [`Error::InvalidArgument`] for one of another device.
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
        let checked = options.check_order || asked_for("VMMGRAPH_CHECK_ORDER");
        let common = Common {
            shared: SharedSet::new(device.pool(), id, account, geometry, peers),
            order: if checked { order.checked() } else { order },
            heap: Heap::default(),
            exclusives: Exclusives::default(),
            presence: Presence::default(),
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
            coming_back: ComingBack::default(),
            spare_ranges: SpareRanges::default(),
            own_captures: AtomicU64::new(0),
            outliving: Outliving::default(),
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

    /// The arena's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.common.shared.arena()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.common.device
    }

    /// Opens a space for a capture. No driver call, unless replays came since the last [`mark`](Self::mark): then the arena marks
    /// them, so that the stream of the last replay may be captured, if it is not being captured already.
    ///
    /// # Errors
    /// [`Error::Closed`]; [`Error::WrongState`] inside a launch of this arena, and while it is paused.
    pub fn open_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open(&self.common)
    }

    /// Opens a bump space for a capture: its blocks lie behind one another and none of their addresses serves twice. For the
    /// segments of a torch `MemPool`, which all stay until the graph goes: the arena then holds what the longest bump space
    /// takes, and no more beyond that than a sixteenth of it or half a large page, whichever is less.
    ///
    /// # Errors
    /// Those of [`open_space`](Self::open_space).
    pub fn open_bump_space(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        Space::open_bump(&self.common, 0)
    }

    /// Begins eager work on `stream`, whose blocks lie on the arena's shared pages: see [`EagerScope`]. Waits for the end of a replay or
    /// scope that another thread is at. No driver call but those of a replay and an event, once the arena has the pages.
    ///
    /// # Errors
    /// [`Error::WrongState`] inside a launch or a scope of this arena, and while it is paused; otherwise those of a replay
    /// ([`Space::replay`]). Nothing has changed then, and the call can be repeated.
    pub fn eager_scope(&self, stream: Stream) -> Result<EagerScope> {
        self.usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, None)
    }

    /// As [`eager_scope`](Self::eager_scope), for work whose blocks come to at most `bytes` bytes at once, each rounded up to 512, and a little
    /// more for the ends of pages. That one asks for every page that the arena's eager work ever used; this one goes without those on lease that
    /// so much does not need: they stay on lease, and no block is placed on them. If the others are too few, leases that hold the difference are refused or
    /// [recalled](Self::set_recall), as it begins, and later if it comes to need more.
    ///
    /// # Errors
    /// As [`eager_scope`](Self::eager_scope); [`Error::Lent`] with leases that are enough for `bytes`.
    pub fn eager_scope_of(&self, stream: Stream, bytes: u64) -> Result<EagerScope> {
        self.usable()?;
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        space.begin(stream, Some(bytes))
    }

    /// What frees the blocks of the arena's eager work, after their scope.
    #[must_use]
    pub fn eager_blocks(&self) -> EagerBlocks {
        let space = Arc::clone(self.eager.0.lock().get_or_insert_with(|| EagerSpace::new(&self.common)));
        EagerBlocks::new(space)
    }

    /// What its eager work uses and did.
    #[must_use]
    pub fn eager_stats(&self) -> EagerStats {
        let space = self.eager.0.lock().clone();
        space.map_or_else(EagerStats::default, |space| space.stats())
    }

    fn prepare(&self) -> Result<()> {
        self.usable()?;
        // Pages that the device is done with serve this capture, before new ones are created for it.
        self.common.pool().finish_done();
        match self.common.order.mark() {
            // That stream needs no mark to be captured: it is, or never can be. Whoever replays next is told what stands in the way.
            Err(Error::StreamCapturing { .. }) => Ok(()),
            result => result,
        }
    }

    /// Orders everything replayed so far for good: the stream of the last replay may be captured or destroyed afterwards, and so may
    /// streams noted for blocks that are freed: what could not be recorded of them during a capture is now.
    ///
    /// # Errors
    /// Those of [`ReplayOrder::mark`].
    pub fn mark(&self) -> Result<()> {
        self.common.order.mark()?;
        let pool = self.common.pool();
        pool.finish_done();
        self.common.heap.settle(pool);
        self.common.shared.settle_returning();
        self.living().iter().for_each(|space| space.core().settle_readers());
        Ok(())
    }

    /// Gives back to the driver what nobody uses: waits for the arena's replays so far and for what was unmapped behind others, gives
    /// back the device's free pages, this arena's among them, and tries again what the driver refused to take back earlier; the
    /// bytes of the pages.
    ///
    /// # Errors
    /// Those of [`ReplayOrder::mark`], and what the driver refuses again.
    pub fn trim(&self) -> Result<u64> {
        let pool = self.common.pool();
        self.common.order.mark()?;
        let eager = self.eager.0.lock().clone();
        if let Some(eager) = eager {
            eager.release();
        }
        self.common.order.fence().block(pool.events(), Duration::MAX)?;
        self.common.heap.settle(pool);
        self.common.exchange_back();
        self.common.spare_ranges.clear(pool);
        let released = pool.trim();
        self.common.shared.forget();
        released
    }

    /// Replaces large pages of which the arena's graphs use little by small ones, where that saves a thirty-second of their shared pages
    /// at least; how many bytes fewer the arena holds. For arenas whose page size nobody chose ([`Options::expected_bytes`]): call it
    /// once when all captures are made. Addresses stay, and graphs over them stay instantiated; what shared pages hold is lost, as it is
    /// between replays. The large pages are the device's then: [`trim`](Self::trim) gives them to the driver.
    ///
    /// Waits for the fence, the arena's replays and what the streams noted for blocks were given; other work that uses the arena's blocks
    /// the caller puts in the fence. Meanwhile replays and new spaces are [`Error::WrongState`], as while the arena is paused. It needs
    /// memory for the small pages before the large ones are free. Spaces opened later get large pages again.
    ///
    /// # Errors
    /// Those of [`pause`](Self::pause), and [`Error::WrongState`] if the arena is paused; nothing has changed then. Out of memory or
    /// budget, or what the driver says: some spaces show small pages, and the call can be repeated.
    pub fn shrink_to_fit(&self, fence: Fence) -> Result<u64> {
        self.usable()?;
        self.common.shrink_to_fit(fence)
    }

    /// Gives the arena's memory back to the driver, all but [exclusive](Self::allocate_exclusive) blocks; its addresses stay, and graphs over them stay instantiated. Bytes of retained
    /// and kept blocks go to the host and come back with [`resume`](Self::resume); what shared pages hold is undefined between replays
    /// and is lost, as is that of blocks which [`RetainPolicy::Share`] and bump spaces leave on such pages. Behind the fence, the
    /// arena's replays and what the streams [noted](Space::record_stream) for blocks were given, which the caller waits for here;
    /// other work that uses the arena's blocks the caller puts in the fence.
    ///
    /// While it is paused, replays and new spaces are [`Error::WrongState`]; blocks may be freed, spaces and the arena dropped. Goes on past
    /// failures and reports them all: what failed keeps its memory, and the next pause tries it again. Paused already: nothing.
    ///
    /// # Errors
    /// [`Error::WrongState`] as long as a space is open (the current one of the published design is, until it is sealed), inside a
    /// launch of this arena and in a hook of it; [`Error::StreamCapturing`] if a stream it waits for is being captured; [`Error::Closed`];
    /// [`Error::NotOffered`] where graphs may not bear it ([`Capabilities::replace_under_graph`](crate::driver::Capabilities::replace_under_graph)); what the
    /// driver says of the fence. Nothing has changed then.
    pub fn pause(&self, fence: Fence) -> Result<PauseReport> {
        self.usable()?;
        self.common.step_aside(fence)
    }

    /// Brings the memory back, to the same addresses; returns when the contents are there. While there is no memory it asks again, at
    /// least once, until the deadline; the pool's reclaimers are asked as for any allocation. Resident: nothing.
    ///
    /// # Errors
    /// Out of memory or budget, or what the driver says: the arena is paused as before, the host has the contents, and the call can be
    /// repeated. [`Error::WrongState`] in a hook; [`Error::Closed`].
    pub fn resume(&self, deadline: Duration) -> Result<ResumeReport> {
        self.usable()?;
        let device = self.device();
        resume(device.pool(), device.host_pool(), &[&*self.common as &dyn Pausable], deadline)
    }

    /// Limits the bytes of physical memory that the arena's pages take: shared ones, those of its spaces, and those of kept and exclusive blocks;
    /// `None`: no limit but those above. Nothing is taken away: with less than is held, every page that is missing is refused with
    /// [`Error::OverBudget`] until enough spaces went; blocks that need no new page are served as ever.
    ///
    /// Exact, whatever other threads do: what is being created counts. Pages that nobody maps do not: they are the device's.
    pub fn set_budget(&self, bytes: Option<u64>) {
        let account = self.common.shared.account();
        account.set_limits(Limits { most: bytes, least: account.stats().least_bytes });
    }

    /// Closes the arena after a bug was caught: every later call but destruction answers [`Error::Closed`].
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

    /// The spaces that are still there.
    fn living(&self) -> Vec<Arc<Space>> {
        self.common.spaces.lock().values().filter_map(Weak::upgrade).collect()
    }

    /// The arena, its spaces and the device under it, as they are now. Asks every space.
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
            holders: self.device().pool().holdings(),
            arena: self.stats(),
            spaces,
        }
    }

    /// Which space shows which page, what blocks covered at each one's peak, and what dropping one gives back, as it is now. Asks every
    /// space and walks the device's pages; nothing is stopped for it.
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        map::take(&self.common, self.high_water_mark())
    }

    /// Whether spaces that are opened from now on note every block that comes and goes, for the map's view of one capture; also on from
    /// the beginning with `VMMGRAPH_TRACE_EVENTS=1` in the environment. Costs host memory for every block, as long as the space is
    /// there. Kept blocks are not noted.
    pub fn trace_events(&self, on: bool) {
        self.common.trace_events.store(on, Ordering::Relaxed);
    }

    /// Whether every live block of the arena's spaces has bytes of its own ([`Space::audit`]), also against other spaces' kept
    /// blocks and exclusive ones, and the device's books balance. Walks everything: for tests.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first thing that is wrong.
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

    /// What the arena holds now.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let (common, pool) = (&self.common, self.common.pool());
        let (shared_bytes, shared_pages) = pool.held(common.shared.holder());
        let (kept_bytes, _) = pool.held(Holder::Kept { arena: self.id() });
        let (exclusive_bytes, _) = pool.held(common.exclusive_holder());
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
            paused: common.presence.paused(),
        }
    }
}

/// The names of the published design, in the senses they have there: one current space at a time, which is a bump space.
impl SharedVmmAllocator {
    /// Seals the current space, if there is one, and opens the next, whose offset is 0. Blocks of earlier spaces stay valid until the
    /// arena goes.
    ///
    /// # Errors
    /// Those of [`Space::seal`] (the current space stays) and [`open_space`](Self::open_space).
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

    /// Allocates in the current space, which is opened if there is none. See [`Space::allocate`].
    ///
    /// # Errors
    /// Those of [`Space::allocate`] and [`open_space`](Self::open_space).
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        // Before a space is opened for it.
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

    /// Frees a block of the current space or of one before it. See [`Space::free`].
    ///
    /// # Errors
    /// Those of [`Space::free`].
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

    /// The current space, if one was opened.
    #[must_use]
    pub fn current_space(&self) -> Option<Arc<Space>> {
        self.serial.lock().current.clone()
    }

    /// The most bytes that any one space has needed: handed out in one of these, live at once in one opened by
    /// [`open_space`](Self::open_space).
    #[must_use]
    pub fn high_water_mark(&self) -> u64 {
        self.common.totals.high_water.load(Ordering::Relaxed)
    }

    /// Where the next block of the current space goes, in bytes from its beginning: what was allocated there so far, freed or not; 0
    /// behind a switch.
    #[must_use]
    pub fn current_offset(&self) -> u64 {
        self.current_space().map_or(0, |space| space.offset())
    }

    /// Physical bytes the arena holds: shared, retained, kept and exclusive pages.
    #[must_use]
    pub fn mapped_size(&self) -> u64 {
        self.common.pool().account_bytes(self.common.shared.account())
    }

    /// Bytes of addresses reserved in all spaces; `reserve_bytes` at least, if that was asked for.
    #[must_use]
    pub fn reserved_size(&self) -> u64 {
        self.common.totals.reserved.load(Ordering::Relaxed)
    }

    /// Whether the arena can be used: always, unless a caught bug closed it.
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

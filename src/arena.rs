//! The arena: one set of physical pages, the spaces over it, and the order of their replays.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::order::ReplayOrder;
use crate::pages::SharedSet;
use crate::space::{Common, Phase, RetainPolicy, Space};
use crate::stats::{ArenaStats, Snapshot};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, Geometry, Stream};

const MIB: u64 = 1 << 20;

/// What an arena is made like. The defaults are measured (docs/performance.md).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Bytes of a small page; 0: 2 MiB or the device's granularity, whichever is larger.
    pub small_page_bytes: u64,
    /// Bytes of a large page, a multiple of the small page's; 0: 32 MiB or the small page's bytes, whichever is larger.
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
}

impl Default for Options {
    /// 2 MiB and 32 MiB pages, live blocks retained, no budget.
    fn default() -> Self {
        Self {
            small_page_bytes: 0,
            large_page_bytes: 0,
            retain: RetainPolicy::Retain,
            poison: false,
            trace_blocks: false,
            budget_bytes: None,
        }
    }
}

impl Options {
    /// The page sizes on a device of this granularity.
    fn geometry(&self, granularity: u64) -> Result<Geometry> {
        let or = |given: u64, default: u64| if given == 0 { default } else { given };
        let small = or(self.small_page_bytes, granularity.max(2 * MIB));
        let large = or(self.large_page_bytes, small.max(32 * MIB));
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
/// space and suit engines whose
/// captures are strictly serial.
///
/// Thread-safe. Spaces may outlive the arena: its pages go when nothing needs them.
pub struct SharedVmmAllocator {
    device: Arc<Device>,
    common: Arc<Common>,
    /// The current space of the published design, and the ones before it.
    serial: Mutex<Serial>,
}

#[derive(Default)]
struct Serial {
    current: Option<Arc<Space>>,
    sealed: Vec<Arc<Space>>,
}

impl SharedVmmAllocator {
    /// An arena without pages.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`] for sizes that do not fit the device.
    pub fn new(device: &Arc<Device>, options: &Options) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let pool = device.pool();
        let geometry = options.geometry(pool.driver().info().granularity)?;
        let common = Common {
            shared: SharedSet::new(pool, id, geometry),
            order: ReplayOrder::new(pool),
            retain: options.retain,
            poison: options.poison || asked_for("VMMGRAPH_POISON"),
            trace_blocks: options.trace_blocks || asked_for("VMMGRAPH_TRACE_BLOCKS"),
            closed: AtomicBool::new(false),
            high_water: AtomicU64::new(0),
            spaces: Mutex::default(),
        };
        common.shared.set_budget(options.budget_bytes);
        tracing::info!(arena = id, small = geometry.small(), large = geometry.large(), "arena created");
        Ok(Self { device: Arc::clone(device), common: Arc::new(common), serial: Mutex::default() })
    }

    /// The arena's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.common.shared.arena()
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Opens a space for a capture. No driver call, unless replays came since the last [`mark`](Self::mark): then the arena marks
    /// them, so that the stream of the last replay may be captured.
    ///
    /// # Errors
    /// [`Error::Closed`], or what the driver says of the mark.
    pub fn open_space(&self) -> Result<Arc<Space>> {
        self.usable()?;
        self.common.order.mark()?;
        Ok(Space::open(&self.common))
    }

    /// Opens a bump space for a capture: its blocks lie behind one another and none of their addresses serves twice. For the
    /// segments of a torch `MemPool`, which all stay until the graph goes: the arena then holds what the longest bump space
    /// takes, and no more beyond that than a sixteenth of it or half a large page, whichever is less.
    ///
    /// # Errors
    /// Those of [`open_space`](Self::open_space).
    pub fn open_bump_space(&self) -> Result<Arc<Space>> {
        self.usable()?;
        self.common.order.mark()?;
        Ok(Space::open_bump(&self.common))
    }

    /// Orders everything replayed so far for good: the stream of the last replay may be captured or destroyed afterwards.
    ///
    /// # Errors
    /// Those of [`ReplayOrder::mark`].
    pub fn mark(&self) -> Result<()> {
        self.common.order.mark()
    }

    /// Gives back every page that no space maps, and what the driver refused to take back earlier; the bytes of the pages.
    ///
    /// # Errors
    /// What the driver refuses again.
    pub fn trim(&self) -> Result<u64> {
        self.common.order.wait()?;
        // First, because what a refused unmapping still pins cannot be trimmed; what this try leaves, the last one reports.
        let _ = self.device.pool().retry();
        let released = self.common.shared.trim();
        self.device.pool().retry()?;
        Ok(released)
    }

    /// Limits the bytes of physical memory that the arena's pages take, shared ones and those of its spaces; `None`: no limit but the
    /// device's. Nothing is taken away: with less than is held, every page that is missing is refused with [`Error::OverBudget`] until
    /// spaces went and [`trim`](Self::trim) gave back enough; blocks that need no new page are served as ever.
    ///
    /// Exact, whatever other threads do: what is being created counts, and so does what is being given back, or what the driver
    /// would not take back. Before an allocation or a seal fails, the arena gives back the pages that no space maps and tries once
    /// more.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.common.shared.set_budget(bytes);
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

    /// The arena and the device under it, as they are now.
    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        let info = self.device.driver().info();
        Snapshot {
            driver: info.kind,
            device: info.ordinal,
            device_name: info.name.clone(),
            pool: self.device.stats(),
            holders: self.device.pool().holdings(),
            arena: self.stats(),
        }
    }

    /// What the arena holds now, with every space in the order they were opened.
    #[must_use]
    pub fn stats(&self) -> ArenaStats {
        let mut spaces: Vec<_> = self.living().iter().map(|space| space.stats()).collect();
        spaces.sort_unstable_by_key(|space| space.id);
        let shared = self.common.shared.stats();
        let retained_bytes = spaces.iter().map(|space| space.retained_bytes).sum();
        let (charged_bytes, budget_bytes) = self.common.shared.budget();
        ArenaStats {
            id: self.id(),
            physical_bytes: shared.bytes + retained_bytes,
            shared,
            retained_bytes,
            charged_bytes,
            budget_bytes,
            reserved_bytes: spaces.iter().map(|space| space.reserved_bytes).sum(),
            mapped_bytes: spaces.iter().map(|space| space.mapped_bytes).sum(),
            live_bytes: spaces.iter().map(|space| space.live_bytes).sum(),
            blocks: spaces.iter().map(|space| space.blocks).sum(),
            high_water_bytes: self.high_water_mark(),
            spaces,
        }
    }
}

/// The names of the published design: one current space at a time, a bump space as there.
impl SharedVmmAllocator {
    /// Seals the current space, if there is one, and opens the next. Blocks of earlier spaces stay valid until the arena goes.
    ///
    /// # Errors
    /// Those of [`Space::seal`] (the current space stays) and [`open_space`](Self::open_space).
    pub fn switch_to_new_virtual_space(&self) -> Result<()> {
        let mut serial = self.serial.lock();
        if let Some(current) = &serial.current
            && current.stats().phase == Phase::Open
        {
            current.seal()?;
        }
        let next = self.open_bump_space()?;
        let last = serial.current.replace(next);
        serial.sealed.extend(last);
        Ok(())
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
                None => Arc::clone(serial.current.insert(self.open_bump_space()?)),
            }
        };
        current.allocate(size, stream)
    }

    /// Frees a block of the current space or of one before it. See [`Space::free`].
    ///
    /// # Errors
    /// Those of [`Space::free`].
    pub fn deallocate(&self, address: Address) -> Result<()> {
        let serial = self.serial.lock();
        let mut spaces = serial.current.iter().chain(serial.sealed.iter().rev());
        spaces.find(|space| space.contains(address)).ok_or(Error::ForeignPointer { address })?.free(address)
    }

    /// The current space, if one was opened.
    #[must_use]
    pub fn current_space(&self) -> Option<Arc<Space>> {
        self.serial.lock().current.clone()
    }

    /// The most bytes that were live at once in any one space.
    #[must_use]
    pub fn high_water_mark(&self) -> u64 {
        let living = self.living().iter().map(|space| space.peak_live_bytes()).max().unwrap_or(0);
        living.max(self.common.high_water.load(Ordering::Relaxed))
    }

    /// Bytes in use in the current space.
    #[must_use]
    pub fn current_offset(&self) -> u64 {
        self.serial.lock().current.as_ref().map_or(0, |space| space.live_bytes())
    }

    /// Physical bytes the arena holds, shared and retained.
    #[must_use]
    pub fn mapped_size(&self) -> u64 {
        self.stats().physical_bytes
    }

    /// Bytes of addresses reserved in all spaces.
    #[must_use]
    pub fn reserved_size(&self) -> u64 {
        self.stats().reserved_bytes
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
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}

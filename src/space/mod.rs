//! A space: the addresses of one capture, and the blocks in it.
//!
//! [`layout`] decides, [`stitch`] and [`seal`] carry it out, each as a [`Change`](crate::pages::Change) that commits only when all
//! of it succeeded. A [`Space`] is what a graph holds; its blocks hold the [`Core`] in it, which outlives the graph as long as they
//! do ([`life`]). The lock order of the crate is space, then kept heap, shared set, order, pool; a space's lock is held across the
//! driver calls of that space only, so captures on other threads go on, and across nobody's callback.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use serde::Serialize;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::order::ReplayOrder;
use crate::pages::{Fence, PagePool, Reservation, SharedSet};
use crate::sync::Mutex;
use crate::units::{Address, ByNumber, Stream};

mod aside;
mod audit;
mod bits;
mod block;
mod bump;
mod carry;
mod core;
mod eager;
mod events;
mod exchanged;
mod exclusive;
mod exports;
mod kept;
mod label;
mod lane;
mod layout;
mod layout_hash;
mod life;
mod live_count;
mod outliving;
mod page_table;
mod peak;
mod picture;
mod placement;
mod poison;
mod presence;
mod recall;
mod recency;
mod refresh;
mod seal;
mod sealed;
mod shrink;
mod slab;
mod slabs;
mod spare_ranges;
mod stitch;
mod users;

pub(crate) use audit::disjoint;
use bump::Bump;
pub(crate) use core::{Core, Kind};
use core::{State, Work};
pub(crate) use eager::EagerSpace;
use events::Events;
pub(crate) use exchanged::ComingBack;
pub(crate) use exclusive::Exclusives;
pub(crate) use kept::Heap;
use kept::KeptBlocks;
use layout_hash::LayoutHash;
pub(crate) use live_count::LiveCounts;
pub(crate) use outliving::Outliving;
pub(crate) use picture::{Picture, Spot};
use placement::Placement;
pub(crate) use presence::Presence;
pub(crate) use recall::{Recall, Recalls};
use users::Users;

pub(crate) use spare_ranges::SpareRanges;

pub use block::Block;
pub use carry::Carry;
pub use eager::{EagerBlocks, EagerEnd, EagerScope, EagerStats};
pub use events::TracedBlock;
pub use poison::{Difference, POISON};
pub use seal::{RetainPolicy, SealReport};

/// What all spaces of an arena have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) shared: SharedSet,
    pub(crate) order: ReplayOrder,
    pub(crate) heap: Heap,
    pub(crate) exclusives: Exclusives,
    /// Whether the pages are there.
    pub(crate) presence: Presence,
    /// What becomes of work that needs pages on lease.
    pub(crate) recalls: Recalls,
    /// What the arena is found by when memory is to step aside; empty: by nothing.
    pub(crate) tag: String,
    pub(crate) retain: RetainPolicy,
    /// Shared pages are filled before every replay.
    pub(crate) poison: bool,
    /// Blocks remember when and where they were allocated.
    pub(crate) trace_blocks: bool,
    /// Spaces that are opened from now on note every block that comes or goes.
    pub(crate) trace_events: AtomicBool,
    /// Set when a bug was caught: nothing is trusted any more, but everything can still be destroyed.
    pub(crate) closed: AtomicBool,
    pub(crate) totals: Totals,
    pub(crate) live_counts: LiveCounts,
    /// Every space that is still there, by number.
    pub(crate) spaces: Mutex<ByNumber<Weak<Space>>>,
    /// What is left of spaces whose graph is gone while somebody has a block of theirs, by number.
    pub(crate) retired: Mutex<ByNumber<Weak<Core>>>,
    pub(crate) coming_back: ComingBack,
    pub(crate) spare_ranges: SpareRanges,
    /// Captures that began for its spaces.
    pub(crate) own_captures: AtomicU64,
    pub(crate) outliving: Outliving,
    /// The addresses of its eager work.
    pub(crate) eager: Mutex<Weak<EagerSpace>>,
    /// Last, so that it closes when all above is gone.
    pub(crate) device: Arc<Device>,
}

impl Common {
    pub(crate) fn pool(&self) -> &Arc<PagePool> {
        self.device.pool()
    }

    /// # Errors
    /// [`Error::WrongState`] while the arena is paused, or going or coming.
    pub(crate) fn require_resident(&self) -> Result<()> {
        self.presence.require_resident()
    }

    fn usable(&self) -> Result<()> {
        if self.closed.load(Ordering::Relaxed) { Err(Error::Closed { what: "the arena" }) } else { Ok(()) }
    }
}

impl Drop for Common {
    /// The arena and its spaces are gone; free pages wait for nobody.
    fn drop(&mut self) {
        let (copies, contents) = self
            .presence
            .with(|aside| (std::mem::take(&mut aside.copies), std::mem::take(&mut aside.contents)));
        self.device.host_pool().give_copies(copies.into_values(), &contents);
        self.spare_ranges.clear(self.pool());
        self.heap.end(self.pool());
        self.exclusives.end(self.pool(), self.order.fence());
        self.pool().finish_done();
        self.pool().release_free(u64::MAX);
        self.pool().check();
    }
}

/// What the spaces of an arena come to, kept as it changes, so that asking costs the same with any number of spaces.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) reserved: AtomicU64,
    pub(crate) mapped: AtomicU64,
    /// The most bytes any space has needed.
    pub(crate) high_water: AtomicU64,
    /// Mappings made in sealed spaces because pages left.
    pub(crate) replaced: AtomicU64,
}

impl Totals {
    fn rose_to(&self, bytes: u64) {
        if self.high_water.load(Ordering::Relaxed) < bytes {
            self.high_water.fetch_max(bytes, Ordering::Relaxed);
        }
    }
}

static NEXT_SPACE: AtomicU64 = AtomicU64::new(1);

/// The number of a new space, which no other in the process has.
fn next_space() -> u64 {
    NEXT_SPACE.fetch_add(1, Ordering::Relaxed)
}

/// The lowest number of spaces that are opened from now on.
fn spaces_from_now_on() -> u64 {
    NEXT_SPACE.load(Ordering::Relaxed)
}

/// Where in its life a space is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Being captured: blocks may be allocated.
    Open,
    /// Captured: it may be replayed, and its retained blocks freed.
    Sealed,
    /// Its graph is gone; only what lies under live blocks is left.
    Retired,
    /// Undoing a failed driver call failed as well: it can only be dropped.
    Broken,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Retired => "retired",
            Self::Broken => "broken",
        }
    }
}

/// What one space uses.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SpaceStats {
    /// The space's number, unique in the process.
    pub id: u64,
    /// What its owner calls it ([`Space::set_label`]).
    pub label: Option<String>,
    /// Where in its life it is.
    pub phase: Phase,
    /// What its seal does with live blocks unless it is told otherwise.
    pub retain: RetainPolicy,
    /// Live blocks.
    pub blocks: u64,
    /// Their bytes, rounded up to 512 each.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Of the live bytes, those of kept blocks, which lie on the arena's kept pages.
    pub kept_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them; pages that show twice count twice.
    pub mapped_bytes: u64,
    /// Bytes of pages that are this space's own.
    pub retained_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
}

/// The addresses of one capture, over the pages of its arena.
///
/// Thread-safe. Dropping it, when its graph goes, does not block: everything but the pages under blocks that somebody still holds
/// ([`VmmTorchAllocator`](crate::VmmTorchAllocator)) is unmapped once the arena's replays so far are done. Work launched in any other
/// way than through [`replay`](Self::replay) must be done by then.
pub struct Space {
    core: Arc<Core>,
}

impl Space {
    /// A new stitched space of the arena, without addresses yet.
    ///
    /// # Errors
    /// [`Error::WrongState`] while the arena is paused.
    pub(crate) fn open(common: &Arc<Common>) -> Result<Arc<Self>> {
        Self::with(common, Placement::Stitched(None))
    }

    /// A new bump space of the arena; with `reserve` bytes, those are reserved at once.
    ///
    /// # Errors
    /// [`Error::WrongState`] while the arena is paused; what the driver says of reserving.
    pub(crate) fn open_bump(common: &Arc<Common>, reserve: u64) -> Result<Arc<Self>> {
        let space = Self::with(common, Placement::Bump(Bump::new(reserve)))?;
        if reserve > 0 {
            space.core.state.lock().begin_range(common, space.core.id, reserve)?;
        }
        Ok(space)
    }

    fn with(common: &Arc<Common>, placement: Placement) -> Result<Arc<Self>> {
        // Before this one needs pages.
        common.exchange_back();
        let opened = Some(common.presence.open()?);
        // A bump space may be opened long before its capture, or behind the last one: there its first block begins it.
        let capture = matches!(placement, Placement::Stitched(_)).then(|| {
            common.own_captures.fetch_add(1, Ordering::SeqCst);
            common.pool().capture()
        });
        let id = next_space();
        // Before its first page is asked for.
        let seen = AtomicU64::new(common.shared.version());
        let state = State {
            phase: Phase::Open,
            opened,
            capture,
            placement,
            ranges: Vec::new(),
            kept: KeptBlocks::default(),
            holes: Vec::new(),
            alone_since: None,
            captures_at_seal: None,
            exchanged: Vec::new(),
            course: None,
            told: std::collections::HashSet::new(),
            live_count: None,
            captured_on: Vec::new(),
            captured_work: Fence::default(),
            users: Users::default(),
            postponed: None,
            readers: Fence::default(),
            work: Work::default(),
            layout_hash: LayoutHash::new(common.shared.geometry()),
            order_key: 0,
            label: None,
            site: None,
            events: common.trace_events.load(Ordering::Relaxed).then(Events::default),
            origins: common.trace_blocks.then(HashMap::new),
        };
        let core = Core {
            id,
            common: Arc::clone(common),
            state: Mutex::new(state),
            sealed: AtomicBool::new(false),
            launched: AtomicBool::new(true),
            recycles: AtomicBool::new(false),
            seen,
        };
        let space = Arc::new(Self { core: Arc::new(core) });
        common.spaces.lock().insert(id, Arc::downgrade(&space));
        Ok(space)
    }

    /// What its blocks hold.
    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// The space's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// The arena this space belongs to, by number.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.core.common.shared.arena()
    }

    /// Allocates a block of at least `size` bytes (rounded up to 512) for work on `stream`, aligned to 512 bytes.
    ///
    /// The contents are undefined. No driver call is made if a suitable address range is mapped already; else pages are mapped,
    /// and the arena grows if too few are free. May be called while the stream is being captured. Before it fails for lack of memory
    /// it waits for what only waits for the device, and asks the device's reclaimers, with no lock held.
    ///
    /// # Errors
    /// [`Error::InvalidSize`]; [`Error::WrongState`] unless the space is open; out of memory, budget, addresses or descriptors:
    /// then nothing has changed and the next call works.
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Local)
    }

    /// As [`allocate`](Self::allocate), for a block that the caller will keep when the capture ends: an output, a workspace. The kept
    /// blocks of all spaces lie packed on common pages, each on bytes of its own that no other block has until the block is freed
    /// and the space is gone, so that a few KiB do not cost a page.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate).
    pub fn allocate_kept(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Kept)
    }

    /// As [`allocate`](Self::allocate), for a block that peers use too: a buffer of a captured collective, which other devices or processes read and
    /// write by what they were told of its page, by [`export`](Self::export) or by a library that registers what it meets in the capture. It lies
    /// on one page, or, if it is longer than a large page, on whole ones (its bytes are rounded up to those); beside it lie remote blocks of the same
    /// stream only. So a seal, which exchanges pages under local blocks that are retained, exchanges none that a peer knows, and such pages are neither
    /// lent nor given to eager work from the seal on. Other graphs share them as any page: what peers do with it is over when the replay is.
    ///
    /// Free it before the seal. One that is still live is treated as the [policy](RetainPolicy) says and counted in the
    /// [report](SealReport::remote_blocks): its page may be another one afterwards.
    ///
    /// # Errors
    /// As [`allocate`](Self::allocate); [`Error::WrongState`] in a bump space.
    pub fn allocate_remote(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Remote)
    }

    /// Frees a block. Before the seal its pages serve the next block of the same stream; afterwards a retained block's pages return
    /// to the arena's shared set, once the streams that were [noted](Self::record_stream) for it have passed; where other captures of the device began
    /// since the seal, whose graphs may read it, for spaces that are opened later. The addresses stay
    /// mapped either way, since the graph writes there.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] or [`Error::DoubleFree`], with nothing changed.
    pub fn free(&self, address: Address) -> Result<()> {
        self.core.free(address, &[])
    }

    /// Notes that `stream` uses the block as well. During the capture: once freed it stays busy until the seal, as nothing orders the
    /// two streams' later work. After the seal: once freed, its bytes are nobody else's before what `stream` was given until then is
    /// done.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.core.record_stream(address, stream).map(drop)
    }

    /// Debug builds look whether the device's books balance, and log if they do not.
    pub(crate) fn check_books(&self) {
        self.core.common.pool().check();
    }

    /// Closes the space's arena after a bug was caught: every later call but destruction answers [`Error::Closed`].
    pub(crate) fn close_arena(&self) {
        self.core.close_arena();
    }

    /// Whether the address lies in this space, in a live block or not.
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        self.core.contains(address)
    }

    /// Launches this space's graph: calls `launch`, in order after every earlier replay of the arena.
    ///
    /// Same stream as the arena's last replay: no driver call but the question whether it is captured. Another one: it is made to wait
    /// for an event. `launch` must give the graph to `stream`. No lock is held meanwhile: it may call anything of the library, but a
    /// replay or a mark in this arena is refused, as is a replay in another arena that would wait for this one in the end.
    ///
    /// # Errors
    /// [`Error::Lent`] if it shows pages on lease, or what a recall of them says, if the arena is to
    /// [wait](crate::SharedVmmAllocator::set_recall) for that; [`Error::WrongState`] unless the space is sealed, and while the arena is paused; those of [`ReplayOrder::replay`]. Out of memory or
    /// budget, or what the driver says, if pages that eager work keeps had to be replaced. `launch` was not called then.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        if self.core.common.poison {
            return self.replay_over(POISON, stream, launch);
        }
        let _entered = self.core.enter(stream)?;
        Ok(launch())
    }

    /// [`replay`](Self::replay) for whoever cannot launch from a callback: what this thread gives to `stream` until it calls
    /// [`leave`](Self::leave), which it must whatever happens, is in order. Until then other replays of the arena wait.
    ///
    /// # Errors
    /// As [`replay`](Self::replay); there is nothing to leave then.
    pub fn enter(&self, stream: Stream) -> Result<()> {
        self.core.enter(stream)?.stay();
        if self.core.common.poison {
            return self.fill_shared(POISON, stream).inspect_err(|_| {
                // Entered just above.
                let _ = self.leave();
            });
        }
        Ok(())
    }

    /// Ends what [`enter`](Self::enter) began, of this space or another one of the arena, also if nothing was launched.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread has not entered.
    pub fn leave(&self) -> Result<()> {
        self.core.common.order.leave()
    }

    /// What ranks know this space's replays by, where they [compare](crate::SharedVmmAllocator::compare_order) them; 0, as at first: its
    /// [`layout_hash`](SealReport::layout_hash). For spaces whose ranks differ in their blocks and not in what they run, for bump spaces, and for several
    /// graphs over one space, each with a key of its own set before it is replayed.
    pub fn set_order_key(&self, key: u64) {
        self.core.state.lock().order_key = key;
    }

    /// Blocks the caller until the replays of the arena that were launched so far are done, this space's among them: afterwards what its
    /// graph reads and writes may go. Dropping the space does not wait.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] if the stream of the last replay is being captured and was not marked before, or what the driver says.
    pub fn wait(&self) -> Result<()> {
        let common = &self.core.common;
        common.order.fence().block(common.pool().events(), Duration::MAX).map(drop)
    }

    /// Puts a mark behind the arena's replays so far, so that the stream of the last one may be destroyed. Costs a record, and the next replay
    /// a wait, on that stream too; nothing if there is no replay since the last mark.
    ///
    /// # Errors
    /// Those of [`ReplayOrder::mark`](crate::ReplayOrder::mark).
    pub fn mark(&self) -> Result<()> {
        self.core.common.order.mark()
    }

    /// The numbers of the leases on pages that it shows: as long as there are any, it is not replayed.
    #[must_use]
    pub fn leases(&self) -> Vec<u64> {
        self.core.leases()
    }

    /// What the space uses now.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        let common = &self.core.common;
        let state = self.core.state.lock();
        let (usage, kept) = (state.placement.usage(), state.kept.usage());
        SpaceStats {
            id: self.id(),
            label: state.label.clone(),
            phase: state.phase,
            retain: self.core.policy(&state),
            blocks: usage.blocks + kept.blocks,
            live_bytes: usage.bytes + kept.bytes,
            peak_live_bytes: usage.peak_bytes + kept.peak_bytes,
            kept_bytes: kept.bytes,
            reserved_bytes: state.ranges.iter().map(Reservation::bytes).sum(),
            mapped_bytes: state.work.mapped_bytes,
            retained_bytes: common.pool().held(self.core.own()).0,
            maps: state.work.maps,
        }
    }

    /// Mappings made so far; what [`stats`](Self::stats) calls `maps`, without the rest.
    #[must_use]
    pub fn maps(&self) -> u64 {
        self.core.state.lock().work.maps
    }

    /// Bytes live now; what [`stats`](Self::stats) calls `live_bytes`, without the rest.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        let state = self.core.state.lock();
        state.placement.usage().bytes + state.kept.usage().bytes
    }

    /// In a bump space, the bytes handed out so far, also of blocks freed since; 0 in another.
    #[must_use]
    pub fn offset(&self) -> u64 {
        match &self.core.state.lock().placement {
            Placement::Bump(bump) => bump.end(),
            _ => 0,
        }
    }

    /// Where in its life it is.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.core.state.lock().phase
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Space({})", self.core.id)
    }
}

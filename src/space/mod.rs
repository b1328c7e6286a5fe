//! A space: the addresses of one capture, and the blocks in it.
//!
//! [`layout`] decides, this file carries it out: it reserves and maps what a plan names, and commits the plan only when all of
//! that succeeded. The lock order of the crate is space, then shared set, then pool; a space's lock is held across the driver
//! calls of that space only, so captures on other threads go on.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::{Error, Result};
use crate::order::ReplayOrder;
use crate::pages::{Owner, Reservation, SharedSet};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, Stream};

mod block;
mod bump;
mod layout;
mod page_table;
mod placement;
mod poison;
mod recency;
mod seal;
mod slab;
mod slabs;
mod stitch;

use block::{Origin, Origins};
use bump::Bump;
use layout::{Layout, NotLive, Place};
use placement::Placement;

pub use block::Block;
pub use poison::{Difference, POISON};
pub use seal::{RetainPolicy, SealReport};

/// What all spaces of an arena have in common.
#[derive(Debug)]
pub(crate) struct Common {
    pub(crate) shared: Arc<SharedSet>,
    pub(crate) order: ReplayOrder,
    pub(crate) retain: RetainPolicy,
    /// Shared pages are filled before every replay.
    pub(crate) poison: bool,
    /// Blocks remember when and where they were allocated.
    pub(crate) trace_blocks: bool,
    /// Set when a bug was caught: nothing is trusted any more, but everything can still be destroyed.
    pub(crate) closed: AtomicBool,
    /// The most bytes any space has had live at once.
    pub(crate) high_water: AtomicU64,
    /// Every space that is still there, by number.
    pub(crate) spaces: Mutex<HashMap<u64, Weak<Space>>>,
}

impl Drop for Common {
    /// The arena and its spaces are gone; so must be what they deferred.
    fn drop(&mut self) {
        if self.shared.deferred()
            && let Err(error) = self.order.wait().map(|()| self.shared.settle())
        {
            tracing::warn!(%error, "the last replay may still run: a later trim on the device tears its spaces down");
        }
    }
}

/// Where in its life a space is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Being captured: blocks may be allocated.
    Open,
    /// Captured: it may be replayed, and its retained blocks freed.
    Sealed,
    /// Undoing a failed driver call failed as well: it can only be dropped.
    Broken,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Broken => "broken",
        }
    }
}

/// What one space uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SpaceStats {
    /// The space's number, unique in the process.
    pub id: u64,
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
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them; pages that show twice count twice.
    pub mapped_bytes: u64,
    /// Bytes of pages that are this space's own.
    pub retained_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
}

struct State {
    phase: Phase,
    placement: Placement,
    /// The placement's ranges, under the same indices.
    ranges: Vec<Reservation>,
    work: Work,
    origins: Origins,
}

/// What the driver was asked for.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    maps: u64,
    /// Calls that reserve, create, map, set access or unmap, those of failed and undone tries left out.
    calls: u64,
    time: Duration,
}

/// The addresses of one capture, over the pages of its arena.
///
/// Thread-safe. Dropping it waits for the arena's replays that were launched through [`replay`](Self::replay), then unmaps
/// everything and gives the addresses back; work launched in any other way must be done by then.
pub struct Space {
    id: u64,
    common: Arc<Common>,
    state: Mutex<State>,
}

impl Space {
    /// A new stitched space of the arena, without addresses yet.
    pub(crate) fn open(common: &Arc<Common>) -> Arc<Self> {
        Self::with(common, Placement::Stitched(Layout::new(common.shared.geometry())))
    }

    /// A new bump space of the arena, without addresses yet.
    pub(crate) fn open_bump(common: &Arc<Common>) -> Arc<Self> {
        Self::with(common, Placement::Bump(Bump::default()))
    }

    fn with(common: &Arc<Common>, placement: Placement) -> Arc<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let origins = common.trace_blocks.then(HashMap::new);
        let state =
            State { phase: Phase::Open, placement, ranges: Vec::new(), work: Work::default(), origins };
        let space = Arc::new(Self { id, common: Arc::clone(common), state: Mutex::new(state) });
        common.spaces.lock().insert(id, Arc::downgrade(&space));
        space
    }

    /// The space's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.id
    }

    /// The arena this space belongs to, by number.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.common.shared.arena()
    }

    fn usable(&self) -> Result<()> {
        if self.common.closed.load(Ordering::Relaxed) {
            Err(Error::Closed { what: "the arena" })
        } else {
            Ok(())
        }
    }

    /// Allocates a block of at least `size` bytes (rounded up to 512) for work on `stream`, aligned to 512 bytes.
    ///
    /// The contents are undefined. No driver call is made if a suitable address range is mapped already; else pages are mapped,
    /// and the arena grows if too few are free. May be called while the stream is being captured.
    ///
    /// # Errors
    /// [`Error::InvalidSize`]; [`Error::WrongState`] unless the space is open; out of memory, budget, addresses or descriptors:
    /// then nothing has changed and the next call works.
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        let bytes = BlockBytes::round_up(size)?;
        self.usable()?;
        let origin = self.common.trace_blocks.then(Origin::here);
        let mut state = self.state.lock();
        state.require(Phase::Open)?;
        let place = self.place(&mut state, bytes, stream)?;
        let address = state.address(place);
        if let (Some(origins), Some(origin)) = (&mut state.origins, origin) {
            origins.insert(address, origin);
        }
        Ok(address)
    }

    fn place(&self, state: &mut State, bytes: BlockBytes, stream: Stream) -> Result<Place> {
        if let Placement::Stitched(layout) = &mut state.placement
            && let Some(place) = layout.place(bytes, stream)
        {
            return Ok(place);
        }
        // Before the plan, which lists every page: a hopeless request must not cost memory either.
        let driver = self.common.shared.pool().driver();
        let (total, device) = (driver.info().total_bytes, driver.info().ordinal);
        if bytes.get() > total {
            return Err(Error::OutOfMemory {
                requested: bytes.get(),
                free: driver.free_bytes()?,
                total,
                device,
            });
        }
        let start = Instant::now();
        let place = match state.placement {
            Placement::Stitched(_) => state.stitch(&self.common.shared, bytes, stream),
            Placement::Bump(_) => state.append(&self.common.shared, bytes),
        };
        state.work.time += start.elapsed();
        place
    }

    /// Frees a block. Before the seal its pages serve the next block of the same stream; afterwards a retained block's pages
    /// return to the arena's shared set. The addresses stay mapped either way, since the graph writes there.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] or [`Error::DoubleFree`], with nothing changed.
    pub fn free(&self, address: Address) -> Result<()> {
        self.usable()?;
        let mut state = self.state.lock();
        let bytes = state.find(address, Placement::free)?;
        if let Some(origins) = &mut state.origins {
            origins.remove(&address);
        }
        if state.phase == Phase::Sealed
            && let Some(place) = state.range_of(address)
        {
            state.give_back(&self.common.shared, place, bytes);
        }
        Ok(())
    }

    /// Notes that `stream` uses the block as well: once freed, it stays busy until the seal, as nothing orders the two streams'
    /// later work. Without effect after the seal.
    ///
    /// # Errors
    /// As [`free`](Self::free).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.usable()?;
        let mut state = self.state.lock();
        state.find(address, |placement, place| placement.record_stream(place, stream))
    }

    /// Debug builds look whether the device's books balance, and log if they do not.
    pub(crate) fn audit(&self) {
        self.common.shared.pool().check();
    }

    /// Closes the space's arena after a bug was caught: every later call but destruction answers [`Error::Closed`].
    pub(crate) fn close_arena(&self) {
        self.common.closed.store(true, Ordering::Relaxed);
    }

    /// Whether the address lies in this space, in a live block or not.
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        self.state.lock().range_of(address).is_some()
    }

    /// Launches this space's graph: calls `launch`, in order after every earlier replay of the arena.
    ///
    /// Same stream as the arena's last replay: no driver call. Another one: it is made to wait for an event. `launch` must
    /// give the graph to `stream`; it may allocate and free, but not replay, mark, trim, or open or drop spaces in this arena.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the space is sealed; those of [`ReplayOrder::replay`]. `launch` was not called then.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        self.usable()?;
        self.state.lock().require(Phase::Sealed)?;
        if self.common.poison {
            return self.replay_over(POISON, stream, launch);
        }
        self.common.order.replay(stream, launch)
    }

    /// What the space uses now.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        let pool = self.common.shared.pool();
        let state = self.state.lock();
        let usage = state.placement.usage();
        let mapped = || state.ranges.iter().flat_map(Reservation::mapped);
        let own = Owner::Retained { arena: self.arena(), space: self.id };
        SpaceStats {
            id: self.id,
            phase: state.phase,
            retain: self.policy(&state),
            blocks: usage.blocks,
            live_bytes: usage.bytes,
            peak_live_bytes: usage.peak_bytes,
            reserved_bytes: state.ranges.iter().map(Reservation::bytes).sum(),
            mapped_bytes: mapped().map(|(_, pin)| pin.bytes()).sum(),
            retained_bytes: mapped()
                .filter(|(_, pin)| pool.owner(pin.id()) == Some(own))
                .map(|(_, pin)| pin.bytes())
                .sum(),
            maps: state.work.maps,
        }
    }

    /// Mappings made so far; what [`stats`](Self::stats) calls `maps`, without the rest.
    #[must_use]
    pub fn maps(&self) -> u64 {
        self.state.lock().work.maps
    }

    /// Bytes live now; what [`stats`](Self::stats) calls `live_bytes`, without the rest.
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        self.state.lock().placement.usage().bytes
    }

    /// The most bytes that were live at once.
    pub(crate) fn peak_live_bytes(&self) -> u64 {
        self.state.lock().placement.usage().peak_bytes
    }
}

impl State {
    fn require(&self, expected: Phase) -> Result<()> {
        if self.phase == expected {
            return Ok(());
        }
        Err(Error::WrongState { what: "the space", expected: expected.name(), found: self.phase.name() })
    }

    fn address(&self, place: Place) -> Address {
        self.ranges[place.range].base().plus(place.offset)
    }

    fn range_of(&self, address: Address) -> Option<Place> {
        // A handful at most: ranges double in size.
        let found =
            self.ranges.iter().position(|r| address >= r.base() && address.0 - r.base().0 < r.bytes());
        found.map(|range| Place { range, offset: address.0 - self.ranges[range].base().0 })
    }

    /// Applies a function of the placement to the block at an address.
    fn find<T>(
        &mut self,
        address: Address,
        apply: impl FnOnce(&mut Placement, Place) -> Result<T, NotLive>,
    ) -> Result<T> {
        let place = self.range_of(address).ok_or(Error::ForeignPointer { address })?;
        apply(&mut self.placement, place).map_err(|why| match why {
            NotLive::FreedBefore => Error::DoubleFree { address },
            NotLive::Foreign => Error::ForeignPointer { address },
        })
    }

    /// Returns the space's own pages under a freed block to the shared set, those apart that other blocks still cover.
    fn give_back(&mut self, shared: &SharedSet, freed: Place, bytes: u64) {
        let Placement::Stitched(layout) = &self.placement else { return };
        let (from, to) = (freed.offset, freed.offset + bytes);
        for (at, pin) in self.ranges[freed.range].mapped() {
            let end = at + pin.bytes();
            if at < to
                && from < end
                && matches!(shared.pool().owner(pin.id()), Some(Owner::Retained { .. }))
                && !layout.covered(freed.range, at, end)
            {
                shared.give(pin);
            }
        }
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        self.common.spaces.lock().remove(&self.id);
        let state = self.state.get_mut();
        self.common.high_water.fetch_max(state.placement.usage().peak_bytes, Ordering::Relaxed);
        let pool = self.common.shared.pool();
        // An open space was never replayed; its addresses are not in use.
        let idle = if state.phase == Phase::Open {
            Ok(())
        } else {
            self.common.order.wait().or_else(|error| match error {
                Error::StreamCapturing { .. } | Error::WrongState { .. } => Err(error),
                _ => pool.driver().synchronize(),
            })
        };
        for (_, pin) in state.ranges.iter().flat_map(Reservation::mapped) {
            if matches!(pool.owner(pin.id()), Some(Owner::Retained { .. })) {
                pool.doom(pin.id());
            }
        }
        if let Err(error) = idle {
            tracing::warn!(%error, space = self.id, "the last replay may still run: the space is torn down by a later trim");
            let arena = self.common.shared.arena();
            state.ranges.drain(..).for_each(|range| range.defer(arena));
        }
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Space({})", self.id)
    }
}

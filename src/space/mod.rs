//! Spaces: the addresses of one capture each, and the blocks at these addresses.
//!
//! [`layout`] plans, [`stitch`] maps, [`seal`] ends a capture, [`life`] frees blocks and graphs,
//! [`eager`] places eager work. Each sequence of driver calls is a
//! [`Transaction`](crate::pages::Transaction). A graph owns a [`Space`]; blocks hold its [`Core`],
//! which may outlive the graph.
//!
//! Lock order of the crate: space, persistent heap, private blocks, shared set, replay order, pause
//! state, pool. A space holds its lock (`Core::state`) across its own driver calls, so other
//! captures continue, and never across a callback. One exception: a restore takes the shared-set
//! lock under that of the pause state; no code takes the two in reverse.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;

use crate::error::Result;
use crate::pages::Reservation;
use crate::sync::Mutex;
use crate::units::{Address, Stream};

mod audit;
mod bits;
mod block;
mod bump;
mod common;
mod core;
mod eager;
mod events;
mod exclusive;
mod exports;
mod kept;
mod lane;
mod layout;
mod layout_hash;
mod life;
mod lifetime_profile;
mod live_count;
mod observed;
mod page_table;
mod pause;
mod peak;
mod picture;
mod placement;
mod poison;
mod preserve;
mod recall;
mod recency;
mod refresh;
mod registry;
mod replaced;
mod seal;
mod sealed;
mod shrink;
mod slab;
mod slabs;
mod spare_ranges;
mod stage;
mod stitch;
mod totals;
mod users;
mod work;

pub(crate) use audit::disjoint;
use bump::Bump;
pub(crate) use common::Common;
use core::State;
pub(crate) use core::{Core, Kind};
pub(crate) use eager::EagerSpace;
use events::Events;
use kept::KeptBlocks;
use layout_hash::LayoutHash;
use observed::Observed;
pub(crate) use picture::{Picture, Spot};
use placement::Placement;
pub(crate) use recall::Recall;
use replaced::Replaced;
pub use stage::Phase;
use stage::Stage;
use users::Users;
use work::Work;

pub use block::Block;
pub use eager::{EagerBlocks, EagerEnd, EagerScope, EagerStats};
pub use events::TracedBlock;
pub use poison::{Difference, POISON};
pub use preserve::PreservedBlocks;
pub use seal::{RetainPolicy, SealReport};

static NEXT_SPACE: AtomicU64 = AtomicU64::new(1);

fn next_space() -> u64 {
    NEXT_SPACE.fetch_add(1, Ordering::Relaxed)
}

/// Returns a lower bound of the numbers of all later spaces.
fn spaces_from_now_on() -> u64 {
    NEXT_SPACE.load(Ordering::Relaxed)
}

/// Statistics of one space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SpaceStats {
    /// Unique in the process.
    pub id: u64,
    /// The label ([`Space::set_label`]).
    pub label: Option<String>,
    /// Stage of life.
    pub phase: Phase,
    /// Default policy of the seal for live blocks.
    pub retain: RetainPolicy,
    /// Live blocks.
    pub blocks: u64,
    /// Bytes of live blocks, each rounded up to 512.
    pub live_bytes: u64,
    /// Peak of `live_bytes`.
    pub peak_live_bytes: u64,
    /// Part of `live_bytes` in persistent (kept) blocks.
    pub kept_bytes: u64,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of mapped addresses.
    pub mapped_bytes: u64,
    /// Bytes of pages owned by this space.
    pub retained_bytes: u64,
    /// Mappings made so far.
    pub maps: u64,
}

/// Addresses of one capture, over pages of its arena. Thread-safe.
///
/// Drop the space together with its graph. Dropping does not block: after the arena's replays so
/// far, all memory is unmapped except under blocks held by a
/// [`VmmTorchAllocator`](crate::VmmTorchAllocator). Work launched other than by
/// [`replay`](Self::replay) must be done before the drop.
pub struct Space {
    core: Arc<Core>,
}

impl Space {
    pub(crate) fn open(common: &Arc<Common>) -> Result<Arc<Self>> {
        Self::with(common, Placement::Stitched(None))
    }

    /// Opens a bump space over at least `reserve` bytes of addresses; 0 reserves none.
    pub(crate) fn open_bump(common: &Arc<Common>, reserve: u64) -> Result<Arc<Self>> {
        let space = Self::with(common, Placement::Bump(Bump::new(reserve)))?;
        if reserve > 0 {
            space.core.state.lock().begin_range(common, space.core.id, reserve)?;
        }
        Ok(space)
    }

    fn with(common: &Arc<Common>, placement: Placement) -> Result<Arc<Self>> {
        common.restore_replaced();
        let opened = common.pause_state.open()?;
        // A bump space's capture begins with its first block.
        let capture = matches!(placement, Placement::Stitched(_)).then(|| common.begin_capture());
        let id = next_space();
        let seen = AtomicU64::new(common.shared.version());
        let state = State {
            stage: Stage::open(opened, capture),
            placement,
            ranges: Vec::new(),
            kept: KeptBlocks::default(),
            holes: Vec::new(),
            replaced: Replaced::default(),
            lifetime_trace: None,
            exported: std::collections::HashSet::new(),
            live_count: None,
            users: Users::default(),
            postponed: None,
            work: Work::default(),
            layout_hash: LayoutHash::new(common.shared.geometry()),
            observed: Observed::new(common.traces_events(), common.trace_blocks),
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
        common.registry.add(&space);
        Ok(space)
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Returns the space's number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.core.id
    }

    /// Returns the number of the space's arena.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.core.common.shared.arena()
    }

    /// Allocates a block of at least `size` bytes (rounded up to 512): `vmmgraph_space_allocate`.
    ///
    /// Makes no driver call if mapped addresses are free; otherwise maps pages. Before an
    /// out-of-memory error, waits for pending unmaps and calls the device's reclaimers, without a
    /// lock. Nothing has changed after an error.
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Local)
    }

    /// Allocates a persistent (kept) block: `vmmgraph_space_allocate_kept`.
    pub fn allocate_kept(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Kept)
    }

    /// Allocates a peer-visible (remote) block: `vmmgraph_space_allocate_remote`.
    pub fn allocate_remote(&self, size: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(size, stream, Kind::Remote)
    }

    /// Frees a block: `vmmgraph_space_free`. If graphs captured since the seal may read the block,
    /// only spaces opened later use its pages.
    pub fn free(&self, address: Address) -> Result<()> {
        self.core.free(address, &[])
    }

    /// Records a use of the block on `stream`: `vmmgraph_space_record_stream`.
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.core.record_stream(address, stream).map(drop)
    }

    /// Logs a mismatch of the page tables in debug builds.
    pub(crate) fn check_page_tables(&self) {
        self.core.common.pool().check();
    }

    pub(crate) fn close_arena(&self) {
        self.core.close_arena();
    }

    /// Whether the address lies in this space, in a live block or not.
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        self.core.contains(address)
    }

    /// Calls `launch`, which submits the graph to `stream`, ordered after every earlier replay of
    /// the arena: `vmmgraph_space_replay`. May block the host when pages must be replaced, or
    /// before the first launch. `launch` runs without a lock and may call any function, except a
    /// replay or mark in this arena, or a replay in an arena which waits for this one.
    ///
    /// # Errors
    /// [`Error::Lent`](crate::Error::Lent) if leased pages are mapped and the arena does not
    /// [wait](crate::SharedVmmAllocator::set_recall) for a recall. Out of memory or budget, and
    /// driver errors, if pages had to be replaced. After an error, `launch` was not called.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        if self.core.common.poison {
            return self.replay_over(POISON, stream, launch);
        }
        let _entered = self.core.enter(stream)?;
        Ok(launch())
    }

    /// Begins a [`replay`](Self::replay) without a callback: `vmmgraph_space_enter`.
    pub fn enter(&self, stream: Stream) -> Result<()> {
        self.core.enter(stream)?.stay_entered();
        if self.core.common.poison {
            return self.fill_shared(POISON, stream).inspect_err(|_| {
                let _ = self.leave();
            });
        }
        Ok(())
    }

    /// Ends the replay of [`enter`](Self::enter): `vmmgraph_space_leave`.
    pub fn leave(&self) -> Result<()> {
        self.core.common.order.leave()
    }

    /// Blocks until the arena's replays so far are done: `vmmgraph_space_wait`.
    pub fn wait(&self) -> Result<()> {
        let common = &self.core.common;
        common.order.fence().block(common.pool().events(), Duration::MAX).map(drop)
    }

    /// Records a mark after the arena's replays so far: `vmmgraph_space_mark`. Free if no replay
    /// followed the last mark.
    pub fn mark(&self) -> Result<()> {
        self.core.common.order.mark()
    }

    /// Returns the leases on pages mapped by this space, which exclude a replay.
    #[must_use]
    pub fn leases(&self) -> Vec<u64> {
        self.core.leases()
    }

    /// Returns current statistics.
    #[must_use]
    pub fn stats(&self) -> SpaceStats {
        let common = &self.core.common;
        let state = self.core.state.lock();
        let (usage, kept) = (state.placement.usage(), state.kept.usage());
        SpaceStats {
            id: self.id(),
            label: state.observed.label(),
            phase: state.stage.phase(),
            retain: self.core.policy(&state),
            blocks: usage.blocks + kept.blocks,
            live_bytes: usage.bytes + kept.bytes,
            peak_live_bytes: usage.peak_bytes + kept.peak_bytes,
            kept_bytes: kept.bytes,
            reserved_bytes: state.ranges.iter().map(Reservation::bytes).sum(),
            mapped_bytes: state.work.mapped_bytes(),
            retained_bytes: common.pool().held(self.core.own()).0,
            maps: state.work.maps(),
        }
    }

    /// Returns `maps` of [`stats`](Self::stats).
    #[must_use]
    pub fn maps(&self) -> u64 {
        self.core.state.lock().work.maps()
    }

    /// Returns `live_bytes` of [`stats`](Self::stats).
    #[must_use]
    pub fn live_bytes(&self) -> u64 {
        let state = self.core.state.lock();
        state.placement.usage().bytes + state.kept.usage().bytes
    }

    /// Returns the bytes ever allocated in a bump space; 0 in a stitched space.
    #[must_use]
    pub fn offset(&self) -> u64 {
        match &self.core.state.lock().placement {
            Placement::Bump(bump) => bump.end(),
            _ => 0,
        }
    }

    /// Returns the stage of life.
    #[must_use]
    pub fn phase(&self) -> Phase {
        self.core.state.lock().stage.phase()
    }
}

impl fmt::Debug for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Space({})", self.core.id)
    }
}

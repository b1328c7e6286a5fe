use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use super::block::Origin;
use super::kept::KeptBlocks;
use super::lane::Lane;
use super::layout::{NotLive, Place, Usage};
use super::layout_hash::LayoutHash;
use super::lifetime_profile::LifetimeTrace;
use super::live_count::LiveCount;
use super::observed::Observed;
use super::placement::Placement;
use super::preserve::Postponed;
use super::refresh::Stale;
use super::replaced::Replaced;
use super::stage::Stage;
use super::users::Users;
use super::work::Work;
use super::{Common, Phase};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Calls, Fence, NamedStream, Owner, PageId, Reservation, Transaction};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Address, BlockBytes, Stream};

/// State guarded by a space's lock.
pub(super) struct State {
    pub(super) stage: Stage,
    pub(super) placement: Placement,
    pub(super) ranges: Vec<Reservation>,
    pub(super) kept: KeptBlocks,
    pub(super) live_count: Option<LiveCount>,
    /// Addresses unmapped because the driver refused an undo.
    pub(super) holes: Vec<Stale>,
    pub(super) replaced: Replaced,
    pub(super) lifetime_trace: Option<LifetimeTrace>,
    pub(super) exported: HashSet<PageId>,
    pub(super) users: Users,
    /// Blocks freed while contents are preserved.
    pub(super) postponed: Option<Postponed>,
    pub(super) work: Work,
    pub(super) layout_hash: LayoutHash,
    pub(super) observed: Observed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Transient if freed before the seal, else live-out.
    Local,
    /// Persistent: declared or predicted to be live-out.
    Kept,
    /// Also used by peers.
    Remote,
}

/// Part of a space held by its graph and by every tensor in the space.
pub(crate) struct Core {
    pub(super) id: u64,
    pub(super) common: Arc<Common>,
    pub(super) state: Mutex<State>,
    /// Set once, so replays check the phase without a lock.
    pub(super) sealed: AtomicBool,
    /// True if launched, or if launches are not observed.
    pub(super) launched: AtomicBool,
    /// Whether later captures may reuse the ranges.
    pub(super) recycles: AtomicBool,
    /// Version of the shared set at the last check of all pages.
    pub(super) seen: AtomicU64,
}

impl Core {
    pub(super) fn require_sealed(&self) -> Result<()> {
        if self.sealed.load(Ordering::Acquire) { Ok(()) } else { self.state.lock().require(Phase::Sealed) }
    }

    pub(super) fn own(&self) -> Owner {
        Owner::Retained { arena: self.common.shared.arena(), space: self.id }
    }

    /// Permits pauses of the arena until the first block.
    pub(crate) fn defer(&self) {
        self.state.lock().stage.defer();
    }

    pub(crate) fn close_arena(&self) {
        self.common.close();
    }

    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.common.device
    }

    pub(crate) fn replays(&self) -> Fence {
        self.common.order.fence()
    }

    pub(crate) fn is_shareable(&self) -> bool {
        self.common.pool().driver().sharing().is_some()
    }

    pub(crate) fn allocate(&self, size: u64, stream: Stream, kind: Kind) -> Result<Address> {
        let mut bytes = BlockBytes::round_up(size)?;
        self.common.require_usable()?;
        let large = self.common.shared.geometry().large();
        if kind == Kind::Remote && bytes.get() > large {
            // Exports work by whole page.
            bytes = BlockBytes::round_up(bytes.get().next_multiple_of(large))?;
        }
        let lane = if kind == Kind::Remote { Lane::remote(stream) } else { Lane::local(stream) };
        if kind == Kind::Kept || self.common.trace_blocks {
            return self.allocate_or_grow(bytes, lane, kind, None);
        }
        let mut state = self.state.lock();
        if kind == Kind::Local
            && let Some((point, keeps)) = self.predicts_retained(&mut state, bytes.get())
        {
            let placed = if keeps { None } else { self.place_on_mapped(&mut state, bytes, lane) };
            if let Some(address) = placed {
                self.count(&mut state, bytes.get());
                state.note_trace_point(address, point);
                return Ok(address);
            }
            drop(state);
            let kind = if keeps { Kind::Kept } else { kind };
            let address = self.allocate_or_grow(bytes, lane, kind, None)?;
            self.state.lock().note_trace_point(address, point);
            return Ok(address);
        }
        if let Some(address) = self.place_on_mapped(&mut state, bytes, lane) {
            self.count(&mut state, bytes.get());
            return Ok(address);
        }
        self.allocate_or_grow(bytes, lane, kind, Some(state))
    }

    /// Slow path of an allocation. `full` is the locked state, if known to have no free place.
    #[cold]
    fn allocate_or_grow(
        &self,
        bytes: BlockBytes,
        lane: Lane,
        kind: Kind,
        mut full: Option<MutexGuard<'_, State>>,
    ) -> Result<Address> {
        let mut origin = self.common.trace_blocks.then(Origin::here);
        let mut placed = || {
            let (mut state, asked) = match full.take() {
                Some(state) => (state, true),
                None => (self.state.lock(), false),
            };
            state.require(Phase::Open)?;
            if lane.remote && !matches!(state.placement, Placement::Stitched(_)) {
                return Err(Error::wrong_state(
                    "cannot allocate a remote block: its space is a bump space; use open_space",
                ));
            }
            let address = if kind == Kind::Kept {
                self.keep(&mut state, bytes)?
            } else if asked {
                self.place_anew(&mut state, bytes, lane)?
            } else {
                self.place(&mut state, bytes, lane)?
            };
            self.count(&mut state, bytes.get());
            state.observed.add_origin(address, origin.take());
            Ok(address)
        };
        let result = self.common.recalled(|| self.with_memory_retry(&mut placed));
        if let Err(error) = &result {
            let label = self.label();
            tracing::debug!(%error, space = self.id, label, "growing a space failed and is undone");
        }
        let address = result?;
        if kind == Kind::Kept {
            // The block's stream waits for a resume which is still restoring these bytes.
            let events = self.common.pool().events();
            let behind =
                self.common.pause_state.unfinished_contents(events).before_or_over(events, lane.stream);
            behind.inspect_err(|_| drop(self.free(address, &[])))?;
        }
        Ok(address)
    }

    fn count(&self, state: &mut State, bytes: u64) {
        state.live_count.get_or_insert_with(|| self.common.live_counts.take()).add(bytes);
    }

    /// The caller holds no lock.
    #[inline]
    pub(super) fn with_memory_retry<T>(&self, work: impl FnMut() -> Result<T>) -> Result<T> {
        self.common.with_memory_retry(work).map_err(|error| error.of_space(self.label().as_deref()))
    }

    fn place(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Address> {
        if let Some(address) = self.place_on_mapped(state, bytes, lane) {
            return Ok(address);
        }
        self.place_anew(state, bytes, lane)
    }

    fn place_anew(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Address> {
        let place = self.grow(state, bytes, lane)?;
        Ok(self.placed(state, place, bytes, lane))
    }

    fn place_on_mapped(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Option<Address> {
        let Placement::Stitched(Some(layout)) = &mut state.placement else { return None };
        if state.stage.phase() != Phase::Open {
            return None;
        }
        let place = layout.place(bytes, lane)?;
        Some(self.placed(state, place, bytes, lane))
    }

    fn placed(&self, state: &mut State, place: Place, bytes: BlockBytes, lane: Lane) -> Address {
        if let Some(layout) = state.placement.layout() {
            self.common.totals.raise_high_water(layout.usage().peak_bytes);
        }
        if lane.remote {
            state.layout_hash.remote();
        }
        state.layout_hash.block(place, bytes);
        let address = state.address(place);
        let number = || state.placement.usage().allocations;
        state.observed.allocated(place, address, bytes.get(), number);
        address
    }

    fn grow(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Place> {
        // Checked before planning: an impossible request must not list pages.
        self.common.refuse_hopeless(bytes)?;
        let start = Instant::now();
        let place = match state.placement {
            Placement::Stitched(_) => {
                let seen = self.seen.load(Ordering::SeqCst);
                state.stitch(&self.common, (self.id, seen), bytes, lane)
            }
            _ => state.append(&self.common, self.id, bytes),
        };
        state.work.add_time(start.elapsed());
        place
    }

    /// Frees a block. After the seal, its memory is reused after `readers` and all recorded
    /// streams.
    pub(crate) fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.common.require_usable()?;
        let state = &mut *self.state.lock();
        if state.postponed.is_some() {
            return state.postpone(self.common.pool().events(), address, readers);
        }
        let over = matches!(state.stage.phase(), Phase::Sealed | Phase::Retired);
        let readers = if over { self.common.pool().events().name_readers(readers) } else { Vec::new() };
        self.let_go(state, address, readers)
    }

    /// Like [`free`](Self::free), and removes the block from all counts.
    pub(super) fn let_go(
        &self,
        state: &mut State,
        address: Address,
        readers: Vec<NamedStream>,
    ) -> Result<()> {
        let over = matches!(state.stage.phase(), Phase::Sealed | Phase::Retired);
        let note = |state: &mut State| {
            if over {
                readers.into_iter().for_each(|stream| state.users.note(address, stream));
            }
        };
        let bytes = match state.range_of(address) {
            Some(place) => {
                let bytes = state.placement.free(place).map_err(|why| why.at(address))?;
                if bytes > 0 {
                    state.observed.freed(place);
                }
                if over {
                    note(state);
                    self.give_back(state, place, address, bytes);
                }
                // A parked block counts until the seal or `free_parked`.
                bytes
            }
            None => {
                state.kept.check(address)?;
                note(state);
                self.free_kept(state, address)?
            }
        };
        self.note_traced_free(state, address);
        state.observed.remove_origin(address);
        if bytes > 0
            && let Some(live_count) = &state.live_count
        {
            live_count.remove(1, bytes);
        }
        Ok(())
    }

    pub(crate) fn contains(&self, address: Address) -> bool {
        let state = self.state.lock();
        state.range_of(address).is_some() || state.kept.contains(address)
    }

    /// Frees a parked block before the seal. The caller has verified that later work on the block's
    /// stream waits for every use.
    pub(crate) fn free_parked(&self, address: Address) -> Result<()> {
        self.common.require_usable()?;
        let state = &mut *self.state.lock();
        if state.stage.phase() != Phase::Open || state.postponed.is_some() {
            return Ok(());
        }
        let place = state.range_of(address).ok_or(Error::ForeignPointer { address })?;
        let bytes = state.placement.free_parked(place).map_err(|why| why.at(address))?;
        state.observed.freed(place);
        if let Some(live_count) = &state.live_count {
            live_count.remove(1, bytes);
        }
        Ok(())
    }

    /// Records a use of a block. Before the seal, returns the allocation stream if the free will
    /// park the block.
    pub(crate) fn record_stream(&self, address: Address, stream: Stream) -> Result<Option<Stream>> {
        self.common.require_usable()?;
        let state = &mut *self.state.lock();
        match state.range_of(address) {
            Some(place) => {
                let own = state.placement.record_stream(place, stream).map_err(|why| why.at(address))?;
                if state.stage.phase() == Phase::Open {
                    return Ok(own);
                }
            }
            None => state.kept.check(address)?,
        }
        state.users.note(address, self.common.pool().events().keep(stream));
        Ok(None)
    }
}

impl Common {
    /// Retries `work` while memory can be reclaimed. The caller holds no lock.
    #[inline]
    pub(super) fn with_memory_retry<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        work().or_else(|error| self.retry_with_memory(error, &mut work))
    }

    #[cold]
    fn retry_with_memory<T>(&self, mut error: Error, work: &mut dyn FnMut() -> Result<T>) -> Result<T> {
        if error.is_out_of_memory() {
            self.spare_ranges.clear(self.pool());
        }
        let mut memory_retry = self.pool().memory_retry();
        while memory_retry.helps(&error) {
            match work() {
                Err(again) => error = again,
                done => return done,
            }
        }
        Err(error)
    }

    pub(super) fn refuse_hopeless(&self, bytes: BlockBytes) -> Result<()> {
        self.pool().refuse_hopeless(bytes.get())
    }
}

impl NotLive {
    pub(super) fn at(self, address: Address) -> Error {
        match self {
            Self::FreedBefore => Error::DoubleFree { address },
            Self::Foreign => Error::ForeignPointer { address },
        }
    }
}

impl State {
    pub(super) fn require(&self, expected: Phase) -> Result<()> {
        self.stage.require(expected)
    }

    pub(super) fn address(&self, place: Place) -> Address {
        self.ranges[place.range].base().plus(place.offset)
    }

    /// Frees parked blocks and forbids new ones.
    pub(super) fn end_placement(&mut self) {
        let before = self.usage();
        self.placement.seal();
        let usage = self.usage();
        if let Some(live_count) = &self.live_count {
            live_count.remove(before.blocks - usage.blocks, before.bytes - usage.bytes);
        }
    }

    pub(super) fn range_of(&self, address: Address) -> Option<Place> {
        let mut ranges = self.ranges.iter().enumerate();
        ranges.find_map(|(range, found)| found.offset_of(address).map(|offset| Place { range, offset }))
    }

    pub(super) fn begin_range(&mut self, common: &Common, space: u64, bytes: u64) -> Result<()> {
        let mut transaction = Transaction::on(common.pool());
        transaction.reserve(bytes, space, common.shared.peers())?;
        let (calls, reserved) = transaction.commit();
        self.adopt(common, calls, reserved);
        Ok(())
    }

    pub(super) fn adopt(&mut self, common: &Common, calls: Calls, reserved: Vec<Reservation>) {
        self.work.add(&calls);
        self.note_mapped(common, calls.unmapped_bytes, calls.mapped_bytes);
        common.totals.note_reserved(0, reserved.iter().map(Reservation::bytes).sum());
        self.ranges.extend(reserved);
    }

    pub(super) fn note_mapped(&mut self, common: &Common, before: u64, after: u64) {
        self.work.note_mapped(before, after);
        common.totals.note_mapped(before, after);
    }

    pub(super) fn usage(&self) -> Usage {
        self.placement.usage()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "space {}", self.id)
    }
}

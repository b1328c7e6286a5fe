//! What a space is under its lock, and what its graph and its blocks both hold.

use std::collections::HashSet;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::block::{Origin, Origins};
use super::carry::Postponed;
use super::events::Events;
use super::exchanged::{Captures, Exchanged};
use super::kept::KeptBlocks;
use super::lane::Lane;
use super::layout::{NotLive, Place, Usage};
use super::layout_hash::LayoutHash;
use super::live_count::LiveCount;
use super::outliving::Course;
use super::placement::Placement;
use super::presence::Opened;
use super::refresh::Stale;
use super::users::Users;
use super::{Common, Phase};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Calls, Capturing, Change, Fence, Holder, NamedStream, PageId, Reservation};
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Address, BlockBytes, Stream};

/// What changes under a space's lock.
pub(super) struct State {
    pub(super) phase: Phase,
    /// As long as it is not sealed.
    pub(super) opened: Option<Opened>,
    /// As long as it may be captured: until somebody begins to seal it; from its first block on if it is a bump space.
    pub(super) capture: Option<Capturing>,
    pub(super) placement: Placement,
    /// The placement's ranges, under the same indices.
    pub(super) ranges: Vec<Reservation>,
    pub(super) kept: KeptBlocks,
    /// Its live blocks; from the first on.
    pub(super) live_count: Option<LiveCount>,
    /// Where nothing is mapped since the driver did not undo a replacement.
    pub(super) holes: Vec<Stale>,
    /// How many captures of the device had begun at the seal, if all others were over then: as long as no other begins, only its own graph can read
    /// its blocks.
    pub(super) alone_since: Option<u64>,
    /// The captures that had begun at the seal.
    pub(super) captures_at_seal: Option<Captures>,
    /// Where the seal exchanged pages, until the first launch; nothing where launches are not known.
    pub(super) exchanged: Vec<Exchanged>,
    /// How far its capture has come, if its short blocks may be kept as those of others were.
    pub(super) course: Option<Course>,
    /// Pages that others were told of before the seal.
    pub(super) told: HashSet<PageId>,
    /// Streams that were captured, on which a program uses blocks without saying so.
    pub(super) captured_on: Vec<NamedStream>,
    /// Behind what those were given until a block went that may [come back](super::exchanged).
    pub(super) captured_work: Fence,
    /// Streams that use a live block since the seal.
    pub(super) users: Users,
    /// What is freed while contents are carried over the seal.
    pub(super) postponed: Option<Postponed>,
    /// Behind what the users of blocks freed since the seal were given, as far as it is not over: the pages may still be others' too,
    /// or stay mapped, and go later.
    pub(super) readers: Fence,
    pub(super) work: Work,
    pub(super) layout_hash: LayoutHash,
    /// What ranks know its replays by; 0: the layout hash.
    pub(super) order_key: u64,
    pub(super) origins: Origins,
    /// What the space's owner calls it.
    pub(super) label: Option<String>,
    /// Where in the user's program it was captured, as its owner says.
    pub(super) site: Option<String>,
    /// What came and went, if that is noted.
    pub(super) events: Option<Events>,
}

/// What a block is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Passing, if it is freed before the seal; else retained.
    Local,
    /// Said beforehand to be retained.
    Kept,
    /// Peers use it too.
    Remote,
}

/// What the driver was asked for.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    pub(super) maps: u64,
    pub(super) mapped_bytes: u64,
    /// Calls that reserve, create, map, set access or unmap, those of failed and undone tries left out.
    pub(super) calls: u64,
    pub(super) time: Duration,
}

/// A space and its blocks, held by its graph and by every tensor in it.
pub(crate) struct Core {
    pub(super) id: u64,
    pub(super) common: Arc<Common>,
    pub(super) state: Mutex<State>,
    /// Set at the seal, and never taken back: what is replayed exists.
    pub(super) sealed: AtomicBool,
    /// Whether it has been launched, as far as is known. Never taken back once it is sealed.
    pub(super) launched: AtomicBool,
    /// Whether its ranges may be those of later captures when it is gone.
    pub(super) recycles: AtomicBool,
    /// The version of the shared set at which all it shows was the arena's.
    pub(super) seen: AtomicU64,
}

impl Core {
    /// What ranks know its replays by.
    pub(super) fn order_key(&self) -> u64 {
        let state = self.state.lock();
        if state.order_key == 0 { state.layout_hash.get() } else { state.order_key }
    }

    /// That its graph may be replayed, without the lock where it may.
    pub(super) fn require_sealed(&self) -> Result<()> {
        if self.sealed.load(Ordering::Acquire) { Ok(()) } else { self.state.lock().require(Phase::Sealed) }
    }

    /// Who has the pages that are this space's own.
    pub(super) fn own(&self) -> Holder {
        Holder::Retained { arena: self.common.shared.arena(), space: self.id }
    }

    pub(crate) fn close_arena(&self) {
        self.common.closed.store(true, Ordering::Relaxed);
    }

    /// The arena's device.
    pub(crate) fn device(&self) -> &Arc<Device> {
        &self.common.device
    }

    /// What is behind every replay of the arena so far.
    pub(crate) fn replays(&self) -> Fence {
        self.common.order.fence()
    }

    /// Whether the device was opened with pages that other processes can be given.
    pub(crate) fn is_shareable(&self) -> bool {
        self.common.pool().driver().sharing().is_some()
    }

    pub(crate) fn allocate(&self, size: u64, stream: Stream, kind: Kind) -> Result<Address> {
        let mut bytes = BlockBytes::round_up(size)?;
        self.common.usable()?;
        let large = self.common.shared.geometry().large();
        if kind == Kind::Remote && bytes.get() > large {
            // Whole pages, so that what is exported is.
            bytes = BlockBytes::round_up(bytes.get().next_multiple_of(large))?;
        }
        let lane = if kind == Kind::Remote { Lane::remote(stream) } else { Lane::local(stream) };
        if kind == Kind::Kept || self.common.trace_blocks {
            return self.allocate_or_grow(bytes, lane, kind, None);
        }
        let mut state = self.state.lock();
        if kind == Kind::Local
            && let Some((point, keeps)) = self.keeps_as_before(&mut state, bytes.get())
        {
            let placed = if keeps { None } else { self.place_on_mapped(&mut state, bytes, lane) };
            if let Some(address) = placed {
                self.count(&mut state, bytes.get());
                state.note_course(address, point);
                return Ok(address);
            }
            drop(state);
            let kind = if keeps { Kind::Kept } else { kind };
            let address = self.allocate_or_grow(bytes, lane, kind, None)?;
            self.state.lock().note_course(address, point);
            return Ok(address);
        }
        if let Some(address) = self.place_on_mapped(&mut state, bytes, lane) {
            self.count(&mut state, bytes.get());
            return Ok(address);
        }
        self.allocate_or_grow(bytes, lane, kind, Some(state))
    }

    /// The way of an allocation that takes a driver call, a kept page or a backtrace. `full` is a state that was found to have no place
    /// for it, and whose lock was held since: it need not be asked again before something changes.
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
            if let (Some(origins), Some(origin)) = (&mut state.origins, origin.take()) {
                origins.insert(address, origin);
            }
            Ok(address)
        };
        let result = self.common.recalled(|| self.relieved(&mut placed));
        if let Err(error) = &result {
            let label = self.label();
            tracing::debug!(%error, space = self.id, label, "growing a space failed and is undone");
        }
        let address = result?;
        if kind == Kind::Kept {
            // Who writes it before a replay knows nothing of what still comes back to bytes that another block had here.
            let events = self.common.pool().events();
            let behind = self.common.presence.contents(events).before_or_over(events, lane.stream);
            behind.inspect_err(|_| drop(self.free(address, &[])))?;
        }
        Ok(address)
    }

    fn count(&self, state: &mut State, bytes: u64) {
        state.live_count.get_or_insert_with(|| self.common.live_counts.take()).add(bytes);
    }

    /// As [`Common::relieved`], and says for whom memory was wanted. The caller holds no lock.
    #[inline]
    pub(super) fn relieved<T>(&self, work: impl FnMut() -> Result<T>) -> Result<T> {
        self.common.relieved(work).map_err(|error| error.of_space(self.label().as_deref()))
    }

    fn place(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Address> {
        if let Some(address) = self.place_on_mapped(state, bytes, lane) {
            return Ok(address);
        }
        self.place_anew(state, bytes, lane)
    }

    /// The address of a block for which something has to be mapped.
    fn place_anew(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Address> {
        let place = self.grow(state, bytes, lane)?;
        Ok(self.placed(state, place, bytes, lane))
    }

    /// The address of a block of an open space for which nothing has to be mapped.
    fn place_on_mapped(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Option<Address> {
        let Placement::Stitched(Some(layout)) = &mut state.placement else { return None };
        if state.phase != Phase::Open {
            return None;
        }
        let place = layout.place(bytes, lane)?;
        Some(self.placed(state, place, bytes, lane))
    }

    fn placed(&self, state: &mut State, place: Place, bytes: BlockBytes, lane: Lane) -> Address {
        if let Some(layout) = state.placement.layout() {
            self.common.totals.rose_to(layout.usage().peak_bytes);
        }
        if lane.remote {
            state.layout_hash.remote();
        }
        state.layout_hash.block(place, bytes);
        let address = state.address(place);
        if let Some(events) = &mut state.events {
            events.allocated(place, address, bytes.get(), state.placement.usage().allocations);
        }
        address
    }

    fn grow(&self, state: &mut State, bytes: BlockBytes, lane: Lane) -> Result<Place> {
        // Before the plan, which lists every page: a hopeless request must not cost memory either.
        self.common.refuse_hopeless(bytes)?;
        let start = Instant::now();
        let place = match state.placement {
            Placement::Stitched(_) => {
                let seen = self.seen.load(Ordering::SeqCst);
                state.stitch(&self.common, (self.id, seen), bytes, lane)
            }
            _ => state.append(&self.common, self.id, bytes),
        };
        state.work.time += start.elapsed();
        place
    }

    /// Frees a block; after the seal behind what these streams were given, and those that were noted for it.
    pub(crate) fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.common.usable()?;
        let state = &mut *self.state.lock();
        if state.postponed.is_some() {
            return state.postpone(self.common.pool().events(), address, readers);
        }
        let over = matches!(state.phase, Phase::Sealed | Phase::Retired);
        let readers = if over { self.common.pool().events().name_readers(readers) } else { Vec::new() };
        self.let_go(state, address, readers)
    }

    /// As [`free`](Self::free), of a block that counts until now.
    pub(super) fn let_go(
        &self,
        state: &mut State,
        address: Address,
        readers: Vec<NamedStream>,
    ) -> Result<()> {
        let over = matches!(state.phase, Phase::Sealed | Phase::Retired);
        let note = |state: &mut State| {
            if over {
                readers.into_iter().for_each(|stream| state.users.note(address, stream));
            }
        };
        let bytes = match state.range_of(address) {
            Some(place) => {
                let bytes = state.placement.free(place).map_err(|why| why.at(address))?;
                if let Some(events) = &mut state.events
                    && bytes > 0
                {
                    events.freed(place);
                }
                if over {
                    note(state);
                    self.give_back(state, place, address, bytes);
                }
                // A block that another stream of the capture uses is parked: it counts until the seal,
                // or until `free_parked`.
                bytes
            }
            None => {
                state.kept.check(address)?;
                note(state);
                self.free_kept(state, address)?
            }
        };
        self.forget_course(state, address);
        if let Some(origins) = &mut state.origins {
            origins.remove(&address);
        }
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

    /// Frees a parked block before the seal: what the capture does on the block's own stream from now
    /// on waits for every use of it.
    pub(crate) fn free_parked(&self, address: Address) -> Result<()> {
        self.common.usable()?;
        let state = &mut *self.state.lock();
        // The seal frees parked blocks, and contents are carried over a seal only.
        if state.phase != Phase::Open || state.postponed.is_some() {
            return Ok(());
        }
        let place = state.range_of(address).ok_or(Error::ForeignPointer { address })?;
        let bytes = state.placement.free_parked(place).map_err(|why| why.at(address))?;
        if let Some(events) = &mut state.events {
            events.freed(place);
        }
        if let Some(live_count) = &state.live_count {
            live_count.remove(1, bytes);
        }
        Ok(())
    }

    /// Notes that a stream uses a block. If the block is freed before the seal, it is parked then, and
    /// `Some` is the stream it was allocated for.
    pub(crate) fn record_stream(&self, address: Address, stream: Stream) -> Result<Option<Stream>> {
        self.common.usable()?;
        let state = &mut *self.state.lock();
        match state.range_of(address) {
            Some(place) => {
                let own = state.placement.record_stream(place, stream).map_err(|why| why.at(address))?;
                if state.phase == Phase::Open {
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
    /// Repeats what fails for lack of memory as long as somebody gives some back. The caller holds no lock.
    #[inline]
    pub(super) fn relieved<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        work().or_else(|error| self.relieved_of(error, &mut work))
    }

    /// The rest, out of the way of what succeeds at once.
    #[cold]
    fn relieved_of<T>(&self, mut error: Error, work: &mut dyn FnMut() -> Result<T>) -> Result<T> {
        if error.is_out_of_memory() {
            self.spare_ranges.clear(self.pool());
        }
        let mut relief = self.pool().relief();
        while relief.helps(&error) {
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
        if self.phase == expected {
            return Ok(());
        }
        let (found, expected) = (self.phase.name(), expected.name());
        Err(Error::wrong_state(format!(
            "cannot use the space: it is {found}; the call needs one that is {expected}"
        )))
    }

    pub(super) fn address(&self, place: Place) -> Address {
        self.ranges[place.range].base().plus(place.offset)
    }

    /// The capture has ended: nothing more is placed, and what was parked is gone.
    pub(super) fn end_placement(&mut self) {
        let before = self.usage();
        self.placement.seal();
        let usage = self.usage();
        if let Some(live_count) = &self.live_count {
            live_count.remove(before.blocks - usage.blocks, before.bytes - usage.bytes);
        }
    }

    pub(super) fn range_of(&self, address: Address) -> Option<Place> {
        // A handful at most: ranges double in size.
        let mut ranges = self.ranges.iter().enumerate();
        ranges.find_map(|(range, found)| found.offset_of(address).map(|offset| Place { range, offset }))
    }

    /// Adds a range for what is placed next.
    pub(super) fn begin_range(&mut self, common: &Common, space: u64, bytes: u64) -> Result<()> {
        let mut change = Change::on(common.pool());
        change.reserve(bytes, space, common.shared.peers())?;
        let (calls, reserved) = change.commit();
        self.adopt(common, calls, reserved);
        Ok(())
    }

    /// Notes what a change did.
    pub(super) fn adopt(&mut self, common: &Common, calls: Calls, reserved: Vec<Reservation>) {
        self.work.calls += calls.all;
        self.work.maps += calls.maps;
        self.note_mapped(common, calls.unmapped_bytes, calls.mapped_bytes);
        let bytes = reserved.iter().map(Reservation::bytes).sum();
        common.totals.reserved.fetch_add(bytes, Ordering::Relaxed);
        self.ranges.extend(reserved);
    }

    /// Notes that `after` bytes of addresses have a page where `before` had.
    pub(super) fn note_mapped(&mut self, common: &Common, before: u64, after: u64) {
        self.work.mapped_bytes = self.work.mapped_bytes - before + after;
        common.totals.mapped.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
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

//! Replaced mappings: slots changed by a seal, restorable until the first launch.
//!
//! A seal gives live-out blocks pages of the space. Many such blocks are freed soon: a library
//! captures a graph, inspects its outputs and drops them. If all launches are replays, only the
//! program has written to these pages before the first launch. So once all blocks of a slot are
//! freed, the slot maps the page of its number again, as if the blocks had been freed before the
//! seal. Otherwise the space would map small pages for good, which no other graph uses for large
//! blocks.
//!
//! If a capture began after the seal, its graph may read the block. For example, a captured
//! backward pass frees tensors saved by the forward pass. Such a block is *passed*: from its free
//! on, only graphs use the block. Its slot may map a page with passed blocks of earlier graphs, if
//! no space from this one on maps the page. If graphs replay in capture order, no other graph
//! then writes to the page between this graph and the last reader, as in torch's pools. Without
//! such a page, the slot
//! keeps its pages, which spaces opened later may use.
//!
//! [`Replaced`] holds the replaced mappings of a space, under the space's lock.
//! [`PendingRestores`] lists spaces whose restores wait for readers, under a lock of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::refresh::Stale;
use super::{Common, Core, Phase, State, spaces_from_now_on};
use crate::error::{Error, Result};
use crate::pages::{Fence, Mapping, NamedStream, PageId, PageNo, Transaction};
use crate::sync::Mutex;
use crate::units::Stream;

/// A slot with a page replaced by the seal.
#[derive(Clone, Copy, Debug)]
struct ReplacedMapping {
    range: usize,
    offset: u64,
    bytes: u64,
    /// Page number of the slot in the layout.
    no: PageNo,
    /// The page before the seal.
    page: PageId,
    /// Whether a block there was freed while graphs captured since the seal could read the block.
    passed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Replaced {
    /// Slots with pages replaced by the seal, restorable until the first launch. Empty if launches
    /// are not observed.
    slots: Vec<ReplacedMapping>,
    /// Number of captures begun on the device at the seal, if all had ended. While the number is
    /// unchanged, only this graph can read the space's blocks.
    alone_since: Option<u64>,
    /// Captures begun by the time of the seal.
    captures_at_seal: Option<Captures>,
    /// Captured streams on which the program uses blocks without `record_stream`.
    captured_on: Vec<NamedStream>,
    /// Fence after the work of `captured_on` at each free of a block with a pending restore.
    captured_work: Fence,
}

impl Replaced {
    /// Counts captures by the time of the seal.
    pub(super) fn seal(&mut self, common: &Common) {
        self.alone_since = common.pool().captures_if_over();
        self.captures_at_seal = Some(common.captures());
    }

    /// Drops all slots: none is restorable.
    pub(super) fn clear(&mut self) {
        self.slots = Vec::new();
    }
}

/// Numbers of spaces with restores which had to wait at the last poll.
#[derive(Debug, Default)]
pub(crate) struct PendingRestores {
    /// Read without the lock, because every new space reads the flag.
    any: AtomicBool,
    spaces: Mutex<BTreeSet<u64>>,
}

impl PendingRestores {
    fn add(&self, space: u64) {
        let spaces = &mut *self.spaces.lock();
        spaces.insert(space);
        self.any.store(true, Ordering::Release);
    }

    fn any(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    fn take(&self) -> BTreeSet<u64> {
        let spaces = &mut *self.spaces.lock();
        self.any.store(false, Ordering::Release);
        std::mem::take(spaces)
    }
}

impl Core {
    /// See [`launch_by_replay_only`](crate::VmmTorchAllocator::launch_by_replay_only).
    pub(crate) fn launch_by_replay_only(&self, only: bool) {
        if only {
            self.recycles.store(true, Ordering::Relaxed);
            // An already sealed space recorded no replaced mappings.
            self.launched.store(false, Ordering::Release);
        } else {
            self.begin_launches();
        }
    }

    /// See [`VmmTorchAllocator::captured_on`](crate::VmmTorchAllocator::captured_on).
    pub(crate) fn captured_on(&self, stream: Stream) {
        let state = &mut *self.state.lock();
        let named = self.common.pool().events().keep(stream);
        let streams = &mut state.replaced.captured_on;
        if !streams.contains(&named) {
            streams.push(named);
        }
    }

    /// Extends the fence of captured work, after the free of a block which may be restored.
    pub(super) fn note_captured_work(&self, state: &mut State) {
        let Replaced { slots, captured_on, captured_work, .. } = &mut state.replaced;
        if !slots.is_empty() {
            let events = self.common.pool().events();
            captured_on.iter().for_each(|stream| captured_work.add_kept(events, *stream));
        }
    }

    /// Called before each launch. The first one ends all pending restores.
    pub(super) fn begin_launches(&self) {
        if !self.launched.load(Ordering::Acquire) {
            self.begin_first_launch();
        }
    }

    #[cold]
    fn begin_first_launch(&self) {
        let readers = {
            let state = self.state.lock();
            let pending = state.replaced.slots.iter().any(|slot| !state.is_covered(slot));
            pending.then(|| {
                let mut readers = self.readers_of_freed(&state);
                readers.join(self.replays_of_passed(&state));
                readers
            })
        };
        if let Some(mut readers) = readers {
            // A slot keeps its page if the wait fails.
            let _ = readers.block(self.common.pool().events(), Duration::MAX);
        }
        let state = &mut *self.state.lock();
        self.restore_replaced(state);
        let behind = self.readers_of_freed(state);
        for slot in std::mem::take(&mut state.replaced.slots) {
            let range = &state.ranges[slot.range];
            for mapped in range.mapped().into_iter().filter(|mapped| slot.holds(mapped.offset)) {
                let end = mapped.offset + mapped.bytes;
                if !state.placement.covered(slot.range, mapped.offset, end)
                    && self.common.pool().owner(mapped.page) == Some(self.own())
                {
                    let since = if slot.passed { spaces_from_now_on() } else { 0 };
                    self.common.shared.give(mapped.page, self.own(), behind.clone(), since);
                }
            }
        }
        state.replaced.captured_work = Fence::default();
        self.launched.store(true, Ordering::Release);
    }

    /// Restores slots without live blocks if all readers of their blocks are done; otherwise a
    /// later poll tries again.
    pub(super) fn restore_replaced(&self, state: &mut State) {
        if state.stage.phase() != Phase::Sealed
            || !state.replaced.slots.iter().any(|slot| !state.is_covered(slot))
        {
            return;
        }
        let events = self.common.pool().events();
        let done = |fence: &mut Fence| fence.done(events).unwrap_or(false);
        let mut replays = self.replays_of_passed(state);
        let freed = state.users.poll_freed(events);
        if !(freed & done(&mut state.replaced.captured_work) & done(&mut replays)) {
            self.common.pending_restores.add(self.id);
            return;
        }
        // Not while the arena is paused or pausing: pages stay in place. Not while a resume copies
        // contents: the target page must not be freed.
        let restored = self.common.pause_state.while_resident(events, || {
            self.share_passed(state);
            for slot in state.replaced.slots.clone() {
                if state.is_covered(&slot) {
                    continue;
                }
                match self.restore(state, &slot, None) {
                    Ok(page) => {
                        state
                            .replaced
                            .slots
                            .retain(|other| (other.range, other.offset) != (slot.range, slot.offset));
                        // The number has this page from now on.
                        let same = state.replaced.slots.iter_mut().filter(|other| other.page == slot.page);
                        same.for_each(|other| other.page = page);
                    }
                    Err(error) => {
                        tracing::debug!(%error, space = self.id, "a replaced mapping was not restored")
                    }
                }
            }
        });
        if restored.is_none() {
            self.common.pending_restores.add(self.id);
        }
    }

    /// Maps pages of earlier passed blocks at the slots of passed blocks. Without such pages, gives
    /// the space's own pages to spaces opened later.
    fn share_passed(&self, state: &mut State) {
        let (all, others) = std::mem::take(&mut state.replaced.slots)
            .into_iter()
            .partition::<Vec<_>, _>(|slot| slot.passed && !state.is_covered(slot));
        state.replaced.slots = others;
        if all.is_empty() {
            return;
        }
        let until = spaces_from_now_on();
        // A graph captured outside the arena may replay before this one and read the addresses
        // during the change.
        let known = state.replaced.captures_at_seal.is_some_and(|at| at.all_ours(self.common.captures()));
        let mut by_size: BTreeMap<u64, Vec<ReplacedMapping>> = BTreeMap::new();
        all.into_iter().for_each(|slot| by_size.entry(slot.bytes).or_default().push(slot));
        for (bytes, slots) in by_size {
            let wanted = if known { slots.len() } else { 0 };
            let mut pages =
                self.common.shared.take_passed((bytes, wanted), (self.id, self.own()), until).into_iter();
            for slot in slots {
                let moved = pages.next().map(|page| self.restore(state, &slot, Some(page)));
                if !matches!(moved, Some(Ok(_))) {
                    self.give_slot(state, &slot, until);
                }
            }
        }
    }

    /// Gives the space's own pages at a slot to spaces opened later.
    fn give_slot(&self, state: &State, slot: &ReplacedMapping, since: u64) {
        for mapped in state.ranges[slot.range].mapped().into_iter().filter(|at| slot.holds(at.offset)) {
            if self.common.pool().owner(mapped.page) == Some(self.own()) {
                self.common.shared.give(mapped.page, self.own(), Fence::default(), since);
            }
        }
    }

    /// Returns a fence after replays which may read passed blocks; empty if no page of a passed
    /// block changes.
    fn replays_of_passed(&self, state: &State) -> Fence {
        let any = state.replaced.slots.iter().any(|slot| slot.passed && !state.is_covered(slot));
        if any { self.common.order.fence() } else { Fence::default() }
    }

    /// Returns whether no other graph can read the space's blocks.
    pub(super) fn is_alone(&self, state: &State) -> bool {
        state.replaced.alone_since == Some(self.common.pool().captures())
    }

    /// Returns a fence after all users of freed blocks.
    pub(super) fn readers_of_freed(&self, state: &State) -> Fence {
        let mut fence = state.users.of_freed();
        fence.join(state.replaced.captured_work.clone());
        fence.join(self.common.pause_state.unfinished_contents(self.common.pool().events()));
        fence
    }

    /// Maps a page at a slot; `None` selects the page of the slot's number. Returns the page.
    fn restore(&self, state: &mut State, slot: &ReplacedMapping, page: Option<PageId>) -> Result<PageId> {
        let (pool, range) = (self.common.pool(), &state.ranges[slot.range]);
        let known = range.id();
        let here = range.mapped().into_iter().filter(|at| slot.holds(at.offset));
        let here: Vec<Stale> = here.map(|at| (slot.range, at.offset, at.bytes, at.page)).collect();
        let pages = here.iter().map(|(.., page)| *page);
        let exported: Vec<u64> = pages.filter(|page| pool.is_exported(*page)).map(PageId::number).collect();
        if !exported.is_empty() {
            return Err(Error::Exported { pages: exported });
        }
        let mut transaction = Transaction::on(pool);
        let done = (|| {
            let page = match page {
                Some(page) if transaction.pin_owned(page, self.common.shared.owner()).is_some() => page,
                Some(_) => return Err(Error::Internal { what: "a page of passed blocks is gone".into() }),
                None => self.page_before(state, &mut transaction, slot)?,
            };
            transaction.unmap(known, slot.offset, slot.bytes)?;
            transaction.map(known, slot.offset, &[page])?;
            Ok(page)
        })();
        if done.is_ok() {
            let (calls, reserved) = transaction.commit();
            state.adopt(&self.common, calls, reserved);
            state.holes.retain(|(range, offset, ..)| *range != slot.range || !slot.holds(*offset));
        } else if !transaction.undo() {
            self.note_holes(state, here);
        }
        done
    }

    /// Returns the page before the seal, which other slots of the number may map. If the page is
    /// gone, returns a page not mapped by the space.
    fn page_before(
        &self,
        state: &State,
        transaction: &mut Transaction,
        slot: &ReplacedMapping,
    ) -> Result<PageId> {
        let shared = &self.common.shared;
        if !shared.is_for(slot.page, self.id) || transaction.pin_owned(slot.page, shared.owner()).is_none() {
            return shared.page_apart(transaction, slot.no, &state.shown(), self.id);
        }
        let leases = self.common.pool().leases([slot.page].iter());
        if leases.is_empty() { Ok(slot.page) } else { Err(Error::Lent { leases }) }
    }
}

/// Count of captures begun on a device, and of the part for one arena.
#[derive(Clone, Copy, Debug)]
struct Captures {
    ours: u64,
    all: u64,
}

impl Captures {
    /// Returns whether all captures begun until `later` belong to the arena.
    fn all_ours(self, later: Self) -> bool {
        later.all - self.all == later.ours.saturating_sub(self.ours)
    }
}

impl ReplacedMapping {
    fn holds(&self, offset: u64) -> bool {
        (self.offset..self.offset + self.bytes).contains(&offset)
    }
}

impl State {
    /// Records replaced mappings: range index and former mapping.
    pub(super) fn note_replaced(&mut self, replaced: &[(usize, Mapping)]) {
        let Some(layout) = self.placement.layout() else { return };
        let numbers: HashMap<(usize, u64), PageNo> =
            layout.page_slots().map(|(range, offset, no)| ((range, offset), no)).collect();
        let slot = |(range, mapped): &(usize, Mapping)| {
            let (Mapping { offset, bytes, page }, range) = (*mapped, *range);
            let no = numbers.get(&(range, offset))?;
            Some(ReplacedMapping { range, offset, bytes, no: *no, page, passed: false })
        };
        self.replaced.slots = replaced.iter().filter_map(slot).collect();
    }

    /// Returns whether a live block lies in the slot.
    fn is_covered(&self, slot: &ReplacedMapping) -> bool {
        self.placement.covered(slot.range, slot.offset, slot.offset + slot.bytes)
    }

    /// Marks the slots of a passed block, at these bytes of a range.
    pub(super) fn pass(&mut self, range: usize, from: u64, to: u64) {
        let there = |slot: &&mut ReplacedMapping| {
            slot.range == range && slot.offset < to && slot.offset + slot.bytes > from
        };
        self.replaced.slots.iter_mut().filter(there).for_each(|slot| slot.passed = true);
    }

    /// Returns whether a restore is still possible at a place.
    pub(super) fn may_be_restored(&self, range: usize, offset: u64) -> bool {
        self.replaced.slots.iter().any(|slot| slot.range == range && slot.holds(offset))
    }
}

impl Common {
    /// Returns how many captures began on the device, and how many for this arena.
    fn captures(&self) -> Captures {
        // Read first: a capture which begins between the two reads counts as foreign.
        let ours = self.own_captures.load(Ordering::SeqCst);
        Captures { ours, all: self.pool().captures() }
    }

    /// Retries restores which had to wait for readers. The caller holds no lock.
    pub(crate) fn restore_replaced(&self) {
        if !self.pending_restores.any() {
            return;
        }
        for id in self.pending_restores.take() {
            let space = self.spaces.lock().get(&id).and_then(Weak::upgrade);
            if let Some(space) = space {
                space.core.restore_replaced(&mut space.core.state.lock());
            }
        }
    }
}

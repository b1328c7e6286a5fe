//! Replaced mappings: slots changed by a seal, restorable until the first launch.
//!
//! If all launches are replays, only the program has written to the space's pages before the first
//! launch. So once all blocks of a slot are freed, the slot maps the page of its number again.
//! Otherwise the space would map small pages for good, which no other graph uses for large blocks.
//!
//! A block freed while graphs captured since the seal may read it is *passed*. Its slot may map a
//! page with passed blocks of earlier graphs (docs/design/capture.md, passed blocks). Without such
//! a page, the slot keeps its pages, which spaces opened later may use.
//!
//! [`Replaced`] is under the space's lock; [`PendingRestores`] has a lock of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::refresh::Stale;
use super::{Common, Core, Phase, State, spaces_from_now_on};
use crate::error::{Error, Result};
use crate::pages::{Fence, Mapping, NamedStream, PageId, PageNo, Transaction};
use crate::sync::Mutex;
use crate::units::Stream;

#[derive(Clone, Copy, Debug)]
struct ReplacedMapping {
    range: usize,
    offset: u64,
    bytes: u64,
    no: PageNo,
    page: PageId,
    /// Whether a block there is passed.
    passed: bool,
}

#[derive(Debug, Default)]
pub(super) struct Replaced {
    /// Restorable until the first launch; empty if launches are not observed.
    slots: Vec<ReplacedMapping>,
    /// Captures begun on the device at the seal, if all had ended. While unchanged, only this graph
    /// can read the blocks.
    alone_since: Option<u64>,
    captures_at_seal: Option<Captures>,
    /// Captured streams on which blocks are used without `record_stream`.
    captured_on: Vec<NamedStream>,
    /// Fence after the work of `captured_on` at each free with a pending restore.
    captured_work: Fence,
}

impl Replaced {
    pub(super) fn seal(&mut self, common: &Common) {
        self.alone_since = common.pool().captures_if_over();
        self.captures_at_seal = Some(common.captures());
    }

    pub(super) fn clear(&mut self) {
        self.slots = Vec::new();
    }
}

/// Numbers of spaces whose restores had to wait at the last poll.
#[derive(Debug, Default)]
pub(crate) struct PendingRestores {
    /// Read without the lock by every new space.
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

    pub(super) fn note_captured_work(&self, state: &mut State) {
        let Replaced { slots, captured_on, captured_work, .. } = &mut state.replaced;
        if !slots.is_empty() {
            let events = self.common.pool().events();
            captured_on.iter().for_each(|stream| captured_work.add_kept(events, *stream));
        }
    }

    /// Ends all pending restores at the first launch.
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

    /// Restores slots whose readers are done; a later poll retries the others.
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
        // Not while paused or pausing, nor while a resume copies to the page to be freed.
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

    /// Maps pages of earlier passed blocks; without any, gives the space's own pages to spaces
    /// opened later.
    fn share_passed(&self, state: &mut State) {
        let (all, others) = std::mem::take(&mut state.replaced.slots)
            .into_iter()
            .partition::<Vec<_>, _>(|slot| slot.passed && !state.is_covered(slot));
        state.replaced.slots = others;
        if all.is_empty() {
            return;
        }
        let until = spaces_from_now_on();
        // A graph captured outside the arena may read the addresses during the change.
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

    fn give_slot(&self, state: &State, slot: &ReplacedMapping, since: u64) {
        for mapped in state.ranges[slot.range].mapped().into_iter().filter(|at| slot.holds(at.offset)) {
            if self.common.pool().owner(mapped.page) == Some(self.own()) {
                self.common.shared.give(mapped.page, self.own(), Fence::default(), since);
            }
        }
    }

    /// Fence after replays which may read passed blocks; empty if none changes.
    fn replays_of_passed(&self, state: &State) -> Fence {
        let any = state.replaced.slots.iter().any(|slot| slot.passed && !state.is_covered(slot));
        if any { self.common.order.fence() } else { Fence::default() }
    }

    /// Whether no other graph can read the space's blocks.
    pub(super) fn is_alone(&self, state: &State) -> bool {
        state.replaced.alone_since == Some(self.common.pool().captures())
    }

    pub(super) fn readers_of_freed(&self, state: &State) -> Fence {
        let mut fence = state.users.of_freed();
        fence.join(state.replaced.captured_work.clone());
        fence.join(self.common.pause_state.unfinished_contents(self.common.pool().events()));
        fence
    }

    /// Maps a page at a slot and returns it; `None` selects the page of the slot's number.
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

    /// Returns the page before the seal; if gone, a page not mapped by the space.
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

/// Captures begun on a device, and for one arena.
#[derive(Clone, Copy, Debug)]
struct Captures {
    ours: u64,
    all: u64,
}

impl Captures {
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

    fn is_covered(&self, slot: &ReplacedMapping) -> bool {
        self.placement.covered(slot.range, slot.offset, slot.offset + slot.bytes)
    }

    pub(super) fn pass(&mut self, range: usize, from: u64, to: u64) {
        let there = |slot: &&mut ReplacedMapping| {
            slot.range == range && slot.offset < to && slot.offset + slot.bytes > from
        };
        self.replaced.slots.iter_mut().filter(there).for_each(|slot| slot.passed = true);
    }

    pub(super) fn may_be_restored(&self, range: usize, offset: u64) -> bool {
        self.replaced.slots.iter().any(|slot| slot.range == range && slot.holds(offset))
    }
}

impl Common {
    fn captures(&self) -> Captures {
        // Read first: a capture which begins in between counts as foreign.
        let ours = self.own_captures();
        Captures { ours, all: self.pool().captures() }
    }

    /// Retries restores. The caller holds no lock.
    pub(crate) fn restore_replaced(&self) {
        if !self.pending_restores.any() {
            return;
        }
        for id in self.pending_restores.take() {
            let space = self.registry.space(id);
            if let Some(space) = space {
                space.core.restore_replaced(&mut space.core.state.lock());
            }
        }
    }
}

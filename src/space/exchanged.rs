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
//! no space from this one on maps the page. In capture order, no other graph then writes to the
//! page between this graph and the last reader, as in torch's pools. Without such a page, the slot
//! keeps its pages, which spaces opened later may use.
//!
//! `State::exchanged` holds the replaced mappings of a space, under the space's lock.
//! [`ComingBack`] lists spaces whose restores wait for readers, under a lock of its own.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Weak;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::refresh::Stale;
use super::{Common, Core, Phase, State, spaces_from_now_on};
use crate::error::{Error, Result};
use crate::pages::{Change, Fence, Mapping, PageId, PageNo};
use crate::sync::Mutex;
use crate::units::Stream;

/// A slot with a page replaced by the seal.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchanged {
    pub(super) range: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Page number of the slot in the layout.
    pub(super) no: PageNo,
    /// The page before the seal.
    pub(super) page: PageId,
    /// Whether a block there was freed while graphs captured since the seal could read the block.
    pub(super) passed: bool,
}

/// Numbers of spaces with restores which had to wait at the last poll.
#[derive(Debug, Default)]
pub(crate) struct ComingBack {
    /// Read without the lock, because every new space reads the flag.
    any: AtomicBool,
    spaces: Mutex<BTreeSet<u64>>,
}

impl ComingBack {
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
        if !state.captured_on.contains(&named) {
            state.captured_on.push(named);
        }
    }

    /// Extends the fence of captured work, after the free of a block which may be restored.
    pub(super) fn note_captured_work(&self, state: &mut State) {
        if !state.exchanged.is_empty() {
            let events = self.common.pool().events();
            state.captured_on.iter().for_each(|stream| state.captured_work.add_kept(events, *stream));
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
            let pending = state.exchanged.iter().any(|tile| !state.is_covered(tile));
            pending.then(|| {
                let mut readers = self.who_had_what_went(&state);
                readers.join(self.replays_of_passed(&state));
                readers
            })
        };
        if let Some(mut readers) = readers {
            // A slot keeps its page if the wait fails.
            let _ = readers.block(self.common.pool().events(), Duration::MAX);
        }
        let state = &mut *self.state.lock();
        self.exchange_back(state);
        let behind = self.who_had_what_went(state);
        for tile in std::mem::take(&mut state.exchanged) {
            let range = &state.ranges[tile.range];
            for mapped in range.mapped().into_iter().filter(|mapped| tile.holds(mapped.offset)) {
                let end = mapped.offset + mapped.bytes;
                if !state.placement.covered(tile.range, mapped.offset, end)
                    && self.common.pool().holder(mapped.page) == Some(self.own())
                {
                    let since = if tile.passed { spaces_from_now_on() } else { 0 };
                    self.common.shared.give(mapped.page, self.own(), behind.clone(), since);
                }
            }
        }
        state.captured_work = Fence::default();
        self.launched.store(true, Ordering::Release);
    }

    /// Restores slots without live blocks if all readers of their blocks are done; otherwise a
    /// later poll tries again.
    pub(super) fn exchange_back(&self, state: &mut State) {
        if state.phase != Phase::Sealed || !state.exchanged.iter().any(|tile| !state.is_covered(tile)) {
            return;
        }
        let events = self.common.pool().events();
        let done = |fence: &mut Fence| fence.done(events).unwrap_or(false);
        let mut replays = self.replays_of_passed(state);
        if !(done(&mut state.readers) & done(&mut state.captured_work) & done(&mut replays)) {
            self.common.coming_back.add(self.id);
            return;
        }
        // Not while the arena is paused or pausing: pages stay in place. Not while a resume copies
        // contents: the target page must not be freed.
        let looked = self.common.presence.while_there(events, || {
            self.share_passed(state);
            for tile in state.exchanged.clone() {
                if state.is_covered(&tile) {
                    continue;
                }
                match self.restore(state, &tile, None) {
                    Ok(page) => {
                        state
                            .exchanged
                            .retain(|other| (other.range, other.offset) != (tile.range, tile.offset));
                        // The number has this page from now on.
                        let same = state.exchanged.iter_mut().filter(|other| other.page == tile.page);
                        same.for_each(|other| other.page = page);
                    }
                    Err(error) => tracing::debug!(%error, space = self.id, "a page does not come back"),
                }
            }
        });
        if looked.is_none() {
            self.common.coming_back.add(self.id);
        }
    }

    /// Maps pages of earlier passed blocks at the slots of passed blocks. Without such pages, gives
    /// the space's own pages to spaces opened later.
    fn share_passed(&self, state: &mut State) {
        let (all, others) = std::mem::take(&mut state.exchanged)
            .into_iter()
            .partition::<Vec<_>, _>(|tile| tile.passed && !state.is_covered(tile));
        state.exchanged = others;
        if all.is_empty() {
            return;
        }
        let until = spaces_from_now_on();
        // A graph captured outside the arena may replay before this one and read the addresses
        // during the change.
        let known = state.captures_at_seal.is_some_and(|at| at.all_ours(self.common.captures()));
        let mut by_size: BTreeMap<u64, Vec<Exchanged>> = BTreeMap::new();
        all.into_iter().for_each(|tile| by_size.entry(tile.bytes).or_default().push(tile));
        for (bytes, tiles) in by_size {
            let wanted = if known { tiles.len() } else { 0 };
            let mut pages =
                self.common.shared.take_passed((bytes, wanted), (self.id, self.own()), until).into_iter();
            for tile in tiles {
                let moved = pages.next().map(|page| self.restore(state, &tile, Some(page)));
                if !matches!(moved, Some(Ok(_))) {
                    self.give_tile(state, &tile, until);
                }
            }
        }
    }

    /// Gives the space's own pages at a slot to spaces opened later.
    fn give_tile(&self, state: &State, tile: &Exchanged, since: u64) {
        for mapped in state.ranges[tile.range].mapped().into_iter().filter(|at| tile.holds(at.offset)) {
            if self.common.pool().holder(mapped.page) == Some(self.own()) {
                self.common.shared.give(mapped.page, self.own(), Fence::default(), since);
            }
        }
    }

    /// Returns a fence after replays which may read passed blocks; empty if no page of a passed
    /// block changes.
    fn replays_of_passed(&self, state: &State) -> Fence {
        let any = state.exchanged.iter().any(|tile| tile.passed && !state.is_covered(tile));
        if any { self.common.order.fence() } else { Fence::default() }
    }

    /// Returns whether no other graph can read the space's blocks.
    pub(super) fn is_alone(&self, state: &State) -> bool {
        state.alone_since == Some(self.common.pool().captures())
    }

    /// Returns a fence after all users of freed blocks.
    pub(super) fn who_had_what_went(&self, state: &State) -> Fence {
        let mut fence = state.readers.clone();
        fence.join(state.captured_work.clone());
        fence.join(self.common.presence.contents(self.common.pool().events()));
        fence
    }

    /// Maps a page at a slot; `None` selects the page of the slot's number. Returns the page.
    fn restore(&self, state: &mut State, tile: &Exchanged, page: Option<PageId>) -> Result<PageId> {
        let (pool, range) = (self.common.pool(), &state.ranges[tile.range]);
        let known = range.id();
        let here = range.mapped().into_iter().filter(|at| tile.holds(at.offset));
        let here: Vec<Stale> = here.map(|at| (tile.range, at.offset, at.bytes, at.page)).collect();
        let pages = here.iter().map(|(.., page)| *page);
        let exported: Vec<u64> = pages.filter(|page| pool.is_exported(*page)).map(PageId::number).collect();
        if !exported.is_empty() {
            return Err(Error::Exported { pages: exported });
        }
        let mut change = Change::on(pool);
        let done = (|| {
            let page = match page {
                Some(page) if change.rely_on(page, self.common.shared.holder()).is_some() => page,
                Some(_) => return Err(Error::Internal { what: "a page of passed blocks is gone".into() }),
                None => self.page_before(state, &mut change, tile)?,
            };
            change.unmap(known, tile.offset, tile.bytes)?;
            change.map(known, tile.offset, &[page])?;
            Ok(page)
        })();
        if done.is_ok() {
            let (calls, reserved) = change.commit();
            state.adopt(&self.common, calls, reserved);
            state.holes.retain(|(range, offset, ..)| *range != tile.range || !tile.holds(*offset));
        } else if !change.undo() {
            self.note_holes(state, here);
        }
        done
    }

    /// Returns the page before the seal, which other slots of the number may map. If the page is
    /// gone, returns a page not mapped by the space.
    fn page_before(&self, state: &State, change: &mut Change, tile: &Exchanged) -> Result<PageId> {
        let shared = &self.common.shared;
        if !shared.is_for(tile.page, self.id) || change.rely_on(tile.page, shared.holder()).is_none() {
            return shared.page_apart(change, tile.no, &state.shown(), self.id);
        }
        let leases = self.common.pool().leases([tile.page].iter());
        if leases.is_empty() { Ok(tile.page) } else { Err(Error::Lent { leases }) }
    }
}

/// Count of captures begun on a device, and of the part for one arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Captures {
    ours: u64,
    all: u64,
}

impl Captures {
    /// Returns whether all captures begun until `later` belong to the arena.
    fn all_ours(self, later: Self) -> bool {
        later.all - self.all == later.ours.saturating_sub(self.ours)
    }
}

impl Exchanged {
    pub(super) fn holds(&self, offset: u64) -> bool {
        (self.offset..self.offset + self.bytes).contains(&offset)
    }
}

impl State {
    /// Records replaced mappings: range index and former mapping.
    pub(super) fn note_exchanged(&mut self, exchanged: &[(usize, Mapping)]) {
        let Some(layout) = self.placement.layout() else { return };
        let numbers: HashMap<(usize, u64), PageNo> =
            layout.tiles().map(|(range, offset, no)| ((range, offset), no)).collect();
        let tile = |(range, mapped): &(usize, Mapping)| {
            let (Mapping { offset, bytes, page }, range) = (*mapped, *range);
            let no = numbers.get(&(range, offset))?;
            Some(Exchanged { range, offset, bytes, no: *no, page, passed: false })
        };
        self.exchanged = exchanged.iter().filter_map(tile).collect();
    }

    /// Returns whether a live block lies in the slot.
    fn is_covered(&self, tile: &Exchanged) -> bool {
        self.placement.covered(tile.range, tile.offset, tile.offset + tile.bytes)
    }

    /// Marks the slots of a passed block, at these bytes of a range.
    pub(super) fn pass(&mut self, range: usize, from: u64, to: u64) {
        let there = |tile: &&mut Exchanged| {
            tile.range == range && tile.offset < to && tile.offset + tile.bytes > from
        };
        self.exchanged.iter_mut().filter(there).for_each(|tile| tile.passed = true);
    }

    /// Returns whether a restore is still possible at a place.
    pub(super) fn may_come_back(&self, range: usize, offset: u64) -> bool {
        self.exchanged.iter().any(|tile| tile.range == range && tile.holds(offset))
    }
}

impl Common {
    /// Returns how many captures began on the device, and how many for this arena.
    pub(super) fn captures(&self) -> Captures {
        // Read first: a capture which begins between the two reads counts as foreign.
        let ours = self.own_captures.load(Ordering::SeqCst);
        Captures { ours, all: self.pool().captures() }
    }

    /// Retries restores which had to wait for readers. The caller holds no lock.
    pub(crate) fn exchange_back(&self) {
        if !self.coming_back.any() {
            return;
        }
        for id in self.coming_back.take() {
            let space = self.spaces.lock().get(&id).and_then(Weak::upgrade);
            if let Some(space) = space {
                space.core.exchange_back(&mut space.core.state.lock());
            }
        }
    }
}

//! What a seal exchanged, until the first replay.
//!
//! A seal gives retained blocks pages of their own, so that what the program does with them from then on is theirs. Many do not stay: a library captures
//! a graph, looks at its outputs and drops them. Where all launches are replays, nothing has written there before the first one but who had the
//! blocks. So a place whose blocks all went by then gets the page of its number back, as if they had gone before the seal; else the space would
//! show small pages there for good, which no other graph uses for its large blocks.
//!
//! Where another capture began in between, its graph may read the block: a backward pass that is a graph of its own lets go of what the forward pass
//! saved while it is captured. Such a block is *passed*: from then on only graphs use it. Its place gets pages that passed blocks of earlier graphs lie
//! on, if no space shows them from this one on: in the order of capture, nobody else writes there between this graph and the last reader, as in
//! torch's pools. Without such pages the place keeps its own, which are for spaces opened later.

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

/// A tile under which a seal exchanged the page.
#[derive(Clone, Copy, Debug)]
pub(super) struct Exchanged {
    pub(super) range: usize,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    /// Its number in the layout.
    pub(super) no: PageNo,
    /// The page that was there.
    pub(super) page: PageId,
    /// A block there was freed when graphs captured since the seal could read it.
    pub(super) passed: bool,
}

/// Spaces, by number, in which something may come back that somebody still read at the last look.
#[derive(Debug, Default)]
pub(crate) struct ComingBack {
    /// Asked without the lock, since every new space asks.
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
    /// See [`VmmTorchAllocator::launch_by_replay_only`](crate::VmmTorchAllocator::launch_by_replay_only).
    pub(crate) fn launch_by_replay_only(&self, only: bool) {
        if only {
            self.recycles.store(true, Ordering::Relaxed);
            // What is sealed has noted nothing that could come back.
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

    /// A block went whose place may come back.
    pub(super) fn note_captured_work(&self, state: &mut State) {
        if !state.exchanged.is_empty() {
            let events = self.common.pool().events();
            state.captured_on.iter().for_each(|stream| state.captured_work.add_kept(events, *stream));
        }
    }

    /// The space is about to be launched for the first time: what has not come back by now does not.
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
            // What cannot be waited for keeps its page.
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

    /// Gives tiles whose blocks are all gone the pages of their numbers back, if nobody reads those blocks any more; else the next look does.
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
        // Where the arena is paused or about to be, its pages stay where they are; and no page goes to which a resume still copies what was there.
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
                        // The number is that page now.
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

    /// Moves passed blocks to pages of earlier passed ones. Where there are none, the space's own pages
    /// are given away for spaces opened later.
    fn share_passed(&self, state: &mut State) {
        let (all, others) = std::mem::take(&mut state.exchanged)
            .into_iter()
            .partition::<Vec<_>, _>(|tile| tile.passed && !state.is_covered(tile));
        state.exchanged = others;
        if all.is_empty() {
            return;
        }
        let until = spaces_from_now_on();
        // A graph that is captured elsewhere and replayed before this one would read addresses that change.
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

    /// The space's own pages at a tile are for spaces opened later.
    fn give_tile(&self, state: &State, tile: &Exchanged, since: u64) {
        for mapped in state.ranges[tile.range].mapped().into_iter().filter(|at| tile.holds(at.offset)) {
            if self.common.pool().holder(mapped.page) == Some(self.own()) {
                self.common.shared.give(mapped.page, self.own(), Fence::default(), since);
            }
        }
    }

    /// Behind the replays of graphs that may read passed blocks, if there are any whose pages change.
    fn replays_of_passed(&self, state: &State) -> Fence {
        let any = state.exchanged.iter().any(|tile| tile.passed && !state.is_covered(tile));
        if any { self.common.order.fence() } else { Fence::default() }
    }

    /// Whether no graph but its own can read its blocks.
    pub(super) fn is_alone(&self, state: &State) -> bool {
        state.alone_since == Some(self.common.pool().captures())
    }

    /// Behind all who may still use blocks that went.
    pub(super) fn who_had_what_went(&self, state: &State) -> Fence {
        let mut fence = state.readers.clone();
        fence.join(state.captured_work.clone());
        fence.join(self.common.presence.contents(self.common.pool().events()));
        fence
    }

    /// Maps a page at a tile, `None`: that of the tile's number again; which it is.
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

    /// The page that was there, as other tiles of the same number may show it; where it went, one that the space does not show.
    fn page_before(&self, state: &State, change: &mut Change, tile: &Exchanged) -> Result<PageId> {
        let shared = &self.common.shared;
        if !shared.is_for(tile.page, self.id) || change.rely_on(tile.page, shared.holder()).is_none() {
            return shared.page_apart(change, tile.no, &state.shown(), self.id);
        }
        let leases = self.common.pool().leases([tile.page].iter());
        if leases.is_empty() { Ok(tile.page) } else { Err(Error::Lent { leases }) }
    }
}

/// How many captures of a device had begun, and how many of them for spaces of one arena.
#[derive(Clone, Copy, Debug)]
pub(super) struct Captures {
    ours: u64,
    all: u64,
}

impl Captures {
    /// Whether all that began until later were the arena's.
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
    /// Notes what a seal exchanged: the index of the range, and what was mapped there.
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

    /// Whether a live block is there.
    fn is_covered(&self, tile: &Exchanged) -> bool {
        self.placement.covered(tile.range, tile.offset, tile.offset + tile.bytes)
    }

    /// A block in these bytes of a range was passed.
    pub(super) fn pass(&mut self, range: usize, from: u64, to: u64) {
        let there = |tile: &&mut Exchanged| {
            tile.range == range && tile.offset < to && tile.offset + tile.bytes > from
        };
        self.exchanged.iter_mut().filter(there).for_each(|tile| tile.passed = true);
    }

    /// Whether the page of a place may still be exchanged back.
    pub(super) fn may_come_back(&self, range: usize, offset: u64) -> bool {
        self.exchanged.iter().any(|tile| tile.range == range && tile.holds(offset))
    }
}

impl Common {
    /// How many captures of the device began, and how many of them are this arena's.
    pub(super) fn captures(&self) -> Captures {
        // In this order: one that begins in between is taken for another's.
        let ours = self.own_captures.load(Ordering::SeqCst);
        Captures { ours, all: self.pool().captures() }
    }

    /// Looks again at places whose blocks went while somebody could still read them. The caller holds no lock.
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

//! Absent pages: they keep their key, holder, account and every address they show at, and have no memory. So whoever placed them need
//! not know.
//!
//! ```text
//!   there ── step aside ──> half ──> absent ── come back (the memory of a page that was taken for it) ──> half ──> there
//!                            '── the driver refused: it stays so far, and the next step aside or come back goes on from here
//! ```
//!
//! They count for nothing: no bytes, no budget, no mapping of the driver's. What is torn down at an address of an absent page makes no
//! driver call; one that shows nowhere any more is forgotten.
//!
//! Whoever moves pages *holds* the ranges they show in: nothing there is torn down meanwhile, not even behind a fence that is done. It
//! waits on the pool's list until the hold ends.

use super::pool::State;
use super::{Holder, PageId, PagePool, RangeId};
use crate::driver::Whole;
use crate::error::{Error, Result};
use crate::sync::yield_now;
use crate::units::Address;

/// A page of an arena that steps aside with it, as it stands.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) page: PageId,
    pub(crate) bytes: u64,
    pub(crate) holder: Holder,
    /// Its memory is there.
    pub(crate) present: bool,
    /// It shows somewhere without memory behind.
    pub(crate) away: bool,
    /// Where it shows with memory, if it does anywhere: where its holder has it, since there it stays, or else first.
    pub(crate) at: (RangeId, u64),
}

/// Keeps an arena's ranges from being torn down as long as it lives.
#[derive(Debug)]
pub(crate) struct Hold<'a> {
    pool: &'a PagePool,
    ranges: Vec<RangeId>,
}

impl Drop for Hold<'_> {
    fn drop(&mut self) {
        {
            let mut state = self.pool.lock();
            for range in &self.ranges {
                if let Some(found) = state.ranges.get_mut(*range) {
                    found.held = false;
                }
            }
        }
        // What came meanwhile.
        self.pool.finish_done();
    }
}

impl State {
    /// Whether a page is away at an address where it shows.
    pub(super) fn is_away(&self, page: PageId, range: RangeId, at: u64) -> bool {
        self.pages.get(page).is_some_and(|page| !page.away.is_empty() && page.away.contains(&(range, at)))
    }
}

impl PagePool {
    /// Holds every range in which pages show that step aside with an arena. No change is under way there, and nobody else holds them.
    pub(crate) fn hold(&self, arena: u64) -> Hold<'_> {
        loop {
            {
                let state = &mut *self.lock();
                let pages = state.pages.values().filter(|page| page.holder.movable_arena() == Some(arena));
                let mut ranges: Vec<RangeId> =
                    pages.flat_map(|page| &page.mappings).map(|(range, _)| *range).collect();
                ranges.sort_unstable();
                ranges.dedup();
                if !ranges.iter().any(|range| state.is_leaving(*range)) {
                    for range in &ranges {
                        if let Some(found) = state.ranges.get_mut(*range) {
                            found.held = true;
                        }
                    }
                    return Hold { pool: self, ranges };
                }
            }
            // A teardown is a few driver calls long.
            yield_now();
        }
    }

    /// The pages that step aside with an arena, by where they show.
    pub(crate) fn standing(&self, arena: u64) -> Vec<Standing> {
        let state = self.lock();
        let ours = state.pages.iter().filter(|(_, page)| page.holder.movable_arena() == Some(arena));
        let mut found: Vec<Standing> = ours
            .filter_map(|(id, page)| {
                let tag = if let Holder::Retained { space, .. } = page.holder { Some(space) } else { None };
                let of_holder =
                    |(range, _): &&(RangeId, u64)| state.ranges.get(*range).map(|range| range.tag) == tag;
                let (mut there, mut all) = (page.mappings.difference(&page.away), page.mappings.iter());
                let there = there.clone().find(of_holder).or(there.next());
                let first = there.or_else(|| all.clone().find(of_holder)).or(all.next());
                Some(Standing {
                    page: id,
                    bytes: page.bytes,
                    holder: page.holder,
                    present: page.handle.is_some(),
                    away: !page.away.is_empty(),
                    at: *first?,
                })
            })
            .collect();
        found.sort_unstable_by_key(|standing| standing.at);
        found
    }

    /// The addresses at which pages show that step aside with an arena, in order; neighbours are one.
    pub(crate) fn addresses(&self, arena: u64) -> Vec<(Address, u64)> {
        let state = self.lock();
        let ours = state.pages.values().filter(|page| page.holder.movable_arena() == Some(arena));
        let places = ours.flat_map(|page| page.mappings.iter().map(|at| (*at, page.bytes)));
        let mut all: Vec<(Address, u64)> = places
            .filter_map(|((range, at), bytes)| Some((state.ranges.get(range)?.base.plus(at), bytes)))
            .collect();
        all.sort_unstable();
        all.dedup_by(|next, last| {
            let joins = last.0.plus(last.1) == next.0;
            if joins {
                last.1 += next.1;
            }
            joins
        });
        all
    }

    /// Unmaps a page wherever it shows and gives its memory to the driver: the calls made, and whether the driver took it; what it
    /// refuses to take is kept for another try. Whoever asks [holds](Self::hold) its ranges and has waited for the device.
    ///
    /// # Errors
    /// [`Error::Exported`] if others have it; what the driver says of unmapping. What is unmapped then stays so; its memory and contents stay
    /// too.
    pub(crate) fn step_aside(&self, id: PageId) -> Result<(u64, bool)> {
        let mut calls = 0;
        loop {
            let (range, at, address, bytes) = {
                let state = self.lock();
                let Some(page) = state.pages.get(id) else { return Ok((calls, true)) };
                if page.pins > 0 {
                    return Err(Error::Internal {
                        what: "a page that a change relies on steps aside".into(),
                    });
                }
                state.require_unexported(id)?;
                let Some((range, at)) = page.mappings.difference(&page.away).next().copied() else { break };
                let Some(found) = state.ranges.get(range) else { break };
                (range, at, found.base.plus(at), page.bytes)
            };
            // SAFETY: one whole mapping, which nobody else takes away, as its range is held; whoever asks has waited for the device.
            unsafe { self.driver().unmap(address, bytes) }?;
            calls += 1;
            let state = &mut *self.lock();
            if let Some(page) = state.pages.get_mut(id) {
                page.away.insert((range, at));
                let holder = page.holder;
                state.count(holder, 0, 0, -1);
            }
            state.stats.unmaps += 1;
            state.stats.mappings -= 1;
        }
        let (handle, bytes) = {
            let state = &mut *self.lock();
            // It may have been exported meanwhile; then it keeps its memory.
            state.require_unexported(id)?;
            let Some(page) = state.pages.get_mut(id) else { return Ok((calls, true)) };
            let Some(handle) = page.handle.take() else { return Ok((calls, true)) };
            let (bytes, holder, account) = (page.bytes, page.holder, page.account);
            state.count(holder, -1, -(bytes as i64), 0);
            if let Some(account) = account {
                // It stays in its account and counts for nothing there.
                state.accounts.change(account, -(bytes as i64), 0);
            }
            state.stats.physical_bytes -= bytes;
            state.absent = (state.absent.0 + 1, state.absent.1 + bytes);
            state.releasing = (state.releasing.0 + 1, state.releasing.1 + bytes);
            (handle, bytes)
        };
        Ok((calls + 1, self.release_handle(handle, bytes)))
    }

    /// Gives an absent page the memory of another, which is off the books then, and maps it wherever it is away; and how many mappings
    /// were made, and their bytes. For [`Change::come_back`](super::Change::come_back).
    pub(super) fn come_back(&self, id: PageId, memory: Option<PageId>) -> (Result<()>, (u64, u64)) {
        if let Some(memory) = memory {
            self.lock().adopt(id, memory);
        }
        let mut made = (0, 0);
        loop {
            let (range, at, address, whole, peers) = {
                let state = self.lock();
                let Some(page) = state.pages.get(id) else { return (Ok(()), made) };
                let Some((range, at)) = page.away.first().copied() else { return (Ok(()), made) };
                let (Some(handle), Some(found)) = (page.handle, state.ranges.get(range)) else {
                    return (Err(Error::Internal { what: "a page without memory comes back".into() }), made);
                };
                let whole = Whole { page: handle, bytes: page.bytes };
                (range, at, found.base.plus(at), whole, found.peers.and(state.peers))
            };
            // SAFETY: the place is this page's and nothing is mapped there; its range is held, so that nobody takes it away.
            let mapped = unsafe { self.driver().map(address, &[whole], peers) };
            let is_there = mapped.as_ref().map_or_else(|not| not.mapped > 0, |()| true);
            let late = {
                let state = &mut *self.lock();
                if is_there {
                    if let Some(page) = state.pages.get_mut(id) {
                        page.away.remove(&(range, at));
                        let holder = page.holder;
                        state.count(holder, 0, 0, 1);
                    }
                    state.stats.maps += 1;
                    state.stats.mappings += 1;
                    made = (made.0 + 1, made.1 + whole.bytes);
                }
                state.peers.without(peers)
            };
            let mut result = mapped.map_err(|not| not.error);
            if result.is_ok() && !late.is_empty() {
                // SAFETY: mapped just now.
                result = unsafe { self.driver().grant(address, whole.bytes, late) };
            }
            if result.is_err() {
                return (result, made);
            }
        }
    }
}

impl State {
    /// Moves the memory of one page to an absent one of the same size, and takes the first off the books.
    fn adopt(&mut self, id: PageId, memory: PageId) {
        let fits = |page: &super::pool::Page, bytes: u64| page.handle.is_none() && page.bytes == bytes;
        let bytes = self.pages.get(memory).map_or(0, |page| page.bytes);
        if !self.pages.get(id).is_some_and(|page| fits(page, bytes)) {
            // It was forgotten meanwhile; what was taken is free at the commit.
            return;
        }
        let Some(given) = self.pages.remove(memory) else { return };
        self.end(&given);
        let Some(page) = self.pages.get_mut(id) else { return };
        page.handle = given.handle;
        let (holder, account) = (page.holder, page.account);
        self.count(holder, 1, bytes as i64, 0);
        if let Some(account) = account {
            self.accounts.change(account, bytes as i64, 0);
        }
        self.absent = (self.absent.0 - 1, self.absent.1 - bytes);
    }
}

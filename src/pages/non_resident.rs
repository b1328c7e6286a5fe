//! Non-resident pages: pages of a paused arena. They keep key, owner, account and addresses without
//! memory, so spaces, seals and the shared set need not know about pauses.
//!
//! ```text
//!  resident ─ pause ─> partial ─> non-resident ─ resume, new memory ─> partial ─> resident
//!                         └─ the driver refused a call: the next pause or resume continues here
//! ```
//!
//! A non-resident page counts zero bytes, and its teardown makes no driver call. Without mappings
//! it is removed. While pages are paused or resumed, the thread *holds* their ranges: teardowns
//! stay pending.

use super::pool::State;
use super::{Owner, PageId, PagePool, RangeId};
use crate::driver::Whole;
use crate::error::{Error, Result};
use crate::sync::yield_now;
use crate::units::Address;

#[derive(Clone, Debug)]
pub(crate) struct ArenaPage {
    pub(crate) page: PageId,
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
    pub(crate) present: bool,
    /// Some mappings do not exist in the driver.
    pub(crate) unmapped: bool,
    /// A mapping with memory, if any: preferably the owner's, which stays.
    pub(crate) at: (RangeId, u64),
}

/// Keeps an arena's ranges from teardown.
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
        self.pool.reap();
    }
}

impl State {
    /// Whether the mapping at this address does not exist in the driver.
    pub(super) fn is_unmapped(&self, page: PageId, range: RangeId, at: u64) -> bool {
        self.pages
            .get(page)
            .is_some_and(|page| !page.unmapped.is_empty() && page.unmapped.contains(&(range, at)))
    }
}

impl PagePool {
    /// Holds all ranges with pages that this arena's pause releases. No transaction may run on
    /// them, and no second hold may exist.
    pub(crate) fn hold(&self, arena: u64) -> Hold<'_> {
        loop {
            {
                let state = &mut *self.lock();
                let pages = state.pages.values().filter(|page| page.owner.movable_arena() == Some(arena));
                let mut ranges: Vec<RangeId> =
                    pages.flat_map(|page| &page.mappings).map(|(range, _)| *range).collect();
                ranges.sort_unstable();
                ranges.dedup();
                if !ranges.iter().any(|range| state.is_in_teardown(*range)) {
                    for range in &ranges {
                        if let Some(found) = state.ranges.get_mut(*range) {
                            found.held = true;
                        }
                    }
                    return Hold { pool: self, ranges };
                }
            }
            // A teardown takes a few driver calls.
            yield_now();
        }
    }

    /// Pages that the pause releases, by address.
    pub(crate) fn arena_pages(&self, arena: u64) -> Vec<ArenaPage> {
        let state = self.lock();
        let ours = state.pages.iter().filter(|(_, page)| page.owner.movable_arena() == Some(arena));
        let mut found: Vec<ArenaPage> = ours
            .filter_map(|(id, page)| {
                let tag = if let Owner::Retained { space, .. } = page.owner { Some(space) } else { None };
                let of_owner =
                    |(range, _): &&(RangeId, u64)| state.ranges.get(*range).map(|range| range.tag) == tag;
                let (mut there, mut all) = (page.mappings.difference(&page.unmapped), page.mappings.iter());
                let there = there.clone().find(of_owner).or(there.next());
                let first = there.or_else(|| all.clone().find(of_owner)).or(all.next());
                Some(ArenaPage {
                    page: id,
                    bytes: page.bytes,
                    owner: page.owner,
                    present: page.handle.is_some(),
                    unmapped: !page.unmapped.is_empty(),
                    at: *first?,
                })
            })
            .collect();
        found.sort_unstable_by_key(|page| page.at);
        found
    }

    /// Addresses of these pages in order, adjacent ranges merged.
    pub(crate) fn addresses(&self, arena: u64) -> Vec<(Address, u64)> {
        let state = self.lock();
        let ours = state.pages.values().filter(|page| page.owner.movable_arena() == Some(arena));
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

    /// Unmaps a page and releases its memory. Returns the number of driver calls, and false if the
    /// driver refused the release (retried later). The caller [holds](Self::hold) its ranges and
    /// has waited for the device. After an error, completed unmaps stay, and the page keeps memory
    /// and contents.
    pub(crate) fn make_non_resident(&self, id: PageId) -> Result<(u64, bool)> {
        let mut calls = 0;
        loop {
            let (range, at, address, bytes) = {
                let state = self.lock();
                let Some(page) = state.pages.get(id) else { return Ok((calls, true)) };
                if page.pins > 0 {
                    return Err(Error::Internal {
                        what: "a page pinned by a transaction becomes non-resident".into(),
                    });
                }
                state.require_unexported(id)?;
                let Some((range, at)) = page.mappings.difference(&page.unmapped).next().copied() else {
                    break;
                };
                let Some(found) = state.ranges.get(range) else { break };
                (range, at, found.base.plus(at), page.bytes)
            };
            // SAFETY: one whole mapping of a held range; the caller has waited for the device.
            unsafe { self.driver().unmap(address, bytes) }?;
            calls += 1;
            let state = &mut *self.lock();
            if let Some(page) = state.pages.get_mut(id) {
                page.unmapped.insert((range, at));
                let owner = page.owner;
                state.count_mapping(owner, -1, false);
            }
        }
        let (handle, bytes) = {
            let state = &mut *self.lock();
            // An export since the first check keeps the memory.
            state.require_unexported(id)?;
            let Some(page) = state.pages.get_mut(id) else { return Ok((calls, true)) };
            let Some(handle) = page.handle.take() else { return Ok((calls, true)) };
            let (bytes, owner, account) = (page.bytes, page.owner, page.account);
            state.count_memory((owner, account), -1, bytes);
            state.running.begin_release(bytes);
            (handle, bytes)
        };
        Ok((calls + 1, self.release_handle(handle, bytes)))
    }

    /// See [`Transaction::make_resident`](super::Transaction::make_resident). Returns the number of
    /// mappings and their bytes.
    pub(super) fn make_resident(&self, id: PageId, memory: Option<PageId>) -> (Result<()>, (u64, u64)) {
        if let Some(memory) = memory {
            self.lock().adopt(id, memory);
        }
        let mut made = (0, 0);
        loop {
            let (range, at, address, whole, peers) = {
                let state = self.lock();
                let Some(page) = state.pages.get(id) else { return (Ok(()), made) };
                let Some((range, at)) = page.unmapped.first().copied() else { return (Ok(()), made) };
                let (Some(handle), Some(found)) = (page.handle, state.ranges.get(range)) else {
                    return (
                        Err(Error::Internal { what: "a page without memory becomes resident".into() }),
                        made,
                    );
                };
                let whole = Whole { page: handle, bytes: page.bytes };
                (range, at, found.base.plus(at), whole, found.peers.and(state.peers))
            };
            // SAFETY: the page's own addresses, unmapped in the driver, in a held range.
            let mapped = unsafe { self.driver().map(address, &[whole], peers) };
            let is_there = mapped.as_ref().map_or_else(|not| not.mapped > 0, |()| true);
            let late = {
                let state = &mut *self.lock();
                if is_there {
                    if let Some(page) = state.pages.get_mut(id) {
                        page.unmapped.remove(&(range, at));
                        let owner = page.owner;
                        state.count_mapping(owner, 1, false);
                    }
                    made = (made.0 + 1, made.1 + whole.bytes);
                }
                state.peers.without(peers)
            };
            let mut result = mapped.map_err(|not| not.error);
            if result.is_ok() && !late.is_empty() {
                // SAFETY: mapped above.
                result = unsafe { self.driver().grant(address, whole.bytes, late) };
            }
            if result.is_err() {
                return (result, made);
            }
        }
    }
}

impl State {
    fn adopt(&mut self, id: PageId, memory: PageId) {
        let fits = |page: &super::page::Page, bytes: u64| page.handle.is_none() && page.bytes == bytes;
        let bytes = self.pages.get(memory).map_or(0, |page| page.bytes);
        if !self.pages.get(id).is_some_and(|page| fits(page, bytes)) {
            // The page was removed since. The taken memory becomes free at the commit.
            return;
        }
        let Some(given) = self.remove(memory) else { return };
        let Some(page) = self.pages.get_mut(id) else { return };
        page.handle = given.handle;
        let (owner, account) = (page.owner, page.account);
        self.count_memory((owner, account), 1, bytes);
    }
}

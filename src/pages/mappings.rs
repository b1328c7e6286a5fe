//! Ranges of addresses and their mappings, each recorded in the range and in the page under the
//! mutex of [`PagePool`]. A range has one user, whose lock serializes map and unmap calls on it.

use std::collections::BTreeMap;

use super::{Owner, PageId, PagePool, RangeId};
use crate::driver::Whole;
use crate::error::{Error, Result};
use crate::units::{Address, Peers, Stream};

#[derive(Debug)]
pub(super) struct Range {
    pub(super) base: Address,
    pub(super) len: u64,
    /// The user's own number, for example its space.
    pub(super) tag: u64,
    pub(super) peers: Peers,
    pub(super) mapped: BTreeMap<u64, (PageId, u64)>,
    /// Set while its pages are paused or resumed: no part is torn down.
    pub(super) held: bool,
}

/// A page mapped in a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mapping {
    /// Bytes from the base of the range.
    pub offset: u64,
    /// The page.
    pub page: PageId,
    /// Bytes of the page.
    pub bytes: u64,
}

fn gone(what: &'static str) -> Error {
    Error::Internal { what: format!("{what} is gone") }
}

impl PagePool {
    pub(super) fn reserve(&self, len: u64, tag: u64, peers: Peers) -> Result<(RangeId, Address)> {
        let base = self.driver().reserve(len)?;
        let range = Range { base, len, tag, peers, mapped: BTreeMap::new(), held: false };
        Ok((self.lock().enter_range(range), base))
    }

    /// Maps pages. Also returns the bytes mapped from `offset` on, non-zero also after a failure.
    pub(super) fn map(&self, range: RangeId, offset: u64, pages: &[PageId]) -> (Result<()>, u64) {
        let (at, wholes, peers) = match self.place(range, offset, pages) {
            Ok(found) => found,
            Err(error) => return (Err(error), 0),
        };
        // SAFETY: reserved, unmapped, used under the user's lock; the pages are pinned.
        let (mut result, mapped) = match unsafe { self.driver().map(at, &wholes, peers) } {
            Ok(()) => (Ok(()), pages.len()),
            Err(not) => (Err(not.error), not.mapped),
        };
        let mut guard = self.lock();
        let state = &mut *guard;
        let mut end = offset;
        for (id, whole) in pages.iter().zip(&wholes).take(mapped) {
            if let (Some(found), Some(page)) = (state.ranges.get_mut(range), state.pages.get_mut(*id)) {
                found.mapped.insert(end, (*id, whole.bytes));
                page.mappings.insert((range, end));
                let (owner, lent) = (page.owner, state.lent.is_at(*id, (range, end)));
                state.count_mapping(owner, 1, lent);
            }
            end += whole.bytes;
        }
        let late = state.peers.without(peers);
        drop(guard);
        if result.is_ok() && !late.is_empty() {
            // SAFETY: mapped above.
            result = unsafe { self.driver().grant(at, end - offset, late) };
        }
        (result, end - offset)
    }

    pub(crate) fn peers(&self) -> Peers {
        self.lock().peers
    }

    /// Grants other devices access to all current and future mappings.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] without peer access: nothing changed. Driver errors for current
    /// mappings: future mappings still grant access.
    pub(crate) fn admit(&self, peers: Peers) -> Result<()> {
        let driver = self.driver();
        driver.capabilities().require_peers(peers)?;
        let there: Vec<_> = {
            let mut state = self.lock();
            state.peers = state.peers.and(peers);
            let ranges = state.ranges.iter();
            let of_range = |(id, range): (RangeId, &Range)| {
                let base = range.base;
                let there = range.mapped.iter().filter(|(at, (page, _))| !state.is_unmapped(*page, id, **at));
                let each = there.map(move |(at, (page, bytes))| (id, base, *at, *page, *bytes));
                each.collect::<Vec<_>>()
            };
            ranges.flat_map(of_range).collect()
        };
        let mut result = Ok(());
        for (range, base, offset, page, bytes) in there {
            // SAFETY: was one whole mapping; if unmapped since, the driver returns an error.
            let granted = unsafe { driver.grant(base.plus(offset), bytes, peers) };
            let there = || self.shows(range, offset, page) && !self.lock().is_unmapped(page, range, offset);
            if granted.is_err() && there() {
                result = result.and(granted);
            }
        }
        result
    }

    /// Fails unless the addresses are unmapped.
    fn place(&self, range: RangeId, offset: u64, pages: &[PageId]) -> Result<(Address, Vec<Whole>, Peers)> {
        let state = self.lock();
        let found = state.ranges.get(range).ok_or(gone("a range"))?;
        let mut wholes = Vec::with_capacity(pages.len());
        let mut end = offset;
        for id in pages {
            let page = state.pages.get(*id).ok_or(gone("a page"))?;
            wholes.push(Whole { page: page.handle.ok_or(gone("a page's memory"))?, bytes: page.bytes });
            end += page.bytes;
        }
        let before = found.mapped.range(..end).next_back();
        if end > found.len || before.is_some_and(|(at, (_, bytes))| at + bytes > offset) {
            return Err(Error::Internal { what: format!("something is mapped at {offset:#x}") });
        }
        Ok((found.base.plus(offset), wholes, found.peers.and(state.peers)))
    }

    /// Unmaps every mapping that begins in a part of a range, one contiguous run per driver call.
    /// Pages without mappings and pins become free. After an error, earlier runs stay unmapped.
    pub(super) fn unmap(&self, range: RangeId, offset: u64, len: u64) -> Result<()> {
        loop {
            let (at, from, to, unmapped) = {
                let state = self.lock();
                let Some(found) = state.ranges.get(range) else { return Ok(()) };
                let mut run: Option<(u64, u64, bool)> = None;
                let each = self.driver().capabilities().unmap_each;
                for (at, (page, bytes)) in found.mapped.range(offset..offset.saturating_add(len)) {
                    let unmapped = state.is_unmapped(*page, range, *at);
                    match &mut run {
                        None => run = Some((*at, at + bytes, unmapped)),
                        Some((_, end, same)) if !each && *end == *at && *same == unmapped => *end += bytes,
                        Some(_) => break,
                    }
                }
                let Some((from, to, unmapped)) = run else { return Ok(()) };
                (found.base.plus(from), from, to, unmapped)
            };
            if !unmapped {
                // SAFETY: whole mappings without a gap; the caller has waited for the device.
                unsafe { self.driver().unmap(at, to - from) }?;
            }
            let state = &mut *self.lock();
            while let Some(found) = state.ranges.get_mut(range)
                && let Some((at, (id, _))) =
                    found.mapped.range(from..to).next().map(|(at, entry)| (*at, *entry))
            {
                found.mapped.remove(&at);
                let lent = self.unmapped_from(state, id, (range, at));
                if let Some(page) = state.pages.get_mut(id) {
                    page.mappings.remove(&(range, at));
                    let counted = !page.unmapped.remove(&(range, at));
                    let owner = page.owner;
                    state.count_mapping(owner, -i64::from(counted), lent);
                    state.free_if_unused(id);
                }
            }
        }
    }

    pub(super) fn mapped(&self, range: RangeId) -> Vec<Mapping> {
        self.mapped_in(range, 0, u64::MAX)
    }

    pub(crate) fn mapped_in(&self, range: RangeId, offset: u64, len: u64) -> Vec<Mapping> {
        let state = self.lock();
        let part = offset..offset.saturating_add(len);
        let entries = state.ranges.get(range).into_iter().flat_map(|range| range.mapped.range(part.clone()));
        entries
            .map(|(offset, (page, bytes))| Mapping { offset: *offset, page: *page, bytes: *bytes })
            .collect()
    }

    pub(super) fn mapped_under(&self, range: RangeId, offset: u64, len: u64) -> Vec<Mapping> {
        let first = {
            let state = self.lock();
            let before = state.ranges.get(range).and_then(|range| range.mapped.range(..=offset).next_back());
            before.map_or(offset, |(at, (_, bytes))| if at + bytes > offset { *at } else { offset })
        };
        self.mapped_in(range, first, offset.saturating_add(len) - first)
    }

    pub(super) fn shows(&self, range: RangeId, offset: u64, page: PageId) -> bool {
        let state = self.lock();
        let found = state.ranges.get(range).and_then(|range| range.mapped.get(&offset));
        found.is_some_and(|(there, _)| *there == page)
    }

    /// Returns false if its peers differ or its pages are being moved.
    pub(crate) fn hand_range(&self, range: RangeId, peers: Peers, tag: u64) -> bool {
        let mut state = self.lock();
        let found = state.ranges.get_mut(range).filter(|range| range.peers == peers && !range.held);
        found.map(|range| range.tag = tag).is_some()
    }

    /// Whether a page has this owner and size, is resident, without pin, lease or export pin, and
    /// mapped only in ranges with a tag below `tag`.
    pub(super) fn is_unseen(&self, page: PageId, (owner, bytes): (Owner, u64), tag: u64) -> bool {
        let state = self.lock();
        let Some(found) = state.pages.get(page) else { return false };
        (found.owner, found.bytes, found.pins, found.exported) == (owner, bytes, 0, 0)
            && found.handle.is_some()
            && state.lent.get(&page).is_none()
            && found
                .mappings
                .iter()
                .all(|(range, _)| state.ranges.get(*range).is_some_and(|range| range.tag < tag))
    }

    pub(super) fn gap(&self, range: RangeId, from: u64, to: u64) -> Option<(u64, u64)> {
        let state = self.lock();
        let found = state.ranges.get(range)?;
        let before = found.mapped.range(..from).next_back().map_or(0, |(at, (_, bytes))| at + bytes);
        let mut start = before.max(from);
        for (at, (_, bytes)) in found.mapped.range(from..to) {
            if *at > start {
                return Some((start, *at));
            }
            start = at + bytes;
        }
        (start < to).then_some((start, to))
    }

    /// Fills mapped bytes with a repeated 32-bit value, in stream order. Fails if a byte is
    /// unmapped.
    pub(crate) fn fill(
        &self,
        range: RangeId,
        offset: u64,
        len: u64,
        value: u32,
        stream: Stream,
    ) -> Result<()> {
        let at = self.mapped_at(range, offset, len)?;
        // SAFETY: mapped, checked above; the caller is the range's only user.
        unsafe { self.driver().fill(at, len, value, stream) }
    }

    /// Fails if one of the next `len` bytes is unmapped or non-resident.
    pub(super) fn mapped_at(&self, range: RangeId, offset: u64, len: u64) -> Result<Address> {
        let gap = self.gap(range, offset, offset + len);
        let state = self.lock();
        let found = state.ranges.get(range).ok_or(gone("a range"))?;
        let first = found.mapped.range(..=offset).next_back().map_or(offset, |(at, _)| *at);
        let mut pages = found.mapped.range(first..offset + len);
        if gap.is_some() || pages.any(|(at, (page, _))| state.is_unmapped(*page, range, *at)) {
            return Err(gone("a mapping"));
        }
        Ok(found.base.plus(offset))
    }
}

//! Queries by page number: its slots and blocks, for code which changes the pages of numbers.

use std::collections::HashSet;

use super::{Layout, NotLive, PageSlot, Place};
use crate::pages::{Class, PageNo};

impl Layout {
    pub(crate) fn numbers(&self, class: Class) -> usize {
        match class {
            Class::Small => self.slabs.len(),
            Class::Large => self.pages.used(),
        }
    }

    /// Returns every slot: range, offset and page number.
    pub(crate) fn page_slots(&self) -> impl Iterator<Item = (usize, u64, PageNo)> {
        self.ranges.iter().enumerate().flat_map(move |(number, range)| {
            range.page_slots.iter().enumerate().map(move |(page_slot, index)| {
                let offset = self.offset(PageSlot { range: number, index: page_slot });
                (number, offset, PageNo { class: range.class, index: *index })
            })
        })
    }

    /// Returns whether a block lies on the page of a number.
    pub(crate) fn holds(&self, no: PageNo) -> bool {
        match no.class {
            Class::Small => self.slabs.live(no.index as usize) > 0,
            Class::Large => !self.pages.is_idle(no.index),
        }
    }

    /// Takes a large page without blocks out of use, until [`put_back`](Self::put_back). Returns
    /// whether the page is out of use.
    pub(crate) fn exclude_page(&mut self, no: PageNo) -> bool {
        no.class == Class::Large && self.pages.exclude_page(no.index)
    }

    /// Puts a page back into use.
    pub(crate) fn put_back(&mut self, no: PageNo) {
        self.pages.release(no.index, 0);
    }

    /// Returns the slots for peer-visible (remote) blocks: range and offset.
    pub(crate) fn remote_slots(&self) -> HashSet<(usize, u64)> {
        let page_slots = self.page_slots().filter(|(range, ..)| self.ranges[*range].remote);
        page_slots.map(|(range, offset, _)| (range, offset)).collect()
    }

    /// Returns number and bytes of the live peer-visible blocks.
    pub(crate) fn live_remote(&self) -> (u64, u64) {
        let blocks = self.blocks();
        let remote = blocks.iter().filter(|live| self.is_remote(live.place.range));
        remote.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.bytes))
    }

    /// Returns whether the blocks of a range are peer-visible.
    pub(crate) fn is_remote(&self, range: usize) -> bool {
        self.ranges[range].remote
    }

    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        if self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        self.bytes_at(place).map(drop)
    }

    pub(crate) fn bytes_at(&self, place: Place) -> Result<u64, NotLive> {
        Ok(self.live(self.locate(place)?)?.0)
    }

    /// Returns the page numbers under a block.
    pub(crate) fn under(&self, place: Place, bytes: u64) -> Vec<PageNo> {
        let Some(range) = self.ranges.get(place.range) else { return Vec::new() };
        let page = self.page_bytes(range.class);
        let page_slots = (place.offset / page) as usize..(place.offset + bytes).div_ceil(page) as usize;
        let shown = range.page_slots.get(page_slots).unwrap_or_default();
        shown.iter().map(|index| PageNo { class: range.class, index: *index }).collect()
    }
}

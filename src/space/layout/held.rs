//! Queries by page number, for code which changes the pages of numbers.

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

    pub(crate) fn page_slots(&self) -> impl Iterator<Item = (usize, u64, PageNo)> {
        self.ranges.iter().enumerate().flat_map(move |(number, range)| {
            range.page_slots.iter().enumerate().map(move |(page_slot, index)| {
                let offset = self.offset(PageSlot { range: number, index: page_slot });
                (number, offset, PageNo { class: range.class, index: *index })
            })
        })
    }

    pub(crate) fn holds(&self, no: PageNo) -> bool {
        match no.class {
            Class::Small => self.slabs.live(no.index as usize) > 0,
            Class::Large => !self.pages.is_idle(no.index),
        }
    }

    /// Takes a large page without blocks out of use; false if it has one.
    pub(crate) fn exclude_page(&mut self, no: PageNo) -> bool {
        no.class == Class::Large && self.pages.exclude_page(no.index)
    }

    pub(crate) fn put_back(&mut self, no: PageNo) {
        self.pages.release(no.index, 0);
    }

    pub(crate) fn remote_slots(&self) -> HashSet<(usize, u64)> {
        let page_slots = self.page_slots().filter(|(range, ..)| self.ranges[*range].remote);
        page_slots.map(|(range, offset, _)| (range, offset)).collect()
    }

    pub(crate) fn live_remote(&self) -> (u64, u64) {
        let blocks = self.blocks();
        let remote = blocks.iter().filter(|live| self.is_remote(live.place.range));
        remote.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.bytes))
    }

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

    pub(crate) fn under(&self, place: Place, bytes: u64) -> Vec<PageNo> {
        let Some(range) = self.ranges.get(place.range) else { return Vec::new() };
        let page = self.page_bytes(range.class);
        let page_slots = (place.offset / page) as usize..(place.offset + bytes).div_ceil(page) as usize;
        let shown = range.page_slots.get(page_slots).unwrap_or_default();
        shown.iter().map(|index| PageNo { class: range.class, index: *index }).collect()
    }
}

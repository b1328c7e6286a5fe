//! Which numbers show where, and which of them hold blocks: for whoever changes the pages behind them.

use std::collections::HashSet;

use super::{Layout, NotLive, Place, TileNo};
use crate::pages::{Class, PageNo};

impl Layout {
    /// How many numbers of a class have been used.
    pub(crate) fn numbers(&self, class: Class) -> usize {
        match class {
            Class::Small => self.slabs.len(),
            Class::Large => self.pages.used(),
        }
    }

    /// Every place where a number shows: range, offset, and the number.
    pub(crate) fn tiles(&self) -> impl Iterator<Item = (usize, u64, PageNo)> {
        self.ranges.iter().enumerate().flat_map(move |(number, range)| {
            range.tiles.iter().enumerate().map(move |(tile, index)| {
                let offset = self.offset(TileNo { range: number, tile });
                (number, offset, PageNo { class: range.class, index: *index })
            })
        })
    }

    /// Whether a block lies on the page of a number.
    pub(crate) fn holds(&self, no: PageNo) -> bool {
        match no.class {
            Class::Small => self.slabs.live(no.index as usize) > 0,
            Class::Large => !self.pages.is_idle(no.index),
        }
    }

    /// Takes a large page on which no block lies out of use, until it is [put back](Self::put_back); whether it is now.
    pub(crate) fn set_aside(&mut self, no: PageNo) -> bool {
        no.class == Class::Large && self.pages.set_aside(no.index)
    }

    /// A page that was set aside serves again.
    pub(crate) fn put_back(&mut self, no: PageNo) {
        self.pages.release(no.index, 0);
    }

    /// Where numbers show that hold remote blocks, or did: range and offset.
    pub(crate) fn remote_tiles(&self) -> HashSet<(usize, u64)> {
        let tiles = self.tiles().filter(|(range, ..)| self.ranges[*range].remote);
        tiles.map(|(range, offset, _)| (range, offset)).collect()
    }

    /// The remote blocks that are live, and their bytes.
    pub(crate) fn live_remote(&self) -> (u64, u64) {
        let blocks = self.blocks();
        let remote = blocks.iter().filter(|live| self.is_remote(live.place.range));
        remote.fold((0, 0), |(count, bytes), live| (count + 1, bytes + live.bytes))
    }

    /// Whether the blocks of a range are remote.
    pub(crate) fn is_remote(&self, range: usize) -> bool {
        self.ranges[range].remote
    }

    /// Whether a live block begins at a place.
    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        if self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        self.bytes_at(place).map(drop)
    }

    /// The bytes of the live block at a place.
    pub(crate) fn bytes_at(&self, place: Place) -> Result<u64, NotLive> {
        Ok(self.live(self.locate(place)?)?.0)
    }

    /// The numbers under a block.
    pub(crate) fn under(&self, place: Place, bytes: u64) -> Vec<PageNo> {
        let Some(range) = self.ranges.get(place.range) else { return Vec::new() };
        let page = self.page_bytes(range.class);
        let tiles = (place.offset / page) as usize..(place.offset + bytes).div_ceil(page) as usize;
        let shown = range.tiles.get(tiles).unwrap_or_default();
        shown.iter().map(|index| PageNo { class: range.class, index: *index }).collect()
    }
}

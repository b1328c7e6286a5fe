//! What is live when a capture ends, and which addresses it keeps from being shared.

use super::{Layout, Live, Place, TileNo};
use crate::pages::{Class, PageNo};
use crate::units::BLOCK_GRANULE;

/// What a small page's worth of a tile's addresses is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// No block was ever there: it needs no memory.
    Idle,
    /// Only blocks that are freed were there. The graph writes there on every replay, and nothing has to last.
    Passing,
    /// A retained block is there.
    Retained,
}

/// A tile with retained blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RetainedTile {
    pub(crate) range: usize,
    pub(crate) offset: u64,
    pub(crate) page: PageNo,
    /// In address order, from the tile's start.
    pub(crate) units: Vec<Unit>,
}

impl Layout {
    /// The live blocks, in address order within a range, parked ones apart.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        let mut blocks = Vec::with_capacity(self.usage.blocks as usize);
        for tile in self.tiles() {
            self.each_block(tile, |live, _| blocks.push(live));
        }
        blocks
    }

    /// The tiles that blocks cover which would be retained if the capture ended now.
    pub(crate) fn retained_tiles(&self) -> Vec<RetainedTile> {
        let small = self.geometry.small();
        // Bytes of the tile ahead that a block from the tiles before it covers.
        let mut carried = 0;
        let mut retained = Vec::new();
        for tile in self.tiles() {
            let class = self.ranges[tile.range].class;
            let page_bytes = self.page_bytes(class);
            let used = &self.ranges[tile.range].tiles[tile.tile].used;
            let mut units: Vec<Unit> = (0..page_bytes / small)
                .map(|unit| {
                    if used[unit as usize / 64] >> (unit % 64) & 1 == 1 { Unit::Passing } else { Unit::Idle }
                })
                .collect();
            let mut keep = |from: u64, to: u64| {
                let covered = from / small..to.min(page_bytes).div_ceil(small);
                covered.for_each(|unit| units[unit as usize] = Unit::Retained);
            };
            let mut ahead = carried;
            keep(0, carried);
            self.each_block(tile, |live, start| {
                keep(start, start + live.bytes);
                ahead = start + live.bytes;
            });
            carried = ahead.saturating_sub(page_bytes);
            if units.contains(&Unit::Retained) {
                let page = PageNo { class, index: self.page(tile) };
                retained.push(RetainedTile { range: tile.range, offset: self.offset(tile), page, units });
            }
        }
        retained
    }

    /// Whether a live block covers a byte from `from` to `to` of a range, all within one tile.
    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        let page_bytes = self.page_bytes(self.ranges[range].class);
        let tile = TileNo { range, tile: (from / page_bytes) as usize };
        let base = self.offset(tile);
        let page = self.page(tile);
        match self.ranges[range].class {
            Class::Small => self.slabs.blocks(page as usize).next().is_some(),
            Class::Large => {
                self.pages.stays(page, tile).any(|stay| base + stay.start < to && from < base + stay.end)
            }
        }
    }

    fn tiles(&self) -> impl Iterator<Item = TileNo> {
        let ranges = self.ranges.iter().enumerate();
        ranges.flat_map(|(range, found)| (0..found.tiles.len()).map(move |tile| TileNo { range, tile }))
    }

    /// Calls `found` with each block that starts at the tile and is not parked, and its first byte within the tile.
    fn each_block(&self, tile: TileNo, mut found: impl FnMut(Live, u64)) {
        let page = self.page(tile);
        let mut report = |start: u64, bytes: u64, serial: u64| {
            let place = Place { range: tile.range, offset: self.offset(tile) + start };
            if bytes > 0 && !self.parked.contains(&place) {
                found(Live { place, bytes, serial }, start);
            }
        };
        match self.ranges[tile.range].class {
            Class::Small => self.slabs.blocks(page as usize).for_each(|(start, granules, serial)| {
                report(u64::from(start) * BLOCK_GRANULE, u64::from(granules) * BLOCK_GRANULE, serial);
            }),
            Class::Large => {
                self.pages.stays(page, tile).for_each(|stay| report(stay.start, stay.block, stay.serial));
            }
        }
    }
}

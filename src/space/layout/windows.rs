//! Windows: the addresses of stitched blocks, and which of them the next block goes to.

use super::{Layout, Place};
use crate::space::lane::Lane;
use crate::space::page_table::{Stay, TileNo};
use crate::space::recency::Recency;
use crate::units::BlockBytes;

/// Tiles that were mapped for one block.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: TileNo,
    tiles: usize,
    /// Where in the first page the block began: behind 0 if that was its head.
    from: u64,
    /// Bytes of the block.
    bytes: u64,
}

/// Every window of a space.
#[derive(Debug, Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    recency: Recency,
}

impl Windows {
    /// Adds the window of a block that begins at a byte of its first page; its number.
    pub(super) fn add(&mut self, first: TileNo, tiles: usize, from: u64, bytes: u64) -> usize {
        self.all.push(Window { first, tiles, from, bytes });
        self.recency.add();
        self.all.len() - 1
    }
}

impl Layout {
    /// The window for a block. The most recently used one whose memory is free and that was made for a block of this size, or
    /// for whole pages any that begins where a page does; or else the most recently used one that holds it; or else the most
    /// recently used one from which it can run on into the windows behind. Small blocks keep out of windows of one page.
    pub(super) fn find(&mut self, bytes: u64, lane: Lane) -> Option<usize> {
        let large = self.geometry.large();
        let whole = bytes.is_multiple_of(large);
        let (mut inside, mut running_on) = (None, None);
        let mut next = self.windows.recency.newest();
        while let Some(number) = next {
            next = self.windows.recency.older(number);
            let Window { first, tiles, from, bytes: own } = self.windows.all[number];
            if bytes < large && tiles < 2 {
                continue;
            }
            if if whole { from == 0 } else { own == bytes } {
                if self.is_free(first, from, bytes, lane) {
                    return Some(number);
                }
            } else if inside.is_none() {
                let within = from + bytes <= tiles as u64 * large;
                if (within || running_on.is_none()) && self.is_free(first, from, bytes, lane) {
                    *(if within { &mut inside } else { &mut running_on }) = Some(number);
                }
            }
        }
        inside.or(running_on)
    }

    /// Whether the tiles that a block would cover are free, and all of different pages.
    fn is_free(&mut self, first: TileNo, from: u64, bytes: u64, lane: Lane) -> bool {
        let (large, pages) = (self.geometry.large(), &mut self.pages);
        let tiles = &self.ranges[first.range].tiles[first.tile..];
        pages.start_search();
        let (mut from, mut rest) = (from, bytes);
        for page in tiles {
            let to = large.min(from + rest);
            if rest == 0 || !pages.visit(*page, from, to, lane) {
                break;
            }
            rest -= to - from;
            from = 0;
        }
        rest == 0
    }

    /// Puts a block at the beginning of a window.
    pub(super) fn settle(&mut self, window: usize, bytes: BlockBytes) -> Place {
        let Window { first, from, .. } = self.windows.all[window];
        self.windows.recency.touch(window);
        let (large, serial) = (self.geometry.large(), self.count(bytes));
        let (mut tile, mut start, mut rest) = (first, from, bytes.get());
        while rest > 0 {
            let end = large.min(start + rest);
            let block = if tile == first { bytes.get() } else { 0 };
            self.occupy(self.page(tile), Stay { start, end, tile, block, serial });
            rest -= end - start;
            start = 0;
            tile.tile += 1;
        }
        Place { range: first.range, offset: self.offset(first) + from }
    }

    /// Puts a block into a page, at the page's first tile.
    pub(super) fn settle_within(&mut self, page: u32, start: u64, bytes: BlockBytes) -> Place {
        let (tile, serial) = (self.pages.home(page), self.count(bytes));
        self.occupy(page, Stay { start, end: start + bytes.get(), tile, block: bytes.get(), serial });
        Place { range: tile.range, offset: self.offset(tile) + start }
    }

    fn occupy(&mut self, page: u32, stay: Stay) {
        // A small page is a power of two, and a shift a fifth of a division.
        let (log, base) = (self.geometry.small().trailing_zeros(), self.offset(stay.tile));
        let (mut unit, end) = ((base + stay.start) >> log, ((base + stay.end - 1) >> log) + 1);
        let used = &mut self.ranges[stay.tile.range].used;
        while unit < end {
            let bits = (64 - unit % 64).min(end - unit);
            used[unit as usize / 64] |= (u64::MAX >> (64 - bits)) << (unit % 64);
            unit += bits;
        }
        self.pages.occupy(page, stay);
    }
}

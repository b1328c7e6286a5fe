//! Windows: the addresses of blocks that one page does not hold, and which of them the next block goes to.

use std::collections::BTreeMap;

use super::{Layout, Place};
use crate::pages::Class;
use crate::space::lane::Lane;
use crate::space::page_table::{Stay, TileNo};
use crate::space::recency::Recency;
use crate::units::BlockBytes;

/// Tiles that blocks of one size lie at.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: TileNo,
    tiles: usize,
    /// Where in the first page a block begins: behind 0 if that is its head, or a gap.
    from: u64,
}

impl Window {
    /// Small blocks keep out of windows of one page.
    fn is_for(&self, bytes: u64, large: u64) -> bool {
        bytes >= large || self.tiles > 1
    }
}

/// Every window of a space.
#[derive(Debug, Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    recency: Recency,
    /// Their numbers by the bytes of their blocks, oldest first.
    by_bytes: BTreeMap<u64, Vec<usize>>,
}

impl Windows {
    /// Adds the window of a block that begins at a byte of its first page; its number.
    pub(super) fn add(&mut self, first: TileNo, tiles: usize, from: u64, bytes: u64) -> usize {
        self.all.push(Window { first, tiles, from });
        self.recency.add();
        let number = self.all.len() - 1;
        self.by_bytes.entry(bytes).or_default().push(number);
        number
    }
}

impl Layout {
    /// The window for a block: of those for its size the oldest one whose memory is free, since an order that no use changes is what identical
    /// layers settle in. Else the window used last whose beginning is free, or a new one over tiles that are mapped already: in the first gap of the
    /// window used last that has one, or at the first run of free tiles, whoever they were mapped for.
    pub(super) fn find(&mut self, bytes: u64, lane: Lane) -> Option<usize> {
        for number in self.windows.by_bytes.get(&bytes).into_iter().flatten() {
            let window = self.windows.all[*number];
            let tiles = &self.ranges[window.first.range].tiles[window.first.tile..];
            if window.is_for(bytes, self.geometry.large())
                && self.pages.is_free(tiles, window.from, bytes, lane)
            {
                return Some(*number);
            }
        }
        let most = self.most_idle(bytes, lane);
        let (first, from) = match self.gap(bytes, lane, most) {
            Some((number, first, from)) => {
                let window = self.windows.all[number];
                if (window.first, window.from) == (first, from) {
                    return Some(number);
                }
                (first, from)
            }
            None => self.run(bytes, lane, most)?,
        };
        Some(self.windows.add(first, self.covered(from, bytes), from, bytes))
    }

    /// How many tiles a block covers that begins at a byte of its first page.
    fn covered(&self, from: u64, bytes: u64) -> usize {
        (from + bytes).div_ceil(self.geometry.large()) as usize
    }

    /// How many pages that hold no block a new window may take: as many as if the block were stitched, since what is mapped already must not cost a
    /// page. Below two pages as many as it likes: what it leaves of one serves its like.
    fn most_idle(&self, bytes: u64, lane: Lane) -> u64 {
        if bytes < 2 * self.geometry.large() { u64::MAX } else { self.pages.planned_free(bytes, lane) }
    }

    /// Whether a new window would take so many of them at most.
    fn takes(&self, first: TileNo, from: u64, bytes: u64, most: u64) -> bool {
        let tiles = &self.ranges[first.range].tiles[first.tile..][..self.covered(from, bytes)];
        tiles.iter().filter(|page| self.pages.is_idle(**page)).count() as u64 <= most
    }

    /// Whether a block may begin at a byte of its first page: one of whole pages only where the page does.
    fn may_begin(&self, bytes: u64, at: u64) -> bool {
        at == 0 || !bytes.is_multiple_of(self.geometry.large())
    }

    /// The window used last that has a gap for a block, and where in it the first one begins; anywhere but in its beginning one that takes so many
    /// idle pages at most.
    fn gap(&self, bytes: u64, lane: Lane, most: u64) -> Option<(usize, TileNo, u64)> {
        let mut next = self.windows.recency.newest();
        while let Some(number) = next {
            next = self.windows.recency.older(number);
            let window = self.windows.all[number];
            if window.is_for(bytes, self.geometry.large())
                && let Some((tile, at)) = self.gap_in(window, bytes, lane)
                && ((window.first, window.from) == (tile, at) || self.takes(tile, at, bytes, most))
            {
                return Some((number, tile, at));
            }
        }
        None
    }

    fn gap_in(&self, window: Window, bytes: u64, lane: Lane) -> Option<(TileNo, u64)> {
        let Window { first, tiles, from } = window;
        let large = self.geometry.large();
        let (mut begin, mut length) = ((first, from), 0);
        for number in 0..tiles {
            let tile = TileNo { tile: first.tile + number, ..first };
            let page = self.page(tile);
            if self.pages.lane(page) != lane {
                length = 0;
                continue;
            }
            for (at, to) in self.pages.gaps(page) {
                let at = if number == 0 { at.max(from) } else { at };
                // It goes on over a seam, and nowhere else.
                if at > 0 || length == 0 {
                    (begin, length) = ((tile, at), 0);
                }
                if self.may_begin(bytes, begin.1) {
                    length += to.saturating_sub(at);
                }
                if length >= bytes {
                    return Some(begin);
                }
                if to < large || to <= at {
                    length = 0;
                }
            }
        }
        None
    }

    /// The first run of free tiles for a block, in the order of addresses, that takes so many idle pages at most.
    fn run(&mut self, bytes: u64, lane: Lane, most: u64) -> Option<(TileNo, u64)> {
        let large = self.geometry.large();
        for range in 0..self.ranges.len() {
            if !self.ranges[range].is_for(Class::Large, lane) {
                continue;
            }
            for tile in 0..self.ranges[range].tiles.len() {
                let tile = TileNo { range, tile };
                let at = self.pages.end(self.page(tile));
                if at < large
                    && self.may_begin(bytes, at)
                    && self.pages.is_free(&self.ranges[range].tiles[tile.tile..], at, bytes, lane)
                    && self.takes(tile, at, bytes, most)
                {
                    return Some((tile, at));
                }
            }
        }
        None
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

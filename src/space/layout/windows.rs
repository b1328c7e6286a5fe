//! Windows: addresses of blocks across several pages, and the choice of a window for the next
//! block.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use super::{Layout, Place};
use crate::pages::Class;
use crate::space::bits::Bits;
use crate::space::lane::Lane;
use crate::space::page_table::{Stay, TileNo};
use crate::space::recency::Recency;
use crate::units::BlockBytes;

/// Limit of slots visited in a search among windows of other sizes: a longer search costs as much
/// as mapping.
const MOST_PASSED: usize = 4096;

/// Slots for blocks of one size.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: TileNo,
    tiles: usize,
    /// Offset of the block in the first page; above 0 after other blocks on the page.
    from: u64,
    /// Index in [`Windows::sizes`], and index among the windows of this size.
    size: (usize, usize),
}

impl Window {
    /// Returns whether a block may use the window: blocks below a large page avoid windows of one
    /// page.
    fn is_for(&self, bytes: u64, large: u64) -> bool {
        bytes >= large || self.tiles > 1
    }
}

#[derive(Debug, Default)]
struct Size {
    /// Window numbers, oldest first.
    windows: Vec<usize>,
    /// Windows without one of their own blocks; blocks of other windows may lie on the same pages.
    vacant: Bits,
}

#[derive(Debug, Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    recency: Recency,
    sizes: Vec<Size>,
    /// Index in `sizes`, by bytes of the block.
    by_bytes: BTreeMap<u64, usize>,
}

impl Windows {
    /// Adds the window of a block which begins at byte `from` of its first page. Returns its
    /// number.
    pub(super) fn add(&mut self, first: TileNo, tiles: usize, from: u64, bytes: u64) -> usize {
        let number = self.all.len();
        let size = *self.by_bytes.entry(bytes).or_insert(self.sizes.len());
        if size == self.sizes.len() {
            self.sizes.push(Size::default());
        }
        let of_size = &mut self.sizes[size];
        let place = of_size.windows.len();
        of_size.windows.push(number);
        of_size.vacant.set(place, true);
        self.all.push(Window { first, tiles, from, size: (size, place) });
        self.recency.add();
        number
    }

    /// Sets whether a window holds no block of its own.
    pub(super) fn set_vacant(&mut self, number: u32, vacant: bool) {
        let (size, place) = self.all[number as usize].size;
        self.sizes[size].vacant.set(place, vacant);
    }

    /// Returns the vacant windows of a size, oldest first.
    fn vacant(&self, bytes: u64) -> impl Iterator<Item = usize> {
        let size = self.by_bytes.get(&bytes).map(|size| &self.sizes[*size]);
        size.into_iter().flat_map(|size| size.vacant.iter().map(|place| size.windows[place]))
    }
}

/// A block without a window of its size, and the limit of pages without blocks which the block may
/// take unless it begins with a window. The limit is the cost of stitching, because mapped
/// addresses must not cost an extra page. Blocks below two pages have no limit: the rest of a page
/// serves similar blocks.
struct Guest {
    bytes: u64,
    lane: Lane,
    /// Computed at the first candidate.
    most_idle: OnceCell<u64>,
}

impl Layout {
    /// Finds a window for a block. First choice: the oldest free window of the block's size,
    /// because identical layers settle in an order independent of use. Second: the first gap in the
    /// most recently used window with a gap; the gap becomes a window unless it begins one. Third:
    /// the first run of free slots, which becomes a window.
    pub(super) fn find(&mut self, bytes: u64, lane: Lane) -> Option<usize> {
        let large = self.geometry.large();
        let own = self.windows.vacant(bytes).find(|number| {
            let window = self.windows.all[*number];
            window.is_for(bytes, large) && self.covers(window.first, window.from, bytes, lane).is_some()
        });
        if own.is_some() || self.pages.free() < bytes {
            return own;
        }
        let guest = Guest { bytes, lane, most_idle: OnceCell::new() };
        let (first, from) = match self.gap(&guest) {
            Some((number, first, from)) => {
                let window = self.windows.all[number];
                if (window.first, window.from) == (first, from) {
                    return Some(number);
                }
                (first, from)
            }
            None => self.run(&guest)?,
        };
        let tiles = (from + bytes).div_ceil(large) as usize;
        Some(self.windows.add(first, tiles, from, bytes))
    }

    /// Returns how many pages without blocks a block would take from byte `from` of a slot; `None`
    /// if any byte is covered.
    fn covers(&self, first: TileNo, from: u64, bytes: u64, lane: Lane) -> Option<u64> {
        self.pages.covers(&self.ranges[first.range].tiles[first.tile..], from, bytes, lane)
    }

    /// Returns whether a guest may lie at a place: free, and within the guest's limit.
    fn admits(&self, guest: &Guest, first: TileNo, from: u64) -> bool {
        let Guest { bytes, lane, most_idle } = guest;
        let Some(idle) = self.covers(first, from, *bytes, *lane) else { return false };
        *bytes < 2 * self.geometry.large()
            || idle <= *most_idle.get_or_init(|| self.pages.planned_free(*bytes, *lane))
    }

    /// Returns whether a block may begin at byte `at` of its first page. Blocks of whole pages
    /// begin only at 0.
    fn may_begin(&self, bytes: u64, at: u64) -> bool {
        at == 0 || !bytes.is_multiple_of(self.geometry.large())
    }

    /// Returns the most recently used window with a gap for a guest, and the beginning of its first
    /// gap.
    fn gap(&self, guest: &Guest) -> Option<(usize, TileNo, u64)> {
        let (mut next, mut passed) = (self.windows.recency.newest(), 0);
        while let Some(number) = next.filter(|_| passed < MOST_PASSED) {
            next = self.windows.recency.older(number);
            let window = self.windows.all[number];
            passed += window.tiles;
            if window.is_for(guest.bytes, self.geometry.large())
                && let Some((tile, at)) = self.gap_in(window, guest.bytes, guest.lane)
                && ((window.first, window.from) == (tile, at) || self.admits(guest, tile, at))
            {
                return Some((number, tile, at));
            }
        }
        None
    }

    fn gap_in(&self, window: Window, bytes: u64, lane: Lane) -> Option<(TileNo, u64)> {
        let Window { first, tiles, from, .. } = window;
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
                // A gap continues only across the boundary of two slots.
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

    /// Returns the first run of free slots for a guest, in address order.
    fn run(&self, guest: &Guest) -> Option<(TileNo, u64)> {
        let (ranges, large) = (self.ranges.iter().enumerate(), self.geometry.large());
        let usable = ranges.filter(|(_, range)| range.is_for(Class::Large, guest.lane));
        let tiles = usable.flat_map(|(range, found)| {
            found.tiles.iter().enumerate().map(move |(tile, page)| (TileNo { range, tile }, *page))
        });
        let begins = tiles.take(MOST_PASSED).map(|(tile, page)| (tile, self.pages.end(page)));
        let mut begins = begins.filter(|(_, at)| *at < large && self.may_begin(guest.bytes, *at));
        begins.find(|(tile, at)| self.admits(guest, *tile, *at))
    }

    /// Places a block at the beginning of a window.
    pub(super) fn settle(&mut self, window: usize, bytes: BlockBytes) -> Place {
        let Window { first, from, .. } = self.windows.all[window];
        self.windows.recency.touch(window);
        let number = window as u32;
        self.windows.set_vacant(number, false);
        let (large, serial) = (self.geometry.large(), self.count(bytes));
        let (mut tile, mut start, mut rest) = (first, from, bytes.get());
        while rest > 0 {
            let end = large.min(start + rest);
            let block = if tile == first { bytes.get() } else { 0 };
            self.occupy(self.page(tile), Stay { start, end, tile, block, serial, window: Some(number) });
            rest -= end - start;
            start = 0;
            tile.tile += 1;
        }
        Place { range: first.range, offset: self.offset(first) + from }
    }

    /// Places a block in a page, at the page's first slot.
    pub(super) fn settle_within(&mut self, page: u32, start: u64, bytes: BlockBytes) -> Place {
        let (tile, serial) = (self.pages.home(page), self.count(bytes));
        let (end, block) = (start + bytes.get(), bytes.get());
        self.occupy(page, Stay { start, end, tile, block, serial, window: None });
        Place { range: tile.range, offset: self.offset(tile) + start }
    }

    fn occupy(&mut self, page: u32, stay: Stay) {
        // Small pages are powers of two, and a shift takes a fifth of a division.
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

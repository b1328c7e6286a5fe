//! Windows: the addresses of blocks that one page does not hold, and which of them the next block goes to.

use std::cell::OnceCell;
use std::collections::BTreeMap;

use super::{Layout, Place};
use crate::pages::Class;
use crate::space::bits::Bits;
use crate::space::lane::Lane;
use crate::space::page_table::{Stay, TileNo};
use crate::space::recency::Recency;
use crate::units::BlockBytes;

/// How many tiles a search among those of other sizes passes: looking for longer takes as long as mapping.
const MOST_PASSED: usize = 4096;

/// Tiles that blocks of one size lie at.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: TileNo,
    tiles: usize,
    /// Where in the first page a block begins: behind 0 if that is its head, or a gap.
    from: u64,
    /// Which of [`Windows::sizes`] it is of, and which of its windows it is.
    size: (usize, usize),
}

impl Window {
    /// Small blocks keep out of windows of one page.
    fn is_for(&self, bytes: u64, large: u64) -> bool {
        bytes >= large || self.tiles > 1
    }
}

/// The windows of one size.
#[derive(Debug, Default)]
struct Size {
    /// Their numbers, oldest first.
    windows: Vec<usize>,
    /// Those at whose beginning none of their blocks lies; blocks of other windows may be on the same pages.
    vacant: Bits,
}

/// Every window of a space.
#[derive(Debug, Default)]
pub(super) struct Windows {
    all: Vec<Window>,
    recency: Recency,
    sizes: Vec<Size>,
    /// Which of the sizes blocks of so many bytes are of.
    by_bytes: BTreeMap<u64, usize>,
}

impl Windows {
    /// Adds the window of a block that begins at a byte of its first page; its number.
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

    /// Says whether no block lies in a window that was put into it.
    pub(super) fn set_vacant(&mut self, number: u32, vacant: bool) {
        let (size, place) = self.all[number as usize].size;
        self.sizes[size].vacant.set(place, vacant);
    }

    /// The windows of a size that their own blocks left, oldest first.
    fn vacant(&self, bytes: u64) -> impl Iterator<Item = usize> {
        let size = self.by_bytes.get(&bytes).map(|size| &self.sizes[*size]);
        size.into_iter().flat_map(|size| size.vacant.iter().map(|place| size.windows[place]))
    }
}

/// A block that no window of its size has room for, and how many pages without a block it may take where it does not begin with a window: as many as
/// if it were stitched, since what is mapped already must not cost a page. Below two pages as many as it likes: what it leaves of one serves its like.
struct Guest {
    bytes: u64,
    lane: Lane,
    /// Asked for at the first place that there is.
    most_idle: OnceCell<u64>,
}

impl Layout {
    /// The window for a block: of those for its size the oldest one whose memory is free, since an order that no use changes is what identical
    /// layers settle in. Else the window used last whose beginning is free, or a new one over tiles that are mapped already: in the first gap of the
    /// window used last that has one, or at the first run of free tiles, whoever they were mapped for.
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

    /// How many pages without a block one would take from a byte of a tile on, if all it covered were free.
    fn covers(&self, first: TileNo, from: u64, bytes: u64, lane: Lane) -> Option<u64> {
        self.pages.covers(&self.ranges[first.range].tiles[first.tile..], from, bytes, lane)
    }

    /// Whether a guest may lie at a place, which must be free.
    fn admits(&self, guest: &Guest, first: TileNo, from: u64) -> bool {
        let Guest { bytes, lane, most_idle } = guest;
        let Some(idle) = self.covers(first, from, *bytes, *lane) else { return false };
        *bytes < 2 * self.geometry.large()
            || idle <= *most_idle.get_or_init(|| self.pages.planned_free(*bytes, *lane))
    }

    /// Whether a block may begin at a byte of its first page: one of whole pages only where the page does.
    fn may_begin(&self, bytes: u64, at: u64) -> bool {
        at == 0 || !bytes.is_multiple_of(self.geometry.large())
    }

    /// The window used last that has a gap for a guest, and where in it the first one begins.
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

    /// The first run of free tiles for a guest, in the order of addresses.
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

    /// Puts a block at the beginning of a window.
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

    /// Puts a block into a page, at the page's first tile.
    pub(super) fn settle_within(&mut self, page: u32, start: u64, bytes: BlockBytes) -> Place {
        let (tile, serial) = (self.pages.home(page), self.count(bytes));
        let (end, block) = (start + bytes.get(), bytes.get());
        self.occupy(page, Stay { start, end, tile, block, serial, window: None });
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

//! Which addresses a space has, which page is behind each, and who uses them. Plain code over offsets and page numbers.
//!
//! ```text
//!   range     addresses reserved at once, filled from the left
//!             |---------- window 0 ----------|----- window 1 -----|-- window 2 --|      (not mapped yet)
//!   tiles     | page 0   | page 1   | page 2 | page 0   | page 3  | page 4       |
//!                                              ^ the same page twice: its blocks are never live on the same bytes
//!   blocks    [ big: whole pages, ... tail ]   [ big ... tail]    [    gap   |mid]
//! ```
//!
//! A block of a large page or more starts where a tile starts, covers whole pages, and its *tail* the beginning of one more. A
//! smaller one lies within a page, as far to the back of a gap as it can: the beginnings stay free for tails. What is small
//! enough goes to the [slabs](super::slabs), in ranges of their own.
//!
//! A big block goes to the most recently used window whose tiles are free, so that a model's identical layers settle on the
//! same addresses. Only when there is none are free pages, lowest number first, stitched together in a new window. Nothing here
//! depends on what other spaces did: the same requests always lead to the same numbers and offsets, and the arena holds, in each
//! class, the most pages that any one space has needed at a time.

use std::collections::HashSet;

use super::page_table::{PageTable, Stay, TileNo};
use super::recency::Recency;
use super::slab::NotABlock;
use super::slabs::{Slabs, Slot};
use crate::pages::{Class, PageNo};
use crate::units::{BLOCK_GRANULE, BlockBytes, Geometry, Stream};

mod retained;

pub(crate) use retained::{RetainedTile, Unit};

/// A range starts with this many pages' worth of addresses and doubles up to [`RANGE_PAGES_MAX`].
pub(super) const RANGE_PAGES_FIRST: u64 = 32;
pub(super) const RANGE_PAGES_MAX: u64 = 128;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Index of the range.
    pub(crate) range: usize,
    /// Bytes from the range's base.
    pub(crate) offset: u64,
}

/// Pages to be stitched together behind new addresses, to be mapped before [`Layout::commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    bytes: BlockBytes,
    stream: Stream,
    /// The range they are mapped in; one more than there are: it has to be reserved first.
    pub(crate) range: usize,
    /// Bytes of that range.
    pub(crate) range_bytes: u64,
    /// Where in the range the first page goes; the others follow without a gap.
    pub(crate) offset: u64,
    /// The pages, in address order.
    pub(crate) pages: Vec<PageNo>,
}

/// Why an address cannot be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotLive {
    /// Nothing lives there now; a block may have started there before.
    FreedBefore,
    /// No block of this space starts there.
    Foreign,
}

impl From<NotABlock> for NotLive {
    fn from(why: NotABlock) -> Self {
        match why {
            NotABlock::Inside => Self::Foreign,
            NotABlock::Gap => Self::FreedBefore,
        }
    }
}

/// What a space uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Live blocks.
    pub(crate) blocks: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// The most bytes that were live at once.
    pub(crate) peak_bytes: u64,
    /// Blocks that were ever allocated.
    pub(crate) allocations: u64,
}

/// A live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) place: Place,
    pub(crate) bytes: u64,
    /// It was the space's n-th, from 1.
    pub(crate) serial: u64,
}

impl Usage {
    /// One more block is live; its number.
    pub(crate) fn add(&mut self, bytes: BlockBytes) -> u64 {
        self.blocks += 1;
        self.bytes += bytes.get();
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.allocations += 1;
        self.allocations
    }

    /// A block of so many bytes is gone.
    pub(crate) fn remove(&mut self, bytes: u64) {
        self.blocks -= 1;
        self.bytes -= bytes;
    }
}

#[derive(Debug)]
struct Tile {
    page: u32,
    /// One bit for each small page's worth of bytes that any block at this tile, living or freed, has ever covered.
    used: Vec<u64>,
}

#[derive(Debug)]
struct Range {
    class: Class,
    bytes: u64,
    tiles: Vec<Tile>,
}

/// Tiles that were mapped together.
#[derive(Clone, Copy, Debug)]
struct Window {
    first: TileNo,
    tiles: usize,
}

/// What a place is in.
enum Found {
    Slab(Slot),
    Page { tile: TileNo, page: u32, start: u64 },
}

/// The state described above.
#[derive(Debug)]
pub(crate) struct Layout {
    geometry: Geometry,
    pages: PageTable,
    slabs: Slabs,
    ranges: Vec<Range>,
    windows: Vec<Window>,
    recency: Recency,
    /// Where each slab is.
    slab_tiles: Vec<TileNo>,
    /// Live blocks that a second stream uses.
    crossing: HashSet<Place>,
    /// Such blocks after they were freed: busy until the seal.
    parked: HashSet<Place>,
    /// Whether the capture has ended.
    sealed: bool,
    usage: Usage,
}

impl Layout {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            pages: PageTable::new(geometry.large()),
            slabs: Slabs::new(geometry.small()),
            ranges: Vec::new(),
            windows: Vec::new(),
            recency: Recency::default(),
            slab_tiles: Vec::new(),
            crossing: HashSet::new(),
            parked: HashSet::new(),
            sealed: false,
            usage: Usage::default(),
        }
    }

    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Numbers of small and large pages this space has ever used.
    pub(crate) fn pages(&self) -> (usize, usize) {
        (self.slabs.len(), self.pages.used())
    }

    /// Whether a block of this size goes to the slabs.
    fn packed(&self, bytes: BlockBytes) -> bool {
        bytes.get() <= self.geometry.small() / 2
    }

    fn page_bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    /// Whole pages under a block, and the bytes of its tail.
    fn split(&self, bytes: BlockBytes) -> (usize, u64) {
        ((bytes.get() / self.geometry.large()) as usize, bytes.get() % self.geometry.large())
    }

    fn offset(&self, tile: TileNo) -> u64 {
        tile.tile as u64 * self.page_bytes(self.ranges[tile.range].class)
    }

    fn page(&self, tile: TileNo) -> u32 {
        self.ranges[tile.range].tiles[tile.tile].page
    }

    /// Places a block on addresses that are already mapped, if it can.
    pub(crate) fn place(&mut self, bytes: BlockBytes, stream: Stream) -> Option<Place> {
        if self.packed(bytes) {
            let slot = self.slabs.allocate(granules(bytes), stream, self.usage.allocations + 1)?;
            return Some(self.settle_in_slab(slot, bytes));
        }
        if bytes.get() < self.geometry.large() {
            let (page, end) = self
                .pages
                .gap(bytes.get(), stream)
                .or_else(|| self.pages.known_free(stream).map(|page| (page, self.geometry.large())))?;
            return Some(self.settle_within(page, end, bytes, stream));
        }
        let window = self.find(bytes, stream)?;
        Some(self.settle(window, bytes, stream))
    }

    /// What has to be mapped for a block that [`place`](Self::place) found no room for.
    pub(crate) fn plan(&self, bytes: BlockBytes, stream: Stream) -> Growth {
        let mut numbers: Vec<u32> = Vec::new();
        let class = if self.packed(bytes) {
            numbers.push(self.slabs.len() as u32);
            Class::Small
        } else {
            let (whole, tail) = self.split(bytes);
            let mut free = self.pages.free(stream);
            numbers.extend(free.by_ref().take(whole));
            if tail > 0 {
                let shared = if whole > 0 { self.pages.beginning(tail, stream) } else { None };
                numbers.extend(shared.or_else(|| free.next()));
            }
            Class::Large
        };
        let pages: Vec<PageNo> = numbers.into_iter().map(|index| PageNo { class, index }).collect();
        let page = self.page_bytes(class);
        let length = pages.len() as u64 * page;

        let filled = |range: &Range| range.tiles.len() as u64 * page;
        let mut fitting = self.ranges.iter().enumerate().filter(|(_, range)| range.class == class);
        let roomy = fitting.clone().find(|(_, range)| range.bytes - filled(range) >= length);
        let (range, range_bytes, offset) = match roomy {
            Some((number, range)) => (number, range.bytes, filled(range)),
            None => {
                let last = fitting.next_back().map_or(page * RANGE_PAGES_FIRST / 2, |(_, range)| range.bytes);
                (self.ranges.len(), (last * 2).min(page * RANGE_PAGES_MAX).max(length), 0)
            }
        };
        Growth { bytes, stream, range, range_bytes, offset, pages }
    }

    /// Places the block on the pages of its plan, which are mapped now. Nothing may have changed since the plan.
    pub(crate) fn commit(&mut self, growth: &Growth) -> Place {
        let Growth { bytes, stream, range, range_bytes, pages, .. } = growth;
        let class = if self.packed(*bytes) { Class::Small } else { Class::Large };
        if *range == self.ranges.len() {
            self.ranges.push(Range { class, bytes: *range_bytes, tiles: Vec::new() });
        }
        let first = TileNo { range: *range, tile: self.ranges[*range].tiles.len() };
        debug_assert_eq!(self.offset(first), growth.offset, "the plan is stale");
        let words = self.page_bytes(class).div_ceil(self.geometry.small()).div_ceil(64) as usize;
        for (tile, page) in (first.tile..).zip(pages) {
            self.ranges[*range].tiles.push(Tile { page: page.index, used: vec![0; words] });
            if class == Class::Large {
                self.pages.show(page.index, TileNo { range: *range, tile });
            }
        }
        if class == Class::Small {
            self.slab_tiles.push(first);
            self.slabs.add(*stream);
            let slot = self.slabs.allocate(granules(*bytes), *stream, self.usage.allocations + 1);
            // An empty slab has room for any packed block; it is the only one that has, or there would be no plan.
            debug_assert_eq!(slot, Some(Slot { slab: self.slabs.len() - 1, granule: 0 }));
            return self
                .settle_in_slab(slot.unwrap_or(Slot { slab: self.slabs.len() - 1, granule: 0 }), *bytes);
        }
        let window = self.windows.len();
        self.windows.push(Window { first, tiles: pages.len() });
        self.recency.add();
        if bytes.get() < self.geometry.large() {
            return self.settle_within(pages[0].index, self.geometry.large(), *bytes, *stream);
        }
        self.settle(window, *bytes, *stream)
    }

    /// Frees the block at a place; its bytes. They serve the next block of its stream, unless another stream uses it too: then it
    /// stays until the seal, and 0 bytes are free.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        let found = self.locate(place)?;
        if !self.crossing.is_empty() && self.crossing.remove(&place) {
            self.parked.insert(place);
            return Ok(0);
        }
        if !self.parked.is_empty() && self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        let bytes = match found {
            Found::Slab(slot) => u64::from(self.slabs.free(slot)?) * BLOCK_GRANULE,
            Found::Page { tile, page, start } => {
                let bytes = self.block(tile, page, start)?;
                self.pages.release(page, start);
                for next in 1..(start + bytes).div_ceil(self.geometry.large()) as usize {
                    let page = self.page(TileNo { tile: tile.tile + next, ..tile });
                    self.pages.release(page, 0);
                }
                bytes
            }
        };
        self.usage.remove(bytes);
        Ok(bytes)
    }

    /// Notes that `stream` uses the block too. Without effect if that is its own stream, and after the seal: nothing is placed any
    /// more, and nothing would ever free what was parked then.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<(), NotLive> {
        let own = match self.locate(place)? {
            Found::Slab(slot) => {
                self.slabs.block(slot)?;
                Some(self.slabs.stream(slot.slab))
            }
            Found::Page { tile, page, start } => {
                self.block(tile, page, start)?;
                self.pages.stream(page)
            }
        };
        if self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        if !self.sealed && own != Some(stream) {
            self.crossing.insert(place);
        }
        Ok(())
    }

    /// The capture has ended: what was parked is free now, and what is live is retained.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
        self.crossing.clear();
        for place in std::mem::take(&mut self.parked) {
            // A parked place is a live block by construction, so this cannot fail.
            let freed = self.free(place);
            debug_assert!(freed.is_ok(), "a parked block was not live");
        }
        self.slabs.seal();
    }

    /// The window for a block of at least a page: the most recently used one that holds it, or else the most recently used one
    /// from which it can run on into the windows behind.
    fn find(&mut self, bytes: BlockBytes, stream: Stream) -> Option<usize> {
        let (whole, tail) = self.split(bytes);
        let mut running_on = None;
        let mut next = self.recency.newest();
        while let Some(number) = next {
            if self.free_from(self.windows[number].first, whole, tail, stream) {
                if whole + usize::from(tail > 0) <= self.windows[number].tiles {
                    return Some(number);
                }
                running_on = running_on.or(Some(number));
            }
            next = self.recency.older(number);
        }
        running_on
    }

    /// Whether `whole` tiles from the first on, and the beginning of one more, are free.
    fn free_from(&mut self, first: TileNo, whole: usize, tail: u64, stream: Stream) -> bool {
        let tiles = &self.ranges[first.range].tiles[first.tile..];
        if tiles.len() < whole + usize::from(tail > 0) {
            return false;
        }
        self.pages.start_search();
        let (large, pages) = (self.geometry.large(), &mut self.pages);
        tiles[..whole].iter().all(|tile| pages.visit(tile.page, large, stream))
            && (tail == 0 || pages.visit(tiles[whole].page, tail, stream))
    }

    /// Puts a block of at least a page at the beginning of a window.
    fn settle(&mut self, window: usize, bytes: BlockBytes, stream: Stream) -> Place {
        let first = self.windows[window].first;
        self.recency.touch(window);
        let (large, serial) = (self.geometry.large(), self.usage.add(bytes));
        let mut rest = bytes.get();
        let mut tile = first;
        while rest > 0 {
            let end = rest.min(large);
            let block = if tile == first { bytes.get() } else { 0 };
            self.occupy(Stay { start: 0, end, tile, block, serial }, stream);
            rest -= end;
            tile.tile += 1;
        }
        Place { range: first.range, offset: self.offset(first) }
    }

    /// Puts a block into a page so that it ends at `end`, at the page's first tile.
    fn settle_within(&mut self, page: u32, end: u64, bytes: BlockBytes, stream: Stream) -> Place {
        let (tile, start, serial) = (self.pages.home(page), end - bytes.get(), self.usage.add(bytes));
        self.occupy(Stay { start, end, tile, block: bytes.get(), serial }, stream);
        Place { range: tile.range, offset: self.offset(tile) + start }
    }

    fn settle_in_slab(&mut self, slot: Slot, bytes: BlockBytes) -> Place {
        let tile = self.slab_tiles[slot.slab];
        self.usage.add(bytes);
        Place { range: tile.range, offset: self.offset(tile) + u64::from(slot.granule) * BLOCK_GRANULE }
    }

    fn occupy(&mut self, stay: Stay, stream: Stream) {
        let small = self.geometry.small();
        let tile = &mut self.ranges[stay.tile.range].tiles[stay.tile.tile];
        for unit in stay.start / small..stay.end.div_ceil(small) {
            tile.used[unit as usize / 64] |= 1 << (unit % 64);
        }
        self.pages.occupy(tile.page, stay, stream);
    }

    /// What is at a place that is mapped and where a block may start.
    fn locate(&self, place: Place) -> Result<Found, NotLive> {
        let range = self.ranges.get(place.range).ok_or(NotLive::Foreign)?;
        let page_bytes = self.page_bytes(range.class);
        let tile = TileNo { range: place.range, tile: (place.offset / page_bytes) as usize };
        let page = range.tiles.get(tile.tile).ok_or(NotLive::Foreign)?.page;
        let start = place.offset % page_bytes;
        if !start.is_multiple_of(BLOCK_GRANULE) {
            return Err(NotLive::Foreign);
        }
        Ok(match range.class {
            Class::Small => {
                Found::Slab(Slot { slab: page as usize, granule: (start / BLOCK_GRANULE) as u32 })
            }
            Class::Large => Found::Page { tile, page, start },
        })
    }

    /// The bytes of the live block that starts at a byte of a page, at this tile.
    fn block(&self, tile: TileNo, page: u32, start: u64) -> Result<u64, NotLive> {
        match self.pages.stay(page, start, tile) {
            Some(stay) if stay.block > 0 => Ok(stay.block),
            _ => {
                let inside = self.pages.stays(page, tile).any(|stay| (stay.start..stay.end).contains(&start));
                Err(if inside { NotLive::Foreign } else { NotLive::FreedBefore })
            }
        }
    }
}

fn granules(bytes: BlockBytes) -> u32 {
    (bytes.get() / BLOCK_GRANULE) as u32
}

#[cfg(test)]
mod tests;

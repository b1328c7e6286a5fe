//! Which addresses a space has, which page is behind each, and who uses them. Plain code over offsets and page numbers.
//!
//! ```text
//!   range     addresses reserved at once, filled from the left
//!             |---------- window 0 ----------|----- window 1 -----|-- window 2 --|      (not mapped yet)
//!   tiles     | page 0   | page 1   | page 2 | page 0   | page 3  | page 2       |
//!                                              ^ the same page twice: its blocks are never live on the same bytes
//!   blocks    [ whole pages,    tail ]         [  whole page, tail]  [ head  ...
//! ```
//!
//! A block of a large page or more covers the free end of a page that holds blocks already (its *head*), whole pages, and the
//! beginning of one more (its *tail*), each of them if that saves a page. A smaller one lies in the lowest page that has room for
//! it. What is small enough goes to the [slabs](super::slabs), in ranges of their own.
//!
//! The addresses of one stitched block are a *window*. A later block of the same size goes to the oldest window of that size whose
//! memory is free, so that a model's identical layers settle on the same addresses. If there is none it goes to a gap in one of
//! other sizes, or over any run of free tiles, and that is a window of its size from then on. Only then are pages stitched
//! together in a new one. Remote blocks lie on pages with their like only, each in one page or on whole ones. Nothing here
//! depends on what other spaces did: the same requests always lead to the same numbers and offsets, and the arena holds, in each
//! class, the most pages that any one space has needed at a time.

use std::collections::HashSet;

use super::lane::Lane;
use super::page_table::{PageTable, TileNo};
use super::peak::Peak;
use super::sealed::Sealed;
use super::slab::NotABlock;
use super::slabs::{Slabs, Slot};
use crate::pages::Class;
use crate::units::{BLOCK_GRANULE, BlockBytes, Geometry, Stream};

mod growth;
mod held;
mod retained;
mod windows;

pub(super) use growth::{RANGE_PAGES_FIRST, RANGE_PAGES_MAX};
pub(crate) use retained::Unit;
use windows::Windows;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    /// Index of the range.
    pub(crate) range: usize,
    /// Bytes from the range's base.
    pub(crate) offset: u64,
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
    /// Blocks that were ever allocated.
    pub(crate) allocations: u64,
    /// Bytes of the live ones.
    pub(crate) bytes: u64,
    /// The most bytes that were live at once.
    pub(crate) peak_bytes: u64,
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

/// A range of addresses.
#[derive(Debug)]
struct Range {
    class: Class,
    /// For pages of remote blocks, and of nothing else.
    remote: bool,
    bytes: u64,
    /// The page of each tile.
    tiles: Vec<u32>,
    /// One bit for each small page's worth of bytes that any block, living or freed, has ever covered.
    used: Vec<u64>,
}

impl Range {
    /// Whether a lane's pages of a class may show in it: who may use what is mapped there is a matter of the range, and for remote blocks it may
    /// be others.
    fn is_for(&self, class: Class, lane: Lane) -> bool {
        self.class == class && self.remote == lane.remote
    }
}

/// What a place is in.
#[derive(Clone, Copy)]
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
    windows: Windows,
    /// Where each slab is.
    slab_tiles: Vec<TileNo>,
    /// Live blocks that a second stream uses.
    crossing: HashSet<Place>,
    /// Such blocks after they were freed: busy until the seal.
    parked: HashSet<Place>,
    usage: Usage,
    peak: Peak,
}

impl Layout {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            pages: PageTable::new(geometry),
            slabs: Slabs::new(geometry.small()),
            ranges: Vec::new(),
            windows: Windows::default(),
            slab_tiles: Vec::new(),
            crossing: HashSet::new(),
            parked: HashSet::new(),
            usage: Usage::default(),
            peak: Peak::default(),
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

    /// Whether a block of this size goes to the slabs. A low limit, since a space has slabs beside its other pages: what one space
    /// needs of the one, no other can use as the other.
    fn packed(&self, bytes: BlockBytes) -> bool {
        bytes.get() <= (self.geometry.small() / 8).max(BLOCK_GRANULE)
    }

    fn page_bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    fn offset(&self, tile: TileNo) -> u64 {
        tile.tile as u64 * self.page_bytes(self.ranges[tile.range].class)
    }

    fn page(&self, tile: TileNo) -> u32 {
        self.ranges[tile.range].tiles[tile.tile]
    }

    /// Places a block on addresses that are already mapped, if it can.
    pub(crate) fn place(&mut self, bytes: BlockBytes, lane: Lane) -> Option<Place> {
        if self.packed(bytes) {
            let slot = self.slabs.allocate(granules(bytes), lane, self.usage.allocations + 1)?;
            return Some(self.settle_in_slab(slot, bytes));
        }
        if bytes.get() >= self.geometry.large() {
            let window = self.find(bytes.get(), lane)?;
            return Some(self.settle(window, bytes));
        }
        // Where memory was used before, and only then where it was not.
        let length = bytes.get();
        let mut within = self.pages.room(length, lane, false);
        within = within.or_else(|| self.pages.idle_page(length, lane, true).map(|page| (page, 0)));
        // Windows of a remote lane are of whole pages, and stay so.
        if within.is_none()
            && !lane.remote
            && let Some(window) = self.find(length, lane)
        {
            return Some(self.settle(window, bytes));
        }
        within = within.or_else(|| self.pages.room(length, lane, true));
        within = within.or_else(|| self.pages.idle_page(length, lane, false).map(|page| (page, 0)));
        let (page, start) = within?;
        Some(self.settle_within(page, start, bytes))
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
        self.free_found(found, place)
    }

    /// Frees a parked block at once: the work captured on its own stream from now on waits for every
    /// use of it. Returns its bytes.
    pub(crate) fn free_parked(&mut self, place: Place) -> Result<u64, NotLive> {
        if !self.parked.remove(&place) {
            return Err(NotLive::FreedBefore);
        }
        self.free_found(self.locate(place)?, place)
    }

    fn free_found(&mut self, found: Found, place: Place) -> Result<u64, NotLive> {
        let (bytes, serial) = self.live(found)?;
        match found {
            Found::Slab(slot) => {
                self.slabs.free(slot)?;
            }
            Found::Page { tile, page, start } => {
                let window = self.pages.release(page, start).and_then(|stay| stay.window);
                window.into_iter().for_each(|window| self.windows.set_vacant(window, true));
                for next in 1..(start + bytes).div_ceil(self.geometry.large()) as usize {
                    let page = self.page(TileNo { tile: tile.tile + next, ..tile });
                    self.pages.release(page, 0);
                }
            }
        }
        self.usage.remove(bytes);
        if self.peak.has(serial) {
            self.peak.freed(Live { place, bytes, serial });
        }
        Ok(bytes)
    }

    /// Notes that `stream` uses the block too. Without effect if that is its own stream; returns that
    /// one otherwise.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<Option<Stream>, NotLive> {
        let own = match self.locate(place)? {
            Found::Slab(slot) => {
                self.slabs.block(slot)?;
                self.slabs.lane(slot.slab).stream
            }
            Found::Page { tile, page, start } => {
                self.block(tile, page, start)?;
                self.pages.lane(page).stream
            }
        };
        if self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        if own == stream {
            return Ok(None);
        }
        self.crossing.insert(place);
        Ok(Some(own))
    }

    /// One more block is live; its number.
    fn count(&mut self, bytes: BlockBytes) -> u64 {
        let before = self.usage.peak_bytes;
        let serial = self.usage.add(bytes);
        if self.usage.peak_bytes > before {
            self.peak.rise(serial);
        }
        serial
    }

    fn settle_in_slab(&mut self, slot: Slot, bytes: BlockBytes) -> Place {
        let tile = self.slab_tiles[slot.slab];
        self.count(bytes);
        Place { range: tile.range, offset: self.offset(tile) + u64::from(slot.granule) * BLOCK_GRANULE }
    }

    /// What is at a place that is mapped and where a block may start.
    fn locate(&self, place: Place) -> Result<Found, NotLive> {
        let range = self.ranges.get(place.range).ok_or(NotLive::Foreign)?;
        let page_bytes = self.page_bytes(range.class);
        let tile = TileNo { range: place.range, tile: (place.offset / page_bytes) as usize };
        let page = *range.tiles.get(tile.tile).ok_or(NotLive::Foreign)?;
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

    /// Bytes and number of the live block that starts at a place.
    #[inline]
    fn live(&self, found: Found) -> Result<(u64, u64), NotLive> {
        match found {
            Found::Slab(slot) => {
                Ok((u64::from(self.slabs.block(slot)?) * BLOCK_GRANULE, self.slabs.serial(slot)))
            }
            Found::Page { tile, page, start } => self.block(tile, page, start),
        }
    }

    /// Bytes and number of the live block that starts at a byte of a page, at this tile.
    fn block(&self, tile: TileNo, page: u32, start: u64) -> Result<(u64, u64), NotLive> {
        match self.pages.stay(page, start, tile) {
            Some(stay) if stay.block > 0 => Ok((stay.block, stay.serial)),
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

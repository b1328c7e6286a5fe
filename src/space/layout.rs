//! Layout of a space: its addresses, the page of each, and the blocks. Plain code over offsets and
//! page numbers, without driver and other spaces. See docs/design/capture.md.
//!
//! ```text
//!   range     addresses reserved at once, filled from the left
//!             |---------- extent 0 ----------|----- extent 1 -----|-- extent 2 --|   (unmapped)
//!   slots     | page 0   | page 1   | page 2 | page 0   | page 3  | page 2       |
//!                                              ^ mapped twice: live blocks never overlap
//!   blocks    [ whole pages,    tail ]         [  whole page, tail]  [ head  ...
//! ```
//!
//! A block of at least a large page covers the free end of a page in use (*head*), whole pages, and
//! the beginning of a further page (*tail*). Smaller blocks prefer the lowest page with room. The
//! smallest lie in [slabs](super::slabs).
//!
//! An *extent* is the address range of one stitched block. A block takes the oldest free extent of
//! its size, else a gap in another extent or a run of free slots, which becomes an extent.
//! Stitching comes last. Peer-visible (remote) blocks share pages only with their kind, each in one
//! page or on whole pages.
//!
//! Equal requests always give equal numbers and offsets. A page number normally maps the same page
//! in every stitched space, so the arena holds only the highest count per size class.

use std::collections::HashSet;

use super::lane::Lane;
use super::page_table::{PageSlot, PageTable};
use super::peak::Peak;
use super::sealed::Sealed;
use super::slab::NotABlock;
use super::slabs::{Slabs, Slot};
use crate::pages::Class;
use crate::units::{BLOCK_GRANULE, BlockBytes, Geometry, Stream};

mod extents;
mod growth;
mod held;
mod retained;

use extents::Extents;
pub(super) use growth::{RANGE_PAGES_FIRST, RANGE_PAGES_MAX};
pub(crate) use retained::Unit;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Place {
    pub(crate) range: usize,
    pub(crate) offset: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotLive {
    /// No block is live at this address; one may have been.
    FreedBefore,
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

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) blocks: u64,
    pub(crate) allocations: u64,
    pub(crate) bytes: u64,
    pub(crate) peak_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Live {
    pub(crate) place: Place,
    pub(crate) bytes: u64,
    pub(crate) serial: u64,
}

impl Usage {
    /// Returns the number of the new live block.
    pub(crate) fn add(&mut self, bytes: BlockBytes) -> u64 {
        self.blocks += 1;
        self.bytes += bytes.get();
        self.peak_bytes = self.peak_bytes.max(self.bytes);
        self.allocations += 1;
        self.allocations
    }

    pub(crate) fn remove(&mut self, bytes: u64) {
        self.blocks -= 1;
        self.bytes -= bytes;
    }
}

#[derive(Debug)]
struct Range {
    class: Class,
    remote: bool,
    bytes: u64,
    page_slots: Vec<u32>,
    /// One bit per small-page unit: whether any block ever lay there.
    used: Vec<u64>,
}

impl Range {
    /// Access rights belong to the range, and differ for peer-visible blocks.
    fn is_for(&self, class: Class, lane: Lane) -> bool {
        self.class == class && self.remote == lane.remote
    }
}

#[derive(Clone, Copy)]
enum Found {
    Slab(Slot),
    Page { page_slot: PageSlot, page: u32, start: u64 },
}

#[derive(Debug)]
pub(crate) struct Layout {
    geometry: Geometry,
    pages: PageTable,
    slabs: Slabs,
    ranges: Vec<Range>,
    extents: Extents,
    slab_slots: Vec<PageSlot>,
    /// Live blocks used by a second stream.
    crossing: HashSet<Place>,
    /// Freed ones: busy until the seal or `free_parked`.
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
            extents: Extents::default(),
            slab_slots: Vec::new(),
            crossing: HashSet::new(),
            parked: HashSet::new(),
            usage: Usage::default(),
            peak: Peak::default(),
        }
    }

    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    pub(crate) fn pages(&self) -> (usize, usize) {
        (self.slabs.len(), self.pages.used())
    }

    /// Whether the slabs take a block. The limit is low, because slab memory cannot serve as large
    /// pages of other spaces.
    fn packed(&self, bytes: BlockBytes) -> bool {
        bytes.get() <= (self.geometry.small() / 8).max(BLOCK_GRANULE)
    }

    fn page_bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    fn offset(&self, page_slot: PageSlot) -> u64 {
        page_slot.index as u64 * self.page_bytes(self.ranges[page_slot.range].class)
    }

    fn page(&self, page_slot: PageSlot) -> u32 {
        self.ranges[page_slot.range].page_slots[page_slot.index]
    }

    pub(crate) fn place(&mut self, bytes: BlockBytes, lane: Lane) -> Option<Place> {
        if self.packed(bytes) {
            let slot = self.slabs.allocate(granules(bytes), lane, self.usage.allocations + 1)?;
            return Some(self.place_in_slab(slot, bytes));
        }
        if bytes.get() >= self.geometry.large() {
            let extent = self.find(bytes.get(), lane)?;
            return Some(self.place_in_extent(extent, bytes));
        }
        let length = bytes.get();
        let mut within = self.pages.room(length, lane, false);
        within = within.or_else(|| self.pages.idle_page(length, lane, true).map(|page| (page, 0)));
        if within.is_none()
            && !lane.remote
            && let Some(extent) = self.find(length, lane)
        {
            return Some(self.place_in_extent(extent, bytes));
        }
        within = within.or_else(|| self.pages.room(length, lane, true));
        within = within.or_else(|| self.pages.idle_page(length, lane, false).map(|page| (page, 0)));
        let (page, start) = within?;
        Some(self.place_on_page(page, start, bytes))
    }

    /// Returns the freed bytes; 0 if a block used by a second stream is parked instead.
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

    /// Frees a parked block. The caller has verified that later work of its own stream waits for
    /// every use. Returns the bytes.
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
            Found::Page { page_slot, page, start } => {
                let extent = self.pages.release(page, start).and_then(|stay| stay.extent);
                extent.into_iter().for_each(|extent| self.extents.set_vacant(extent, true));
                for next in 1..(start + bytes).div_ceil(self.geometry.large()) as usize {
                    let page = self.page(PageSlot { index: page_slot.index + next, ..page_slot });
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

    /// Returns the block's own stream if different; otherwise has no effect.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<Option<Stream>, NotLive> {
        let own = match self.locate(place)? {
            Found::Slab(slot) => {
                self.slabs.block(slot)?;
                self.slabs.lane(slot.slab).stream
            }
            Found::Page { page_slot, page, start } => {
                self.block(page_slot, page, start)?;
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

    fn count(&mut self, bytes: BlockBytes) -> u64 {
        let before = self.usage.peak_bytes;
        let serial = self.usage.add(bytes);
        if self.usage.peak_bytes > before {
            self.peak.rise(serial);
        }
        serial
    }

    fn place_in_slab(&mut self, slot: Slot, bytes: BlockBytes) -> Place {
        let page_slot = self.slab_slots[slot.slab];
        self.count(bytes);
        Place {
            range: page_slot.range,
            offset: self.offset(page_slot) + u64::from(slot.granule) * BLOCK_GRANULE,
        }
    }

    fn locate(&self, place: Place) -> Result<Found, NotLive> {
        let range = self.ranges.get(place.range).ok_or(NotLive::Foreign)?;
        let page_bytes = self.page_bytes(range.class);
        let page_slot = PageSlot { range: place.range, index: (place.offset / page_bytes) as usize };
        let page = *range.page_slots.get(page_slot.index).ok_or(NotLive::Foreign)?;
        let start = place.offset % page_bytes;
        if !start.is_multiple_of(BLOCK_GRANULE) {
            return Err(NotLive::Foreign);
        }
        Ok(match range.class {
            Class::Small => {
                Found::Slab(Slot { slab: page as usize, granule: (start / BLOCK_GRANULE) as u32 })
            }
            Class::Large => Found::Page { page_slot, page, start },
        })
    }

    /// Returns bytes and number.
    #[inline]
    fn live(&self, found: Found) -> Result<(u64, u64), NotLive> {
        match found {
            Found::Slab(slot) => {
                Ok((u64::from(self.slabs.block(slot)?) * BLOCK_GRANULE, self.slabs.serial(slot)))
            }
            Found::Page { page_slot, page, start } => self.block(page_slot, page, start),
        }
    }

    /// Returns bytes and number.
    fn block(&self, page_slot: PageSlot, page: u32, start: u64) -> Result<(u64, u64), NotLive> {
        match self.pages.stay(page, start, page_slot) {
            Some(stay) if stay.block > 0 => Ok((stay.block, stay.serial)),
            _ => {
                let inside =
                    self.pages.stays(page, page_slot).any(|stay| (stay.start..stay.end).contains(&start));
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

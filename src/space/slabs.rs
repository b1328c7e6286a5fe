//! Slabs of a space: small pages shared by small blocks.

use super::lane::Lane;
use super::slab::{NotABlock, Slab};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slot {
    /// Also the number of its small page.
    pub(crate) slab: usize,
    pub(crate) granule: u32,
}

#[derive(Debug)]
struct Entry {
    slab: Slab,
    lane: Lane,
}

#[derive(Debug)]
pub(crate) struct Slabs {
    page_bytes: u64,
    entries: Vec<Entry>,
}

impl Slabs {
    pub(crate) fn new(page_bytes: u64) -> Self {
        Self { page_bytes, entries: Vec::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Places a block in the first slab of the lane with blocks and room, else in the first empty
    /// slab.
    pub(crate) fn allocate(&mut self, granules: u32, lane: Lane, serial: u64) -> Option<Slot> {
        for empty in [false, true] {
            for (slab, entry) in self.entries.iter_mut().enumerate() {
                if entry.lane == lane
                    && (entry.slab.live() == 0) == empty
                    && let Some(granule) = entry.slab.allocate(granules, serial)
                {
                    return Some(Slot { slab, granule });
                }
            }
        }
        None
    }

    pub(crate) fn add(&mut self, lane: Lane) {
        self.entries.push(Entry { slab: Slab::new(self.page_bytes), lane });
    }

    pub(crate) fn block(&self, slot: Slot) -> Result<u32, NotABlock> {
        self.entries[slot.slab].slab.block(slot.granule)
    }

    pub(crate) fn serial(&self, slot: Slot) -> u64 {
        self.entries[slot.slab].slab.serial(slot.granule)
    }

    pub(crate) fn free(&mut self, slot: Slot) -> Result<u32, NotABlock> {
        self.entries[slot.slab].slab.free(slot.granule)
    }

    /// 0 for an unknown slab.
    pub(crate) fn live(&self, slab: usize) -> u32 {
        self.entries.get(slab).map_or(0, |entry| entry.slab.live())
    }

    pub(crate) fn lane(&self, slab: usize) -> Lane {
        self.entries[slab].lane
    }

    /// Live blocks as (granule, granules, serial).
    pub(crate) fn blocks(&self, slab: usize) -> impl Iterator<Item = (u32, u32, u64)> {
        self.entries[slab].slab.blocks()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::units::Stream;

    #[test]
    fn fills_begun_slabs_of_the_lane_first_then_empty_ones_and_never_another_lanes() {
        for b in [Lane::local(Stream::PER_THREAD), Lane::remote(Stream::LEGACY)] {
            let a = Lane::local(Stream::LEGACY);
            let mut slabs = Slabs::new(8 * 512);
            assert_eq!(slabs.allocate(1, a, 0), None);
            for stream in [a, b, a] {
                slabs.add(stream);
            }
            let slot = |slab, granule| Some(Slot { slab, granule });
            assert_eq!(slabs.allocate(5, a, 0), slot(0, 0));
            assert_eq!(slabs.allocate(5, a, 0), slot(2, 0));
            assert_eq!(slabs.allocate(5, b, 0), slot(1, 0));
            assert_eq!(slabs.free(Slot { slab: 0, granule: 0 }), Ok(5));
            assert_eq!(slabs.allocate(3, a, 0), slot(2, 5));
            assert_eq!(slabs.allocate(4, a, 0), slot(0, 0));
            assert_eq!(slabs.allocate(5, a, 0), None);
        }
    }
}

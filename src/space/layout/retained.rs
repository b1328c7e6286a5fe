//! What is live when a capture ends, and which addresses it keeps from being shared.

use super::{Layout, Live, NotLive, Place, Sealed, TileNo};
use crate::pages::Class;
use crate::units::BLOCK_GRANULE;

/// What a small page's worth of a range's addresses is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// No block was ever there: it needs no memory.
    Idle,
    /// Only blocks that are freed were there. The graph writes there on every replay, and nothing has to last.
    Passing,
    /// A retained block is there.
    Retained,
}

impl Layout {
    /// The live blocks, in address order within a range, parked ones apart.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        let mut blocks = Vec::with_capacity(self.usage.blocks as usize);
        (0..self.ranges.len()).for_each(|range| self.each_block(range, |live| blocks.push(live)));
        blocks
    }

    /// One entry for each small page's worth of addresses of a range, as far as it has tiles. Parked blocks are not retained.
    pub(crate) fn units(&self, range: usize) -> Vec<Unit> {
        let (small, found) = (self.geometry.small(), &self.ranges[range]);
        let units = found.tiles.len() as u64 * (self.page_bytes(found.class) / small);
        let used = |unit: u64| match found.class {
            // There would be no slab if no block had needed it.
            Class::Small => true,
            Class::Large => found.used[unit as usize / 64] >> (unit % 64) & 1 == 1,
        };
        let mut units: Vec<Unit> =
            (0..units).map(|unit| if used(unit) { Unit::Passing } else { Unit::Idle }).collect();
        self.each_block(range, |live| {
            let (from, to) = (live.place.offset, live.place.offset + live.bytes);
            units[(from / small) as usize..to.div_ceil(small) as usize].fill(Unit::Retained);
        });
        units
    }

    /// The capture has ended: what was parked is free now, and what is live is retained.
    pub(crate) fn seal(mut self) -> Sealed {
        self.crossing.clear();
        for place in std::mem::take(&mut self.parked) {
            // A parked place is a live block by construction, so this cannot fail.
            let freed: Result<u64, NotLive> = self.free(place);
            debug_assert!(freed.is_ok(), "a parked block was not live");
        }
        let used = self.ranges.iter_mut().map(|range| std::mem::take(&mut range.used).into_boxed_slice());
        let used = used.collect();
        Sealed::new(self.blocks(), self.usage, self.pages()).with_peak(self.at_peak()).with_used(used)
    }

    /// The blocks that were live when the most bytes were.
    pub(crate) fn at_peak(&self) -> Vec<Live> {
        let parked = self.parked.iter().filter_map(|place| {
            let (bytes, serial) = self.live(self.locate(*place).ok()?).ok()?;
            Some(Live { place: *place, bytes, serial })
        });
        self.peak.blocks(self.blocks().into_iter().chain(parked))
    }

    /// Calls `found` with each block of a range that is not parked.
    fn each_block(&self, range: usize, mut found: impl FnMut(Live)) {
        for tile in (0..self.ranges[range].tiles.len()).map(|tile| TileNo { range, tile }) {
            let (page, base) = (self.page(tile), self.offset(tile));
            let mut report = |start: u64, bytes: u64, serial: u64| {
                let place = Place { range, offset: base + start };
                if bytes > 0 && !self.parked.contains(&place) {
                    found(Live { place, bytes, serial });
                }
            };
            match self.ranges[range].class {
                Class::Small => self.slabs.blocks(page as usize).for_each(|(start, granules, serial)| {
                    report(u64::from(start) * BLOCK_GRANULE, u64::from(granules) * BLOCK_GRANULE, serial);
                }),
                Class::Large => {
                    self.pages.stays(page, tile).for_each(|stay| report(stay.start, stay.block, stay.serial));
                }
            }
        }
    }
}

use super::{Layout, Live, NotLive, PageSlot, Place, Sealed};
use crate::pages::Class;
use crate::units::BLOCK_GRANULE;

/// Use of a small-page unit of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    /// Never used: needs no memory.
    Idle,
    /// Only freed blocks: every replay writes there, but no contents last.
    Passing,
    Retained,
}

impl Layout {
    /// Live blocks in address order, without parked ones.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        let mut blocks = Vec::with_capacity(self.usage.blocks as usize);
        (0..self.ranges.len()).for_each(|range| self.each_block(range, |live| blocks.push(live)));
        blocks
    }

    /// Use of each small-page unit, up to the last slot. Parked blocks are not live-out.
    pub(crate) fn units(&self, range: usize) -> Vec<Unit> {
        let (small, found) = (self.geometry.small(), &self.ranges[range]);
        let units = found.page_slots.len() as u64 * (self.page_bytes(found.class) / small);
        let used = |unit: u64| match found.class {
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

    /// Frees parked blocks and returns the table of live-out blocks.
    pub(crate) fn seal(mut self) -> Sealed {
        self.crossing.clear();
        for place in std::mem::take(&mut self.parked) {
            // Cannot fail: a parked place is always a live block.
            let freed: Result<u64, NotLive> = self.free(place);
            debug_assert!(freed.is_ok(), "a parked block was not live");
        }
        let used = self.ranges.iter_mut().map(|range| std::mem::take(&mut range.used).into_boxed_slice());
        let used = used.collect();
        Sealed::new(self.blocks(), self.usage, self.pages()).with_peak(self.at_peak()).with_used(used)
    }

    pub(crate) fn at_peak(&self) -> Vec<Live> {
        let parked = self.parked.iter().filter_map(|place| {
            let (bytes, serial) = self.live(self.locate(*place).ok()?).ok()?;
            Some(Live { place: *place, bytes, serial })
        });
        self.peak.blocks(self.blocks().into_iter().chain(parked))
    }

    /// Skips parked blocks.
    fn each_block(&self, range: usize, mut found: impl FnMut(Live)) {
        for page_slot in
            (0..self.ranges[range].page_slots.len()).map(|page_slot| PageSlot { range, index: page_slot })
        {
            let (page, base) = (self.page(page_slot), self.offset(page_slot));
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
                    self.pages
                        .stays(page, page_slot)
                        .for_each(|stay| report(stay.start, stay.block, stay.serial));
                }
            }
        }
    }
}

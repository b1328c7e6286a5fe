//! Bump spaces: blocks behind one another, none of whose addresses serves twice.
//!
//! ```text
//!   tape (one an arena)   | page of 2 MiB | 20 MiB            | 44 MiB                     | 20 MiB     |
//!   a space               [ block ][ block             ][ block         ]                  ^ not needed, not mapped
//!   another               [ block                        ][ block                                 ]
//! ```
//!
//! For the segments of a torch MemPool, which stay until the graph goes: there is nothing to stitch. All bump spaces of an arena
//! show the same *tape* of pages from its beginning on; it is as long as the longest of them, and longer by no more than a
//! sixteenth or half a large page, whichever is less. A page is made as long as the block that first needs it, so that a space takes about one map a block.

use std::collections::BTreeMap;

use super::layout::{Live, NotLive, Place, RANGE_PAGES_FIRST, RANGE_PAGES_MAX, Usage};
use super::{Phase, Placement, State};
use crate::error::{Error, Result};
use crate::pages::{Acquired, Reservation, SharedSet};
use crate::units::BlockBytes;

/// A stretch of the tape at the addresses of one range.
#[derive(Debug)]
struct Stretch {
    /// Byte of the tape at the range's base, where a page of the tape begins.
    from: u64,
    /// Byte behind the last that is mapped.
    to: u64,
}

/// The blocks of a bump space.
#[derive(Debug, Default)]
pub(crate) struct Bump {
    /// Bytes of the tape handed out.
    end: u64,
    /// One for each range of the space.
    stretches: Vec<Stretch>,
    /// Range and offset to the block and whether it is live.
    blocks: BTreeMap<(usize, u64), (Live, bool)>,
    /// Pages of the tape shown.
    pages: usize,
    usage: Usage,
}

impl Bump {
    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Pages of the tape this space shows.
    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    /// The live blocks, in address order within a range.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        self.blocks.values().filter(|(_, live)| *live).map(|(block, _)| *block).collect()
    }

    /// Notes that the block at a place is gone; its bytes. They serve no other block.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        self.check(place)?;
        let block = self.blocks.get_mut(&(place.range, place.offset)).ok_or(NotLive::Foreign)?;
        block.1 = false;
        self.usage.remove(block.0.bytes);
        Ok(block.0.bytes)
    }

    /// Whether a live block starts at a place.
    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        match self.blocks.get(&(place.range, place.offset)) {
            Some((_, true)) => Ok(()),
            Some((_, false)) => Err(NotLive::FreedBefore),
            None => Err(NotLive::Foreign),
        }
    }

    /// Bytes of the next range, for `length` bytes at least: it starts and grows as those of a stitched space.
    fn next_range(last: Option<u64>, large: u64, length: u64) -> u64 {
        let doubled =
            last.map_or(large * RANGE_PAGES_FIRST, |bytes| (bytes * 2).min(large * RANGE_PAGES_MAX));
        doubled.max(length.next_multiple_of(large))
    }
}

impl State {
    /// Maps the tape as far as the block needs it and puts the block there.
    ///
    /// On failure nothing is handed out; what is mapped by then stays, and serves the next try.
    pub(super) fn append(&mut self, shared: &SharedSet, bytes: BlockBytes) -> Result<Place> {
        let State { phase, placement, ranges, work, .. } = self;
        let Placement::Bump(bump) = placement else {
            return Err(Error::Internal { what: "a stitched space appends nothing".into() });
        };
        let end = bump.end + bytes.get();
        while bump.stretches.last().is_none_or(|stretch| stretch.to < end) {
            let next = bump.stretches.last().map_or(0, |stretch| stretch.to);
            let Acquired { pin, created } = shared.acquire_tape(next, end)?;
            let behind = next + pin.bytes();
            let fits = bump.stretches.last().zip(ranges.last());
            if fits.is_none_or(|(stretch, range)| behind - stretch.from > range.bytes()) {
                // The new range begins with the page on which the last block ends, which then shows at both.
                let from = shared.tape_page(bump.end);
                let last = ranges.last().map(Reservation::bytes);
                let length = Bump::next_range(last, shared.geometry().large(), behind - from);
                let reserved = Reservation::new(shared.pool(), length);
                drop(pin);
                if created && reserved.is_err() {
                    shared.discard_tape(next);
                }
                ranges.push(reserved?);
                bump.stretches.push(Stretch { from, to: from });
                work.calls += 1 + u64::from(created);
                continue;
            }
            let number = ranges.len() - 1;
            let (stretch, range) = (&mut bump.stretches[number], &mut ranges[number]);
            if let Err((error, pin)) = range.map(next - stretch.from, pin) {
                if pin.is_none() {
                    // A mapping that could not be undone stands where the next page would go.
                    *phase = Phase::Broken;
                }
                drop(pin);
                if created {
                    shared.discard_tape(next);
                }
                return Err(error);
            }
            stretch.to = behind;
            bump.pages += 1;
            work.maps += 1;
            work.calls += 2 + u64::from(created);
        }
        let number = ranges.len() - 1;
        let stretch = &bump.stretches[number];
        let offset = bump.end - stretch.from;
        let place = Place { range: number, offset };
        let live = Live { place, bytes: bytes.get(), serial: bump.usage.add(bytes) };
        bump.blocks.insert((number, offset), (live, true));
        bump.end = end;
        Ok(place)
    }
}

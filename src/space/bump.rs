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
use super::{Common, Phase, Placement, State};
use crate::error::{Error, Result};
use crate::pages::{Change, Reservation};
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
    /// Bytes of addresses that a range has at least.
    reserve: u64,
}

impl Bump {
    /// No blocks yet; ranges of `reserve` bytes at least.
    pub(crate) fn new(reserve: u64) -> Self {
        Self { reserve, ..Self::default() }
    }

    /// Bytes handed out so far: where the next block goes.
    pub(crate) fn end(&self) -> u64 {
        self.end
    }

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

    /// Every block that was handed out: none of their bytes serves another one.
    pub(crate) fn all(&self) -> Vec<Live> {
        self.blocks.values().map(|(block, _)| *block).collect()
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
    fn next_range(&self, last: Option<u64>, large: u64, length: u64) -> u64 {
        let doubled =
            last.map_or(large * RANGE_PAGES_FIRST, |bytes| (bytes * 2).min(large * RANGE_PAGES_MAX));
        doubled.max(length).max(self.reserve).next_multiple_of(large)
    }
}

impl State {
    /// Shows the tape as far as the block needs it and puts the block there. On failure nothing has changed.
    pub(super) fn append(&mut self, common: &Common, space: u64, bytes: BlockBytes) -> Result<Place> {
        self.capture.get_or_insert_with(|| common.pool().capture());
        let Placement::Bump(bump) = &self.placement else {
            return Err(Error::Internal { what: "a stitched space appends nothing".into() });
        };
        let end = bump.end + bytes.get();
        // A range that was reserved ahead begins where the tape does.
        let first = Stretch { from: 0, to: 0 };
        let ahead = bump.stretches.is_empty() && !self.ranges.is_empty();
        let last = if ahead { Some(&first) } else { bump.stretches.last() };
        let shown = last.map_or(0, |stretch| stretch.to);
        let fits = last.zip(self.ranges.last());
        let mut change = Change::on(common.pool());
        let mut begins = None;
        let to = if shown >= end {
            shown
        } else {
            let cells = common.shared.tape(&mut change, shown, end)?;
            let behind = cells.last().map_or(shown, |(at, _, bytes)| at + bytes);
            match fits.filter(|(stretch, range)| behind - stretch.from <= range.bytes()) {
                Some((stretch, range)) => {
                    let pages: Vec<_> = cells.iter().map(|(_, page, _)| *page).collect();
                    if let Err(error) = change.map(range.id(), shown - stretch.from, &pages) {
                        self.undo(change);
                        return Err(error);
                    }
                }
                None => {
                    // The new range begins with the page on which the last block ends, which then shows at both.
                    let from = common.shared.tape_start(bump.end);
                    let cells = common.shared.tape(&mut change, from, end)?;
                    let pages: Vec<_> = cells.iter().map(|(_, page, _)| *page).collect();
                    let large = common.shared.geometry().large();
                    let bytes =
                        bump.next_range(self.ranges.last().map(Reservation::bytes), large, behind - from);
                    let mapped = change
                        .reserve(bytes, space, common.shared.peers())
                        .and_then(|range| change.map(range, 0, &pages));
                    if let Err(error) = mapped {
                        self.undo(change);
                        return Err(error);
                    }
                    begins = Some(from);
                }
            }
            behind
        };
        let (calls, reserved) = change.commit();
        self.adopt(common, calls, reserved);
        let range = self.ranges.len() - 1;
        let Placement::Bump(bump) = &mut self.placement else {
            return Err(Error::Internal { what: "a stitched space appends nothing".into() });
        };
        if ahead {
            bump.stretches.push(first);
        }
        if let Some(from) = begins {
            bump.stretches.push(Stretch { from, to: from });
        }
        let offset = match bump.stretches.last_mut() {
            Some(stretch) => {
                stretch.to = stretch.to.max(to);
                bump.end - stretch.from
            }
            None => return Err(Error::Internal { what: "a bump space shows nothing".into() }),
        };
        bump.pages += calls.maps as usize;
        let place = Place { range, offset };
        let live = Live { place, bytes: bytes.get(), serial: bump.usage.add(bytes) };
        bump.blocks.insert((range, offset), (live, true));
        bump.end = end;
        common.totals.rose_to(end);
        Ok(place)
    }

    /// Undoes a change; a space in which that fails is broken.
    pub(super) fn undo(&mut self, change: Change) {
        if !change.undo() {
            self.phase = Phase::Broken;
        }
    }
}

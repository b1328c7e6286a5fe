//! Bump spaces: blocks are appended, and no address is reused, as for the segments of a torch
//! MemPool.
//!
//! ```text
//!   tape (per arena)   | page of 2 MiB | 20 MiB            | 44 MiB                 | 20 MiB     |
//!   a space            [ block ][ block             ][ block         ]              ^ not mapped
//!   second space       [ block                        ][ block                             ]
//! ```
//!
//! All bump spaces of an arena map the same *tape* of pages from its beginning. The tape exceeds
//! the longest space by at most a sixteenth or half a large page, whichever is less. Each page is
//! as long as the block which first needed it, so a block takes about one map.

use std::collections::BTreeMap;

use super::layout::{Live, NotLive, Place, RANGE_PAGES_FIRST, RANGE_PAGES_MAX, Usage};
use super::{Common, Placement, State};
use crate::error::{Error, Result};
use crate::pages::{Reservation, Transaction};
use crate::units::BlockBytes;

/// Part of the tape mapped in one range.
#[derive(Debug)]
struct Stretch {
    from: u64,
    to: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Bump {
    end: u64,
    stretches: Vec<Stretch>,
    /// Block and liveness, by range and offset.
    blocks: BTreeMap<(usize, u64), (Live, bool)>,
    pages: usize,
    usage: Usage,
    reserve: u64,
}

impl Bump {
    pub(crate) fn new(reserve: u64) -> Self {
        Self { reserve, ..Self::default() }
    }

    pub(crate) fn end(&self) -> u64 {
        self.end
    }

    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    pub(crate) fn pages(&self) -> usize {
        self.pages
    }

    pub(crate) fn blocks(&self) -> Vec<Live> {
        self.blocks.values().filter(|(_, live)| *live).map(|(block, _)| *block).collect()
    }

    /// Returns every block ever allocated: no two overlap.
    pub(crate) fn all(&self) -> Vec<Live> {
        self.blocks.values().map(|(block, _)| *block).collect()
    }

    /// Marks a block as freed. Returns its bytes, which are never reused.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        self.check(place)?;
        let block = self.blocks.get_mut(&(place.range, place.offset)).ok_or(NotLive::Foreign)?;
        block.1 = false;
        self.usage.remove(block.0.bytes);
        Ok(block.0.bytes)
    }

    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        match self.blocks.get(&(place.range, place.offset)) {
            Some((_, true)) => Ok(()),
            Some((_, false)) => Err(NotLive::FreedBefore),
            None => Err(NotLive::Foreign),
        }
    }

    /// Returns the bytes of the next range, at least `length`.
    fn next_range(&self, last: Option<u64>, large: u64, length: u64) -> u64 {
        let doubled =
            last.map_or(large * RANGE_PAGES_FIRST, |bytes| (bytes * 2).min(large * RANGE_PAGES_MAX));
        doubled.max(length).max(self.reserve).next_multiple_of(large)
    }
}

impl State {
    /// Maps the tape as far as needed and appends a block. Changes nothing on error.
    pub(super) fn append(&mut self, common: &Common, space: u64, bytes: BlockBytes) -> Result<Place> {
        self.stage.begin_capture(common)?;
        let Placement::Bump(bump) = &self.placement else {
            return Err(Error::Internal { what: "a stitched space appends nothing".into() });
        };
        let end = bump.end + bytes.get();
        // A range reserved in advance begins at the start of the tape.
        let first = Stretch { from: 0, to: 0 };
        let ahead = bump.stretches.is_empty() && !self.ranges.is_empty();
        let last = if ahead { Some(&first) } else { bump.stretches.last() };
        let shown = last.map_or(0, |stretch| stretch.to);
        let fits = last.zip(self.ranges.last());
        let mut transaction = Transaction::on(common.pool());
        let mut begins = None;
        let to = if shown >= end {
            shown
        } else {
            let cells = common.shared.tape(&mut transaction, shown, end)?;
            let behind = cells.last().map_or(shown, |(at, _, bytes)| at + bytes);
            match fits.filter(|(stretch, range)| behind - stretch.from <= range.bytes()) {
                Some((stretch, range)) => {
                    let pages: Vec<_> = cells.iter().map(|(_, page, _)| *page).collect();
                    if let Err(error) = transaction.map(range.id(), shown - stretch.from, &pages) {
                        self.undo(transaction);
                        return Err(error);
                    }
                }
                None => {
                    // The page of the last block's end is then mapped in both ranges.
                    let from = common.shared.tape_start(bump.end);
                    let cells = common.shared.tape(&mut transaction, from, end)?;
                    let pages: Vec<_> = cells.iter().map(|(_, page, _)| *page).collect();
                    let large = common.shared.geometry().large();
                    let bytes =
                        bump.next_range(self.ranges.last().map(Reservation::bytes), large, behind - from);
                    let mapped = transaction
                        .reserve(bytes, space, common.shared.peers())
                        .and_then(|range| transaction.map(range, 0, &pages));
                    if let Err(error) = mapped {
                        self.undo(transaction);
                        return Err(error);
                    }
                    begins = Some(from);
                }
            }
            behind
        };
        let (calls, reserved) = transaction.commit();
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
        common.totals.raise_high_water(end);
        Ok(place)
    }

    pub(super) fn undo(&mut self, transaction: Transaction) {
        if !transaction.undo() {
            self.stage.break_off();
        }
    }
}

//! Which blocks are live at a space's peak, without a copy of them whenever it rises.
//!
//! A block was live then if its number is no greater than that of the block with which the peak was reached, and it was not freed
//! before. So it is enough to note that number, and whatever of those is freed since.

use super::layout::Live;

/// The peak of a space so far.
#[derive(Debug, Default)]
pub(super) struct Peak {
    /// The number of the block with which it was reached.
    serial: u64,
    /// Blocks that were live then and are gone since.
    gone: Vec<Live>,
}

impl Peak {
    /// More bytes are live than ever before, with this block.
    pub(super) fn rise(&mut self, serial: u64) {
        self.serial = serial;
        self.gone.clear();
    }

    /// Whether a block of this number was live then, if it was not freed before.
    #[inline]
    pub(super) fn has(&self, serial: u64) -> bool {
        serial <= self.serial
    }

    /// One of them is gone.
    pub(super) fn freed(&mut self, live: Live) {
        self.gone.push(live);
    }

    /// The blocks of the peak; `live` are all that are live now.
    pub(super) fn blocks(&self, live: impl Iterator<Item = Live>) -> Vec<Live> {
        let there = live.filter(|live| self.has(live.serial));
        there.chain(self.gone.iter().copied()).collect()
    }
}

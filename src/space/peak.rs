//! Blocks live at a space's peak, found without copying the live blocks at every new peak.
//!
//! A block was live at the peak if its number is at most the number of the block which reached the
//! peak, and it was not freed before. So the peak's block number and the blocks freed since are
//! enough.

use super::layout::Live;

#[derive(Debug, Default)]
pub(super) struct Peak {
    /// Number of the block which reached the peak.
    serial: u64,
    /// Blocks live at the peak and freed since.
    gone: Vec<Live>,
}

impl Peak {
    /// Records a new peak, reached by this block.
    pub(super) fn rise(&mut self, serial: u64) {
        self.serial = serial;
        self.gone.clear();
    }

    /// Returns whether a block of this number was live at the peak, unless freed before.
    #[inline]
    pub(super) fn has(&self, serial: u64) -> bool {
        serial <= self.serial
    }

    pub(super) fn freed(&mut self, live: Live) {
        self.gone.push(live);
    }

    /// Returns the blocks of the peak; `live` are all blocks live now.
    pub(super) fn blocks(&self, live: impl Iterator<Item = Live>) -> Vec<Live> {
        let there = live.filter(|live| self.has(live.serial));
        there.chain(self.gone.iter().copied()).collect()
    }
}

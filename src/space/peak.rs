//! Blocks live at a space's peak: numbered up to the block which reached the peak, and not freed
//! before. So no copy is made at every new peak.

use super::layout::Live;

#[derive(Debug, Default)]
pub(super) struct Peak {
    serial: u64,
    gone: Vec<Live>,
}

impl Peak {
    pub(super) fn rise(&mut self, serial: u64) {
        self.serial = serial;
        self.gone.clear();
    }

    /// Whether a block of this number was live at the peak, unless freed before.
    #[inline]
    pub(super) fn has(&self, serial: u64) -> bool {
        serial <= self.serial
    }

    pub(super) fn freed(&mut self, live: Live) {
        self.gone.push(live);
    }

    pub(super) fn blocks(&self, live: impl Iterator<Item = Live>) -> Vec<Live> {
        let there = live.filter(|live| self.has(live.serial));
        there.chain(self.gone.iter().copied()).collect()
    }
}

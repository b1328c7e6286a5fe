//! What executables cost in device memory, learnt from what making them took.

/// What an executable and a node of one take before anything was measured, in bytes: the upper ends of what was seen on an H200 with
/// CUDA 13.0 (docs/performance.md).
const EXECUTABLE: u64 = 128 << 10;
const NODE: u64 = 3 << 10;

/// The size of a set of executables.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Executables: one for each graph of the set.
    pub executables: u64,
    /// Nodes of all of them.
    pub nodes: u64,
}

impl Size {
    /// The bytes one would expect, having measured nothing.
    fn expected(self) -> u64 {
        self.executables * EXECUTABLE + self.nodes * NODE
    }
}

/// Device memory of all executables of a pool.
///
/// The driver keeps what a destroyed executable had, and makes the next ones from it: so bytes follow the most that there ever was.
#[derive(Debug, Default)]
pub(super) struct Ledger {
    /// Expected bytes of what there is, and the most of that.
    expected: u64,
    most_expected: u64,
    /// Bytes by which the device had less when executables were made.
    measured: u64,
    pub(super) now: Size,
}

impl Ledger {
    /// Something was made, and the device had so many bytes less afterwards.
    pub(super) fn made(&mut self, size: Size, bytes: u64) {
        self.now.executables += size.executables;
        self.now.nodes += size.nodes;
        self.expected += size.expected();
        self.most_expected = self.most_expected.max(self.expected);
        self.measured += bytes;
    }

    pub(super) fn dropped(&mut self, size: Size) {
        self.now.executables -= size.executables;
        self.now.nodes -= size.nodes;
        self.expected -= size.expected();
    }

    /// Bytes that executables took from the device and that the driver keeps for them.
    pub(super) fn bytes(&self) -> u64 {
        self.measured
    }

    /// The part of those that is in use.
    pub(super) fn bytes_in_use(&self) -> u64 {
        self.scaled(self.expected)
    }

    /// What a set of that size takes, by what the others took.
    pub(super) fn share(&self, size: Size) -> u64 {
        self.scaled(size.expected())
    }

    /// Bytes that there would be with one more set of that size.
    pub(super) fn bytes_with(&self, size: Size) -> u64 {
        self.measured + self.scaled((self.expected + size.expected()).saturating_sub(self.most_expected))
    }

    fn scaled(&self, expected: u64) -> u64 {
        if self.measured == 0 || self.most_expected == 0 {
            return expected;
        }
        (u128::from(expected) * u128::from(self.measured) / u128::from(self.most_expected)) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DECODER: Size = Size { executables: 1, nodes: 320 };

    #[test]
    fn what_was_dropped_is_used_again_before_the_device_gives_more() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.bytes_with(DECODER), DECODER.expected());
        ledger.made(DECODER, 500_000);
        assert_eq!((ledger.bytes(), ledger.share(DECODER)), (500_000, 500_000));
        assert_eq!(ledger.bytes_with(DECODER), 1_000_000);
        ledger.dropped(DECODER);
        assert_eq!(ledger.bytes_with(DECODER), 500_000);
        ledger.made(DECODER, 0);
        assert_eq!(ledger.bytes(), 500_000);
    }
}

//! Device memory of executables, estimated from what instantiating them took.

/// Bytes of an executable and of one of its nodes before anything was measured: the upper ends of what an H200 with CUDA 13.0 took
/// (docs/performance.md).
const EXECUTABLE: u64 = 128 << 10;
const NODE: u64 = 3 << 10;
/// Instantiations that are measured.
const MEASURES: u32 = 32;

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
    /// Bytes by which the device had less when executables were made: the first ones measured, later ones estimated from those.
    measured: u64,
    measures: u32,
    pub(super) now: Size,
}

impl Ledger {
    /// Whether the next instantiation is worth measuring: asking the device twice costs more host time than instantiating a small graph.
    pub(super) fn wants_measure(&self) -> bool {
        self.measures < MEASURES
    }

    /// Executables were instantiated. `bytes`: by how much the device had less afterwards, where that was measured.
    pub(super) fn made(&mut self, size: Size, bytes: Option<u64>) {
        self.now.executables += size.executables;
        self.now.nodes += size.nodes;
        self.expected += size.expected();
        let grown = self.expected.saturating_sub(self.most_expected);
        self.measured += match bytes {
            // What other threads allocate in the same moment is measured too: no executable takes several times the estimate.
            Some(bytes) => bytes.min(4 * size.expected()),
            // The driver has memory of destroyed executables for the rest.
            None => self.scaled(grown),
        };
        self.most_expected += grown;
        self.measures += u32::from(bytes.is_some());
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

    /// Bytes that a set of that size takes, estimated from those measured so far.
    pub(super) fn share(&self, size: Size) -> u64 {
        self.scaled(size.expected())
    }

    /// Bytes in use once some executables are made and others destroyed, estimated likewise.
    pub(super) fn bytes_after(&self, made: Size, dropped: Size) -> u64 {
        self.scaled((self.expected + made.expected()).saturating_sub(dropped.expected()))
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
    fn destroyed_executables_leave_room_for_as_many() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.bytes_after(DECODER, Size::default()), DECODER.expected());
        ledger.made(DECODER, Some(500_000));
        assert_eq!((ledger.bytes(), ledger.share(DECODER)), (500_000, 500_000));
        assert_eq!(ledger.bytes_after(DECODER, Size::default()), 1_000_000);
        assert_eq!(ledger.bytes_after(DECODER, DECODER), 500_000);
        ledger.dropped(DECODER);
        assert_eq!(ledger.bytes_after(DECODER, Size::default()), 500_000);
        ledger.made(DECODER, Some(0));
        assert_eq!(ledger.bytes(), 500_000);
    }

    #[test]
    fn executables_that_were_not_measured_are_estimated_from_those_that_were() {
        let mut ledger = Ledger::default();
        (0..MEASURES).for_each(|_| ledger.made(DECODER, Some(1000)));
        assert!(!ledger.wants_measure());
        ledger.made(DECODER, None);
        assert_eq!(ledger.bytes(), 1000 * u64::from(MEASURES + 1));
        ledger.dropped(DECODER);
        ledger.made(DECODER, None);
        assert_eq!(ledger.bytes(), 1000 * u64::from(MEASURES + 1), "memory of a destroyed one serves again");
    }
}

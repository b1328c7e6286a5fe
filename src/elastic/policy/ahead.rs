//! When to commit ahead of need, and when to give back. Arithmetic over steps; it has no clock and no thread.

use crate::error::{Error, Result};

/// How many free blocks there are to be.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// With fewer, more are committed.
    pub low: u64,
    /// So many are committed then; what is beyond is given back.
    pub high: u64,
}

/// What to do before the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// Nothing.
    Nothing,
    /// Commit so many more blocks.
    Commit(u64),
    /// Give the memory of so many free blocks back.
    GiveBack(u64),
}

/// Decides at each step. Demand that was seen lately is added to both marks for as many steps as a commit takes, and is forgotten
/// slowly; what is beyond the high mark goes only after it has been there for a while, so that memory does not go to and fro.
#[derive(Clone, Debug)]
pub struct PreCommit {
    marks: Watermarks,
    lead: u64,
    residence: u64,
    /// Blocks a step: the most seen lately.
    demand: u64,
    /// Since which step there has been too much.
    since: Option<u64>,
}

impl PreCommit {
    /// `lead`: how many steps a commit may take. `residence`: for how many steps there must be too much before some goes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the low mark is above the high one.
    pub fn new(marks: Watermarks, lead: u64, residence: u64) -> Result<Self> {
        if marks.low > marks.high {
            let expected = "at most the high mark";
            return Err(Error::InvalidArgument { what: "the low mark", value: marks.low.into(), expected });
        }
        Ok(Self { marks, lead, residence, demand: 0, since: None })
    }

    /// Before step number `step`, which never falls: `free` blocks are backed and unused, `coming` are being committed, and `granted` were
    /// handed out since the last call.
    pub fn step(&mut self, step: u64, free: u64, coming: u64, granted: u64) -> Ahead {
        // By an eighth a step, and by one at least.
        let faded = self.demand - self.demand.div_ceil(8);
        self.demand = faded.max(granted);
        let soon = self.demand.saturating_mul(self.lead);
        let (low, high) = (self.marks.low.saturating_add(soon), self.marks.high.saturating_add(soon));
        let ready = free.saturating_add(coming);
        if ready < low {
            self.since = None;
            return Ahead::Commit(high - ready);
        }
        // What is still coming is not there to be given back.
        if ready <= high || free == 0 {
            self.since = None;
            return Ahead::Nothing;
        }
        let since = *self.since.get_or_insert(step);
        if step.saturating_sub(since) < self.residence {
            return Ahead::Nothing;
        }
        self.since = None;
        Ahead::GiveBack((ready - high).min(free))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn policy(residence: u64) -> PreCommit {
        PreCommit::new(Watermarks { low: 5, high: 10 }, 2, residence).unwrap()
    }

    #[test]
    fn it_fills_to_the_high_mark_below_the_low_one_and_counts_what_is_coming() {
        let mut ahead = policy(0);
        assert_eq!(ahead.step(0, 4, 0, 0), Ahead::Commit(6));
        assert_eq!(ahead.step(1, 4, 6, 0), Ahead::Nothing);
        assert_eq!(ahead.step(2, 5, 0, 0), Ahead::Nothing);
        // Three blocks a step, for two steps.
        assert_eq!(ahead.step(3, 10, 0, 3), Ahead::Commit(6));
        assert!(PreCommit::new(Watermarks { low: 2, high: 1 }, 0, 0).is_err());
    }

    #[test]
    fn what_is_too_much_goes_after_a_while_and_not_if_it_was_needed_in_between() {
        let mut ahead = policy(3);
        assert!((0..3).all(|step| ahead.step(step, 14, 0, 0) == Ahead::Nothing));
        assert_eq!(ahead.step(3, 14, 0, 0), Ahead::GiveBack(4));
        assert_eq!(ahead.step(4, 14, 0, 0), Ahead::Nothing);
        assert_eq!(ahead.step(5, 7, 0, 0), Ahead::Nothing);
        assert_eq!(ahead.step(6, 14, 0, 0), Ahead::Nothing);
        assert_eq!(ahead.step(9, 14, 0, 0), Ahead::GiveBack(4));
    }

    proptest! {
        /// Nothing that was given back is committed again at the next step unless more is wanted.
        #[test]
        fn giving_back_never_calls_for_a_commit(free in 0_u64..100, granted in 0_u64..10, low in 0_u64..20, more in 0_u64..20) {
            let mut ahead = PreCommit::new(Watermarks { low, high: low + more }, 3, 0).unwrap();
            let free = match ahead.step(0, free, 0, granted) {
                Ahead::Nothing => free,
                Ahead::Commit(blocks) => free + blocks,
                Ahead::GiveBack(blocks) => free - blocks,
            };
            let next = ahead.step(1, free, 0, granted);
            prop_assert!(next == Ahead::Nothing, "{next:?}");
        }
    }
}

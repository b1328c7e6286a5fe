use crate::error::{Error, Result};

/// Targets for the number of free blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Watermarks {
    /// Commit below this number of free blocks.
    pub low: u64,
    /// Fill up to this number; give more blocks back.
    pub high: u64,
}

/// Action before the next step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ahead {
    /// No action.
    Nothing,
    /// Commit this many more blocks.
    Commit(u64),
    /// Free the memory of this many free blocks.
    GiveBack(u64),
}

/// Decides at each step when to commit ahead of need and when to give back:
/// `vmmgraph_pre_commit_create`.
#[derive(Clone, Debug)]
pub struct PreCommit {
    marks: Watermarks,
    lead: u64,
    residence: u64,
    /// In blocks a step.
    demand: u64,
    /// First step with too many blocks.
    since: Option<u64>,
}

impl PreCommit {
    /// See `vmmgraph_pre_commit_create`. Fails if the low mark is above the high mark.
    pub fn new(marks: Watermarks, lead: u64, residence: u64) -> Result<Self> {
        if marks.low > marks.high {
            let expected = "at most the high mark";
            return Err(Error::InvalidArgument { what: "the low mark", value: marks.low.into(), expected });
        }
        Ok(Self { marks, lead, residence, demand: 0, since: None })
    }

    /// Decides before a step: `vmmgraph_pre_commit_step`.
    pub fn step(&mut self, step: u64, free: u64, coming: u64, granted: u64) -> Ahead {
        // Decays by an eighth a step, at least by one.
        let faded = self.demand - self.demand.div_ceil(8);
        self.demand = faded.max(granted);
        let soon = self.demand.saturating_mul(self.lead);
        let (low, high) = (self.marks.low.saturating_add(soon), self.marks.high.saturating_add(soon));
        let ready = free.saturating_add(coming);
        if ready < low {
            self.since = None;
            return Ahead::Commit(high - ready);
        }
        // Blocks being committed cannot be given back.
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
        assert!((6..9).all(|step| ahead.step(step, 14, 0, 0) == Ahead::Nothing));
        assert_eq!(ahead.step(9, 14, 0, 0), Ahead::GiveBack(4));
    }

    proptest! {
        /// Without more demand, the step after giving back commits nothing.
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

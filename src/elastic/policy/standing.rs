//! What stays mapped between the steps that use it.

use std::collections::VecDeque;

use crate::error::{Error, Result};

/// How much of memory that comes and goes with steps is to stay: the most that one of the last steps used. So memory that is needed
/// again and again is not given back in between, and what a rare step needed goes after a while. Less than a part of it too much is
/// no reason to move anything.
#[derive(Clone, Debug)]
pub struct Standing {
    residence: u64,
    gap: u64,
    /// Step and amount, the amounts falling: whatever a later step exceeded is forgotten.
    used: VecDeque<(u64, u64)>,
}

impl Standing {
    /// `residence`: for how many steps it stays. `gap`: what is less than one in so many parts too much stays too.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a gap of 0.
    pub fn new(residence: u64, gap: u64) -> Result<Self> {
        if gap == 0 {
            return Err(Error::InvalidArgument { what: "the gap", value: 0, expected: "1 part at least" });
        }
        Ok(Self { residence, gap, used: VecDeque::new() })
    }

    /// Step number `step`, which never falls, uses so much.
    pub fn used(&mut self, step: u64, amount: u64) {
        while self.used.back().is_some_and(|(_, known)| *known <= amount) {
            self.used.pop_back();
        }
        self.used.push_back((step, amount));
    }

    /// How much is to stay at a step; what was used longer ago is forgotten.
    pub fn wanted(&mut self, step: u64) -> u64 {
        while self.used.front().is_some_and(|(at, _)| step.saturating_sub(*at) > self.residence) {
            self.used.pop_front();
        }
        self.used.front().map_or(0, |(_, amount)| *amount)
    }

    /// How much of `held` may be given back at a step, if anything.
    pub fn too_much(&mut self, step: u64, held: u64) -> Option<u64> {
        let spare = held.saturating_sub(self.wanted(step));
        (spare > 0 && spare >= held.div_ceil(self.gap)).then_some(spare)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Against one that keeps all that ever was.
        #[test]
        fn it_wants_the_most_of_the_last_steps(
            residence in 0_u64..8, gap in 1_u64..6, steps in prop::collection::vec((0_u64..3, 0_u64..20, 0_u64..40), 1..60),
        ) {
            let mut standing = Standing::new(residence, gap).unwrap();
            let (mut at, mut all) = (0, Vec::new());
            for (later, amount, held) in steps {
                at += later;
                standing.used(at, amount);
                all.push((at, amount));
                let after = at + later;
                let recent = all.iter().filter(|(step, _)| after - step <= residence);
                let most = recent.map(|(_, amount)| *amount).max().unwrap_or(0);
                let spare = held.saturating_sub(most);
                // At least a gap's part of it, in rational numbers.
                let expected = (spare > 0 && spare * gap >= held).then_some(spare);
                prop_assert_eq!(standing.clone().wanted(after), most);
                prop_assert_eq!(standing.clone().too_much(after, held), expected);
            }
        }
    }

    #[test]
    fn a_gap_of_no_part_is_refused() {
        assert!(Standing::new(4, 0).is_err());
    }
}

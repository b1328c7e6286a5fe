use std::collections::VecDeque;

use crate::error::{Error, Result};

/// Amount of step memory to keep mapped: the maximum use of the recent steps, and a small excess.
#[derive(Clone, Debug)]
pub struct Standing {
    residence: u64,
    gap: u64,
    /// With falling amounts: an amount exceeded by a later step is dropped.
    used: VecDeque<(u64, u64)>,
}

impl Standing {
    /// `residence`: steps for which an amount is kept. `gap`, not 0: an excess below 1/`gap` is
    /// kept.
    pub fn new(residence: u64, gap: u64) -> Result<Self> {
        if gap == 0 {
            return Err(Error::InvalidArgument { what: "the gap", value: 0, expected: "1 part at least" });
        }
        Ok(Self { residence, gap, used: VecDeque::new() })
    }

    /// Records the use of step `step`, which never decreases.
    pub fn used(&mut self, step: u64, amount: u64) {
        while self.used.back().is_some_and(|(_, known)| *known <= amount) {
            self.used.pop_back();
        }
        self.used.push_back((step, amount));
    }

    /// Returns the amount to keep at a step.
    pub fn wanted(&mut self, step: u64) -> u64 {
        while self.used.front().is_some_and(|(at, _)| step.saturating_sub(*at) > self.residence) {
            self.used.pop_front();
        }
        self.used.front().map_or(0, |(_, amount)| *amount)
    }

    /// Returns the part of `held` to free at a step, if any.
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

use crate::error::{Error, Result};

/// A sequence that grows by one token a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growing {
    /// Tokens with memory now.
    pub tokens: u64,
    /// Tokens until its end, known or predicted.
    pub left: u64,
}

/// Predicts the peak memory of sequences which grow by one token a step until their end, so that
/// later arrivals do not preempt running sequences.
#[derive(Clone, Copy, Debug)]
pub struct Admission {
    block_tokens: u64,
}

impl Admission {
    /// Creates a policy for blocks of this many tokens, not 0.
    pub fn new(block_tokens: u64) -> Result<Self> {
        if block_tokens == 0 {
            return Err(Error::InvalidArgument { what: "tokens a block", value: 0, expected: "1 at least" });
        }
        Ok(Self { block_tokens })
    }

    /// Returns the peak number of blocks of these sequences, at most one too many a sequence.
    #[must_use]
    pub fn peak(&self, sequences: &[Growing]) -> u64 {
        let mut order: Vec<_> = sequences.iter().filter(|one| one.tokens > 0 || one.left > 0).collect();
        order.sort_unstable_by_key(|one| std::cmp::Reverse(one.left));
        // Totals peak just before a sequence ends.
        let (mut tokens, mut most) = (0_u64, 0);
        for (count, one) in (1_u64..).zip(order) {
            tokens = tokens.saturating_add(one.tokens);
            let then = tokens.saturating_add(one.left.saturating_mul(count));
            most = most.max((then / self.block_tokens).saturating_add(count));
        }
        most
    }

    /// Whether the sequences and one more stay within `blocks`.
    #[must_use]
    pub fn fits(&self, running: &[Growing], more: Growing, blocks: u64) -> bool {
        let all: Vec<Growing> = running.iter().copied().chain([more]).collect();
        self.peak(&all) <= blocks
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Reference model, step by step.
    fn twin(block: u64, sequences: &[Growing]) -> u64 {
        let last = sequences.iter().map(|one| one.left).max().unwrap_or(0);
        let at = |step: u64| {
            let there = sequences.iter().filter(|one| one.left >= step);
            there.map(|one| (one.tokens + step).div_ceil(block)).sum::<u64>()
        };
        (0..=last).map(at).max().unwrap_or(0)
    }

    proptest! {
        #[test]
        fn the_peak_is_never_less_than_what_comes_and_at_most_a_block_each_more(
            block in 1_u64..20, sequences in prop::collection::vec((0_u64..100, 0_u64..60), 0..12),
        ) {
            let all: Vec<Growing> = sequences.into_iter().map(|(tokens, left)| Growing { tokens, left }).collect();
            let admission = Admission::new(block).unwrap();
            let (peak, exact) = (admission.peak(&all), twin(block, &all));
            prop_assert!(peak >= exact && peak <= exact + all.len() as u64, "{peak} for {exact}");
            if let Some((more, running)) = all.split_last() {
                prop_assert!(admission.fits(running, *more, peak) && (peak == 0 || !admission.fits(running, *more, peak - 1)));
            }
        }
    }

    #[test]
    fn numbers_beyond_all_are_the_most() {
        let one = Growing { tokens: u64::MAX, left: u64::MAX };
        assert_eq!(Admission::new(1).unwrap().peak(&[one, one]), u64::MAX);
    }

    #[test]
    fn a_block_of_nothing_is_refused() {
        assert!(Admission::new(0).is_err());
    }
}

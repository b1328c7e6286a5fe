use std::collections::VecDeque;

use crate::error::{Error, Result};

/// Predicts the final number of generated tokens of a sequence: a quantile of the recently ended
/// longer sequences.
#[derive(Clone, Debug)]
pub struct Lengths {
    /// In order of their ends.
    recent: VecDeque<u64>,
    sorted: Vec<u64>,
    window: usize,
    per_mille: u64,
    first: u64,
}

impl Lengths {
    /// See `vmmgraph_lengths_create`. Fails for an empty window or a `per_mille` above 1000.
    pub fn new(window: usize, per_mille: u64, first: u64) -> Result<Self> {
        let wrong = |what, value, expected| Err(Error::InvalidArgument { what, value, expected });
        if window == 0 {
            return wrong("the window of lengths", 0, "1 at least");
        }
        if per_mille > 1000 {
            return wrong("the quantile of lengths", per_mille.into(), "1000 per mille at most");
        }
        Ok(Self { recent: VecDeque::new(), sorted: Vec::new(), window, per_mille, first })
    }

    /// Records the tokens of an ended sequence.
    pub fn ended(&mut self, tokens: u64) {
        if self.recent.len() == self.window
            && let Some(old) = self.recent.pop_front()
            && let Ok(place) = self.sorted.binary_search(&old)
        {
            self.sorted.remove(place);
        }
        self.recent.push_back(tokens);
        let place = self.sorted.partition_point(|known| *known < tokens);
        self.sorted.insert(place, tokens);
    }

    /// Predicts the final tokens of a sequence with `generated` tokens.
    #[must_use]
    pub fn total(&self, generated: u64) -> u64 {
        let longer = self.sorted.partition_point(|known| *known <= generated);
        let count = self.sorted.len() - longer;
        let place = longer + count.saturating_sub(1) * self.per_mille as usize / 1000;
        let known = self.sorted.get(place).copied();
        known.unwrap_or_else(|| generated.saturating_add(self.first))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_says_what_a_sort_of_the_last_ones_says(
            window in 1_usize..12, per_mille in 0_u64..=1000, ended in prop::collection::vec(1_u64..30, 0..40), generated in 0_u64..35,
        ) {
            let mut lengths = Lengths::new(window, per_mille, 7).unwrap();
            ended.iter().for_each(|tokens| lengths.ended(*tokens));
            let last = ended.iter().rev().take(window);
            let mut longer: Vec<u64> = last.copied().filter(|tokens| *tokens > generated).collect();
            longer.sort_unstable();
            let expected = longer.get(longer.len().saturating_sub(1) * per_mille as usize / 1000);
            prop_assert_eq!(lengths.total(generated), expected.copied().unwrap_or(generated + 7));
            prop_assert!(lengths.total(generated) > generated);
        }
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        assert!(Lengths::new(0, 500, 1).is_err() && Lengths::new(1, 1001, 1).is_err());
    }
}

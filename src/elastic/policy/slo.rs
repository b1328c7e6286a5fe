use std::collections::VecDeque;

use crate::error::{Error, Result};

/// Iterations considered.
const WINDOW: usize = 5;
/// Late iterations which cause a change.
const VIOLATIONS: usize = 3;

/// Result of an iteration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SloChange {
    /// No change.
    Keep,
    /// Doubled: first tokens were late.
    Raised(u64),
    /// Halved: later tokens were late.
    Lowered(u64),
}

/// Controls a size by late tokens, by eLLM's rule: `vmmgraph_slo_control_step`.
#[derive(Clone, Debug)]
pub struct SloControl {
    least: u64,
    most: u64,
    value: u64,
    recent: VecDeque<(bool, bool)>,
}

impl SloControl {
    /// Keeps the size between `least` (not 0) and `most`, from `value`; [`Error::InvalidArgument`]
    /// if out of bounds.
    pub fn new(least: u64, value: u64, most: u64) -> Result<Self> {
        let wrong =
            |what, value: u64, expected| Err(Error::InvalidArgument { what, value: value.into(), expected });
        if least == 0 {
            return wrong("the least size", 0, "1 at least");
        }
        if value < least || value > most {
            return wrong("the first size", value, "from the least to the most");
        }
        Ok(Self { least, most, value, recent: VecDeque::with_capacity(WINDOW) })
    }

    /// Returns the current size.
    #[must_use]
    pub fn value(&self) -> u64 {
        self.value
    }

    /// Ends an iteration: whether a first token was late (TTFT), or a later one (TPOT).
    pub fn step(&mut self, first_late: bool, other_late: bool) -> SloChange {
        if self.recent.len() == WINDOW {
            self.recent.pop_front();
        }
        self.recent.push_back((first_late, other_late));
        let first = self.recent.iter().filter(|(first, _)| *first).count() >= VIOLATIONS;
        let other = self.recent.iter().filter(|(_, other)| *other).count() >= VIOLATIONS;
        let (next, change): (u64, fn(u64) -> SloChange) = match (first, other) {
            (true, false) => (self.value.saturating_mul(2).min(self.most), SloChange::Raised),
            (false, true) => ((self.value / 2).max(self.least), SloChange::Lowered),
            _ => return SloChange::Keep,
        };
        self.recent.clear();
        if next == self.value {
            return SloChange::Keep;
        }
        self.value = next;
        change(next)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn three_of_five_change_it(iterations in prop::collection::vec(any::<(bool, bool)>(), 1..80)) {
            let mut control = SloControl::new(3, 20, 100).unwrap();
            let (mut value, mut since) = (20_u64, Vec::new());
            for (first_late, other_late) in iterations {
                since.push((first_late, other_late));
                let last: Vec<(bool, bool)> = since.iter().rev().take(5).copied().collect();
                let many = |late: fn(&(bool, bool)) -> bool| last.iter().filter(|one| late(one)).count() > 2;
                let (first, other) = (many(|one| one.0), many(|one| one.1));
                let before = value;
                if first != other {
                    value = if first { (value * 2).min(100) } else { (value / 2).max(3) };
                    since.clear();
                }
                let expected = match value.cmp(&before) {
                    std::cmp::Ordering::Equal => SloChange::Keep,
                    std::cmp::Ordering::Greater => SloChange::Raised(value),
                    std::cmp::Ordering::Less => SloChange::Lowered(value),
                };
                prop_assert_eq!(control.step(first_late, other_late), expected);
                prop_assert_eq!(control.value(), value);
            }
        }
    }

    #[test]
    fn sizes_that_make_no_sense_are_refused() {
        assert!(
            SloControl::new(0, 1, 2).is_err()
                && SloControl::new(2, 1, 4).is_err()
                && SloControl::new(1, 5, 4).is_err()
        );
    }
}

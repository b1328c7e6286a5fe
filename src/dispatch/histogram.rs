//! Histogram of step shapes.

use std::collections::BTreeMap;

use super::key::{AXES, Axis, Key};

/// Number of steps of real traffic per shape.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    steps: BTreeMap<Key, u64>,
}

impl Histogram {
    /// Adds `steps` steps of a shape.
    pub fn record(&mut self, shape: Key, steps: u64) {
        if steps > 0 {
            let count = self.steps.entry(shape).or_default();
            *count = count.saturating_add(steps);
        }
    }

    /// Returns the same steps with only `axes` kept.
    #[must_use]
    pub fn project(&self, axes: &[Axis]) -> Self {
        let mut projected = Self::default();
        for (shape, steps) in self.iter() {
            let mut key = Key { variant: shape.variant, extents: [0; AXES] };
            for axis in axes {
                key = key.with(*axis, shape.extent(*axis));
            }
            projected.record(key, steps);
        }
        projected
    }

    /// Returns the shapes and their counts, above zero.
    pub fn iter(&self) -> impl Iterator<Item = (Key, u64)> + '_ {
        self.steps.iter().map(|(shape, steps)| (*shape, *steps))
    }

    /// Returns the number of different shapes.
    #[must_use]
    pub fn shapes(&self) -> usize {
        self.steps.len()
    }

    /// Returns the number of steps.
    #[must_use]
    pub fn total(&self) -> u128 {
        self.steps.values().map(|steps| u128::from(*steps)).sum()
    }
}

impl FromIterator<(u32, u64)> for Histogram {
    fn from_iter<I: IntoIterator<Item = (u32, u64)>>(steps: I) -> Self {
        let mut histogram = Self::default();
        for (tokens, steps) in steps {
            histogram.record(Key::tokens(tokens), steps);
        }
        histogram
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_that_become_equal_are_counted_together() {
        let mut histogram = Histogram::default();
        histogram.record(Key::tokens(8).with(Axis::Batch, 2), 3);
        histogram.record(Key::tokens(8).with(Axis::Batch, 4), 4);
        histogram.record(Key::tokens(9), 0);
        assert_eq!((histogram.shapes(), histogram.total()), (2, 7));
        assert_eq!(histogram.project(&[Axis::Tokens]), Histogram::from_iter([(8, 7)]));
    }
}

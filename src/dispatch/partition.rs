//! The cheapest cuts of a sequence into runs: an exact dynamic programme.
//!
//! ```text
//!   items    0 1 2 3 4 5 6        cheapest[k][j]: items before j in k runs
//!   runs    [0 1][2][3 4 5]  6          = min over i of cheapest[k-1][i] + cost(i..j)
//! ```

/// A cost that no sum reaches: the run is not allowed.
pub(super) const FORBIDDEN: u128 = u128::MAX;

/// Cheapest costs of every prefix in every number of runs.
pub(super) struct Cuts {
    cheapest: Vec<Vec<u128>>,
    last_cut: Vec<Vec<u32>>,
}

impl Cuts {
    /// Cuts `items` items into up to `runs` runs. `costs(j, row)` sets `row[i]` to the cost of the run `i..j` for every `i < j`;
    /// a longer run of the same end must not cost less.
    pub(super) fn new(items: usize, runs: usize, mut costs: impl FnMut(usize, &mut [u128])) -> Self {
        let mut cheapest = vec![vec![FORBIDDEN; items + 1]; runs + 1];
        let mut last_cut = vec![vec![0; items + 1]; runs + 1];
        cheapest[0][0] = 0;
        let mut row = vec![0; items];
        for j in 1..=items {
            costs(j, &mut row[..j]);
            for k in 1..=runs.min(j) {
                let (mut best, mut from) = (FORBIDDEN, 0);
                for i in (k - 1..j).rev() {
                    // Longer runs cost no less, so nothing further on can win.
                    if row[i] >= best {
                        break;
                    }
                    let cost = cheapest[k - 1][i].saturating_add(row[i]);
                    if cost < best {
                        (best, from) = (cost, i);
                    }
                }
                cheapest[k][j] = best;
                last_cut[k][j] = from as u32;
            }
        }
        Self { cheapest, last_cut }
    }

    /// The cost of the first `end` items in exactly `runs` runs; [`FORBIDDEN`] if there is no way.
    pub(super) fn cost(&self, runs: usize, end: usize) -> u128 {
        self.cheapest[runs][end]
    }

    /// Those runs, last first. Only for a cost that is not forbidden.
    pub(super) fn runs(&self, mut runs: usize, mut end: usize) -> Vec<std::ops::Range<usize>> {
        let mut found = Vec::new();
        while runs > 0 && end > 0 {
            let start = self.last_cut[runs][end] as usize;
            found.push(start..end);
            (runs, end) = (runs - 1, start);
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// All ways to cut, one after the other.
    fn naive(cost: &dyn Fn(usize, usize) -> u128, runs: usize, end: usize) -> u128 {
        match (runs, end) {
            (0, 0) => 0,
            (0, _) => FORBIDDEN,
            _ => (0..end)
                .map(|i| naive(cost, runs - 1, i).saturating_add(cost(i, end)))
                .min()
                .unwrap_or(FORBIDDEN),
        }
    }

    proptest! {
        #[test]
        fn no_other_cut_is_cheaper(
            steps in prop::collection::vec((0..50_u128, 0..6_u128), 1..9), limit in 0..300_u128, runs in 0..9_usize,
        ) {
            // Costs of the kind that are used: what the last item's size leaves empty, forbidden above a limit.
            let cost = |i: usize, j: usize| {
                let top: u128 = steps[..j].iter().map(|(gap, _)| gap).sum();
                let mut sizes = steps.iter().scan(0, |size, (gap, count)| { *size += gap; Some((*size, *count)) });
                let cost: u128 = sizes.by_ref().take(j).skip(i).map(|(size, count)| (top - size) * count).sum();
                if cost > limit { FORBIDDEN } else { cost }
            };
            let cuts = Cuts::new(steps.len(), runs, |j, row| {
                for (i, place) in row.iter_mut().enumerate() { *place = cost(i, j); }
            });
            for k in 0..=runs {
                for end in 0..=steps.len() {
                    let found = cuts.cost(k, end);
                    prop_assert_eq!(found, naive(&cost, k, end));
                    if found < FORBIDDEN {
                        let mut ranges = cuts.runs(k, end);
                        ranges.reverse();
                        prop_assert_eq!(ranges.len(), k);
                        prop_assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
                        prop_assert_eq!(ranges.iter().map(|run| cost(run.start, run.end)).sum::<u128>(), found);
                    }
                }
            }
        }
    }
}

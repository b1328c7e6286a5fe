//! Cheapest cuts of a sequence into runs, by exact dynamic programming.
//!
//! ```text
//!   items    0 1 2 3 4 5 6        cheapest[k][j]: items before j in k runs
//!   runs    [0 1][2][3 4 5]  6          = min over i of cheapest[k-1][i] + cost(i..j)
//! ```

/// No sum reaches this value.
pub(super) const FORBIDDEN: u128 = u128::MAX;

/// Cheapest cost of every prefix for every number of runs.
pub(super) struct Cuts {
    cheapest: Vec<Vec<u128>>,
    last_cut: Vec<Vec<u32>>,
}

impl Cuts {
    /// `costs(j, row)` sets `row[i]` to the cost of the run `i..j` for every `i < j`. Of runs with
    /// the same end, a longer one must not cost less.
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
                    // Longer runs cost no less, so the rest cannot win.
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

    /// For costs where `cost(a, d) + cost(b, c) >= cost(a, c) + cost(b, d)` for a <= b <= c <= d:
    /// the start of the last run grows with the end, so each number of runs takes O(`items` log
    /// `items`) steps.
    pub(super) fn of_monotone(items: usize, runs: usize, cost: impl Fn(usize, usize) -> u128) -> Self {
        let mut cheapest = vec![vec![FORBIDDEN; items + 1]; runs + 1];
        let mut last_cut = vec![vec![0; items + 1]; runs + 1];
        cheapest[0][0] = 0;
        for k in 1..=runs.min(items) {
            let (before, now) = cheapest.split_at_mut(k);
            let (before, now, cuts) = (&before[k - 1], &mut now[0], &mut last_cut[k]);
            // Ends without a cut, and possible cuts.
            let mut open = vec![(k..items + 1, k - 1..items)];
            while let Some((ends, within)) = open.pop() {
                if ends.is_empty() {
                    continue;
                }
                let end = ends.start + ends.len() / 2;
                let (mut best, mut from) = (FORBIDDEN, within.start);
                for start in (within.start..within.end.min(end)).rev() {
                    let run = cost(start, end);
                    // Longer runs cost no less, so the rest cannot win.
                    if run >= best {
                        break;
                    }
                    let sum = before[start].saturating_add(run);
                    if sum < best {
                        (best, from) = (sum, start);
                    }
                }
                now[end] = best;
                cuts[end] = from as u32;
                open.push((ends.start..end, within.start..from + 1));
                open.push((end + 1..ends.end, from..within.end));
            }
        }
        Self { cheapest, last_cut }
    }

    /// Cost of the first `end` items in exactly `runs` runs; [`FORBIDDEN`] if impossible.
    pub(super) fn cost(&self, runs: usize, end: usize) -> u128 {
        self.cheapest[runs][end]
    }

    /// Runs of the cheapest cut, last first. The cost must not be forbidden.
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

    /// Tries all cuts.
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
            // Realistic costs: the padding below the last item's size, forbidden above a limit.
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

        #[test]
        fn monotone_costs_are_cut_alike_in_fewer_steps(
            steps in prop::collection::vec((0..50_u128, 0..6_u128), 1..40), runs in 0..41_usize,
        ) {
            let size = |item: usize| steps[..=item].iter().map(|(gap, _)| gap).sum::<u128>();
            let cost = |i: usize, j: usize| {
                steps[i..j].iter().enumerate().map(|(at, (_, count))| (size(j - 1) - size(i + at)) * count).sum()
            };
            let all = Cuts::new(steps.len(), runs, |j, row| {
                for (i, place) in row.iter_mut().enumerate() { *place = cost(i, j); }
            });
            let few = Cuts::of_monotone(steps.len(), runs, cost);
            prop_assert_eq!(few.cheapest, all.cheapest);
            prop_assert_eq!(few.last_cut, all.last_cut);
        }
    }

    #[test]
    fn steps_grow_by_little_more_than_the_items() {
        let steps = |items: usize| {
            let asked = std::cell::Cell::new(0_u64);
            Cuts::of_monotone(items, 16, |i, j| {
                asked.set(asked.get() + 1);
                // Steps at multiples of 7 delay the early exit.
                ((j - i) as u128).pow(2) / 7
            });
            asked.get()
        };
        let (few, many) = (steps(1_000), steps(10_000));
        assert!(many < 20 * few, "{few} and {many} steps");
    }
}

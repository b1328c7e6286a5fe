//! Plan: the buckets with the least waste for given traffic and limits.
//!
//! Along one axis the plan is exact: the best buckets have sizes which occur, and each serves a run
//! of neighbouring sizes. The cheapest cut into runs is a dynamic programme in O(shapes x log
//! shapes x graphs), or O(shapes^2 x graphs) with several axes:
//!
//! ```text
//!   steps  █       ▂
//!          █ ▆     █ ▃   ▁         a bucket at the last shape of each run;
//!          1 2 3 4 8 9   20        shapes beyond the last run are eager
//!         └───┘   └───┘ └──┘
//! ```
//!
//! With several axes, shapes are ordered by weight, and the bucket of a run covers all its shapes.
//! Variants cannot share a graph.

use std::collections::BTreeMap;

use crate::error::{Error, Result};

use super::bucket::BucketSet;
use super::budget::{Budget, Costs, Limit};
use super::histogram::Histogram;
use super::key::{AXES, Key, Weights};
use super::partition::{Cuts, FORBIDDEN};

/// Shapes times graphs in one variant.
const MAX_CELLS: usize = 1 << 24;

/// Shapes of one variant differing along several axes: quadratic.
const MAX_SHAPES: usize = 1 << 14;
/// When distributing graphs over variants.
const MAX_SUMS: usize = 1 << 28;

/// Waste of a set of buckets for given traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waste {
    /// Weight of the padding in graphs.
    pub padding: u128,
    /// Steps run by graphs.
    pub graph_steps: u128,
    /// Steps not covered by a bucket.
    pub eager_steps: u128,
}

impl Waste {
    /// Returns the total cost in the unit of padding.
    #[must_use]
    pub fn cost(&self, costs: &Costs) -> u128 {
        self.padding.saturating_add(self.eager_steps.saturating_mul(u128::from(costs.eager_step)))
    }
}

/// A bucket of a plan and its savings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedBucket {
    /// The bucket.
    pub key: Key,
    /// Steps run by the bucket.
    pub steps: u128,
    /// Weight of the padding in those steps.
    pub padding: u128,
    /// Additional cost of those steps without the bucket.
    pub saves: u128,
}

/// A chosen set of buckets.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The buckets.
    pub buckets: BucketSet,
    /// In the order of bucket numbers.
    pub bought: Vec<PlannedBucket>,
    /// Limits of the choice.
    pub limit: Limit,
    /// Waste for the planned traffic.
    pub waste: Waste,
    /// Cost of the best choice of at most k graphs, from k = 0.
    pub curve: Vec<u128>,
}

/// Returns the waste of a set of buckets for given traffic.
#[must_use]
pub fn evaluate(buckets: &BucketSet, traffic: &Histogram) -> Waste {
    evaluate_by(buckets, traffic, |shape| buckets.nearest(shape))
}

/// The bucket of each shape is chosen by `choose`.
fn evaluate_by(buckets: &BucketSet, traffic: &Histogram, choose: impl Fn(&Key) -> Option<usize>) -> Waste {
    let mut waste = Waste::default();
    for (shape, steps) in traffic.iter() {
        let steps = u128::from(steps);
        match choose(&shape) {
            Some(number) => {
                waste.graph_steps += steps;
                waste.padding = waste.padding.saturating_add(steps * padding(buckets, number, &shape));
            }
            None => waste.eager_steps += steps,
        }
    }
    waste
}

fn padding(buckets: &BucketSet, number: usize, shape: &Key) -> u128 {
    let (weights, relevant) = (buckets.weights(), buckets.relevant(shape));
    let bucket = buckets.get(number).map_or(0, |bucket| weights.of(&bucket));
    u128::from(bucket - weights.of(&relevant))
}

struct Group {
    shapes: Vec<(Key, u64)>,
    cuts: Cuts,
    /// Per number of graphs: cost, graphs used, leading shapes served.
    ways: Vec<(u128, usize, usize)>,
}

impl Group {
    fn new(shapes: Vec<(Key, u64)>, weights: Weights, limit: &Limit, costs: &Costs) -> Result<Self> {
        // Shapes are ordered by weight.
        let room =
            limit.weight.map_or(0, |most| shapes.partition_point(|(shape, _)| weights.of(shape) <= most));
        let graphs = room.min(usize::try_from(limit.graphs).unwrap_or(usize::MAX));
        if (room + 1).saturating_mul(graphs + 1) > MAX_CELLS {
            let expected = "at most 2^24: round the shapes, or limit the graphs";
            let value = (room as i128 + 1) * (graphs as i128 + 1);
            return Err(Error::InvalidArgument { what: "shapes times graphs", value, expected });
        }
        // The bucket of a run is then its last shape.
        let nested = shapes[..room].windows(2).all(|pair| pair[1].0.join(&pair[0].0) == pair[1].0);
        if !nested && room > MAX_SHAPES {
            let expected = "at most 2^14 of several axes: round the shapes";
            return Err(Error::InvalidArgument { what: "shapes", value: room as i128, expected });
        }
        let cuts = if nested {
            Self::cuts_of_nested(&shapes, room, graphs, weights)
        } else {
            Cuts::new(room, graphs, |end, row| {
                let mut bucket = shapes[end - 1].0;
                let (mut steps, mut served) = (0_u128, 0_u128);
                for start in (0..end).rev() {
                    let (shape, count) = shapes[start];
                    bucket = bucket.join(&shape);
                    steps += u128::from(count);
                    served = served.saturating_add(u128::from(count) * u128::from(weights.of(&shape)));
                    let weight = weights.of(&bucket);
                    row[start] = if limit.weight.is_none_or(|most| weight > most) {
                        FORBIDDEN
                    } else {
                        u128::from(weight).saturating_mul(steps).saturating_sub(served)
                    };
                }
            })
        };
        let mut eager = vec![0_u128; shapes.len() + 1];
        for (place, (_, count)) in shapes.iter().enumerate().rev() {
            let cost = u128::from(*count).saturating_mul(u128::from(costs.eager_step));
            eager[place] = eager[place + 1].saturating_add(cost);
        }
        let mut ways: Vec<(u128, usize, usize)> = Vec::with_capacity(graphs + 1);
        for used in 0..=graphs {
            let best = (0..=room).map(|end| (cuts.cost(used, end).saturating_add(eager[end]), used, end));
            // Of equal costs, choose fewer graphs.
            ways.extend(ways.last().copied().into_iter().chain(best).min_by_key(|way| (way.0, way.1)));
        }
        Ok(Self { shapes, cuts, ways })
    }

    /// Computes the cuts of nested shapes with prefix sums.
    fn cuts_of_nested(shapes: &[(Key, u64)], room: usize, graphs: usize, weights: Weights) -> Cuts {
        let mut sums = vec![(0_u128, 0_u128)];
        for (shape, count) in &shapes[..room] {
            let (steps, served) = sums.last().copied().unwrap_or_default();
            let more = u128::from(*count).saturating_mul(u128::from(weights.of(shape)));
            sums.push((steps + u128::from(*count), served.saturating_add(more)));
        }
        Cuts::of_monotone(room, graphs, |start, end| {
            let (steps, served) = (sums[end].0 - sums[start].0, sums[end].1 - sums[start].1);
            u128::from(weights.of(&shapes[end - 1].0)).saturating_mul(steps).saturating_sub(served)
        })
    }

    fn buckets(&self, graphs: usize) -> Vec<Key> {
        let Some((_, used, end)) = self.ways.get(graphs).copied() else { return Vec::new() };
        let runs = self.cuts.runs(used, end).into_iter();
        runs.map(|run| {
            self.shapes[run]
                .iter()
                .map(|(shape, _)| *shape)
                .fold(Key::default(), |all, shape| shape.join(&all))
        })
        .collect()
    }
}

/// Chooses buckets for this traffic. Without known traffic, record every size once.
///
/// # Errors
/// [`Error::InvalidArgument`] for a shape of size 0 on all axes, for too much work (round the
/// shapes to multiples then), and as [`Budget::limit`].
pub fn plan(traffic: &Histogram, weights: Weights, budget: &Budget, costs: &Costs) -> Result<Plan> {
    let limit = budget.limit(costs)?;
    let mut variants = BTreeMap::<u32, Vec<(Key, u64)>>::new();
    for (shape, steps) in traffic.iter() {
        if shape.extents == [0; AXES] {
            let expected = "above zero along some axis";
            return Err(Error::InvalidArgument { what: "a shape's size", value: 0, expected });
        }
        variants.entry(shape.variant).or_default().push((shape, steps));
    }
    let mut groups = Vec::with_capacity(variants.len());
    for mut shapes in variants.into_values() {
        shapes.sort_by_key(|(shape, _)| (weights.of(shape), *shape));
        groups.push(Group::new(shapes, weights, &limit, costs)?);
    }

    // `curve[k]` is the least cost of the groups so far with k graphs, `dealt[g][k]` the share of
    // group g.
    let (mut sums, mut shares) = (0_usize, 0_usize);
    let mut curve = vec![0_u128];
    let mut dealt = Vec::with_capacity(groups.len());
    for group in &groups {
        let most =
            usize::try_from(limit.graphs).unwrap_or(usize::MAX).min(curve.len() + group.ways.len() - 2);
        sums = sums.saturating_add(curve.len().saturating_mul(group.ways.len()));
        shares = shares.saturating_add(most + 1);
        if sums > MAX_SUMS || shares > MAX_CELLS {
            let (what, expected) = ("graphs times variants", "fewer: limit the graphs, or round the shapes");
            return Err(Error::InvalidArgument { what, value: shares as i128, expected });
        }
        let mut next = vec![(FORBIDDEN, 0); most + 1];
        for (before, cost) in curve.iter().enumerate() {
            for (share, way) in group.ways.iter().enumerate().take_while(|(share, _)| before + share <= most)
            {
                let sum = cost.saturating_add(way.0);
                if sum < next[before + share].0 {
                    next[before + share] = (sum, share);
                }
            }
        }
        curve = next.iter().map(|(cost, _)| *cost).collect();
        dealt.push(next);
    }
    // `ways` and so `curve` never rise: use no more graphs than reduce the cost.
    let mut left = curve.iter().position(|cost| Some(cost) == curve.last()).unwrap_or(0);
    curve.truncate(left + 1);
    let mut keys = Vec::new();
    for (group, dealt) in groups.iter().zip(&dealt).rev() {
        let share = dealt[left].1;
        keys.extend(group.buckets(share));
        left -= share;
    }
    // Two runs may have the same bucket.
    keys.sort_unstable();
    keys.dedup();

    let buckets = BucketSet::new(keys, weights)?;
    let bought = what_each_buys(&buckets, traffic, costs)?;
    let waste = evaluate(&buckets, traffic);
    Ok(Plan { buckets, bought, limit, waste, curve })
}

fn what_each_buys(buckets: &BucketSet, traffic: &Histogram, costs: &Costs) -> Result<Vec<PlannedBucket>> {
    let mut served = vec![Histogram::default(); buckets.len()];
    for (shape, steps) in traffic.iter() {
        if let Some(number) = buckets.nearest(&shape) {
            served[number].record(shape, steps);
        }
    }
    let mut bought = Vec::with_capacity(buckets.len());
    for (number, (key, served)) in buckets.iter().zip(&served).enumerate() {
        let waste = evaluate(buckets, served);
        let without = if buckets.is_alone_along_an_axis(number) {
            let others = BucketSet::new(buckets.iter().filter(|other| *other != key), buckets.weights())?;
            evaluate(&others, served)
        } else {
            evaluate_by(buckets, served, |shape| buckets.covering(shape).find(|other| *other != number))
        };
        let without = without.cost(costs);
        let saves = without.saturating_sub(waste.padding);
        bought.push(PlannedBucket { key, steps: waste.graph_steps, padding: waste.padding, saves });
    }
    Ok(bought)
}

#[cfg(test)]
mod tests;

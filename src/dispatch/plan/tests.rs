use proptest::prelude::*;

use super::*;
use crate::dispatch::key::Axis;
use crate::dispatch::{LimitedBy, vllm_sizes, xllm_sizes};

fn graphs(graphs: u32) -> Budget {
    Budget { graphs: Some(graphs), ..Budget::default() }
}

fn plan_tokens(traffic: &Histogram, limit: u32) -> Plan {
    plan(traffic, Weights::default(), &graphs(limit), &Costs::default()).unwrap()
}

/// Decode batches of a quiet and of a busy service, and prompt lengths with peaks, waves and a long
/// tail.
fn histograms() -> [(&'static str, Histogram); 3] {
    let quiet = (1..=64).map(|batch: u32| (batch, 100_000 / u64::from(batch * batch)));
    let busy = (1..=512_u32).map(|batch| {
        let distance = i64::from(batch) - 200;
        (batch, 40_000 / (10 + (distance * distance / 50) as u64) + u64::from(batch % 7))
    });
    let prompts = (1..=500_u32).map(|step| (step + step * step / 500, u64::from(1 + 5000 / step)));
    [
        ("quiet decode", quiet.collect()),
        ("busy decode", busy.collect()),
        ("prompts", prompts.map(|(tokens, steps)| (tokens.min(512), steps)).collect()),
    ]
}

#[test]
fn a_plan_wastes_no_more_than_the_usual_lists_with_as_many_graphs() {
    println!("{:<14}{:<6}{:>7}{:>12}{:>12}", "traffic", "list", "graphs", "its waste", "plan");
    for (name, traffic) in histograms() {
        let top = traffic.iter().map(|(shape, _)| shape.extent(Axis::Tokens)).max().unwrap();
        for (list, sizes) in [("xLLM", xllm_sizes(top)), ("vLLM", vllm_sizes(top.next_multiple_of(16)))] {
            let count = sizes.len() as u32;
            let theirs = evaluate(&BucketSet::of_tokens(sizes).unwrap(), &traffic);
            let ours = plan_tokens(&traffic, count).waste;
            assert_eq!((theirs.eager_steps, ours.eager_steps), (0, 0));
            println!("{name:<14}{list:<6}{count:>7}{:>12}{:>12}", theirs.padding, ours.padding);
            assert!(ours.padding < theirs.padding, "{name}, {list}");
        }
    }
}

#[test]
fn a_bucket_says_what_it_buys() {
    let traffic = Histogram::from_iter([(1, 10), (7, 5), (8, 4), (20, 1)]);
    let plan = plan_tokens(&traffic, 3);
    let bought: Vec<_> =
        plan.bought.iter().map(|b| (b.key.extents[0], b.steps, b.padding, b.saves)).collect();
    let eager = u128::from(Costs::default().eager_step);
    assert_eq!(bought, [(1, 10, 0, 70), (8, 9, 5, 13 * 5 + 12 * 4 - 5), (20, 1, 0, eager)]);
    assert_eq!(plan.waste, Waste { padding: 5, graph_steps: 20, eager_steps: 0 });
    assert_eq!(plan.curve, [20 * eager, 19 * 10 + 13 * 5 + 12 * 4, 75, 5]);
    // A fourth graph saves 5, a fifth nothing.
    assert_eq!(plan_tokens(&traffic, 9).buckets.len(), 4);
}

#[test]
fn every_limit_binds() {
    let traffic: Histogram = (1..=100).map(|tokens| (tokens, 1)).collect();
    let costs = Costs { graph_bytes: 10, pool_base_bytes: 100, pool_unit_bytes: 2, ..Costs::default() };
    let budget = Budget { graph_bytes: Some(75), pool_bytes: Some(200), ..Budget::default() };
    let planned = plan(&traffic, Weights::default(), &budget, &costs).unwrap();
    assert_eq!((planned.buckets.len(), planned.limit.by), (7, LimitedBy::GraphBytes));
    assert_eq!(planned.buckets.iter().last(), Some(Key::tokens(50)));
    assert_eq!(planned.waste.eager_steps, 50);

    let nothing = Budget { pool_bytes: Some(99), ..budget };
    let planned = plan(&traffic, Weights::default(), &nothing, &costs).unwrap();
    assert!(planned.buckets.is_empty() && planned.bought.is_empty());
    assert_eq!(planned.waste.eager_steps, 100);
    assert_eq!(plan_tokens(&traffic, 0).buckets.len(), 0);
    assert_eq!(plan_tokens(&Histogram::default(), 5).curve, [0]);
}

#[test]
fn cheap_eager_steps_are_left_eager() {
    let traffic = Histogram::from_iter([(1, 1000), (400, 1)]);
    let costs = Costs { eager_step: 100, ..Costs::default() };
    let planned = plan(&traffic, Weights::default(), &graphs(1), &costs).unwrap();
    assert_eq!(planned.buckets.iter().collect::<Vec<_>>(), [Key::tokens(1)]);
    assert_eq!(planned.waste, Waste { padding: 0, graph_steps: 1000, eager_steps: 1 });
}

#[test]
fn hostile_numbers_are_errors_or_answers() {
    let huge = Histogram::from_iter([(1, u64::MAX), (u32::MAX, u64::MAX)]);
    assert_eq!(plan_tokens(&huge, 1).buckets.len(), 1);
    let costs = Costs { eager_step: u64::MAX, ..Costs::default() };
    assert_eq!(plan(&huge, Weights::default(), &Budget::default(), &costs).unwrap().buckets.len(), 2);
    let zero = Histogram::from_iter([(0, 1)]);
    assert!(plan(&zero, Weights::default(), &graphs(1), &costs).is_err());
    let wide: Histogram = (1..=20_000).map(|tokens| (tokens, 1)).collect();
    assert!(plan(&wide, Weights::default(), &Budget::default(), &costs).is_err());
}

/// Tries all sets of at most `left` of these buckets.
fn brute_force(candidates: &[Key], left: u32, traffic: &Histogram, weights: Weights, costs: &Costs) -> u128 {
    (0_u32..1 << candidates.len())
        .filter(|set| set.count_ones() <= left)
        .map(|set| {
            let chosen = (0..candidates.len()).filter(|bit| set >> bit & 1 == 1).map(|bit| candidates[bit]);
            evaluate(&BucketSet::new(chosen, weights).unwrap(), traffic).cost(costs)
        })
        .min()
        .unwrap()
}

proptest! {
    #[test]
    fn along_one_axis_no_set_of_buckets_costs_less(
        steps in prop::collection::vec((1..7_u32, 0..2_u32, 1..20_u64), 1..10),
        limit in 0..6_u32,
        eager_step in prop_oneof![Just(1 << 52), 0..10_u64],
        most in prop_oneof![Just(None), (0..8_u64).prop_map(Some)],
    ) {
        let mut traffic = Histogram::default();
        for (tokens, variant, steps) in &steps {
            traffic.record(Key::tokens(*tokens).of_variant(*variant), *steps);
        }
        let budget = Budget { pool_bytes: most.map(|most| most * 3), ..graphs(limit) };
        let costs = Costs { eager_step, pool_unit_bytes: 3, ..Costs::default() };
        let planned = plan(&traffic, Weights::default(), &budget, &costs).unwrap();
        // Every size is a candidate, occurring or not; only the smaller ones fit the pool.
        let top = most.map_or(6, |most| most.min(6) as u32);
        let candidates: Vec<Key> =
            (1..=top).flat_map(|size| (0..2).map(move |variant| Key::tokens(size).of_variant(variant))).collect();
        let best = brute_force(&candidates, limit, &traffic, Weights::default(), &costs);
        prop_assert_eq!(planned.waste.cost(&costs), best);
        prop_assert!(planned.buckets.len() <= limit as usize);
        prop_assert_eq!(planned.curve.last().copied(), Some(best));
        prop_assert!(planned.curve.is_sorted_by(|a, b| a > b));
        prop_assert_eq!(planned.waste.graph_steps + planned.waste.eager_steps, traffic.total());
    }

    #[test]
    fn along_two_axes_a_plan_is_sound(
        steps in prop::collection::vec((1..5_u32, 1..3_u32, 1..20_u64), 1..8), limit in 1..4_u32,
    ) {
        let mut traffic = Histogram::default();
        for (tokens, batch, steps) in &steps {
            traffic.record(Key::tokens(*tokens).with(Axis::Batch, *batch), *steps);
        }
        let weights = Weights::new([2, 3, 0, 0]).unwrap();
        let planned = plan(&traffic, weights, &graphs(limit), &Costs::default()).unwrap();
        let cost = planned.waste.cost(&Costs::default());
        prop_assert_eq!(planned.waste.eager_steps, 0);
        prop_assert!(planned.buckets.len() <= limit as usize);
        // The reported cost holds, between the best of all sets and one bucket for all shapes.
        prop_assert!(cost <= *planned.curve.last().unwrap());
        let candidates: Vec<Key> = (1..5)
            .flat_map(|tokens| (1..3).map(move |batch| Key::tokens(tokens).with(Axis::Batch, batch)))
            .collect();
        prop_assert!(cost >= brute_force(&candidates, limit, &traffic, weights, &Costs::default()));
        let all = traffic.iter().fold(Key::default(), |all, (shape, _)| all.join(&shape));
        let one = evaluate(&BucketSet::new([all], weights).unwrap(), &traffic).cost(&Costs::default());
        prop_assert!(cost <= one);
    }
}

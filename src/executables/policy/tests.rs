use super::*;

const SIZE: Size = Size { executables: 1, nodes: 300 };

fn policy(limit: usize) -> Policy {
    let mut policy = Policy::default();
    policy.set_limits(Limits { graphs: Some(limit), bytes: None });
    policy
}

fn add(policy: &mut Policy, count: usize) -> Vec<GraphKey> {
    (0..count).map(|_| policy.add(SIZE, false)).collect()
}

/// Returns whether instantiation was necessary; `None` if refused.
fn acquire(policy: &mut Policy, graph: GraphKey, why: Why) -> Option<bool> {
    match policy.acquire(graph, why) {
        Step::Ready => Some(false),
        Step::Refuse => None,
        Step::Wait => panic!("no other thread exists"),
        Step::Instantiate(evicted) => {
            assert!(evicted.iter().all(|graph| !policy.has_executables(*graph)));
            let grows = policy.ledger.now.executables * 1000 >= policy.ledger.bytes();
            policy.made(graph, why, Some(if grows { 1000 } else { 0 }));
            Some(true)
        }
    }
}

fn replay(policy: &mut Policy, graph: GraphKey) -> bool {
    let missed = acquire(policy, graph, Why::Replay).unwrap();
    policy.launched(graph);
    missed
}

#[test]
fn graphs_within_the_limit_keep_their_executables() {
    let mut policy = policy(4);
    let graphs = add(&mut policy, 4);
    for round in 0..3 {
        for graph in &graphs {
            assert_eq!(replay(&mut policy, *graph), round == 0);
        }
    }
    assert_eq!((policy.counts.instantiated, policy.counts.evicted), (4, 0));
    assert_eq!((policy.counts.misses, policy.counts.hits), (4, 8));
}

#[test]
fn without_limits_nothing_is_evicted() {
    let mut policy = Policy::default();
    let graphs = add(&mut policy, 1000);
    graphs.iter().for_each(|graph| assert!(replay(&mut policy, *graph)));
    assert!(graphs.iter().all(|graph| !replay(&mut policy, *graph)));
    assert_eq!((policy.ledger.now.executables, policy.counts.evicted), (1000, 0));
}

#[test]
fn beyond_the_limit_the_least_recently_launched_graph_is_evicted() {
    let mut policy = policy(3);
    let graphs = add(&mut policy, 5);
    graphs.iter().take(3).for_each(|graph| assert!(replay(&mut policy, *graph)));
    assert!(!replay(&mut policy, graphs[0]), "the first graph is the most recent one now");
    assert!(replay(&mut policy, graphs[3]));
    assert!(!policy.has_executables(graphs[1]) && policy.has_executables(graphs[0]));
    assert!(!policy.touch(graphs[1]) && policy.touch(graphs[2]), "a hint says whether executables exist");
    assert!(replay(&mut policy, graphs[4]));
    assert!(policy.has_executables(graphs[2]) && !policy.has_executables(graphs[0]));
    assert_eq!((policy.counts.instantiated, policy.counts.evicted), (5, 2));
}

#[test]
fn executables_that_are_being_launched_are_not_evicted() {
    let mut policy = policy(1);
    let graphs = add(&mut policy, 3);
    assert_eq!(acquire(&mut policy, graphs[0], Why::Replay), Some(true));
    assert_eq!(policy.acquire(graphs[0], Why::Replay), Step::Wait);
    // During the first one: exceeds the limit for this time.
    assert_eq!(acquire(&mut policy, graphs[1], Why::Replay), Some(true));
    assert_eq!(policy.ledger.now.executables, 2);
    assert_eq!(policy.launched(graphs[1]), []);
    assert_eq!(policy.launched(graphs[0]), [graphs[0]]);
    assert!(replay(&mut policy, graphs[2]) && !policy.has_executables(graphs[1]));
    assert_eq!(policy.ledger.now.executables, 1);
}

#[test]
fn ahead_of_a_replay_no_graph_goes_that_was_wanted_at_the_last_one() {
    let mut policy = policy(2);
    let graphs = add(&mut policy, 4);
    replay(&mut policy, graphs[0]);
    replay(&mut policy, graphs[1]);
    assert_eq!(acquire(&mut policy, graphs[2], Why::Ahead), Some(true));
    assert_eq!(acquire(&mut policy, graphs[3], Why::Ahead), None);
    assert!(policy.has_executables(graphs[1]) && policy.has_executables(graphs[2]));
    assert!(!replay(&mut policy, graphs[2]), "it was instantiated ahead");
    assert_eq!((policy.counts.ahead, policy.counts.misses, policy.counts.hits), (1, 2, 1));
}

#[test]
fn one_large_graph_evicts_as_many_small_ones_as_its_bytes_need() {
    let mut policy = Policy::default();
    policy.set_limits(Limits { graphs: None, bytes: Some(4000) });
    let small = add(&mut policy, 10);
    small.iter().for_each(|graph| assert!(replay(&mut policy, *graph)));
    assert_eq!(policy.ledger.now.executables, 4);
    let large = policy.add(Size { executables: 3, nodes: 900 }, false);
    assert!(matches!(policy.acquire(large, Why::Replay), Step::Instantiate(evicted) if evicted.len() == 3));
    policy.made(large, Why::Replay, Some(0));
    policy.launched(large);
    assert!(policy.has_executables(small[9]) && !policy.has_executables(small[8]));
    let huge = policy.add(Size { executables: 30, nodes: 9000 }, false);
    assert_eq!(acquire(&mut policy, huge, Why::Ahead), None, "it can never fit");
    assert!(policy.has_executables(large), "so nothing was evicted for it");
    assert!(replay(&mut policy, huge), "a replay exceeds the limit instead of failing");
    assert_eq!(policy.ledger.now.executables, 30);
}

#[test]
fn lower_limits_evict_at_once() {
    let mut policy = Policy::default();
    let graphs = add(&mut policy, 5);
    graphs.iter().for_each(|graph| assert!(replay(&mut policy, *graph)));
    assert_eq!(policy.set_limits(Limits { graphs: Some(2), bytes: None }), graphs[..3]);
    assert_eq!(policy.totals(), (5, 2, 1500));
}

#[test]
fn all_are_evicted_on_request_except_pinned_and_launching_ones() {
    let mut policy = policy(0);
    policy.set_limits(Limits::default());
    let graphs = add(&mut policy, 4);
    graphs.iter().for_each(|graph| assert_eq!(acquire(&mut policy, *graph, Why::Ahead), Some(true)));
    policy.pin(graphs[0]);
    assert!(matches!(policy.acquire(graphs[1], Why::Replay), Step::Ready));
    assert_eq!(policy.evict_all(), graphs[2..], "also before the first replay, and the last wanted graph");
    policy.launched(graphs[1]);
    assert_eq!(policy.evict_all(), graphs[1..2]);
    assert_eq!((policy.totals(), policy.counts.evicted), ((4, 1, 1200), 3));
    assert_eq!(acquire(&mut policy, graphs[2], Why::Ahead), Some(true));
}

#[test]
fn pinned_executables_are_never_evicted() {
    let mut policy = policy(2);
    let graphs = add(&mut policy, 3);
    let pinned = policy.add(SIZE, true);
    replay(&mut policy, pinned);
    replay(&mut policy, graphs[0]);
    policy.pin(graphs[0]);
    replay(&mut policy, graphs[1]);
    for _ in 0..3 {
        assert!(replay(&mut policy, graphs[2]) && replay(&mut policy, graphs[1]));
        assert!(policy.has_executables(pinned) && policy.has_executables(graphs[0]));
    }
    assert_eq!(policy.ledger.now.executables, 3);
}

#[test]
fn a_device_without_memory_is_helped_by_evicting_one_graph_at_a_time() {
    let mut policy = Policy::default();
    let graphs = add(&mut policy, 3);
    replay(&mut policy, graphs[0]);
    replay(&mut policy, graphs[1]);
    assert_eq!(policy.acquire(graphs[2], Why::Replay), Step::Instantiate(vec![]));
    assert_eq!(policy.evict_one(), Some(graphs[0]));
    assert_eq!(policy.evict_one(), Some(graphs[1]));
    assert_eq!(policy.evict_one(), None);
    policy.failed(graphs[2]);
    assert!(replay(&mut policy, graphs[0]), "a later replay succeeds once there is memory again");
}

#[test]
fn a_removed_graph_leaves_nothing_behind() {
    let mut policy = policy(2);
    let graphs = add(&mut policy, 3);
    graphs.iter().for_each(|graph| assert!(replay(&mut policy, *graph)));
    graphs.iter().for_each(|graph| policy.remove(*graph));
    assert_eq!((policy.totals(), policy.ledger.now), ((0, 0, 0), Size::default()));
}

/// A random walk over batch sizes with occasional jumps; both neighbours are instantiated ahead, as
/// by `GraphExecutor`.
#[test]
fn on_ordinary_traffic_instantiating_ahead_leaves_one_miss_in_twenty_steps() {
    for limit in [8, 16] {
        let mut policy = policy(limit);
        let graphs = add(&mut policy, 65);
        let (mut at, mut random) = (30_usize, 1_u64);
        let (mut misses, steps) = (0, 20_000);
        for _ in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let dice = (random >> 33) % 100;
            at = match dice {
                0 => (random >> 40) as usize % 65,
                1..=12 => (at + 1).min(64),
                13..=24 => at.saturating_sub(1),
                _ => at,
            };
            misses += usize::from(replay(&mut policy, graphs[at]));
            for next in [at.saturating_sub(1), (at + 1).min(64)] {
                acquire(&mut policy, graphs[next], Why::Ahead);
            }
        }
        assert!(misses * 20 <= steps, "{misses} of {steps} with {limit}");
        assert!(policy.ledger.now.executables <= limit as u64);
    }
}

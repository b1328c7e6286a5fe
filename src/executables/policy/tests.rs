use super::*;

const TOPOLOGY: u64 = 7;
const SIZE: Size = Size { executables: 1, nodes: 300 };

fn policy(most: usize) -> Policy {
    let mut policy = Policy::default();
    policy.set_limits(Limits { most: Some(most), most_bytes: None });
    policy
}

fn add(policy: &mut Policy, count: usize) -> Vec<MemberKey> {
    (0..count).map(|_| policy.add(TOPOLOGY, 0, SIZE, false)).collect()
}

/// Carries out whatever is asked, as a driver to which `fits` says which updates it takes; whether the replay had to wait for it.
fn enter(
    policy: &mut Policy,
    member: MemberKey,
    why: Why,
    fits: &dyn Fn(MemberKey, SetKey) -> bool,
) -> Option<bool> {
    let mut late = false;
    loop {
        match policy.enter(member, why) {
            Step::Ready(_) => return Some(late),
            Step::None => return None,
            Step::Wait => panic!("nobody else is there"),
            Step::Update(set) if fits(member, set) => {
                policy.updated(member, set, why);
                return Some(true);
            }
            Step::Update(set) => policy.refused(member, set),
            Step::Make(_) => {
                policy.made(member, why, 1000).unwrap();
                return Some(true);
            }
        }
        late = true;
    }
}

fn replay(policy: &mut Policy, member: MemberKey) -> bool {
    let late = enter(policy, member, Why::Replay, &|_, _| true).unwrap();
    policy.leave(member);
    late
}

#[test]
fn graphs_within_the_limit_keep_what_they_have() {
    let mut policy = policy(4);
    let members = add(&mut policy, 4);
    for round in 0..3 {
        for member in &members {
            assert_eq!(replay(&mut policy, *member), round == 0);
        }
    }
    assert_eq!((policy.counts.made, policy.counts.updated, policy.ledger.now.executables), (4, 0, 4));
}

#[test]
fn beyond_the_limit_the_one_that_was_used_longest_ago_lends() {
    let mut policy = policy(3);
    let members = add(&mut policy, 5);
    members.iter().take(3).for_each(|member| assert!(replay(&mut policy, *member)));
    assert!(replay(&mut policy, members[3]), "takes the first one's");
    assert!(!policy.is_awake(members[0]) && policy.is_awake(members[1]));
    assert!(!replay(&mut policy, members[1]), "which is the newest then");
    assert!(replay(&mut policy, members[4]), "takes the third one's");
    assert!(!policy.is_awake(members[2]) && policy.is_awake(members[1]));
    assert_eq!((policy.counts.made, policy.counts.updated), (3, 2));
}

#[test]
fn of_those_used_long_ago_one_of_the_same_functions_lends() {
    let mut policy = policy(4);
    let members: Vec<_> =
        [0, 1, 2, 3, 1, 3].map(|functions| policy.add(TOPOLOGY, functions, SIZE, false)).to_vec();
    members.iter().take(4).for_each(|member| assert!(replay(&mut policy, *member)));
    assert!(replay(&mut policy, members[4]));
    assert!(
        policy.is_awake(members[0]) && !policy.is_awake(members[1]),
        "the second oldest has its functions"
    );
    assert!(replay(&mut policy, members[5]));
    assert!(!policy.is_awake(members[0]) && policy.is_awake(members[3]), "that one was used just now");
}

#[test]
fn a_topology_has_one_whatever_the_limit() {
    let mut policy = policy(1);
    let members: Vec<_> = (0..4).map(|topology| policy.add(topology, 0, SIZE, false)).collect();
    members.iter().for_each(|member| assert!(replay(&mut policy, *member)));
    members.iter().for_each(|member| assert!(!replay(&mut policy, *member)));
    let second = policy.add(0, 0, SIZE, false);
    assert!(replay(&mut policy, second));
    assert_eq!((policy.counts.made, policy.counts.updated, policy.counts.dropped), (4, 1, 0));
}

#[test]
fn a_full_pool_gives_the_surplus_of_one_topology_to_another() {
    let mut policy = policy(2);
    let first = add(&mut policy, 2);
    first.iter().for_each(|member| assert!(replay(&mut policy, *member)));
    let other = policy.add(TOPOLOGY + 1, 0, SIZE, false);
    assert!(replay(&mut policy, other));
    assert_eq!((policy.counts.dropped, policy.ledger.now.executables), (1, 2));
    assert!(!policy.is_awake(first[0]) && policy.is_awake(first[1]));
    assert!(replay(&mut policy, first[0]), "one of a topology is left to be updated");
    assert_eq!((policy.counts.updated, policy.counts.dropped), (1, 1));
}

#[test]
fn what_is_launched_just_now_is_nobody_elses() {
    let mut policy = policy(1);
    let members = add(&mut policy, 3);
    assert_eq!(enter(&mut policy, members[0], Why::Replay, &|_, _| true), Some(true));
    assert_eq!(policy.enter(members[0], Why::Replay), Step::Wait);
    // Another arena's replay, in the middle of the first one's: one more for now.
    assert_eq!(enter(&mut policy, members[1], Why::Replay, &|_, _| true), Some(true));
    assert_eq!(policy.ledger.now.executables, 2);
    let second = policy.members[members[1]].set;
    assert_eq!(policy.leave(members[1]), second);
    assert_eq!((policy.ledger.now.executables, policy.counts.dropped), (1, 1));
    assert_eq!(policy.leave(members[0]), None);
    assert!(replay(&mut policy, members[2]) && !policy.is_awake(members[0]));
}

#[test]
fn refusals_are_remembered_and_end_in_one_of_ones_own() {
    let mut policy = policy(2);
    let members = add(&mut policy, 12);
    let odd =
        |member: MemberKey| usize::from(members.iter().position(|one| *one == member).unwrap() % 3 == 0);
    let mut owner: HashMap<SetKey, usize> = HashMap::new();
    for round in 0..20 {
        for member in &members {
            let known = owner.clone();
            let fits = move |member: MemberKey, set: SetKey| known.get(&set) == Some(&odd(member));
            enter(&mut policy, *member, Why::Replay, &fits).unwrap();
            let set = policy.members[*member].set.unwrap();
            owner.entry(set).or_insert_with(|| odd(*member));
            policy.leave(*member);
        }
        if round == 1 {
            let refused = policy.counts.refused;
            assert!((1..=24).contains(&refused), "{refused}");
            policy.counts.refused = 0;
        }
    }
    assert_eq!(policy.counts.refused, 0, "what was refused once is not tried again");
    assert_eq!(policy.ledger.now.executables, 2, "one of each kind");
}

#[test]
fn ahead_of_time_nothing_is_taken_from_who_was_just_there() {
    let mut policy = policy(2);
    let members = add(&mut policy, 4);
    replay(&mut policy, members[0]);
    replay(&mut policy, members[1]);
    // The set of the first one is spare; then nothing is.
    assert_eq!(enter(&mut policy, members[2], Why::Ahead, &|_, _| true), Some(true));
    assert_eq!(enter(&mut policy, members[3], Why::Ahead, &|_, _| true), None);
    assert!(policy.is_awake(members[1]) && policy.is_awake(members[2]));
    assert!(!replay(&mut policy, members[2]), "it was woken");
    assert_eq!((policy.counts.woken, policy.counts.late, policy.counts.ready), (1, 2, 1));
}

#[test]
fn bytes_limit_as_numbers_do() {
    let mut policy = Policy::default();
    policy.set_limits(Limits { most: None, most_bytes: Some(3000) });
    let members = add(&mut policy, 10);
    members.iter().for_each(|member| assert!(replay(&mut policy, *member)));
    assert_eq!(policy.ledger.now.executables, 3);
    assert!(policy.ledger.bytes() <= 3000);
}

#[test]
fn one_that_is_kept_is_never_anothers() {
    let mut policy = policy(2);
    let members = add(&mut policy, 3);
    let own = policy.add(TOPOLOGY, 0, SIZE, true);
    replay(&mut policy, own);
    replay(&mut policy, members[0]);
    policy.keep(members[0]);
    replay(&mut policy, members[1]);
    for _ in 0..3 {
        assert!(replay(&mut policy, members[2]) && replay(&mut policy, members[1]));
        assert!(policy.is_awake(own) && policy.is_awake(members[0]));
    }
    assert_eq!(policy.ledger.now.executables, 3);
}

#[test]
fn with_the_last_graph_of_a_topology_its_executables_go() {
    let mut policy = policy(2);
    let members = add(&mut policy, 3);
    members.iter().for_each(|member| assert!(replay(&mut policy, *member)));
    assert_eq!(policy.remove(members[2]).len(), 0, "another one can use it");
    assert!(replay(&mut policy, members[0]), "what was nobody's is used first");
    assert!(!replay(&mut policy, members[1]));
    assert_eq!(policy.remove(members[0]).len(), 0);
    assert_eq!(policy.remove(members[1]).len(), 2);
    assert_eq!(policy.ledger.now, Size::default());
    assert_eq!(policy.members(), (0, 0, 0));
    assert!(policy.topologies.is_empty());
}

#[test]
fn a_device_without_memory_is_helped_by_sharing_and_then_by_dropping() {
    let mut policy = Policy::default();
    let members = add(&mut policy, 2);
    replay(&mut policy, members[0]);
    assert_eq!(policy.enter(members[1], Why::Replay), Step::Make(None));
    let Step::Update(set) = policy.without_memory(members[1]) else { panic!("the first one's is idle") };
    policy.refused(members[1], set);
    assert_eq!(policy.enter(members[1], Why::Replay), Step::Make(None));
    assert_eq!(policy.without_memory(members[1]), Step::Make(Some(set)));
    assert_eq!(policy.without_memory(members[1]), Step::None);
    policy.failed(members[1], None);
    assert!(!policy.is_awake(members[0]) && !policy.is_awake(members[1]));
    assert!(replay(&mut policy, members[0]), "all goes on when there is memory again");
}

/// A random walk over shapes with a jump now and then, as batches that grow and shrink with prompts between them; both neighbours and
/// what followed last time are woken ahead, as `GraphExecutor` does.
#[test]
fn on_ordinary_traffic_waking_ahead_leaves_one_step_in_twenty() {
    for most in [8, 16] {
        let mut policy = policy(most);
        let members = add(&mut policy, 65);
        let (mut at, mut random) = (30_usize, 1_u64);
        let (mut late, steps) = (0, 20_000);
        for _ in 0..steps {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let dice = (random >> 33) % 100;
            at = match dice {
                0 => (random >> 40) as usize % 65,
                1..=12 => (at + 1).min(64),
                13..=24 => at.saturating_sub(1),
                _ => at,
            };
            late += usize::from(replay(&mut policy, members[at]));
            for next in [at.saturating_sub(1), (at + 1).min(64)] {
                enter(&mut policy, members[next], Why::Ahead, &|_, _| true);
            }
        }
        assert!(late * 20 <= steps, "{late} of {steps} with {most}");
        assert!(policy.ledger.now.executables <= most as u64);
    }
}

#[test]
fn classes_have_what_their_graphs_have() {
    let mut policy = policy(2);
    let members = add(&mut policy, 3);
    let big = policy.add(9, 0, Size { executables: 29, nodes: 600 }, false);
    assert_eq!(
        policy.classes().iter().map(|class| (class.id, class.graphs, class.bytes)).collect::<Vec<_>>(),
        [(TOPOLOGY, 3, 0), (9, 1, 0)]
    );
    replay(&mut policy, members[0]);
    replay(&mut policy, members[1]);
    replay(&mut policy, members[2]);
    replay(&mut policy, big);
    let classes = policy.classes();
    // That which takes most comes first; each of its graphs counts once, whatever it has.
    assert_eq!((classes[0].id, classes[0].graphs, classes[0].awake), (9, 1, 1));
    assert_eq!(classes[0].now, Size { executables: 29, nodes: 600 });
    assert_eq!((classes[1].graphs, classes[1].awake), (3, classes[1].now.executables));
    assert_eq!(classes.iter().map(|class| class.now.executables).sum::<u64>(), policy.ledger.now.executables);
    assert!(classes.iter().map(|class| class.bytes).sum::<u64>() <= policy.ledger.bytes());
    policy.remove(big);
    assert_eq!(policy.classes().len(), 1);
}

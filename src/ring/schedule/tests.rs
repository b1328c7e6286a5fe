use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Copy { slot: usize, unit: usize, step: usize },
    Use { unit: usize, step: usize },
}

/// For each node, all earlier ones.
struct Order {
    nodes: Vec<Node>,
    before: Vec<[u64; 4]>,
}

impl Order {
    fn of(edges: &[Edge]) -> Self {
        let all: BTreeSet<Node> = edges.iter().flat_map(|edge| [edge.before, edge.after]).collect();
        let nodes: Vec<Node> = all.into_iter().collect();
        assert!(nodes.len() <= 256);
        let at: BTreeMap<Node, usize> = nodes.iter().enumerate().map(|(at, node)| (*node, at)).collect();
        let mut waits = vec![Vec::new(); nodes.len()];
        let mut behind = vec![Vec::new(); nodes.len()];
        for edge in edges {
            waits[at[&edge.after]].push(at[&edge.before]);
            behind[at[&edge.before]].push(at[&edge.after]);
        }
        let mut before = vec![[0_u64; 4]; nodes.len()];
        let mut open: Vec<usize> = waits.iter().map(Vec::len).collect();
        let mut ready: Vec<usize> = (0..nodes.len()).filter(|at| open[*at] == 0).collect();
        let mut done = 0;
        while let Some(next) = ready.pop() {
            done += 1;
            for other in &waits[next] {
                let theirs = before[*other];
                (0..4).for_each(|word| before[next][word] |= theirs[word]);
                before[next][other / 64] |= 1 << (other % 64);
            }
            for other in &behind[next] {
                open[*other] -= 1;
                if open[*other] == 0 {
                    ready.push(*other);
                }
            }
        }
        assert_eq!(done, nodes.len(), "a circle");
        Self { nodes, before }
    }

    fn is_before(&self, first: Node, second: Node) -> bool {
        let place = |node| self.nodes.binary_search(&node).unwrap_or_else(|_| panic!("no {node:?}"));
        let (first, second) = (place(first), place(second));
        self.before[second][first / 64] >> (first % 64) & 1 == 1
    }
}

/// Events of three steps, from counters and no arithmetic.
fn by_hand(resident: &[bool], slots: usize, tail: usize) -> Vec<Does> {
    let streamed: Vec<usize> = (0..resident.len()).filter(|unit| !resident[*unit]).collect();
    let mut list = Vec::new();
    let mut slot = 0;
    let mut coming = (0..).flat_map(|step| streamed.iter().map(move |unit| (step, *unit)));
    let mut ahead = 0;
    for step in 0..3 {
        for (unit, resident) in resident.iter().enumerate() {
            if !resident {
                // The first units of a step were copied by the previous tail.
                if ahead == 0 {
                    let (step, unit) = coming.next().unwrap();
                    list.push(Does::Copy { slot, unit, step });
                    slot = (slot + 1) % slots;
                } else {
                    ahead -= 1;
                }
            }
            list.push(Does::Use { unit, step });
        }
        if !streamed.is_empty() {
            for _ in 0..tail {
                let (step, unit) = coming.next().unwrap();
                list.push(Does::Copy { slot, unit, step });
                slot = (slot + 1) % slots;
            }
            ahead = tail;
        }
    }
    list
}

/// Dependencies needed in the second step, found by searching the list backwards.
fn needed(list: &[Does], tail: usize, streamed: &[usize]) -> BTreeSet<(Node, Node)> {
    let mut needed = BTreeSet::new();
    let start = list.iter().rposition(|does| matches!(does, Does::Use { step: 0, .. })).unwrap() + 1 + tail;
    let last = list.iter().rposition(|does| matches!(does, Does::Use { step: 1, .. })).unwrap() + 1 + tail;
    let position = |unit: usize, step: usize| {
        streamed.iter().position(|other| *other == unit).unwrap() + (step - 1) * streamed.len()
    };
    let slot_of = |upto: usize, unit: usize| {
        list[..upto].iter().rev().find_map(|does| match does {
            Does::Copy { slot, unit: copied, .. } if *copied == unit => Some(*slot),
            _ => None,
        })
    };
    for at in start..last {
        match list[at] {
            Does::Use { unit, step: 1 } => {
                let filled = list[start..at].iter().rev().find_map(|does| match does {
                    Does::Copy { unit: copied, step, .. } if *copied == unit => Some((*copied, *step)),
                    _ => None,
                });
                if let Some((unit, step)) = filled {
                    needed.insert((Node::Copy { position: position(unit, step) }, Node::Use { unit }));
                }
            }
            Does::Copy { slot, unit, step } => {
                let copy = Node::Copy { position: position(unit, step) };
                // Every earlier reader of the slot, not only the last one.
                for (before, does) in list.iter().enumerate().take(at).skip(start) {
                    if let Does::Use { unit: reader, .. } = *does
                        && streamed.contains(&reader)
                        && slot_of(before, reader) == Some(slot)
                    {
                        needed.insert((Node::Use { unit: reader }, copy));
                    }
                }
            }
            Does::Use { .. } => panic!("another step"),
        }
    }
    needed
}

fn check(resident: &[bool], slots: usize, tail: usize) {
    let schedule = Schedule::new(resident, slots, Remainder::KeepResident).unwrap();
    let what = || format!("{resident:?} over {slots} with {tail}: {schedule:?}");
    let kept: Vec<bool> = (0..resident.len()).map(|unit| schedule.position_of(unit).is_none()).collect();
    let streamed: Vec<usize> = (0..resident.len()).filter(|unit| !kept[*unit]).collect();
    assert_eq!(schedule.streamed(), streamed, "{}", what());
    if streamed.is_empty() {
        assert_eq!((schedule.slots(), schedule.copies(tail).count()), (0, 0), "{}", what());
        return;
    }
    let (slots, tail) = (schedule.slots(), tail.min(schedule.slots()));
    let list = by_hand(&kept, slots, tail);
    let copies: Vec<Node> = schedule.copies(tail).map(|position| Node::Copy { position }).collect();
    let edges = schedule.edges(tail);
    let order = Order::of(&edges);
    // Needed dependencies exist, and readers of a unit use the slot filled by its copy.
    let needed = needed(&list, tail, &streamed);
    for (before, after) in &needed {
        assert!(order.is_before(*before, *after), "{before:?} -> {after:?} in {}", what());
    }
    for does in &list {
        if let Does::Copy { slot, unit, .. } = does {
            assert_eq!(schedule.place_of(*unit), Some(*slot), "{}", what());
        }
    }
    // No other dependency between copy and work exists.
    for edge in edges.iter().filter(|edge| matches!(edge.why, Why::Filled | Why::Read)) {
        assert!(needed.contains(&(edge.before, edge.after)), "{edge:?} in {}", what());
    }
    // One chain, which begins and ends in the step.
    assert!(copies.windows(2).all(|pair| order.is_before(pair[0], pair[1])), "{}", what());
    assert!(copies.iter().all(|copy| order.is_before(Node::Begin, *copy)), "{}", what());
    assert!(copies.iter().all(|copy| order.is_before(*copy, Node::End)), "{}", what());
    assert_eq!(copies.len(), streamed.len(), "{}", what());
    // Contents: after each of three launches the slots match the list, and the units of the tail
    // need no priming.
    let wanted: Vec<u64> = (0..resident.len() as u64).map(|unit| 100 + unit).collect();
    let mut held = vec![None; schedule.places()];
    for (place, unit) in schedule.residents().iter().enumerate() {
        held[slots + place] = Some(Held { unit: *unit, stamp: wanted[*unit] });
    }
    assert_eq!(schedule.primes(tail, &held, &wanted), streamed[..tail], "{}", what());
    schedule.advance(tail, &mut held, &wanted);
    let mut written = vec![None; slots];
    for does in &list {
        match does {
            Does::Copy { slot, unit, step } if *step <= 1 => written[*slot] = Some((*unit, *step)),
            Does::Use { step: 1, .. } => break,
            _ => {}
        }
    }
    // Copies of the second step before its first use are not part of the first launch.
    for (slot, found) in written.iter().enumerate().take(tail) {
        assert_eq!(held[slot].map(|held| (held.unit, 1)), *found, "slot {slot} in {}", what());
    }
    assert_eq!(schedule.primes(tail, &held, &wanted), Vec::<usize>::new(), "{}", what());
}

fn residents(units: usize, set: u64) -> Vec<bool> {
    (0..units).map(|unit| set >> unit & 1 == 1).collect()
}

#[test]
fn all_small_ones_are_what_the_twin_says() {
    for units in 1..=11 {
        for set in 0..1 << units {
            for slots in 1..=units.min(8) {
                (0..=slots).for_each(|tail| check(&residents(units, set), slots, tail));
            }
        }
    }
}

#[test]
fn all_lengths_without_residents_are_what_the_twin_says() {
    for units in 12..=70 {
        for slots in 1..=8 {
            for tail in 0..=slots {
                check(&vec![false; units], slots, tail);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn large_ones_are_what_the_twin_says(
        resident in prop::collection::vec(prop::bool::weighted(0.3), 12..=70),
        slots in 1_usize..=8,
        tail in 0_usize..=8,
    ) {
        check(&resident, slots, tail);
    }
}

#[test]
fn every_edge_between_copies_and_work_is_missed() {
    // No other path has the same effect.
    for (units, slots, tail) in [(4, 2, 0), (4, 2, 1), (9, 3, 3), (8, 1, 1), (12, 4, 2)] {
        let schedule = Schedule::new(&vec![false; units], slots, Remainder::Refuse).unwrap();
        let edges = schedule.edges(tail);
        for (at, edge) in edges.iter().enumerate() {
            if matches!(edge.why, Why::Program) {
                continue;
            }
            let mut fewer = edges.clone();
            fewer.remove(at);
            let missed = !Order::of(&fewer).is_before(edge.before, edge.after);
            // With one slot, a reader is already between two copies, and work after a reader is
            // after the fork.
            let implied = slots == 1 && matches!(edge.why, Why::Chain);
            assert!(missed || implied, "{edge:?} of {units} over {slots} with {tail}");
        }
    }
}

#[test]
fn what_is_otherwise_than_asked_is_said() {
    let of =
        |units: usize, slots| Schedule::new(&vec![false; units], slots, Remainder::KeepResident).unwrap();
    let exact = of(36, 3);
    assert_eq!((exact.slots(), exact.streamed().len(), exact.adjustments()), (3, 36, &[][..]));
    // One unit stays resident.
    let prime = of(61, 4);
    assert_eq!(prime.adjustments(), [Adjustment::KeptResident { units: vec![30] }]);
    assert_eq!((prime.streamed().len(), prime.residents(), prime.places()), (60, &[30][..], 5));
    assert_eq!(of(11, 3).adjustments(), [Adjustment::KeptResident { units: vec![2, 8] }]);
    assert_eq!(of(5, 3).adjustments()[0], Adjustment::FewerSlots { asked: 3, given: 2 });
    assert_eq!(of(3, 3).adjustments(), [Adjustment::NothingStreams { units: 3, slots: 3 }]);
    assert_eq!((of(3, 3).slots(), of(3, 3).residents()), (0, &[0, 1, 2][..]));
    assert_eq!(Schedule::new(&[true, true], 0, Remainder::Refuse).unwrap().adjustments(), []);
}

#[test]
fn what_cannot_be_is_refused() {
    let value = |resident: &[bool], slots, remainder| match Schedule::new(resident, slots, remainder) {
        Err(Error::InvalidArgument { what, value, .. }) => (what, value),
        other => panic!("{other:?}"),
    };
    assert_eq!(value(&[], 3, Remainder::KeepResident), ("the number of units", 0));
    assert_eq!(value(&[false, true], 0, Remainder::KeepResident), ("the number of slots", 0));
    assert_eq!(value(&[false; 61], 4, Remainder::Refuse), ("the number of streamed units", 61));
}

#[test]
fn a_changed_source_is_primed_and_nothing_else() {
    let schedule = Schedule::new(&residents(9, 0b100), 4, Remainder::KeepResident).unwrap();
    assert_eq!((schedule.streamed().len(), schedule.residents()), (8, &[2][..]));
    let mut wanted = vec![1; 9];
    let mut held = vec![None; schedule.places()];
    // All contents are undefined.
    assert_eq!(schedule.primes(2, &held, &wanted), [0, 1, 2]);
    for unit in [0, 1, 2] {
        held[schedule.place_of(unit).unwrap()] = Some(Held { unit, stamp: 1 });
    }
    schedule.advance(2, &mut held, &wanted);
    assert_eq!(schedule.primes(2, &held, &wanted), Vec::<usize>::new());
    assert_eq!(schedule.primes(0, &[], &wanted), [2]);
    // Copied within the step; a unit of the tail and a resident unit do need priming.
    wanted[5] = 2;
    assert_eq!(schedule.primes(2, &held, &wanted), Vec::<usize>::new());
    (wanted[1], wanted[2]) = (2, 2);
    assert_eq!(schedule.primes(2, &held, &wanted), [1, 2]);
    // The other slots hold the units used last.
    assert_eq!(schedule.primes(4, &held, &wanted), [1, 2, 3, 4]);
}

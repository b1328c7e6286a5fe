use proptest::prelude::*;

use super::*;
use crate::dispatch::{UNIFORM_DECODE, vllm_sizes, xllm_sizes};
use crate::error::Error;

fn decode(tokens: u32) -> Step {
    Step { key: Key::tokens(tokens).of_variant(UNIFORM_DECODE), phase: Phase::Decode, capturable: true }
}

fn prefill(tokens: u32) -> Step {
    Step { key: Key::tokens(tokens), phase: Phase::Prefill, capturable: true }
}

fn dispatcher(options: DispatcherOptions) -> Dispatcher {
    let full = xllm_sizes(64).into_iter().map(|size| Key::tokens(size).of_variant(UNIFORM_DECODE));
    let piecewise = BucketSet::of_tokens(vllm_sizes(256)).unwrap().ignoring_variant_bits(UNIFORM_DECODE);
    Dispatcher::new(BucketSet::new(full, Default::default()).unwrap(), piecewise, options)
}

#[test]
fn a_bucket_is_captured_once_and_replayed_then() {
    let dispatcher = dispatcher(DispatcherOptions::default());
    let bucket = Key::tokens(16).of_variant(UNIFORM_DECODE);
    let first = dispatcher.dispatch(&decode(13));
    let Action::Capture(slot, key) = first.action else { panic!("{first:?}") };
    assert_eq!((first.mode, first.reason, key), (GraphMode::Full, Reason::Captured, bucket));
    assert_eq!(dispatcher.graphs(), 1);

    // A second thread during the capture gets a piecewise graph.
    let second = dispatcher.dispatch(&decode(14));
    assert_eq!((second.mode, second.reason), (GraphMode::Piecewise, Reason::Captured));
    let counters = dispatcher.counters();
    assert_eq!(counters.steps(GraphMode::Piecewise, Reason::Captured), 0, "not yet");
    let Action::Capture(piecewise, _) = second.action else { panic!("{second:?}") };
    dispatcher.captured(piecewise).unwrap();

    dispatcher.captured(slot).unwrap();
    let padded =
        Decision { mode: GraphMode::Full, action: Action::Replay(slot, bucket), reason: Reason::Padded };
    assert_eq!(dispatcher.dispatch(&decode(13)), padded);
    assert_eq!(dispatcher.dispatch(&decode(16)), Decision { reason: Reason::Hit, ..padded });
    assert_eq!(dispatcher.replays(slot), 3);

    dispatcher.evicted(slot).unwrap();
    assert_eq!(dispatcher.dispatch(&decode(16)).mode, GraphMode::Full);
    dispatcher.captured(slot).unwrap();
    assert_eq!(counters.steps(GraphMode::Full, Reason::Captured), 2);
    assert_eq!((counters.requested(), counters.padding()), (13 + 14 + 13 + 16 + 16, 3 + 2 + 3));
    let events = [Event::Captured, Event::Failed, Event::Evicted].map(|event| counters.events(event));
    assert_eq!(events, [3, 0, 1]);
}

#[test]
fn a_capture_is_counted_by_what_became_of_it() {
    let dispatcher = dispatcher(DispatcherOptions::default());
    let counters = dispatcher.counters();
    let Action::Capture(slot, _) = dispatcher.dispatch(&prefill(7)).action else { panic!() };
    dispatcher.abandoned(slot).unwrap();
    assert_eq!((dispatcher.graphs(), dispatcher.replays(slot)), (0, 0));
    assert_eq!(dispatcher.dispatch(&prefill(7)).action, Action::Capture(slot, Key::tokens(8)));
    dispatcher.capture_failed(slot).unwrap();
    assert_eq!(counters.steps(GraphMode::Eager, Reason::CaptureFailed), 1);
    assert_eq!(counters.steps(GraphMode::Piecewise, Reason::Captured), 0);
    dispatcher.forgive(slot).unwrap();
    dispatcher.begin_capture(slot).unwrap();
    dispatcher.captured(slot).unwrap();
    assert_eq!(counters.steps(GraphMode::Piecewise, Reason::Captured), 0);
    assert_eq!(
        (counters.requested(), counters.events(Event::Captured), counters.events(Event::Failed)),
        (0, 1, 1)
    );
}

#[test]
fn a_larger_graph_stands_in_for_one_that_is_not_there() {
    let ahead = DispatcherOptions { lazy: false, ..DispatcherOptions::default() };
    let dispatcher = |stand_in| {
        let piecewise = BucketSet::of_tokens([4, 8, 16, 32]).unwrap();
        let none = BucketSet::of_tokens([]).unwrap();
        Dispatcher::new(none, piecewise, DispatcherOptions { stand_in, ..ahead })
    };
    for stand_in in [2, 4] {
        let dispatcher = dispatcher(stand_in);
        let slot_of = |tokens| dispatcher.slots().find(|(.., key)| *key == Key::tokens(tokens)).unwrap().0;
        for tokens in [16, 32] {
            dispatcher.begin_capture(slot_of(tokens)).unwrap();
            dispatcher.captured(slot_of(tokens)).unwrap();
        }
        let by = |tokens: u32| {
            let decision = dispatcher.dispatch(&prefill(tokens));
            let Action::Replay(_, bucket) = decision.action else { return (0, decision.reason) };
            (bucket.extents[0], decision.reason)
        };
        assert_eq!(by(5), (16, Reason::StandIn));
        assert_eq!(by(3), if stand_in == 4 { (16, Reason::StandIn) } else { (0, Reason::NotCaptured) });
        assert_eq!(by(15), (16, Reason::Padded));
        dispatcher.evicted(slot_of(16)).unwrap();
        assert_eq!(by(16), (32, Reason::StandIn));
        assert_eq!(
            dispatcher.counters().padding(),
            if stand_in == 4 { 11 + 13 + 1 + 16 } else { 11 + 1 + 16 }
        );
    }
    let alone = dispatcher(1);
    let (largest, ..) = alone.slots().next().unwrap();
    alone.begin_capture(largest).unwrap();
    alone.captured(largest).unwrap();
    assert_eq!(alone.dispatch(&prefill(16)).reason, Reason::NotCaptured);
}

#[test]
fn every_reason_for_an_eager_step() {
    let options =
        DispatcherOptions { most_tokens: 200, most_graphs: 2, stand_in: 1, ..DispatcherOptions::default() };
    let lazy = dispatcher(options);
    let reason = |step| {
        let decision = lazy.dispatch(&step);
        assert_eq!((decision.mode, decision.action), (GraphMode::Eager, Action::Eager));
        decision.reason
    };
    assert_eq!(reason(Step { capturable: false, ..decode(1) }), Reason::NotCapturable);
    assert_eq!(reason(prefill(201)), Reason::AboveThreshold);
    assert_eq!(reason(Step { key: prefill(9).key.of_variant(2), ..prefill(9) }), Reason::TooLarge);
    let Action::Capture(slot, _) = lazy.dispatch(&prefill(8)).action else { panic!() };
    assert_eq!(reason(prefill(8)), Reason::BeingCaptured);
    lazy.capture_failed(slot).unwrap();
    assert_eq!(reason(prefill(8)), Reason::CaptureFailed);
    lazy.forgive(slot).unwrap();
    for tokens in [8, 16] {
        assert_eq!(lazy.dispatch(&prefill(tokens)).reason, Reason::Captured);
    }
    assert_eq!(reason(prefill(24)), Reason::Budget);

    let ahead = dispatcher(DispatcherOptions { lazy: false, ..options });
    assert_eq!(ahead.dispatch(&decode(1)).reason, Reason::NotCaptured);
    let modes = Modes { decode: [GraphMode::Eager; 2], ..Modes::default() };
    let eager = dispatcher(DispatcherOptions { modes, ..options });
    assert_eq!(eager.dispatch(&decode(1)).reason, Reason::ModeEager);
    assert_eq!(eager.graphs(), 0);
}

#[test]
fn a_slot_changes_only_the_way_it_should() {
    let dispatcher = dispatcher(DispatcherOptions { most_graphs: 1, ..DispatcherOptions::default() });
    let slots: Vec<_> = dispatcher.slots().collect();
    assert_eq!(slots[0].2, Key::tokens(64).of_variant(UNIFORM_DECODE));
    assert_eq!((slots[8].1, slots[8].2), (GraphMode::Piecewise, Key::tokens(256)));
    let (slot, other) = (slots[0].0, slots[1].0);
    for wrong in [
        Dispatcher::captured,
        Dispatcher::capture_failed,
        Dispatcher::abandoned,
        Dispatcher::evicted,
        Dispatcher::forgive,
    ] {
        assert!(matches!(wrong(&dispatcher, slot), Err(Error::WrongState { .. })));
        assert!(matches!(wrong(&dispatcher, Slot(999)), Err(Error::InvalidArgument { .. })));
    }
    assert!(dispatcher.begin_capture(Slot(999)).is_err());
    dispatcher.begin_capture(slot).unwrap();
    assert!(dispatcher.begin_capture(slot).is_err() && dispatcher.begin_capture(other).is_err());
    dispatcher.captured(slot).unwrap();
    dispatcher.evicted(slot).unwrap();
    dispatcher.begin_capture(other).unwrap();
    dispatcher.capture_failed(other).unwrap();
    assert_eq!(dispatcher.graphs(), 0);
}

#[test]
fn threads_never_capture_one_bucket_twice_nor_more_graphs_than_allowed() {
    let dispatcher = dispatcher(DispatcherOptions { most_graphs: 5, ..DispatcherOptions::default() });
    let captures: usize = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    let steps = (0..2000).map(|step| decode(1 + step % 64));
                    steps.filter(|step| dispatcher.dispatch(step).reason == Reason::Captured).count()
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    assert_eq!((captures, dispatcher.graphs()), (5, 5));
    let counters = dispatcher.counters();
    let pairs = GraphMode::ALL.into_iter().flat_map(|mode| Reason::ALL.map(|reason| (mode, reason)));
    // Unreported captures are not counted.
    assert_eq!(pairs.map(|(mode, reason)| counters.steps(mode, reason)).sum::<u64>(), 8000 - 5);
}

proptest! {
    #[test]
    fn a_decision_is_what_its_reason_says_and_the_oldest_goes_first(
        steps in prop::collection::vec((1..300_u32, any::<bool>(), 0..6_u8), 1..80), most_graphs in 0..6_u32,
        stand_in in 1..4_u32,
    ) {
        let options = DispatcherOptions { most_graphs, stand_in, ..DispatcherOptions::default() };
        let dispatcher = dispatcher(options);
        let mut ready: Vec<Slot> = Vec::new();
        let mut failed = 0;
        for (tokens, uniform, then) in steps {
            let step = if uniform { decode(tokens) } else { prefill(tokens) };
            let decision = dispatcher.dispatch(&step);
            prop_assert!(decision.mode.can_be(decision.reason));
            match decision.action {
                Action::Eager => prop_assert_eq!(decision.mode, GraphMode::Eager),
                Action::Replay(slot, bucket) => {
                    prop_assert!(ready.contains(&slot) && bucket.extents[0] >= tokens);
                    let (set, _) = dispatcher.set(decision.mode);
                    let own = set.get(set.nearest(&step.key).unwrap()).unwrap();
                    let reason = if own != bucket {
                        prop_assert!(bucket.extents[0] <= stand_in * own.extents[0]);
                        Reason::StandIn
                    } else if bucket.extents[0] > tokens {
                        Reason::Padded
                    } else {
                        Reason::Hit
                    };
                    prop_assert_eq!(decision.reason, reason);
                    ready.retain(|other| *other != slot);
                    ready.push(slot);
                }
                Action::Capture(slot, bucket) => {
                    prop_assert!(bucket.extents[0] >= tokens && !ready.contains(&slot));
                    match then {
                        1 => { dispatcher.capture_failed(slot).unwrap(); failed += 1; }
                        2 => dispatcher.abandoned(slot).unwrap(),
                        _ => { dispatcher.captured(slot).unwrap(); ready.push(slot); }
                    }
                }
            }
            prop_assert_eq!(dispatcher.least_recently_used(None), ready.first().copied());
            let kept = ready.first().copied();
            prop_assert_eq!(dispatcher.least_recently_used(kept), ready.get(1).copied());
            if then == 0 && !ready.is_empty() {
                dispatcher.evicted(ready.remove(0)).unwrap();
            }
            prop_assert_eq!(dispatcher.graphs() as usize, ready.len());
            prop_assert_eq!(dispatcher.counters().events(Event::Failed), failed);
            prop_assert!(ready.len() <= most_graphs as usize);
        }
    }
}

#[test]
fn a_decision_of_others_counts_beside_the_own_one_and_uses_the_graph() {
    let dispatcher = dispatcher(DispatcherOptions::default());
    let slots: Vec<Slot> = [1, 2]
        .map(|tokens| match dispatcher.dispatch(&decode(tokens)).action {
            Action::Capture(slot, _) => slot,
            other => panic!("{other:?}"),
        })
        .into();
    slots.iter().for_each(|slot| dispatcher.captured(*slot).unwrap());
    assert_eq!(dispatcher.least_recently_used(None), Some(slots[0]));
    assert_eq!(dispatcher.dispatch(&decode(2)).reason, Reason::Hit);
    dispatcher.imposed(Some(slots[0])).unwrap();
    dispatcher.imposed(None).unwrap();
    let counters = dispatcher.counters();
    assert_eq!(counters.steps(GraphMode::Full, Reason::Hit), 1);
    assert_eq!(GraphMode::ALL.map(|mode| counters.imposed(mode)), [1, 0, 1]);
    assert_eq!(dispatcher.least_recently_used(None), Some(slots[1]), "the other one was used since");
    assert_eq!((dispatcher.replays(slots[0]), dispatcher.replays(slots[1])), (2, 2));
    let absent = dispatcher.slots().map(|(slot, ..)| slot).find(|slot| !slots.contains(slot)).unwrap();
    dispatcher.imposed(Some(absent)).unwrap();
    assert_eq!(dispatcher.replays(absent), 0);
    assert!(matches!(dispatcher.imposed(Some(Slot(u32::MAX))), Err(Error::InvalidArgument { .. })));
    assert_eq!(GraphMode::ALL.iter().map(|mode| counters.imposed(*mode)).sum::<u64>(), 3);
}

//! Workspaces on the host driver: the page of each. `tests/faults/any_order/workspaces.rs` tests
//! late streams.

use std::sync::Arc;
use std::thread;

use vmmgraph::pages::{Fence, Owner};
use vmmgraph::{Device, Error, Stream, Workspace};
use vmmgraph_testkit::{Bench, MIB, Random, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);
const BYTES: u64 = 32 * MIB;

fn nothing() -> Fence {
    Fence::default()
}

fn pages(device: &Device) -> (u64, u64) {
    let all = device.pool().owned_pages();
    let mine = all.iter().filter(|one| matches!(one.owner, Owner::Workspace { .. }));
    mine.fold((0, 0), |(pages, mappings), one| (pages + one.pages, mappings + one.mappings))
}

fn make(bench: &Bench, count: usize) -> Vec<Workspace> {
    (0..count).map(|_| Workspace::new(&bench.device, BYTES).unwrap()).collect()
}

#[test]
fn hundreds_on_one_stream_cost_one_page() {
    let bench = Bench::new(A);
    let all = make(&bench, 300);
    assert!(all.iter().all(|one| one.use_on(Some(A), nothing) == Ok(false)));
    assert_eq!(pages(&bench.device), (1, 300));
    assert_eq!(bench.device.stats().physical_bytes, BYTES);
    bench.stamps.write(all[7].address(), BYTES, 7).unwrap();
    assert!(bench.stamps.holds(all[299].address(), BYTES, 7).unwrap());
    let calls = bench.faulty.calls();
    assert!(all.iter().all(|one| one.use_on(Some(A), || panic!("nothing changes")) == Ok(false)));
    assert_eq!(bench.faulty.calls(), calls);
    drop(all);
    bench.end();
}

#[test]
fn each_stream_has_a_page_of_its_own() {
    let bench = Bench::new(A);
    let all = make(&bench, 6);
    for (number, one) in all.iter().enumerate() {
        one.use_on(Some([A, B][number % 2]), || panic!("it was never used")).unwrap();
    }
    assert_eq!(pages(&bench.device), (2, 6));
    bench.stamps.write(all[0].address(), BYTES, 1).unwrap();
    bench.stamps.write(all[1].address(), BYTES, 2).unwrap();
    assert!(bench.stamps.holds(all[2].address(), BYTES, 1).unwrap());
    assert!(bench.stamps.holds(all[5].address(), BYTES, 2).unwrap());
    drop(all);
    bench.end();
}

#[test]
fn one_that_goes_elsewhere_joins_those_there_and_has_a_page_of_its_own_in_the_end() {
    let bench = Bench::new(A);
    let all = make(&bench, 5);
    let [one, ..] = &all[..] else { panic!() };
    for (number, each) in all.iter().enumerate() {
        each.use_on(Some([A, B][usize::from(number > 2)]), nothing).unwrap();
    }
    let at = one.address();
    for to in [B, A, B] {
        assert_eq!(one.use_on(Some(to), nothing), Ok(false));
        assert_eq!((pages(&bench.device), one.address()), ((2, 5), at));
        let beside = &all[if to == A { 1 } else { 3 }];
        bench.stamps.write(at, BYTES, 5).unwrap();
        assert!(bench.stamps.holds(beside.address(), BYTES, 5).unwrap());
        bench.stamps.write(beside.address(), BYTES, 6).unwrap();
    }
    assert_eq!(one.use_on(Some(A), nothing), Ok(true));
    assert_eq!(pages(&bench.device), (3, 5));
    assert_eq!(one.use_on(Some(B), || panic!("its page stays")), Ok(true));
    assert_eq!(all[1].use_on(None, nothing), Ok(true));
    assert_eq!(all[2].use_on(None, || panic!("it is the last one there")), Ok(true));
    assert_eq!(pages(&bench.device), (4, 5));
    drop(all);
    bench.end();
}

#[test]
fn who_was_always_alone_keeps_the_page() {
    let bench = Bench::new(A);
    let [one, other] = [0, 0].map(|_| Workspace::new(&bench.device, BYTES).unwrap());
    assert!(!one.keep(), "another one shows its page");
    other.use_on(Some(A), nothing).unwrap();
    drop(other);
    // Its work may still run.
    assert!(!one.keep());
    one.use_on(None, || panic!("it was never used")).unwrap();
    assert!(one.keep());
    let unmaps = bench.faulty.count("unmap");
    let alone = Workspace::new(&bench.device, BYTES).unwrap();
    alone.use_on(Some(B), nothing).unwrap();
    assert!(alone.keep());
    alone.use_on(Some(A), || panic!("its page stays")).unwrap();
    assert_eq!(bench.faulty.count("unmap"), unmaps);
    drop((one, alone));
    bench.end();
}

#[test]
fn it_goes_behind_what_was_said() {
    let bench = Bench::new(A);
    let [one, other] = [0, 0].map(|_| Workspace::new(&bench.device, BYTES).unwrap());
    for used in [&one, &other] {
        used.use_on(Some(A), nothing).unwrap();
    }
    bench.faulty.set_busy(true);
    let mut behind = Fence::default();
    behind.add(bench.device.pool().events(), A);
    one.leave(behind);
    drop(one);
    assert_eq!(pages(&bench.device), (1, 2), "a kernel may use it");
    bench.faulty.set_busy(false);
    bench.device.trim().unwrap();
    assert_eq!(pages(&bench.device), (1, 1));
    drop(other);
    bench.end();
}

#[test]
fn sizes_do_not_mix_and_some_are_refused() {
    let bench = Bench::new(A);
    let sizes = [1, 2 * MIB, 2 * MIB + 1, 8 * MIB];
    let all = sizes.map(|bytes| Workspace::new(&bench.device, bytes).unwrap());
    assert_eq!(all.each_ref().map(Workspace::bytes), [2 * MIB, 2 * MIB, 4 * MIB, 8 * MIB]);
    assert_eq!(pages(&bench.device), (3, 4));
    for bytes in [0, u64::MAX] {
        let refused = Workspace::new(&bench.device, bytes);
        assert!(matches!(refused, Err(Error::InvalidSize { .. })), "{refused:?}");
    }
    let other = Bench::new(A);
    let theirs = Workspace::new(&other.device, 2 * MIB).unwrap();
    assert_eq!(pages(&other.device), (1, 1));
    drop((all, theirs));
    other.end();
    bench.end();
}

#[test]
fn without_memory_it_stays_where_it_is() {
    let bench = Bench::new(A);
    let all = make(&bench, 2);
    bench.device.set_budget(Some(BYTES));
    all[0].use_on(Some(A), nothing).unwrap();
    for _ in 0..2 {
        let refused = all[1].use_on(Some(B), nothing);
        assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
        assert_eq!(pages(&bench.device), (1, 2));
    }
    bench.device.set_budget(None);
    all[1].use_on(Some(B), nothing).unwrap();
    assert_eq!(pages(&bench.device), (2, 2));
    drop(all);
    bench.end();
}

/// A move must not block captures of other shapes: its work may wait for the capture.
#[test]
fn nobody_waits_for_another_threads_move() {
    let bench = Bench::new(A);
    let all = make(&bench, 2);
    assert!(all.iter().all(|one| one.use_on(Some(A), nothing) == Ok(false)));
    let (asked, moves) = std::sync::mpsc::channel();
    let (go, gone) = std::sync::mpsc::channel();
    thread::scope(|scope| {
        let one = &all[0];
        scope.spawn(move || {
            let waits = || {
                asked.send(()).unwrap();
                gone.recv().unwrap();
                Fence::default()
            };
            assert_eq!(one.use_on(Some(B), waits), Ok(false));
        });
        moves.recv().unwrap();
        assert!(!one.keep());
        go.send(()).unwrap();
    });
    assert!(all[0].keep());
    drop(all);
    bench.end();
}

#[test]
fn threads_make_move_and_drop_them_beside_each_other() {
    let bench = Bench::new(A);
    thread::scope(|scope| {
        for seed in 0..4 {
            let device = &bench.device;
            scope.spawn(move || {
                let mut random = Random::new(seed);
                let mut mine: Vec<(Workspace, bool)> = Vec::new();
                for _ in 0..1_500 {
                    let chosen = random.below(mine.len().max(1) as u64) as usize;
                    match random.below(6) {
                        0 | 1 if mine.len() < 8 => {
                            mine.push((Workspace::new(device, 2 * MIB).unwrap(), false));
                        }
                        2 if !mine.is_empty() => drop(mine.swap_remove(chosen)),
                        3 if !mine.is_empty() => mine[chosen].1 |= mine[chosen].0.keep(),
                        _ if !mine.is_empty() => {
                            let on = random.choose(&[Some(A), Some(B), Some(stream(0xc0 + seed)), None]);
                            mine[chosen].0.use_on(on, nothing).unwrap();
                            mine[chosen].1 |= on.is_none();
                        }
                        _ => {}
                    }
                    // A workspace alone on its page stays alone.
                    assert!(mine.iter().all(|(one, alone)| !alone || one.keep()));
                    assert_eq!(device.pool().audit(), Ok(()));
                }
            });
        }
    });
    assert_eq!(pages(&bench.device), (0, 0));
    bench.end();
}

#[test]
fn any_thread_may_have_one() {
    fn is_send<T: Send + Sync>(_: &T) {}
    let bench = Bench::new(A);
    let one = Arc::new(Workspace::new(&bench.device, BYTES).unwrap());
    is_send(&one);
    thread::spawn(move || drop(one)).join().unwrap();
    bench.end();
}

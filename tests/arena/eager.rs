//! Eager work on an arena's pages: replay order, the graphs' memory, persistent results.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::mpsc::channel;
use std::sync::{Arc, MutexGuard};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver};
use vmmgraph::pages::Fence;
use vmmgraph::{
    Address, Device, EagerScope, Error, HostOptions, Options, RetainPolicy, SharedVmmAllocator, Space, Stream,
};
use vmmgraph_testkit::{FaultyDriver, MIB, ReorderingDriver, Stamps, alone, stream};

const A: Stream = Stream::LEGACY;
const PAGE: u64 = 16 * MIB;

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
}

fn bench() -> Bench {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    Bench { device: Device::with_driver(faulty.clone()), host, faulty }
}

impl Bench {
    fn arena(&self) -> SharedVmmAllocator {
        SharedVmmAllocator::new(&self.device, &Options::default()).unwrap()
    }

    fn stamps(&self) -> Stamps {
        Stamps::new(self.device.driver(), A)
    }

    fn calls(&self) -> u64 {
        let names = ["reserve", "create", "map", "unmap", "release", "free_addresses", "grant"];
        names.into_iter().map(|name| self.faulty.count(name)).sum()
    }

    fn end(self) {
        self.device.trim().unwrap();
        assert_eq!(self.device.pool().audit_idle(), Ok(()));
        self.device.host_pool().trim().unwrap();
        drop(self.device);
        assert_eq!((self.host.leftovers(), self.host.host_leftovers()), ([0; 4], [0; 2]));
    }
}

struct Graph {
    space: Arc<Space>,
    steps: Vec<(bool, Address, u64)>,
    retained: Vec<(Address, u64)>,
    stamp: u32,
}

impl Graph {
    /// Two blocks are live at a time; the last one is live-out if `retain`.
    fn capture(arena: &SharedVmmAllocator, sizes: &[u64], retain: bool) -> Self {
        let space = arena.open_space().unwrap();
        let (mut steps, mut live) = (Vec::new(), Vec::new());
        for bytes in sizes {
            let at = space.allocate(*bytes, A).unwrap();
            steps.push((true, at, *bytes));
            live.push((at, *bytes));
            if live.len() > 2 {
                let (at, bytes) = live.remove(0);
                space.free(at).unwrap();
                steps.push((false, at, bytes));
            }
        }
        let retained = if retain { live.pop().into_iter().collect() } else { Vec::new() };
        for (at, bytes) in live {
            space.free(at).unwrap();
            steps.push((false, at, bytes));
        }
        space.seal().unwrap();
        Self { space, steps, retained, stamp: 0 }
    }

    fn replay(&mut self, stamps: &Stamps, round: u32) -> vmmgraph::Result<()> {
        self.space.replay(A, || {
            for (number, (comes, at, bytes)) in self.steps.iter().enumerate() {
                let of = |number: usize| round ^ (number as u32) << 20;
                if *comes {
                    stamps.write(*at, *bytes, of(number)).unwrap();
                } else {
                    let born = self.steps[..number].iter().rposition(|step| step.0 && step.1 == *at).unwrap();
                    assert!(stamps.holds(*at, *bytes, of(born)).unwrap(), "a replay lost its own block");
                }
            }
            let last = self.steps.iter().rposition(|step| step.0).unwrap();
            self.stamp = round ^ (last as u32) << 20;
        })
    }

    fn holds(&self, stamps: &Stamps) -> bool {
        self.retained.iter().all(|(at, bytes)| stamps.holds(*at, *bytes, self.stamp).unwrap())
    }
}

fn refused<T>(result: vmmgraph::Result<T>, what: &str) {
    match result {
        Err(Error::WrongState { sentence }) => assert!(sentence.contains(what), "{sentence}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

fn prefill(scope: &EagerScope, stamps: &Stamps, bytes: u64, last: u64, stamp: u32) -> Address {
    let block = |bytes| {
        let at = scope.allocate(bytes).unwrap();
        stamps.write(at, bytes, stamp).unwrap();
        at
    };
    let mut before = block(bytes / 3);
    for _ in 0..4 {
        let inner = block(bytes / 3);
        let next = block(bytes / 3);
        assert!([before, inner, next].iter().all(|at| stamps.holds(*at, bytes / 3, stamp).unwrap()));
        scope.free(inner).unwrap();
        scope.free(before).unwrap();
        before = next;
    }
    let last = block(last);
    scope.free(before).unwrap();
    last
}

#[test]
fn eager_work_lies_in_the_graphs_memory_and_its_results_outlast_their_replays() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graphs: Vec<_> = [40, 90, 150]
        .map(|bytes| Graph::capture(&arena, &[bytes * MIB, 5 * MIB, bytes * MIB / 2, 20 * MIB], false))
        .into_iter()
        .collect();
    let graphs_alone = arena.stats().physical_bytes;
    let blocks = arena.eager_blocks();
    for round in 0..20 {
        let scope = arena.eager_scope(A).unwrap();
        let last = prefill(&scope, &stamps, 120 * MIB, 3 * MIB, round);
        drop(scope);
        for graph in &mut graphs {
            graph.replay(&stamps, round + 100).unwrap();
            assert!(stamps.holds(last, 3 * MIB, round).unwrap(), "round {round}: a replay wrote over it");
        }
        assert_eq!(arena.audit(), Ok(()));
        blocks.free(last, &[]).unwrap();
    }
    let stats = arena.eager_stats();
    assert_eq!((stats.scopes, stats.blocks, stats.live_bytes), (20, 0, 0));
    assert!(
        arena.stats().physical_bytes <= graphs_alone + PAGE,
        "{} over {graphs_alone}",
        arena.stats().physical_bytes
    );
    assert_eq!((stats.pages_left, stats.own_bytes), (1, PAGE), "the result moved from page to page");
    arena.trim().unwrap();
    assert_eq!(arena.eager_stats().mapped_bytes, 0);
    assert_eq!(arena.stats().physical_bytes, graphs_alone);
    drop((graphs, blocks, arena));
    bench.end();
}

/// A program may close a scope on a second thread; otherwise replays would wait forever.
#[test]
fn a_scope_ends_on_any_thread_and_once() {
    let bench = bench();
    let (arena, stamps) = (Arc::new(bench.arena()), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 5 * MIB], false);
    let blocks = arena.eager_blocks();
    let scope = arena.eager_scope(stream(1)).unwrap();
    let result = scope.allocate(3 * MIB).unwrap();
    stamps.write(result, 3 * MIB, 1).unwrap();
    let end = Arc::new(scope.into_end());
    assert!(matches!(graph.replay(&stamps, 2), Err(Error::WrongState { .. })));
    let freed_inside = blocks.allocate(MIB, stream(1), false).unwrap();
    blocks.free(freed_inside, &[]).unwrap();
    thread::scope(|all| {
        let ends: Vec<_> = (0..4).map(|_| all.spawn(|| end.end())).collect();
        assert!(ends.into_iter().all(|one| one.join().unwrap().is_ok()));
    });
    let refused = blocks.allocate(MIB, stream(1), false);
    assert!(matches!(refused, Err(Error::WrongState { .. })), "{refused:?}");
    graph.replay(&stamps, 2).unwrap();
    assert!(stamps.holds(result, 3 * MIB, 1).unwrap());
    let next = arena.eager_scope(stream(2)).unwrap();
    end.end().unwrap();
    drop(end);
    assert!(matches!(graph.replay(&stamps, 3), Err(Error::WrongState { .. })));
    drop(next);
    let own = arena.eager_scope(Stream::PER_THREAD).unwrap().into_end();
    let elsewhere = thread::scope(|all| all.spawn(|| own.end()).join().unwrap());
    assert!(matches!(elsewhere, Err(Error::WrongState { .. })), "{elsewhere:?}");
    assert!(matches!(graph.replay(&stamps, 3), Err(Error::WrongState { .. })), "it is under way as before");
    own.end().unwrap();
    graph.replay(&stamps, 3).unwrap();
    assert_eq!((arena.eager_stats().scopes, arena.audit()), (3, Ok(())));
    blocks.free(result, &[]).unwrap();
    drop((graph, blocks, own, arena));
    bench.end();
}

#[test]
fn where_eager_work_needs_more_than_the_graphs_they_lie_in_its_memory() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let scope = arena.eager_scope(A).unwrap();
    let mut kept = vec![prefill(&scope, &stamps, 240 * MIB, 3 * MIB, 1)];
    drop(scope);
    let alone = arena.stats().physical_bytes;
    let mut graph = Graph::capture(&arena, &[100 * MIB, 60 * MIB], false);
    for round in 2..10 {
        graph.replay(&stamps, 77).unwrap();
        let scope = arena.eager_scope(A).unwrap();
        kept.push(prefill(&scope, &stamps, 240 * MIB, 3 * MIB, round));
        drop(scope);
        arena.eager_blocks().free(kept.remove(0), &[]).unwrap();
        assert!(stamps.holds(kept[0], 3 * MIB, round).unwrap());
        let now = arena.stats().physical_bytes;
        assert!(now <= alone + PAGE, "round {round}: {now} over {alone}");
        assert_eq!(arena.audit(), Ok(()));
    }
    drop((arena, graph));
    bench.end();
}

#[test]
fn in_a_steady_state_neither_scopes_nor_replays_move_memory() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graphs =
        [30, 70].map(|bytes| Graph::capture(&arena, &[bytes * MIB, 9 * MIB, bytes * MIB], false));
    let mut last = None;
    for round in 0..30 {
        if round == 4 {
            bench.faulty.start_log();
        }
        let before = bench.calls();
        let scope = arena.eager_scope(A).unwrap();
        // The previous result is freed after the next one is made, as by `logits = model(...)`.
        let next = prefill(&scope, &stamps, 90 * MIB, 600 << 10, round);
        if let Some(last) = last.replace(next) {
            scope.free(last).unwrap();
        }
        drop(scope);
        for graph in &mut graphs {
            graph.replay(&stamps, round).unwrap();
        }
        let calls = bench.calls() - before;
        assert!(round < 4 || calls == 0, "round {round}: {:?}", bench.faulty.take_log());
    }
    drop((arena, graphs));
    bench.end();
}

#[test]
fn lengths_that_differ_every_time_do_not_use_up_addresses() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[64 * MIB, 30 * MIB], false);
    let (mut random, mut live, mut most) = (7_u64, Vec::new(), 0);
    for round in 0..400_u32 {
        let mut next = |of: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % of
        };
        let scope = arena.eager_scope(A).unwrap();
        let (bytes, last) = ((1 + next(150)) * MIB + next(7) * 512, 1 + next(9 * MIB));
        live.push((prefill(&scope, &stamps, bytes, last, round), last, round));
        drop(scope);
        graph.replay(&stamps, round).unwrap();
        assert!(live.iter().all(|(at, bytes, stamp)| stamps.holds(*at, *bytes, *stamp).unwrap()), "{round}");
        if live.len() > 3 {
            let (at, ..) = live.remove(next(4) as usize);
            arena.eager_blocks().free(at, &[]).unwrap();
        }
        let stats = arena.eager_stats();
        most = most.max(stats.reserved_bytes);
        assert!(stats.reserved_bytes <= 48 << 30, "round {round}: {stats:?}");
        assert!(arena.stats().physical_bytes <= 16 * PAGE + 4 * 2 * PAGE, "{round}: {:?}", arena.stats());
    }
    assert_eq!(arena.audit(), Ok(()));
    drop((arena, graph));
    bench.end();
}

#[test]
fn what_a_scope_excludes_is_refused_and_it_goes_on() {
    let bench = bench();
    let (arena, other, stamps) = (bench.arena(), bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[20 * MIB], false);
    let mut elsewhere = Graph::capture(&other, &[20 * MIB], false);
    let scope = arena.eager_scope(A).unwrap();
    let block = scope.allocate(MIB).unwrap();
    refused(arena.eager_scope(A), "under way");
    refused(graph.replay(&stamps, 1), "under way");
    refused(arena.open_space(), "under way");
    refused(arena.pause(Fence::default()), "under way");
    refused(arena.eager_blocks().allocate(MIB, stream(1), false), "no eager scope is active");
    elsewhere.replay(&stamps, 1).unwrap();
    Graph::capture(&other, &[30 * MIB], true).replay(&stamps, 2).unwrap();
    assert_eq!(scope.allocate(0).map_err(|error| matches!(error, Error::InvalidSize { .. })), Err(true));
    scope.free(block).unwrap();
    assert_eq!(scope.free(block), Err(Error::DoubleFree { address: block }));
    assert_eq!(scope.free(Address(4096)), Err(Error::ForeignPointer { address: Address(4096) }));
    assert_eq!(scope.record_stream(block, stream(3)), Err(Error::DoubleFree { address: block }));
    drop(scope);
    graph.replay(&stamps, 3).unwrap();
    refused(arena.eager_blocks().allocate(MIB, A, false), "no eager scope is active");
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    refused(arena.eager_scope(A), "paused");
    arena.resume(Duration::ZERO).unwrap();
    bench.faulty.set_capturing(stream(2), true);
    assert_eq!(arena.eager_scope(stream(2)).err(), Some(Error::StreamCapturing { stream: stream(2).raw() }));
    bench.faulty.set_capturing(stream(2), false);
    drop(arena.eager_scope(stream(2)).unwrap());
    graph.replay(&stamps, 3).unwrap();
    drop((arena, other, graph, elsewhere));
    bench.end();
}

#[test]
fn replays_of_other_threads_wait_for_the_scope_and_come_behind_it() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 20 * MIB], false);
    let scope = arena.eager_scope(stream(5)).unwrap();
    let block = scope.allocate(30 * MIB).unwrap();
    stamps.write(block, 30 * MIB, 9).unwrap();
    let (told, done) = channel();
    thread::scope(|threads| {
        let stamps = &stamps;
        threads.spawn(move || {
            graph.replay(stamps, 4).unwrap();
            told.send(()).unwrap();
        });
        assert!(done.recv_timeout(Duration::from_millis(200)).is_err(), "a replay ran beside eager work");
        assert!(stamps.holds(block, 30 * MIB, 9).unwrap());
        drop(scope);
        done.recv().unwrap();
    });
    assert!(stamps.holds(block, 30 * MIB, 9).unwrap());
    drop(arena);
    bench.end();
}

#[test]
fn bytes_that_a_stream_still_reads_are_nobody_elses() {
    let bench = bench();
    let arena = bench.arena();
    let scope = arena.eager_scope(A).unwrap();
    let (noted, plain) = (scope.allocate(20 * MIB).unwrap(), scope.allocate(20 * MIB).unwrap());
    scope.record_stream(noted, stream(1)).unwrap();
    scope.record_stream(plain, A).unwrap();
    bench.faulty.set_busy(true);
    scope.free(noted).unwrap();
    scope.free(plain).unwrap();
    assert_eq!(scope.free(noted), Err(Error::DoubleFree { address: noted }));
    assert_eq!(scope.allocate(20 * MIB).unwrap(), plain, "in the order of the stream");
    assert_ne!(scope.allocate(20 * MIB).unwrap(), noted);
    let stays = scope.allocate(20 * MIB).unwrap();
    drop(scope);
    assert_eq!((arena.eager_stats().blocks, arena.audit()), (3, Ok(())));
    // A block freed after its scope waits for its own stream and its readers.
    arena.eager_blocks().free(stays, &[stream(2)]).unwrap();
    let own = arena.eager_stats().own_bytes;
    let scope = arena.eager_scope(A).unwrap();
    assert_ne!(scope.allocate(20 * MIB).unwrap(), noted);
    drop(scope);
    assert!(arena.eager_stats().own_bytes >= own - 2 * PAGE);
    bench.faulty.set_busy(false);
    let scope = arena.eager_scope(A).unwrap();
    let again: Vec<_> = (0..3).map(|_| scope.allocate(20 * MIB).unwrap()).collect();
    assert!(again.contains(&noted), "what came free is not used: {again:?}, {noted:?}");
    drop((scope, arena));
    bench.end();
}

#[test]
fn kept_blocks_move_no_page() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 20 * MIB], true);
    let mut results = Vec::new();
    for round in 0..5 {
        let scope = arena.eager_scope(A).unwrap();
        let result = scope.allocate_kept(3000).unwrap();
        stamps.write(result, 3000, round).unwrap();
        let passing = prefill(&scope, &stamps, 50 * MIB, MIB, round);
        scope.free(passing).unwrap();
        results.push((result, round));
        drop(scope);
        graph.replay(&stamps, round).unwrap();
        assert!(results.iter().all(|(at, stamp)| stamps.holds(*at, 3000, *stamp).unwrap()));
    }
    let stats = arena.eager_stats();
    assert_eq!((stats.pages_left, stats.graph_maps, stats.blocks), (0, 0, 5));
    for (at, _) in results.drain(1..) {
        arena.eager_blocks().free(at, &[]).unwrap();
    }
    assert_eq!(arena.eager_blocks().free(results[0].0, &[A]), Ok(()));
    assert_eq!(arena.stats().kept_bytes, 0);
    drop((graph, arena));
    bench.end();
}

#[test]
fn a_replay_that_gets_no_page_is_not_launched_and_can_be_repeated() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 20 * MIB], true);
    graph.replay(&stamps, 1).unwrap();
    let scope = arena.eager_scope(A).unwrap();
    let last = prefill(&scope, &stamps, 60 * MIB, 3 * MIB, 5);
    drop(scope);
    for call in ["unmap", "map", "create"] {
        if call == "create" {
            arena.trim().unwrap();
        }
        bench.faulty.refuse(call, true);
        let mut launched = false;
        let refused = graph.space.replay(A, || launched = true);
        bench.faulty.refuse(call, false);
        assert!(!launched && refused.is_err(), "{call}: {refused:?}");
        assert!(stamps.holds(last, 3 * MIB, 5).unwrap() && graph.holds(&stamps));
        assert_eq!(arena.audit(), Ok(()), "{call}");
    }
    graph.replay(&stamps, 2).unwrap();
    let held = arena.stats().physical_bytes;
    let scope = arena.eager_scope(A).unwrap();
    let more = scope.allocate(PAGE).unwrap();
    stamps.write(more, PAGE, 8).unwrap();
    drop(scope);
    arena.set_budget(Some(held));
    let refused = graph.replay(&stamps, 3);
    assert!(
        matches!(refused, Err(Error::OverBudget { .. })) || arena.stats().physical_bytes <= held,
        "{refused:?}"
    );
    arena.set_budget(None);
    graph.replay(&stamps, 4).unwrap();
    assert!(stamps.holds(last, 3 * MIB, 5).unwrap() && stamps.holds(more, PAGE, 8).unwrap());
    drop((graph, arena));
    bench.end();
}

#[test]
fn launched_past_the_check_a_graph_writes_over_what_eager_work_left() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 20 * MIB], false);
    let scope = arena.eager_scope(A).unwrap();
    let last = prefill(&scope, &stamps, 60 * MIB, 3 * MIB, 5);
    drop(scope);
    // The replay's writes, without the replay.
    for (_, at, bytes) in &graph.steps {
        stamps.write(*at, *bytes, 1234).unwrap();
    }
    assert!(!stamps.holds(last, 3 * MIB, 5).unwrap(), "the check guards nothing");
    stamps.write(last, 3 * MIB, 6).unwrap();
    graph.replay(&stamps, 9).unwrap();
    assert!(stamps.holds(last, 3 * MIB, 6).unwrap());
    drop((graph, arena));
    bench.end();
}

#[test]
fn a_capture_goes_on_while_pages_leave_under_it() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let space = arena.open_space().unwrap();
    let mut blocks =
        vec![(space.allocate(20 * MIB, A).unwrap(), 20 * MIB), (space.allocate(9000, A).unwrap(), 9000)];
    let freed = space.allocate(30 * MIB, A).unwrap();
    let mut results = Vec::new();
    for round in 0..4 {
        // On a second thread, since this one captures.
        let result = thread::scope(|threads| {
            let work = || {
                let scope = arena.eager_scope(stream(7)).unwrap();
                let small = scope.allocate(700).unwrap();
                stamps.write(small, 700, round).unwrap();
                (prefill(&scope, &stamps, 60 * MIB, 18 * MIB, round), small)
            };
            threads.spawn(work).join().unwrap()
        });
        results.push((result, round));
        if round == 0 {
            space.free(freed).unwrap();
        }
        blocks
            .push((space.allocate((15 + u64::from(round)) * MIB, A).unwrap(), (15 + u64::from(round)) * MIB));
        blocks.push((space.allocate(200 << 10, A).unwrap(), 200 << 10));
        if round == 2 {
            for ((large, small), _) in results.drain(..2) {
                arena.eager_blocks().free(large, &[]).unwrap();
                arena.eager_blocks().free(small, &[]).unwrap();
            }
        }
        assert_eq!(arena.audit(), Ok(()), "round {round}");
    }
    let stays = blocks.remove(1);
    for (at, _) in &blocks {
        space.free(*at).unwrap();
    }
    space.seal().unwrap();
    for round in 10..13 {
        let write = || {
            for (number, (at, bytes)) in blocks.iter().chain([&stays]).enumerate() {
                stamps.write(*at, *bytes, round * 100 + number as u32).unwrap();
            }
            for (number, (at, bytes)) in blocks.iter().chain([&stays]).enumerate() {
                assert!(stamps.holds(*at, *bytes, round * 100 + number as u32).unwrap(), "block {number}");
            }
        };
        space.replay(A, write).unwrap();
        for ((large, small), stamp) in &results {
            assert!(
                stamps.holds(*large, 18 * MIB, *stamp).unwrap() && stamps.holds(*small, 700, *stamp).unwrap()
            );
        }
    }
    drop((space, arena));
    bench.end();
}

#[test]
fn pages_of_a_capture_in_place_stay_where_they_are() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let space = arena.open_space().unwrap();
    let at = space.allocate(40 * MIB, A).unwrap();
    let retained = space.allocate(PAGE, A).unwrap();
    space.free(at).unwrap();
    thread::scope(|threads| {
        let (told, begun) = channel();
        let (end, ended) = channel::<()>();
        let arena = &arena;
        threads.spawn(move || {
            let scope = arena.eager_scope(stream(7)).unwrap();
            told.send(()).unwrap();
            ended.recv().unwrap();
            drop(scope);
        });
        begun.recv().unwrap();
        refused(space.seal_with(RetainPolicy::InPlace), "eager work uses them");
        end.send(()).unwrap();
    });
    space.seal_with(RetainPolicy::InPlace).unwrap();
    let before = bench.faulty.count("unmap");
    for round in 0..3 {
        let scope = arena.eager_scope(A).unwrap();
        let last = prefill(&scope, &stamps, 60 * MIB, 20 * MIB, round);
        drop(scope);
        let write =
            || stamps.write(at, 40 * MIB, 77).and_then(|()| stamps.write(retained, PAGE, 78)).unwrap();
        space.replay(A, write).unwrap();
        assert!(stamps.holds(last, 20 * MIB, round).unwrap());
    }
    assert_eq!(arena.eager_stats().graph_maps, 0);
    assert_eq!(bench.faulty.count("unmap"), before, "a page was exchanged");
    drop((space, arena));
    bench.end();
}

#[test]
fn live_blocks_outlast_a_pause_the_graphs_and_the_arena() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB, 20 * MIB], true);
    let scope = arena.eager_scope(A).unwrap();
    let last = prefill(&scope, &stamps, 60 * MIB, 3 * MIB, 5);
    let (small, kept) = (scope.allocate(900).unwrap(), scope.allocate_kept(1200).unwrap());
    stamps.write(small, 900, 6).and_then(|()| stamps.write(kept, 1200, 7)).unwrap();
    drop(scope);
    graph.replay(&stamps, 1).unwrap();
    let blocks = arena.eager_blocks();
    let holds = || {
        let all = [(last, 3 * MIB, 5), (small, 900, 6), (kept, 1200, 7)];
        all.into_iter().all(|(at, bytes, stamp)| stamps.holds(at, bytes, stamp).unwrap())
    };
    assert_eq!(arena.pause(Fence::default()).unwrap().complete(), Ok(()));
    arena.resume(Duration::ZERO).unwrap();
    assert!(holds());
    graph.replay(&stamps, 2).unwrap();
    arena.trim().unwrap();
    assert!(holds() && graph.holds(&stamps));
    assert_eq!(arena.audit(), Ok(()));
    let scope = arena.eager_scope(A).unwrap();
    let more = prefill(&scope, &stamps, 60 * MIB, 3 * MIB, 8);
    drop(scope);
    assert_ne!(more, last);
    assert_eq!(arena.pause(Fence::default()).unwrap().complete(), Ok(()));
    blocks.free(more, &[]).unwrap();
    arena.resume(Duration::ZERO).unwrap();
    drop(graph);
    drop(arena);
    assert!(holds());
    let held = bench.device.stats();
    assert!(held.physical_bytes - held.free_bytes <= 2 * PAGE + 8 * MIB, "{held:?}");
    blocks.record_stream(last, stream(4)).unwrap();
    blocks.free(last, &[stream(3)]).unwrap();
    assert_eq!(blocks.free(last, &[]), Err(Error::DoubleFree { address: last }).or(blocks.free(last, &[])));
    assert!(stamps.holds(small, 900, 6).unwrap());
    drop(blocks);
    bench.end();
}

#[test]
fn a_scope_may_outlive_its_arena() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB], false);
    let scope = arena.eager_scope(A).unwrap();
    let block = scope.allocate(20 * MIB).unwrap();
    drop(arena);
    stamps.write(block, 20 * MIB, 1).unwrap();
    let blocks = scope.blocks();
    drop(scope);
    graph.replay(&stamps, 2).unwrap();
    assert!(stamps.holds(block, 20 * MIB, 1).unwrap());
    blocks.free(block, &[]).unwrap();
    drop((blocks, graph));
    bench.end();
}

#[test]
fn an_unwinding_scope_ends() {
    let bench = bench();
    let (arena, stamps) = (bench.arena(), bench.stamps());
    let mut graph = Graph::capture(&arena, &[40 * MIB], false);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        let scope = arena.eager_scope(A).unwrap();
        scope.allocate(20 * MIB).unwrap();
        std::panic::resume_unwind(Box::new(1));
    }));
    assert!(caught.is_err());
    graph.replay(&stamps, 2).unwrap();
    assert_eq!((arena.eager_stats().blocks, arena.audit()), (1, Ok(())));
    drop((graph, arena));
    bench.end();
}

#[derive(Clone, Debug)]
enum Step {
    Capture(Vec<u64>, bool),
    Replay(usize),
    Drop(usize),
    FreeRetained(usize),
    Scope { sizes: Vec<(u64, u8)>, other: bool },
    Free(usize, bool),
    Trim,
    Pause,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let bytes = prop_oneof![1_u64..5000, (200_u64 << 10)..(3 * MIB), (10 * MIB)..(50 * MIB)];
    let blocks = proptest::collection::vec((bytes.clone(), any::<u8>()), 1..12);
    let step = prop_oneof![
        2 => (proptest::collection::vec(bytes, 1..8), any::<bool>()).prop_map(|(sizes, retain)| Step::Capture(sizes, retain)),
        6 => any::<usize>().prop_map(Step::Replay),
        1 => any::<usize>().prop_map(Step::Drop),
        1 => any::<usize>().prop_map(Step::FreeRetained),
        5 => (blocks, any::<bool>()).prop_map(|(sizes, other)| Step::Scope { sizes, other }),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(which, read)| Step::Free(which, read)),
        1 => Just(Step::Trim),
        1 => Just(Step::Pause),
    ];
    proptest::collection::vec(step, 4..40)
}

fn carry_out(driver: &SharedDriver, second: Stream, steps: &[Step]) -> Result<(), TestCaseError> {
    let device = Device::with_driver(driver.clone());
    let stamps = Stamps::new(driver, A);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let blocks = arena.eager_blocks();
    let (mut graphs, mut live) = (Vec::<Graph>::new(), Vec::<(Address, u64, u32)>::new());
    for (round, step) in steps.iter().enumerate() {
        let round = round as u32 + 1;
        match step {
            Step::Capture(sizes, retain) => {
                let mut graph = Graph::capture(&arena, sizes, *retain);
                graph.replay(&stamps, round).unwrap();
                graphs.push(graph);
            }
            Step::Replay(which) if !graphs.is_empty() => {
                let which = which % graphs.len();
                graphs[which].replay(&stamps, round).unwrap();
            }
            Step::Drop(which) if !graphs.is_empty() => {
                let which = which % graphs.len();
                drop(graphs.swap_remove(which));
            }
            Step::FreeRetained(which) if !graphs.is_empty() => {
                let which = which % graphs.len();
                let graph = &mut graphs[which];
                graph.retained.drain(..).for_each(|(at, _)| graph.space.free(at).unwrap());
            }
            Step::Scope { sizes, other } => {
                let scope = arena.eager_scope(if *other { second } else { A }).unwrap();
                for (number, (bytes, fate)) in sizes.iter().enumerate() {
                    let at = scope.allocate(*bytes).unwrap();
                    let stamp = round << 8 ^ number as u32;
                    stamps.write(at, *bytes, stamp).unwrap();
                    live.push((at, *bytes, stamp));
                    if fate % 4 != 0 {
                        let (at, bytes, stamp) = live.swap_remove(*fate as usize % live.len());
                        prop_assert!(stamps.holds(at, bytes, stamp).unwrap(), "a scope wrote over a block");
                        scope.free(at).unwrap();
                    }
                }
                prop_assert_eq!(arena.audit(), Ok(()));
            }
            Step::Free(which, read) if !live.is_empty() => {
                let (at, ..) = live.swap_remove(which % live.len());
                blocks.free(at, if *read { &[A] } else { &[] }).unwrap();
            }
            Step::Trim => drop(arena.trim().unwrap()),
            Step::Pause => {
                prop_assert_eq!(arena.pause(Fence::default()).unwrap().complete(), Ok(()));
                arena.resume(Duration::ZERO).unwrap();
            }
            _ => {}
        }
        for (at, bytes, stamp) in &live {
            prop_assert!(stamps.holds(*at, *bytes, *stamp).unwrap(), "a block was lost at {round}: {step:?}");
        }
        for graph in &graphs {
            prop_assert!(graph.holds(&stamps), "a retained block was lost at {round}: {step:?}");
        }
        let stats = arena.eager_stats();
        prop_assert_eq!(stats.blocks, live.len() as u64);
        prop_assert_eq!(arena.audit(), Ok(()), "at {}: {:?}", round, step);
    }
    drop((graphs, arena));
    for (at, bytes, stamp) in &live {
        prop_assert!(stamps.holds(*at, *bytes, *stamp).unwrap(), "a block went with its arena");
    }
    drop(blocks);
    device.trim().unwrap();
    prop_assert_eq!(device.pool().audit_idle(), Ok(()));
    prop_assert_eq!(device.stats().physical_bytes, 0);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn no_order_of_replays_scopes_and_ends_loses_a_byte(steps in steps()) {
        let driver: SharedDriver = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
        carry_out(&driver, stream(9), &steps)?;
    }
}

/// Serializes tests: the stand-in is process-wide.
fn stand_in() -> (SharedDriver, MutexGuard<'static, ()>) {
    let alone = alone();
    (Arc::new(CudaDriver::new(0).unwrap()), alone)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4))]
    #[test]
    fn nor_does_it_on_the_stand_in(steps in steps()) {
        let (driver, _alone) = stand_in();
        carry_out(&driver, A, &steps)?;
    }
}

/// Blocks that outlive their scope go behind the scope's stream, wherever and in whatever scope
/// they are freed.
#[test]
fn a_block_goes_behind_the_stream_of_the_scope_that_it_came_from() {
    const SIDE: Stream = stream(0x51);
    let bench = bench();
    let arena = bench.arena();
    let scope = arena.eager_scope(SIDE).unwrap();
    let (block, kept) = (scope.allocate(MIB).unwrap(), scope.allocate_kept(MIB / 2).unwrap());
    // On its page, which stays.
    let beside = scope.allocate_kept(MIB / 2).unwrap();
    drop(scope);
    // Its stream goes on with them.
    bench.faulty.set_busy(true);
    arena.eager_blocks().free(kept, &[]).unwrap();
    let scope = arena.eager_scope(A).unwrap();
    scope.free(block).unwrap();
    let more = [scope.allocate(MIB).unwrap(), scope.allocate_kept(MIB / 2).unwrap()];
    assert!(!more.contains(&block) && !more.contains(&kept), "bytes that another stream may use");
    bench.faulty.set_busy(false);
    more.iter().chain([&beside]).for_each(|at| scope.free(*at).unwrap());
    drop(scope);
    drop(arena);
    bench.end();
}

/// Graphs may read it as long as they run, at the addresses that eager work had before.
#[test]
fn a_block_of_addresses_that_were_given_up_goes_behind_replays() {
    const SIDE: Stream = stream(0x51);
    let late = ReorderingDriver::new(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()), 1);
    let device = Device::with_driver(late.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let graph = arena.open_space().unwrap();
    let passing = graph.allocate(MIB, A).unwrap();
    graph.free(passing).unwrap();
    graph.seal().unwrap();
    let scope = arena.eager_scope(SIDE).unwrap();
    let blocks = [20 * MIB, 20 * MIB].map(|bytes| scope.allocate(bytes).unwrap());
    drop(scope);
    arena.trim().unwrap();
    let read = Arc::new(AtomicBool::new(false));
    let reading = Arc::clone(&read);
    // Long work: a few pieces of it are done whenever the driver is asked something.
    graph
        .replay(A, || {
            (0..300).for_each(|_| late.launch(A, |_| ()));
            late.launch(A, move |_| reading.store(true, SeqCst));
        })
        .unwrap();
    let unmaps = device.stats().unmaps;
    arena.eager_blocks().free(blocks[0], &[]).unwrap();
    let gone = device.stats().unmaps > unmaps;
    assert!(!gone || read.load(SeqCst), "unmapped while a graph may read it");
    arena.eager_blocks().free(blocks[1], &[]).unwrap();
    drop((graph, arena));
    late.drain();
    device.trim().unwrap();
    assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
}

/// A scope on a thread's default stream, which no other thread can name: what it had been given is
/// noted when the scope ends.
#[test]
fn a_kept_block_goes_behind_the_default_stream_of_another_thread() {
    let bench = bench();
    let arena = bench.arena();
    let (blocks, from_thread) = channel();
    let (end, ends) = channel::<()>();
    thread::scope(|threads| {
        let (arena, ends) = (&arena, ends);
        let thread = threads.spawn(move || {
            let scope = arena.eager_scope(Stream::PER_THREAD).unwrap();
            blocks.send([0; 2].map(|_| scope.allocate_kept(MIB / 2).unwrap())).unwrap();
            drop((scope, blocks));
            let _ = ends.recv();
        });
        let [freed, beside] = from_thread.recv().unwrap();
        let _ = from_thread.recv();
        bench.faulty.set_busy(true);
        arena.eager_blocks().free(freed, &[]).unwrap();
        let scope = arena.eager_scope(A).unwrap();
        let next = scope.allocate_kept(MIB / 2).unwrap();
        bench.faulty.set_busy(false);
        assert_ne!(next, freed, "bytes that another thread's stream may use");
        scope.free(next).unwrap();
        drop((scope, end));
        thread.join().unwrap();
        arena.eager_blocks().free(beside, &[]).unwrap();
    });
    drop(arena);
    bench.end();
}

/// A block where another one lay that was freed within its scope, while a third stream still read
/// it.
#[test]
fn a_block_is_of_its_own_scopes_stream_and_not_of_one_that_lay_there_before() {
    const SIDE: Stream = stream(0x51);
    let bench = bench();
    let arena = bench.arena();
    let scope = arena.eager_scope(SIDE).unwrap();
    let before = scope.allocate(MIB).unwrap();
    bench.faulty.set_busy(true);
    scope.record_stream(before, stream(0x52)).unwrap();
    scope.free(before).unwrap();
    drop(scope);
    bench.faulty.set_busy(false);
    let scope = arena.eager_scope(A).unwrap();
    let block = scope.allocate(MIB).unwrap();
    assert_eq!(block, before, "the test shows nothing");
    drop(scope);
    // Its stream goes on with it.
    bench.faulty.set_busy(true);
    let scope = arena.eager_scope(SIDE).unwrap();
    scope.free(block).unwrap();
    let next = scope.allocate(MIB).unwrap();
    bench.faulty.set_busy(false);
    assert_ne!(next, block, "bytes that another stream may use");
    scope.free(next).unwrap();
    drop((scope, arena));
    bench.end();
}

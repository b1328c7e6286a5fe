//! Dropped small graphs are captured again: the next capture reuses the old addresses with their
//! mapped pages.

use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{Address, HostOptions, Options, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::{Bench, MIB, Random, seeds, stream};

const A: Stream = stream(0xa0);
const KIB: u64 = 1 << 10;

fn bench() -> Bench {
    let host = HostDriver::new(0, HostOptions::default()).unwrap();
    Bench::over(host, A, &Options { expected_bytes: 128 * MIB, ..Options::default() })
}

struct Graph {
    space: Arc<Space>,
    blocks: VmmTorchAllocator,
    passing: Vec<(Address, u64)>,
    output: Address,
}

fn capture(bench: &Bench, sizes: &[u64]) -> Graph {
    let space = bench.arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    blocks.launch_by_replay_only(true);
    blocks.predict_retained();
    let mut passing = Vec::new();
    for bytes in sizes {
        let [first, second] = [0, 1].map(|_| blocks.allocate(*bytes, A, false).unwrap());
        passing.extend([(first, *bytes), (second, *bytes)]);
        [first, second].iter().for_each(|at| blocks.free(*at, &[]).unwrap());
    }
    let output = blocks.allocate(4 * KIB, A, false).unwrap();
    blocks.captured_on(A);
    space.seal().unwrap();
    Graph { space, blocks, passing, output }
}

impl Graph {
    fn replay(&self, bench: &Bench, stamp: u32) {
        let replayed = self.space.replay(A, || {
            for (number, (at, bytes)) in self.passing.iter().enumerate() {
                bench.stamps.write(*at, *bytes, 1000 * stamp + number as u32).unwrap();
                assert!(bench.stamps.holds(*at, *bytes, 1000 * stamp + number as u32).unwrap());
            }
            bench.stamps.write(self.output, 4 * KIB, stamp).unwrap();
        });
        replayed.unwrap();
    }

    fn free_output(&self) {
        self.blocks.free(self.output, &[A]).unwrap();
    }
}

fn calls(bench: &Bench) -> (u64, u64) {
    let stats = bench.device.stats();
    (stats.maps, stats.unmaps)
}

#[test]
fn a_graph_that_is_captured_again_maps_nothing() {
    let sizes = [200 * KIB, 400 * KIB, 6 * KIB];
    for output_lives in [false, true] {
        let bench = bench();
        let first = capture(&bench, &sizes);
        let mut alive = vec![first, capture(&bench, &sizes)];
        let mut outputs = Vec::new();
        let before = calls(&bench);
        for round in 0..20 {
            let gone = alive.remove(0);
            if output_lives {
                outputs.push((gone.blocks.clone(), gone.output));
                drop((gone.space, gone.blocks));
            } else {
                gone.free_output();
                drop(gone);
            }
            let next = capture(&bench, &sizes);
            next.replay(&bench, round);
            alive.push(next);
            if outputs.len() > 5 {
                let (blocks, at) = outputs.remove(0);
                blocks.free(at, &[A]).unwrap();
            }
        }
        let after = calls(&bench);
        assert!(after.0 - before.0 <= 3 && after.1 - before.1 <= 3, "{before:?} to {after:?}");
        assert_eq!(bench.arena.audit(), Ok(()));
        outputs.iter().for_each(|(blocks, at)| blocks.free(*at, &[A]).unwrap());
        alive.iter().for_each(Graph::free_output);
        drop((alive, outputs));
        bench.end();
    }
}

/// The seal may replace pages at addresses that the old graph's replay still uses.
#[test]
fn addresses_that_a_replay_still_uses_are_not_used_again() {
    let bench = bench();
    let graph = capture(&bench, &[200 * KIB]);
    graph.replay(&bench, 1);
    graph.free_output();
    let there = graph.passing[0].0;
    bench.faulty.set_busy(true);
    drop(graph);
    let busy = capture(&bench, &[200 * KIB]);
    assert_ne!(busy.passing[0].0, there);
    bench.faulty.set_busy(false);
    busy.free_output();
    let there = busy.passing[0].0;
    drop(busy);
    let next = capture(&bench, &[200 * KIB]);
    assert_eq!(next.passing[0].0, there);
    next.free_output();
    drop(next);
    bench.end();
}

#[test]
fn what_is_kept_for_the_next_capture_goes_at_a_trim_and_with_the_arena() {
    let bench = bench();
    let graph = capture(&bench, &[200 * KIB, 3 * MIB]);
    graph.replay(&bench, 1);
    graph.free_output();
    drop(graph);
    assert!(bench.arena.stats().physical_bytes > 0);
    bench.arena.trim().unwrap();
    assert_eq!(bench.device.stats().reservations, 0);
    let graph = capture(&bench, &[200 * KIB, 3 * MIB]);
    graph.free_output();
    drop(graph);
    bench.device.trim().unwrap();
    assert_eq!(bench.device.stats().physical_bytes, 0);
    drop(capture(&bench, &[200 * KIB]));
    bench.end();
}

/// Different shapes need different pages or counts.
#[test]
fn captures_of_any_shape_are_right_in_addresses_of_others() {
    for seed in seeds(40) {
        let mut random = Random::new(seed);
        let bench = bench();
        let mut alive: Vec<Graph> = Vec::new();
        for round in 0..30 {
            let count = 1 + random.below(4);
            let choices = [3 * KIB, 200 * KIB, 400 * KIB, MIB, 3 * MIB, 5 * MIB];
            let sizes: Vec<u64> = (0..count).map(|_| random.choose(&choices)).collect();
            bench.faulty.set_busy(random.below(3) == 0);
            alive.push(capture(&bench, &sizes));
            bench.faulty.set_busy(false);
            alive.iter().for_each(|graph| graph.replay(&bench, round));
            for graph in &alive {
                assert!(bench.stamps.holds(graph.output, 4 * KIB, round).unwrap(), "seed {seed}");
            }
            while alive.len() as u64 > random.below(4) {
                let gone = alive.swap_remove(random.below(alive.len() as u64) as usize);
                bench.faulty.set_busy(random.below(3) == 0);
                gone.free_output();
                drop(gone);
                bench.faulty.set_busy(false);
            }
            assert_eq!(bench.arena.audit(), Ok(()), "seed {seed}");
        }
        alive.iter().for_each(Graph::free_output);
        drop(alive);
        bench.end();
    }
}

#[test]
fn few_addresses_are_kept_for_the_next_graph() {
    let bench = bench();
    let graphs: Vec<_> = (0..12).map(|_| capture(&bench, &[200 * KIB])).collect();
    let before = bench.device.stats().reservations;
    graphs.iter().for_each(Graph::free_output);
    drop(graphs);
    let after = bench.device.stats().reservations;
    assert!(after + 8 <= before, "{before} ranges of twelve graphs, {after} when they are gone");
    bench.end();
}

/// A graph that ends while its arena is paused leaves no addresses for the next one: their pages
/// would come back for nobody.
#[test]
fn a_graph_that_ends_while_paused_takes_no_memory_at_the_resume() {
    let bench = bench();
    let graph = capture(&bench, &[200 * KIB]);
    graph.free_output();
    bench.arena.pause(Fence::default()).unwrap().complete().unwrap();
    drop(graph);
    bench.arena.resume(Duration::ZERO).unwrap();
    assert_eq!(bench.arena.mapped_size(), 0);
    bench.end();
}

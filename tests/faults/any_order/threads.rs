//! Programs on several threads over one device with late streams.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::{HostOptions, Stream};
use vmmgraph_testkit::{FaultyDriver, Random, ReorderingDriver, seeds};

use super::lending::Program;
use super::rings::Rings;
use super::world::{Beside, Graph, KIB, Refused, World, done};

fn run(seed: u64, beside: Beside) -> u64 {
    let memory_bytes = (50 + seed % 5 * 20) * 16 * KIB;
    let host = Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes }).unwrap());
    let late = ReorderingDriver::new(host.clone(), seed);
    let faulty = FaultyDriver::new(late.clone());
    let mut world = World::over(&late, faulty.clone(), beside);
    world.shared = true;
    if seed % 4 > 1 || beside == Beside::Captures {
        world.streams.push(Stream::PER_THREAD);
    }
    if seed % 3 == 2 {
        world.streams.push(Stream::LEGACY);
    }
    let rings = [1, 2].map(|number| Rings::new(seed * 3 + number, world.again()));
    let mut replaying = world.again();
    let mut lending = Program::new(seed, world);
    let mut random = Random::new(!seed);
    // Graphs of an arena used by a second thread.
    let arena = &lending.arenas[0];
    let mut graphs: Vec<Graph> = (0..2).map(|_| replaying.capture(arena, &mut random).unwrap()).collect();
    let (rings, graphs) = thread::scope(|scope| {
        let replays = scope.spawn(move || {
            for number in 0..250 {
                let stream = replaying.stream(&mut random);
                let graph = &mut graphs[number as usize % 2];
                done(replaying.replay(graph, stream, number));
                replaying.may_be_captured(stream, &mut random);
            }
            replaying.end_capture();
            graphs
        });
        let rings = rings.map(|mut rings| {
            scope.spawn(move || {
                (0..150).for_each(|number| rings.step(number));
                rings.world.end_capture();
                rings
            })
        });
        for number in 0..150 {
            let refused = Refused::some(beside, &faulty, &mut lending.random);
            lending.step(number);
            drop(refused);
        }
        lending.world.end_capture();
        (rings.map(|rings| rings.join().unwrap()), replays.join().unwrap())
    });
    if done(lending.arenas[0].resume(Duration::ZERO)).is_some() {
        lending.graphs.extend(graphs);
    } else {
        drop(graphs);
    }
    for rings in rings {
        drop(rings.leave());
    }
    let wrong = lending.leave(seed.is_multiple_of(2)).end();
    drop((late, faulty));
    assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]), "seed {seed}");
    wrong
}

#[test]
fn programs_on_threads_of_their_own_share_a_device_in_whatever_order_streams_work() {
    seeds(20).for_each(|seed| assert_eq!(run(seed, Beside::Nothing), 0, "seed {seed}"));
}

#[test]
fn the_same_while_the_driver_refuses_calls_now_and_then() {
    seeds(8).for_each(|seed| assert_eq!(run(seed, Beside::Refusals), 0, "seed {seed}"));
}

#[test]
fn the_same_while_each_threads_own_stream_is_captured_now_and_then() {
    seeds(12).for_each(|seed| assert_eq!(run(seed, Beside::Captures), 0, "seed {seed}"));
}

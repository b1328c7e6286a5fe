//! Graphs, eager work, outputs, regions and private blocks, with pauses and resumes, on late
//! streams. A missing wait shows as wrong bytes or work on freed memory.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{HostOptions, Policy, Ready, Region, RegionOptions, SharedVmmAllocator};
use vmmgraph_testkit::{FaultyDriver, MIB, Random, ReorderingDriver, seeds};

mod contents;
mod exports;
mod lending;
mod rings;
mod threads;
mod workspaces;
mod world;

use world::{Beside, Block, Graph, KIB, Refused, World, arena_options, done};

const NOW: Duration = Duration::ZERO;
const POLICIES: [Policy; 4] = [Policy::Discard, Policy::Zero, Policy::Backup, Policy::Keep];

#[derive(Clone, Copy)]
enum HostMemory {
    Registered,
    /// A few registered staging buffers.
    ThroughBuffers,
    /// The driver refuses every registration.
    Pageable,
}

fn run(seed: u64, host_memory: HostMemory, beside: Beside) -> u64 {
    let host =
        Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 256 * MIB }).unwrap());
    let late = ReorderingDriver::new(host.clone(), seed);
    let faulty = FaultyDriver::new(late.clone());
    let mut world = World::over(&late, faulty.clone(), beside);
    let device = world.device.clone();
    match host_memory {
        HostMemory::Registered => {}
        HostMemory::ThroughBuffers => {
            // Fails the registration of the backup memory; staging buffers are registered.
            faulty.arm(&[1]);
            device.host_pool().prepare(8 * MIB).unwrap();
            faulty.arm(&[]);
            assert_eq!(device.host_pool().stats().registered_bytes, 0);
        }
        HostMemory::Pageable => faulty.refuse("host_register", true),
    }
    let mut random = Random::new(seed);
    let arena = SharedVmmAllocator::new(&device, &arena_options("aside")).unwrap();
    let of_region = RegionOptions { page_bytes: 8 * KIB, ..RegionOptions::default() };
    let region: Arc<Region> = device.region("aside", of_region).unwrap();
    let mut graphs: Vec<Graph> = Vec::new();
    let mut blocks: Vec<(Block, Policy)> = Vec::new();
    let (mut results, mut exclusives): (Vec<Block>, Vec<Block>) = (Vec::new(), Vec::new());
    let (mut paused, mut ready): (bool, Option<Ready>) = (false, None);
    for number in 0..120_u8 {
        let stream = world.stream(&mut random);
        let refused = Refused::some(beside, &faulty, &mut random);
        let behind_contents = |ready: &mut Option<Ready>| match ready {
            Some(ready) if number % 2 == 0 => ready.before(stream),
            _ => region.before(stream),
        };
        let graph = random.below(graphs.len().max(1) as u64) as usize;
        let block = random.below(blocks.len().max(1) as u64) as usize;
        match random.below(30) {
            0 | 1 if !paused && graphs.len() < 4 => {
                graphs.extend(done(world.capture(&arena, &mut random)));
            }
            2..6 if !paused && !graphs.is_empty() => {
                done(world.replay(&mut graphs[graph], stream, number));
                world.may_be_captured(stream, &mut random);
            }
            6 | 7 if !paused && !graphs.is_empty() => {
                let Graph { space, output, .. } = &mut graphs[graph];
                if ready.as_mut().is_some_and(|ready| done(ready.before(stream)).is_none()) {
                    continue;
                }
                world.use_on(output, stream, None);
                world.may_be_captured(stream, &mut random);
                space.record_stream(output.at, stream).unwrap();
            }
            8 if graphs.len() > 2 => drop(graphs.swap_remove(graph)),
            9 | 10 if !paused && blocks.len() < 8 => {
                let (policy, bytes) = (random.choose(&POLICIES), random.choose(&[1, 6, 30]) * KIB);
                if let Some(at) = done(region.allocate_as(bytes, policy, stream)) {
                    let mut block = Block::new(at, bytes);
                    world.use_on(&mut block, stream, Some(number));
                    blocks.push((block, policy));
                }
            }
            11..15 if !paused && !blocks.is_empty() => {
                if done(behind_contents(&mut ready)).is_none() {
                    continue;
                }
                world.use_on(&mut blocks[block].0, stream, Some(number));
                world.may_be_captured(stream, &mut random);
                region.record_stream(blocks[block].0.at, stream).unwrap();
            }
            15 if blocks.len() > 3 => region.free(blocks.swap_remove(block).0.at).unwrap(),
            16 => drop(arena.mark()),
            17 | 18 if !paused => {
                // A failed pause leaves the memory and its contents, in the paused state.
                let paused_all =
                    done(device.pause(&["aside"], Fence::default()).and_then(|report| report.complete()));
                (paused, ready) = (true, None);
                for (block, policy) in &mut blocks {
                    match policy {
                        Policy::Discard => block.byte = None,
                        Policy::Zero => block.byte = paused_all.map(|()| 0),
                        _ => {}
                    }
                }
            }
            17..20 if paused => {
                paused = if number % 3 == 0 {
                    done(device.resume(&["aside"], NOW)).is_none()
                } else {
                    let resumed = done(device.resume_async(&["aside"], NOW));
                    resumed.map(|(_, mut contents)| ready = contents.pop()).is_none()
                };
            }
            20 | 21 if !paused && results.len() < 6 => {
                if let Some(scope) = done(arena.eager_scope(stream)) {
                    results
                        .extend(done(world.eager(&scope, &mut random, stream, number)).unwrap_or_default());
                }
            }
            22..25 if !paused && !results.is_empty() => {
                if ready.as_mut().is_some_and(|ready| done(ready.before(stream)).is_none()) {
                    continue;
                }
                let at = random.below(results.len() as u64) as usize;
                let eager = arena.eager_blocks();
                world.use_on(&mut results[at], stream, (number % 2 == 0).then_some(number));
                world.may_be_captured(stream, &mut random);
                match random.below(3) {
                    0 => eager.record_stream(results[at].at, stream).unwrap(),
                    1 => eager.free(results.swap_remove(at).at, &[stream]).unwrap(),
                    _ => {
                        eager.record_stream(results[at].at, stream).unwrap();
                        eager.free(results.swap_remove(at).at, &[]).unwrap();
                    }
                }
            }
            25 if !paused && exclusives.len() < 2 => {
                let at = done(arena.allocate_exclusive(8 * KIB, 0));
                exclusives.extend(at.map(|at| Block { at, bytes: 8 * KIB, byte: Some(0), mark: None }));
            }
            26 if !exclusives.is_empty() => world.use_on(&mut exclusives[0], stream, Some(number)),
            27 if !exclusives.is_empty() => {
                let block = exclusives.remove(0);
                block.mark.iter().for_each(|mark| mark.block().unwrap());
                arena.free_exclusive(block.at).unwrap();
            }
            28 if !paused => drop(done(arena.trim())),
            _ => {}
        }
        drop(refused);
    }
    if paused {
        device.resume(&["aside"], NOW).unwrap();
    } else if let Some(ready) = &mut ready {
        ready.wait().unwrap();
    }
    let last = world.stream(&mut random);
    for Graph { space, output, .. } in &mut graphs {
        world.use_on(output, last, None);
        space.record_stream(output.at, last).unwrap();
    }
    for (block, _) in &mut blocks {
        world.use_on(block, last, None);
        region.record_stream(block.at, last).unwrap();
    }
    for block in &mut results {
        world.use_on(block, last, None);
        arena.eager_blocks().record_stream(block.at, last).unwrap();
    }
    for block in &mut exclusives {
        world.use_on(block, last, None);
    }
    // Otherwise everything is freed during the work, except private blocks, which record no
    // streams.
    if seed.is_multiple_of(2) || !exclusives.is_empty() {
        late.drain();
    }
    assert_eq!(device.pool().audit(), Ok(()));
    drop((graphs, arena, region, ready));
    late.drain();
    world.end_capture();
    device.trim().unwrap();
    device.host_pool().trim().unwrap();
    assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
    let wrong = world.wrong.load(Relaxed);
    drop((world, device, blocks, results, exclusives, late));
    assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
    wrong
}

#[test]
fn what_steps_aside_comes_back_in_whatever_order_streams_work() {
    for seed in seeds(120) {
        assert_eq!(run(seed, HostMemory::Registered, Beside::Nothing), 0, "seed {seed}");
    }
}

#[test]
fn the_same_where_host_memory_is_not_registered() {
    for seed in seeds(100) {
        assert_eq!(run(seed, HostMemory::ThroughBuffers, Beside::Nothing), 0, "seed {seed}");
    }
}

#[test]
fn the_same_where_no_host_memory_can_be_registered() {
    for seed in seeds(100) {
        assert_eq!(run(seed, HostMemory::Pageable, Beside::Nothing), 0, "seed {seed}");
    }
}

#[test]
fn the_same_while_the_driver_refuses_calls_now_and_then() {
    for seed in seeds(40) {
        let memory = [HostMemory::Registered, HostMemory::ThroughBuffers][seed as usize % 2];
        assert_eq!(run(seed, memory, Beside::Refusals), 0, "seed {seed}");
    }
}

#[test]
fn the_same_while_streams_are_captured_now_and_then() {
    for seed in seeds(60) {
        let memory = [HostMemory::Registered, HostMemory::ThroughBuffers][seed as usize % 2];
        assert_eq!(run(seed, memory, Beside::Captures), 0, "seed {seed}");
    }
}

//! Exported pages of graphs and eager work, read and written by peers on their own streams.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{Extent, Fence, Owner};
use vmmgraph::{Error, Handles, HostOptions, PagePin, PeerExtent, PeerMap, SharedVmmAllocator};
use vmmgraph_testkit::{Random, ReorderingDriver, seeds};

use super::world::{Beside, Block, Graph, World, arena_options, done};

/// Importer of a graph's output, in this process.
struct Peer {
    map: PeerMap,
    pins: Vec<PagePin>,
    seen: Block,
    owner: u64,
    /// True if only the output is on its pages: the pages then outlive the graph.
    alone: bool,
}

impl Peer {
    fn new(world: &World, graph: &Graph, extents: &[Extent]) -> Self {
        let Graph { space, output, .. } = graph;
        let (mut pages, mut pins) = (Vec::new(), Vec::new());
        let own =
            |extent: &Extent| matches!(world.device.pool().owner(extent.page), Some(Owner::Retained { .. }));
        let alone = extents.iter().all(own);
        for extent in extents {
            let exported = world.device.export_page(extent.page).unwrap();
            pages.push(world.device.import(exported.fd.as_fd(), extent.page_bytes).unwrap());
            pins.push(exported.pin);
        }
        let part =
            |(page, extent): (_, &Extent)| PeerExtent { page, offset: extent.offset, bytes: extent.bytes };
        let parts: Vec<PeerExtent<'_>> = pages.iter().zip(extents).map(part).collect();
        let map = world.device.map_peer(&parts).unwrap();
        let seen =
            Block { at: map.address(), bytes: output.bytes, byte: output.byte, mark: output.mark.clone() };
        Self { map, pins, seen, owner: space.id(), alone }
    }
}

/// Propagates contents and last use of an output to the graph and all peers.
fn tell(
    owner: u64,
    used: (Option<u8>, Option<vmmgraph::pages::Mark>),
    graphs: &mut [Graph],
    peers: &mut [Peer],
) {
    let outputs = graphs.iter_mut().filter(|graph| graph.space.id() == owner).map(|graph| &mut graph.output);
    let seen = peers.iter_mut().filter(|peer| peer.owner == owner).map(|peer| &mut peer.seen);
    outputs.chain(seen).for_each(|block| (block.byte, block.mark) = used.clone());
}

fn run(seed: u64, beside: Beside) -> u64 {
    let options = HostOptions { granularity: 4096, memory_bytes: 64 << 20 };
    let host = Arc::new(HostDriver::new(0, options).unwrap().with_sharing(Handles::Fd));
    let late = ReorderingDriver::new(host.clone(), seed);
    let mut world = World::over(&late, late.clone(), beside);
    let device = world.device.clone();
    let mut random = Random::new(seed);
    let arena = SharedVmmAllocator::new(&device, &arena_options("shared")).unwrap();
    let (mut graphs, mut peers): (Vec<Graph>, Vec<Peer>) = (Vec::new(), Vec::new());
    let mut results: Vec<Block> = Vec::new();
    for number in 0..140_u8 {
        let stream = world.stream(&mut random);
        let graph = random.below(graphs.len().max(1) as u64) as usize;
        let peer = random.below(peers.len().max(1) as u64) as usize;
        match random.below(24) {
            0..2 if graphs.len() < 5 => graphs.push(world.capture(&arena, &mut random).unwrap()),
            2..6 if !graphs.is_empty() => {
                done(world.replay(&mut graphs[graph], stream, number));
                world.may_be_captured(stream, &mut random);
                let Graph { space, output, .. } = &graphs[graph];
                tell(space.id(), (output.byte, output.mark.clone()), &mut [], &mut peers);
            }
            6 | 7 if !graphs.is_empty() => {
                let Graph { space, output, .. } = &mut graphs[graph];
                world.use_on(output, stream, None);
                world.may_be_captured(stream, &mut random);
                space.record_stream(output.at, stream).unwrap();
                tell(space.id(), (output.byte, output.mark.clone()), &mut [], &mut peers);
            }
            8 if graphs.len() > 2 => {
                let gone = graphs.swap_remove(graph).space.id();
                let shared = peers.iter_mut().filter(|peer| peer.owner == gone && !peer.alone);
                shared.for_each(|peer| (peer.owner, peer.seen.byte) = (0, None));
            }
            9..11 if !graphs.is_empty() && peers.len() < 6 => {
                let Graph { space, output, .. } = &graphs[graph];
                match space.export(output.at, output.bytes) {
                    Ok(extents) => peers.push(Peer::new(&world, &graphs[graph], &extents)),
                    Err(Error::WrongState { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            11..15 if !peers.is_empty() && peers[peer].owner > 0 => {
                let Peer { map, seen, owner, .. } = &mut peers[peer];
                world.use_on(seen, stream, (number % 2 == 0).then_some(number));
                world.may_be_captured(stream, &mut random);
                map.used_by(stream);
                let (owner, used) = (*owner, (seen.byte, seen.mark.clone()));
                tell(owner, used, &mut graphs, &mut peers);
            }
            15 | 16 if !peers.is_empty() => {
                // The unmap follows the recorded streams; pins end with their work.
                let Peer { map, pins, seen, .. } = peers.swap_remove(peer);
                drop(map);
                seen.mark.iter().for_each(|mark| mark.block().unwrap());
                drop(pins);
            }
            17 | 18 if results.len() < 4 => {
                if let Some(scope) = done(arena.eager_scope(stream)) {
                    results.extend(world.eager(&scope, &mut random, stream, number).unwrap());
                }
            }
            19 if !results.is_empty() => {
                let at = random.below(results.len() as u64) as usize;
                world.use_on(&mut results[at], stream, None);
                arena.eager_blocks().free(results.swap_remove(at).at, &[stream]).unwrap();
            }
            20 => drop(done(arena.trim())),
            21 => match arena.pause(Fence::default()) {
                Ok(_) => drop(arena.resume(Duration::ZERO).unwrap()),
                Err(Error::Exported { .. }) => assert!(!peers.is_empty()),
                Err(Error::StreamCapturing { .. }) => assert_eq!(beside, Beside::Captures),
                Err(error) => panic!("{error}"),
            },
            22 => drop(arena.mark()),
            _ => {}
        }
    }
    let last = world.stream(&mut random);
    for Graph { space, output, .. } in &mut graphs {
        world.use_on(output, last, None);
        space.record_stream(output.at, last).unwrap();
    }
    for Peer { map, seen, .. } in &mut peers {
        world.use_on(seen, last, None);
        map.used_by(last);
    }
    for block in &mut results {
        world.use_on(block, last, None);
        arena.eager_blocks().record_stream(block.at, last).unwrap();
    }
    // Exported pages are destroyed during their use; the pins end after the use.
    let (maps, pins): (Vec<PeerMap>, Vec<_>) = peers.into_iter().map(|peer| (peer.map, peer.pins)).unzip();
    drop((maps, graphs));
    if seed.is_multiple_of(2) || !pins.is_empty() {
        late.drain();
    }
    assert_eq!((device.pool().audit(), arena.audit()), (Ok(()), Ok(())));
    drop((arena, pins));
    late.drain();
    world.end_capture();
    device.trim().unwrap();
    assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
    let wrong = world.wrong.load(Relaxed);
    drop((world, device, results, late));
    assert_eq!(host.leftovers(), [0; 4]);
    wrong
}

#[test]
fn what_others_have_is_theirs_in_whatever_order_streams_work() {
    for seed in seeds(100) {
        assert_eq!(run(seed, Beside::Nothing), 0, "seed {seed}");
    }
}

#[test]
fn the_same_while_streams_are_captured_now_and_then() {
    seeds(40).for_each(|seed| assert_eq!(run(seed, Beside::Captures), 0, "seed {seed}"));
}

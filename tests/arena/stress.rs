//! Sixteen threads use the same arenas at once; all guaranteed contents are checked.
//!
//! * All threads open, capture, seal, replay and drop shared spaces. Replays stamp and check blocks
//!   in capture order, exclusively. Live-out blocks keep their stamp.
//! * All threads allocate from one open space on their own streams: live blocks never share a page.
//!
//! VMMGRAPH_STRESS_SECONDS sets the duration, by default 3 seconds.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant};

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, RetainPolicy, SharedVmmAllocator, Space, Stream,
};
use vmmgraph_testkit::{Random, Stamps, stream};

const THREADS: u64 = 16;
const STREAMS: u64 = 3;
/// Small, so that memory often runs out.
const MEMORY: u64 = 24 << 20;
/// Limit of spaces, besides those held by a thread: live bytes stay bounded.
const SPACES: usize = 64;
/// Limit of live blocks per space.
const LIVE: usize = 24;
/// Limit of a block's bytes.
const BLOCK: u64 = 1 << 20;

fn seconds() -> Duration {
    let text = std::env::var("VMMGRAPH_STRESS_SECONDS").unwrap_or_default();
    Duration::from_secs_f64(text.parse().unwrap_or(3.0))
}

fn bytes(random: &mut Random) -> u64 {
    match random.below(4) {
        0 => 1 + random.below(2000),
        1 => 1 + random.below(20 << 10),
        2 => 1 + random.below(200 << 10),
        _ => 1 + random.below(BLOCK),
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Step {
    Allocate(usize),
    Free(usize),
}

struct Block {
    at: Address,
    bytes: u64,
    /// Used by a second stream: a freed block is not reused before the seal.
    crossing: bool,
    live: bool,
}

#[derive(Default)]
struct History {
    steps: Vec<Step>,
    blocks: Vec<Block>,
    sealed: Option<RetainPolicy>,
    round: u32,
}

struct Shape {
    space: Arc<Space>,
    history: Mutex<History>,
}

#[derive(Default)]
struct Counts {
    calls: AtomicU64,
    checked: AtomicU64,
    replays: AtomicU64,
    refused: AtomicU64,
}

struct World {
    driver: SharedDriver,
    device: Arc<Device>,
    arena: SharedVmmAllocator,
    shapes: Mutex<Vec<Arc<Shape>>>,
    /// The space of all threads, in its own arena.
    common: RwLock<Arc<Space>>,
    common_arena: SharedVmmAllocator,
    counts: Counts,
    rounds: AtomicU64,
}

fn stamp(space: &Space, round: u32, id: usize) -> u32 {
    (space.id() as u32).wrapping_mul(0x9e37_79b9) ^ round.wrapping_mul(0x85eb_ca6b) ^ id as u32
}

impl World {
    fn new() -> (Arc<HostDriver>, Self) {
        let host = HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: MEMORY }).unwrap();
        let host = Arc::new(host);
        let driver: SharedDriver = host.clone();
        let device = Device::with_driver(host.clone());
        let options =
            Options { small_page_bytes: 16 << 10, large_page_bytes: 128 << 10, ..Options::default() };
        let arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let common_arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let common = RwLock::new(common_arena.open_space().unwrap());
        let (shapes, counts, rounds) = (Mutex::default(), Counts::default(), AtomicU64::new(1));
        (host, Self { driver, device, arena, shapes, common, common_arena, counts, rounds })
    }

    fn any_shape(&self, random: &mut Random) -> Option<Arc<Shape>> {
        let shapes = self.shapes.lock().unwrap();
        let pick = random.below(shapes.len().max(1) as u64) as usize;
        shapes.get(pick).cloned()
    }

    fn drop_one_above(&self, most: usize, random: &mut Random) {
        let mut shapes = self.shapes.lock().unwrap();
        let dropped = (shapes.len() > most).then(|| {
            let pick = random.below(shapes.len() as u64) as usize;
            shapes.swap_remove(pick)
        });
        drop(shapes);
        drop(dropped);
    }

    fn allowed(&self, error: &Error) {
        assert!(error.is_out_of_memory(), "{error}");
        self.counts.refused.fetch_add(1, Relaxed);
    }

    fn capture(&self, shape: &Shape, random: &mut Random) {
        let mut history = shape.history.lock().unwrap();
        if history.sealed.is_some() {
            assert!(matches!(shape.space.allocate(512, Stream::LEGACY), Err(Error::WrongState { .. })));
            return;
        }
        let live: Vec<usize> = (0..history.blocks.len()).filter(|id| history.blocks[*id].live).collect();
        if live.len() < LIVE && (live.len() < 4 || random.below(2) == 0) {
            let bytes = bytes(random);
            match shape.space.allocate(bytes, stream(random.below(STREAMS))) {
                Ok(at) => {
                    let id = history.blocks.len();
                    history.blocks.push(Block { at, bytes, crossing: false, live: true });
                    history.steps.push(Step::Allocate(id));
                }
                Err(error) => self.allowed(&error),
            }
        } else {
            let id = live[random.below(live.len() as u64) as usize];
            let at = history.blocks[id].at;
            if random.below(4) == 0 {
                shape.space.record_stream(at, stream(7)).unwrap();
                history.blocks[id].crossing = true;
            } else {
                shape.space.free(at).unwrap();
                history.blocks[id].live = false;
                history.steps.push(Step::Free(id));
            }
        }
    }

    fn seal(&self, shape: &Shape, random: &mut Random) {
        let mut history = shape.history.lock().unwrap();
        if history.sealed.is_some() {
            return assert!(matches!(shape.space.seal(), Err(Error::WrongState { .. })));
        }
        let policy = if random.below(4) == 0 { RetainPolicy::Share } else { RetainPolicy::Retain };
        match shape.space.seal_with(policy) {
            Ok(report) => {
                let live = history.blocks.iter().filter(|block| block.live).count();
                assert_eq!(report.retained.len(), live);
                history.sealed = Some(policy);
            }
            Err(error) => self.allowed(&error),
        }
    }

    fn replay(&self, shape: &Shape, random: &mut Random) {
        let mut history = shape.history.lock().unwrap();
        let stream = stream(random.below(STREAMS));
        if history.sealed.is_none() {
            let early = shape.space.replay(stream, || panic!("launched an open space"));
            return assert!(matches!(early, Err(Error::WrongState { .. })));
        }
        let stamps = Stamps::new(&self.driver, stream);
        let round = self.rounds.fetch_add(1, Relaxed) as u32;
        let launch = || {
            let mut checked = 0;
            let mut holds = |id: usize| {
                let Block { at, bytes, .. } = history.blocks[id];
                checked += 1;
                assert!(
                    stamps.holds(at, bytes, stamp(&shape.space, round, id)).unwrap(),
                    "block {id} was overwritten"
                );
            };
            let mut parked = Vec::new();
            for step in &history.steps {
                match *step {
                    Step::Allocate(id) => {
                        let Block { at, bytes, .. } = history.blocks[id];
                        stamps.write(at, bytes, stamp(&shape.space, round, id)).unwrap();
                    }
                    Step::Free(id) => {
                        holds(id);
                        if history.blocks[id].crossing {
                            parked.push(id);
                        }
                    }
                }
            }
            parked.into_iter().for_each(&mut holds);
            (0..history.blocks.len()).filter(|id| history.blocks[*id].live).for_each(&mut holds);
            checked
        };
        let checked = shape.space.replay(stream, launch).unwrap();
        history.round = round;
        self.counts.checked.fetch_add(checked, Relaxed);
        self.counts.replays.fetch_add(1, Relaxed);
    }

    fn retained(&self, shape: &Shape, random: &mut Random) {
        let mut history = shape.history.lock().unwrap();
        if history.sealed != Some(RetainPolicy::Retain) || history.round == 0 {
            return;
        }
        let stamps = Stamps::new(&self.driver, Stream::LEGACY);
        let round = history.round;
        for (id, block) in history.blocks.iter_mut().enumerate().filter(|(_, block)| block.live) {
            self.counts.checked.fetch_add(1, Relaxed);
            let kept = stamps.holds(block.at, block.bytes, stamp(&shape.space, round, id)).unwrap();
            assert!(kept, "another graph wrote to retained block {id}");
            if random.below(6) == 0 {
                shape.space.free(block.at).unwrap();
                block.live = false;
            }
        }
        // Replays of a space still write its freed live-out blocks, in order.
    }

    fn common(&self, random: &mut Random, thread: u64) {
        let space = self.common.read().unwrap();
        let stamps = Stamps::new(&self.driver, Stream::LEGACY);
        let mut held = HashMap::new();
        for turn in 0..8u32 {
            let (bytes, mark) =
                (bytes(random), (thread as u32) << 24 | turn << 16 | random.below(1 << 16) as u32);
            match space.allocate(bytes, stream(thread % 5)) {
                Ok(at) => {
                    stamps.write(at, bytes, mark).unwrap();
                    held.insert(at, (bytes, mark));
                }
                Err(error) => self.allowed(&error),
            }
            if random.below(2) == 0 {
                std::thread::yield_now();
            }
        }
        for (at, (bytes, mark)) in held {
            self.counts.checked.fetch_add(1, Relaxed);
            let kept = stamps.holds(at, bytes, mark).unwrap();
            assert!(kept, "{at:?}: two live blocks of one space share memory");
            space.free(at).unwrap();
        }
        drop(space);
        if random.below(40) == 0 {
            // Exclusive: the seal replaces pages under blocks, and two open spaces of an arena
            // share pages.
            let mut space = self.common.write().unwrap();
            for _ in 0..3 {
                let _ = space.allocate(bytes(random), Stream::LEGACY).map_err(|error| self.allowed(&error));
            }
            let _ = space.seal().map_err(|error| self.allowed(&error));
            *space = self.common_arena.open_space().unwrap();
        }
    }

    fn act(&self, random: &mut Random, thread: u64) {
        self.counts.calls.fetch_add(1, Relaxed);
        let shape = self.any_shape(random);
        match (random.below(32), shape) {
            (0..=1, _) | (_, None) => {
                let space = self.arena.open_space().unwrap();
                let shape = Arc::new(Shape { space, history: Mutex::default() });
                self.shapes.lock().unwrap().push(shape);
                self.drop_one_above(SPACES, random);
            }
            (2, _) => self.drop_one_above(12, random),
            (3..=16, Some(shape)) => self.capture(&shape, random),
            (17..=18, Some(shape)) => self.seal(&shape, random),
            (19..=22, Some(shape)) => self.replay(&shape, random),
            (23..=24, Some(shape)) => self.retained(&shape, random),
            (25, _) => drop(self.arena.trim().unwrap()),
            (26, _) => self.arena.mark().unwrap(),
            (27, _) => {
                let stats = self.arena.stats();
                // Each thread holds one space at most, possibly already dropped from the list.
                let live = (SPACES as u64 + 1 + THREADS) * LIVE as u64 * BLOCK;
                assert!(stats.blocks < 1 << 20 && stats.live_bytes <= live, "{stats:?}");
                let snapshot = self.arena.snapshot();
                assert!(snapshot.to_json().len() > 2 && snapshot.to_string().lines().count() > 1);
            }
            (28, _) => self.device.pool().audit().unwrap(),
            _ => self.common(random, thread),
        }
        assert!(self.device.stats().peak_physical_bytes <= MEMORY);
    }
}

#[test]
fn sixteen_threads() {
    let (host, world) = World::new();
    let until = Instant::now() + seconds();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let world = &world;
            scope.spawn(move || {
                let mut random = Random::new(0x9e37_79b9_7f4a_7c15 ^ (thread + 1) << 17);
                while Instant::now() < until {
                    world.act(&mut random, thread);
                }
            });
        }
    });
    let World { device, arena, shapes, common, common_arena, counts, .. } = world;
    let [calls, checked, replays, refused] =
        [&counts.calls, &counts.checked, &counts.replays, &counts.refused].map(|n| n.load(Relaxed));
    println!(
        "{THREADS} threads: {calls} calls, {replays} replays, {checked} blocks checked, {refused} refused for lack of memory"
    );
    assert!(calls > 1000 && replays > 10 && checked > 100 && refused > 0, "nothing happened");
    assert_eq!(device.pool().audit_idle(), Ok(()));

    drop((shapes, common));
    assert_eq!((device.stats().mappings, device.stats().retained_bytes), (0, 0));
    arena.trim().unwrap();
    common_arena.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
    let stats = device.stats();
    assert_eq!((stats.physical_bytes, stats.pages, stats.reserved_bytes, stats.pending), (0, 0, 0, 0));
    assert_eq!((stats.pages_created, stats.maps), (stats.pages_released, stats.unmaps));
    drop((arena, common_arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

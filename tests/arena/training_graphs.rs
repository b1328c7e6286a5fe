//! Forward and backward passes as separate graphs in one arena, as by torch's
//! `make_graphed_callables`: the backward capture frees tensors saved by the forward pass, whose
//! pages later pairs share.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::{Address, HostOptions, Options, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::{
    Bench, Event, MIB, Random, Shape, Trace, private_pools_bytes, seeds, shuffle, stream,
};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);
const KIB: u64 = 1 << 10;

#[derive(Clone, Copy, Debug)]
struct Block {
    at: Address,
    bytes: u64,
    id: usize,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Write(Block),
    Read(Block),
}

struct Pass {
    space: Arc<Space>,
    blocks: VmmTorchAllocator,
    steps: Vec<Step>,
}

struct Pair {
    forward: Pass,
    backward: Option<Pass>,
    saved: Vec<Block>,
    outputs: Vec<(VmmTorchAllocator, Block)>,
}

struct World {
    bench: Bench,
    /// All allocations and frees in order, for the comparison with torch's pool.
    events: Vec<Event>,
    blocks: usize,
    /// Passes are captured on a stream under capture, which accepts no record.
    captures: bool,
}

impl World {
    fn new() -> Self {
        let host = HostDriver::new(0, HostOptions { memory_bytes: 64 << 30, ..HostOptions::default() });
        let options = Options { expected_bytes: 128 * MIB, ..Options::default() };
        let bench = Bench::over(host.unwrap(), A, &options);
        Self { bench, events: Vec::new(), blocks: 0, captures: false }
    }

    fn begin(&self) -> Pass {
        let space = self.bench.arena.open_space().unwrap();
        self.bench.faulty.set_capturing(A, self.captures);
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(true);
        blocks.predict_retained();
        Pass { space, blocks, steps: Vec::new() }
    }

    fn allocate(&mut self, pass: &mut Pass, bytes: u64) -> Block {
        self.blocks += 1;
        let id = self.blocks;
        self.events.push(Event::Allocate { id, bytes });
        let block = Block { at: pass.blocks.allocate(bytes, A, false).unwrap(), bytes, id };
        pass.steps.push(Step::Write(block));
        block
    }

    fn free(&mut self, of: &VmmTorchAllocator, block: Block) {
        self.events.push(Event::Free { id: block.id });
        of.free(block.at, &[A]).unwrap();
    }

    fn end(&self, pass: &Pass) {
        self.bench.faulty.set_capturing(A, false);
        pass.blocks.captured_on(A);
        pass.space.seal().unwrap();
    }

    /// Captures the allocations of attention and feed-forward layers over side * side patches.
    fn forward(&mut self, side: u64, layers: usize) -> Pair {
        let mut pass = self.begin();
        let (wide, scores) = (side * side * 3 * KIB, side.pow(4) * 64);
        let mut saved = Vec::new();
        for _ in 0..layers {
            for bytes in [wide, 16 * KIB, 3 * wide, wide, wide, wide] {
                saved.push(self.allocate(&mut pass, bytes));
            }
            let product = self.allocate(&mut pass, scores);
            let scaled = self.allocate(&mut pass, scores);
            self.free(&pass.blocks, product);
            saved.push(self.allocate(&mut pass, scores));
            self.free(&pass.blocks, scaled);
            let attention = self.allocate(&mut pass, wide);
            saved.push(self.allocate(&mut pass, wide));
            self.free(&pass.blocks, attention);
            let out = self.allocate(&mut pass, wide);
            for bytes in [wide, wide, 16 * KIB, 3 * wide, 3 * wide] {
                saved.push(self.allocate(&mut pass, bytes));
            }
            self.free(&pass.blocks, out);
        }
        let output = self.allocate(&mut pass, wide / 24);
        self.end(&pass);
        let outputs = vec![(pass.blocks.clone(), output)];
        Pair { forward: pass, backward: None, saved, outputs }
    }

    fn backward(&mut self, pair: &mut Pair) {
        let mut pass = self.begin();
        let mut gradient = self.allocate(&mut pass, pair.outputs[0].1.bytes);
        for saved in std::mem::take(&mut pair.saved).into_iter().rev() {
            let next = self.allocate(&mut pass, saved.bytes);
            pass.steps.extend([Step::Read(saved), Step::Read(gradient)]);
            self.free(&pair.forward.blocks, saved);
            self.free(&pass.blocks, gradient);
            gradient = next;
        }
        self.free(&pass.blocks, gradient);
        let output = self.allocate(&mut pass, 300 * KIB);
        self.end(&pass);
        pair.outputs.push((pass.blocks.clone(), output));
        pair.backward = Some(pass);
    }

    fn pair(&mut self, side: u64, layers: usize) -> Pair {
        let mut pair = self.forward(side, layers);
        self.backward(&mut pair);
        pair
    }

    /// Captures three forward passes, then backward and forward passes alternately. Returns the
    /// pairs, and the capture order as (pair, is forward).
    fn micro_batches(&mut self, side: u64, layers: usize, count: usize) -> (Vec<Pair>, Vec<(usize, bool)>) {
        let (mut pairs, mut order) = (Vec::new(), Vec::new());
        for number in 0..count + 3 {
            if let Some(last) = number.checked_sub(3) {
                let pair: &mut Pair = &mut pairs[last];
                self.backward(pair);
                order.push((last, false));
            }
            if number < count {
                pairs.push(self.forward(side, layers));
                order.push((number, true));
            }
        }
        (pairs, order)
    }

    fn replay(&self, pass: &Pass) {
        let stamps = &self.bench.stamps;
        let replayed = pass.space.replay(A, || {
            for step in &pass.steps {
                match step {
                    Step::Write(block) => stamps.write(block.at, block.bytes, block.id as u32).unwrap(),
                    Step::Read(block) => {
                        let holds = stamps.holds(block.at, block.bytes, block.id as u32).unwrap();
                        assert!(holds, "{:?} reads something else at {block:?}", pass.space);
                    }
                }
            }
        });
        replayed.unwrap();
    }

    fn replay_pair(&self, pair: &Pair) {
        self.replay(&pair.forward);
        pair.backward.iter().for_each(|backward| self.replay(backward));
    }

    fn check_outputs(&self, pairs: &[Pair]) {
        for (_, block) in pairs.iter().flat_map(|pair| &pair.outputs) {
            assert!(self.bench.stamps.holds(block.at, block.bytes, block.id as u32).unwrap(), "{block:?}");
        }
    }

    fn held(&self) -> u64 {
        self.bench.device.trim().unwrap();
        assert_eq!(self.bench.arena.audit(), Ok(()));
        self.bench.device.stats().physical_bytes
    }

    fn torchs(&self) -> u64 {
        let shapes = vec![Shape { kind: 'p', tokens: 0, events: self.events.clone() }];
        private_pools_bytes(&Trace { name: String::new(), shapes })
    }

    fn assert_holds_no_more_than_torchs(&self) {
        let (held, torchs) = (self.held(), self.torchs());
        assert!(held * 100 <= torchs * 105, "{} MiB of {}", held / MIB, torchs / MIB);
    }

    fn end_all(self, pairs: Vec<Pair>) {
        for pair in pairs {
            let Pair { forward, backward, saved, outputs } = pair;
            saved.iter().for_each(|block| forward.blocks.free(block.at, &[A]).unwrap());
            outputs.iter().for_each(|(of, block)| of.free(block.at, &[A]).unwrap());
            drop((forward, backward));
        }
        self.bench.end();
    }
}

#[test]
fn training_graphs_of_several_sizes_hold_what_torchs_pool_holds() {
    let sizes = [40, 36, 32, 28, 24, 20, 16, 12];
    for order in [sizes.to_vec(), sizes.iter().rev().copied().collect()] {
        let mut world = World::new();
        let pairs: Vec<Pair> = order.into_iter().map(|side| world.pair(side, 4)).collect();
        world.assert_holds_no_more_than_torchs();
        world.end_all(pairs);
    }
}

#[test]
fn micro_batches_hold_what_torchs_pool_holds() {
    let mut world = World::new();
    let (pairs, _) = world.micro_batches(28, 4, 12);
    world.assert_holds_no_more_than_torchs();
    world.end_all(pairs);
}

/// The streams are under capture at the frees: pending work is determined at the seal.
#[test]
fn blocks_freed_under_capture_are_shared_by_the_next_capture() {
    let mut world = World::new();
    world.captures = true;
    let pairs: Vec<Pair> = [10, 9, 8, 8, 8].into_iter().map(|side| world.pair(side, 2)).collect();
    assert_eq!(world.bench.faulty.broken_captures(), Vec::<String>::new());
    let held = world.held();
    let mut other = World::new();
    let pair = other.pair(10, 2);
    let alone = other.held();
    // One page for each gradient, which is a large block.
    assert!(held <= alone + 6 * MIB, "{} MiB, and {} for the first pair", held / MIB, alone / MIB);
    other.end_all(vec![pair]);
    world.end_all(pairs);
}

/// A backward replay right after its forward replay finds the saved blocks; outputs stay.
#[test]
fn pairs_are_replayed_in_any_order() {
    for seed in seeds(6) {
        let mut random = Random::new(seed);
        let mut world = World::new();
        world.captures = seed % 2 == 0;
        let mut pairs: Vec<Pair> = Vec::new();
        for _ in 0..5 {
            if random.below(3) == 0 && !pairs.is_empty() {
                let gone = pairs.swap_remove(random.below(pairs.len() as u64) as usize);
                gone.outputs.iter().for_each(|(of, block)| of.free(block.at, &[A]).unwrap());
            }
            pairs.push(world.pair(5 + random.below(4), 2));
            if random.below(3) == 0 {
                pairs.iter().for_each(|pair| world.replay_pair(pair));
            }
        }
        pairs.iter().for_each(|pair| world.replay_pair(pair));
        for _ in 0..3 {
            shuffle(&mut pairs, seed);
            pairs.iter().for_each(|pair| world.replay_pair(pair));
            world.check_outputs(&pairs);
        }
        world.end_all(pairs);
    }
}

#[test]
fn micro_batches_are_replayed_in_their_order() {
    for captures in [false, true] {
        let mut world = World::new();
        world.captures = captures;
        let (pairs, order) = world.micro_batches(6, 2, 8);
        for _ in 0..3 {
            for (number, forward) in &order {
                let pair = &pairs[*number];
                world.replay(if *forward { &pair.forward } else { pair.backward.as_ref().unwrap() });
            }
            world.check_outputs(&pairs);
        }
        world.end_all(pairs);
    }
}

#[test]
fn a_passed_block_that_is_still_read_keeps_its_pages() {
    let mut world = World::new();
    let first = world.pair(8, 2);
    let mut second = world.forward(8, 2);
    let at = second.saved[0].at;
    second.forward.blocks.record_stream(at, B).unwrap();
    world.bench.faulty.set_busy(true);
    world.backward(&mut second);
    let third = world.pair(6, 2);
    let own = second.forward.space.stats().retained_bytes;
    assert!(own > 4 * MIB, "{own}");
    world.bench.faulty.set_busy(false);
    world.bench.arena.trim().unwrap();
    let own = second.forward.space.stats().retained_bytes;
    assert!(own <= 2 * MIB, "{own}");
    let pairs = vec![first, second, third];
    (0..2).for_each(|_| pairs.iter().for_each(|pair| world.replay_pair(pair)));
    world.check_outputs(&pairs);
    world.end_all(pairs);
}

/// A graph captured outside the library may read the block at any time, so the mapping stays.
#[test]
fn a_block_that_graphs_captured_elsewhere_may_read_keeps_its_pages() {
    let mut world = World::new();
    let first = world.pair(8, 2);
    let mut second = world.forward(8, 2);
    world.bench.device.note_capture();
    let maps = world.bench.device.stats().unmaps;
    world.backward(&mut second);
    world.bench.arena.trim().unwrap();
    assert_eq!(world.bench.device.stats().unmaps, maps);
    let pairs = vec![first, second];
    (0..2).for_each(|_| pairs.iter().for_each(|pair| world.replay_pair(pair)));
    world.end_all(pairs);
}

/// As in `torch.cuda.empty_cache()`: private pages are freed, a few idle pages stay.
#[test]
fn idle_pages_go_if_they_are_more_than_a_few() {
    let mut world = World::new();
    world.captures = true;
    let pairs: Vec<Pair> = [8, 8, 8].into_iter().map(|side| world.pair(side, 2)).collect();
    let device = &world.bench.device;
    let idle = |device: &vmmgraph::Device| device.stats().free_bytes;
    assert_eq!(device.give_back_above(64 * MIB), 0);
    let free = idle(device);
    assert!(free > 4 * MIB, "{free}");
    assert_eq!((device.give_back_above(4 * MIB), idle(device)), (free, 0));
    world.end_all(pairs);
}

//! Graphs of two arenas, eager work, a region, and elastic memory over leased pages, with little
//! memory.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{
    BlockBorrower, Borrower, ElasticBuffer, ElasticOptions, Error, HostOptions, KvCache, KvLayout, KvOptions,
    Pending, Policy, Ready, Region, RegionOptions, SharedVmmAllocator, Vacate, VacateBlocks, Vacated,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, Random, ReorderingDriver, seeds};

use super::world::{Beside, Block, Graph, KIB, Refused, STREAMS, World, arena_options, done};

const PAGE: u64 = 16 * KIB;
/// Pages of the buffer and blocks of the cache.
const PAGES: u64 = 12;
const BLOCKS: u64 = 24;
const PLANES: [u64; 2] = [2 * KIB, 3 * KIB];
const SOON: Duration = Duration::from_secs(20);
const NOW: Duration = Duration::ZERO;

/// The engine's elastic memory; `None`: not usable.
struct Engine {
    pages: Vec<Option<Block>>,
    blocks: Vec<Option<Vec<Block>>>,
    random: Random,
}

/// Adds the last use of a block to a fence.
fn behind(fence: &mut Fence, block: &Block) {
    if let Some(mark) = &block.mark {
        fence.add_mark(mark.clone());
    }
}

impl Engine {
    fn leave_pages(&mut self, pages: impl Iterator<Item = u64>) -> Fence {
        let mut fence = Fence::default();
        for page in pages {
            self.pages[page as usize].take().iter().for_each(|block| behind(&mut fence, block));
        }
        fence
    }

    fn leave_blocks(&mut self, range: Range<u64>) -> Fence {
        let mut fence = Fence::default();
        for planes in &mut self.blocks[range.start as usize..range.end as usize] {
            planes.take().iter().flatten().for_each(|block| behind(&mut fence, block));
        }
        fence
    }
}

struct Shared(Mutex<Engine>);

impl Borrower for Shared {
    fn vacate(&self, asked: &Vacate) -> vmmgraph::Result<Fence> {
        let mut engine = self.0.lock().unwrap();
        if engine.random.below(8) == 0 {
            return Err(Error::wrong_state("cannot vacate: the engine is busy; ask again"));
        }
        let own = |page: &u64| asked.instead.iter().any(|range| range.contains(&(page * PAGE)));
        let pages = asked.range.start / PAGE..asked.range.end / PAGE;
        Ok(engine.leave_pages(pages.filter(|page| !own(page))))
    }
}

impl BlockBorrower for Shared {
    fn vacate(&self, asked: &VacateBlocks) -> vmmgraph::Result<Vacated> {
        let mut engine = self.0.lock().unwrap();
        let mut blocks = asked.blocks.clone();
        if engine.random.below(8) == 0 {
            blocks.pop();
        }
        let mut fence = Fence::default();
        blocks.iter().for_each(|range| fence.join(engine.leave_blocks(range.clone())));
        Ok(Vacated { blocks, fence })
    }
}

fn part(random: &mut Random, most: u64, of: u64) -> Range<u64> {
    let bytes = 1 + random.below(most);
    let start = random.below(of - bytes + 1);
    start..start + bytes
}

pub(crate) struct Program {
    pub(crate) world: World,
    pub(crate) arenas: [SharedVmmAllocator; 2],
    buffer: Arc<ElasticBuffer>,
    cache: Arc<KvCache>,
    engine: Arc<Shared>,
    pub(crate) graphs: Vec<Graph>,
    /// Results of eager work, with the index of their arena.
    results: Vec<(usize, Block)>,
    outlived: Vec<(VmmTorchAllocator, Block)>,
    region: Arc<Region>,
    weights: Vec<Block>,
    ahead: Vec<Pending>,
    /// Pending restores of resumed arenas.
    ready: Vec<Ready>,
    pub(crate) random: Random,
}

impl Program {
    pub(crate) fn new(seed: u64, world: World) -> Self {
        let device = world.device.clone();
        let arenas = [0; 2].map(|_| SharedVmmAllocator::new(&device, &arena_options("lends")).unwrap());
        let memory = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
        let buffer = Arc::new(device.elastic_buffer(PAGES * PAGE, &memory).unwrap());
        let layout = if seed.is_multiple_of(2) { KvLayout::ByBlock } else { KvLayout::ByPlane };
        let options = KvOptions { planes: &PLANES, blocks_most: BLOCKS, layout, memory };
        let cache = device.kv_cache(&options).unwrap();
        let engine = Engine {
            pages: (0..PAGES).map(|_| None).collect(),
            blocks: (0..BLOCKS).map(|_| None).collect(),
            random: Random::new(!seed),
        };
        let page_bytes = if seed.is_multiple_of(3) { 0 } else { PAGE };
        let read_only = seed % 5 < 2;
        let of_region =
            RegionOptions { policy: Policy::Backup, page_bytes, read_only, ..RegionOptions::default() };
        let region = device.region("weights", of_region).unwrap();
        let (engine, random) = (Arc::new(Shared(Mutex::new(engine))), Random::new(seed));
        Self {
            world,
            arenas,
            buffer,
            cache,
            engine,
            graphs: Vec::new(),
            results: Vec::new(),
            outlived: Vec::new(),
            region,
            weights: Vec::new(),
            ahead: Vec::new(),
            ready: Vec::new(),
            random,
        }
    }

    fn got_pages(&self, range: Range<u64>) {
        for page in range {
            let at = self.buffer.base().plus(page * PAGE);
            self.engine.0.lock().unwrap().pages[page as usize].get_or_insert(Block::new(at, PAGE));
        }
    }

    fn got_blocks(&self, range: Range<u64>) {
        for block in range {
            let planes = (0..PLANES.len())
                .map(|plane| Block::new(self.cache.address(plane, block).unwrap(), PLANES[plane]))
                .collect();
            self.engine.0.lock().unwrap().blocks[block as usize].get_or_insert(planes);
        }
    }

    pub(crate) fn step(&mut self, number: u8) {
        let Self {
            world,
            arenas,
            buffer,
            cache,
            engine,
            graphs,
            results,
            outlived,
            region,
            weights,
            ahead,
            ready,
            random,
        } = self;
        let stream = world.stream(random);
        let which = random.below(2) as usize;
        let arena = &arenas[which];
        let graph = random.below(graphs.len().max(1) as u64) as usize;
        let behind_contents =
            |ready: &mut Vec<Ready>| ready.iter_mut().try_for_each(|ready| ready.before(stream));
        match random.below(46) {
            0 | 1 if graphs.len() < 4 => {
                let Some(mut graph) = done(world.capture(arena, random)) else { return };
                if number.is_multiple_of(3) {
                    world.use_on(&mut graph.output, stream, Some(number));
                    world.may_be_captured(stream, random);
                    VmmTorchAllocator::new(&graph.space).free(graph.output.at, &[stream]).unwrap();
                    (graph.freed, graph.output.byte) = (true, None);
                }
                graphs.push(graph);
            }
            2..6 if !graphs.is_empty() => {
                done(world.replay(&mut graphs[graph], stream, number));
                world.may_be_captured(stream, random);
            }
            6 if !graphs.is_empty() && !graphs[graph].freed => {
                let Graph { space, output, freed, .. } = &mut graphs[graph];
                if done(behind_contents(ready)).is_none() {
                    return;
                }
                world.use_on(output, stream, None);
                world.may_be_captured(stream, random);
                space.record_stream(output.at, stream).unwrap();
                if random.below(4) == 0 {
                    space.free(output.at).unwrap();
                    (*freed, output.byte) = (true, None);
                }
            }
            7 if graphs.len() > 2 => {
                let Graph { space, output, freed, .. } = graphs.swap_remove(graph);
                if !freed && number.is_multiple_of(2) {
                    outlived.push((VmmTorchAllocator::new(&space), output));
                }
            }
            8 | 9 if results.len() < 4 => {
                let scope = match random.below(2) {
                    0 => arena.eager_scope(stream),
                    _ => arena.eager_scope_of(stream, random.choose(&[10, 50, 140]) * KIB),
                };
                if let Some(scope) = done(scope) {
                    let left = done(world.eager(&scope, random, stream, number)).unwrap_or_default();
                    results.extend(left.into_iter().map(|block| (which, block)));
                }
            }
            10 | 11 if !results.is_empty() => {
                let at = random.below(results.len() as u64) as usize;
                if done(behind_contents(ready)).is_none() {
                    return;
                }
                let (of, block) = &mut results[at];
                world.use_on(block, stream, number.is_multiple_of(2).then_some(number));
                world.may_be_captured(stream, random);
                let (eager, block) = (arenas[*of].eager_blocks(), block.at);
                match random.below(2) {
                    0 => eager.record_stream(block, stream).unwrap(),
                    _ => {
                        eager.free(block, &[stream]).unwrap();
                        results.swap_remove(at);
                    }
                }
            }
            12 | 13 => {
                let range = part(random, 3, PAGES);
                if done(buffer.commit(range.start * PAGE..range.end * PAGE)).is_some() {
                    self.got_pages(range);
                }
            }
            14 => {
                let range = part(random, 6, PAGES);
                let fence = engine.0.lock().unwrap().leave_pages(range.clone());
                buffer.decommit(range.start * PAGE..range.end * PAGE, &fence).unwrap();
            }
            15 | 16 => {
                let range = part(random, 4, PAGES);
                let borrower: Arc<dyn Borrower> = engine.clone();
                if done(arena.lend(buffer, range.start * PAGE..range.end * PAGE, &borrower)).is_some() {
                    self.got_pages(range);
                }
            }
            17..20 => {
                // The user of a buffer must wait before each use.
                if done(buffer.before(stream)).is_none() {
                    return;
                }
                for block in engine.0.lock().unwrap().pages.iter_mut().flatten() {
                    if random.below(2) == 0 {
                        world.use_on(block, stream, Some(number));
                    }
                }
            }
            20 | 21 => {
                let range = part(random, 8, BLOCKS);
                if done(cache.commit(range.clone())).is_some() {
                    self.got_blocks(range);
                }
            }
            22 => {
                let range = part(random, 12, BLOCKS);
                let fence = engine.0.lock().unwrap().leave_blocks(range.clone());
                cache.release(range, &fence).unwrap();
            }
            23 => {
                let range = part(random, 8, BLOCKS);
                let borrower: Arc<dyn BlockBorrower> = engine.clone();
                if done(arena.lend_blocks(cache, range.clone(), &borrower)).is_some() {
                    self.got_blocks(range);
                }
            }
            24 | 25 => {
                if done(cache.before(stream)).is_none() {
                    return;
                }
                for block in engine.0.lock().unwrap().blocks.iter_mut().flatten().flatten() {
                    if random.below(2) == 0 {
                        world.use_on(block, stream, Some(number));
                    }
                }
            }
            26 => {
                if let Some(lease) = arena.leases().first() {
                    done(lease.recall_bytes(random.choose(&[PAGE, 2 * PAGE, u64::MAX]), SOON));
                }
            }
            // A concurrent replay could recall a page before this thread records its use.
            27 if !world.shared => arena.set_recall(random.choose(&[None, Some(SOON)])),
            28 => drop(done(arena.trim())),
            29 => {
                buffer.reap();
                cache.reap();
            }
            30..32 if ahead.len() < 3 => {
                let (pages, blocks) = (part(random, 3, PAGES), part(random, 8, BLOCKS));
                ahead.push(if random.below(2) == 0 {
                    buffer.commit_async(pages.start * PAGE..pages.end * PAGE).unwrap()
                } else {
                    cache.commit_async(blocks).unwrap()
                });
            }
            32..34 if !ahead.is_empty() => {
                for pending in ahead.drain(..) {
                    done(pending.wait());
                }
                let committed = buffer.committed();
                let backed = cache.backed();
                committed.into_iter().for_each(|range| self.got_pages(range.start / PAGE..range.end / PAGE));
                backed.into_iter().for_each(|range| self.got_blocks(range));
            }
            34 => {
                let blocks = random.below(BLOCKS);
                let fence = engine.0.lock().unwrap().leave_blocks(blocks..BLOCKS);
                cache.shrink_to(blocks, &[], &fence).unwrap();
            }
            35 if done(arena.pause(Fence::default())).is_some() => {
                ready.retain_mut(|ready| !ready.done().unwrap_or(false));
                if let Some((_, mut coming)) = done(world.device.resume_async(&[], NOW)) {
                    ready.append(&mut coming);
                } else {
                    graphs.clear();
                    outlived.drain(..).for_each(|(blocks, block)| blocks.free(block.at, &[]).unwrap());
                    results.drain(..).for_each(|(of, block)| {
                        arenas[of].eager_blocks().free(block.at, &[]).unwrap();
                    });
                }
            }
            36 | 37 if weights.len() < 4 => {
                let bytes = random.choose(&[3, 20, 40]) * KIB;
                if let Some(at) = done(region.allocate(bytes, stream)) {
                    let mut block = Block::new(at, bytes);
                    world.use_on(&mut block, stream, Some(number));
                    region.record_stream(at, stream).unwrap();
                    weights.push(block);
                }
            }
            38..40 if !weights.is_empty() && !region.stats().paused => {
                let at = random.below(weights.len() as u64) as usize;
                if done(region.before(stream)).is_none() {
                    return;
                }
                let written = number.is_multiple_of(2);
                world.use_on(&mut weights[at], stream, written.then_some(number));
                world.may_be_captured(stream, random);
                region.record_stream(weights[at].at, stream).unwrap();
                if written {
                    region.mark_written(Some(weights[at].at)).unwrap();
                }
            }
            40 if !weights.is_empty() => {
                let at = random.below(weights.len() as u64) as usize;
                region.free(weights.swap_remove(at).at).unwrap();
            }
            41 => drop(done(region.pause(Fence::default()).and_then(|report| report.complete()))),
            42..45 => drop(done(region.resume(NOW))),
            45 if !outlived.is_empty() => {
                if done(behind_contents(ready)).is_none() {
                    return;
                }
                let at = random.below(outlived.len() as u64) as usize;
                let (blocks, block) = &mut outlived[at];
                world.use_on(block, stream, number.is_multiple_of(2).then_some(number));
                if random.below(2) == 0 {
                    blocks.record_stream(block.at, stream).unwrap();
                } else {
                    blocks.free(block.at, &[stream]).unwrap();
                    outlived.swap_remove(at);
                }
            }
            _ => {}
        }
    }

    pub(crate) fn leave(mut self, drained: bool) -> World {
        let last = self.world.stream(&mut self.random);
        for pending in self.ahead.drain(..) {
            done(pending.wait());
        }
        self.ready.iter_mut().for_each(|ready| ready.before(last).unwrap());
        for Graph { space, output, .. } in self.graphs.iter_mut().filter(|graph| !graph.freed) {
            self.world.use_on(output, last, None);
            space.record_stream(output.at, last).unwrap();
        }
        for (of, block) in &mut self.results {
            self.world.use_on(block, last, None);
            self.arenas[*of].eager_blocks().record_stream(block.at, last).unwrap();
        }
        for (blocks, block) in &mut self.outlived {
            self.world.use_on(block, last, None);
            blocks.free(block.at, &[last]).unwrap();
        }
        for block in &mut self.weights {
            if !self.region.stats().paused {
                self.region.before(last).unwrap();
                self.world.use_on(block, last, None);
                self.region.record_stream(block.at, last).unwrap();
            }
        }
        {
            let mut engine = self.engine.0.lock().unwrap();
            // A captured stream of a previous user cannot be waited for.
            if self.buffer.before(last).and_then(|()| self.cache.before(last)).is_err() {
                self.world.end_capture();
            }
            self.world.in_each_context(|| {
                drop(self.buffer.before(STREAMS[0]));
                drop(self.cache.before(STREAMS[0]));
            });
            self.buffer.before(last).unwrap();
            self.cache.before(last).unwrap();
            engine.pages.iter_mut().flatten().for_each(|block| self.world.use_on(block, last, None));
            let blocks = engine.blocks.iter_mut().flatten().flatten();
            blocks.for_each(|block| self.world.use_on(block, last, None));
            // Elastic memory does not wait for its users when dropped.
            let pages = engine.leave_pages(0..PAGES);
            self.buffer.decommit(0..PAGES * PAGE, &pages).unwrap();
            let blocks = engine.leave_blocks(0..BLOCKS);
            self.cache.release(0..BLOCKS, &blocks).unwrap();
        }
        let Self { world, arenas, buffer, cache, engine, graphs, results, outlived, region, .. } = self;
        if drained {
            world.late.drain();
        }
        assert_eq!(world.device.pool().audit(), Ok(()));
        arenas.iter().for_each(|arena| assert_eq!(arena.audit(), Ok(())));
        assert_eq!((buffer.audit(), cache.audit()), (Ok(()), Ok(())));
        drop((graphs, arenas, buffer, cache, engine, results, outlived, region));
        world
    }
}

/// Returns the number of wrong checks.
fn run(seed: u64, beside: Beside) -> u64 {
    let memory_bytes = (40 + seed % 5 * 10) * PAGE;
    let host = Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes }).unwrap());
    let late = ReorderingDriver::new(host.clone(), seed);
    let faulty = FaultyDriver::new(late.clone());
    let mut program = Program::new(seed, World::over(&late, faulty.clone(), beside));
    for number in 0..160 {
        let refused = Refused::some(beside, &faulty, &mut program.random);
        program.step(number);
        drop(refused);
    }
    let wrong = program.leave(seed.is_multiple_of(2)).end();
    drop((late, faulty));
    assert_eq!(host.leftovers(), [0; 4], "seed {seed}");
    wrong
}

#[test]
fn pages_go_between_graphs_and_elastic_memory_in_whatever_order_streams_work() {
    seeds(100).for_each(|seed| assert_eq!(run(seed, Beside::Nothing), 0, "seed {seed}"));
}

#[test]
fn the_same_while_the_driver_refuses_calls_now_and_then() {
    seeds(8).for_each(|seed| assert_eq!(run(seed, Beside::Refusals), 0, "seed {seed}"));
}

#[test]
fn the_same_on_default_streams_of_several_contexts() {
    seeds(40).for_each(|seed| assert_eq!(run(seed, Beside::Contexts), 0, "seed {seed}"));
}

#[test]
fn the_same_while_streams_are_captured_now_and_then() {
    seeds(60).for_each(|seed| assert_eq!(run(seed, Beside::Captures), 0, "seed {seed}"));
}

/// Leases move eager pages: the new mapping must follow the last use of the old pages.
#[test]
fn pages_move_under_eager_work_behind_its_last_scope() {
    for seed in seeds(20) {
        let host =
            Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 64 * PAGE }).unwrap());
        let late = ReorderingDriver::new(host, seed);
        let Program { world, arenas: [arena, _], buffer, engine, .. } = Program::new(seed, World::new(&late));
        let space = arena.open_space().unwrap();
        let block = space.allocate(6 * PAGE, STREAMS[0]).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        // The result keeps the first page; its work ends first.
        let scope = arena.eager_scope(STREAMS[0]).unwrap();
        let result = scope.allocate(KIB).unwrap();
        drop(scope);
        space.replay(STREAMS[0], || ()).unwrap();
        late.drain();
        // Only the highest slot remains for the next scope.
        let borrower: Arc<dyn Borrower> = engine;
        let last = arena.lend(&buffer, 0..PAGE, &borrower).unwrap();
        let lease = arena.lend(&buffer, PAGE..6 * PAGE, &borrower).unwrap();
        while last.recall(SOON).is_err() {}
        let scope = arena.eager_scope_of(STREAMS[1], PAGE).unwrap();
        let mut block = Block::new(scope.allocate(PAGE).unwrap(), PAGE);
        (1..20).for_each(|byte| world.use_on(&mut block, STREAMS[1], Some(byte)));
        scope.free(block.at).unwrap();
        drop(scope);
        while lease.recall(SOON).is_err() {}
        // A new lease triggers the search for lower free slots.
        let lease = arena.lend(&buffer, 6 * PAGE..7 * PAGE, &borrower).unwrap();
        let maps = arena.eager_stats().maps;
        for _ in 0..2 * seed {
            late.step();
        }
        drop(arena.eager_scope(STREAMS[2]).unwrap());
        assert!(arena.eager_stats().maps > maps, "seed {seed}: no page moved");
        arena.eager_blocks().free(result, &[]).unwrap();
        drop((space, arena, lease, buffer, borrower));
        late.drain();
        assert_eq!((late.failed(), world.wrong.load(Relaxed)), (vec![], 0), "seed {seed}");
    }
}

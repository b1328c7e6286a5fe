//! Rings beside graphs and a region, with little memory: sources change, are stored to and dropped
//! during streaming; rings are created and destroyed.

use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::ring::HostRun;
use vmmgraph::{
    HostBuffer, HostOptions, Pinning, Policy, Region, RegionOptions, Ring, RingOptions, RingUnit,
    SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::{FaultyDriver, Random, ReorderingDriver, seeds};

use super::world::{Beside, Block, Graph, KIB, Refused, World, arena_options, done};

const NOW: Duration = Duration::ZERO;

struct Unit {
    source: Arc<HostBuffer>,
    /// The byte in the whole source; `None`: undefined.
    byte: Option<u8>,
}

pub(crate) struct Rings {
    pub(crate) world: World,
    arena: SharedVmmAllocator,
    region: Arc<Region>,
    graphs: Vec<Graph>,
    weights: Vec<Block>,
    ring: Option<(Ring, Vec<Unit>)>,
    random: Random,
}

fn whole(source: &Arc<HostBuffer>) -> Vec<HostRun> {
    vec![HostRun { source: Arc::clone(source), from: 0, to: 0, bytes: source.bytes() }]
}

impl Rings {
    pub(crate) fn new(seed: u64, world: World) -> Self {
        let arena = SharedVmmAllocator::new(&world.device, &arena_options("")).unwrap();
        let of_region =
            RegionOptions { policy: Policy::Backup, page_bytes: 8 * KIB, ..RegionOptions::default() };
        let region = world.device.region("weights", of_region).unwrap();
        let random = Random::new(seed);
        Self { world, arena, region, graphs: Vec::new(), weights: Vec::new(), ring: None, random }
    }

    fn unit(&self, bytes: u64, byte: u8) -> vmmgraph::Result<Unit> {
        let source = self.world.device.host_buffer(bytes, Pinning::Preferred)?;
        source.write(0, &vec![byte; bytes as usize])?;
        Ok(Unit { source, byte: Some(byte) })
    }

    fn make(&mut self, byte: u8) -> vmmgraph::Result<()> {
        let random = &mut self.random;
        let units: Vec<RingUnit> = (0..3 + random.below(4))
            .map(|_| {
                let bytes = random.choose(&[2, 5, 9]) * KIB;
                if random.below(4) == 0 { RingUnit::resident(bytes) } else { RingUnit::streamed(bytes) }
            })
            .collect();
        let options = RingOptions {
            slots: 2 + random.below(2) as usize,
            within_step: random.below(3) == 0,
            ..RingOptions::default()
        };
        let ring = self.world.device.ring(&units, &options)?;
        let mut sources = Vec::new();
        for (number, unit) in units.iter().enumerate() {
            let unit = self.unit(unit.bytes, byte + number as u8)?;
            ring.set_source(number, &whole(&unit.source))?;
            sources.push(unit);
        }
        self.ring = Some((ring, sources));
        Ok(())
    }

    fn read(&mut self, stream: Stream) {
        let Self { world, ring: Some((ring, units)), random, .. } = self else { return };
        let first = random.below(units.len() as u64) as usize;
        for number in (first..units.len()).chain(0..first).take(1 + random.below(6) as usize) {
            if done(ring.acquire(number, stream)).is_none() {
                return;
            }
            let Unit { source, byte } = &units[number];
            let at = ring.address(number).unwrap();
            let mut seen = Block { at, bytes: source.bytes(), byte: *byte, mark: None };
            for _ in 0..=random.below(2) {
                world.use_on(&mut seen, stream, None);
            }
            if done(ring.release(number, stream)).is_none() {
                return ring.abort();
            }
        }
    }

    fn store(&mut self, stream: Stream) {
        let Self { world, region, weights, ring: Some((_, units)), random, .. } = self else { return };
        let unit = random.below(units.len() as u64) as usize;
        let Unit { source, byte } = &mut units[unit];
        let Some(block) = weights.iter_mut().find(|block| block.bytes >= source.bytes()) else { return };
        if region.stats().paused || done(region.before(stream)).is_none() {
            return;
        }
        block.mark.iter().for_each(|mark| mark.before(stream).unwrap());
        // SAFETY: a live block, not freed before the store is complete.
        let stored = unsafe { source.store(0, block.at, source.bytes(), stream) };
        *byte = done(stored).and(block.byte);
        // Later work on the block must follow the store.
        if source.before(stream).is_err() {
            world.late.drain();
        }
        world.use_on(block, stream, None);
        region.record_stream(block.at, stream).unwrap();
    }

    pub(crate) fn step(&mut self, number: u8) {
        let stream = self.world.stream(&mut self.random);
        let graph = self.random.below(self.graphs.len().max(1) as u64) as usize;
        let weight = self.random.below(self.weights.len().max(1) as u64) as usize;
        match self.random.below(36) {
            0 | 1 if self.graphs.len() < 3 => {
                self.graphs.extend(done(self.world.capture(&self.arena, &mut self.random)));
            }
            2..5 if !self.graphs.is_empty() => {
                done(self.world.replay(&mut self.graphs[graph], stream, number));
                self.world.may_be_captured(stream, &mut self.random);
            }
            5 if self.graphs.len() > 1 => drop(self.graphs.swap_remove(graph)),
            6 => drop(done(self.arena.trim())),
            7 | 8 if self.weights.len() < 4 => {
                let bytes = self.random.choose(&[3, 9, 20]) * KIB;
                if let Some(at) = done(self.region.allocate(bytes, stream)) {
                    let mut block = Block::new(at, bytes);
                    self.world.use_on(&mut block, stream, Some(number));
                    self.region.record_stream(at, stream).unwrap();
                    self.weights.push(block);
                }
            }
            9 if !self.weights.is_empty() => {
                self.region.free(self.weights.swap_remove(weight).at).unwrap();
            }
            10 => drop(done(self.region.pause(Fence::default()).and_then(|report| report.complete()))),
            11..14 => drop(done(self.region.resume(NOW))),
            14 => drop(done(self.world.device.resume_async(&[], NOW))),
            15 | 16 if self.ring.is_none() => drop(done(self.make(number))),
            17..24 => self.read(stream),
            24..26 => self.store(stream),
            26 | 27 => {
                if let Some((_, units)) = &mut self.ring {
                    let Unit { source, byte } = &mut units[0];
                    if done(source.write(0, &vec![number; source.bytes() as usize])).is_some() {
                        *byte = Some(number);
                    }
                }
            }
            28 | 29 => {
                let Some((ring, mut units)) = self.ring.take() else { return };
                let at = self.random.below(units.len() as u64) as usize;
                if let Some(unit) = done(self.unit(units[at].source.bytes(), number)) {
                    ring.set_source(at, &whole(&unit.source)).unwrap();
                    units[at] = unit;
                }
                self.ring = Some((ring, units));
            }
            30 => self.ring.iter().for_each(|(ring, _)| ring.abort()),
            31 => drop(self.ring.as_ref().map(|(ring, _)| done(ring.prime()))),
            32 if self.random.below(3) == 0 => self.ring = None,
            33 => drop(done(self.world.device.host_pool().trim())),
            34 => self.world.may_be_captured(stream, &mut self.random),
            _ => {}
        }
    }

    pub(crate) fn leave(mut self) -> World {
        let last = self.world.stream(&mut self.random);
        for Graph { space, output, .. } in &mut self.graphs {
            self.world.use_on(output, last, None);
            space.record_stream(output.at, last).unwrap();
        }
        self.read(last);
        self.ring.iter().for_each(|(ring, _)| assert_eq!(ring.audit(), Ok(())));
        let Self { world, arena, region, graphs, mut weights, ring, .. } = self;
        if !region.stats().paused && region.before(last).is_ok() {
            for block in &mut weights {
                world.use_on(block, last, None);
                region.record_stream(block.at, last).unwrap();
            }
        }
        assert_eq!(arena.audit(), Ok(()));
        drop((arena, region, graphs, ring));
        world
    }
}

fn run(seed: u64, beside: Beside) -> u64 {
    let memory_bytes = (10 + seed % 5 * 4) * 16 * KIB;
    let host = Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes }).unwrap());
    let late = ReorderingDriver::new(host.clone(), seed);
    let faulty = FaultyDriver::new(late.clone());
    if seed % 7 == 6 {
        faulty.refuse("host_register", true);
    }
    let mut program = Rings::new(seed, World::over(&late, faulty.clone(), beside));
    for number in 0..150 {
        let refused = Refused::some(beside, &faulty, &mut program.random);
        program.step(number);
        drop(refused);
    }
    let wrong = program.leave().end();
    drop((late, faulty));
    assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]), "seed {seed}");
    wrong
}

#[test]
fn units_stream_beside_graphs_and_a_region_in_whatever_order_streams_work() {
    seeds(60).for_each(|seed| assert_eq!(run(seed, Beside::Nothing), 0, "seed {seed}"));
}

#[test]
fn the_same_while_the_driver_refuses_calls_now_and_then() {
    seeds(40).for_each(|seed| assert_eq!(run(seed, Beside::Refusals), 0, "seed {seed}"));
}

#[test]
fn the_same_while_streams_are_captured_now_and_then() {
    seeds(40).for_each(|seed| assert_eq!(run(seed, Beside::Captures), 0, "seed {seed}"));
}

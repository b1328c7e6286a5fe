//! Random operations on a KV cache, an arena and leases, compared with a naive model without pages;
//! repeated with a failure of each driver call.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::Fence;
use vmmgraph::{
    Address, BlockBorrower, Device, ElasticOptions, Error, HostOptions, KvCache, KvLayout, KvOptions, Lease,
    Options, SharedVmmAllocator, Space, Stream, VacateBlocks, Vacated,
};
use vmmgraph_testkit::{FaultyDriver, Stamps};

const A: Stream = Stream::LEGACY;
const KIB: u64 = 1 << 10;
const PAGE: u64 = 16 * KIB;
/// Two blocks share a page of each plane; the model counts in groups of two.
const BLOCK: u64 = PAGE / 2;
const GROUPS: u64 = 10;
/// Pages of the largest graph, and guaranteed pages of the arena.
const SHOWN: u64 = 8;
const LEAST: u64 = 2;
const STEPS: u64 = 14;

struct Vacant;

impl BlockBorrower for Vacant {
    fn vacate(&self, asked: &VacateBlocks) -> vmmgraph::Result<Vacated> {
        Ok(Vacated { blocks: asked.blocks.clone(), fence: Fence::default() })
    }
}

/// The model's state of two blocks in two planes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Group {
    None,
    /// With the written stamp.
    Own(u32),
    Lent(u64, u32),
}

struct World {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
    arena: SharedVmmAllocator,
    large: Arc<Space>,
    block: Address,
    small: Arc<Space>,
    cache: Arc<KvCache>,
    borrower: Arc<dyn BlockBorrower>,
    stamps: Stamps,
    leases: Vec<Lease>,
    twin: [Group; GROUPS as usize],
    limit: u64,
    revision: u64,
    before: u64,
}

fn next(seed: &mut u64) -> u64 {
    *seed ^= *seed << 13;
    *seed ^= *seed >> 7;
    *seed ^= *seed << 17;
    *seed
}

fn graph(arena: &SharedVmmAllocator, pages: u64) -> (Arc<Space>, Address) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(pages * PAGE, A).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    (space, block)
}

impl World {
    fn new(layout: KvLayout) -> Self {
        let small_pages = HostOptions { granularity: 4 * KIB, ..HostOptions::default() };
        let host = Arc::new(HostDriver::new(0, small_pages).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let options = Options {
            small_page_bytes: 4 * KIB,
            large_page_bytes: PAGE,
            least_bytes: LEAST * PAGE,
            ..Options::default()
        };
        let arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let ((large, block), (small, _)) = (graph(&arena, SHOWN), graph(&arena, 3));
        let memory = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
        let options = KvOptions { planes: &[BLOCK, BLOCK], blocks_most: 2 * GROUPS, layout, memory };
        let cache = device.kv_cache(&options).unwrap();
        let driver: SharedDriver = faulty.clone();
        let stamps = Stamps::new(&driver, A);
        let borrower: Arc<dyn BlockBorrower> = Arc::new(Vacant);
        let (leases, twin, limit, revision) = (Vec::new(), [Group::None; GROUPS as usize], GROUPS, 0);
        Self {
            host,
            faulty,
            device,
            arena,
            large,
            block,
            small,
            cache,
            borrower,
            stamps,
            leases,
            twin,
            limit,
            revision,
            before: 0,
        }
    }

    fn lent(&self) -> u64 {
        self.twin.iter().filter(|group| matches!(group, Group::Lent(..))).count() as u64
    }

    fn groups(&mut self, groups: &Range<u64>) -> &mut [Group] {
        &mut self.twin[groups.start as usize..groups.end as usize]
    }

    fn step(&mut self, seed: &mut u64, number: u32) {
        let (what, first, long) = (next(seed) % 10, next(seed) % GROUPS, 1 + next(seed) % 3);
        let groups = first..(first + long).min(GROUPS);
        let blocks = 2 * groups.start..2 * groups.end;
        let within = groups.end <= self.limit;
        match what {
            0..=2 => {
                let count = groups.end - groups.start;
                let free = self.groups(&groups).iter().all(|group| *group == Group::None);
                let room = 2 * (self.lent() + count) <= SHOWN - LEAST;
                let lent = self.arena.lend_blocks(&self.cache, blocks.clone(), &self.borrower);
                match lent {
                    Ok(lease) => {
                        assert!(free && room && within, "{groups:?} of {:?}", self.twin);
                        assert_eq!(lease.bytes(), 2 * count * PAGE);
                        let id = lease.id();
                        self.groups(&groups).fill(Group::Lent(id, number));
                        self.leases.push(lease);
                        self.write(&blocks, number);
                    }
                    Err(error) => assert!(self.hurt() || !(free && room && within), "{error}"),
                }
            }
            3 | 4 => match self.cache.commit(blocks.clone()) {
                Ok(_) => {
                    assert!(within);
                    for group in groups {
                        let place = &mut self.twin[group as usize];
                        if *place == Group::None {
                            *place = Group::Own(number);
                            self.write(&(2 * group..2 * group + 2), number);
                        }
                    }
                }
                Err(error) => assert!(self.hurt() || !within, "{error}"),
            },
            5 => {
                self.cache.release(blocks, &Fence::default()).unwrap();
                self.groups(&groups).fill(Group::None);
            }
            6 if !self.leases.is_empty() => {
                let lease = self.leases.swap_remove(first as usize % self.leases.len());
                lease.recall(Duration::from_secs(20)).unwrap();
                for group in &mut self.twin {
                    if matches!(group, Group::Lent(id, _) if *id == lease.id()) {
                        *group = Group::None;
                    }
                }
            }
            7 => {
                (self.limit, self.revision) = (first + 1, self.revision + 1);
                self.cache.set_limit(2 * self.limit, self.revision);
            }
            8 => {
                let end = self.limit.min(first);
                self.cache.shrink_to(2 * end, &[], &Fence::default()).unwrap();
                self.groups(&(end..GROUPS)).fill(Group::None);
            }
            _ => {
                let (stamps, block, lent) = (&self.stamps, self.block, self.lent());
                let mut ran = false;
                let replayed = self.large.replay(A, || {
                    ran = true;
                    stamps.write(block, SHOWN * PAGE, number)
                });
                assert_eq!(ran, replayed.is_ok());
                assert!(!ran || lent == 0, "a graph ran over pages on lease");
                assert!(ran || lent > 0 || self.hurt(), "{replayed:?}");
                if lent > 0 && !self.hurt() {
                    assert!(matches!(replayed, Err(Error::Lent { .. })), "{replayed:?}");
                }
                let small = self.small.replay(A, || ());
                let free = self.small.leases().is_empty();
                assert!(small.is_ok() == free || self.hurt(), "{small:?}");
                assert!(free || lent > 0, "a lease is in the way that is over");
            }
        }
        self.cache.reap();
    }

    fn hurt(&self) -> bool {
        self.failed() > self.before
    }

    fn failed(&self) -> u64 {
        self.faulty.failed().values().sum()
    }

    fn write(&self, blocks: &Range<u64>, number: u32) {
        for (plane, block) in [0, 1].into_iter().flat_map(|plane| blocks.clone().map(move |b| (plane, b))) {
            let at = self.cache.address(plane, block).unwrap();
            let write = || self.stamps.write(at, BLOCK, number + plane as u32);
            write().or_else(|_| write()).unwrap();
        }
    }

    fn look(&self) {
        let held = |range: Range<u64>| range.filter(|group| self.twin[*group as usize] != Group::None);
        let backed: u64 = self.cache.backed().iter().map(|range| range.end - range.start).sum();
        assert_eq!(backed, 2 * held(0..GROUPS).count() as u64, "{:?}", self.twin);
        // Accounts and free pages add up to the device; each page has one owner; every mapping has
        // an owner.
        assert_eq!(self.device.pool().audit(), Ok(()));
        assert_eq!((self.arena.audit(), self.cache.audit()), (Ok(()), Ok(())));
        let stats = self.device.stats();
        let (kv, arena) = (self.cache.account().stats().charged_bytes, self.arena.stats().physical_bytes);
        assert_eq!(kv + arena + stats.free_bytes, stats.physical_bytes);
        let lent: u64 = self.leases.iter().map(Lease::bytes).sum();
        assert_eq!((lent, self.arena.lent_bytes()), (2 * self.lent() * PAGE, 2 * self.lent() * PAGE));
        assert_eq!(kv + lent, 2 * held(0..GROUPS).count() as u64 * PAGE);
        assert!(self.arena.lent_bytes() <= (SHOWN - LEAST) * PAGE, "the least of an account was lent");
        for group in held(0..GROUPS) {
            let (Group::Own(stamp) | Group::Lent(_, stamp)) = self.twin[group as usize] else { continue };
            for (plane, block) in [(0, 2 * group), (1, 2 * group + 1)] {
                let at = self.cache.address(plane, block).unwrap();
                let holds = || self.stamps.holds(at, BLOCK, stamp + plane as u32);
                assert!(holds().or_else(|_| holds()).unwrap(), "group {group} lost {stamp}");
            }
        }
    }

    fn end(self) {
        let Self { host, faulty, device, arena, large, small, cache, borrower, stamps, leases, .. } = self;
        for lease in &leases {
            lease.recall(Duration::from_secs(20)).unwrap();
        }
        large.replay(A, || ()).unwrap();
        drop((leases, large, small, arena, cache, borrower, stamps, faulty));
        device.trim().unwrap();
        assert_eq!((device.pool().audit_idle(), device.stats().physical_bytes), (Ok(()), 0));
        drop(device);
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// Runs all steps; one driver call of one step may fail. Returns the number of calls of each step.
fn run(layout: KvLayout, seed: u64, fail: Option<(u64, u64)>) -> Vec<u64> {
    let mut world = World::new(layout);
    let (mut numbers, mut calls) = (seed, Vec::new());
    for number in 0..STEPS {
        let nth = fail.and_then(|(step, nth)| (step == number).then_some(nth));
        world.before = world.failed();
        world.faulty.arm(nth.as_slice());
        world.step(&mut numbers, 10 * (number as u32 + 1));
        calls.push(world.faulty.calls());
        world.faulty.arm(&[]);
        world.look();
    }
    world.end();
    calls
}

fn layout_of(seed: u64) -> KvLayout {
    if seed.is_multiple_of(2) { KvLayout::ByBlock } else { KvLayout::ByPlane }
}

#[test]
fn a_naive_twin_agrees_after_every_operation() {
    for seed in 1..=40 {
        run(layout_of(seed), seed * 0x9e37_79b9, None);
    }
}

#[test]
fn a_naive_twin_agrees_whichever_call_of_the_driver_fails() {
    let mut runs = 0;
    for seed in 1..=4 {
        let (layout, numbers) = (layout_of(seed), seed * 0x9e37_79b9);
        for (step, calls) in run(layout, numbers, None).into_iter().enumerate() {
            for nth in 1..=calls {
                run(layout, numbers, Some((step as u64, nth)));
                runs += 1;
            }
        }
    }
    assert!(runs > 100, "only {runs} faults");
}

//! Arena pages on lease to blocks of a KV cache: recalls through the block pool, graphs that wait
//! or are refused, and the guaranteed bytes of accounts.

#![allow(clippy::single_range_in_vec_init, reason = "one span of many, not its numbers")]

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::{Fence, Limits};
use vmmgraph::{
    Address, BlockBorrower, BlockPool, Device, ElasticOptions, Error, HostOptions, KvCache, KvLayout,
    KvOptions, Lease, LimitChange, Options, SharedVmmAllocator, Space, Stream, VacateBlocks, Vacated,
};
use vmmgraph_testkit::{FaultyDriver, MIB, Stamps, stream};

const A: Stream = Stream::LEGACY;
const PAGE: u64 = 2 * MIB;
/// Bytes of a block in one plane: four blocks share a page.
const BLOCK: u64 = PAGE / 4;
const SOON: Duration = Duration::from_secs(20);

struct Engine {
    pool: Mutex<BlockPool>,
    asked: Mutex<Vec<VacateBlocks>>,
    pinned: Mutex<Vec<u64>>,
    /// A stream with work on the blocks; 0: none.
    busy: AtomicU64,
    device: Mutex<Option<Arc<Device>>>,
}

impl BlockBorrower for Engine {
    fn vacate(&self, asked: &VacateBlocks) -> vmmgraph::Result<Vacated> {
        self.asked.lock().unwrap().push(asked.clone());
        let (mut pool, pinned) = (self.pool.lock().unwrap(), self.pinned.lock().unwrap());
        let ask = pool.ask_of(&asked.blocks, asked.bytes, 0, |block| !pinned.contains(&block));
        for page in ask.pages {
            pool.free(&page.blocks).unwrap();
        }
        let blocks = pool.unused_of(&asked.blocks);
        // At most the requested bytes.
        let mut left = asked.bytes.div_ceil(PAGE_OF_BLOCKS) * 4;
        let blocks: Vec<Range<u64>> = blocks
            .into_iter()
            .map(|range| {
                let end = range.end.min(range.start + left);
                left -= end - range.start;
                range.start..end
            })
            .filter(|range| !range.is_empty())
            .collect();
        blocks.iter().for_each(|range| assert_eq!(pool.unback(range), 0));
        let mut fence = Fence::default();
        if self.busy.load(SeqCst) > 0 {
            let device = self.device.lock().unwrap().clone().unwrap();
            fence.add(device.pool().events(), stream(self.busy.load(SeqCst)));
        }
        Ok(Vacated { blocks, fence })
    }
}

/// Bytes of the pages of four blocks in both planes.
const PAGE_OF_BLOCKS: u64 = 2 * PAGE;

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
    arena: SharedVmmAllocator,
    cache: Arc<KvCache>,
    engine: Arc<Engine>,
    borrower: Arc<dyn BlockBorrower>,
    stamps: Stamps,
    /// The large graph needs eight pages, the small one three.
    large: Arc<Space>,
    block: Address,
    small: Arc<Space>,
}

fn graph(arena: &SharedVmmAllocator, pages: u64) -> (Arc<Space>, Address) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(pages * PAGE, A).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    (space, block)
}

fn bench(layout: KvLayout, options: &Options) -> Bench {
    let granularity = HostOptions { granularity: 64 << 10, ..HostOptions::default() };
    let host = Arc::new(HostDriver::new(0, granularity).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let arena = SharedVmmAllocator::new(&device, &pages(options.clone())).unwrap();
    let memory = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
    let options = KvOptions { planes: &[BLOCK, BLOCK], blocks_most: 64, layout, memory };
    let cache = device.kv_cache(&options).unwrap();
    let pool = BlockPool::new(64, cache.blocks_a_page(), 2 * BLOCK).unwrap();
    let engine = Arc::new(Engine {
        pool: Mutex::new(pool),
        asked: Mutex::default(),
        pinned: Mutex::default(),
        busy: AtomicU64::new(0),
        device: Mutex::new(Some(Arc::clone(&device))),
    });
    let ((large, block), (small, _)) = (graph(&arena, 8), graph(&arena, 3));
    let driver: SharedDriver = faulty.clone();
    let stamps = Stamps::new(&driver, A);
    let borrower: Arc<dyn BlockBorrower> = engine.clone();
    Bench { host, faulty, device, arena, cache, engine, borrower, stamps, large, block, small }
}

fn pages(options: Options) -> Options {
    Options { small_page_bytes: 64 << 10, large_page_bytes: PAGE, ..options }
}

fn by_plane() -> Bench {
    bench(KvLayout::ByPlane, &Options::default())
}

impl Bench {
    fn lend(&self, blocks: Range<u64>) -> vmmgraph::Result<Lease> {
        let lease = self.arena.lend_blocks(&self.cache, blocks.clone(), &self.borrower)?;
        self.engine.pool.lock().unwrap().back(&blocks);
        Ok(lease)
    }

    fn write(&self, block: u64, value: u32) {
        for plane in 0..2 {
            let at = self.cache.address(plane, block).unwrap();
            self.stamps.write(at, BLOCK, value + plane as u32).unwrap();
        }
    }

    fn holds(&self, block: u64, value: u32) -> bool {
        let plane = |plane: usize| {
            let at = self.cache.address(plane, block).unwrap();
            self.stamps.holds(at, BLOCK, value + plane as u32).unwrap()
        };
        plane(0) && plane(1)
    }

    fn audit(&self) {
        assert_eq!((self.arena.audit(), self.cache.audit()), (Ok(()), Ok(())));
        assert_eq!(self.device.pool().audit(), Ok(()));
    }

    fn replay(&self) {
        let all = 8 * PAGE;
        self.large.replay(A, || self.stamps.write(self.block, all, 77).unwrap()).unwrap();
        assert!(self.stamps.holds(self.block, all, 77).unwrap());
    }

    fn end(self) {
        let Self { host, device, arena, cache, engine, borrower, large, small, .. } = self;
        *engine.device.lock().unwrap() = None;
        drop((large, small, arena, cache, borrower, engine, self.stamps, self.faulty));
        device.trim().unwrap();
        assert_eq!(device.pool().audit_idle(), Ok(()));
        assert_eq!(device.stats().physical_bytes, 0);
        drop(device);
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

fn refused<T: std::fmt::Debug>(result: vmmgraph::Result<T>, what: &str) {
    match result {
        Err(Error::WrongState { sentence }) => assert!(sentence.contains(what), "{sentence}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn blocks_get_pages_of_the_graphs_in_all_planes_and_give_them_back_by_way_of_their_pool() {
    for layout in [KvLayout::ByPlane, KvLayout::ByBlock] {
        let bench = bench(layout, &Options::default());
        bench.cache.commit(0..4).unwrap();
        bench.engine.pool.lock().unwrap().back(&(0..4));
        let (charged, held) = (bench.cache.account().stats(), bench.arena.stats().physical_bytes);
        assert_eq!(bench.arena.lendable_bytes(), 8 * PAGE);
        let lease = bench.lend(8..16).unwrap();
        lease.before(stream(1)).unwrap();
        assert_eq!((lease.bytes(), lease.blocks(), lease.range()), (4 * PAGE, 8..16, 0..0), "{layout:?}");
        assert_eq!((bench.arena.lent_bytes(), bench.arena.lendable_bytes()), (4 * PAGE, 4 * PAGE));
        assert_eq!(bench.cache.account().stats(), charged, "what is lent counts for the arena");
        assert_eq!(bench.arena.stats().physical_bytes, held);
        assert_eq!((bench.cache.backed(), bench.cache.stats().blocks), (vec![0..4, 8..16], 16));
        bench.audit();
        let used = bench.engine.pool.lock().unwrap().allocate(9).unwrap();
        used.iter().for_each(|block| bench.write(*block, 10 * (*block as u32 + 1)));
        assert!(matches!(bench.large.replay(A, || unreachable!()), Err(Error::Lent { .. })));
        bench.small.replay(A, || ()).unwrap();
        assert!(used.iter().all(|block| bench.holds(*block, 10 * (*block as u32 + 1))));
        lease.recall(SOON).unwrap();
        let asked = bench.engine.asked.lock().unwrap().pop().unwrap();
        assert_eq!((asked.blocks, asked.bytes, asked.instead), (vec![8..16], 4 * PAGE, vec![0..4]));
        assert_eq!((bench.cache.backed(), lease.bytes(), bench.arena.lent_bytes()), (vec![0..4], 0, 0));
        bench.replay();
        let kept: Vec<_> = used.into_iter().filter(|block| *block < 4).collect();
        assert!(!kept.is_empty() && kept.iter().all(|block| bench.holds(*block, 10 * (*block as u32 + 1))));
        bench.audit();
        drop(lease);
        bench.end();
    }
}

#[test]
fn a_recall_of_some_bytes_takes_the_pages_that_cost_least_and_the_rest_stays() {
    let bench = by_plane();
    let lease = bench.lend(0..16).unwrap();
    {
        // Page 0 is full, page 1 has two free blocks, page 2 has one used, pinned block.
        let mut pool = bench.engine.pool.lock().unwrap();
        let all = pool.allocate(16).unwrap();
        pool.free(&all.iter().copied().filter(|block| *block >= 6 && *block != 9).collect::<Vec<_>>())
            .unwrap();
    }
    bench.engine.pinned.lock().unwrap().push(9);
    bench.write(0, 5);
    // Page 3 is empty; page 1 is the cheapest of the rest.
    lease.recall_bytes(2 * PAGE_OF_BLOCKS, SOON).unwrap();
    assert_eq!((lease.bytes(), bench.cache.backed()), (2 * PAGE_OF_BLOCKS, vec![0..4, 8..12]));
    assert_eq!(bench.large.leases(), [lease.id()]);
    assert!(bench.holds(0, 5));
    bench.audit();
    // The recall takes page 0 and reports the pinned block.
    refused(lease.recall(SOON), "needed by its borrower");
    assert_eq!((lease.bytes(), bench.cache.backed()), (PAGE_OF_BLOCKS, vec![8..12]));
    assert!(matches!(bench.large.replay(A, || unreachable!()), Err(Error::Lent { .. })));
    bench.engine.pinned.lock().unwrap().clear();
    bench.arena.recall_all(SOON).unwrap();
    bench.replay();
    drop(lease);
    bench.end();
}

#[test]
fn what_cannot_be_lent_to_a_cache_is_refused_and_changes_nothing() {
    let bench = by_plane();
    bench.cache.commit(4..5).unwrap();
    let before = (bench.device.stats(), bench.cache.stats());
    refused(bench.lend(4..8), "have memory already");
    refused(bench.lend(0..8), "have memory already");
    for (blocks, value) in [(3..3, 0), (8..28, 10 * PAGE)] {
        let Err(Error::InvalidArgument { value: found, .. }) = bench.lend(blocks) else { panic!() };
        assert_eq!(found, i128::from(value));
    }
    assert!(matches!(bench.lend(5..8), Err(Error::InvalidArgument { value: 0, .. })));
    assert!(matches!(bench.lend(60..65), Err(Error::InvalidArgument { .. })));
    assert_eq!(bench.cache.set_limit(12, 1), LimitChange::Applied);
    assert!(matches!(bench.lend(8..16), Err(Error::OverBudget { .. })), "beyond the limit");
    let memory = ElasticOptions { page_bytes: PAGE / 2, ..ElasticOptions::default() };
    let options = KvOptions { planes: &[BLOCK], blocks_most: 8, layout: KvLayout::ByPlane, memory };
    let other = bench.device.kv_cache(&options).unwrap();
    assert_eq!(
        bench.arena.lend_blocks(&other, 0..4, &bench.borrower).err(),
        Some(Error::InvalidPageSize { what: "a page of the cache", bytes: PAGE / 2, granularity: PAGE })
    );
    drop(other);
    let mut after = (bench.device.stats(), bench.cache.stats());
    assert_eq!(after.1.memory.refused, before.1.memory.refused + 2, "both had no pages to be lent");
    after.1.memory.refused = before.1.memory.refused;
    (after.1.limit_blocks, after.1.revision) = (64, None);
    assert_eq!(after, before);
    assert!(bench.arena.leases().is_empty());
    bench.audit();
    bench.end();
}

#[test]
fn the_least_of_an_account_is_never_lent() {
    let bench = bench(KvLayout::ByPlane, &Options { least_bytes: 5 * PAGE, ..Options::default() });
    assert_eq!(bench.arena.lendable_bytes(), 3 * PAGE);
    let before = bench.device.stats();
    assert!(
        matches!(bench.lend(0..8), Err(Error::InvalidArgument { value, .. }) if value == i128::from(4 * PAGE))
    );
    assert_eq!(bench.device.stats(), before);
    let lease = bench.lend(0..4).unwrap();
    assert_eq!(bench.arena.lendable_bytes(), PAGE);
    assert!(bench.lend(4..8).is_err(), "two of the last three are lent already");
    lease.recall(SOON).unwrap();
    assert_eq!(bench.arena.lendable_bytes(), 3 * PAGE);
    drop(lease);
    bench.end();
}

#[test]
fn the_least_of_a_tenant_is_not_lent_to_others_nor_lost_when_graphs_go() {
    let bench = by_plane();
    let tenant = bench.device.account("tenant", None, Limits { most: None, least: 6 * PAGE }).unwrap();
    let arena =
        |options| SharedVmmAllocator::in_account(&bench.device, &pages(options), Some(&tenant)).unwrap();
    let (one, two) = (arena(Options::default()), arena(Options::default()));
    let (first, second) = (graph(&one, 6).0, graph(&two, 4).0);
    assert_eq!((one.lendable_bytes(), two.lendable_bytes()), (4 * PAGE, 4 * PAGE));
    let lease = one.lend_blocks(&bench.cache, 0..4, &bench.borrower).unwrap();
    assert_eq!((one.lendable_bytes(), two.lendable_bytes()), (2 * PAGE, 2 * PAGE));
    assert!(one.lend_blocks(&bench.cache, 4..12, &bench.borrower).is_err());
    assert!(two.lend_blocks(&bench.cache, 4..12, &bench.borrower).is_err());
    let memory = ElasticOptions { page_bytes: PAGE, account: Some(&tenant), ..ElasticOptions::default() };
    let options = KvOptions { planes: &[BLOCK], blocks_most: 64, layout: KvLayout::ByPlane, memory };
    let own = bench.device.kv_cache(&options).unwrap();
    let inside = one.lend_blocks(&own, 0..16, &bench.borrower).unwrap();
    assert_eq!((inside.bytes(), one.lent_bytes()), (4 * PAGE, 6 * PAGE));
    // The graphs are dropped and two pages remain leased: six more are still guaranteed to the
    // tenant.
    own.release(0..16, &Fence::default()).unwrap();
    drop((first, second, inside));
    bench.arena.trim().unwrap();
    assert_eq!(tenant.stats().charged_bytes, 2 * PAGE);
    bench.device.pool().set_budget(Some(bench.device.stats().physical_bytes + 6 * PAGE));
    bench.device.trim().unwrap();
    let memory = ElasticOptions { page_bytes: PAGE, ..ElasticOptions::default() };
    let page = bench.device.elastic_buffer(PAGE, &memory).unwrap();
    for greedy in [bench.cache.commit(8..12), page.commit(0..PAGE)] {
        assert!(matches!(greedy, Err(Error::OverBudget { .. })), "{greedy:?}");
    }
    let again = graph(&two, 6).0;
    bench.device.pool().set_budget(None);
    bench.cache.release(0..4, &Fence::default()).unwrap();
    assert_eq!((lease.bytes(), one.lent_bytes(), tenant.stats().charged_bytes), (0, 0, 6 * PAGE));
    drop((lease, again, one, two, own, tenant, page));
    bench.end();
}

#[test]
fn replays_scopes_and_captures_wait_for_the_recall_if_the_arena_is_to() {
    let bench = by_plane();
    bench.arena.set_recall(Some(SOON));
    for round in 0..4_u32 {
        let lease = bench.lend(0..8).unwrap();
        let outside = bench.lend(8..12).unwrap();
        bench.write(3, 3);
        match round {
            0 => bench.replay(),
            1 => {
                bench.large.enter(A).unwrap();
                bench.large.leave().unwrap();
            }
            2 => {
                let scope = bench.arena.eager_scope(A).unwrap();
                let block = scope.allocate(8 * PAGE).unwrap();
                bench.stamps.write(block, 8 * PAGE, 9).unwrap();
                scope.free(block).unwrap();
            }
            _ => {
                let space = bench.arena.open_space().unwrap();
                space.allocate(8 * PAGE, A).unwrap();
            }
        }
        assert_eq!((lease.bytes(), outside.bytes(), bench.cache.backed()), (0, 0, vec![]), "{round}");
        assert_eq!(bench.engine.asked.lock().unwrap().drain(..).count(), 2);
        bench.replay();
        bench.audit();
    }
    let lease = bench.lend(0..4).unwrap();
    bench.small.replay(A, || ()).unwrap();
    assert_eq!(lease.bytes(), 2 * PAGE);
    {
        let mut pool = bench.engine.pool.lock().unwrap();
        bench.engine.pinned.lock().unwrap().extend(pool.allocate(1).unwrap());
    }
    refused(bench.large.replay(A, || unreachable!()), "needed by its borrower");
    bench.engine.pinned.lock().unwrap().clear();
    bench.arena.set_recall(Some(Duration::from_millis(5)));
    bench.engine.busy.store(3, SeqCst);
    bench.faulty.set_busy(true);
    refused(bench.large.replay(A, || unreachable!()), "in use by the device");
    bench.arena.set_recall(None);
    assert!(matches!(bench.large.replay(A, || unreachable!()), Err(Error::Lent { .. })));
    bench.faulty.set_busy(false);
    bench.cache.reap();
    bench.replay();
    drop(lease);
    bench.end();
}

#[test]
fn blocks_that_are_recalled_are_not_backed_again_before_their_pages_are_back() {
    let bench = by_plane();
    let lease = bench.lend(0..8).unwrap();
    bench.engine.busy.store(3, SeqCst);
    bench.faulty.set_busy(true);
    refused(lease.recall(Duration::from_millis(2)), "in use by the device");
    assert_eq!((lease.bytes(), bench.cache.backed()), (4 * PAGE, vec![]));
    // A commit would keep pages that the lender waits for.
    refused(bench.cache.commit(0..1), "being recalled");
    refused(bench.cache.commit_async(6..9).unwrap().wait(), "being recalled");
    refused(bench.lend(0..4), "being recalled");
    bench.cache.commit(8..12).unwrap();
    bench.audit();
    bench.faulty.set_busy(false);
    bench.cache.commit(0..1).unwrap();
    assert_eq!(lease.bytes(), 0);
    bench.replay();
    // Blocks released before a recall can be committed again.
    drop(lease);
    bench.cache.release(0..12, &Fence::default()).unwrap();
    let lease = bench.lend(0..4).unwrap();
    let mut fence = Fence::default();
    bench.faulty.set_busy(true);
    fence.add(bench.device.pool().events(), stream(3));
    bench.cache.release(0..4, &fence).unwrap();
    drop(fence);
    bench.cache.commit(0..4).unwrap();
    assert_eq!(lease.bytes(), 2 * PAGE);
    bench.faulty.set_busy(false);
    lease.recall(SOON).unwrap();
    bench.replay();
    drop(lease);
    bench.end();
}

#[test]
fn a_neighbour_on_a_lent_page_is_asked_too_and_keeps_it_until_it_goes() {
    let bench = by_plane();
    // Blocks 2 and 3 only; the pages have room for four.
    let lease = bench.lend(2..4).unwrap();
    assert_eq!((lease.bytes(), bench.cache.commit(0..2).unwrap().pages), (2 * PAGE, 0));
    bench.engine.pool.lock().unwrap().back(&(0..4));
    assert_eq!(bench.engine.pool.lock().unwrap().allocate(1), Some(vec![0]));
    bench.engine.pinned.lock().unwrap().push(0);
    refused(lease.recall(SOON), "needed by its borrower");
    assert_eq!(bench.engine.asked.lock().unwrap()[0].blocks, [0..4]);
    bench.audit();
    bench.engine.pinned.lock().unwrap().clear();
    lease.recall(SOON).unwrap();
    assert_eq!(bench.cache.backed(), []);
    bench.replay();
    drop(lease);
    bench.end();
}

#[test]
fn a_thread_that_grows_the_cache_beside_recalls_and_replays_loses_nothing() {
    let bench = by_plane();
    bench.arena.set_recall(Some(SOON));
    let stop = AtomicBool::new(false);
    thread::scope(|threads| {
        threads.spawn(|| {
            while !stop.load(SeqCst) {
                bench.cache.commit(32..40).unwrap();
                bench.write(33, 50);
                assert!(bench.holds(33, 50));
                bench.cache.release(32..40, &Fence::default()).unwrap();
            }
        });
        for round in 0..25 {
            let lease = bench.lend(0..8).unwrap();
            bench.write(5, round);
            assert!(bench.holds(5, round));
            if round % 2 == 0 {
                lease.recall(SOON).unwrap()
            }
            bench.replay();
            assert_eq!(lease.bytes(), 0);
        }
        stop.store(true, SeqCst);
    });
    bench.audit();
    bench.end();
}

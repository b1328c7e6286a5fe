//! Elastic buffers and KV caches, compared with naive models while each driver call fails once, and
//! in single cases.

#![allow(clippy::single_range_in_vec_init, reason = "one span of many, not its numbers")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use proptest::prelude::*;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver};
use vmmgraph::pages::{Fence, Limits, Reclaimer};
use vmmgraph::{
    Address, BlockPool, Device, ElasticBuffer, ElasticObserver, ElasticOptions, Error, HostOptions, KvCache,
    KvLayout, KvOptions, LimitChange, Options, Pending, Result, SharedVmmAllocator, Shown, Stream,
};
use vmmgraph_testkit::{FaultyDriver, MIB, Stamps, stream};

mod again;

const A: Stream = Stream::LEGACY;

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
}

fn bench() -> Bench {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    Bench { device: Device::with_driver(faulty.clone()), host, faulty }
}

impl Bench {
    fn buffer(&self, bytes: u64) -> ElasticBuffer {
        self.device.elastic_buffer(bytes, &pages_of(2 * MIB)).unwrap()
    }

    fn fence(&self) -> Fence {
        let mut fence = Fence::default();
        fence.add(self.device.pool().events(), stream(0x50));
        fence
    }

    fn end(self) {
        self.device.trim().unwrap();
        assert_eq!(self.device.pool().audit_idle(), Ok(()));
        drop(self.device);
        assert_eq!(self.host.leftovers(), [0; 4]);
    }
}

fn pages_of(page_bytes: u64) -> ElasticOptions<'static> {
    ElasticOptions { name: "kv", page_bytes, ..ElasticOptions::default() }
}

fn now() -> Fence {
    Fence::default()
}

fn on_both(test: impl Fn(&Arc<Device>, &Stamps)) {
    let drivers: [SharedDriver; 2] = [
        Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()),
        Arc::new(CudaDriver::new(0).unwrap()),
    ];
    for driver in drivers {
        let device = Device::with_driver(driver);
        test(&device, &Stamps::new(device.driver(), A));
        device.trim().unwrap();
        assert_eq!(device.pool().audit_idle(), Ok(()));
        let stats = device.stats();
        assert_eq!((stats.pages, stats.reservations, stats.mappings), (0, 0, 0));
    }
}

/// Stamps pages of 2 MiB as one block each, so that parts can be checked.
fn write(stamps: &Stamps, at: Address, bytes: u64, stamp: u32) {
    for offset in (0..bytes).step_by(2 << 20) {
        stamps.write(at.plus(offset), 2 * MIB, stamp).unwrap();
    }
}

fn holds(stamps: &Stamps, at: Address, bytes: u64, stamp: u32) -> bool {
    (0..bytes).step_by(2 << 20).all(|offset| stamps.holds(at.plus(offset), 2 * MIB, stamp).unwrap())
}

#[test]
fn contents_survive_growth_and_addresses_stay() {
    on_both(|device, stamps| {
        let buffer = device.elastic_buffer(200 * MIB + 1, &pages_of(4 * MIB)).unwrap();
        let base = buffer.base();
        assert_eq!((buffer.bytes(), buffer.stats().reserved_bytes), (200 * MIB + 1, 204 * MIB));
        assert_eq!((buffer.stats().committed_bytes, device.stats().physical_bytes), (0, 0));
        let done = buffer.commit(0..5 * MIB).unwrap();
        assert_eq!((done.bytes, done.pages, done.created, done.revived), (8 * MIB, 2, 2, 0));
        write(stamps, base, 8 * MIB, 1);
        let done = buffer.commit(MIB..30 * MIB).unwrap();
        assert_eq!((done.bytes, done.pages), (24 * MIB, 6));
        write(stamps, base.plus(8 * MIB), 24 * MIB, 2);
        assert_eq!(buffer.commit(0..32 * MIB).unwrap().pages, 0);
        buffer.commit(200 * MIB..200 * MIB + 1).unwrap();
        assert_eq!(buffer.committed(), [0..32 * MIB, 200 * MIB..204 * MIB]);
        assert_eq!(buffer.decommit(190 * MIB..200 * MIB + 1, &now()), Ok(4 * MIB));
        assert_eq!(buffer.decommit(9 * MIB..21 * MIB, &now()), Ok(8 * MIB));
        assert_eq!(buffer.committed(), [0..12 * MIB, 20 * MIB..32 * MIB]);
        assert!(holds(stamps, base, 8 * MIB, 1) && holds(stamps, base.plus(8 * MIB), 4 * MIB, 2));
        assert!(holds(stamps, base.plus(20 * MIB), 12 * MIB, 2));
        assert_eq!(buffer.base(), base);
        assert_eq!(buffer.audit(), Ok(()));
        let stats = buffer.stats();
        assert_eq!(
            (stats.committed_bytes, stats.peak_committed_bytes, stats.pending_unmap_bytes),
            (24 * MIB, 36 * MIB, 0)
        );
        assert_eq!((stats.pages_mapped, stats.pages_unmapped, stats.account.charged_bytes), (9, 3, 24 * MIB));
    });
}

#[test]
fn an_event_may_be_destroyed_right_after_a_fence_followed_it() {
    let bench = bench();
    let buffer = bench.buffer(8 * MIB);
    buffer.commit(0..8 * MIB).unwrap();
    let (driver, events) = (bench.device.driver(), bench.device.pool().events());
    let recorded = || {
        let event = driver.event_create().unwrap();
        // SAFETY: an event of this driver, which treats streams as numbers.
        unsafe { driver.event_record(event, stream(0x50)) }.unwrap();
        event
    };
    // SAFETY: a live event of this driver.
    let follow = |event| unsafe { events.follow(event) };
    // SAFETY: created above.
    let destroy = |event| unsafe { driver.event_destroy(event) }.unwrap();
    let over = recorded();
    assert!(follow(over).unwrap().is_none());
    bench.faulty.set_busy(true);
    for call in ["event_query", "stream_create", "event_wait", "event_record"] {
        bench.faulty.refuse(call, true);
        assert!(follow(over).is_err(), "{call}");
        bench.faulty.refuse(call, false);
    }
    let event = recorded();
    let mut fence = Fence::default();
    fence.add_mark(follow(event).unwrap().unwrap());
    destroy(event);
    destroy(over);
    assert_eq!((buffer.decommit(0..8 * MIB, &fence), buffer.reap()), (Ok(8 * MIB), 0));
    drop(fence);
    bench.faulty.set_busy(false);
    assert_eq!((buffer.reap(), buffer.stats().pending_unmap_bytes), (8 * MIB, 0));
    drop(buffer);
    bench.end();
}

#[test]
fn what_was_asked_for_ahead_does_not_undo_a_shrink() {
    let bench = bench();
    let options =
        KvOptions { planes: &[MIB, MIB], blocks_most: 64, memory: pages_of(2 * MIB), ..KvOptions::default() };
    let cache = bench.device.kv_cache(&options).unwrap();
    cache.grow_to(4).unwrap();
    // A shrink arrives before, during or after the commit's driver calls.
    for call in 1..=12 {
        let (shrinker, count) = (Arc::clone(&cache), AtomicU64::new(0));
        bench.faulty.set_hook(Some(Arc::new(move |_: &str| {
            if count.fetch_add(1, Ordering::SeqCst) + 1 == call {
                shrinker.shrink_to(6, &[], &now()).unwrap();
            }
        })));
        let pending = cache.commit_async(2..40).unwrap();
        let done = pending.wait().unwrap();
        bench.faulty.set_hook(None);
        assert!(done.pages > 0);
        cache.reap();
        assert_eq!((cache.stats().blocks, cache.backed()), (6, vec![0..6]), "call {call}");
        assert_eq!(cache.audit(), Ok(()));
        cache.shrink_to(4, &[], &now()).unwrap();
        cache.commit_async(0..8).unwrap().wait().unwrap();
        assert_eq!(cache.stats().blocks, 8);
        cache.shrink_to(4, &[], &now()).unwrap();
    }
    drop(cache);
    bench.end();
}

struct Asked(AtomicU64);

impl Reclaimer for Asked {
    fn reclaim(&self, _bytes: u64) -> u64 {
        self.0.fetch_add(1, Ordering::SeqCst);
        1
    }
    fn cost(&self) -> u64 {
        1
    }
}

#[test]
fn a_block_beyond_the_limit_is_a_miss_that_asks_nobody_and_waits_for_nothing() {
    let bench = bench();
    let options =
        KvOptions { planes: &[2 * MIB], blocks_most: 64, memory: pages_of(2 * MIB), ..KvOptions::default() };
    let cache = bench.device.kv_cache(&options).unwrap();
    let asked = Arc::new(Asked(AtomicU64::new(0)));
    let reclaimer: Arc<dyn Reclaimer> = asked.clone();
    bench.device.add_reclaimer(&reclaimer);
    cache.grow_to(4).unwrap();
    assert_eq!(cache.set_limit(4, 1), LimitChange::Applied);
    assert!(matches!(cache.grow_to(5), Err(Error::OverBudget { .. })));
    assert_eq!(asked.0.load(Ordering::SeqCst), 0);
    cache.set_limit(64, 2);
    bench.device.set_budget(Some(8 * MIB));
    assert!(matches!(cache.grow_to(5), Err(Error::OverBudget { .. })));
    assert!(asked.0.load(Ordering::SeqCst) > 0);
    bench.device.set_budget(None);
    drop(cache);
    bench.end();
}

#[test]
fn pages_go_round_between_two_buffers_and_an_arena_over_one_budget_without_a_create() {
    on_both(|device, stamps| {
        let tenant = device.account("tenant", None, Limits { most: Some(64 * MIB), least: 0 }).unwrap();
        let options = ElasticOptions { account: Some(&tenant), ..pages_of(16 * MIB) };
        let buffers = [0, 1].map(|_| device.elastic_buffer(256 * MIB, &options).unwrap());
        let large = Options { large_page_bytes: 16 * MIB, ..Options::default() };
        let arena = SharedVmmAllocator::in_account(device, &large, Some(&tenant)).unwrap();
        assert_eq!(buffers[0].commit(0..64 * MIB).unwrap().created, 4);
        let refused = buffers[1].commit(0..16 * MIB).unwrap_err();
        assert!(
            matches!(&refused, Error::OverBudget { account: Some(of), .. } if of == "tenant"),
            "{refused}"
        );
        for _ in 0..3 {
            assert_eq!(buffers[0].decommit(16 * MIB..64 * MIB, &now()), Ok(48 * MIB));
            let done = buffers[1].commit(32 * MIB..64 * MIB).unwrap();
            assert_eq!((done.pages, done.created), (2, 0));
            write(stamps, buffers[1].base().plus(32 * MIB), 32 * MIB, 7);
            let space = arena.open_space().unwrap();
            let block = space.allocate(16 * MIB, A).unwrap();
            write(stamps, block, 16 * MIB, 8);
            assert!(buffers[0].commit(16 * MIB..32 * MIB).unwrap_err().is_out_of_memory());
            assert!(holds(stamps, buffers[1].base().plus(32 * MIB), 32 * MIB, 7));
            space.free(block).unwrap();
            drop(space);
            arena.trim().unwrap();
            buffers[1].decommit(0..256 * MIB, &now()).unwrap();
            buffers[0].commit(0..64 * MIB).unwrap();
            buffers.iter().for_each(|buffer| assert_eq!(buffer.audit(), Ok(())));
        }
        let created = device.stats().pages_created;
        buffers[0].decommit(0..64 * MIB, &now()).unwrap();
        let space = arena.open_space().unwrap();
        space.allocate(64 * MIB, A).unwrap();
        assert_eq!(device.stats().pages_created, created, "the arena did not take the buffer's pages");
    });
}

#[test]
fn a_decommit_waits_for_its_fence_and_nobody_for_the_device() {
    let bench = bench();
    let (buffer, other) = (bench.buffer(64 * MIB), bench.buffer(64 * MIB));
    buffer.commit(0..8 * MIB).unwrap();
    let stamps = Stamps::new(bench.device.driver(), A);
    write(&stamps, buffer.base(), 8 * MIB, 3);
    bench.faulty.set_busy(true);
    let unmaps = bench.faulty.count("unmap");
    assert_eq!(buffer.decommit(0..8 * MIB, &bench.fence()), Ok(8 * MIB));
    assert_eq!((buffer.reap(), bench.faulty.count("unmap")), (0, unmaps));
    let stats = buffer.stats();
    assert_eq!(
        (stats.committed_bytes, stats.pending_unmap_bytes, stats.account.charged_bytes),
        (0, 8 * MIB, 8 * MIB)
    );
    assert_eq!((buffer.committed(), buffer.decommit(0..8 * MIB, &now())), (vec![], Ok(0)));
    // Committed again before the unmap: contents remain, and a stream can wait for the last users.
    let back = buffer.commit(2 * MIB..4 * MIB).unwrap();
    assert_eq!((back.pages, back.created, back.revived), (0, 0, 1));
    assert!(holds(&stamps, buffer.base().plus(2 * MIB), 2 * MIB, 3));
    let waits = bench.faulty.count("event_wait");
    buffer.before(stream(0x51)).unwrap();
    assert_eq!(bench.faulty.count("event_wait"), waits + 1);
    bench.faulty.set_capturing(stream(0x52), true);
    assert!(matches!(buffer.before(stream(0x52)), Err(Error::StreamCapturing { .. })));
    bench.faulty.set_capturing(stream(0x52), false);
    bench.faulty.set_busy(false);
    assert_eq!((buffer.reap(), buffer.stats().committed_bytes), (6 * MIB, 2 * MIB));
    let waits = bench.faulty.count("event_wait");
    buffer.before(stream(0x51)).unwrap();
    assert_eq!(bench.faulty.count("event_wait"), waits, "what is over is not waited for");
    assert_eq!(bench.faulty.broken_captures(), Vec::<String>::new());

    buffer.commit(0..8 * MIB).unwrap();
    bench.device.set_budget(Some(8 * MIB));
    bench.faulty.set_busy(true);
    buffer.decommit(0..8 * MIB, &bench.fence()).unwrap();
    bench.faulty.set_busy(false);
    assert_eq!(other.commit(0..8 * MIB).unwrap().created, 0);
    assert_eq!((buffer.stats().pending_unmap_bytes, buffer.audit(), other.audit()), (0, Ok(()), Ok(())));
    bench.faulty.set_busy(true);
    other.decommit(0..8 * MIB, &bench.fence()).unwrap();
    drop((buffer, other));
    assert_eq!(bench.device.stats().mappings, 4);
    bench.faulty.set_busy(false);
    bench.end();
}

/// 1 TiB in pages of 4 KiB is 2^28 pages; the check must not visit them.
#[test]
fn more_than_the_device_has_is_refused_at_once() {
    let host = HostOptions { granularity: 4096, memory_bytes: 64 * MIB };
    let device = Device::with_driver(Arc::new(HostDriver::new(0, host).unwrap()));
    let buffer = device.elastic_buffer(1 << 40, &pages_of(4096)).unwrap();
    let cache = KvOptions {
        planes: &[4096],
        blocks_most: 1 << 28,
        layout: KvLayout::ByPlane,
        memory: pages_of(4096),
    };
    let cache = device.kv_cache(&cache).unwrap();
    let begun = std::time::Instant::now();
    let refused = |error: Option<Error>| {
        assert!(
            matches!(error, Some(Error::OutOfMemory { requested, .. }) if requested == 1 << 40),
            "{error:?}"
        );
    };
    refused(buffer.commit(0..1 << 40).err());
    refused(buffer.commit_async(0..1 << 40).and_then(|pending| pending.wait()).err());
    refused(cache.grow_to(1 << 28).err());
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
    buffer.commit(0..MIB).unwrap();
    device.trim().unwrap();
}

#[test]
fn no_memory_is_a_value_and_leaves_everything_as_it_was() {
    let bench = bench();
    let options = ElasticOptions { budget_bytes: Some(8 * MIB), ..pages_of(2 * MIB) };
    let buffer = bench.device.elastic_buffer(64 * MIB, &options).unwrap();
    buffer.commit(4 * MIB..8 * MIB).unwrap();
    let before = (buffer.committed(), bench.device.stats().physical_bytes, bench.host.leftovers());
    let refused = buffer.commit(0..16 * MIB).unwrap_err();
    assert!(
        matches!(&refused, Error::OverBudget { account: Some(of), budget, .. } if of.contains("kv") && *budget == 8 * MIB),
        "{refused}"
    );
    assert_eq!((buffer.committed(), bench.device.stats().physical_bytes, bench.host.leftovers()), before);
    assert_eq!((buffer.stats().refused, buffer.audit()), (1, Ok(())));
    let later = buffer.commit_async(0..16 * MIB).unwrap();
    assert!(later.wait().unwrap_err().is_out_of_memory());
    buffer.account().set_limits(Limits { most: None, least: 0 });
    assert_eq!(buffer.commit(0..16 * MIB).unwrap().pages, 6);
    buffer.account().set_limits(Limits { most: Some(MIB), least: 0 });
    assert_eq!(buffer.commit(0..16 * MIB).unwrap().pages, 0);
    drop((buffer, later));
    bench.end();
}

#[test]
fn a_thread_of_the_library_commits_ahead_and_the_order_of_calls_is_kept() {
    on_both(|device, stamps| {
        let buffer = device.elastic_buffer(512 * MIB, &pages_of(2 * MIB)).unwrap();
        let pending: Vec<_> =
            (0..8).map(|part| buffer.commit_async(part * 16 * MIB..(part + 2) * 16 * MIB).unwrap()).collect();
        let here = buffer.commit(16 * MIB..48 * MIB).unwrap();
        let all: u64 = pending.iter().map(|pending| pending.wait().unwrap().pages).sum();
        assert_eq!(all + here.pages, 72);
        let late = buffer.commit_async(400 * MIB..500 * MIB).unwrap();
        assert_eq!(buffer.decommit(400 * MIB..500 * MIB, &now()), Ok(100 * MIB));
        assert!(late.wait().is_ok());
        assert_eq!(buffer.decommit(0..32 * MIB, &now()), Ok(32 * MIB));
        assert!(pending.iter().all(vmmgraph::Pending::done));
        assert_eq!(buffer.committed(), [32 * MIB..144 * MIB]);
        write(stamps, buffer.base().plus(32 * MIB), 112 * MIB, 4);
        assert!(holds(stamps, buffer.base().plus(32 * MIB), 112 * MIB, 4));
        assert_eq!(buffer.audit(), Ok(()));
        let last = buffer.commit_async(200 * MIB..300 * MIB).unwrap();
        drop(buffer);
        assert_eq!(last.wait().unwrap().pages, 50);
    });
}

#[test]
fn threads_commit_and_decommit_at_once() {
    let bench = bench();
    let buffer = bench.buffer(64 * MIB);
    thread::scope(|scope| {
        for number in 0..3_u64 {
            let buffer = &buffer;
            scope.spawn(move || {
                // Own parts, and shared pages between the parts.
                let own = number * 16 * MIB..number * 16 * MIB + 10 * MIB;
                let stamps = Stamps::new(buffer.device().driver(), A);
                for round in 0..40 {
                    buffer.commit(own.clone()).unwrap();
                    write(&stamps, buffer.base().plus(own.start), 10 * MIB, round);
                    let ahead = buffer.commit_async(48 * MIB..64 * MIB).unwrap();
                    buffer.decommit(48 * MIB..50 * MIB, &now()).unwrap();
                    ahead.wait().unwrap();
                    assert!(holds(&stamps, buffer.base().plus(own.start), 10 * MIB, round));
                    buffer.decommit(own.clone(), &now()).unwrap();
                }
            });
        }
    });
    assert!(buffer.committed().iter().all(|range| range.start >= 48 * MIB));
    assert_eq!(buffer.audit(), Ok(()));
    drop(buffer);
    bench.end();
}

type Seen = (bool, Vec<(Address, u64)>);

#[derive(Default)]
struct Witness {
    seen: Mutex<Vec<Seen>>,
    buffer: Mutex<Option<Arc<ElasticBuffer>>>,
}

impl Witness {
    fn note(&self, shown: &Shown<'_>, gone: bool) {
        assert_eq!(shown.name, "kv");
        self.seen.lock().unwrap().push((gone, shown.ranges.to_vec()));
        let Some(buffer) = &*self.buffer.lock().unwrap() else { return };
        assert_eq!(buffer.stats().id, shown.buffer);
        let (at, bytes) = shown.ranges[0];
        let range = at.0 - buffer.base().0..at.0 - buffer.base().0 + bytes;
        // This thread holds the range: an error, not a deadlock.
        assert!(matches!(buffer.commit(range.clone()), Err(Error::WrongState { .. })));
        assert!(matches!(buffer.decommit(range, &Fence::default()), Err(Error::WrongState { .. })));
        buffer.reap();
        if !gone {
            // SAFETY: mapped memory of the host driver, as reported.
            unsafe { (at.0 as *mut u64).write_volatile(1) };
        }
    }
}

impl ElasticObserver for Witness {
    fn after_map(&self, shown: &Shown<'_>) {
        self.note(shown, false);
    }
    fn before_unmap(&self, shown: &Shown<'_>) {
        self.note(shown, true);
    }
}

#[test]
fn observers_see_memory_come_and_go_without_locks() {
    let bench = bench();
    let buffer = Arc::new(bench.buffer(64 * MIB));
    let witness = Arc::new(Witness { buffer: Mutex::new(Some(buffer.clone())), ..Witness::default() });
    let observer: Arc<dyn ElasticObserver> = witness.clone();
    buffer.observe(&observer);
    buffer.commit(2 * MIB..6 * MIB).unwrap();
    buffer.commit(0..8 * MIB).unwrap();
    buffer.decommit(4 * MIB..8 * MIB, &now()).unwrap();
    let at = |offset| buffer.base().plus(offset * MIB);
    let expected = [
        (false, vec![(at(2), 4 * MIB)]),
        (false, vec![(at(0), 2 * MIB), (at(6), 2 * MIB)]),
        (true, vec![(at(4), 4 * MIB)]),
    ];
    assert_eq!(*witness.seen.lock().unwrap(), expected);
    *witness.buffer.lock().unwrap() = None;
    let base = buffer.base();
    drop(buffer);
    assert_eq!(witness.seen.lock().unwrap().last(), Some(&(true, vec![(base, 4 * MIB)])));
    bench.end();
}

#[test]
fn what_is_wrong_is_an_error_with_its_numbers() {
    let bench = bench();
    let device = &bench.device;
    assert!(matches!(device.elastic_buffer(0, &pages_of(0)), Err(Error::InvalidSize { bytes: 0, .. })));
    assert!(matches!(device.elastic_buffer(1 << 47, &pages_of(0)), Err(Error::InvalidSize { .. })));
    assert!(matches!(device.elastic_buffer(MIB, &pages_of(MIB)), Err(Error::InvalidPageSize { .. })));
    let buffer = device.elastic_buffer(9 * MIB, &pages_of(0)).unwrap();
    assert_eq!(buffer.page_bytes(), 2 * MIB);
    assert_eq!(device.elastic_buffer(16 << 30, &pages_of(0)).unwrap().page_bytes(), 16 * MIB);
    #[allow(clippy::reversed_empty_ranges, reason = "it is what is to be refused")]
    for wrong in [0..9 * MIB + 1, 5..3, u64::MAX - 1..u64::MAX] {
        assert!(matches!(buffer.commit(wrong.clone()), Err(Error::InvalidArgument { .. })));
        assert!(matches!(buffer.commit_async(wrong.clone()), Err(Error::InvalidArgument { .. })));
        assert!(matches!(buffer.decommit(wrong, &now()), Err(Error::InvalidArgument { .. })));
    }
    assert_eq!(buffer.commit(3..3).unwrap().pages, 0);
    assert_eq!(buffer.decommit(3..3, &now()), Ok(0));
    drop(buffer);
    bench.end();
}

fn cache(device: &Arc<Device>, layout: KvLayout, planes: &[u64], blocks_most: u64) -> Arc<KvCache> {
    device.kv_cache(&KvOptions { planes, blocks_most, layout, memory: pages_of(2 * MIB) }).unwrap()
}

#[test]
fn a_cache_grows_and_shrinks_in_all_planes_and_its_contents_stay_where_they_are() {
    on_both(|device, stamps| {
        let planes = [64 << 10, 96 << 10, 3 * MIB];
        for layout in [KvLayout::ByPlane, KvLayout::ByBlock] {
            let cache = cache(device, layout, &planes, 200);
            let places = |block: u64| (0..3).map(move |plane| (plane, block));
            let write = |block: u64, stamp: u32| {
                for (plane, block) in places(block) {
                    let at = cache.address(plane, block).unwrap();
                    stamps.write(at, cache.block_bytes(plane).unwrap(), stamp + plane as u32).unwrap();
                }
            };
            let holds = |block: u64, stamp: u32| {
                places(block).all(|(plane, block)| {
                    let at = cache.address(plane, block).unwrap();
                    stamps.holds(at, cache.block_bytes(plane).unwrap(), stamp + plane as u32).unwrap()
                })
            };
            cache.grow_to(40).unwrap();
            (0..40).for_each(|block| write(block, block as u32 * 8));
            let pending = cache.grow_async(90).unwrap();
            pending.wait().unwrap();
            assert_eq!((cache.stats().blocks, cache.stats().backed_blocks), (90, 90));
            (40..90).for_each(|block| write(block, block as u32 * 8));
            assert!((0..90).all(|block| holds(block, block as u32 * 8)));
            assert_eq!(cache.audit(), Ok(()));
            assert_eq!(cache.shrink_to(50, &[60..61, 88..89], &now()), Ok(2));
            assert_eq!((cache.beyond(), cache.stats().blocks), (vec![60..61, 88..89], 50));
            assert!((0..50).chain([60, 88]).all(|block| holds(block, block as u32 * 8)));
            assert_eq!(cache.audit(), Ok(()));
            cache.release(60..200, &now()).unwrap();
            assert_eq!((cache.backed(), cache.beyond()), (vec![0..50], vec![]));
            cache.release(3..30, &now()).unwrap();
            assert_eq!((cache.backed(), cache.audit()), (vec![0..3, 30..50], Ok(())));
            assert!((0..3).chain(30..50).all(|block| holds(block, block as u32 * 8)));
            assert_eq!(cache.commit(10..12).unwrap().created, 0);
            write(11, 5);
            assert!(holds(11, 5) && holds(30, 240));
            cache.release(0..200, &now()).unwrap();
            let stats = cache.stats();
            assert_eq!(
                (stats.memory.committed_bytes, stats.memory.pending_unmap_bytes, stats.backed_blocks),
                (0, 0, 0)
            );
        }
    });
}

#[test]
fn addresses_of_planes_and_blocks_are_computable() {
    let bench = bench();
    let by_plane = cache(&bench.device, KvLayout::ByPlane, &[512, 1536], 1000);
    let by_block = cache(&bench.device, KvLayout::ByBlock, &[512, 1536], 1000);
    for (cache, strides) in [(&by_plane, [512, 1536]), (&by_block, [2048, 2048])] {
        for (plane, stride) in strides.into_iter().enumerate() {
            let base = cache.address(plane, 0).unwrap();
            assert_eq!(cache.stride(plane), Some(stride));
            assert_eq!(cache.address(plane, 999), Some(base.plus(999 * stride)));
        }
        assert_eq!((cache.address(0, 1000), cache.address(2, 0), cache.stride(2)), (None, None, None));
    }
    assert_eq!(by_block.address(1, 5), Some(by_block.address(0, 5).unwrap().plus(512)));
    assert_eq!((by_plane.blocks_a_page(), by_block.blocks_a_page()), (1000, 1000));
    drop((by_plane, by_block));
    bench.end();
}

#[test]
fn all_planes_grow_or_none_and_a_limit_from_outside_holds() {
    let bench = bench();
    let cache = cache(&bench.device, KvLayout::ByPlane, &[MIB, 2 * MIB, MIB], 100);
    cache.grow_to(4).unwrap();
    cache.account().set_limits(Limits { most: Some(24 * MIB), least: 0 });
    assert!(matches!(cache.grow_to(8), Err(Error::OverBudget { .. })));
    assert_eq!(
        (cache.stats().blocks, cache.stats().memory.committed_bytes, cache.audit()),
        (4, 16 * MIB, Ok(()))
    );
    cache.account().set_limits(Limits { most: None, least: 0 });
    assert_eq!(cache.grow_to(8).unwrap().pages, 8);

    assert_eq!(cache.set_limit(50, 7), LimitChange::Applied);
    assert_eq!(cache.set_limit(2, 6), LimitChange::Stale);
    assert_eq!(cache.set_limit(49, 7), LimitChange::Conflict);
    assert_eq!((cache.set_limit(50, 7), cache.stats().limit_blocks), (LimitChange::Applied, 50));
    let refused = cache.grow_to(51).unwrap_err();
    assert!(
        matches!(refused, Error::OverBudget { requested, budget, .. } if (requested, budget) == (4 * MIB, 200 * MIB))
    );
    assert!(refused.is_out_of_memory());
    assert_eq!((cache.set_limit(6, 8), cache.beyond()), (LimitChange::Deferred, vec![6..8]));
    assert_eq!((cache.stats().blocks, cache.stats().beyond_blocks), (6, 2));
    cache.release(6..8, &now()).unwrap();
    assert_eq!((cache.set_limit(6, 9), cache.beyond()), (LimitChange::Applied, vec![]));
    assert_eq!((cache.set_limit(1000, 10), cache.stats().limit_blocks), (LimitChange::Applied, 100));
    assert_eq!(cache.stats().revision, Some(10));
    assert!(cache.grow_to(101).is_err() && cache.shrink_to(101, &[], &now()).is_err());
    drop(cache);
    bench.end();
}

#[test]
fn a_page_waits_for_all_blocks_that_were_on_it() {
    let bench = bench();
    let cache = cache(&bench.device, KvLayout::ByPlane, &[MIB], 10);
    cache.grow_to(4).unwrap();
    bench.faulty.set_busy(true);
    cache.release(0..1, &bench.fence()).unwrap();
    assert_eq!(cache.stats().memory.pending_unmap_bytes, 0);
    cache.release(1..2, &now()).unwrap();
    assert_eq!(
        (cache.reap(), cache.stats().memory.pending_unmap_bytes, cache.backed()),
        (0, 2 * MIB, vec![2..4])
    );
    bench.faulty.set_busy(false);
    assert_eq!((cache.reap(), cache.audit()), (2 * MIB, Ok(())));
    drop(cache);
    bench.end();
}

/// Staggered lifetimes in a block pool: after a burst, committed memory nears the lower bound
/// without evictions.
#[test]
fn after_a_burst_little_more_is_held_than_the_live_blocks_need() {
    let bench = bench();
    let planes = [64 << 10, 64 << 10];
    let cache = cache(&bench.device, KvLayout::ByPlane, &planes, 2048);
    let mut pool = BlockPool::new(2048, cache.blocks_a_page(), cache.stats().block_bytes).unwrap();
    let (mut live, mut seed): (Vec<(u64, Vec<u64>)>, u64) = (Vec::new(), 5);
    let give_back = |pool: &mut BlockPool, keep: u64| {
        for blocks in pool.surplus(keep) {
            cache.release(blocks.clone(), &now()).unwrap();
            pool.unback(&blocks);
        }
    };
    for step in 0..3000_u64 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let wanted = 1 + (seed >> 33) % 16;
        if step < 1500 || step % 3 == 0 {
            for blocks in pool.shortfall(wanted).unwrap_or_default() {
                cache.commit(blocks.clone()).unwrap();
                pool.back(&blocks);
            }
            live.extend(pool.allocate(wanted).map(|blocks| (step + 10 + (seed >> 40) % 150, blocks)));
        }
        for (_, blocks) in live.extract_if(.., |(end, _)| *end <= step) {
            pool.free(&blocks).unwrap();
        }
        if step % 20 == 0 {
            give_back(&mut pool, 0);
        }
    }
    give_back(&mut pool, 0);
    let held = cache.stats().memory.committed_bytes;
    let a_page = cache.blocks_a_page();
    let floor = pool.in_use().div_ceil(a_page) * 2 * (2 * MIB);
    let peak = cache.stats().memory.peak_committed_bytes;
    assert!(pool.in_use() > a_page, "{} blocks", pool.in_use());
    assert!(held <= floor * 13 / 10 && peak > 2 * held, "{held} held, floor {floor}, peak {peak}");
    assert_eq!(cache.audit(), Ok(()));
    let ask = pool.ask(2 * 2 * MIB, 0, |_| true);
    let freed: Vec<u64> = ask.pages.iter().flat_map(|page| page.blocks.clone()).collect();
    assert_eq!(pool.free(&freed).unwrap(), ask.pages.iter().map(|page| page.page).collect::<Vec<_>>());
    give_back(&mut pool, 0);
    assert_eq!(cache.stats().memory.committed_bytes, held - 2 * 2 * MIB);
    drop(cache);
    bench.end();
}

#[derive(Clone, Debug)]
enum Step {
    Commit(Range<u64>),
    Ahead(Range<u64>),
    Decommit(Range<u64>, bool),
    Busy(bool),
    Reap,
}

fn steps(most: u64) -> impl Strategy<Value = Vec<Step>> {
    let range = move || (0..most, 0..most).prop_map(|(a, b)| a.min(b)..a.max(b));
    let step = prop_oneof![
        4 => range().prop_map(Step::Commit),
        2 => range().prop_map(Step::Ahead),
        4 => (range(), any::<bool>()).prop_map(|(range, fence)| Step::Decommit(range, fence)),
        1 => any::<bool>().prop_map(Step::Busy),
        1 => Just(Step::Reap),
    ];
    prop::collection::vec(step, 1..10)
}

/// Runs steps on a buffer of 16 pages and on a set of pages; driver call `fail` fails.
fn run_buffer(steps: &[Step], fail: u64) -> Result<u64> {
    const UNIT: u64 = MIB / 2;
    let bench = bench();
    let buffer = bench.buffer(32 * MIB);
    let mut twin: BTreeSet<u64> = BTreeSet::new();
    bench.faulty.arm(&[fail]);
    for step in steps {
        match step {
            Step::Commit(range) | Step::Ahead(range) => {
                let bytes = range.start * UNIT..range.end * UNIT;
                let result = match step {
                    Step::Commit(_) => buffer.commit(bytes),
                    _ => buffer.commit_async(bytes).and_then(|pending| pending.wait()),
                };
                match result {
                    Ok(_) if range.is_empty() => {}
                    Ok(_) => twin.extend(range.start / 4..range.end.div_ceil(4)),
                    Err(error) => assert!(fail > 0, "{error}"),
                }
            }
            Step::Decommit(range, fence) => {
                let fence = if *fence { bench.fence() } else { now() };
                let gone = buffer.decommit(range.start * UNIT..range.end * UNIT, &fence)?;
                let pages: Vec<u64> =
                    (range.start.div_ceil(4)..range.end / 4).filter(|page| twin.remove(page)).collect();
                assert_eq!(gone, pages.len() as u64 * 2 * MIB);
            }
            Step::Busy(busy) => bench.faulty.set_busy(*busy),
            Step::Reap => _ = buffer.reap(),
        }
        let there: BTreeSet<u64> = buffer
            .committed()
            .into_iter()
            .flat_map(|range| range.start / (2 * MIB)..range.end / (2 * MIB))
            .collect();
        assert_eq!(there, twin);
        buffer.audit()?;
        bench.device.pool().audit_idle()?;
        for page in &twin {
            // SAFETY: a committed page of the host driver.
            unsafe { ((buffer.base().0 + page * 2 * MIB) as *mut u64).write_volatile(*page) };
        }
    }
    let calls = bench.faulty.calls();
    bench.faulty.arm(&[]);
    bench.faulty.set_busy(false);
    drop(buffer);
    bench.end();
    Ok(calls)
}

/// The same for a cache of 24 blocks in three planes; some sizes do not divide a page.
fn run_cache(steps: &[Step], layout: KvLayout, fail: u64) -> Result<u64> {
    let bench = bench();
    let cache = cache(&bench.device, layout, &[600 << 10, 2 * MIB, 3 * MIB], 24);
    let mut twin: BTreeSet<u64> = BTreeSet::new();
    bench.faulty.arm(&[fail]);
    for step in steps {
        match step {
            Step::Commit(range) | Step::Ahead(range) => {
                let result = match step {
                    Step::Commit(_) => cache.commit(range.clone()),
                    _ => cache.commit_async(range.clone()).and_then(|pending| pending.wait()),
                };
                match result {
                    Ok(_) => twin.extend(range.clone()),
                    Err(error) => assert!(fail > 0, "{error}"),
                }
            }
            Step::Decommit(range, true) => {
                cache.release(range.clone(), &bench.fence())?;
                twin.retain(|block| !range.contains(block));
            }
            Step::Decommit(range, false) => {
                let left = cache.shrink_to(range.start, &[range.end..24], &now())?;
                twin.retain(|block| !range.contains(block));
                assert_eq!(left, twin.range(range.start..).count() as u64);
            }
            Step::Busy(busy) => bench.faulty.set_busy(*busy),
            Step::Reap => _ = cache.reap(),
        }
        let there: BTreeSet<u64> = cache.backed().into_iter().flatten().collect();
        assert_eq!(there, twin);
        cache.audit()?;
        bench.device.pool().audit_idle()?;
        for (plane, block) in twin.iter().flat_map(|block| (0..3).map(move |plane| (plane, *block))) {
            let (at, bytes) = (cache.address(plane, block).unwrap(), cache.block_bytes(plane).unwrap());
            // SAFETY: a backed block of the host driver with at least eight bytes.
            unsafe { ((at.0 + bytes - 8) as *mut u64).write_volatile(block) };
        }
    }
    let calls = bench.faulty.calls();
    bench.faulty.arm(&[]);
    bench.faulty.set_busy(false);
    drop(cache);
    bench.end();
    Ok(calls)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn a_buffer_does_what_a_set_of_pages_does_whatever_call_fails(steps in steps(65)) {
        let calls = run_buffer(&steps, 0).unwrap();
        for fail in 1..=calls {
            run_buffer(&steps, fail).unwrap();
        }
    }

    #[test]
    fn a_cache_does_what_a_set_of_blocks_does_whatever_call_fails(steps in steps(25), by_block: bool) {
        let layout = if by_block { KvLayout::ByBlock } else { KvLayout::ByPlane };
        let calls = run_cache(&steps, layout, 0).unwrap();
        for fail in 1..=calls {
            run_cache(&steps, layout, fail).unwrap();
        }
    }
}

/// Pages that are about to be unmapped are not there for a commit that is asked for meanwhile.
#[test]
fn a_commit_ahead_of_pages_that_are_being_unmapped_maps_them_again() {
    let bench = bench();
    let buffer = Arc::new(bench.buffer(4 * MIB));
    buffer.commit(0..4 * MIB).unwrap();
    let (there, asked) = (Arc::downgrade(&buffer), Arc::new(Mutex::new(None)));
    let asking = Arc::clone(&asked);
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        let mut asked = asking.lock().unwrap();
        if let ("unmap", None, Some(buffer)) = (call, &*asked, there.upgrade()) {
            *asked = Some(buffer.commit_async(0..2 * MIB).unwrap());
        }
    })));
    buffer.decommit(0..4 * MIB, &now()).unwrap();
    bench.faulty.set_hook(None);
    asked.lock().unwrap().take().unwrap().wait().unwrap();
    assert_eq!((buffer.committed(), buffer.audit()), (vec![0..2 * MIB], Ok(())));
    drop(buffer);
    bench.end();
}

/// Pages whose user is not done are the last thing that a budget has: who needs them waits for that
/// user.
#[test]
fn a_commit_waits_for_pages_that_another_buffer_gives_back() {
    let bench = bench();
    let (buffer, other) = (bench.buffer(4 * MIB), bench.buffer(4 * MIB));
    buffer.commit(0..4 * MIB).unwrap();
    bench.device.set_budget(Some(4 * MIB));
    bench.faulty.set_busy(true);
    buffer.decommit(0..4 * MIB, &bench.fence()).unwrap();
    thread::scope(|scope| {
        let commit = scope.spawn(|| other.commit(0..4 * MIB));
        thread::sleep(Duration::from_millis(30));
        bench.faulty.set_busy(false);
        commit.join().unwrap().unwrap();
    });
    assert_eq!((buffer.stats().pending_unmap_bytes, other.stats().committed_bytes), (0, 4 * MIB));
    drop((buffer, other));
    bench.end();
}

#[test]
fn pages_stay_while_the_driver_cannot_say_whether_their_user_is_done() {
    let bench = bench();
    let buffer = bench.buffer(4 * MIB);
    buffer.commit(0..4 * MIB).unwrap();
    bench.faulty.set_busy(true);
    bench.faulty.refuse("event_query", true);
    let unmaps = bench.faulty.count("unmap");
    buffer.decommit(0..4 * MIB, &bench.fence()).unwrap();
    assert_eq!((buffer.reap(), bench.faulty.count("unmap")), (0, unmaps));
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    assert_eq!(buffer.reap(), 4 * MIB);
    drop(buffer);
    bench.end();
}

/// What it does when pages come.
struct OnMap(Box<dyn Fn() + Send + Sync>);

impl ElasticObserver for OnMap {
    fn after_map(&self, _: &Shown<'_>) {
        (self.0)();
    }
    fn before_unmap(&self, _: &Shown<'_>) {}
}

#[test]
fn a_commit_ahead_whose_observer_panics_ends_with_an_error() {
    let bench = bench();
    let buffer = bench.buffer(4 * MIB);
    let observer: Arc<dyn ElasticObserver> = Arc::new(OnMap(Box::new(|| panic!("an observer's own bug"))));
    buffer.observe(&observer);
    let ended = buffer.commit_async(0..2 * MIB).unwrap().wait();
    assert!(matches!(ended, Err(Error::Internal { .. })), "{ended:?}");
    drop(observer);
    // The thread goes on.
    buffer.commit_async(2 * MIB..4 * MIB).unwrap().wait().unwrap();
    drop(buffer);
    bench.end();
}

#[test]
fn an_observer_may_not_wait_for_the_commit_that_it_is_told_of() {
    let bench = bench();
    let buffer = bench.buffer(4 * MIB);
    let (pending, waited) = (Arc::new(Mutex::new(None::<Pending>)), Arc::new(AtomicU64::new(0)));
    let (known, refused) = (Arc::clone(&pending), Arc::clone(&waited));
    let observer: Arc<dyn ElasticObserver> = Arc::new(OnMap(Box::new(move || {
        // Until the caller has it.
        let pending = loop {
            if let Some(pending) = known.lock().unwrap().clone() {
                break pending;
            }
            thread::yield_now();
        };
        assert!(matches!(pending.wait(), Err(Error::WrongState { .. })));
        refused.fetch_add(1, Ordering::SeqCst);
    })));
    buffer.observe(&observer);
    let asked = buffer.commit_async(0..2 * MIB).unwrap();
    *pending.lock().unwrap() = Some(asked.clone());
    asked.wait().unwrap();
    assert_eq!(waited.load(Ordering::SeqCst), 1);
    drop((buffer, observer));
    bench.end();
}

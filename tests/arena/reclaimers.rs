//! Reclaimers that free exactly the requested bytes: operations over several pages must request all
//! missing bytes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use vmmgraph::driver::{HostDriver, Memory};
use vmmgraph::pages::{AccountId, Fence, Limits, Reclaimer};
use vmmgraph::{
    Device, ElasticBuffer, ElasticOptions, Error, HostOptions, Options, Policy, Region, RegionOptions,
    Result, RingOptions, RingUnit, SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::{FaultyDriver, MIB};

const STREAM: Stream = Stream::LEGACY;

/// A cache that shrinks by the requested bytes; the device's budget grows as much.
struct Exact {
    device: Weak<Device>,
    asked: Mutex<Vec<u64>>,
    left: AtomicU64,
}

impl Reclaimer for Exact {
    fn reclaim(&self, bytes: u64) -> u64 {
        let Some(device) = self.device.upgrade() else { return 0 };
        self.asked.lock().unwrap().push(bytes);
        let give = bytes.min(self.left.load(Ordering::SeqCst));
        self.left.fetch_sub(give, Ordering::SeqCst);
        let budget = device.stats().budget_bytes.unwrap_or_default();
        device.set_budget(Some(budget + give));
        give
    }
    fn cost(&self) -> u64 {
        1000
    }
}

/// The initial budget, all available: requests exclude it.
const THERE: u64 = 6 * MIB;

/// Runs an operation that lacks `missing` bytes: once with enough reclaimable, once with a page too
/// few.
fn short_of<T>(what: &str, missing: u64, work: impl Fn(&Arc<Device>) -> Result<T>) {
    for enough in [true, false] {
        let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
        device.set_budget(Some(THERE));
        let left = missing - THERE - if enough { 0 } else { 2 * MIB };
        let exact =
            Arc::new(Exact { device: Arc::downgrade(&device), asked: Mutex::default(), left: left.into() });
        let reclaimer: Arc<dyn Reclaimer> = exact.clone();
        device.add_reclaimer(&reclaimer);
        let result = work(&device);
        let asked = exact.asked.lock().unwrap().clone();
        if enough {
            result.unwrap_or_else(|error| panic!("{what}: {error}, asked for {asked:?}"));
            assert!(asked.len() <= 2, "{what}: asked for {asked:?}");
            assert_eq!(exact.left.load(Ordering::SeqCst), 0, "{what}: asked for {asked:?}");
        } else {
            assert!(matches!(result, Err(Error::OverBudget { .. })), "{what}");
        }
        device.set_budget(None);
        device.trim().unwrap();
        assert_eq!(device.pool().audit_idle(), Ok(()), "{what}");
    }
}

fn short_again(device: &Device) -> Result<()> {
    device.trim()?;
    device.set_budget(Some(THERE));
    Ok(())
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    SharedVmmAllocator::new(device, &Options { large_page_bytes: 2 * MIB, ..Options::default() }).unwrap()
}

#[test]
fn a_block_of_many_pages() {
    short_of("a block", 200 * MIB, |device| arena(device).open_space()?.allocate(200 * MIB, STREAM));
}

#[test]
fn a_block_some_of_whose_pages_are_there() {
    short_of("a block", 200 * MIB, |device| {
        let arena = arena(device);
        let other = arena.open_space()?;
        other.allocate(6 * MIB, STREAM)?;
        arena.open_space()?.allocate(200 * MIB, STREAM)
    });
}

#[test]
fn segments() {
    short_of("a segment", 200 * MIB, |device| arena(device).open_bump_space()?.allocate(200 * MIB, STREAM));
}

#[test]
fn eager_work() {
    short_of("eager work", 200 * MIB, |device| {
        let arena = arena(device);
        let scope = arena.eager_scope(STREAM)?;
        let block = scope.allocate(200 * MIB)?;
        arena.eager_blocks().free(block, &[])?;
        Ok(())
    });
}

#[test]
fn retained_blocks_at_the_seal() {
    // A block on a shared page moves to private pages.
    short_of("a seal", 240 * MIB, |device| {
        let arena = arena(device);
        let spaces = [arena.open_space()?, arena.open_space()?];
        for space in &spaces {
            space.allocate(120 * MIB, STREAM)?;
        }
        spaces[0].seal()?;
        Ok(())
    });
}

#[test]
fn a_block_of_a_region() {
    short_of("a region", 200 * MIB, |device| {
        let options = RegionOptions { page_bytes: 2 * MIB, ..RegionOptions::default() };
        device.region("weights", options)?.allocate(200 * MIB, STREAM)
    });
}

#[test]
fn a_region_that_comes_back() {
    short_of("a resume", 200 * MIB, |device| {
        let options =
            RegionOptions { page_bytes: 2 * MIB, policy: Policy::Discard, ..RegionOptions::default() };
        let region = device.region("kv", options)?;
        device.set_budget(None);
        for _ in 0..4 {
            region.allocate(50 * MIB, STREAM)?;
        }
        region.pause(Fence::default())?;
        short_again(device)?;
        region.resume(Duration::ZERO)
    });
}

#[test]
fn an_arena_that_comes_back() {
    short_of("a resume", 200 * MIB, |device| {
        let arena = arena(device);
        device.set_budget(None);
        let space = arena.open_space()?;
        let block = space.allocate(200 * MIB, STREAM)?;
        space.free(block)?;
        space.seal()?;
        arena.pause(Fence::default())?;
        short_again(device)?;
        arena.resume(Duration::ZERO)
    });
}

#[test]
fn a_ring() {
    short_of("a ring", 200 * MIB, |device| {
        let units = vec![RingUnit { bytes: 50 * MIB, resident: false }; 8];
        let options = RingOptions { slots: 4, page_bytes: 2 * MIB, ..RingOptions::default() };
        device.ring(&units, &options)
    });
}

#[test]
fn an_elastic_buffer() {
    short_of("a buffer", 200 * MIB, |device| {
        let options = ElasticOptions { name: "kv", page_bytes: 2 * MIB, ..ElasticOptions::default() };
        device.elastic_buffer(200 * MIB, &options)?.commit(0..200 * MIB)
    });
}

/// Runs short itself, and resumes and pauses the resuming region.
struct Nested {
    device: Weak<Device>,
    seen: Mutex<Vec<String>>,
}

impl Reclaimer for Nested {
    fn reclaim(&self, _bytes: u64) -> u64 {
        let Some(device) = self.device.upgrade() else { return 0 };
        let short = arena(&device).open_space().and_then(|space| space.allocate(100 * MIB, STREAM));
        let resumed = device.resume(&["kv"], Duration::ZERO);
        let paused = device.pause(&["kv"], Fence::default());
        let mut seen = self.seen.lock().unwrap();
        seen.push(format!(
            "{} {} {}",
            short.is_err_and(|error| error.is_out_of_memory()),
            // The requesting resume holds no lock: this resume is short as well, and the region is
            // paused.
            resumed.is_err_and(|error| error.is_out_of_memory()),
            paused.is_ok_and(|report| report.bytes == 0)
        ));
        0
    }
    fn cost(&self) -> u64 {
        7
    }
}

#[test]
fn whoever_is_asked_may_run_short_and_meet_what_is_coming_back() {
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let nested = Arc::new(Nested { device: Arc::downgrade(&device), seen: Mutex::default() });
    let reclaimer: Arc<dyn Reclaimer> = nested.clone();
    device.add_reclaimer(&reclaimer);
    let options = RegionOptions { page_bytes: 2 * MIB, policy: Policy::Discard, ..RegionOptions::default() };
    let region = device.region("kv", options).unwrap();
    let block = region.allocate(50 * MIB, STREAM).unwrap();
    region.pause(Fence::default()).unwrap();
    device.trim().unwrap();
    device.set_budget(Some(6 * MIB));
    assert!(matches!(region.resume(Duration::ZERO), Err(Error::OverBudget { .. })));
    assert_eq!(*nested.seen.lock().unwrap(), ["true true true"]);
    device.set_budget(None);
    region.resume(Duration::ZERO).unwrap();
    region.free(block).unwrap();
    drop((region, reclaimer));
    device.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
}

struct Cache {
    buffer: ElasticBuffer,
    end: Mutex<u64>,
    asked: Mutex<Vec<u64>>,
}

impl Reclaimer for Cache {
    fn reclaim(&self, bytes: u64) -> u64 {
        self.asked.lock().unwrap().push(bytes);
        let mut end = self.end.lock().unwrap();
        let give = bytes.next_multiple_of(2 * MIB).min(*end);
        self.buffer.decommit(*end - give..*end, &Fence::default()).unwrap();
        *end -= give;
        give
    }
    fn cost(&self) -> u64 {
        7
    }
}

#[test]
fn who_takes_memory_from_the_driver_himself_is_made_room() {
    let options = HostOptions { memory_bytes: 64 * MIB, ..HostOptions::default() };
    let host = Arc::new(HostDriver::new(0, options).unwrap());
    let device = Device::with_driver(host.clone());
    let options = ElasticOptions { name: "kv", page_bytes: 2 * MIB, ..ElasticOptions::default() };
    let buffer = device.elastic_buffer(60 * MIB, &options).unwrap();
    buffer.commit(0..60 * MIB).unwrap();
    let cache = Arc::new(Cache { buffer, end: Mutex::new(60 * MIB), asked: Mutex::default() });
    let reclaimer: Arc<dyn Reclaimer> = cache.clone();
    device.add_reclaimer(&reclaimer);
    let others = |bytes: u64| host.create(bytes);
    let asked = || std::mem::take(&mut *cache.asked.lock().unwrap());

    assert!(others(20 * MIB).is_err());
    assert!(device.make_room(20 * MIB, Duration::from_secs(1)));
    assert_eq!(asked(), [16 * MIB]);
    let taken = others(20 * MIB).unwrap();
    // A zero request, and more than exists.
    assert!(!device.make_room(0, Duration::from_secs(1)));
    assert!(!device.make_room(65 * MIB, Duration::from_secs(1)));
    assert_eq!(asked(), [0; 0]);
    cache.buffer.decommit(40 * MIB..44 * MIB, &Fence::default()).unwrap();
    *cache.end.lock().unwrap() -= 4 * MIB;
    assert!(device.make_room(4 * MIB, Duration::from_secs(1)));
    assert_eq!(asked(), [0; 0]);
    assert!(device.make_room(60 * MIB, Duration::from_secs(1)));
    assert_eq!((asked(), *cache.end.lock().unwrap()), (vec![56 * MIB], 0));
    assert!(others(60 * MIB).is_err());
    assert!(!device.make_room(60 * MIB, Duration::from_secs(1)));
    // SAFETY: created above and unmapped.
    unsafe { host.release(taken) }.unwrap();
}

#[test]
fn somebody_is_asked_also_where_others_memory_comes_and_goes_all_the_time() {
    let faulty = FaultyDriver::new(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let device = Device::with_driver(faulty.clone());
    let exact = Arc::new(Exact {
        device: Arc::downgrade(&device),
        asked: Mutex::default(),
        left: AtomicU64::new(u64::MAX / 2),
    });
    let reclaimer: Arc<dyn Reclaimer> = exact.clone();
    device.add_reclaimer(&reclaimer);
    // Graphs of a second arena; one is dropped at each attempt, after a replay.
    let others = Arc::new(arena(&device));
    let graphs: Vec<_> = (0..40)
        .map(|_| {
            let space = others.open_space().unwrap();
            let block = space.allocate(2 * MIB, STREAM).unwrap();
            space.free(block).unwrap();
            space.seal().unwrap();
            space
        })
        .collect();
    device.set_budget(Some(device.stats().physical_bytes));
    let graphs = Arc::new(Mutex::new(graphs));
    let (driver, going) = (faulty.clone(), graphs.clone());
    faulty.set_hook(Some(Arc::new(move |call: &str| {
        if call == "reserve"
            && let Some(graph) = going.lock().unwrap().pop()
        {
            graph.replay(STREAM, || ()).unwrap();
            // Still running at the drop and at the allocation; done at a wait.
            driver.set_busy_for(2);
        }
    })));
    let one = arena(&device);
    let block = one.open_space().unwrap().allocate(100 * MIB, STREAM);
    faulty.set_hook(None);
    assert!(block.is_ok(), "{block:?}, asked for {:?}", exact.asked.lock().unwrap());
}

/// Reclaims memory of a tenant's account.
struct Tenant(Exact, vmmgraph::pages::Account);

impl Reclaimer for Tenant {
    fn reclaim(&self, bytes: u64) -> u64 {
        self.0.asked.lock().unwrap().push(bytes);
        self.1.set_limits(Limits { most: Some(self.1.stats().most_bytes.unwrap() + bytes), least: 0 });
        bytes
    }
    fn account(&self) -> Option<AccountId> {
        Some(self.1.id())
    }
    fn cost(&self) -> u64 {
        8
    }
}

#[test]
fn only_those_are_asked_whose_memory_counts_where_it_is_short() {
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let exact = |left: u64| Exact {
        device: Arc::downgrade(&device),
        asked: Mutex::default(),
        left: AtomicU64::new(left),
    };
    let account =
        |label: &str| device.account(label, None, Limits { most: Some(20 * MIB), least: 0 }).unwrap();
    let engine = Arc::new(exact(100 * MIB));
    // Labels do not identify accounts: these two are equal.
    let tenants = [account("chat"), account("chat")].map(|account| Arc::new(Tenant(exact(0), account)));
    let mut all: Vec<Arc<dyn Reclaimer>> = vec![engine.clone()];
    all.extend(tenants.iter().map(|tenant| tenant.clone() as Arc<dyn Reclaimer>));
    all.iter().for_each(|reclaimer| device.add_reclaimer(reclaimer));
    let asked = || {
        let [one, two] = &tenants;
        [&*engine, &one.0, &two.0].map(|exact| std::mem::take(&mut *exact.asked.lock().unwrap()))
    };
    let options = Options { large_page_bytes: 2 * MIB, budget_bytes: Some(8 * MIB), ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let space = arena.open_space().unwrap();
    assert!(matches!(space.allocate(10 * MIB, STREAM), Err(Error::OverBudget { .. })));
    assert_eq!(asked(), [Vec::<u64>::new(), vec![], vec![]]);
    let options = Options { large_page_bytes: 2 * MIB, ..Options::default() };
    let below = SharedVmmAllocator::in_account(&device, &options, Some(&tenants[0].1)).unwrap();
    below.open_space().unwrap().allocate(30 * MIB, STREAM).unwrap();
    assert_eq!(asked(), [vec![], vec![10 * MIB], vec![]]);
    let small = RegionOptions { page_bytes: 2 * MIB, ..RegionOptions::default() };
    let region = Region::in_account(&device, "kv", small, Some(&tenants[1].1)).unwrap();
    region.allocate(30 * MIB, STREAM).unwrap();
    assert_eq!(asked(), [vec![], vec![], vec![10 * MIB]]);
    // The arena's limit also decides if the device is equally short, although the error names the
    // device.
    let full = device.region("full", RegionOptions::default()).unwrap();
    full.allocate(16 * MIB, STREAM).unwrap();
    device.set_budget(Some(device.stats().physical_bytes));
    for (budget, somebody_is_asked) in [(MIB, false), (8 * MIB, true)] {
        arena.set_budget(Some(budget));
        let refused = space.allocate(8 * MIB, STREAM).unwrap_err();
        assert!(matches!(refused, Error::OverBudget { account: None, .. }), "{refused}");
        assert_eq!(!asked().concat().is_empty(), somebody_is_asked, "{refused}");
    }
}

/// Gives less than it is asked for.
struct Half(Arc<Exact>);

impl Reclaimer for Half {
    fn reclaim(&self, bytes: u64) -> u64 {
        self.0.reclaim(bytes / 2)
    }
    fn cost(&self) -> u64 {
        500
    }
}

#[test]
fn a_second_reclaimer_is_asked_for_what_the_first_did_not_give() {
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    device.set_budget(Some(0));
    let exact = || {
        let (device, asked, left) = (Arc::downgrade(&device), Mutex::default(), (100 * MIB).into());
        Arc::new(Exact { device, asked, left })
    };
    let (first, second) = (exact(), exact());
    let reclaimers: [Arc<dyn Reclaimer>; 2] = [second.clone(), Arc::new(Half(first.clone()))];
    reclaimers.iter().for_each(|reclaimer| device.add_reclaimer(reclaimer));
    let buffer =
        device.elastic_buffer(40 * MIB, &ElasticOptions { page_bytes: 2 * MIB, ..ElasticOptions::default() });
    let buffer = buffer.unwrap();
    buffer.commit(0..40 * MIB).unwrap();
    let asked = |exact: &Exact| exact.asked.lock().unwrap().clone();
    assert_eq!((asked(&first), asked(&second)), (vec![20 * MIB], vec![20 * MIB]));
}

/// Another thread is giving a page back: until the driver has it, the device has none for anybody.
#[test]
fn memory_that_another_thread_gives_back_just_now_is_waited_for() {
    let host = HostDriver::new(0, HostOptions { memory_bytes: 4 * MIB, ..HostOptions::default() }).unwrap();
    let faulty = FaultyDriver::new(Arc::new(host));
    let device = Device::with_driver(faulty.clone());
    let options = |page_bytes| ElasticOptions { page_bytes, ..ElasticOptions::default() };
    let buffer = device.elastic_buffer(4 * MIB, &options(4 * MIB)).unwrap();
    let other = device.elastic_buffer(4 * MIB, &options(2 * MIB)).unwrap();
    buffer.commit(0..4 * MIB).unwrap();
    buffer.decommit(0..4 * MIB, &Fence::default()).unwrap();
    let asked = faulty.count("create");
    let (waiting, releasing) = (Arc::downgrade(&faulty), std::thread::current().id());
    faulty.set_hook(Some(Arc::new(move |call| {
        // The other thread has been refused once, and a while passes.
        while call == "release"
            && std::thread::current().id() == releasing
            && waiting.upgrade().is_some_and(|faulty| faulty.count("create") == asked)
        {
            std::thread::yield_now();
        }
    })));
    std::thread::scope(|scope| {
        let commit = scope.spawn(|| {
            while faulty.count("release") == 0 && device.stats().free_bytes > 0 {
                std::thread::yield_now();
            }
            other.commit(0..4 * MIB)
        });
        device.trim().unwrap();
        commit.join().unwrap().unwrap();
    });
    faulty.set_hook(None);
}

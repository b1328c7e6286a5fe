//! Exported pages: extents behind addresses, restrictions by pins, no reuse. The importing process
//! is simulated through the driver.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use cudarc::driver::sys;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver, Whole, open};
use vmmgraph::pages::{Extent, Fence, PageId};
use vmmgraph::{
    Address, Borrower, Device, DeviceOptions, DriverChoice, ElasticOptions, Error, ExportedPage, Handles,
    HostOptions, Options, PeerExtent, Peers, RetainPolicy, SharedVmmAllocator, Space, Stream, Vacate,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{Bench, MIB, Stamps, child};

const A: Stream = Stream::LEGACY;
const PAGE: u64 = 16 * MIB;

fn bench_of(options: &Options) -> Bench {
    let host = HostDriver::new(0, HostOptions::default()).unwrap().with_sharing(Handles::Fd);
    Bench::over(host, A, options)
}

fn bench() -> Bench {
    bench_of(&Options::default())
}

trait More {
    fn audit(&self);
    fn graph(&self, bytes: u64) -> (Arc<Space>, Address);
    fn first(space: &Space, block: Address) -> PageId;
    fn peer(&self, exported: &ExportedPage, bytes: u64) -> Peer;
}

impl More for Bench {
    fn audit(&self) {
        assert_eq!(self.arena.audit(), Ok(()));
    }

    fn graph(&self, bytes: u64) -> (Arc<Space>, Address) {
        let space = self.arena.open_space().unwrap();
        let block = space.allocate(bytes, A).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        (space, block)
    }

    fn first(space: &Space, block: Address) -> PageId {
        space.export(block, 512).unwrap()[0].page
    }

    fn peer(&self, exported: &ExportedPage, bytes: u64) -> Peer {
        let driver: SharedDriver = self.host.clone();
        let sharing = driver.sharing().unwrap();
        let page = sharing.import(exported.fd.as_fd(), bytes).unwrap();
        let at = driver.reserve(bytes).unwrap();
        // SAFETY: newly reserved addresses, and a page of this length.
        unsafe { driver.map(at, &[Whole { page, bytes }], Peers::NONE) }.unwrap();
        // SAFETY: released once; the mapping keeps the page.
        unsafe { driver.release(page) }.unwrap();
        Peer { stamps: Stamps::new(&driver, A), driver, at, bytes }
    }
}

struct Peer {
    driver: SharedDriver,
    stamps: Stamps,
    at: Address,
    bytes: u64,
}

impl Peer {
    fn sees(&self, stamp: u32) -> bool {
        self.stamps.holds(self.at, self.bytes, stamp).unwrap()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // SAFETY: the single mapping of this reservation, no longer used.
        unsafe { self.driver.unmap(self.at, self.bytes) }.unwrap();
        // SAFETY: this reservation, without mappings.
        unsafe { self.driver.free_addresses(self.at, self.bytes) }.unwrap();
    }
}

fn is_exported<T: std::fmt::Debug>(result: vmmgraph::Result<T>, page: PageId) {
    assert_eq!(result.map(drop), Err(Error::Exported { pages: vec![page.number()] }));
}

fn wrong_state<T: std::fmt::Debug>(result: vmmgraph::Result<T>, says: &str) {
    match result {
        Err(Error::WrongState { sentence }) => assert!(sentence.contains(says), "{sentence}"),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_range_is_named_by_pages_and_by_nothing_of_the_driver() {
    let bench = bench();
    let space = bench.arena.open_space().unwrap();
    let large = space.allocate(40 * MIB, A).unwrap();
    let small = space.allocate(4096, A).unwrap();
    let kept = space.allocate_kept(4096, A).unwrap();
    bench.faulty.arm(&[]);
    let extents = space.export(large, 40 * MIB).unwrap();
    assert_eq!(bench.faulty.calls(), 0);
    assert_eq!(extents.iter().map(|extent| extent.bytes).sum::<u64>(), 40 * MIB);
    let mut next = large;
    for extent in &extents {
        assert_eq!(extent.address, next);
        assert!(extent.offset + extent.bytes <= PAGE);
        next = next.plus(extent.bytes);
    }
    let pages: HashSet<PageId> = extents.iter().map(|extent| extent.page).collect();
    assert_eq!(pages.len(), 3);
    assert!(extents.iter().all(|extent| extent.page_bytes == PAGE));
    let part = space.export(large.plus(PAGE - 512), 1024).unwrap();
    let seam = |page: usize, offset, address: Address| {
        let page = extents[page].page;
        Extent { page, offset, bytes: 512, address, page_bytes: PAGE }
    };
    assert_eq!(part, [seam(0, PAGE - 512, large.plus(PAGE - 512)), seam(1, 0, large.plus(PAGE))]);
    for block in [small, kept] {
        let found = space.export(block, 4096).unwrap();
        assert_eq!((found.len(), found[0].bytes, found[0].address), (1, 4096, block));
        assert!(!pages.contains(&found[0].page));
    }
    for page in &pages {
        assert_eq!(PageId::of_number(page.number()), *page);
    }

    assert_eq!(space.export(Address(64), 512), Err(Error::ForeignPointer { address: Address(64) }));
    let other = bench.arena.open_space().unwrap();
    assert_eq!(other.export(large, 512), Err(Error::ForeignPointer { address: large }));
    assert_eq!(other.export(kept, 512), Err(Error::ForeignPointer { address: kept }));
    for bytes in [0, PAGE * 64, u64::MAX] {
        assert!(matches!(space.export(large, bytes), Err(Error::InvalidArgument { .. })), "{bytes}");
    }
    space.free(large).unwrap();
    let again = other.allocate(40 * MIB, A).unwrap();
    let shown: HashSet<PageId> =
        other.export(again, 40 * MIB).unwrap().iter().map(|extent| extent.page).collect();
    assert_eq!(shown, pages);
    drop((space, other));
    bench.end();
}

#[test]
fn an_exported_page_outlives_its_graph_and_is_nobody_elses() {
    let bench = bench_of(&Options { budget_bytes: Some(2 * PAGE), ..Options::default() });
    let (space, block) = bench.graph(PAGE);
    let page = Bench::first(&space, block);
    let exported = bench.device.export_page(page).unwrap();
    assert_eq!(exported.pin.page(), page);
    let peer = bench.peer(&exported, PAGE);
    space.replay(A, || bench.stamps.write(block, PAGE, 0x1111)).unwrap().unwrap();
    assert!(peer.sees(0x1111));
    assert_eq!(bench.device.stats().exported_bytes, PAGE);

    drop(space);
    assert_eq!(bench.arena.trim(), Ok(0));
    assert_eq!(bench.device.trim(), Ok(0));
    assert_eq!(bench.arena.mapped_size(), PAGE);
    assert_eq!(bench.device.pool().audit_idle(), Ok(()));
    assert!(bench.arena.snapshot().to_json().contains("\"exported\""));
    let others = SharedVmmAllocator::new(&bench.device, &Options::default()).unwrap();
    let second = bench.graph(PAGE);
    let third = others.open_space().unwrap();
    let theirs = third.allocate(2 * PAGE, A).unwrap();
    bench.stamps.write(second.1, PAGE, 0x2222).unwrap();
    bench.stamps.write(theirs, 2 * PAGE, 0x3333).unwrap();
    assert_ne!(Bench::first(&second.0, second.1), page);
    assert!(peer.sees(0x1111));
    let full = bench.arena.open_space().unwrap();
    assert!(matches!(full.allocate(2 * PAGE, A), Err(Error::OverBudget { .. })));
    drop(full);

    let also = exported.pin.clone();
    drop(exported);
    assert_eq!(bench.arena.mapped_size(), 2 * PAGE);
    drop(also);
    assert_eq!(bench.arena.mapped_size(), PAGE);
    assert_eq!(bench.device.stats().free_bytes, PAGE);
    let gone = bench.device.export_page(page);
    assert!(matches!(gone, Err(Error::InvalidArgument { .. })), "{gone:?}");
    assert_eq!(bench.device.trim(), Ok(PAGE));
    assert!(peer.sees(0x1111));
    drop((peer, second, third, others));
    bench.end();
}

#[test]
fn an_arena_whose_page_others_have_is_not_paused() {
    let bench = bench();
    let (space, block) = bench.graph(2 * PAGE);
    let page = Bench::first(&space, block);
    let pin = bench.device.pin_page(page).unwrap();
    is_exported(bench.arena.pause(Fence::default()), page);
    assert_eq!(bench.arena.mapped_size(), 2 * PAGE);
    space.replay(A, || ()).unwrap();
    drop(pin);
    bench.arena.pause(Fence::default()).unwrap().complete().unwrap();
    assert_eq!(bench.arena.mapped_size(), 0);
    wrong_state(space.export(block, 512), "paused");
    wrong_state(bench.device.pin_page(page), "paused");
    bench.arena.resume(Duration::ZERO).unwrap();
    drop(bench.device.pin_page(page).unwrap());
    bench.audit();
    drop(space);
    bench.end();
}

/// An export during a pause, of a different page or of the one being unmapped: refused or pinned.
#[test]
fn a_page_that_is_exported_while_its_arena_goes_is_refused() {
    let bench = bench();
    let (space, block) = bench.graph(3 * PAGE);
    let page = space.export(block.plus(2 * PAGE), 512).unwrap()[0].page;
    let (device, seen) = (Arc::downgrade(&bench.device), Arc::new(Mutex::new(Vec::new())));
    let told = Arc::clone(&seen);
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        if let ("unmap", Some(device)) = (call, device.upgrade()) {
            told.lock().unwrap().push(device.pin_page(page).map(drop));
        }
    })));
    bench.arena.pause(Fence::default()).unwrap().complete().unwrap();
    bench.faulty.set_hook(None);
    let seen = std::mem::take(&mut *seen.lock().unwrap());
    assert_eq!(seen.len(), 3);
    for refused in seen {
        assert!(matches!(refused, Err(Error::WrongState { .. })), "{refused:?}");
    }
    bench.arena.resume(Duration::ZERO).unwrap();
    assert_eq!(bench.device.pool().audit_idle(), Ok(()));
    drop(space);
    bench.end();
}

#[derive(Debug)]
struct Gives;

impl Borrower for Gives {
    fn vacate(&self, _: &Vacate) -> vmmgraph::Result<Fence> {
        Ok(Fence::default())
    }
}

#[test]
fn what_others_have_is_not_lent_and_what_is_lent_others_do_not_get() {
    let bench = bench();
    let (space, block) = bench.graph(3 * PAGE);
    let pages: Vec<PageId> = (0..3).map(|page| Bench::first(&space, block.plus(page * PAGE))).collect();
    let options = ElasticOptions { name: "kv", page_bytes: PAGE, ..ElasticOptions::default() };
    let buffer = Arc::new(bench.device.elastic_buffer(8 * PAGE, &options).unwrap());
    let borrower: Arc<dyn Borrower> = Arc::new(Gives);
    let pin = bench.device.pin_page(pages[2]).unwrap();
    assert_eq!(bench.arena.lendable_bytes(), 2 * PAGE);
    let too_much = bench.arena.lend(&buffer, 0..3 * PAGE, &borrower);
    assert!(matches!(too_much, Err(Error::InvalidArgument { .. })), "{too_much:?}");
    let lease = bench.arena.lend(&buffer, 0..2 * PAGE, &borrower).unwrap();
    for page in &pages[..2] {
        assert_eq!(bench.device.pin_page(*page).map(drop), Err(Error::Lent { leases: vec![lease.id()] }));
    }
    let peer = bench.peer(&bench.device.export_page(pages[2]).unwrap(), PAGE);
    bench.stamps.write(block.plus(2 * PAGE), PAGE, 0x77).unwrap();
    bench.stamps.write(buffer.base(), 2 * PAGE, 0x88).unwrap();
    assert!(peer.sees(0x77));
    lease.recall(Duration::from_secs(20)).unwrap();
    drop(pin);
    assert_eq!(bench.arena.lendable_bytes(), 3 * PAGE);
    drop((lease, peer, borrower, buffer, space));
    bench.end();
}

#[test]
fn a_seal_exchanges_no_page_that_others_were_told_of() {
    let bench = bench();
    let (sealed, known) = bench.graph(PAGE);
    let page = Bench::first(&sealed, known);
    let pin = bench.device.pin_page(page).unwrap();
    let space = bench.arena.open_space().unwrap();
    let retained = space.allocate(3 * MIB, A).unwrap();
    assert_eq!(space.seal().unwrap().retained_bytes, 4 * MIB);
    assert_eq!(Bench::first(&sealed, known), page);
    assert_ne!(Bench::first(&space, retained), page);
    drop(space);

    let space = bench.arena.open_space().unwrap();
    let (retained, passing) = (space.allocate(3 * MIB, A).unwrap(), space.allocate(MIB, A).unwrap());
    space.free(passing).unwrap();
    assert_eq!(Bench::first(&space, passing), page);
    let maps = space.maps();
    is_exported(space.seal(), page);
    is_exported(space.seal(), page);
    assert_eq!((space.maps(), Bench::first(&space, retained)), (maps, page));
    bench.audit();
    space.seal_with(RetainPolicy::Share).unwrap();
    assert_eq!(Bench::first(&space, retained), page);
    drop((pin, space));

    let space = bench.arena.open_space().unwrap();
    let retained = space.allocate(3 * MIB, A).unwrap();
    assert_eq!(Bench::first(&space, retained), page);
    space.seal().unwrap();
    assert_ne!(Bench::first(&space, retained), page);
    drop((space, sealed));

    let space = bench.arena.open_space().unwrap();
    let whole = space.allocate(PAGE, A).unwrap();
    let page = Bench::first(&space, whole);
    let pin = bench.device.pin_page(page).unwrap();
    assert_eq!(space.seal().unwrap().retained_bytes, PAGE);
    assert_eq!(Bench::first(&space, whole), page);
    drop((pin, space));
    bench.end();
}

#[test]
fn a_retained_page_that_others_have_is_no_other_graphs_when_its_block_is_freed() {
    let bench = bench();
    let space = bench.arena.open_space().unwrap();
    let block = space.allocate(PAGE, A).unwrap();
    space.seal().unwrap();
    let page = Bench::first(&space, block);
    let exported = bench.device.export_page(page).unwrap();
    let peer = bench.peer(&exported, PAGE);
    bench.stamps.write(block, PAGE, 0x55).unwrap();
    space.free(block).unwrap();
    let (other, there) = bench.graph(PAGE);
    assert_ne!(Bench::first(&other, there), page);
    bench.stamps.write(there, PAGE, 0x66).unwrap();
    assert!(peer.sees(0x55));
    drop(exported);
    let made = bench.device.stats().pages_created;
    let third = bench.graph(2 * PAGE);
    assert_eq!(bench.device.stats().pages_created, made);
    bench.audit();
    drop((third, other, space, peer));
    bench.end();
}

#[test]
fn eager_work_leaves_alone_what_others_have() {
    let bench = bench();
    let (space, block) = bench.graph(PAGE);
    let scope = bench.arena.eager_scope(A).unwrap();
    let first = scope.allocate(PAGE).unwrap();
    let page = Bench::first(&space, block);
    // Eager blocks may take the page at the end of the scope, so it cannot be pinned now.
    wrong_state(bench.device.pin_page(page), "an eager scope is active");
    scope.free(first).unwrap();
    drop(scope);

    let exported = bench.device.export_page(page).unwrap();
    let peer = bench.peer(&exported, PAGE);
    space.replay(A, || bench.stamps.write(block, PAGE, 0x10)).unwrap().unwrap();
    let scope = bench.arena.eager_scope(A).unwrap();
    let live = scope.allocate(PAGE).unwrap();
    bench.stamps.write(live, PAGE, 0x20).unwrap();
    assert!(peer.sees(0x10), "eager work writes to what others have");
    drop(scope);
    space.replay(A, || bench.stamps.write(block, PAGE, 0x30)).unwrap().unwrap();
    assert_eq!(Bench::first(&space, block), page, "the graph has another page now");
    assert!(peer.sees(0x30));
    assert!(bench.stamps.holds(live, PAGE, 0x20).unwrap());
    bench.audit();
    bench.arena.eager_blocks().free(live, &[]).unwrap();
    drop((exported, peer, space));
    bench.end();
}

#[test]
fn a_graph_behind_eager_work_says_so() {
    let bench = bench();
    let (space, block) = bench.graph(PAGE);
    let page = Bench::first(&space, block);
    let scope = bench.arena.eager_scope(A).unwrap();
    let live = scope.allocate(PAGE).unwrap();
    drop(scope);
    // The page left with the live block, and is freed with it.
    wrong_state(space.export(block, 512), "eager work has replaced pages");
    let refused = bench.device.pin_page(page);
    assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    space.replay(A, || ()).unwrap();
    assert_ne!(Bench::first(&space, block), page);
    bench.arena.eager_blocks().free(live, &[]).unwrap();
    drop(space);
    bench.end();
}

#[test]
fn what_is_no_page_of_an_arena_is_refused() {
    let bench = bench();
    let (space, block) = bench.graph(PAGE);
    let page = Bench::first(&space, block);
    for number in [0, 1, u64::MAX, page.number() + 1, page.number() ^ (1 << 40)] {
        let refused = bench.device.export_page(PageId::of_number(number)).map(drop);
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{number}: {refused:?}");
    }
    drop(space);
    assert!(bench.device.pin_page(page).is_err());
    bench.end();

    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate(PAGE, A).unwrap();
    assert_eq!(device.sharing(), Handles::None);
    let page = Bench::first(&space, block);
    wrong_state(device.export_page(page).map(drop), "opened without sharing");
    assert_eq!(device.stats().exported_bytes, 0);
}

#[test]
fn an_export_that_the_driver_refuses_pins_nothing() {
    let bench = bench();
    let (space, block) = bench.graph(PAGE);
    let page = Bench::first(&space, block);
    bench.faulty.refuse("export", true);
    let refused = bench.device.export_page(page).map(drop);
    assert!(matches!(refused, Err(Error::Driver { call: "export", .. })), "{refused:?}");
    assert_eq!(bench.device.stats().exported_bytes, 0);
    bench.faulty.refuse("export", false);
    drop(bench.device.export_page(page).unwrap());
    assert_eq!(bench.faulty.count("export"), 2);
    drop(space);
    bench.end();
}

#[test]
fn pins_hold_against_whoever_comes_at_once() {
    let bench = bench();
    let (space, block) = bench.graph(4 * PAGE);
    let pages: Vec<PageId> = (0..4).map(|page| Bench::first(&space, block.plus(page * PAGE))).collect();
    let stop = AtomicBool::new(false);
    std::thread::scope(|threads| {
        for page in &pages {
            threads.spawn(|| {
                while !stop.load(Relaxed) {
                    match bench.device.pin_page(*page) {
                        Ok(pin) => drop(pin.clone()),
                        Err(Error::WrongState { .. }) => {}
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
        for _ in 0..200 {
            match bench.arena.pause(Fence::default()) {
                Ok(_) => drop(bench.arena.resume(Duration::ZERO).unwrap()),
                Err(Error::Exported { pages: exported }) => assert!(!exported.is_empty()),
                Err(other) => panic!("{other}"),
            }
            assert_eq!(bench.device.pool().audit(), Ok(()));
        }
        stop.store(true, Relaxed);
    });
    bench.arena.resume(Duration::ZERO).unwrap();
    space.replay(A, || bench.stamps.write(block, 4 * PAGE, 0x99)).unwrap().unwrap();
    assert!(bench.stamps.holds(block, 4 * PAGE, 0x99).unwrap());
    drop(space);
    bench.end();
}

fn shared(sharing: Handles) -> DeviceOptions {
    DeviceOptions { sharing, ..DeviceOptions::default() }
}

#[test]
fn sharing_is_a_devices_for_good() {
    let with = shared;
    let shared = Device::open(DriverChoice::HOST, 6, with(Handles::Fd)).unwrap();
    assert_eq!(shared.sharing(), Handles::Fd);
    assert!(Arc::ptr_eq(&shared, &Device::open(DriverChoice::HOST, 6, HostOptions::default()).unwrap()));
    let plain = Device::open(DriverChoice::HOST, 7, with(Handles::None)).unwrap();
    let in_use = Error::DeviceInUse { driver: "host", ordinal: 7 };
    assert_eq!(Device::open(DriverChoice::HOST, 7, with(Handles::Fd)).map(drop), Err(in_use));
    drop(plain);
    assert_eq!(Device::open(DriverChoice::HOST, 7, with(Handles::Fd)).unwrap().sharing(), Handles::Fd);
    let cuda = Device::with_driver(open(DriverChoice::CUDA, 0, with(Handles::Fd)).unwrap());
    assert_eq!(cuda.sharing(), Handles::Fd);
    assert_eq!(Device::with_driver(Arc::new(CudaDriver::new(1).unwrap())).sharing(), Handles::None);
}

fn allow_fabric(allowed: bool) {
    // SAFETY: a function of the stand-in.
    let allow = unsafe { sys::culib().get::<unsafe extern "C" fn(bool)>(b"standin_allow_fabric\0") }.unwrap();
    // SAFETY: as above.
    unsafe { allow(allowed) };
}

/// The stand-in reports a fabric, as an H200 does, but permits it in this test only.
#[test]
fn handles_of_the_fabric_are_had_where_a_trial_makes_one() {
    let refused = CudaDriver::with_options(1, shared(Handles::Fabric)).unwrap();
    assert_eq!(Handles::of(&refused), Handles::Fd, "the attribute alone says nothing");
    assert_eq!(
        Handles::of(&HostDriver::new(0, HostOptions::default()).unwrap().with_sharing(Handles::Fabric)),
        Handles::Fd
    );
    let without = Device::with_driver(Arc::new(refused));
    allow_fabric(true);
    let driver: SharedDriver = Arc::new(CudaDriver::with_options(1, shared(Handles::Fabric)).unwrap());
    assert_eq!(Handles::of(&*driver), Handles::Fabric);
    let device = Device::with_driver(Arc::clone(&driver));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate(3 * PAGE, A).unwrap();
    space.seal().unwrap();
    let extents = space.export(block, 3 * PAGE).unwrap();
    let stamps = Stamps::new(&driver, A);
    stamps.write(block, 3 * PAGE, 0x77).unwrap();
    let page = extents[0].page;
    let (handle, pin) = device.export_fabric(page).unwrap();
    assert_eq!(device.stats().exported_bytes, extents[0].page_bytes, "pinned as by a descriptor");
    let both = device.export_page(page).unwrap();
    let theirs = device.import_fabric(&handle, extents[0].page_bytes).unwrap();
    let part = PeerExtent { page: &theirs, offset: extents[0].offset, bytes: extents[0].bytes };
    let range = device.map_peer(&[part]).unwrap();
    assert!(stamps.holds(range.address(), extents[0].bytes, 0x77).unwrap());
    stamps.write(range.address(), extents[0].bytes, 0x78).unwrap();
    assert!(stamps.holds(block, extents[0].bytes, 0x78).unwrap());
    // A device without fabric, and an invalid handle: refused without a pin.
    assert!(matches!(
        without.import_fabric(&handle, PAGE),
        Err(Error::WrongState { sentence }) if sentence.contains("fabric")
    ));
    assert!(matches!(device.import_fabric(&[7; 64], PAGE), Err(Error::Driver { .. })));
    drop((range, theirs, both, pin));
    assert_eq!(device.stats().exported_bytes, 0);
    allow_fabric(false);
}

/// In child processes: the environment decides.
#[test]
fn pages_are_exportable_by_default_where_nccl_takes_no_hold_of_them() {
    const PROMISED: &str = "NCCL_GRAPH_REGISTER";
    const CHILD: &str = "VMMGRAPH_TEST_EXPECTED_SHARING";
    let opened = |choice| Device::open(choice, 4, HostOptions::default()).unwrap().sharing();
    if let Ok(expected) = std::env::var(CHILD) {
        assert_eq!(format!("{:?}", opened(DriverChoice::HOST)), expected);
        let cuda = Device::open(DriverChoice::CUDA, 0, HostOptions::default()).unwrap();
        assert_eq!(format!("{:?}", cuda.sharing()), expected);
        let asked = Device::open(DriverChoice::HOST, 5, shared(Handles::Fd)).unwrap();
        assert_eq!(asked.sharing(), Handles::Fd);
        return;
    }
    for (promise, expected) in [(Some("0"), "Fd"), (Some("1"), "None"), (Some(""), "None"), (None, "None")] {
        let mut child = child!("pages_are_exportable_by_default_where_nccl_takes_no_hold_of_them");
        child.env(CHILD, expected).env_remove(PROMISED);
        child.envs(promise.map(|value| (PROMISED, value)));
        let done = child.output().unwrap();
        assert!(done.status.success(), "{promise:?}: {}", String::from_utf8_lossy(&done.stdout));
    }
}

#[test]
fn network_cards_and_peers_are_said_when_a_device_is_opened() {
    let with = |rdma, peers| DeviceOptions { rdma, peers, ..DeviceOptions::default() };
    let device = Device::open(DriverChoice::CUDA, 1, with(true, Peers::one(0).and(Peers::one(1)))).unwrap();
    assert!(device.rdma());
    assert_eq!(device.peers(), Peers::one(0), "its own counts for nothing");
    // An open with smaller requests accepts the device; peers can be added.
    assert!(Arc::ptr_eq(&device, &Device::open(DriverChoice::CUDA, 1, HostOptions::default()).unwrap()));
    drop(device);
    let plain = Device::open(DriverChoice::CUDA, 1, HostOptions::default()).unwrap();
    assert!(!plain.rdma() && plain.peers().is_empty());
    let in_use = Error::DeviceInUse { driver: "cuda", ordinal: 1 };
    assert_eq!(Device::open(DriverChoice::CUDA, 1, with(true, Peers::NONE)).map(drop), Err(in_use));
    Device::open(DriverChoice::CUDA, 1, with(false, Peers::one(0))).unwrap();
    assert_eq!(plain.peers(), Peers::one(0));
    let nobody = Device::open(DriverChoice::CUDA, 0, with(false, Peers::one(9))).map(drop);
    assert!(matches!(nobody, Err(Error::InvalidArgument { what: "a peer", value: 9, .. })), "{nobody:?}");
    let none = Device::open(DriverChoice::HOST, 3, with(true, Peers::NONE)).map(drop);
    assert!(matches!(none, Err(Error::InvalidArgument { what: "rdma", value: 1, .. })), "{none:?}");
}

#[test]
fn pages_of_a_cuda_device_are_exported_too() {
    let driver: SharedDriver = Arc::new(CudaDriver::with_options(1, shared(Handles::Fd)).unwrap());
    let device = Device::with_driver(Arc::clone(&driver));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate(PAGE, A).unwrap();
    space.seal().unwrap();
    let exported = device.export_page(Bench::first(&space, block)).unwrap();
    let stamps = Stamps::new(&driver, A);
    stamps.write(block, PAGE, 0x1234).unwrap();
    let page = driver.sharing().unwrap().import(exported.fd.as_fd(), PAGE).unwrap();
    let at = driver.reserve(PAGE).unwrap();
    // SAFETY: as for the host peer above.
    unsafe { driver.map(at, &[Whole { page, bytes: PAGE }], Peers::NONE) }.unwrap();
    assert!(stamps.holds(at, PAGE, 0x1234).unwrap());
    // SAFETY: as above.
    unsafe {
        driver.release(page).unwrap();
        driver.unmap(at, PAGE).unwrap();
        driver.free_addresses(at, PAGE).unwrap();
    }
    let plain = CudaDriver::new(0).unwrap();
    let page = vmmgraph::driver::Memory::create(&plain, PAGE).unwrap();
    // SAFETY: a live page of the same library.
    let refused = unsafe { driver.sharing().unwrap().export(page) };
    assert!(matches!(refused, Err(Error::Driver { .. })), "{refused:?}");
    // SAFETY: a live page, released once.
    unsafe { vmmgraph::driver::Memory::release(&plain, page) }.unwrap();
}

#[test]
fn a_kept_block_is_exported_within_its_bytes() {
    let bench = bench();
    let space = bench.arena.open_space().unwrap();
    let kept = space.allocate_kept(4096, A).unwrap();
    assert_eq!(space.export(kept, 4096).unwrap()[0].bytes, 4096);
    assert_eq!(space.export(kept.plus(4095), 1).unwrap()[0].bytes, 1);
    for (at, bytes) in [(kept, 4097), (kept.plus(4096), 1), (kept.plus(512), 4096)] {
        assert_eq!(space.export(at, bytes), Err(Error::ForeignPointer { address: at }));
    }
    drop(space);
    bench.end();
}

#[test]
fn what_is_mapped_of_others_stays_while_its_user_cannot_be_asked() {
    let bench = bench();
    let (space, block) = bench.graph(PAGE);
    let exported = bench.device.export_page(Bench::first(&space, block)).unwrap();
    let theirs = bench.device.import(exported.fd.as_fd(), PAGE).unwrap();
    let range = bench.device.map_peer(&[PeerExtent { page: &theirs, offset: 0, bytes: PAGE }]).unwrap();
    bench.faulty.set_busy(true);
    range.used_by(A);
    bench.faulty.refuse("event_query", true);
    let unmaps = bench.faulty.count("unmap");
    drop(range);
    assert_eq!(bench.faulty.count("unmap"), unmaps, "unmapped under its user");
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    drop((theirs, exported, space));
    bench.end();
}

/// A small graph's addresses serve the next one, but not with a page that others have.
#[test]
fn a_page_that_others_have_is_not_the_next_small_graphs() {
    let bench = bench();
    let small = || {
        let space = bench.arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(true);
        let block = blocks.allocate(MIB, A, false).unwrap();
        blocks.free(block, &[]).unwrap();
        space.seal().unwrap();
        (space, block)
    };
    let (space, block) = small();
    let page = Bench::first(&space, block);
    let pin = bench.device.pin_page(page).unwrap();
    drop(space);
    let (space, again) = small();
    assert_ne!(Bench::first(&space, again), page);
    drop((space, pin));
    // The control: without the pin it is.
    let (space, block) = small();
    let page = Bench::first(&space, block);
    drop(space);
    let (space, again) = small();
    assert_eq!((Bench::first(&space, again), again), (page, block));
    drop(space);
    bench.end();
}

//! Private blocks: whole unshared pages, zeroed at allocation, fixed until freed.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver, Transfer};
use vmmgraph::map::PageClass;
use vmmgraph::pages::{Fence, PageId};
use vmmgraph::pause::{Moved, PauseHooks};
use vmmgraph::{Address, Error, Handles, HostOptions, Options, Stream};
use vmmgraph_testkit::{Bench, MIB, Stamps, stream};

const A: Stream = Stream::LEGACY;
const SMALL: u64 = 2 * MIB;
const LARGE: u64 = 16 * MIB;

fn bench(options: &Options) -> Bench {
    let host = HostDriver::new(0, HostOptions::default()).unwrap().with_sharing(Handles::Fd);
    Bench::over(host, A, options)
}

trait More {
    fn page(&self, block: Address, bytes: u64) -> PageId;
    fn held(&self) -> (u64, u64);
}

impl More for Bench {
    fn page(&self, block: Address, bytes: u64) -> PageId {
        let extents = self.arena.export(block, bytes).unwrap();
        assert_eq!(extents.len(), 1, "one handle, whole");
        let extent = extents[0];
        assert_eq!(
            (extent.offset, extent.bytes, extent.page_bytes, extent.address),
            (0, bytes, bytes, block)
        );
        extent.page
    }

    fn held(&self) -> (u64, u64) {
        let stats = self.arena.stats();
        assert_eq!(
            stats.physical_bytes,
            stats.shared_bytes + stats.retained_bytes + stats.kept_bytes + stats.exclusive_bytes
        );
        (stats.physical_bytes, stats.exclusive_bytes)
    }
}

#[test]
fn an_exclusive_block_is_one_page_of_its_own_that_is_zero_and_that_no_graph_shows() {
    let bench = bench(&Options::default());
    // Free pages hold bytes of their last user.
    let before = bench.arena.open_space().unwrap();
    let dirty = before.allocate(3000, A).unwrap();
    bench.stamps.write(dirty, 3000, 0x77).unwrap();
    drop(before);
    assert_eq!(bench.device.stats().free_bytes, SMALL);

    let small = bench.arena.allocate_exclusive(1, 0).unwrap();
    assert_eq!(bench.device.stats().free_bytes, 0, "the free page is used");
    let large = bench.arena.allocate_exclusive(5 * MIB, 0).unwrap();
    let mut bytes = vec![0xff; SMALL as usize];
    // SAFETY: a live block.
    unsafe { bench.faulty.read(small, &mut bytes) }.unwrap();
    assert!(bytes.iter().all(|byte| *byte == 0), "what somebody left is there");
    let pages = HashSet::from([bench.page(small, SMALL), bench.page(large, 6 * MIB)]);
    assert_eq!(pages.len(), 2);
    assert_eq!(bench.held(), (8 * MIB, 8 * MIB));
    let space = bench.arena.open_space().unwrap();
    let mut shown = HashSet::new();
    for bytes in [1000, MIB, 40 * MIB] {
        let block = space.allocate(bytes, A).unwrap();
        shown.extend(space.export(block, bytes).unwrap().iter().map(|extent| extent.page));
    }
    let kept = space.allocate_kept(1000, A).unwrap();
    shown.extend(space.export(kept, 1000).unwrap().iter().map(|extent| extent.page));
    assert!(shown.is_disjoint(&pages));
    space.seal().unwrap();
    assert_eq!(bench.arena.audit(), Ok(()));
    assert_eq!(space.free(small), Err(Error::ForeignPointer { address: small }));
    assert_eq!(bench.arena.deallocate(small), Err(Error::ForeignPointer { address: small }));
    assert!(space.export(small, 1).is_err() && bench.arena.export(kept, 1).is_err());
    let map = bench.arena.map();
    let exclusive = map.pages.iter().filter(|page| page.class == PageClass::Exclusive);
    assert_eq!(exclusive.map(|page| page.bytes).sum::<u64>(), 8 * MIB);
    assert_eq!(map.held_bytes, bench.held().0);

    bench.arena.trim().unwrap();
    assert_eq!(bench.held().1, 8 * MIB, "a trim takes nothing of them");
    bench.arena.free_exclusive(small).unwrap();
    for gone in [small, large.plus(SMALL), Address(64)] {
        assert_eq!(bench.arena.free_exclusive(gone), Err(Error::ForeignPointer { address: gone }));
    }
    assert_eq!(bench.held().1, 6 * MIB);
    drop(space);
    bench.end();
}

#[test]
fn address_and_bytes_are_multiples_of_the_granularity_and_a_wrong_one_is_refused() {
    let bench = bench(&Options::default());
    // The next range must not be aligned by chance.
    let mut blocks = Vec::new();
    for granularity in [SMALL, 64 * MIB, 8 * MIB, 64 * MIB] {
        let block = bench.arena.allocate_exclusive(granularity / 2 + 1, granularity).unwrap();
        assert!(block.0.is_multiple_of(granularity), "{block:?} for {granularity}");
        assert_eq!(bench.arena.export(block, 1).unwrap()[0].page_bytes, granularity);
        blocks.push(block);
    }
    let held = bench.held();
    for granularity in [1, 4096, MIB, 3 * MIB, u64::MAX, 1 << 63] {
        let refused = bench.arena.allocate_exclusive(SMALL, granularity);
        assert!(matches!(refused, Err(Error::InvalidPageSize { bytes, .. }) if bytes == granularity));
    }
    for bytes in [0, u64::MAX, 1 << 47] {
        let refused = bench.arena.allocate_exclusive(bytes, 0);
        assert!(matches!(refused, Err(Error::InvalidSize { .. })), "{refused:?}");
    }
    let most = bench.arena.allocate_exclusive(1, 1 << 46);
    assert!(matches!(most, Err(Error::InvalidSize { .. })), "{most:?}");
    let hopeless = bench.arena.allocate_exclusive(1 << 45, 0);
    assert!(matches!(hopeless, Err(Error::OutOfMemory { .. })), "{hopeless:?}");
    for (base, bytes) in
        [(blocks[0], 0), (blocks[0], SMALL + 1), (blocks[0].plus(1), SMALL), (blocks[0], u64::MAX)]
    {
        assert!(bench.arena.export(base, bytes).is_err(), "{bytes}");
    }
    assert_eq!(bench.held(), held);
    bench.end();
}

#[test]
fn it_counts_toward_the_budget_and_what_is_free_goes_first() {
    let bench = bench(&Options { budget_bytes: Some(LARGE + SMALL), ..Options::default() });
    let block = bench.arena.allocate_exclusive(LARGE, 0).unwrap();
    let refused = bench.arena.allocate_exclusive(2 * SMALL, 0);
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    let space = bench.arena.open_space().unwrap();
    assert!(matches!(space.allocate(MIB, A), Err(Error::OverBudget { .. })));
    bench.arena.free_exclusive(block).unwrap();
    space.allocate(MIB, A).unwrap();
    drop(space);
    bench.end();
}

#[test]
fn poison_and_other_graphs_leave_it_alone_and_it_outlives_the_arenas_handle() {
    let bench = bench(&Options { poison: true, ..Options::default() });
    let block = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    bench.stamps.write(block, SMALL, 0x1234).unwrap();
    let space = bench.arena.open_space().unwrap();
    let passing = space.allocate(20 * MIB, A).unwrap();
    space.free(passing).unwrap();
    space.seal().unwrap();
    space.replay(A, || bench.stamps.write(passing, 20 * MIB, 7)).unwrap().unwrap();
    assert!(bench.stamps.holds(block, SMALL, 0x1234).unwrap());
    let Bench { host, faulty, device, arena, stamps } = bench;
    drop(arena);
    space.replay(A, || assert!(stamps.holds(block, SMALL, 0x1234).unwrap())).unwrap();
    assert!(device.stats().physical_bytes >= SMALL);
    drop(space);
    device.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
    drop((device, faulty, stamps));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[derive(Debug, Default)]
struct Heard(Mutex<Vec<(Address, u64)>>);

impl PauseHooks for Heard {
    fn before_unmap(&self, moved: &Moved<'_>) {
        self.0.lock().unwrap().extend(moved.ranges);
    }
    fn after_map(&self, _moved: &Moved<'_>) {}
}

#[test]
fn a_pause_leaves_it_where_it_is_with_its_memory_and_peers_notice_nothing() {
    let bench = bench(&Options { tag: "graphs".to_owned(), ..Options::default() });
    let block = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    let page = bench.page(block, SMALL);
    // An exported private page must not refuse a pause.
    let exported = bench.device.export_page(page).unwrap();
    let space = bench.arena.open_space().unwrap();
    space.allocate(5 * MIB, A).unwrap();
    space.seal().unwrap();
    bench.stamps.write(block, SMALL, 0x42).unwrap();
    let heard = Arc::new(Heard::default());
    let hooks: Arc<dyn PauseHooks> = heard.clone();
    bench.device.add_pause_hooks("graphs", &hooks);

    let report = bench.arena.pause(Fence::default()).unwrap();
    report.complete().unwrap();
    assert_eq!((report.kept_bytes, report.left_bytes), (SMALL, 0));
    assert!(report.bytes > 0);
    assert_eq!(bench.held(), (SMALL, SMALL), "everything else is gone");
    assert!(bench.stamps.holds(block, SMALL, 0x42).unwrap());
    let inside = |(at, bytes): &(Address, u64)| at.0 < block.0 + SMALL && block.0 < at.0 + bytes;
    assert!(!heard.0.lock().unwrap().iter().any(inside), "nobody is told that it goes");
    bench.stamps.write(block, SMALL, 0x43).unwrap();
    let another = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    drop(bench.device.export_page(bench.page(another, SMALL)).unwrap());
    bench.arena.free_exclusive(another).unwrap();
    bench.arena.resume(Duration::ZERO).unwrap();
    assert!(bench.stamps.holds(block, SMALL, 0x43).unwrap());
    assert_eq!(bench.page(block, SMALL), page);
    drop((exported, space));
    bench.device.host_pool().trim().unwrap();
    bench.end();
}

#[test]
fn one_that_is_freed_while_others_have_it_is_nobody_elses_until_they_have_not() {
    let bench = bench(&Options::default());
    let block = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    let page = bench.page(block, SMALL);
    let exported = bench.device.export_page(page).unwrap();
    bench.stamps.write(block, SMALL, 9).unwrap();
    bench.arena.free_exclusive(block).unwrap();
    bench.device.trim().unwrap();
    assert_eq!(bench.held(), (SMALL, 0), "it counts as before");
    let again = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    assert_ne!(bench.page(again, SMALL), page);
    let driver: SharedDriver = bench.host.clone();
    let theirs = driver.sharing().unwrap().import(exported.fd.as_fd(), SMALL).unwrap();
    let at = driver.reserve(SMALL).unwrap();
    let whole = vmmgraph::driver::Whole { page: theirs, bytes: SMALL };
    // SAFETY: newly reserved addresses, and a page of this length.
    unsafe { driver.map(at, &[whole], vmmgraph::Peers::NONE) }.unwrap();
    assert!(Stamps::new(&driver, A).holds(at, SMALL, 9).unwrap());
    // SAFETY: of this test, no longer used.
    unsafe {
        driver.release(theirs).unwrap();
        driver.unmap(at, SMALL).unwrap();
        driver.free_addresses(at, SMALL).unwrap();
    }
    drop(exported);
    assert_eq!(bench.held(), (SMALL, SMALL));
    bench.end();
}

#[test]
fn its_memory_goes_behind_the_replays_so_far() {
    let bench = bench(&Options::default());
    let other = stream(0xb0);
    let block = bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    let space = bench.arena.open_space().unwrap();
    space.seal().unwrap();
    space.replay(other, || ()).unwrap();
    bench.faulty.set_busy_for(3);
    bench.arena.free_exclusive(block).unwrap();
    assert_eq!(bench.held().1, SMALL, "a replay may be reading it");
    bench.arena.trim().unwrap();
    assert_eq!(bench.held().1, 0);
    drop(space);
    bench.end();
}

#[test]
fn a_wait_that_a_capture_forbids_is_refused_with_nothing_changed() {
    let bench = bench(&Options::default());
    bench.faulty.forbid_waits(true);
    let capturing = bench.arena.open_space().unwrap();
    let refused = bench.arena.allocate_exclusive(SMALL, 0);
    assert_eq!(refused, Err(Error::DeviceCapturing { device: 0 }));
    assert_eq!(bench.held(), (0, 0));
    capturing.seal().unwrap();
    bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    drop(capturing);
    bench.end();
}

#[test]
fn an_exclusive_block_whose_zeroing_fails_goes_behind_what_was_begun() {
    let bench = bench(&Options::default());
    let unmaps = bench.faulty.count("unmap");
    bench.faulty.set_busy(true);
    bench.faulty.refuse("event_synchronize", true);
    assert!(bench.arena.allocate_exclusive(SMALL, 0).is_err());
    assert_eq!(bench.faulty.count("unmap"), unmaps, "unmapped under the fill");
    bench.faulty.refuse("event_synchronize", false);
    bench.faulty.set_busy(false);
    bench.device.trim().unwrap();
    assert_eq!(bench.held(), (0, 0));
    bench.end();
}

#[test]
fn exclusive_blocks_of_an_arena_that_ends_go_behind_its_replays() {
    let bench = bench(&Options::default());
    bench.arena.allocate_exclusive(SMALL, 0).unwrap();
    // A graph without addresses of its own.
    let space = bench.arena.open_space().unwrap();
    space.seal().unwrap();
    bench.faulty.set_busy(true);
    space.replay(A, || ()).unwrap();
    drop(space);
    let unmaps = bench.faulty.count("unmap");
    let Bench { arena, faulty, device, .. } = bench;
    drop(arena);
    assert_eq!(faulty.count("unmap"), unmaps, "unmapped while a graph may use it");
    faulty.set_busy(false);
    device.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

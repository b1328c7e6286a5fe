//! Platforms that forbid waits during a capture on the device: waits are refused before any driver
//! call, pages in use are not reused, and earlier operations continue.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Policy, Region, RegionOptions, SharedVmmAllocator, Space,
    Stream,
};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);
const NOW: Duration = Duration::ZERO;

struct Bench {
    host: Arc<HostDriver>,
    driver: Arc<FaultyDriver>,
    device: Arc<Device>,
}

fn bench(memory_bytes: u64) -> Bench {
    let host = Arc::new(HostDriver::new(0, HostOptions { memory_bytes, ..HostOptions::default() }).unwrap());
    let driver = FaultyDriver::new(host.clone());
    driver.forbid_waits(true);
    Bench { device: Device::with_driver(driver.clone()), host, driver }
}

impl Bench {
    fn arena(&self) -> SharedVmmAllocator {
        SharedVmmAllocator::new(&self.device, &Options::default()).unwrap()
    }

    fn region(&self, policy: Policy) -> Arc<Region> {
        self.device.region("weights", RegionOptions { policy, ..RegionOptions::default() }).unwrap()
    }

    fn end(self) {
        assert_eq!(self.driver.captures(), 0);
        self.device.trim().unwrap();
        drop(self.device);
        assert_eq!((self.host.leftovers(), self.host.host_leftovers()), ([0; 4], [0; 2]));
    }
}

fn captured(arena: &SharedVmmAllocator, bytes: u64) -> Arc<Space> {
    let space = arena.open_space().unwrap();
    space.allocate(bytes, A).unwrap();
    space.seal().unwrap();
    space
}

fn refused<T: std::fmt::Debug>(result: Result<T, Error>) -> bool {
    match result {
        Err(Error::DeviceCapturing { device: 0 }) => true,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_wait_while_something_is_captured_is_refused_before_the_driver_is_asked() {
    let bench = bench(4 << 30);
    let arena = bench.arena();
    let ready = captured(&arena, 20 * MIB);
    ready.replay(A, || ()).unwrap();
    bench.driver.set_busy_for(3);
    let capturing = arena.open_space().unwrap();
    assert_eq!(bench.driver.captures(), 1);
    let before = bench.driver.count("event_synchronize");
    assert!(refused(ready.wait()) && refused(arena.trim()));
    assert!(refused(bench.arena().pause(Fence::default())));
    // SAFETY: no outputs.
    assert!(refused(unsafe { ready.verify(A, &[], || ()) }));
    assert_eq!(bench.driver.count("event_synchronize"), before);
    // Device-side ordering needs no host wait.
    ready.replay(B, || ()).unwrap();
    ready.replay(A, || ()).unwrap();
    capturing.allocate(3 * MIB, B).unwrap();
    capturing.seal().unwrap();
    ready.wait().unwrap();
    arena.trim().unwrap();
    drop((ready, capturing, arena));
    bench.end();
}

#[test]
fn every_way_in_which_a_space_stops_being_captured_ends_the_capture() {
    let bench = bench(4 << 30);
    let arena = bench.arena();
    let [sealed, dropped, kept] = [0, 1, 2].map(|_| arena.open_space().unwrap());
    assert_eq!(bench.driver.captures(), 3);
    sealed.seal().unwrap();
    assert_eq!(bench.driver.captures(), 2);
    drop(dropped);
    assert_eq!(bench.driver.captures(), 1);
    let blocks = vmmgraph::VmmTorchAllocator::new(&kept);
    let block = blocks.allocate(MIB, A, false).unwrap();
    drop(kept);
    assert_eq!(bench.driver.captures(), 0, "its graph is gone, and a block is not");
    blocks.free(block, &[]).unwrap();
    drop((blocks, sealed, arena));
    bench.end();
}

#[test]
fn a_bump_space_is_captured_from_its_first_block_on() {
    let bench = bench(4 << 30);
    let arena = bench.arena();
    arena.switch_to_new_virtual_space().unwrap();
    assert_eq!(bench.driver.captures(), 0);
    arena.allocate(3 * MIB, A).unwrap();
    arena.allocate(3 * MIB, A).unwrap();
    assert_eq!(bench.driver.captures(), 1);
    arena.switch_to_new_virtual_space().unwrap();
    assert_eq!(bench.driver.captures(), 0, "the next one is not captured yet");
    let other = arena.open_bump_space().unwrap();
    other.allocate(MIB, A).unwrap();
    assert_eq!(bench.driver.captures(), 1);
    other.seal().unwrap();
    assert_eq!(bench.driver.captures(), 0);
    drop((other, arena));
    bench.end();
}

#[test]
fn pages_behind_a_replay_are_not_taken_while_nobody_can_say_that_it_is_over() {
    let bench = bench(64 * MIB);
    let arena = bench.arena();
    let old = captured(&arena, 40 * MIB);
    old.replay(A, || ()).unwrap();
    let other = bench.arena();
    let capturing = other.open_space().unwrap();
    drop((old, arena));
    // The replay must not be queried, so memory is short at once, without the two-second wait.
    let questions = bench.driver.count("event_query");
    let error = capturing.allocate(40 * MIB, B).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    assert!(bench.driver.count("event_query") - questions < 100);
    assert_eq!(bench.driver.count("event_synchronize"), 0);
    capturing.seal().unwrap();
    other.trim().unwrap();
    captured(&other, 40 * MIB);
    drop((capturing, other));
    bench.end();
}

#[test]
fn a_seal_is_no_longer_part_of_the_capture() {
    let bench = bench(4 << 30);
    let arena = bench.arena();
    let space = arena.open_space().unwrap();
    space.allocate(20 * MIB, A).unwrap();
    let kept = space.allocate(2 * MIB + 512, A).unwrap();
    let driver = bench.driver.clone();
    let during = Arc::new(Mutex::new(Vec::new()));
    let seen = during.clone();
    bench.driver.set_hook(Some(Arc::new(move |_| seen.lock().unwrap().push(driver.captures()))));
    space.seal().unwrap();
    bench.driver.set_hook(None);
    let during = during.lock().unwrap().clone();
    assert!(!during.is_empty() && during.iter().all(|captures| *captures == 0), "{during:?}");
    space.free(kept).unwrap();
    drop((space, arena));
    bench.end();
}

fn write(at: Address, word: u64) {
    // SAFETY: a live block of a resident region of the host driver.
    unsafe { (at.0 as *mut u64).write_volatile(word) };
}

fn read(at: Address) -> u64 {
    // SAFETY: as above.
    unsafe { (at.0 as *const u64).read_volatile() }
}

#[test]
fn no_copy_is_begun_whose_end_nobody_could_wait_for() {
    let bench = bench(4 << 30);
    let arena = bench.arena();
    let region = bench.region(Policy::Backup);
    let at = region.allocate(9 * MIB, A).unwrap();
    write(at, 7);
    let capturing = arena.open_space().unwrap();
    assert!(refused(region.pause(Fence::default())));
    assert_eq!((bench.driver.count("copy_to_host"), region.stats().paused), (0, false));
    capturing.seal().unwrap();
    assert_eq!(region.pause(Fence::default()).unwrap().complete(), Ok(()));
    let again = arena.open_space().unwrap();
    assert!(refused(region.resume(NOW)));
    assert_eq!((bench.driver.count("copy_from_host"), region.stats().paused), (0, true));
    again.seal().unwrap();
    region.resume(NOW).unwrap();
    assert_eq!(read(at), 7);
    drop((capturing, again, arena));
    region.free(at).unwrap();
    drop(region);
    bench.end();
}

#[test]
fn copies_that_were_begun_before_a_capture_are_waited_for() {
    let bench = bench(4 << 30);
    let arena = Arc::new(bench.arena());
    let region = bench.region(Policy::Backup);
    let at = region.allocate(40 * MIB, A).unwrap();
    write(at, 11);
    for (call, words) in [("copy_to_host", 0), ("copy_from_host", 1)] {
        let (opened, begun) = (Arc::new(Mutex::new(None)), AtomicBool::new(false));
        let (slot, from) = (opened.clone(), arena.clone());
        bench.driver.set_hook(Some(Arc::new(move |name| {
            if name == call && !begun.swap(true, SeqCst) {
                *slot.lock().unwrap() = Some(from.open_space().unwrap());
            }
        })));
        if words == 0 {
            assert_eq!(region.pause(Fence::default()).unwrap().complete(), Ok(()));
        } else {
            region.resume(NOW).unwrap();
        }
        bench.driver.set_hook(None);
        let space = opened.lock().unwrap().take().unwrap();
        assert_eq!(bench.driver.captures(), 1);
        space.seal().unwrap();
    }
    assert_eq!(read(at), 11);
    region.free(at).unwrap();
    drop((region, arena));
    bench.end();
}

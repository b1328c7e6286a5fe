//! Thirteen defects of the first design, found at commit 210a5fb. Each has a test, which fails at
//! that commit.

use std::collections::BTreeSet;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Barrier, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use cudarc::driver::sys;
use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver};
use vmmgraph::{
    Address, Device, DriverChoice, Error, HostOptions, Options, Result, SharedVmmAllocator, Space, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, MIB, Stamps, alone, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

struct Host {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
}

impl Host {
    fn new() -> Self {
        Self::of_memory(HostOptions::default().memory_bytes)
    }

    fn of_memory(memory_bytes: u64) -> Self {
        let options = HostOptions { memory_bytes, ..HostOptions::default() };
        let host = Arc::new(HostDriver::new(0, options).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        Self { host, faulty, device }
    }

    fn arena(&self) -> SharedVmmAllocator {
        SharedVmmAllocator::new(&self.device, &Options::default()).unwrap()
    }

    fn stamps(&self) -> Stamps {
        let driver: SharedDriver = self.faulty.clone();
        Stamps::new(&driver, A)
    }

    fn close(self) {
        let Self { host, faulty, device } = self;
        drop(device);
        drop(Device::with_driver(faulty));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// Runs a test with a timeout, on its own thread.
fn watched(test: impl FnOnce() + Send + 'static) {
    let (ended, end) = channel();
    let running = thread::spawn(move || {
        test();
        let _ = ended.send(());
    });
    assert_ne!(end.recv_timeout(Duration::from_secs(20)), Err(RecvTimeoutError::Timeout), "it hangs");
    if let Err(panic) = running.join() {
        std::panic::resume_unwind(panic);
    }
}

fn sealed(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().unwrap();
    let block = space.allocate(20 * MIB, A).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    space
}

type Blocks = Vec<(Address, u64)>;

fn allocate(space: &Space, sizes: &[u64]) -> Blocks {
    sizes.iter().map(|bytes| (space.allocate(*bytes, A).unwrap(), *bytes)).collect()
}

fn replay(space: &Space, blocks: &Blocks, stamps: &Stamps, seed: u32) {
    let run = || {
        for (id, (at, bytes)) in blocks.iter().enumerate() {
            stamps.write(*at, *bytes, seed + id as u32).unwrap();
        }
    };
    space.replay(A, run).unwrap();
    holds(blocks, stamps, seed);
}

fn holds(blocks: &Blocks, stamps: &Stamps, seed: u32) {
    for (id, (at, bytes)) in blocks.iter().enumerate() {
        assert!(stamps.holds(*at, *bytes, seed + id as u32).unwrap(), "block {id} at {at:?} was overwritten");
    }
}

/// Defect 1: a failed seal freed a whole page still mapped by a live block. Two blocks overlapped,
/// and the second seal took another space's page.
#[test]
fn a_seal_that_fails_leaves_no_two_blocks_on_one_page() {
    // The failing create of the seal; the concurrent capture comes before or after.
    for failing in 1..=5 {
        let driver = Host::new();
        let arena = Arc::new(driver.arena());
        let first = arena.open_space().unwrap();
        let mut blocks = allocate(&first, &[32 * MIB, 10 * MIB]);
        let (ask, asked) = channel();
        let (answer, answered) = channel();
        let other = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let () = asked.recv().unwrap();
                let space = arena.open_space().unwrap();
                let blocks = allocate(&space, &[32 * MIB, 10 * MIB]);
                answer.send(()).unwrap();
                (space, blocks)
            })
        };
        let (sealing, creates) = (thread::current().id(), AtomicU64::new(0));
        let (ask, answered, faulty) = (Mutex::new(ask), Mutex::new(answered), driver.faulty.clone());
        driver.faulty.set_hook(Some(Arc::new(move |name| {
            if name == "create"
                && thread::current().id() == sealing
                && creates.fetch_add(1, Ordering::SeqCst) + 1 == failing
            {
                ask.lock().unwrap().send(()).unwrap();
                let _ = answered.lock().unwrap().recv_timeout(Duration::from_millis(200));
                // Creation is retried while other threads work: fail all attempts of this thread.
                faulty.watch_only(Some(sealing));
                faulty.arm(&(1..=5_000).collect::<Vec<_>>());
            }
        })));
        assert!(first.seal().unwrap_err().is_out_of_memory());
        driver.faulty.set_hook(None);
        driver.faulty.watch_only(None);
        driver.faulty.arm(&[]);
        let (second, mut theirs) = other.join().unwrap();
        assert_eq!((first.audit(), second.audit(), arena.audit()), (Ok(()), Ok(()), Ok(())));

        blocks.extend(allocate(&first, &[32 * MIB, 7 * MIB, 40 * MIB]));
        assert_eq!(arena.audit(), Ok(()));
        first.seal().unwrap();
        theirs.extend(allocate(&second, &[20 * MIB]));
        second.seal().unwrap();
        let third = arena.open_space().unwrap();
        let passing = allocate(&third, &[32 * MIB, 32 * MIB, 32 * MIB, 10 * MIB]);
        third.seal().unwrap();
        assert_eq!(arena.audit(), Ok(()));
        let stamps = driver.stamps();
        replay(&first, &blocks, &stamps, 100);
        replay(&second, &theirs, &stamps, 200);
        replay(&third, &passing, &stamps, 300);
        holds(&blocks, &stamps, 100);
        holds(&theirs, &stamps, 200);
        drop((first, second, third, arena));
        driver.close();
    }
}

fn waits(faulty: &FaultyDriver) -> usize {
    faulty.take_log().iter().filter(|line| line.starts_with("event_wait")).count()
}

/// Defect 2: default streams of two threads share a handle, and their replays were not ordered.
#[test]
fn the_default_streams_of_two_threads_are_two_streams() {
    let driver = Host::new();
    let arena = driver.arena();
    let space = sealed(&arena);
    driver.faulty.start_log();
    let on_own = || space.replay(Stream::PER_THREAD, || ()).unwrap();
    on_own();
    assert_eq!(waits(&driver.faulty), 0, "nothing to wait for yet");
    on_own();
    assert_eq!(waits(&driver.faulty), 0, "a thread's own default stream is in order by itself");
    thread::scope(|scope| scope.spawn(on_own).join().unwrap());
    assert_eq!(waits(&driver.faulty), 1, "another thread's waits");
    on_own();
    assert_eq!(waits(&driver.faulty), 1, "and the first one's again");
    thread::scope(|scope| scope.spawn(on_own).join().unwrap());
    space.replay(B, || ()).unwrap();
    assert_eq!(waits(&driver.faulty), 2);
    thread::scope(|scope| scope.spawn(on_own).join().unwrap());
    drop(space);
    arena.trim().unwrap();
    drop(arena);
    driver.close();
}

/// Defect 2: a handle reused after `mark` and a stream's destruction was treated as the old stream.
#[test]
fn a_handle_that_comes_back_after_a_mark_is_another_stream() {
    let driver = Host::new();
    let arena = driver.arena();
    let space = sealed(&arena);
    driver.faulty.start_log();
    space.replay(A, || ()).unwrap();
    arena.mark().unwrap();
    assert_eq!(waits(&driver.faulty), 0);
    space.replay(A, || ()).unwrap();
    assert_eq!(waits(&driver.faulty), 1);
    let _next = arena.open_space().unwrap();
    space.replay(A, || ()).unwrap();
    space.replay(A, || ()).unwrap();
    assert_eq!(waits(&driver.faulty), 1);
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

struct StandIn {
    device: Arc<Device>,
    context: sys::CUcontext,
    _alone: MutexGuard<'static, ()>,
}

impl StandIn {
    fn new() -> Self {
        let alone = alone();
        let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
        let mut context = ptr::null_mut();
        // SAFETY: an out pointer on this stack; the context is retained until the end of the test.
        unsafe {
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
            ok(sys::cuCtxPushCurrent_v2(context));
        }
        Self { device, context, _alone: alone }
    }

    fn stream(flags: u32) -> sys::CUstream {
        let mut stream = ptr::null_mut();
        // SAFETY: an out pointer on this stack; the context is current.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, flags) });
        stream
    }

    fn begin(stream: sys::CUstream) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a live stream of the current context.
        ok(unsafe { sys::cuStreamBeginCapture_v2(stream, mode) });
    }

    fn end(stream: sys::CUstream) {
        let mut graph = ptr::null_mut();
        // SAFETY: as above.
        unsafe {
            ok(sys::cuStreamEndCapture(stream, &raw mut graph));
            assert!(!graph.is_null());
            ok(sys::cuGraphDestroy(graph));
        }
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        // SAFETY: balances `new`.
        unsafe {
            let _ = sys::cuCtxPopCurrent_v2(&raw mut self.context);
            let _ = sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

/// Defect 3: dropping a space waited for the whole context, which broke a capture on a blocking
/// stream. Opening a space failed.
#[test]
fn a_capture_elsewhere_survives_the_life_of_spaces_beside_the_legacy_stream() {
    let standin = StandIn::new();
    let arena = SharedVmmAllocator::new(&standin.device, &Options::default()).unwrap();
    let (space, other) = (sealed(&arena), sealed(&arena));
    space.replay(Stream::LEGACY, || ()).unwrap();
    let captured = StandIn::stream(0);
    StandIn::begin(captured);
    drop(space);
    let next = arena.open_space().unwrap();
    let block = next.allocate(50 * MIB, A).unwrap();
    next.free(block).unwrap();
    next.seal().unwrap();
    assert!(matches!(
        other.replay(Stream::LEGACY, || panic!("launched")),
        Err(Error::StreamCapturing { .. })
    ));
    drop((other, arena.open_space().unwrap()));
    StandIn::end(captured);
    arena.trim().unwrap();
    drop((next, arena));
    let stats = standin.device.stats();
    assert_eq!((stats.physical_bytes, stats.pending, stats.mappings), (0, 0, 0));
}

/// Comparing two replays used a synchronous copy, which runs on the legacy stream.
#[test]
fn a_capture_elsewhere_survives_two_replays_that_are_compared() {
    let standin = StandIn::new();
    let arena = SharedVmmAllocator::new(&standin.device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let output = space.allocate(4096, A).unwrap();
    space.seal().unwrap();
    let captured = StandIn::stream(0);
    StandIn::begin(captured);
    // SAFETY: a live-out block of the space.
    let compared = unsafe { space.verify(stream(StandIn::stream(1) as u64), &[(output, 4096)], || ()) };
    assert_eq!(compared, Ok(None));
    StandIn::end(captured);
}

/// Defect 3: a replay onto a captured stream waited for an event, which broke the capture or was
/// captured.
#[test]
fn a_replay_onto_a_stream_under_capture_is_refused_and_the_capture_intact() {
    let standin = StandIn::new();
    let arena = SharedVmmAllocator::new(&standin.device, &Options::default()).unwrap();
    let space = sealed(&arena);
    let (captured, other) = (StandIn::stream(1), StandIn::stream(1));
    for last in [None, Some(other), Some(captured)] {
        if let Some(last) = last {
            space.replay(stream(last as u64), || ()).unwrap();
        }
        StandIn::begin(captured);
        let on = stream(captured as u64);
        let refused = space.replay(on, || panic!("launched"));
        assert_eq!(refused, Err(Error::StreamCapturing { stream: on.raw() }));
        StandIn::end(captured);
        space.replay(on, || ()).unwrap();
    }
    drop((space, arena));
    assert_eq!(standin.device.stats().physical_bytes, 0);
}

/// Defect 4: an arena was dropped during a capture of its last stream; a second arena's trim
/// unmapped its spaces during the replay.
#[test]
fn what_an_arena_left_is_not_unmapped_before_its_last_replay_is_over() {
    for (capturing, busy) in [(true, false), (false, true), (true, true)] {
        let driver = Host::new();
        let (arena, other) = (driver.arena(), driver.arena());
        let space = sealed(&arena);
        space.replay(A, || ()).unwrap();
        driver.faulty.set_capturing(A, capturing);
        driver.faulty.set_busy(busy);
        let before = driver.faulty.count("unmap");
        drop((space, arena));
        let unmapped = || driver.faulty.count("unmap") - before;
        drop(sealed(&other));
        let theirs = unmapped();
        thread::scope(|scope| {
            let trim = scope.spawn(|| other.trim());
            thread::sleep(Duration::from_millis(20));
            assert_eq!(unmapped(), theirs, "unmapped under a replay that may run");
            assert!(driver.device.stats().pending > 0);
            driver.faulty.set_busy(false);
            trim.join().unwrap().unwrap();
            if capturing {
                assert_eq!(unmapped(), theirs, "its end is not even recorded");
            }
        });
        driver.faulty.set_capturing(A, false);
        other.trim().unwrap();
        assert!(unmapped() > theirs);
        assert_eq!((driver.device.stats().pending, driver.device.stats().physical_bytes), (0, 0));
        assert_eq!(driver.faulty.broken_captures(), [""; 0]);
        drop(other);
        driver.close();
    }
}

/// Defect 5: an unmap refused during the last drop left the pool in a reference cycle.
#[test]
fn what_the_driver_refuses_at_the_end_of_everything_goes_when_its_device_opens_again() {
    let mut calls = 1;
    for failing in 1.. {
        if failing > calls {
            break;
        }
        let driver = Host::new();
        let arena = driver.arena();
        let space = sealed(&arena);
        let torch = VmmTorchAllocator::new(&space);
        space.replay(A, || ()).unwrap();
        let Host { host, faulty, device } = driver;
        faulty.arm(&[failing]);
        drop((space, torch, arena, device));
        calls = faulty.calls();
        faulty.arm(&[]);
        drop(Device::with_driver(faulty));
        assert_eq!(host.leftovers(), [0; 4], "call {failing} was refused");
    }
    assert!(calls >= 4, "{calls} calls at the end of everything: unmap, addresses, release, event");
}

/// Defect 6: a space outlived its device's handles, and reopening the device created a second pool
/// without a budget.
#[test]
fn a_device_with_something_alive_is_the_same_device_when_it_is_opened_again() {
    let open = || Device::open(DriverChoice::HOST, 0, HostOptions::default()).unwrap();
    let device = open();
    device.set_budget(Some(100 * MIB));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    space.allocate(64 * MIB, A).unwrap();
    drop((device, arena));
    let again = open();
    let stats = again.stats();
    assert_eq!((stats.budget_bytes, stats.physical_bytes), (Some(100 * MIB), 64 * MIB));
    let other = SharedVmmAllocator::new(&again, &Options::default()).unwrap();
    let refused = other.open_space().unwrap().allocate(64 * MIB, A);
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    let torch = VmmTorchAllocator::new(&space);
    drop((space, other, again));
    let third = open();
    assert_eq!(third.stats().budget_bytes, Some(100 * MIB));
    drop((torch, third));
    assert_eq!(open().stats().budget_bytes, None, "it had closed");
}

/// Defect 7: `switch_to_new_virtual_space` during a launch that calls `deallocate` deadlocked on
/// two locks.
#[test]
fn a_switch_beside_a_launch_that_deallocates_does_not_hang() {
    watched(|| {
        let driver = Host::new();
        let arena = driver.arena();
        for _ in 0..20 {
            arena.switch_to_new_virtual_space().unwrap();
            let block = arena.allocate(3 * MIB, A).unwrap();
            let space = arena.current_space().unwrap();
            arena.switch_to_new_virtual_space().unwrap();
            let (launched, switching) = (Barrier::new(2), AtomicBool::new(false));
            thread::scope(|scope| {
                scope.spawn(|| {
                    launched.wait();
                    switching.store(true, Ordering::SeqCst);
                    arena.switch_to_new_virtual_space().unwrap();
                });
                let launch = || {
                    launched.wait();
                    let start = Instant::now();
                    while !switching.load(Ordering::SeqCst) || start.elapsed() < Duration::from_millis(2) {
                        thread::yield_now();
                    }
                    arena.deallocate(block).unwrap();
                };
                space.replay(B, launch).unwrap();
            });
        }
    });
}

fn circle(threads: usize) {
    watched(move || {
        let driver = Host::new();
        let arenas: Vec<_> = (0..threads).map(|_| driver.arena()).collect();
        let spaces: Vec<_> = arenas.iter().map(sealed).collect();
        let all_inside = Barrier::new(threads);
        let refused = AtomicU64::new(0);
        thread::scope(|scope| {
            for number in 0..threads {
                let (spaces, all_inside, refused) = (&spaces, &all_inside, &refused);
                scope.spawn(move || {
                    let inner = || spaces[(number + 1) % threads].replay(B, || number);
                    let outer = || {
                        all_inside.wait();
                        inner()
                    };
                    match spaces[number].replay(A, outer).unwrap() {
                        Ok(launched) => assert_eq!(launched, number),
                        Err(Error::WrongState { sentence }) if sentence.contains("under way") => {
                            refused.fetch_add(1, Ordering::SeqCst);
                        }
                        Err(other) => panic!("{other}"),
                    }
                });
            }
        });
        assert_eq!(refused.into_inner(), 1, "one is told that it waits for itself, the others go on");
        for space in &spaces {
            assert_eq!(space.replay(A, || 1), Ok(1));
        }
    });
}

/// Defect 7: replays of two arenas, nested in opposite order on two threads, deadlocked.
#[test]
fn replays_nested_in_opposite_order_on_two_threads_do_not_hang() {
    circle(2);
}

/// Defect 7 with three arenas and threads.
#[test]
fn replays_nested_in_a_circle_of_three_threads_do_not_hang() {
    circle(3);
}

/// Defect 8: an allocation ran out of memory although a different arena had unused pages.
#[test]
fn free_pages_of_another_arena_are_used_before_memory_is_out() {
    let driver = Host::of_memory(144 * MIB);
    let arena = driver.arena();
    let space = arena.open_space().unwrap();
    let passing = space.allocate(128 * MIB, A).unwrap();
    space.free(passing).unwrap();
    space.seal().unwrap();
    let still_there = sealed(&arena);
    drop(space);
    assert!(driver.device.stats().free_bytes >= 90 * MIB, "{:?}", driver.device.stats());
    let other = driver.arena();
    let created = driver.faulty.count("create");
    let same = other.open_space().unwrap();
    same.allocate(32 * MIB, A).unwrap();
    assert_eq!(driver.faulty.count("create"), created);
    let options = Options { large_page_bytes: 48 * MIB, ..Options::default() };
    let third = SharedVmmAllocator::new(&driver.device, &options).unwrap();
    third.open_space().unwrap().allocate(48 * MIB, A).unwrap();
    drop((still_there, same, third, other, arena));
    driver.close();
}

/// Returns the functions of the driver interface: parameters, and whether the function is unsafe.
fn driver_functions() -> Vec<(String, bool)> {
    let text = include_str!("../../src/driver/mod.rs");
    let text: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
    let traits = text.split("pub unsafe trait ").skip(1);
    let functions = traits.flat_map(|body| {
        let body = body.split("pub trait ").next().unwrap().to_owned();
        let starts: Vec<usize> = body.match_indices("fn ").map(|(at, _)| at).collect();
        starts.into_iter().map(move |at| {
            let signature = body[at..].split(';').next().unwrap().split("->").next().unwrap().to_owned();
            (signature, body[..at].trim_end().ends_with("unsafe"))
        })
    });
    functions.collect()
}

/// Defect 9: driver traits were safe and their handles constructible, so safe code could pass wild
/// pointers. (Documentation examples cover the handles.)
#[test]
fn whatever_takes_a_handle_or_an_address_of_the_driver_is_unsafe() {
    let driver_functions = driver_functions();
    assert!(
        driver_functions.len() >= 16,
        "only {}: has the form of the source changed?",
        driver_functions.len()
    );
    let takes = |signature: &str| {
        ["Address", "PageHandle", "Event", "Stream", "Whole"].iter().any(|name| signature.contains(name))
    };
    let with: BTreeSet<_> = driver_functions.iter().filter(|(signature, _)| takes(signature)).collect();
    assert!(with.len() >= 12, "{with:?}");
    for (signature, is_unsafe) in with {
        assert!(is_unsafe, "{signature} is safe");
    }
}

/// Defect 10: a failed bump allocation kept pages and addresses.
#[test]
fn a_bump_allocation_that_fails_changes_nothing() {
    let mut calls = 1;
    for failing in 1.. {
        if failing > calls {
            break;
        }
        let driver = Host::new();
        let arena = driver.arena();
        let space = arena.open_bump_space().unwrap();
        space.allocate(20 * MIB, A).unwrap();
        let books = || {
            let stats = driver.device.stats();
            let (bytes, offset) = (stats.physical_bytes - stats.free_bytes, space.offset());
            (
                stats.mappings,
                stats.reservations,
                stats.reserved_bytes,
                bytes,
                space.stats().mapped_bytes,
                offset,
            )
        };
        let before = books();
        driver.faulty.arm(&[failing]);
        let failed = space.allocate(1200 * MIB, A);
        calls = driver.faulty.calls().max(failing);
        driver.faulty.arm(&[]);
        if failed.is_ok() {
            // No call is left to fail, or the failed call was a cleanup.
            assert!(failing >= 4, "call {failing} failed and nobody noticed");
            break;
        }
        assert_eq!(books(), before, "call {failing}");
        assert_eq!(driver.device.stats().physical_bytes, before.3, "call {failing}");
        space.allocate(1200 * MIB, A).unwrap();
        assert_eq!(arena.audit(), Ok(()));
        drop((space, arena));
        driver.close();
    }
}

/// Defect 11: `record_stream` after the seal had no effect: pages of a freed block were reused
/// under a reading stream.
#[test]
fn a_retained_block_that_a_busy_stream_reads_is_nobody_elses_until_that_is_done() {
    let driver = Host::new();
    let arena = driver.arena();
    let stamps = driver.stamps();
    let space = arena.open_space().unwrap();
    let output: Blocks = allocate(&space, &[32 * MIB, 3 * MIB]);
    space.seal().unwrap();
    replay(&space, &output, &stamps, 7);
    for (at, _) in &output {
        space.record_stream(*at, B).unwrap();
    }
    driver.faulty.set_busy(true);
    for (at, _) in &output {
        space.free(*at).unwrap();
    }
    let next = arena.open_space().unwrap();
    let theirs = allocate(&next, &[32 * MIB, 3 * MIB, 30 * MIB]);
    for (number, (at, bytes)) in theirs.iter().enumerate() {
        stamps.write(*at, *bytes, 50 + number as u32).unwrap();
    }
    holds(&output, &stamps, 7);
    driver.faulty.set_busy(false);
    let before = driver.device.stats().physical_bytes;
    let third = arena.open_space().unwrap();
    allocate(&third, &[32 * MIB, 3 * MIB, 30 * MIB, 32 * MIB]);
    assert!(driver.device.stats().physical_bytes < before + 32 * MIB);
    drop((space, next, third, arena));
    driver.close();
}

/// Defect 11, for a block freed after its graph.
#[test]
fn a_block_freed_after_its_graph_waits_for_its_streams_as_well() {
    let driver = Host::new();
    let arena = driver.arena();
    let stamps = driver.stamps();
    let space = arena.open_space().unwrap();
    let torch = VmmTorchAllocator::new(&space);
    let output = allocate(&space, &[32 * MIB]);
    space.seal().unwrap();
    replay(&space, &output, &stamps, 7);
    drop(space);
    torch.record_stream(output[0].0, B).unwrap();
    driver.faulty.set_busy(true);
    torch.free(output[0].0, &[]).unwrap();
    drop(torch);
    let next = arena.open_space().unwrap();
    for (at, bytes) in allocate(&next, &[32 * MIB, 32 * MIB]) {
        stamps.write(at, bytes, 50).unwrap();
    }
    holds(&output, &stamps, 7);
    driver.faulty.set_busy(false);
    drop((next, arena));
    driver.close();
}

/// Defect 11, for a block on a page with other live blocks.
#[test]
fn a_page_waits_for_the_streams_of_all_blocks_that_were_on_it() {
    for gone in [false, true] {
        let driver = Host::new();
        let arena = driver.arena();
        let stamps = driver.stamps();
        let space = arena.open_space().unwrap();
        let torch = VmmTorchAllocator::new(&space);
        let output = allocate(&space, &[5000]);
        let neighbour = space.allocate(5000, A).unwrap();
        space.seal().unwrap();
        replay(&space, &output, &stamps, 7);
        space.record_stream(output[0].0, B).unwrap();
        driver.faulty.set_busy(true);
        space.free(output[0].0).unwrap();
        let graph = (!gone).then_some(space);
        let unmapped = driver.faulty.count("unmap");
        torch.free(neighbour, &[]).unwrap();
        drop(torch);
        assert_eq!(driver.faulty.count("unmap"), unmapped);
        let next = arena.open_space().unwrap();
        for (at, bytes) in allocate(&next, &[5000, 2 * MIB, 40 * MIB]) {
            stamps.write(at, bytes, 50).unwrap();
        }
        holds(&output, &stamps, 7);
        driver.faulty.set_busy(false);
        drop((graph, next, arena));
        driver.close();
    }
}

/// Defect 11, for persistent blocks.
#[test]
fn a_kept_block_that_a_busy_stream_reads_is_nobody_elses_until_that_is_done() {
    let driver = Host::new();
    let arena = driver.arena();
    let stamps = driver.stamps();
    let space = arena.open_space().unwrap();
    let neighbour = arena.open_space().unwrap();
    let output: Blocks = vec![(space.allocate_kept(5000, A).unwrap(), 5000)];
    neighbour.allocate_kept(5000, A).unwrap();
    space.seal().unwrap();
    replay(&space, &output, &stamps, 7);
    space.record_stream(output[0].0, B).unwrap();
    driver.faulty.set_busy(true);
    space.free(output[0].0).unwrap();
    drop(space);
    let next = arena.open_space().unwrap();
    let theirs = next.allocate_kept(5000, A).unwrap();
    stamps.write(theirs, 5000, 50).unwrap();
    assert_ne!(theirs, output[0].0);
    holds(&output, &stamps, 7);
    driver.faulty.set_busy(false);
    let again = next.allocate_kept(5000, A).unwrap();
    assert_eq!(again, output[0].0, "now it is free");
    assert_eq!(arena.audit(), Ok(()));
    next.seal().unwrap();
    let last = vec![(again, 5000)];
    replay(&next, &last, &stamps, 9);
    driver.faulty.set_busy(true);
    drop((next, neighbour, arena));
    holds(&last, &stamps, 9);
    driver.faulty.set_busy(false);
    driver.close();
}

/// Defect 12: a tensor that outlived its graph kept all memory of the graph.
#[test]
fn a_block_that_outlives_its_space_keeps_its_own_pages_only() {
    for busy in [false, true] {
        let driver = Host::new();
        let arena = driver.arena();
        let stamps = driver.stamps();
        let space = arena.open_space().unwrap();
        let torch = VmmTorchAllocator::new(&space);
        let passing = torch.allocate(500 * MIB, A, false).unwrap();
        let output: Blocks = vec![(torch.allocate(4 * MIB, A, false).unwrap(), 4 * MIB)];
        torch.free(passing, &[]).unwrap();
        space.seal().unwrap();
        replay(&space, &output, &stamps, 7);
        driver.faulty.set_busy(busy);
        drop(space);
        if busy {
            assert!(driver.device.stats().physical_bytes > 500 * MIB, "the graph may still run");
            driver.faulty.set_busy(false);
        }
        arena.trim().unwrap();
        assert_eq!(driver.device.stats().physical_bytes, 4 * MIB);
        holds(&output, &stamps, 7);
        driver.faulty.set_busy(busy);
        torch.free(output[0].0, &[]).unwrap();
        assert!(matches!(torch.free(output[0].0, &[]), Err(Error::DoubleFree { .. })));
        drop(torch);
        driver.faulty.set_busy(false);
        arena.trim().unwrap();
        let stats = driver.device.stats();
        assert_eq!((stats.physical_bytes, stats.mappings, stats.reservations, stats.pending), (0, 0, 0, 0));
        drop(arena);
        driver.close();
    }
}

/// Defect 13: names of the published design had other meanings: the offset counted live bytes, and
/// an arena could not reserve at once.
#[test]
fn the_names_of_the_published_design_mean_what_they_mean_there() -> Result<()> {
    let driver = Host::new();
    let options = Options { reserve_bytes: 1 << 30, ..Options::default() };
    let arena = SharedVmmAllocator::new(&driver.device, &options)?;
    assert!(arena.reserved_size() >= 1 << 30, "before the first allocation");
    assert_eq!((arena.current_offset(), arena.high_water_mark(), arena.mapped_size()), (0, 0, 0));
    let mut last = 0;
    for bytes in [3 * MIB, 700, 40 * MIB] {
        let block = arena.allocate(bytes, A)?;
        arena.deallocate(block)?;
        let offset = arena.current_offset();
        assert!(offset >= last + bytes, "a bump pointer does not go back");
        assert!(arena.high_water_mark() >= offset && arena.mapped_size() >= offset);
        last = offset;
    }
    arena.switch_to_new_virtual_space()?;
    assert_eq!((arena.current_offset(), arena.high_water_mark()), (0, last));
    assert!(arena.mapped_size() >= last, "the pages stay for the next space");
    arena.allocate(MIB, A)?;
    assert_eq!((arena.current_offset(), arena.high_water_mark()), (MIB, last));
    let before = arena.reserved_size();
    arena.allocate(1500 * MIB, A)?;
    assert!(arena.reserved_size() > before && arena.mapped_size() >= arena.current_offset());
    drop(arena);
    driver.close();
    Ok(())
}

/// Found by tests/fuzz/streams.rs: a returned live-out page was registered under its old number and
/// as a spare page, so two blocks overlapped.
#[test]
fn a_page_that_comes_back_has_one_number() {
    let driver = Host::new();
    let arena = driver.arena();
    let stamps = driver.stamps();
    let first = arena.open_space().unwrap();
    let output = first.allocate(32 * MIB, A).unwrap();
    first.seal().unwrap();
    first.free(output).unwrap();
    let second = arena.open_space().unwrap();
    let blocks = allocate(&second, &[32 * MIB, 32 * MIB, 32 * MIB]);
    assert_eq!(second.audit(), Ok(()));
    second.seal().unwrap();
    replay(&second, &blocks, &stamps, 3);
    drop((first, second, arena));
    driver.close();
}

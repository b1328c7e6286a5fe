//! The MLU driver over the stand-in libcndrv.so, which invalidates a capture or fails a call for
//! each broken CNDrv rule.

use std::ffi::{c_char, c_void};
use std::ptr;
use std::sync::{Arc, LazyLock, MutexGuard};

use vmmgraph::driver::{Memory, MluDriver, StreamState, Timeline, Transfer, Whole};
use vmmgraph::{
    Address, Device, DriverChoice, Error, HostOptions, Options, Peers, SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::child;

use crate::standin::StandIn;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;

static STAND_IN: LazyLock<StandIn> = LazyLock::new(|| StandIn::load("libstandin_mlu.so"));

fn alone() -> MutexGuard<'static, ()> {
    LazyLock::force(&STAND_IN);
    vmmgraph_testkit::alone()
}

fn open() -> MluDriver {
    MluDriver::new(0).unwrap()
}

fn busy_once() {
    call!(standin_keep_busy(1 => u64) -> ());
}

fn current() -> *mut c_void {
    let mut context = ptr::null_mut();
    assert_eq!(call!(cnCtxGetCurrent(&raw mut context => *mut *mut c_void) -> i32), 0);
    context
}

fn raw(stream: Stream) -> *mut c_void {
    stream.raw() as *mut c_void
}

fn begin(stream: Stream, mode: i32) {
    assert_eq!(call!(cnQueueBeginCapture(raw(stream) => *mut c_void, mode => i32) -> i32), 0);
}

fn end(stream: Stream) -> Result<*mut c_void, i32> {
    let mut topo = ptr::null_mut();
    match call!(cnQueueEndCapture(raw(stream) => *mut c_void, &raw mut topo => *mut *mut c_void) -> i32) {
        0 => Ok(topo),
        code => Err(code),
    }
}

#[test]
fn the_platform_is_found_by_name_and_says_what_it_can() {
    let _alone = alone();
    let device = Device::open(DriverChoice::MLU, 1, HostOptions::default()).unwrap();
    let (info, can) = (device.driver().info(), device.driver().capabilities());
    assert_eq!((info.platform, info.ordinal, info.total_bytes), ("mlu", 1, 64 << 30));
    assert_eq!((info.name.as_str(), device.driver().version().as_str()), ("Stand-in MLU", "2.15.5"));
    assert_eq!(
        (can.granularity, can.peers, can.register_host, can.unmap_each),
        (PAGE, Peers::NONE, false, true)
    );
    assert!(device.driver().graphs().is_none());
    let none = Error::InvalidDevice { driver: "mlu", ordinal: 9, count: 2 };
    assert_eq!(MluDriver::new(9).map(drop), Err(none));
    assert_eq!(MluDriver::count(), Ok(2));
}

#[test]
fn a_map_that_fails_half_way_leaves_nothing_or_says_what() {
    let _alone = alone();
    let before = STAND_IN.leftovers();
    let driver = open();
    let pages = [0, 1, 2].map(|_| Whole { page: driver.create(PAGE).unwrap(), bytes: PAGE });
    let base = driver.reserve(3 * PAGE).unwrap();
    // SAFETY: newly reserved, unmapped except for the reported pages; the pages are live.
    unsafe {
        // Map and access of the second page: calls are map, access, map, access.
        for nth in [3, 4] {
            STAND_IN.fail(nth, 100_100);
            let failed = driver.map(base, &pages, Peers::NONE).unwrap_err();
            assert!(
                matches!(failed.error, Error::OutOfMemory { requested: PAGE, device: 0, .. }),
                "{failed:?}"
            );
            assert_eq!(failed.mapped, 0);
        }
        // Access and its undo: the remaining mappings are reported.
        STAND_IN.fail(4, 200_000);
        STAND_IN.fail_second(5, 200_000);
        let failed = driver.map(base, &pages, Peers::NONE).unwrap_err();
        assert!(
            matches!(&failed.error, Error::Driver { call: "cnMemSetAccess", code: 200_000, name } if name == "CN_ERROR_UNKNOWN")
        );
        assert_eq!(failed.mapped, 2);
        driver.unmap(base, PAGE).unwrap();
        driver.unmap(base.plus(PAGE), PAGE).unwrap();
        driver.free_addresses(base, 3 * PAGE).unwrap();
        pages.iter().for_each(|page| driver.release(page.page).unwrap());
    }
    assert_eq!(STAND_IN.leftovers(), before);
}

#[test]
fn the_threads_context_is_as_it_was_and_none_is_none() {
    let _alone = alone();
    std::thread::spawn(|| {
        let driver = open();
        assert!(current().is_null());
        let event = driver.event_create().unwrap();
        driver.free_bytes().unwrap();
        STAND_IN.fail(1, 200_000);
        assert!(driver.create(PAGE).is_err());
        assert!(current().is_null());
        let mut other = ptr::null_mut();
        assert_eq!(call!(cnSharedContextAcquire(&raw mut other => *mut *mut c_void, 2 => u64) -> i32), 0);
        assert_eq!(call!(cnCtxSetCurrent(other => *mut c_void) -> i32), 0);
        driver.free_bytes().unwrap();
        // SAFETY: an event of this driver.
        unsafe { driver.event_destroy(event) }.unwrap();
        drop(driver);
        assert_eq!(current(), other);
        assert_eq!(call!(cnSharedContextRelease(2 => u64) -> i32), 0);
    })
    .join()
    .unwrap();
}

#[test]
fn nothing_that_the_driver_does_loses_a_capture() {
    let _alone = alone();
    let driver = open();
    let [captured, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let old = driver.event_create().unwrap();
    // SAFETY: both belong to the driver.
    unsafe { driver.event_record(old, other) }.unwrap();
    for mode in 0..3 {
        driver.capture_begins();
        begin(captured, mode);
        let page = Whole { page: driver.create(PAGE).unwrap(), bytes: PAGE };
        let base = driver.reserve(PAGE).unwrap();
        let (mut word, mut bytes) = ([0; 8], [0; 8]);
        // SAFETY: streams, events and memory of this driver.
        unsafe {
            driver.map(base, &[page], Peers::NONE).unwrap();
            driver.write(base, &7_u64.to_ne_bytes()).unwrap();
            driver.read(base, &mut word).unwrap();
            assert_eq!(u64::from_ne_bytes(word), 7);
            let event = driver.event_create().unwrap();
            driver.event_record(event, other).unwrap();
            driver.event_wait(event, other).unwrap();
            assert_eq!((driver.event_query(event), driver.event_synchronize(event)), (Ok(true), Ok(())));
            driver.fill(base, PAGE, 0x0102_0304, other).unwrap();
            driver.copy_to_host(base, bytes.as_mut_ptr(), 8, other).unwrap();
            assert_eq!(bytes, [4, 3, 2, 1, 4, 3, 2, 1]);
            driver.copy_from_host(base, word.as_ptr(), 8, other).unwrap();
            assert_eq!(driver.stream_state(captured), Ok(StreamState::Capturing));
            assert_eq!(driver.stream_state(other), Ok(StreamState::Ready));
            assert_eq!(driver.stream_state(Stream::LEGACY), Ok(StreamState::Capturing));
            driver.event_destroy(event).unwrap();
            driver.free_bytes().unwrap();
            driver.unmap(base, PAGE).unwrap();
            driver.free_addresses(base, PAGE).unwrap();
            driver.release(page.page).unwrap();
            let spare = driver.stream_create().unwrap();
            driver.stream_destroy(spare).unwrap();
        }
        let topo = end(captured).unwrap_or_else(|code| panic!("lost in mode {mode}: {code}"));
        driver.capture_ends();
        assert_eq!(call!(cnTaskTopoDestroy(topo => *mut c_void) -> i32), 0);
        // SAFETY: an event of this driver.
        unsafe {
            assert_eq!(driver.event_query(old), Ok(true));
            assert_eq!(driver.stream_state(Stream::LEGACY), Ok(StreamState::Ready));
        }
    }
    // SAFETY: of this driver, no longer used.
    unsafe {
        driver.event_destroy(old).unwrap();
        [captured, other].into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap());
    }
}

#[test]
fn a_lost_capture_is_one_until_it_is_ended() {
    let _alone = alone();
    let driver = open();
    let stream = driver.stream_create().unwrap();
    begin(stream, 0);
    // Outside the relaxed mode, an allocation invalidates the capture.
    let mut made = 0;
    let lost = call!(cnMemAddressReserve(&raw mut made => *mut u64, PAGE => u64, 0 => u64, 0 => u64, 0 => u64) -> i32);
    assert_eq!(lost, 100_360);
    // SAFETY: a stream of this driver.
    assert_eq!(unsafe { driver.stream_state(stream) }, Ok(StreamState::Capturing));
    assert_eq!(end(stream), Err(100_361));
    // SAFETY: as above.
    unsafe {
        assert_eq!(driver.stream_state(stream), Ok(StreamState::Ready));
        driver.stream_destroy(stream).unwrap();
    }
}

#[test]
fn a_notifier_that_was_never_placed_has_happened_and_nobody_asks_for_it() {
    let _alone = alone();
    let driver = open();
    let (stream, event) = (driver.stream_create().unwrap(), driver.event_create().unwrap());
    let calls =
        || [c"cnQueryNotifier", c"cnWaitNotifier", c"cnQueueWaitNotifier"].map(|name| STAND_IN.count(name));
    let before = calls();
    // SAFETY: both belong to this driver.
    unsafe {
        let asked =
            || (driver.event_query(event), driver.event_synchronize(event), driver.event_wait(event, stream));
        assert_eq!(asked(), (Ok(true), Ok(()), Ok(())));
        assert_eq!(calls(), before);
        STAND_IN.fail(1, 200_000);
        assert!(driver.event_record(event, stream).is_err());
        assert_eq!((asked(), calls()), ((Ok(true), Ok(()), Ok(())), before));
        driver.event_record(event, stream).unwrap();
        busy_once();
        assert_eq!(driver.event_query(event), Ok(false));
        assert_eq!(asked(), (Ok(true), Ok(()), Ok(())));
        let [queried, rest @ ..] = before;
        assert_eq!(calls(), [queried + 2, rest[0] + 1, rest[1] + 1]);
        driver.event_destroy(event).unwrap();
        driver.stream_destroy(stream).unwrap();
    }
}

#[test]
fn an_event_that_the_driver_keeps_lives_on() {
    let _alone = alone();
    let driver = open();
    let before = STAND_IN.leftovers();
    let (stream, event) = (driver.stream_create().unwrap(), driver.event_create().unwrap());
    STAND_IN.fail(1, 100_006);
    // SAFETY: both belong to this driver; the event is destroyed at the end.
    unsafe {
        assert!(driver.event_destroy(event).is_err());
        driver.event_record(event, stream).unwrap();
        assert_eq!(driver.event_query(event), Ok(true));
        driver.event_destroy(event).unwrap();
        driver.stream_destroy(stream).unwrap();
    }
    assert_eq!(STAND_IN.leftovers(), before);
    // A driver that was shut down has freed everything.
    for code in [100_002, 100_003, 100_201] {
        let page = driver.create(PAGE).unwrap();
        STAND_IN.fail(1, code);
        // SAFETY: a page of this driver; the first call has no effect.
        unsafe {
            driver.release(page).unwrap();
            driver.release(page).unwrap();
        }
    }
    assert_eq!(STAND_IN.leftovers(), before);
}

#[test]
fn what_is_not_documented_is_refused_in_words() {
    let _alone = alone();
    let driver = open();
    let event = driver.event_create().unwrap();
    let mut bytes = [0; 8];
    // SAFETY: refused before any driver call.
    let refused = unsafe {
        [
            driver.stream_state(Stream::PER_THREAD).map(drop),
            driver.event_record(event, Stream::PER_THREAD),
            driver.event_wait(event, Stream::PER_THREAD),
            driver.fill(Address(PAGE), PAGE, 0, Stream::PER_THREAD),
            driver.copy_to_host(Address(PAGE), bytes.as_mut_ptr(), 8, Stream::PER_THREAD),
            driver.copy_from_host(Address(PAGE), bytes.as_ptr(), 8, Stream::PER_THREAD),
        ]
    };
    for result in refused {
        assert!(matches!(result, Err(Error::InvalidArgument { value: 2, .. })), "{result:?}");
    }
    // SAFETY: memory of this stack; an event of this driver.
    unsafe {
        for refused in
            [driver.host_register(bytes.as_mut_ptr(), 8), driver.host_unregister(bytes.as_mut_ptr())]
        {
            let words = refused.unwrap_err().to_string();
            assert!(words.contains("registers host memory"), "{words}");
        }
        assert!(driver.grant(Address(PAGE), PAGE, Peers::one(1)).is_err());
        driver.event_destroy(event).unwrap();
    }
}

#[test]
fn lack_of_memory_has_two_numbers_and_that_of_addresses_is_another_error() {
    let _alone = alone();
    let driver = open();
    for code in [100_100, 100_101] {
        STAND_IN.fail(1, code);
        assert!(matches!(driver.create(PAGE), Err(Error::OutOfMemory { requested: PAGE, device: 0, .. })));
        STAND_IN.fail(1, code);
        assert_eq!(driver.reserve(PAGE), Err(Error::OutOfAddresses { requested: PAGE, device: 0 }));
    }
    STAND_IN.fail(1, 100_053);
    assert!(matches!(driver.create(PAGE), Err(Error::Driver { code: 100_053, .. })));
}

const CHILD: &str = "VMMGRAPH_MLU_TEST_CHILD";

fn child(what: &str, environment: &[(&str, &str)]) -> String {
    let output = child!("in_a_process_of_its_own")
        .env(CHILD, what)
        .envs(environment.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split(['<', '>'])
        .nth(1)
        .map(str::to_owned)
        .unwrap_or_else(|| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn in_a_process_of_its_own() {
    let Ok(what) = std::env::var(CHILD) else { return };
    if what != "nothing" {
        LazyLock::force(&STAND_IN);
    }
    let seen = match what.as_str() {
        "open" => MluDriver::new(0).map_or_else(|error| error.to_string(), |_| "opened".to_owned()),
        "count" => format!("{:?}", MluDriver::count()),
        "nothing" => MluDriver::count().unwrap_err().to_string(),
        _ => unreachable!(),
    };
    println!("<{seen}>");
}

#[test]
fn what_a_machine_lacks_is_said() {
    assert_eq!(child("count", &[("STANDIN_MLU_DEVICES", "0")]), "Ok(0)");
    assert_eq!(child("open", &[]), "opened");
    for vmm in ["none", "unknown"] {
        let refused = child("open", &[("STANDIN_MLU_VMM", vmm)]);
        assert!(refused.contains("no virtual memory management"), "{vmm}: {refused}");
    }
    let missing = child("nothing", &[("VMMGRAPH_MLU_LIBRARY", "libvmmgraph-none.so")]);
    assert!(missing.contains("mlu") && missing.contains("libvmmgraph-none.so"), "{missing}");
}

#[test]
fn spaces_work_on_it_and_give_everything_back() {
    let _alone = alone();
    let before = STAND_IN.leftovers();
    let device = Device::open(DriverChoice::MLU, 0, HostOptions::default()).unwrap();
    let driver = Arc::clone(device.driver());
    let stream = driver.stream_create().unwrap();
    {
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let space = arena.open_space().unwrap();
        begin(stream, 0);
        let [input, output] = [0, 1].map(|_| space.allocate(20 * MIB, stream).unwrap());
        // SAFETY: blocks of an open space; a stream of the driver.
        unsafe {
            driver.fill(input, 20 * MIB, 0x0101_0101, stream).unwrap();
            driver.fill(output, 20 * MIB, 0x0202_0202, stream).unwrap();
        }
        space.free(input).unwrap();
        let topo = end(stream).unwrap();
        space.seal().unwrap();
        let (mut entity, null) = (ptr::null_mut(), ptr::null_mut());
        let made = call!(cnTaskTopoInstantiate(
            &raw mut entity => *mut *mut c_void, topo => *mut c_void, null => *mut *mut c_void, ptr::null_mut() => *mut c_char,
            0 => usize
        ) -> i32);
        assert_eq!(made, 0);
        let launch = || {
            let invoked =
                call!(cnTaskTopoEntityInvoke(entity => *mut c_void, raw(stream) => *mut c_void) -> i32);
            assert_eq!(invoked, 0);
        };
        space.replay(stream, launch).unwrap();
        let mut word = [0; 4];
        // SAFETY: a live-out block of a sealed space.
        unsafe { driver.read(output.plus(20 * MIB - 4), &mut word) }.unwrap();
        assert_eq!(word, [2; 4]);
        // Poison, the second pattern, and a comparison of both outputs.
        // SAFETY: as above.
        let verified = unsafe { space.verify(stream, &[(output, 4096)], launch) };
        assert_eq!(verified.unwrap(), None);
        space.wait().unwrap();
        arena.trim().unwrap();
        assert_eq!(call!(cnTaskTopoEntityDestroy(entity => *mut c_void) -> i32), 0);
        assert_eq!(call!(cnTaskTopoDestroy(topo => *mut c_void) -> i32), 0);
        assert_eq!(arena.audit(), Ok(()));
    }
    // SAFETY: of this driver, no longer used.
    unsafe { driver.stream_destroy(stream) }.unwrap();
    drop((device, driver));
    assert_eq!(STAND_IN.leftovers(), before);
}

/// Memory belongs to the hardware device: any driver that opens the device reclaims it.
#[test]
fn what_a_closed_device_left_goes_when_it_is_opened_again_and_with_no_other() {
    let _alone = alone();
    let before = STAND_IN.leftovers();
    let opened = |ordinal| Device::open(DriverChoice::MLU, ordinal, HostOptions::default()).unwrap();
    let device = opened(0);
    let stream = device.driver().stream_create().unwrap();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    space.allocate(20 * MIB, stream).unwrap();
    space.seal().unwrap();
    space.replay(stream, || ()).unwrap();
    let driver = Arc::clone(device.driver());
    // Memory that the replay may still use.
    call!(standin_keep_busy(1 << 20 => u64) -> ());
    drop((space, arena, device));
    let left = STAND_IN.leftovers();
    assert!(left[0] > before[0] && left[2] > before[2], "{left:?}");
    drop(opened(0));
    assert_eq!(STAND_IN.leftovers(), left, "it is still in use");
    call!(standin_keep_busy(0 => u64) -> ());
    drop(opened(1));
    assert_eq!(STAND_IN.leftovers(), left, "another device's");
    drop(opened(0));
    // SAFETY: of this driver, no longer used.
    unsafe { driver.stream_destroy(stream) }.unwrap();
    drop(driver);
    assert_eq!(STAND_IN.leftovers(), before);
}

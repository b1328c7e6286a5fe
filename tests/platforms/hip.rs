//! The HIP driver keeps ROCm's rules, on a stand-in that enforces them (tests/standin-hip). Never
//! run on a device.
//!
//! Tests run one at a time: the stand-in, its version and its faults are process-wide.

use std::ffi::c_void;
use std::ptr;
use std::sync::{Arc, LazyLock, MutexGuard};

use vmmgraph::driver::{HipDriver, SharedDriver, StreamState, Whole};
use vmmgraph::pages::Fence;
use vmmgraph::{
    Address, Device, DeviceOptions, DriverChoice, ElasticOptions, Error, Handles, HostOptions, Options,
    Peers, SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::{MIB, Stamps, alone};

use crate::standin::StandIn;

const PAGE: u64 = 2 * MIB;
/// HIP 7.1 accepts mappings only from a reservation's first one on; 7.14 has no such limit.
const DEFECTIVE: i32 = 70_125_424;
const SOUND: i32 = 71_400_000;

static STAND_IN: LazyLock<StandIn> = LazyLock::new(|| StandIn::load("libstandin_hip.so"));

macro_rules! hip {
    ($name:ident($($arguments:tt)*)) => { call!($name($($arguments)*) -> i32) };
}

struct Alone(#[allow(dead_code, reason = "held")] MutexGuard<'static, ()>);

impl Alone {
    fn with_version(version: i32) -> Self {
        let alone = alone();
        set_version(version);
        hip!(hipInit(0 => u32));
        hip!(hipSetDevice(0 => i32));
        Self(alone)
    }
}

fn set_version(version: i32) {
    call!(standin_set_version(version => i32) -> ());
}

fn new_stream(flags: u32) -> u64 {
    let mut stream = ptr::null_mut();
    assert_eq!(hip!(hipStreamCreateWithFlags(&raw mut stream => *mut *mut c_void, flags => u32)), 0);
    stream as u64
}

fn as_stream(handle: u64) -> Stream {
    vmmgraph_testkit::stream(handle)
}

fn begin(stream: u64, mode: i32) {
    assert_eq!(hip!(hipStreamBeginCapture(stream as *mut c_void => *mut c_void, mode => i32)), 0);
}

fn end(stream: u64) -> i32 {
    let mut graph = ptr::null_mut();
    hip!(hipStreamEndCapture(stream as *mut c_void => *mut c_void, &raw mut graph => *mut *mut c_void))
}

fn everything(driver: &SharedDriver, on: Stream) {
    let mut host = vec![7_u8; PAGE as usize];
    // SAFETY: objects of this driver, used in order and freed once.
    unsafe {
        driver.free_bytes().unwrap();
        let base = driver.reserve(4 * PAGE).unwrap();
        let pages = [PAGE, 2 * PAGE].map(|bytes| Whole { page: driver.create(bytes).unwrap(), bytes });
        driver.map(base, &pages, Peers::NONE).unwrap();
        driver.fill(base, 2 * PAGE, 0x0505_0505, on).unwrap();
        driver.read(base, &mut host).unwrap();
        assert!(host.iter().all(|byte| *byte == 5));
        driver.write(base.plus(PAGE), &vec![9; PAGE as usize]).unwrap();
        driver.host_register(host.as_mut_ptr(), host.len()).unwrap();
        driver.copy_to_host(base.plus(PAGE), host.as_mut_ptr(), host.len(), on).unwrap();
        driver.copy_from_host(base, host.as_ptr(), host.len(), on).unwrap();
        driver.host_unregister(host.as_mut_ptr()).unwrap();
        assert!(host.iter().all(|byte| *byte == 9));
        let event = driver.event_create().unwrap();
        driver.event_record(event, on).unwrap();
        driver.event_wait(event, on).unwrap();
        assert!(driver.event_query(event).unwrap());
        driver.event_synchronize(event).unwrap();
        driver.event_destroy(event).unwrap();
        let own = driver.stream_create().unwrap();
        assert_eq!(driver.stream_state(own), Ok(StreamState::Ready));
        driver.stream_destroy(own).unwrap();
        driver.unmap(base, PAGE).unwrap();
        driver.unmap(base.plus(PAGE), 2 * PAGE).unwrap();
        pages.iter().for_each(|page| driver.release(page.page).unwrap());
        driver.free_addresses(base, 4 * PAGE).unwrap();
    }
}

#[test]
fn pages_are_not_for_other_processes_and_opening_says_so() {
    let _alone = Alone::with_version(SOUND);
    let shared = DeviceOptions { sharing: Handles::Fd, ..DeviceOptions::default() };
    let refused = Device::open(DriverChoice::HIP, 0, shared).map(drop);
    assert!(matches!(refused, Err(Error::InvalidArgument { what: "sharing", value: 1, .. })), "{refused:?}");
    assert_eq!(Device::open(DriverChoice::HIP, 0, HostOptions::default()).unwrap().sharing(), Handles::None);
}

#[test]
fn versions_before_6_2_are_refused_in_words() {
    let _alone = Alone::with_version(SOUND);
    for (version, refused) in [(1, "HIP 0.0"), (50_221_153, "HIP 5.2"), (60_132_831, "HIP 6.1")] {
        set_version(version);
        let error = HipDriver::new(0).map(drop).unwrap_err();
        assert!(matches!(error, Error::UnfitDriver { driver: "hip", .. }), "{error}");
        assert!(error.to_string().contains(refused), "{error}");
        assert!(HipDriver::count().is_err());
    }
    for version in [60_241_134, DEFECTIVE, SOUND] {
        set_version(version);
        assert_eq!(HipDriver::count(), Ok(2));
        let opened = Device::open(DriverChoice::HIP, 1, HostOptions::default()).unwrap();
        assert_eq!(opened.driver().info().platform, "hip");
    }
    let beyond = HipDriver::new(2).map(drop);
    assert_eq!(beyond, Err(Error::InvalidDevice { driver: "hip", ordinal: 2, count: 2 }));
}

#[test]
fn no_call_of_the_door_spoils_a_capture_whatever_its_mode() {
    for version in [60_241_134, DEFECTIVE, SOUND] {
        let _alone = Alone::with_version(version);
        let driver: SharedDriver = Arc::new(HipDriver::new(0).unwrap());
        let before = STAND_IN.leftovers();
        // GLOBAL, THREAD_LOCAL, RELAXED; then a blocking stream.
        for (mode, flags) in [(0, 1), (1, 1), (2, 1), (0, 0)] {
            let (captured, other) = (new_stream(flags), new_stream(1));
            begin(captured, mode);
            everything(&driver, as_stream(other));
            // SAFETY: live streams.
            let states = unsafe { [captured, other].map(|stream| driver.stream_state(as_stream(stream))) };
            assert_eq!(states, [Ok(StreamState::Capturing), Ok(StreamState::Ready)]);
            // SAFETY: as above. A captured blocking stream blocks the null stream (906).
            let null = unsafe { driver.stream_state(Stream::LEGACY) }.unwrap();
            assert_eq!(null, if flags == 0 { StreamState::Capturing } else { StreamState::Ready });
            assert_eq!(end(captured), 0, "mode {mode}: the capture is lost");
            // The forbidden call does invalidate captures here.
            begin(captured, mode);
            assert_eq!(hip!(hipDeviceSynchronize()), 900);
            assert_eq!(end(captured), 901);
            for stream in [captured, other] {
                assert_eq!(hip!(hipStreamDestroy(stream as *mut c_void => *mut c_void)), 0);
            }
        }
        assert_eq!(STAND_IN.leftovers(), before);
    }
}

#[test]
fn a_device_is_its_own_whatever_device_is_current() {
    let _alone = Alone::with_version(SOUND);
    let second: SharedDriver = Arc::new(HipDriver::new(1).unwrap());
    let first: SharedDriver = Arc::new(HipDriver::new(0).unwrap());
    let (free_first, free_second) = (first.free_bytes().unwrap(), second.free_bytes().unwrap());
    let own = second.stream_create().unwrap();
    everything(&second, own);
    let page = second.create(PAGE).unwrap();
    assert_eq!(first.free_bytes(), Ok(free_first));
    assert_eq!(second.free_bytes(), Ok(free_second - PAGE));
    let mut current = -1;
    assert_eq!(hip!(hipGetDevice(&raw mut current => *mut i32)), 0);
    assert_eq!(current, 0, "the thread has another device now");
    // SAFETY: of this driver, freed once.
    unsafe {
        second.release(page).unwrap();
        second.stream_destroy(own).unwrap();
    }
    assert_eq!(second.free_bytes(), Ok(free_second));
}

#[test]
fn access_is_given_as_each_version_takes_it() {
    let mapped = |driver: &SharedDriver, base: Address, place: u64, peers: Peers| {
        let page = Whole { page: driver.create(PAGE).unwrap(), bytes: PAGE };
        // SAFETY: a new page at a free place of a reservation; the mapping keeps the page.
        unsafe {
            let result = driver.map(base.plus(place * PAGE), &[page], peers).map_err(|stopped| {
                assert_eq!(stopped.mapped, 0);
                stopped.error
            });
            driver.release(page.page).unwrap();
            result
        }
    };
    for (version, sound) in [(60_241_134, true), (DEFECTIVE, false), (SOUND, true)] {
        let _alone = Alone::with_version(version);
        let driver: SharedDriver = Arc::new(HipDriver::new(0).unwrap());
        let before = STAND_IN.leftovers();
        let base = driver.reserve(8 * PAGE).unwrap();
        // Consecutive places, as spaces grow, and both sides of a gap.
        for place in [2, 3, 4, 1] {
            assert_eq!(mapped(&driver, base, place, Peers::NONE), Ok(()), "{version}, {place}");
        }
        let behind_a_gap = mapped(&driver, base, 6, Peers::NONE);
        if sound {
            assert_eq!(behind_a_gap, Ok(()));
        } else {
            assert!(matches!(behind_a_gap, Err(Error::UnfitDriver { .. })), "{behind_a_gap:?}");
            assert_eq!(STAND_IN.leftovers()[2], before[2] + 4, "what was refused is mapped");
        }
        // SAFETY: mapped above; all mapped memory is usable.
        unsafe {
            driver.write(base.plus(PAGE), &vec![3; 4 * PAGE as usize]).unwrap();
        }
        // Peers need access to single mappings.
        let peers = driver.capabilities().peers;
        assert_eq!(peers, if sound { Peers::one(1) } else { Peers::NONE });
        if sound {
            assert_eq!(mapped(&driver, base, 7, peers), Ok(()));
            // SAFETY: one whole mapping.
            unsafe { driver.grant(base.plus(6 * PAGE), PAGE, peers) }.unwrap();
            let granted: unsafe extern "C" fn(u64) -> u64 = STAND_IN.function("standin_granted");
            // SAFETY: the stand-in's signature.
            let granted = [4, 6, 7].map(|place| unsafe { granted(base.0 + place * PAGE) });
            assert_eq!(granted, [0, 2, 2]);
        }
        for place in if sound { vec![1, 2, 3, 4, 6, 7] } else { vec![1, 2, 3, 4] } {
            // SAFETY: one whole mapping each.
            unsafe { driver.unmap(base.plus(place * PAGE), PAGE) }.unwrap();
        }
        // SAFETY: no mappings remain.
        unsafe { driver.free_addresses(base, 8 * PAGE) }.unwrap();
        assert_eq!(STAND_IN.leftovers(), before);
    }
}

#[test]
fn a_runtime_that_is_gone_has_taken_everything_back() {
    let _alone = Alone::with_version(SOUND);
    let driver = HipDriver::new(0).unwrap();
    let driver: SharedDriver = Arc::new(driver);
    for code in [4, 709] {
        let page = driver.create(PAGE).unwrap();
        STAND_IN.fail(1, code);
        // SAFETY: a page of this driver; the first call has no effect.
        assert_eq!(unsafe { driver.release(page) }, Ok(()), "{code}");
        // SAFETY: as above.
        unsafe { driver.release(page) }.unwrap();
    }
    let page = driver.create(PAGE).unwrap();
    for code in [1, 2, 101] {
        STAND_IN.fail(1, code);
        // SAFETY: as above.
        let refused = unsafe { driver.release(page) };
        assert!(matches!(refused, Err(Error::Driver { code: found, .. }) if found == code), "{refused:?}");
    }
    // SAFETY: as above.
    unsafe { driver.release(page) }.unwrap();
    STAND_IN.fail(1, 2);
    assert!(matches!(driver.create(PAGE), Err(Error::OutOfMemory { requested: PAGE, device: 0, .. })));
    STAND_IN.fail(1, 2);
    assert_eq!(driver.reserve(PAGE), Err(Error::OutOfAddresses { requested: PAGE, device: 0 }));
}

#[test]
fn arenas_and_elastic_buffers_live_on_it() {
    for version in [60_241_134, DEFECTIVE, SOUND] {
        let _alone = Alone::with_version(version);
        let before = STAND_IN.leftovers();
        let driver: SharedDriver = Arc::new(HipDriver::new(0).unwrap());
        let stream = driver.stream_create().unwrap();
        let device = Device::with_driver(Arc::clone(&driver));
        let stamps = Stamps::new(&driver, stream);
        let arena = Arc::new(SharedVmmAllocator::new(&device, &Options::default()).unwrap());
        let captured = new_stream(1);
        let mut shapes = Vec::new();
        for large in [60 * MIB, 20 * MIB] {
            begin(captured, 0);
            let space = arena.open_space().unwrap();
            let on = as_stream(captured);
            let passing = space.allocate(large, on).unwrap();
            let kept = space.allocate_kept(3 * MIB, on).unwrap();
            space.free(passing).unwrap();
            space.seal().unwrap();
            assert_eq!(end(captured), 0, "memory that grows spoils the capture");
            shapes.push((space, kept));
        }
        for (turn, (space, kept)) in shapes.iter().enumerate() {
            space.replay(stream, || stamps.write(*kept, 3 * MIB, turn as u32)).unwrap().unwrap();
        }
        for (turn, (_, kept)) in shapes.iter().enumerate() {
            assert!(
                stamps.holds(*kept, 3 * MIB, turn as u32).unwrap(),
                "what a graph retains was overwritten"
            );
        }
        let buffer = device.elastic_buffer(64 * MIB, &ElasticOptions::default()).unwrap();
        buffer.commit(0..8 * MIB).unwrap();
        let far = buffer.commit(32 * MIB..40 * MIB);
        if version == DEFECTIVE {
            assert!(matches!(far, Err(Error::UnfitDriver { .. })), "{far:?}");
            buffer.audit().unwrap();
        } else {
            far.unwrap();
            stamps.write(Address(buffer.base().0 + 32 * MIB), 8 * MIB, 5).unwrap();
        }
        assert_eq!(device.pool().audit_idle(), Ok(()));
        assert_eq!(
            STAND_IN.leftovers()[..3],
            [device.stats().pages, device.stats().reservations, device.stats().mappings]
        );
        drop((shapes, buffer, arena, stamps));
        device.trim().unwrap();
        drop(device);
        // SAFETY: of this driver, destroyed once.
        unsafe { driver.stream_destroy(stream) }.unwrap();
        assert_eq!(STAND_IN.leftovers(), before);
    }
}

#[test]
fn no_page_is_exchanged_under_a_graph() {
    let _alone = Alone::with_version(SOUND);
    let device = Device::with_driver(Arc::new(HipDriver::new(0).unwrap()));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let refused = |error: Option<Error>| match error {
        Some(Error::NotOffered { platform: "hip", device: 0, what }) => what,
        other => panic!("{other:?}"),
    };
    let first = arena.open_space().unwrap();
    first.allocate(3 * MIB, Stream::LEGACY).unwrap();
    // A page mapped by this space alone becomes private as a whole.
    assert_eq!(first.seal().unwrap().retained_bytes, 16 * MIB);
    let second = arena.open_space().unwrap();
    let passing = second.allocate(40 * MIB, Stream::LEGACY).unwrap();
    second.free(passing).unwrap();
    second.seal().unwrap();
    let third = arena.open_space().unwrap();
    let stays = third.allocate(3 * MIB, Stream::LEGACY).unwrap();
    let problem = refused(third.seal().err());
    assert!(problem.contains("a kept one"), "{problem}");
    third.free(stays).unwrap();
    third.allocate_kept(3 * MIB, Stream::LEGACY).unwrap();
    third.seal().unwrap();
    let problem = refused(arena.pause(Fence::default()).err());
    assert!(problem.contains("its arenas stay"), "{problem}");
    third.replay(Stream::LEGACY, || ()).unwrap();
    arena.audit().unwrap();
}

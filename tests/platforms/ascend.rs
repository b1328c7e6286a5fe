//! The Ascend driver over the stand-in libascendcl.so, which invalidates a capture or fails a call
//! for each broken ACL rule.

use std::ffi::c_void;
use std::process::Command;
use std::ptr;
use std::sync::{Arc, LazyLock, MutexGuard};

use vmmgraph::driver::{AscendDriver, Driver, Event, Memory, StreamState, Timeline, Transfer, Whole};
use vmmgraph::{
    Address, Device, DriverChoice, Error, HostOptions, Options, Peers, Policy, RegionOptions,
    SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::child;

use crate::standin::StandIn;

const MIB: u64 = 1 << 20;
const PAGE: u64 = 2 * MIB;
const HALF: usize = PAGE as usize / 2;

static STAND_IN: LazyLock<StandIn> = LazyLock::new(|| {
    StandIn::load(
        &std::env::var("VMMGRAPH_ASCEND_LIBRARY").unwrap_or_else(|_| "libstandin_ascend.so".to_owned()),
    )
});

/// Serializes tests. The thread has no current context.
fn alone() -> MutexGuard<'static, ()> {
    LazyLock::force(&STAND_IN);
    vmmgraph_testkit::alone()
}

fn open() -> AscendDriver {
    AscendDriver::new(0).unwrap()
}

fn current() -> Result<i32, i32> {
    let mut device = -1;
    match call!(aclrtGetDevice(&raw mut device => *mut i32) -> i32) {
        0 => Ok(device),
        code => Err(code),
    }
}

fn raw(stream: Stream) -> *mut c_void {
    stream.raw() as *mut c_void
}

fn begin(stream: Stream, mode: i32) {
    assert_eq!(call!(aclmdlRICaptureBegin(raw(stream) => *mut c_void, mode => i32) -> i32), 0);
}

fn end(stream: Stream) -> Result<*mut c_void, i32> {
    let mut model = ptr::null_mut();
    match call!(aclmdlRICaptureEnd(raw(stream) => *mut c_void, &raw mut model => *mut *mut c_void) -> i32) {
        0 => Ok(model),
        code => Err(code),
    }
}

struct Range<'a> {
    driver: &'a AscendDriver,
    base: Address,
    bytes: u64,
    pages: Vec<Whole>,
}

impl<'a> Range<'a> {
    fn of(driver: &'a AscendDriver, sizes: &[u64]) -> Self {
        let pages: Vec<Whole> =
            sizes.iter().map(|bytes| Whole { page: driver.create(*bytes).unwrap(), bytes: *bytes }).collect();
        let bytes = sizes.iter().sum();
        let base = driver.reserve(bytes).unwrap();
        // SAFETY: newly reserved and unmapped; the pages are live.
        unsafe { driver.map(base, &pages, Peers::NONE) }.unwrap();
        Self { driver, base, bytes, pages }
    }

    fn read(&self, offset: u64) -> u64 {
        let mut word = [0; 8];
        // SAFETY: mapped.
        unsafe { self.driver.read(self.base.plus(offset), &mut word) }.unwrap();
        u64::from_ne_bytes(word)
    }

    fn write(&self, offset: u64, word: u64) {
        // SAFETY: mapped, and used only here.
        unsafe { self.driver.write(self.base.plus(offset), &word.to_ne_bytes()) }.unwrap();
    }

    fn end(self) {
        let mut at = self.base;
        // SAFETY: no longer used.
        unsafe {
            for page in &self.pages {
                self.driver.unmap(at, page.bytes).unwrap();
                at = at.plus(page.bytes);
            }
            self.driver.free_addresses(self.base, self.bytes).unwrap();
            self.pages.iter().for_each(|page| self.driver.release(page.page).unwrap());
        }
    }
}

#[test]
fn the_platform_is_found_by_name_and_says_what_it_can() {
    let _alone = alone();
    let device = Device::open(DriverChoice::Named("ascend"), 1, HostOptions::default()).unwrap();
    let (info, can) = (device.driver().info(), device.driver().capabilities());
    assert_eq!((info.platform, info.ordinal, info.total_bytes), ("ascend", 1, 64 << 30));
    assert_eq!(
        (can.granularity, can.peers, can.register_host, can.unmap_each),
        (PAGE, Peers::NONE, true, true)
    );
    let none = Error::InvalidDevice { driver: "ascend", ordinal: 9, count: 2 };
    assert_eq!(AscendDriver::new(9).map(drop), Err(none));
    assert_eq!(AscendDriver::count(), Ok(2));
}

#[test]
fn one_page_shows_at_two_addresses() {
    let _alone = alone();
    let driver = open();
    let range = Range::of(&driver, &[PAGE]);
    let again = driver.reserve(PAGE).unwrap();
    // SAFETY: newly reserved; the page is live.
    unsafe { driver.map(again, &range.pages, Peers::NONE) }.unwrap();
    range.write(16, 77);
    let mut word = [0; 8];
    // SAFETY: mapped; not used after the unmap.
    unsafe {
        driver.read(again.plus(16), &mut word).unwrap();
        driver.unmap(again, PAGE).unwrap();
        driver.free_addresses(again, PAGE).unwrap();
    }
    assert_eq!(u64::from_ne_bytes(word), 77);
    range.end();
}

#[test]
fn a_failure_has_the_results_name_and_the_runtimes_words() {
    let _alone = alone();
    let driver = open();
    let range = Range::of(&driver, &[PAGE]);
    // SAFETY: not a first address, so the call has no effect.
    let failed = unsafe { driver.unmap(range.base.plus(PAGE / 2), PAGE / 2) }.unwrap_err();
    assert!(matches!(&failed, Error::Driver { call: "aclrtUnmapMem", code: 107_000, .. }), "{failed}");
    assert!(failed.to_string().contains("ACL_ERROR_RT_PARAM_INVALID: parameter invalid"), "{failed}");
    range.end();
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
        STAND_IN.fail(3, 207_001);
        let failed = driver.map(base, &pages, Peers::NONE).unwrap_err();
        assert!(matches!(failed.error, Error::OutOfMemory { requested: PAGE, device: 0, .. }), "{failed:?}");
        assert_eq!(failed.mapped, 0);
        STAND_IN.fail(3, 507_899);
        // Free bytes are not queried, so the next call unmaps the second page.
        STAND_IN.fail_second(4, 507_899);
        let failed = driver.map(base, &pages, Peers::NONE).unwrap_err();
        assert_eq!(failed.mapped, 2);
        driver.unmap(base, PAGE).unwrap();
        driver.unmap(base.plus(PAGE), PAGE).unwrap();
        driver.free_addresses(base, 3 * PAGE).unwrap();
        pages.iter().for_each(|page| driver.release(page.page).unwrap());
    }
    assert_eq!(STAND_IN.leftovers(), before);
}

#[test]
fn the_threads_context_is_as_it_was_unless_there_was_none() {
    let _alone = alone();
    std::thread::spawn(|| {
        assert_eq!(current(), Err(107_002));
        let driver = open();
        let range = Range::of(&driver, &[PAGE]);
        assert_eq!(current(), Ok(0), "there is no way back to none");
        assert_eq!(call!(aclrtSetDevice(1 => i32) -> i32), 0);
        range.write(0, 9);
        let event = driver.event_create().unwrap();
        let other = AscendDriver::new(0).unwrap();
        STAND_IN.fail(1, 507_899);
        assert!(driver.event_create().is_err());
        assert_eq!((range.read(0), current()), (9, Ok(1)));
        // SAFETY: an event of this driver.
        unsafe { driver.event_destroy(event) }.unwrap();
        range.end();
        drop(other);
        assert_eq!(current(), Ok(1));
    })
    .join()
    .unwrap();
}

fn recorded(driver: &AscendDriver, stream: Stream) -> Event {
    let event = driver.event_create().unwrap();
    // SAFETY: both belong to the driver.
    unsafe { driver.event_record(event, stream) }.unwrap();
    event
}

#[test]
fn nothing_that_the_driver_does_loses_a_capture() {
    let _alone = alone();
    let driver = open();
    let [captured, other] = [0, 1].map(|_| driver.stream_create().unwrap());
    let old = recorded(&driver, other);
    for mode in 0..3 {
        driver.capture_begins();
        begin(captured, mode);
        let range = Range::of(&driver, &[PAGE, PAGE]);
        range.write(0, 1);
        assert_eq!(range.read(0), 1);
        let mut bytes = [0; 8];
        // SAFETY: streams, events and memory of this driver.
        unsafe {
            let event = recorded(&driver, other);
            driver.event_wait(event, other).unwrap();
            assert_eq!(driver.event_query(event), Ok(false), "nobody may ask");
            assert_eq!(driver.event_synchronize(old), Err(Error::DeviceCapturing { device: 0 }));
            assert_eq!(driver.may_wait(), Err(Error::DeviceCapturing { device: 0 }));
            driver.fill(range.base, PAGE, 0x0102_0304, other).unwrap();
            driver.fill(range.base, PAGE, 0, other).unwrap();
            driver.copy_to_host(range.base, bytes.as_mut_ptr(), 8, other).unwrap();
            assert_eq!(driver.stream_state(captured), Ok(StreamState::Capturing));
            assert_eq!(driver.stream_state(other), Ok(StreamState::Ready));
            assert_eq!(driver.stream_state(Stream::LEGACY), Ok(StreamState::Capturing));
            driver.event_destroy(event).unwrap();
            let spare = driver.stream_create().unwrap();
            driver.stream_destroy(spare).unwrap();
        }
        driver.free_bytes().unwrap();
        range.end();
        let model = end(captured).unwrap_or_else(|code| panic!("lost in mode {mode}: {code}"));
        driver.capture_ends();
        assert_eq!(call!(aclmdlRIDestroy(model => *mut c_void) -> i32), 0);
        // SAFETY: an event of this driver.
        unsafe {
            assert_eq!((driver.event_query(old), driver.event_synchronize(old)), (Ok(true), Ok(())));
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
fn a_wait_that_began_before_a_capture_goes_on() {
    let _alone = alone();
    let driver = open();
    let stream = driver.stream_create().unwrap();
    let event = recorded(&driver, stream);
    driver.wait_begins();
    driver.capture_begins();
    // SAFETY: an event of this driver.
    unsafe {
        assert_eq!(
            (driver.may_wait(), driver.event_query(event), driver.event_synchronize(event)),
            (Ok(()), Ok(true), Ok(()))
        );
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(driver.may_wait().is_err(), "another thread did not begin"));
        });
        driver.wait_ends();
        assert!(driver.may_wait().is_err());
        driver.capture_ends();
        driver.event_destroy(event).unwrap();
        driver.stream_destroy(stream).unwrap();
    }
}

#[test]
fn a_lost_capture_is_one_until_it_is_ended() {
    let _alone = alone();
    let driver = open();
    let stream = driver.stream_create().unwrap();
    begin(stream, 0);
    let lost = call!(aclrtSynchronizeDevice() -> i32);
    assert_ne!(lost, 0);
    // SAFETY: a stream of this driver.
    assert_eq!(unsafe { driver.stream_state(stream) }, Ok(StreamState::Capturing));
    assert_eq!(end(stream), Err(507_903));
    // SAFETY: as above.
    unsafe {
        assert_eq!(driver.stream_state(stream), Ok(StreamState::Ready));
        driver.stream_destroy(stream).unwrap();
    }
}

#[test]
fn a_chip_that_captures_nothing_has_streams_that_are_ready() {
    let _alone = alone();
    let driver = open();
    let stream = driver.stream_create().unwrap();
    STAND_IN.fail(1, 207_000);
    // SAFETY: a stream of this driver.
    unsafe {
        assert_eq!(driver.stream_state(stream), Ok(StreamState::Ready));
        STAND_IN.fail(1, 107_000);
        assert!(driver.stream_state(stream).is_err());
        driver.stream_destroy(stream).unwrap();
    }
}

#[test]
fn there_is_no_default_stream_for_each_thread() {
    let _alone = alone();
    let driver = open();
    let event = driver.event_create().unwrap();
    // SAFETY: refused before any driver call.
    let refused = unsafe {
        [
            driver.stream_state(Stream::PER_THREAD).map(drop),
            driver.event_record(event, Stream::PER_THREAD),
            driver.event_wait(event, Stream::PER_THREAD),
            driver.fill(Address(PAGE), PAGE, 0, Stream::PER_THREAD),
        ]
    };
    for result in refused {
        assert!(matches!(result, Err(Error::InvalidArgument { value: 2, .. })), "{result:?}");
    }
    // SAFETY: an event of this driver.
    unsafe { driver.event_destroy(event) }.unwrap();
}

#[test]
fn streams_are_used_again_and_never_destroyed_while_the_device_is_open() {
    let _alone = alone();
    let driver = open();
    let (made, destroyed) = (STAND_IN.count(c"aclrtCreateStream"), STAND_IN.count(c"aclrtDestroyStream"));
    for _ in 0..5 {
        let pair = [0, 1].map(|_| driver.stream_create().unwrap());
        // SAFETY: of this driver, no longer used.
        unsafe { pair.into_iter().for_each(|stream| driver.stream_destroy(stream).unwrap()) };
    }
    assert_eq!(
        (STAND_IN.count(c"aclrtCreateStream"), STAND_IN.count(c"aclrtDestroyStream")),
        (made + 2, destroyed)
    );
    call!(standin_streams_busy(true => bool) -> ());
    let third = driver.stream_create().unwrap();
    // SAFETY: as above.
    unsafe { driver.stream_destroy(third) }.unwrap();
    call!(standin_streams_busy(false => bool) -> ());
    assert_eq!(STAND_IN.count(c"aclrtCreateStream"), made + 3);
    STAND_IN.fail(1, 507_899);
    assert!(driver.stream_create().is_err(), "nothing is made where one cannot be asked for");
    let fresh = open();
    STAND_IN.fail(1, 207_008);
    let none = fresh.stream_create().unwrap_err().to_string();
    assert!(none.contains("aclrtCreateStream") && none.contains("NO_STREAM_RESOURCE"), "{none}");
    drop(driver);
    assert_eq!(
        (STAND_IN.count(c"aclrtCreateStream"), STAND_IN.count(c"aclrtDestroyStream")),
        (made + 4, destroyed + 3)
    );
}

#[test]
fn what_is_given_back_to_a_runtime_that_is_gone_is_given_back() {
    let _alone = alone();
    let driver = open();
    let event = driver.event_create().unwrap();
    for code in [100_001, 107_002] {
        STAND_IN.fail(1, code);
        // SAFETY: an event of this driver; the call has no effect.
        unsafe { driver.event_destroy(event) }.unwrap();
    }
    STAND_IN.fail(1, 107_000);
    // SAFETY: as above.
    unsafe {
        assert!(driver.event_destroy(event).is_err());
        driver.event_destroy(event).unwrap();
    }
}

#[test]
fn lack_of_memory_has_three_numbers_and_that_of_addresses_is_another_error() {
    let _alone = alone();
    let driver = open();
    for code in [207_001, 207_018, 200_000] {
        STAND_IN.fail(1, code);
        assert!(matches!(driver.create(PAGE), Err(Error::OutOfMemory { requested: PAGE, device: 0, .. })));
        STAND_IN.fail(1, code);
        assert_eq!(driver.reserve(PAGE), Err(Error::OutOfAddresses { requested: PAGE, device: 0 }));
    }
    let longer = driver.capabilities().largest_reservation + PAGE;
    assert_eq!(driver.reserve(longer), Err(Error::OutOfAddresses { requested: longer, device: 0 }));
}

/// Fills two pages with a pattern of different bytes and checks every word; returns the 32-bit
/// fills.
fn filled() -> u64 {
    let driver = open();
    let stream = driver.stream_create().unwrap();
    let range = Range::of(&driver, &[PAGE, PAGE]);
    let before = STAND_IN.count(c"aclrtMemsetD32Async");
    let mut bytes = vec![0; HALF];
    // SAFETY: mapped, and used only here.
    unsafe {
        for (offset, len, value) in
            [(0, 2 * PAGE, 0x2a2a_a2a2_u32), (PAGE, 12, 7), (PAGE - 64 * 1024, 192 * 1024, 0x0102_0304)]
        {
            driver.fill(range.base.plus(offset), len, value, stream).unwrap();
            let looked = &mut bytes[..(len as usize).min(HALF)];
            driver.read(range.base.plus(offset + len - looked.len() as u64), looked).unwrap();
            assert!(looked.chunks_exact(4).all(|word| word == value.to_ne_bytes()), "{value:#x}");
        }
        driver.read(range.base.plus(PAGE + 128 * 1024), &mut bytes[..4]).unwrap();
        assert_eq!(bytes[..4], 0x2a2a_a2a2_u32.to_ne_bytes());
        driver.stream_destroy(stream).unwrap();
    }
    range.end();
    STAND_IN.count(c"aclrtMemsetD32Async") - before
}

#[test]
fn thirty_two_bits_are_repeated_by_the_runtime_where_it_can() {
    let _alone = alone();
    assert_eq!(filled(), 3);
    let driver = open();
    let range = Range::of(&driver, &[PAGE]);
    let before = STAND_IN.count(c"aclrtMemsetD32Async");
    // SAFETY: mapped, and used only here.
    unsafe { driver.fill(range.base, PAGE, 0xffff_ffff, Stream::LEGACY) }.unwrap();
    assert_eq!(
        (range.read(PAGE - 8), STAND_IN.count(c"aclrtMemsetD32Async")),
        (u64::MAX, before),
        "four equal bytes are a byte"
    );
    range.end();
}

const CHILD: &str = "VMMGRAPH_ASCEND_TEST_CHILD";

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
    LazyLock::force(&STAND_IN);
    let seen = match what.as_str() {
        "fill" => filled().to_string(),
        "open" => AscendDriver::new(0).map_or_else(|error| error.to_string(), |_| "opened".to_owned()),
        "count" => format!("{:?}", AscendDriver::count()),
        "register" => open().capabilities().register_host.to_string(),
        _ => unreachable!(),
    };
    println!("<{seen}>");
}

/// Copies the stand-in with one function renamed, as in an older CANN.
fn without(name: &str, folder: &std::path::Path) -> String {
    let output = Command::new("/bin/sh")
        .args(["-c", "for d in $(echo $LD_LIBRARY_PATH | tr : ' '); do [ -e $d/libstandin_ascend.so ] && echo $d/libstandin_ascend.so && break; done"])
        .output()
        .unwrap();
    let file = String::from_utf8(output.stdout).unwrap();
    let mut bytes = std::fs::read(file.trim()).unwrap();
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    let mut renamed = 0;
    for at in 0..bytes.len() - wanted.len() {
        if bytes[at..].starts_with(&wanted) {
            bytes[at + 1] = b'x';
            renamed += 1;
        }
    }
    assert!(renamed > 0, "{name} is not in {file}");
    let older = folder.join(format!("older-{name}.so"));
    std::fs::write(&older, bytes).unwrap();
    older.to_str().unwrap().to_owned()
}

#[test]
fn an_older_runtime_lacks_what_is_optional_and_nothing_else() {
    let folder = std::env::temp_dir().join(format!("vmmgraph-ascend-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let library = |name| without(name, &folder);
    let (fill, register, map) =
        (library("aclrtMemsetD32Async"), library("aclrtHostRegisterV2"), library("aclrtMapMem"));
    assert_eq!(child("fill", &[("VMMGRAPH_ASCEND_LIBRARY", &fill)]), "0", "copied");
    assert_eq!(child("fill", &[("STANDIN_ASCEND_D32", "refuse")]), "3", "refused, and then copied");
    assert_eq!(child("register", &[("VMMGRAPH_ASCEND_LIBRARY", &register)]), "false");
    let missing = child("open", &[("VMMGRAPH_ASCEND_LIBRARY", &map)]);
    assert!(missing.contains("ascend") && missing.contains("aclrtMapMem"), "{missing}");
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn a_machine_without_devices_has_none_and_caches_must_not_be_gone_around() {
    assert_eq!(child("count", &[("STANDIN_ASCEND_DEVICES", "0")]), "Ok(0)");
    let soc = ("STANDIN_ASCEND_SOC", "Ascend910B4");
    let refused = child("open", &[soc]);
    assert!(refused.contains("AUTO_USE_UC_MEMORY=0"), "{refused}");
    assert_eq!(child("open", &[soc, ("AUTO_USE_UC_MEMORY", "0")]), "opened");
}

#[test]
fn spaces_and_regions_work_on_it_by_name() {
    let _alone = alone();
    let before = STAND_IN.leftovers();
    let device = Device::open(DriverChoice::Named("ascend"), 0, HostOptions::default()).unwrap();
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
        let model = end(stream).unwrap();
        space.seal().unwrap();
        let launch = || call!(aclmdlRIExecuteAsync(model => *mut c_void, raw(stream) => *mut c_void) -> i32);
        assert_eq!(space.replay(stream, launch).unwrap(), 0);
        let mut word = [0; 4];
        // SAFETY: a live-out block of a sealed space.
        unsafe { driver.read(output.plus(20 * MIB - 4), &mut word) }.unwrap();
        assert_eq!(word, [2; 4]);
        // Poison, the second pattern, and a comparison of both outputs.
        // SAFETY: as above.
        let verified = unsafe { space.verify(stream, &[(output, 4096)], || assert_eq!(launch(), 0)) };
        assert_eq!(verified.unwrap(), None);
        space.wait().unwrap();
        arena.trim().unwrap();
        assert_eq!(call!(aclmdlRIDestroy(model => *mut c_void) -> i32), 0);
        assert_eq!(arena.audit(), Ok(()));
    }
    let region = device
        .region("weights", RegionOptions { policy: Policy::Backup, ..RegionOptions::default() })
        .unwrap();
    let at = region.allocate(9 * MIB, stream).unwrap();
    // SAFETY: a live block of a resident region.
    unsafe { driver.fill(at, 9 * MIB, 0x1234_5678, stream) }.unwrap();
    assert_eq!(region.pause(vmmgraph::pages::Fence::default()).unwrap().complete(), Ok(()));
    region.resume(std::time::Duration::ZERO).unwrap();
    let mut word = [0; 4];
    // SAFETY: as above.
    unsafe { driver.read(at.plus(9 * MIB - 4), &mut word) }.unwrap();
    assert_eq!(word, 0x1234_5678_u32.to_ne_bytes());
    region.free(at).unwrap();
    drop(region);
    // SAFETY: no longer used.
    unsafe { driver.stream_destroy(stream) }.unwrap();
    device.trim().unwrap();
    drop(device);
    drop(driver);
    assert_eq!(STAND_IN.leftovers(), before);
}

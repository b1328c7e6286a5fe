//! Requirements of the library on a CUDA driver, one test each, without code of the library.
//!
//! `cargo test` runs them on the stand-in libcuda.so. For a real GPU, run the test binary itself
//! (cargo would load the stand-in) with `VMMGRAPH_TEST_DRIVER=real`. A difference between the two
//! is a bug of the stand-in.

use std::ffi::{CStr, c_void};
use std::io::Write;
use std::ptr;
use std::sync::{MutexGuard, OnceLock};

use cudarc::driver::sys::{self, CUevent, CUgraph, CUgraphExec, CUstream, CUstreamCaptureMode};
use vmmgraph_testkit::alone;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
/// The expected granularity, checked by a test.
const GRANULE: u64 = 2 * MIB;

const SUCCESS: i32 = 0;
const INVALID_VALUE: i32 = 1;
const OUT_OF_MEMORY: i32 = 2;
const INVALID_CONTEXT: i32 = 201;
const INVALID_HANDLE: i32 = 400;
const NOT_SUPPORTED: i32 = 801;
const CAPTURE_UNSUPPORTED: i32 = 900;
const CAPTURE_INVALIDATED: i32 = 901;
const CAPTURE_ISOLATION: i32 = 905;
const CAPTURED_EVENT: i32 = 907;

const MODES: [CUstreamCaptureMode; 3] = [
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
];

macro_rules! code {
    ($function:ident($($argument:expr),*)) => {{
        // SAFETY: pointer arguments are good; the driver checks the rest, which is under test.
        unsafe { sys::$function($($argument),*) as i32 }
    }};
}

macro_rules! ok {
    ($function:ident($($argument:expr),*)) => {
        assert_eq!(code!($function($($argument),*)), SUCCESS, stringify!($function))
    };
}

fn real() -> bool {
    std::env::var("VMMGRAPH_TEST_DRIVER").is_ok_and(|driver| driver == "real")
}

/// Prints a line past the test harness, which hides output of passing tests.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

fn has_symbol(name: &CStr) -> bool {
    // SAFETY: looked up, never called.
    unsafe { sys::culib().get::<unsafe extern "C" fn()>(name.to_bytes_with_nul()).is_ok() }
}

/// Checks the loaded library: only the stand-in has `standin_calls`.
fn check_driver() {
    // SAFETY: only checks whether the library loads.
    let present = unsafe { sys::is_culib_present() };
    assert!(present, "no libcuda.so: use `cargo test`, which puts the stand-in on LD_LIBRARY_PATH");
    match (real(), has_symbol(c"standin_calls")) {
        (true, true) => {
            panic!("a real GPU was asked for, but the stand-in was loaded: run the test binary, not cargo")
        }
        (false, false) => {
            panic!("the stand-in was to be loaded, not a real driver: set VMMGRAPH_TEST_DRIVER=real for that")
        }
        _ => {}
    }
}

/// Returns the first device's primary context, retained until the process ends, as torch does.
fn context() -> sys::CUcontext {
    static CONTEXT: OnceLock<usize> = OnceLock::new();
    let address = *CONTEXT.get_or_init(|| {
        let started = code!(cuInit(0));
        if started != SUCCESS {
            say(&format!("SKIPPED conformance: cuInit returned {started}"));
            panic!("cuInit returned {started}: there is no device to test");
        }
        let mut context = ptr::null_mut();
        ok!(cuDevicePrimaryCtxRetain(&raw mut context, 0));
        context as usize
    });
    address as sys::CUcontext
}

fn leftovers() -> Option<[u64; 4]> {
    let mut left = [0; 4];
    // SAFETY: the stand-in's signature; writes four numbers.
    unsafe {
        let ask = sys::culib().get::<unsafe extern "C" fn(*mut u64)>(b"standin_leftovers\0").ok()?;
        ask(left.as_mut_ptr());
    }
    Some(left)
}

/// Exclusive use of the device, with the context current on this thread.
struct Gpu {
    before: Option<[u64; 4]>,
    _turn: MutexGuard<'static, ()>,
}

impl Gpu {
    fn open() -> Self {
        let turn = alone();
        check_driver();
        let gpu = Self { before: leftovers(), _turn: turn };
        gpu.make_current();
        gpu
    }

    fn make_current(&self) {
        ok!(cuCtxSetCurrent(context()));
    }

    fn free_and_total(&self) -> (u64, u64) {
        let (mut free, mut total) = (0, 0);
        ok!(cuMemGetInfo_v2(&raw mut free, &raw mut total));
        (free as u64, total as u64)
    }

    fn stream(&self) -> Stream {
        let mut stream = ptr::null_mut();
        ok!(cuStreamCreate(&raw mut stream, 1)); // CU_STREAM_NON_BLOCKING
        Stream(stream)
    }

    fn event(&self) -> Event {
        let mut event = ptr::null_mut();
        ok!(cuEventCreate(&raw mut event, 2)); // CU_EVENT_DISABLE_TIMING
        Event(event)
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            assert_eq!(leftovers(), self.before, "pages, reservations, mappings and events left");
        }
    }
}

struct Event(CUevent);

impl Drop for Event {
    fn drop(&mut self) {
        code!(cuEventDestroy_v2(self.0));
    }
}

/// A stream that does not wait for the legacy stream.
struct Stream(CUstream);

impl Stream {
    fn synchronise(&self) {
        ok!(cuStreamSynchronize(self.0));
    }

    fn begin(&self, mode: CUstreamCaptureMode) {
        ok!(cuStreamBeginCapture_v2(self.0, mode));
    }

    fn end(&self) -> Graph {
        Graph::new(self.end_capture())
    }

    fn end_capture(&self) -> CUgraph {
        let mut graph: CUgraph = ptr::null_mut();
        ok!(cuStreamEndCapture(self.0, &raw mut graph));
        graph
    }

    fn abandon(&self) -> i32 {
        let mut graph: CUgraph = ptr::null_mut();
        let code = code!(cuStreamEndCapture(self.0, &raw mut graph));
        if !graph.is_null() {
            ok!(cuGraphDestroy(graph));
        }
        code
    }

    fn fill(&self, at: u64, len: u64, value: u32) -> i32 {
        code!(cuMemsetD32Async(at, value, len as usize / 4, self.0))
    }

    fn copy(&self, to: u64, from: u64, len: u64) -> i32 {
        code!(cuMemcpyDtoDAsync_v2(to, from, len as usize, self.0))
    }

    fn status(&self) -> i32 {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        ok!(cuStreamIsCapturing(self.0, &raw mut status));
        status as i32
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let mut graph: CUgraph = ptr::null_mut();
            code!(cuStreamEndCapture(self.0, &raw mut graph));
        }
        code!(cuStreamDestroy_v2(self.0));
    }
}

struct Graph(CUgraphExec);

impl Graph {
    fn new(graph: CUgraph) -> Self {
        let mut exec: CUgraphExec = ptr::null_mut();
        ok!(cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        ok!(cuGraphDestroy(graph));
        Self(exec)
    }

    fn replay(&self, stream: &Stream) {
        ok!(cuGraphLaunch(self.0, stream.0));
        stream.synchronise();
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        code!(cuGraphExecDestroy(self.0));
    }
}

fn location() -> sys::CUmemLocation {
    location_of(0)
}

fn location_of(device: i32) -> sys::CUmemLocation {
    sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

fn device_memory() -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        location: location(),
        win32HandleMetaData: ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}

fn reserve(len: u64) -> u64 {
    let mut base = 0;
    ok!(cuMemAddressReserve(&raw mut base, len as usize, 0, 0, 0));
    base
}

fn free_addresses(base: u64, len: u64) {
    ok!(cuMemAddressFree(base, len as usize));
}

fn try_create(len: u64) -> Result<u64, i32> {
    let mut page = 0;
    let prop = device_memory();
    match code!(cuMemCreate(&raw mut page, len as usize, &raw const prop, 0)) {
        SUCCESS => Ok(page),
        code => Err(code),
    }
}

fn create(len: u64) -> u64 {
    try_create(len).unwrap_or_else(|code| panic!("cuMemCreate of {len} bytes returned {code}"))
}

fn release(page: u64) {
    ok!(cuMemRelease(page));
}

fn try_map(at: u64, len: u64, offset: u64, page: u64) -> i32 {
    code!(cuMemMap(at, len as usize, offset as usize, page, 0))
}

fn try_set_access(at: u64, len: u64) -> i32 {
    try_grant(at, len, 0)
}

fn try_grant(at: u64, len: u64, device: i32) -> i32 {
    let read_write = sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let access = sys::CUmemAccessDesc { location: location_of(device), flags: read_write };
    code!(cuMemSetAccess(at, len as usize, &raw const access, 1))
}

fn map(at: u64, len: u64, page: u64) {
    assert_eq!(try_map(at, len, 0, page), SUCCESS, "cuMemMap");
    assert_eq!(try_set_access(at, len), SUCCESS, "cuMemSetAccess");
}

fn try_unmap(at: u64, len: u64) -> i32 {
    code!(cuMemUnmap(at, len as usize))
}

fn unmap(at: u64, len: u64) {
    assert_eq!(try_unmap(at, len), SUCCESS, "cuMemUnmap");
}

fn access(at: u64) -> u64 {
    access_of(0, at)
}

fn access_of(device: i32, at: u64) -> u64 {
    let mut flags = u64::MAX;
    let asked = location_of(device);
    ok!(cuMemGetAccess(&raw mut flags, &raw const asked, at));
    flags
}

fn retain_at(at: u64) -> u64 {
    let mut page = 0;
    ok!(cuMemRetainAllocationHandle(&raw mut page, at as *mut c_void));
    page
}

fn fill(stream: &Stream, at: u64, len: u64, value: u32) {
    assert_eq!(stream.fill(at, len, value), SUCCESS, "cuMemsetD32Async");
    stream.synchronise();
}

#[track_caller]
fn assert_holds(at: u64, len: u64, value: u32) {
    let mut words = vec![!value; len as usize / 4];
    ok!(cuMemcpyDtoH_v2(words.as_mut_ptr().cast::<c_void>(), at, len as usize));
    if let Some(wrong) = words.iter().position(|word| *word != value) {
        panic!("word {wrong} of {at:#x} is {:#x} instead of {value:#x}", words[wrong]);
    }
}

/// Asserts a refusal with an unspecified code, and prints the real driver's code.
#[track_caller]
fn assert_refused(what: &str, code: i32) {
    if real() {
        say(&format!("observed: {what}: {code}"));
    }
    assert!([INVALID_VALUE, NOT_SUPPORTED].contains(&code), "{what}: {code}");
}

/// Ends a capture after a refused call. The capture may be valid or invalidated.
#[track_caller]
fn end_after_refusal(what: &str, stream: &Stream) {
    let code = stream.abandon();
    if real() {
        say(&format!("observed: cuStreamEndCapture after {what}: {code}"));
    }
    assert!([SUCCESS, CAPTURE_INVALIDATED].contains(&code), "cuStreamEndCapture after {what}: {code}");
    assert_eq!(stream.status(), 0);
}

// ---- the driver and its numbers ----

#[test]
fn a_driver_is_the_one_asked_for() {
    let _gpu = Gpu::open();
    if real() {
        say("conformance runs on a real driver");
        assert!(!has_symbol(c"standin_calls"));
    } else {
        assert!(has_symbol(c"standin_calls"));
    }
    let mut version = 0;
    ok!(cuDriverGetVersion(&raw mut version));
    assert!(version >= 12080, "driver API {version}, but the bindings are those of 12.8");
    let mut supported = 0;
    let attribute = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
    ok!(cuDeviceGetAttribute(&raw mut supported, attribute, 0));
    assert_eq!(supported, 1);
}

#[test]
fn granularity_is_2_mib_minimum_and_recommended() {
    let _gpu = Gpu::open();
    let prop = device_memory();
    for option in [
        sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM,
        sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
    ] {
        let mut granularity = 0;
        ok!(cuMemGetAllocationGranularity(&raw mut granularity, &raw const prop, option));
        assert_eq!(granularity as u64, GRANULE, "{option:?}");
    }
}

#[test]
fn some_calls_need_a_current_context() {
    let _gpu = Gpu::open();
    let codes = std::thread::spawn(|| {
        let (mut free, mut total, mut event) = (0, 0, ptr::null_mut());
        [
            code!(cuMemGetInfo_v2(&raw mut free, &raw mut total)),
            code!(cuCtxSynchronize()),
            code!(cuEventCreate(&raw mut event, 2)),
        ]
    });
    assert_eq!(codes.join().unwrap(), [INVALID_CONTEXT; 3]);
}

#[test]
fn a_green_context_has_a_default_stream_of_its_own_and_takes_the_primary_ones_events() {
    let gpu = Gpu::open();
    let contexts = crate::green::GreenContext::several(2);
    let event = gpu.event();
    let (mut primary, mut device) = (ptr::null_mut(), -1);
    ok!(cuCtxGetCurrent(&raw mut primary));
    let legacy: CUstream = ptr::null_mut();
    let per_thread = ptr::without_provenance_mut(2);
    ok!(cuEventRecord(event.0, legacy));
    for green in &contexts {
        green.current(|| {
            let mut current = ptr::null_mut();
            ok!(cuCtxGetCurrent(&raw mut current));
            assert_ne!(current, primary);
            ok!(cuCtxGetDevice(&raw mut device));
            assert_eq!(device, 0);
            for stream in [legacy, green.stream()] {
                ok!(cuStreamWaitEvent(stream, event.0, 0));
                ok!(cuEventRecord(event.0, stream));
            }
            assert_eq!(code!(cuEventRecord(event.0, per_thread)), INVALID_HANDLE);
        });
    }
    let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut graph: CUgraph = ptr::null_mut();
    contexts[0].current(|| {
        ok!(cuStreamBeginCapture_v2(legacy, CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED));
        ok!(cuStreamIsCapturing(legacy, &raw mut status));
        assert_eq!(status as i32, 1);
    });
    let statuses = [
        code!(cuStreamIsCapturing(legacy, &raw mut status)),
        status as i32,
        contexts[1].current(|| code!(cuStreamIsCapturing(legacy, &raw mut status))),
        status as i32,
    ];
    contexts[0].current(|| ok!(cuStreamEndCapture(legacy, &raw mut graph)));
    ok!(cuGraphDestroy(graph));
    assert_eq!(statuses, [SUCCESS, 0, SUCCESS, 0]);
}

// ---- pages and mappings ----

#[test]
fn part_of_a_page_cannot_be_mapped() {
    let _gpu = Gpu::open();
    let (page, base) = (create(2 * GRANULE), reserve(2 * GRANULE));
    assert_eq!(try_map(base, GRANULE, 0, page), NOT_SUPPORTED);
    free_addresses(base, 2 * GRANULE);
    release(page);
}

#[test]
fn a_page_cannot_be_mapped_at_an_offset() {
    let _gpu = Gpu::open();
    let (page, base) = (create(2 * GRANULE), reserve(2 * GRANULE));
    assert_eq!(try_map(base, GRANULE, GRANULE, page), NOT_SUPPORTED);
    free_addresses(base, 2 * GRANULE);
    release(page);
}

#[test]
fn unaligned_maps_are_refused() {
    let _gpu = Gpu::open();
    let (page, base) = (create(GRANULE), reserve(2 * GRANULE));
    assert_refused("map at an address that is no multiple", try_map(base + 4096, GRANULE, 0, page));
    assert_refused("map of a length that is no multiple", try_map(base, GRANULE / 2, 0, page));
    free_addresses(base, 2 * GRANULE);
    release(page);
}

#[test]
fn pages_of_a_length_that_is_no_multiple_are_refused() {
    let _gpu = Gpu::open();
    let code = try_create(GRANULE + 4096).err().unwrap_or(SUCCESS);
    assert_refused("create of a length that is no multiple", code);
}

#[test]
fn one_page_shows_the_same_contents_at_many_addresses() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let page = create(GRANULE);
    let (twice, once, other) = (reserve(4 * GRANULE), reserve(GRANULE), reserve(GRANULE));
    let aliases = [twice, twice + 2 * GRANULE, once, other];
    for at in aliases {
        map(at, GRANULE, page);
    }
    for (writer, value) in aliases.into_iter().zip(0xA0..) {
        fill(&stream, writer, GRANULE, value);
        for reader in aliases {
            assert_holds(reader, GRANULE, value);
        }
    }
    for at in aliases {
        unmap(at, GRANULE);
    }
    release(page);
    for (base, len) in [(twice, 4 * GRANULE), (once, GRANULE), (other, GRANULE)] {
        free_addresses(base, len);
    }
}

#[test]
fn one_page_can_be_mapped_512_times() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, base) = (create(GRANULE), reserve(512 * GRANULE));
    for i in 0..512 {
        map(base + i * GRANULE, GRANULE, page);
    }
    fill(&stream, base + 17 * GRANULE, GRANULE, 0x17);
    assert_holds(base, GRANULE, 0x17);
    assert_holds(base + 511 * GRANULE, GRANULE, 0x17);
    unmap(base, 512 * GRANULE);
    release(page);
    free_addresses(base, 512 * GRANULE);
}

#[test]
fn mapping_over_a_mapping_is_refused_and_harms_nothing() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, other, wide) = (create(GRANULE), create(GRANULE), create(2 * GRANULE));
    let base = reserve(3 * GRANULE);
    map(base + GRANULE, GRANULE, page);
    fill(&stream, base + GRANULE, GRANULE, 0x51);
    assert_refused("map over the same place", try_map(base + GRANULE, GRANULE, 0, other));
    assert_refused("map over the end of the range", try_map(base, 2 * GRANULE, 0, wide));
    assert_refused("map over the beginning of the range", try_map(base + GRANULE, 2 * GRANULE, 0, wide));
    assert_holds(base + GRANULE, GRANULE, 0x51);
    unmap(base + GRANULE, GRANULE);
    [page, other, wide].into_iter().for_each(release);
    free_addresses(base, 3 * GRANULE);
}

#[test]
fn one_unmap_covers_several_whole_mappings() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (small, large) = (create(GRANULE), create(3 * GRANULE));
    let base = reserve(5 * GRANULE);
    map(base, GRANULE, small);
    map(base + GRANULE, 3 * GRANULE, large);
    map(base + 4 * GRANULE, GRANULE, small);
    unmap(base, 5 * GRANULE);
    map(base, 3 * GRANULE, large);
    map(base + 3 * GRANULE, GRANULE, small);
    fill(&stream, base, 4 * GRANULE, 0x77);
    assert_holds(base, 4 * GRANULE, 0x77);
    unmap(base, 4 * GRANULE);
    release(small);
    release(large);
    free_addresses(base, 5 * GRANULE);
}

#[test]
fn part_of_a_mapping_cannot_be_unmapped() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, base) = (create(2 * GRANULE), reserve(2 * GRANULE));
    map(base, 2 * GRANULE, page);
    fill(&stream, base, 2 * GRANULE, 0x33);
    assert_refused("unmap of the first part", try_unmap(base, GRANULE));
    assert_refused("unmap of the last part", try_unmap(base + GRANULE, GRANULE));
    assert_holds(base, 2 * GRANULE, 0x33);
    unmap(base, 2 * GRANULE);
    release(page);
    free_addresses(base, 2 * GRANULE);
}

#[test]
fn access_has_to_be_granted_after_every_map() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    for round in 0..2 {
        assert_eq!(try_map(base, GRANULE, 0, page), SUCCESS);
        assert_eq!(access(base), 0, "before cuMemSetAccess, round {round}");
        assert_eq!(try_set_access(base, GRANULE), SUCCESS);
        assert_eq!(access(base), 3, "after cuMemSetAccess, round {round}");
        fill(&stream, base, GRANULE, round);
        assert_holds(base, GRANULE, round);
        unmap(base, GRANULE);
    }
    release(page);
    free_addresses(base, GRANULE);
}

#[test]
fn one_set_access_spans_several_mappings() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (small, large) = (create(GRANULE), create(2 * GRANULE));
    let base = reserve(4 * GRANULE);
    for (at, len, page) in
        [(base, GRANULE, small), (base + GRANULE, 2 * GRANULE, large), (base + 3 * GRANULE, GRANULE, small)]
    {
        assert_eq!(try_map(at, len, 0, page), SUCCESS);
    }
    assert_eq!(try_set_access(base, 4 * GRANULE), SUCCESS);
    for i in 0..4 {
        assert_eq!(access(base + i * GRANULE), 3, "granule {i}");
    }
    fill(&stream, base + GRANULE, 2 * GRANULE, 0x1A);
    assert_holds(base + GRANULE, 2 * GRANULE, 0x1A);
    unmap(base, 4 * GRANULE);
    release(small);
    release(large);
    free_addresses(base, 4 * GRANULE);
}

/// Access of each device is granted separately, and ends with the mapping.
#[test]
fn a_second_device_is_given_access_beside_the_first() {
    let _gpu = Gpu::open();
    let (mut devices, mut can) = (0, 0);
    ok!(cuDeviceGetCount(&raw mut devices));
    if devices < 2 || code!(cuDeviceCanAccessPeer(&raw mut can, 1, 0)) != SUCCESS || can == 0 {
        say("SKIPPED: needs two devices that reach each other's memory");
        return;
    }
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    for order in [[0, 1], [1, 0]] {
        assert_eq!(try_map(base, GRANULE, 0, page), SUCCESS);
        assert_eq!([0, 1].map(|device| access_of(device, base)), [0, 0]);
        assert_eq!(try_grant(base, GRANULE, order[0]), SUCCESS);
        assert_eq!((access_of(order[0], base), access_of(order[1], base)), (3, 0));
        assert_eq!(try_grant(base, GRANULE, order[1]), SUCCESS);
        assert_eq!([0, 1].map(|device| access_of(device, base)), [3, 3]);
        unmap(base, GRANULE);
    }
    assert_refused("access to what is not mapped", try_grant(base, GRANULE, 1));
    release(page);
    free_addresses(base, GRANULE);
}

// ---- lives of pages and addresses ----

/// Visible in the free memory despite the driver's own use.
const VISIBLE: u64 = 256 * MIB;
const NOISE: u64 = 32 * MIB;

#[test]
fn freed_memory_returns() {
    let gpu = Gpu::open();
    let (before, total) = gpu.free_and_total();
    assert!(before <= total);
    let page = create(VISIBLE);
    let (during, _) = gpu.free_and_total();
    assert!(during + VISIBLE <= before + NOISE, "{before} bytes free before, {during} with {VISIBLE} taken");
    release(page);
    let (after, _) = gpu.free_and_total();
    assert!(after + NOISE >= before, "{before} bytes free before, {after} after");
}

#[test]
fn a_released_page_keeps_its_memory_until_its_last_unmap() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (before, _) = gpu.free_and_total();
    let (page, base) = (create(VISIBLE), reserve(2 * VISIBLE));
    map(base, VISIBLE, page);
    map(base + VISIBLE, VISIBLE, page);
    release(page);
    fill(&stream, base, GRANULE, 0x5E);
    assert_holds(base + VISIBLE, GRANULE, 0x5E);
    unmap(base, VISIBLE);
    assert_holds(base + VISIBLE, GRANULE, 0x5E);
    let (mapped, _) = gpu.free_and_total();
    assert!(mapped + VISIBLE <= before + NOISE, "{before} bytes free before, {mapped} while still mapped");
    unmap(base + VISIBLE, VISIBLE);
    let (after, _) = gpu.free_and_total();
    assert!(after + NOISE >= before, "{before} bytes free before, {after} after the last unmap");
    free_addresses(base, 2 * VISIBLE);
}

#[test]
fn a_page_is_retained_back_from_an_address_of_it() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, base) = (create(2 * GRANULE), reserve(4 * GRANULE));
    let (at, elsewhere) = (base, base + 2 * GRANULE);
    map(at, 2 * GRANULE, page);
    let again = retain_at(at + GRANULE + 4096);
    assert_eq!(again, page);
    release(again);
    fill(&stream, at, 2 * GRANULE, 0x88);
    release(page);
    let page = retain_at(at);
    map(elsewhere, 2 * GRANULE, page);
    unmap(at, 2 * GRANULE);
    assert_holds(elsewhere, 2 * GRANULE, 0x88);
    unmap(elsewhere, 2 * GRANULE);
    release(page);
    free_addresses(base, 4 * GRANULE);
}

#[test]
fn out_of_memory_is_reported_and_nothing_sticks() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    for _ in 0..2 {
        let (free, _) = gpu.free_and_total();
        assert_eq!(try_create((free + GIB).next_multiple_of(GRANULE)).err(), Some(OUT_OF_MEMORY));
        ok!(cuCtxSynchronize());
        let (page, base) = (create(GRANULE), reserve(GRANULE));
        map(base, GRANULE, page);
        fill(&stream, base, GRANULE, 0x0F);
        assert_holds(base, GRANULE, 0x0F);
        unmap(base, GRANULE);
        release(page);
        free_addresses(base, GRANULE);
    }
}

#[test]
fn thousands_of_reservations_are_to_be_had() {
    let _gpu = Gpu::open();
    let mut bases: Vec<u64> = (0..2000).map(|_| reserve(GIB)).collect();
    bases.sort_unstable();
    for (i, base) in bases.iter().enumerate() {
        assert!(base.is_multiple_of(GRANULE), "reservation {i} at {base:#x}");
    }
    assert!(bases.windows(2).all(|pair| pair[0] + GIB <= pair[1]), "reservations overlap");
    for base in bases {
        free_addresses(base, GIB);
    }
}

#[test]
fn addresses_are_given_back_by_exactly_their_reservation() {
    let _gpu = Gpu::open();
    let base = reserve(4 * GRANULE);
    for (what, at, len) in [
        ("address free of less", base, 2 * GRANULE),
        ("address free of more", base, 6 * GRANULE),
        ("address free from the middle", base + GRANULE, 3 * GRANULE),
    ] {
        assert_refused(what, code!(cuMemAddressFree(at, len as usize)));
    }
    free_addresses(base, 4 * GRANULE);
}

// ---- capture and replay ----

#[test]
fn memset_nodes_are_captured_over_unmapped_addresses_but_instantiated_over_mapped_ones_only() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let base = reserve(2 * GRANULE);
    stream.begin(MODES[0]);
    assert_eq!(stream.fill(base, GRANULE, 0xC0), SUCCESS);
    assert_eq!(stream.fill(base + GRANULE, GRANULE, 0xC1), SUCCESS);
    let captured = stream.end_capture();
    let mut exec: CUgraphExec = ptr::null_mut();
    // Seen on an H200, driver 580.159.04, 2026-11-21.
    assert_eq!(code!(cuGraphInstantiateWithFlags(&raw mut exec, captured, 0)), INVALID_VALUE);
    let page = create(2 * GRANULE);
    map(base, 2 * GRANULE, page);
    let graph = Graph::new(captured);
    graph.replay(&stream);
    assert_holds(base, GRANULE, 0xC0);
    assert_holds(base + GRANULE, GRANULE, 0xC1);
    drop(graph);
    unmap(base, 2 * GRANULE);
    release(page);
    free_addresses(base, 2 * GRANULE);
}

#[test]
fn memcpy_nodes_are_captured_over_mapped_addresses_only() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    let (page, base) = (create(GRANULE), reserve(2 * GRANULE));
    let (mapped, unmapped) = (base, base + GRANULE);
    map(mapped, GRANULE, page);
    for (what, to, from) in [("memcpy to", unmapped, mapped), ("memcpy from", mapped, unmapped)] {
        stream.begin(MODES[0]);
        let what = format!("captured {what} unmapped addresses");
        assert_refused(&what, stream.copy(to, from, GRANULE));
        end_after_refusal(&what, &stream);
    }
    fill(&stream, mapped, GRANULE, 0);
    stream.begin(MODES[0]);
    assert_eq!(stream.fill(mapped, GRANULE / 2, 0xD1), SUCCESS);
    assert_eq!(stream.copy(mapped + GRANULE / 2, mapped, GRANULE / 2), SUCCESS);
    let graph = stream.end();
    assert_holds(mapped, GRANULE, 0);
    graph.replay(&stream);
    assert_holds(mapped, GRANULE, 0xD1);
    drop(graph);
    unmap(mapped, GRANULE);
    release(page);
    free_addresses(base, 2 * GRANULE);
}

/// Replays a graph that fills `[base, base + GRANULE)` with `value`, on several pages in turn.
fn replay_on_exchanged_pages(stream: &Stream, graph: &Graph, base: u64, value: u32) {
    let side = reserve(2 * GRANULE);
    let (first, second) = (create(GRANULE), create(GRANULE));
    map(side, GRANULE, first);
    map(side + GRANULE, GRANULE, second);
    let on_first = (first, side, side + GRANULE);
    let on_second = (second, side + GRANULE, side);
    for (page, written, spared) in [on_first, on_second, on_first] {
        fill(stream, side, 2 * GRANULE, 0);
        map(base, GRANULE, page);
        graph.replay(stream);
        assert_holds(written, GRANULE, value);
        assert_holds(spared, GRANULE, 0);
        unmap(base, GRANULE);
    }
    unmap(side, 2 * GRANULE);
    release(first);
    release(second);
    let page = create(GRANULE);
    map(side, GRANULE, page);
    fill(stream, side, GRANULE, 0);
    map(base, GRANULE, page);
    graph.replay(stream);
    assert_holds(side, GRANULE, value);
    unmap(base, GRANULE);
    unmap(side, GRANULE);
    release(page);
    free_addresses(side, 2 * GRANULE);
}

#[test]
fn a_replay_writes_the_page_that_is_mapped_then() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    // The first page is destroyed before the next ones are mapped, as in use.
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    map(base, GRANULE, page);
    stream.begin(MODES[0]);
    assert_eq!(stream.fill(base, GRANULE, 0xEE), SUCCESS);
    let graph = stream.end();
    graph.replay(&stream);
    assert_holds(base, GRANULE, 0xEE);
    unmap(base, GRANULE);
    release(page);
    replay_on_exchanged_pages(&stream, &graph, base, 0xEE);
    drop(graph);
    free_addresses(base, GRANULE);
}

/// `fill(at, value, count)`: one thread a word.
const FILL_PTX: &CStr = c"
.version 7.0
.target sm_70
.address_size 64
.visible .entry fill(.param .u64 param_at, .param .u32 param_value, .param .u32 param_count)
{
    .reg .pred %p<2>;
    .reg .b32 %r<7>;
    .reg .b64 %rd<5>;
    ld.param.u64 %rd1, [param_at];
    ld.param.u32 %r1, [param_value];
    ld.param.u32 %r2, [param_count];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.u32 %r6, %r3, %r4, %r5;
    setp.ge.u32 %p1, %r6, %r2;
    @%p1 bra $done;
    cvta.to.global.u64 %rd2, %rd1;
    mul.wide.u32 %rd3, %r6, 4;
    add.u64 %rd4, %rd2, %rd3;
    st.global.u32 [%rd4], %r1;
$done:
    ret;
}
";

#[test]
fn kernel_nodes_are_captured_over_unmapped_addresses_and_follow_the_mapping() {
    let gpu = Gpu::open();
    if !real() {
        say("SKIPPED kernel nodes: the stand-in runs no kernels");
        return;
    }
    let stream = gpu.stream();
    let (mut module, mut kernel) = (ptr::null_mut(), ptr::null_mut());
    ok!(cuModuleLoadData(&raw mut module, FILL_PTX.as_ptr().cast()));
    ok!(cuModuleGetFunction(&raw mut kernel, module, c"fill".as_ptr()));
    let base = reserve(GRANULE);
    let (mut at, mut value, mut count) = (base, 0xFAu32, GRANULE as u32 / 4);
    let mut parameters: [*mut c_void; 3] =
        [(&raw mut at).cast(), (&raw mut value).cast(), (&raw mut count).cast()];
    stream.begin(MODES[0]);
    ok!(cuLaunchKernel(
        kernel,
        count.div_ceil(256),
        1,
        1,
        256,
        1,
        1,
        0,
        stream.0,
        parameters.as_mut_ptr(),
        ptr::null_mut()
    ));
    let graph = stream.end();
    replay_on_exchanged_pages(&stream, &graph, base, value);
    drop(graph);
    free_addresses(base, GRANULE);
    ok!(cuModuleUnload(module));
}

fn live_a_page() {
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    map(base, GRANULE, page);
    assert_eq!(access(base), 3);
    unmap(base, GRANULE);
    release(page);
    free_addresses(base, GRANULE);
}

#[test]
fn mapping_works_on_the_thread_that_captures() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    for mode in MODES {
        let base = reserve(GRANULE);
        stream.begin(mode);
        live_a_page();
        let page = create(GRANULE);
        map(base, GRANULE, page);
        assert_eq!(stream.fill(base, GRANULE, 0x61), SUCCESS, "{mode:?}");
        assert_eq!(stream.status(), 1, "{mode:?}");
        let graph = stream.end();
        graph.replay(&stream);
        assert_holds(base, GRANULE, 0x61);
        drop(graph);
        unmap(base, GRANULE);
        release(page);
        free_addresses(base, GRANULE);
    }
}

#[test]
fn mapping_works_on_a_thread_while_another_captures() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    for mode in MODES {
        stream.begin(mode);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                ok!(cuCtxSetCurrent(context()));
                for _ in 0..8 {
                    live_a_page();
                }
            });
        });
        assert_eq!(stream.status(), 1, "{mode:?}");
        assert_eq!(stream.abandon(), SUCCESS, "{mode:?}");
    }
}

#[test]
fn a_stream_says_whether_it_is_captured() {
    let gpu = Gpu::open();
    let (stream, other) = (gpu.stream(), gpu.stream());
    assert_eq!(stream.status(), 0);
    stream.begin(MODES[0]);
    assert_eq!((stream.status(), other.status()), (1, 0));
    assert_eq!(stream.abandon(), SUCCESS);
    assert_eq!(stream.status(), 0);
}

#[test]
fn waiting_for_a_captured_stream_is_refused_and_spoils_the_capture() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    stream.begin(MODES[0]);
    assert_eq!(code!(cuStreamSynchronize(stream.0)), CAPTURE_UNSUPPORTED);
    assert_eq!(stream.status(), 2);
    assert_eq!(stream.abandon(), CAPTURE_INVALIDATED);
    assert_eq!(stream.status(), 0);
}

#[test]
fn waiting_for_a_captured_event_is_refused() {
    let gpu = Gpu::open();
    let (stream, event) = (gpu.stream(), gpu.event());
    stream.begin(MODES[0]);
    ok!(cuEventRecord(event.0, stream.0));
    let code = code!(cuEventSynchronize(event.0));
    if real() {
        say(&format!("observed: cuEventSynchronize of a captured event: {code}"));
    }
    assert!([CAPTURE_UNSUPPORTED, CAPTURED_EVENT].contains(&code), "cuEventSynchronize: {code}");
    end_after_refusal("cuEventSynchronize of its event", &stream);
}

#[test]
fn waiting_for_the_device_is_refused_while_a_stream_is_captured() {
    let gpu = Gpu::open();
    let stream = gpu.stream();
    stream.begin(MODES[0]);
    assert_eq!(code!(cuCtxSynchronize()), CAPTURE_UNSUPPORTED);
    end_after_refusal("cuCtxSynchronize", &stream);
    ok!(cuCtxSynchronize());
}

#[test]
fn a_captured_stream_cannot_wait_for_an_event_from_outside() {
    let gpu = Gpu::open();
    let (stream, other, event) = (gpu.stream(), gpu.stream(), gpu.event());
    ok!(cuEventRecord(event.0, other.0));
    stream.begin(MODES[0]);
    assert_eq!(code!(cuStreamWaitEvent(stream.0, event.0, 0)), CAPTURE_ISOLATION);
    assert_eq!(stream.abandon(), CAPTURE_INVALIDATED);
}

#[test]
fn a_stream_that_waits_for_a_captured_event_joins_the_capture() {
    let gpu = Gpu::open();
    let (stream, other) = (gpu.stream(), gpu.stream());
    let (fork, join) = (gpu.event(), gpu.event());
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    map(base, GRANULE, page);
    fill(&stream, base, GRANULE, 0);
    stream.begin(MODES[0]);
    ok!(cuEventRecord(fork.0, stream.0));
    ok!(cuStreamWaitEvent(other.0, fork.0, 0));
    assert_eq!(other.status(), 1);
    assert_eq!(other.fill(base, GRANULE, 0xF0), SUCCESS);
    ok!(cuEventRecord(join.0, other.0));
    ok!(cuStreamWaitEvent(stream.0, join.0, 0));
    let graph = stream.end();
    assert_eq!(other.status(), 0);
    assert_holds(base, GRANULE, 0);
    graph.replay(&stream);
    assert_holds(base, GRANULE, 0xF0);
    drop(graph);
    unmap(base, GRANULE);
    release(page);
    free_addresses(base, GRANULE);
}

#[test]
fn the_capture_mode_is_exchanged_per_thread() {
    let _gpu = Gpu::open();
    let exchange = |mut mode: CUstreamCaptureMode| {
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut mode));
        mode
    };
    let [global, _, relaxed] = MODES;
    assert_eq!(exchange(relaxed), global);
    std::thread::scope(|scope| {
        scope.spawn(|| assert_eq!(exchange(global), global, "a new thread begins with GLOBAL"));
    });
    assert_eq!(exchange(global), relaxed);
}

// ---- host memory ----

struct HostBytes(Vec<u8>, usize);

impl HostBytes {
    fn new(len: usize) -> Self {
        let bytes = vec![0; len + 4096];
        let skip = (bytes.as_ptr() as usize).next_multiple_of(4096) - bytes.as_ptr() as usize;
        Self(bytes, skip)
    }

    fn at(&mut self, offset: usize) -> *mut c_void {
        self.0[self.1 + offset..].as_mut_ptr().cast()
    }
}

/// `CU_MEMHOSTREGISTER_PORTABLE`
const PORTABLE: u32 = 1;

#[test]
fn registered_and_plain_host_memory_is_copied_in_a_streams_order() {
    let gpu = Gpu::open();
    let (stream, event) = (gpu.stream(), gpu.event());
    const LEN: u64 = 8 * MIB;
    let (page, base) = (create(LEN), reserve(LEN));
    map(base, LEN, page);
    let mut host = HostBytes::new(LEN as usize);
    for registered in [false, true] {
        if registered {
            ok!(cuMemHostRegister_v2(host.at(0), LEN as usize, PORTABLE));
        }
        for value in [7_u32, 8] {
            assert_eq!(stream.fill(base, LEN, value), SUCCESS);
            ok!(cuMemcpyDtoHAsync_v2(host.at(0), base, LEN as usize, stream.0));
            assert_eq!(stream.fill(base, LEN, 0), SUCCESS);
            ok!(cuMemcpyHtoDAsync_v2(base + LEN / 2, host.at(4096), LEN as usize / 2, stream.0));
            ok!(cuEventRecord(event.0, stream.0));
            ok!(cuEventSynchronize(event.0));
            assert_holds(base, LEN / 2, 0);
            assert_holds(base + LEN / 2, LEN / 2, value);
        }
    }
    ok!(cuMemHostUnregister(host.at(0)));
    unmap(base, LEN);
    release(page);
    free_addresses(base, LEN);
}

#[test]
fn host_memory_is_registered_once_and_unregistered_once() {
    let _gpu = Gpu::open();
    const ALREADY_REGISTERED: i32 = 712;
    const NOT_REGISTERED: i32 = 713;
    let mut host = HostBytes::new(MIB as usize);
    assert_eq!(code!(cuMemHostUnregister(host.at(0))), NOT_REGISTERED);
    ok!(cuMemHostRegister_v2(host.at(0), MIB as usize, PORTABLE));
    assert_eq!(code!(cuMemHostRegister_v2(host.at(0), MIB as usize, PORTABLE)), ALREADY_REGISTERED);
    ok!(cuMemHostUnregister(host.at(0)));
    assert_eq!(code!(cuMemHostUnregister(host.at(0))), NOT_REGISTERED);
}

/// On the capturing thread in relaxed mode, as in the library.
#[test]
fn registering_and_copying_harm_no_capture() {
    let gpu = Gpu::open();
    let (stream, copies, event) = (gpu.stream(), gpu.stream(), gpu.event());
    let (page, base) = (create(GRANULE), reserve(GRANULE));
    map(base, GRANULE, page);
    let mut host = HostBytes::new(GRANULE as usize);
    for mode in MODES {
        stream.begin(mode);
        let mut relaxed = MODES[2];
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut relaxed));
        ok!(cuMemHostRegister_v2(host.at(0), GRANULE as usize, PORTABLE));
        ok!(cuMemcpyDtoHAsync_v2(host.at(0), base, GRANULE as usize, copies.0));
        ok!(cuMemcpyHtoDAsync_v2(base, host.at(0), GRANULE as usize, copies.0));
        ok!(cuEventRecord(event.0, copies.0));
        ok!(cuEventSynchronize(event.0));
        ok!(cuMemHostUnregister(host.at(0)));
        let own = gpu.stream();
        drop(own);
        ok!(cuThreadExchangeStreamCaptureMode(&raw mut relaxed));
        assert_eq!(stream.fill(base, GRANULE, 3), SUCCESS);
        drop(stream.end());
    }
    unmap(base, GRANULE);
    release(page);
    free_addresses(base, GRANULE);
}

// ---- order between streams ----

#[test]
fn a_stream_waits_for_an_event_of_another() {
    let gpu = Gpu::open();
    let (writer, reader, event) = (gpu.stream(), gpu.stream(), gpu.event());
    const LEN: u64 = 32 * MIB;
    let (page, base) = (create(2 * LEN), reserve(2 * LEN));
    map(base, 2 * LEN, page);
    for value in 1..=8 {
        assert_eq!(writer.fill(base, LEN, value), SUCCESS);
        ok!(cuEventRecord(event.0, writer.0));
        ok!(cuStreamWaitEvent(reader.0, event.0, 0));
        assert_eq!(reader.copy(base + LEN, base, LEN), SUCCESS);
        // Also back: the next round must not overtake the copy.
        ok!(cuEventRecord(event.0, reader.0));
        ok!(cuStreamWaitEvent(writer.0, event.0, 0));
        ok!(cuEventSynchronize(event.0));
        assert_eq!(code!(cuEventQuery(event.0)), SUCCESS);
        assert_holds(base + LEN, LEN, value);
    }
    writer.synchronise();
    unmap(base, 2 * LEN);
    release(page);
    free_addresses(base, 2 * LEN);
}

/// The ended thread's stream has no name, but its work continues.
#[test]
fn the_legacy_default_stream_waits_for_the_default_stream_of_a_thread_that_has_ended() {
    let gpu = Gpu::open();
    let (reader, event) = (gpu.stream(), gpu.event());
    let (len, rounds) = if real() { (1 << 30, 1000) } else { (GRANULE, 3) };
    let (page, copy, base) = (create(len), create(GRANULE), reserve(len + GRANULE));
    map(base, len, page);
    map(base + len, GRANULE, copy);
    let work = std::thread::spawn(move || {
        ok!(cuCtxSetCurrent(context()));
        let own: CUstream = ptr::without_provenance_mut(2);
        for value in 1..=rounds {
            ok!(cuMemsetD32Async(base, value, len as usize / 4, own));
        }
    });
    work.join().unwrap();
    let legacy: CUstream = ptr::null_mut();
    ok!(cuEventRecord(event.0, legacy));
    let over = code!(cuEventQuery(event.0)) == SUCCESS;
    say(&format!("the work of a thread that has ended is {}", if over { "over" } else { "under way" }));
    ok!(cuStreamWaitEvent(reader.0, event.0, 0));
    assert_eq!(reader.copy(base + len, base + len - GRANULE, GRANULE), SUCCESS);
    reader.synchronise();
    assert_holds(base + len, GRANULE, rounds);
    unmap(base, len);
    unmap(base + len, GRANULE);
    release(page);
    release(copy);
    free_addresses(base, len + GRANULE);
}

#[test]
fn an_event_in_which_nothing_was_recorded_has_happened() {
    let gpu = Gpu::open();
    let (stream, event) = (gpu.stream(), gpu.event());
    ok!(cuEventSynchronize(event.0));
    ok!(cuStreamWaitEvent(stream.0, event.0, 0));
    stream.synchronise();
}

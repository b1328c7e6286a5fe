//! Tests of the stand-in's rules: refusals by ACL, from its documentation and open runtime.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use standin_ascend::control::{
    standin_calls, standin_count, standin_fail, standin_keep_busy, standin_leftovers, standin_reset_counters,
};
use standin_ascend::copy::{
    aclrtHostRegisterV2, aclrtHostUnregister, aclrtMemcpy, aclrtMemcpyAsync, aclrtMemsetAsync,
    aclrtMemsetD32Async,
};
use standin_ascend::device::{
    aclGetRecentErrMsg, aclInit, aclrtGetCurrentContext, aclrtGetDeviceCount, aclrtGetMemInfo,
    aclrtSetCurrentContext, aclrtSetDevice,
};
use standin_ascend::stream::{
    aclmdlRICaptureBegin, aclmdlRICaptureEnd, aclmdlRICaptureGetInfo, aclmdlRICaptureThreadExchangeMode,
    aclmdlRIDestroy, aclmdlRIExecuteAsync, aclrtCreateEventExWithFlag, aclrtCreateStream, aclrtDestroyEvent,
    aclrtDestroyStream, aclrtQueryEventStatus, aclrtRecordEvent, aclrtStreamQuery, aclrtStreamWaitEvent,
    aclrtSynchronizeDevice, aclrtSynchronizeEvent, aclrtSynchronizeStream,
};
use standin_ascend::torch_npu::{aclrtFree, aclrtMalloc};
use standin_ascend::vmm::{
    Location, PhysicalMemProp, aclrtFreePhysical, aclrtMallocPhysical, aclrtMapMem,
    aclrtMemGetAllocationGranularity, aclrtReleaseMemAddress, aclrtReserveMemAddress, aclrtUnmapMem,
};

const GRANULE: usize = 2 << 20;
const PLAIN: PhysicalMemProp = PhysicalMemProp {
    handle_type: 0,
    allocation_type: 0,
    attribute: 4,
    location: Location { id: 0, kind: 1 },
    reserve: 0,
};

type Pointer = *mut c_void;

/// Serializes tests, as state is process-wide. Sets the context of `device`.
fn turn(device: i32) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert!([0, 100_002].contains(&aclInit(ptr::null())));
    assert_eq!(aclrtSetDevice(device), 0);
    standin_reset_counters();
    turn
}

/// Returns the out parameter of a function, or its code.
fn given(call: impl FnOnce(*mut Pointer) -> i32) -> Result<Pointer, i32> {
    let mut out = ptr::null_mut();
    match call(&raw mut out) {
        0 => Ok(out),
        code => Err(code),
    }
}

fn create(prop: PhysicalMemProp, bytes: usize) -> Result<Pointer, i32> {
    // SAFETY: both pointers are good.
    given(|out| unsafe { aclrtMallocPhysical(out, bytes, &raw const prop, 0) })
}

fn reserve(bytes: usize) -> Result<Pointer, i32> {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { aclrtReserveMemAddress(out, bytes, 0, ptr::null_mut(), 0) })
}

fn stream() -> Pointer {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { aclrtCreateStream(out) }).unwrap()
}

fn event() -> Pointer {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { aclrtCreateEventExWithFlag(out, 1) }).unwrap()
}

fn status(stream: Pointer) -> Result<i32, i32> {
    info(stream).map(|(status, _)| status)
}

/// Returns a stream's capture status and model.
fn info(stream: Pointer) -> Result<(i32, Pointer), i32> {
    let (mut status, mut model) = (-1, stream);
    // SAFETY: the out pointers are good.
    match unsafe { aclmdlRICaptureGetInfo(stream, &raw mut status, &raw mut model) } {
        0 => Ok((status, model)),
        code => Err(code),
    }
}

fn free() -> usize {
    let (mut free, mut total) = (0, 0);
    // SAFETY: the out pointers are good.
    assert_eq!(unsafe { aclrtGetMemInfo(1, &raw mut free, &raw mut total) }, 0);
    free
}

fn query(event: Pointer) -> Result<u32, i32> {
    let mut status = 9;
    // SAFETY: the out pointer is good.
    match unsafe { aclrtQueryEventStatus(event, &raw mut status) } {
        0 => Ok(status),
        code => Err(code),
    }
}

fn end(stream: Pointer) -> Result<Pointer, i32> {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { aclmdlRICaptureEnd(stream, out) })
}

fn exchange(mut mode: i32) -> i32 {
    // SAFETY: the pointer is good.
    assert_eq!(unsafe { aclmdlRICaptureThreadExchangeMode(&raw mut mode) }, 0);
    mode
}

fn after(at: Pointer, bytes: usize) -> Pointer {
    (at as usize + bytes) as Pointer
}

fn leftovers() -> [u64; 4] {
    let mut left = [0; 4];
    // SAFETY: there is room for four numbers.
    unsafe { standin_leftovers(left.as_mut_ptr()) };
    left
}

#[test]
fn starting_twice_says_so_and_a_failure_has_words() {
    let _turn = turn(0);
    assert_eq!(aclInit(ptr::null()), 100_002);
    assert_eq!(aclInit(c"acl.json".as_ptr()), 107_000, "no configurations here");
    // SAFETY: the text is static.
    assert_eq!(unsafe { CStr::from_ptr(aclGetRecentErrMsg()) }, c"parameter invalid");
    let mut count = 0;
    // SAFETY: the out pointer is good.
    assert_eq!((unsafe { aclrtGetDeviceCount(&raw mut count) }, count), (0, 2));
}

#[test]
fn a_page_is_mapped_whole_at_once_usable_and_taken_away_by_its_head() {
    let _turn = turn(0);
    let before = leftovers();
    let (page, base) = (create(PLAIN, 2 * GRANULE).unwrap(), reserve(6 * GRANULE).unwrap());
    assert_eq!(aclrtMapMem(base, GRANULE, 0, page, 0), 207_000, "a part");
    assert_eq!(aclrtMapMem(base, 2 * GRANULE, GRANULE, page, 0), 107_000, "an offset");
    assert_eq!(aclrtMapMem(base, 2 * GRANULE, 0, page, 1), 107_000, "flags");
    assert_eq!(aclrtMapMem(base, 2 * GRANULE, 0, page, 0), 0);
    assert_eq!(aclrtMapMem(after(base, GRANULE), 2 * GRANULE, 0, page, 0), 107_000, "over another");
    let second = after(base, 2 * GRANULE);
    assert_eq!(aclrtMapMem(second, 2 * GRANULE, 0, page, 0), 0, "the same page again");
    let (mut word, seven) = (0_u64, 7_u64);
    // SAFETY: words of this stack and mapped memory.
    unsafe {
        assert_eq!(aclrtMemcpy(base, 8, (&raw const seven).cast(), 8, 1), 0);
        assert_eq!(aclrtMemcpy((&raw mut word).cast(), 8, second, 8, 2), 0);
    }
    assert_eq!(word, 7);
    assert_eq!(aclrtUnmapMem(after(base, GRANULE)), 107_000, "not a head");
    assert_eq!(aclrtReleaseMemAddress(base), 107_000, "while mapped");
    assert_eq!(aclrtFreePhysical(page), 0, "while mapped");
    assert_eq!(aclrtUnmapMem(base), 0);
    assert_eq!(aclrtUnmapMem(base), 107_000, "twice");
    assert_eq!(leftovers()[0], before[0] + 1, "mapped once more");
    assert_eq!((aclrtUnmapMem(second), aclrtReleaseMemAddress(base)), (0, 0));
    assert_eq!(leftovers(), before);
}

#[test]
fn a_location_is_the_number_first_and_then_the_kind() {
    let _turn = turn(0);
    // The location in CUDA's field order: device 1, kind 0.
    let swapped = PhysicalMemProp { location: Location { id: 1, kind: 0 }, ..PLAIN };
    assert_eq!(create(swapped, GRANULE), Err(107_000));
    for prop in [
        PhysicalMemProp { handle_type: 2, ..PLAIN },
        PhysicalMemProp { allocation_type: 1, ..PLAIN },
        PhysicalMemProp { attribute: 0, ..PLAIN },
        PhysicalMemProp { reserve: 1, ..PLAIN },
    ] {
        assert_eq!(create(prop, GRANULE), Err(107_000), "{prop:?}");
    }
    let nowhere = PhysicalMemProp { location: Location { id: 9, kind: 1 }, ..PLAIN };
    assert_eq!(create(nowhere, GRANULE), Err(107_001));
    assert_eq!(create(PLAIN, GRANULE + 4096), Err(107_000));
    assert_eq!(create(PLAIN, 65 << 30), Err(207_001));
    let (mut granularity, mut prop) = (0, PLAIN);
    // SAFETY: both pointers are good.
    unsafe {
        assert_eq!(aclrtMemGetAllocationGranularity(&raw mut prop, 0, &raw mut granularity), 0);
        assert_eq!(aclrtMemGetAllocationGranularity(&raw mut prop, 2, &raw mut granularity), 107_000);
    }
    assert_eq!(granularity, GRANULE);
    let flagged = |align, flags| {
        // SAFETY: the out pointer is good; the other arguments are refused.
        given(|out| unsafe { aclrtReserveMemAddress(out, GRANULE, align, ptr::null_mut(), flags) })
    };
    assert_eq!((flagged(GRANULE, 0), flagged(0, 2)), (Err(107_000), Err(107_000)));
    let (old, base) = (flagged(0, 1).unwrap(), reserve(GRANULE).unwrap());
    assert_eq!((aclrtReleaseMemAddress(old), aclrtReleaseMemAddress(base)), (0, 0));
}

#[test]
fn a_reservation_serves_one_device() {
    let _turn = turn(0);
    let base = reserve(GRANULE).unwrap();
    assert_eq!(aclrtSetDevice(1), 0);
    let other = create(PhysicalMemProp { location: Location { id: 1, kind: 1 }, ..PLAIN }, GRANULE).unwrap();
    assert_eq!(aclrtMapMem(base, GRANULE, 0, other, 0), 107_000);
    assert_eq!((aclrtFreePhysical(other), aclrtReleaseMemAddress(base)), (0, 0));
}

#[test]
fn events_streams_and_copies_need_a_context_and_there_is_no_way_back_to_none() {
    let _turn = turn(0);
    let (mine, event) = (stream() as usize, event() as usize);
    let page = create(PLAIN, GRANULE).unwrap() as usize;
    std::thread::spawn(move || {
        let (mine, event) = (mine as Pointer, event as Pointer);
        let (mut free, mut total, mut mode) = (0, 0, 2);
        // SAFETY: out pointers are good.
        unsafe {
            assert_eq!(given(|out| aclrtGetCurrentContext(out)), Err(107_002));
            assert_eq!(given(|out| aclrtCreateStream(out)), Err(107_002));
            assert_eq!(given(|out| aclrtCreateEventExWithFlag(out, 1)), Err(107_002));
            assert_eq!(aclrtGetMemInfo(1, &raw mut free, &raw mut total), 107_002);
            assert_eq!(aclmdlRICaptureThreadExchangeMode(&raw mut mode), 107_002);
        }
        assert_eq!((aclrtRecordEvent(event, mine), query(event)), (107_002, Err(107_002)));
        assert_eq!(status(mine), Ok(0), "asking for a capture needs none");
        assert_eq!(aclrtFreePhysical(page as Pointer), 0, "nor do pages");
        assert_eq!(aclrtSetCurrentContext(ptr::null_mut()), 107_000);
        assert_eq!(aclrtSetCurrentContext(8 as Pointer), 107_002);
        // Stream and event of a different device.
        assert_eq!(aclrtSetDevice(1), 0);
        assert_eq!((aclrtRecordEvent(event, mine), aclrtSynchronizeStream(mine)), (107_003, 107_003));
        assert_eq!(aclrtDestroyStream(mine), 107_003);
    })
    .join()
    .unwrap();
    assert_eq!((aclrtDestroyStream(mine as Pointer), aclrtDestroyEvent(event as Pointer)), (0, 0));
}

#[test]
fn events_are_of_one_kind_and_recorded_again_and_again() {
    let _turn = turn(0);
    // SAFETY: the out pointer is good.
    let of_kind = |flag| given(|out| unsafe { aclrtCreateEventExWithFlag(out, flag) });
    assert_eq!([0, 2, 32].map(of_kind), [Err(107_000); 3]);
    let (stream, event) = (stream(), event());
    assert_eq!(query(event), Ok(1), "never recorded");
    assert_eq!(aclrtStreamWaitEvent(stream, event), 0);
    assert_eq!((aclrtRecordEvent(event, stream), aclrtRecordEvent(event, stream)), (0, 0));
    standin_keep_busy(1);
    assert_eq!((query(event), query(event), aclrtSynchronizeEvent(event)), (Ok(0), Ok(1), 0));
    assert_eq!((aclrtDestroyEvent(event), aclrtDestroyEvent(event)), (0, 107_017));
    assert_eq!((aclrtSynchronizeStream(stream), aclrtDestroyStream(stream)), (0, 0));
}

#[test]
fn waiting_and_asking_lose_any_capture_of_the_device_in_any_mode() {
    let _turn = turn(0);
    let (captured, other, event) = (stream(), stream(), event());
    assert_eq!(aclrtRecordEvent(event, other), 0);
    let mut work = 0_u32;
    let asked = &raw mut work as usize;
    let breaks: [(&str, &dyn Fn() -> i32); 5] = [
        // SAFETY: the out pointer is good.
        ("stream query", &|| unsafe { aclrtStreamQuery(other, asked as *mut u32) }),
        ("query", &|| query(event).err().unwrap_or(0)),
        ("event", &|| aclrtSynchronizeEvent(event)),
        ("stream", &|| aclrtSynchronizeStream(other)),
        ("device", &|| aclrtSynchronizeDevice()),
    ];
    for mode in 0..=2 {
        for (what, call) in &breaks {
            assert_eq!(aclmdlRICaptureBegin(captured, mode), 0);
            let before = exchange(2);
            assert_eq!((call(), status(captured)), (107_027, Ok(2)), "{what} in mode {mode}");
            exchange(before);
            assert_eq!(end(captured), Err(507_903));
            assert_eq!(call(), 0, "{what} afterwards");
        }
    }
    assert_eq!(
        (aclrtDestroyEvent(event), aclrtDestroyStream(captured), aclrtDestroyStream(other)),
        (0, 0, 0)
    );
}

#[test]
fn a_synchronous_copy_needs_the_relaxed_mode_while_something_is_captured() {
    let _turn = turn(0);
    let (page, base) = (create(PLAIN, GRANULE).unwrap(), reserve(GRANULE).unwrap());
    assert_eq!(aclrtMapMem(base, GRANULE, 0, page, 0), 0);
    let (captured, other) = (stream(), stream());
    let mut word = 0_u64;
    // SAFETY: a word of this stack and mapped memory.
    let mut copy = || unsafe { aclrtMemcpy((&raw mut word).cast(), 8, base, 8, 2) };
    assert_eq!(aclmdlRICaptureBegin(captured, 0), 0);
    assert_eq!((copy(), status(captured), end(captured)), (107_030, Ok(2), Err(507_903)));
    assert_eq!(aclmdlRICaptureBegin(captured, 0), 0);
    assert_eq!(exchange(2), 0);
    assert_eq!((copy(), status(captured)), (0, Ok(1)));
    let mut bytes = [0_u8; 8];
    let to: Pointer = bytes.as_mut_ptr().cast();
    // SAFETY: memory of this stack and mapped memory.
    unsafe {
        assert_eq!(aclrtMemcpyAsync(to, 8, base, 8, 2, other), 0);
        assert_eq!(aclrtMemcpyAsync(to, 8, base, 8, 2, captured), 107_000, "pageable memory in a capture");
        assert_eq!(aclrtMemcpyAsync(to, 4, base, 8, 2, other), 107_000, "no room");
    }
    assert_eq!(exchange(0), 2);
    let model = end(captured).unwrap();
    assert_eq!(aclmdlRIDestroy(model), 0);
    assert_eq!((aclrtUnmapMem(base), aclrtFreePhysical(page), aclrtReleaseMemAddress(base)), (0, 0, 0));
    assert_eq!((aclrtDestroyStream(captured), aclrtDestroyStream(other)), (0, 0));
}

#[test]
fn the_default_stream_is_not_captured_and_not_used_meanwhile() {
    let _turn = turn(0);
    let (captured, event) = (stream(), event());
    assert_eq!(aclmdlRICaptureBegin(ptr::null_mut(), 2), 107_031);
    assert_eq!(status(ptr::null_mut()), Err(107_000), "nor asked about");
    assert_eq!(aclmdlRICaptureBegin(captured, 2), 0);
    assert_eq!((aclrtRecordEvent(event, ptr::null_mut()), status(captured)), (107_031, Ok(2)));
    assert_eq!(end(captured), Err(507_903));
    assert_eq!((aclrtDestroyEvent(event), aclrtDestroyStream(captured)), (0, 0));
}

#[test]
fn what_a_capture_makes_works_on_what_is_mapped_when_it_is_executed() {
    let _turn = turn(0);
    let (pages, base) = ([0, 1].map(|_| create(PLAIN, GRANULE).unwrap()), reserve(GRANULE).unwrap());
    assert_eq!(aclrtMapMem(base, GRANULE, 0, pages[0], 0), 0);
    let stream = stream();
    assert_eq!(info(stream), Ok((0, ptr::null_mut())));
    assert_eq!(aclmdlRICaptureBegin(stream, 0), 0);
    let captured = info(stream).unwrap();
    assert_eq!(aclrtMemsetAsync(base, GRANULE, 0x2a, GRANULE, stream), 0);
    assert_eq!(aclrtMemsetAsync(base, 4, 0x2a, 8, stream), 107_000, "no room");
    assert_eq!(aclrtMemsetAsync(base, 4, 256, 4, stream), 107_000, "not a byte");
    assert_eq!(aclrtMemsetD32Async(after(base, 4), 4, 9, 1, stream), 0);
    let model = end(stream).unwrap();
    assert_eq!(captured, (1, model), "a capture has its handle from its beginning on");
    assert_eq!((aclrtUnmapMem(base), aclrtMapMem(base, GRANULE, 0, pages[1], 0)), (0, 0));
    assert_eq!(aclmdlRIExecuteAsync(model, stream), 0);
    let mut words = [0_u32; 2];
    // SAFETY: words of this stack and mapped memory.
    assert_eq!(unsafe { aclrtMemcpy(words.as_mut_ptr().cast(), 8, base, 8, 2) }, 0);
    assert_eq!(words, [0x2a2a_2a2a, 9]);
    assert_eq!((aclmdlRIDestroy(model), aclmdlRIDestroy(model)), (0, 107_017));
    assert_eq!((aclrtUnmapMem(base), aclrtReleaseMemAddress(base), aclrtDestroyStream(stream)), (0, 0, 0));
    assert_eq!(pages.map(|page| aclrtFreePhysical(page)), [0, 0]);
}

#[test]
fn memory_without_addresses_of_ones_own_can_be_used_and_goes_back_once() {
    let _turn = turn(0);
    let before = free();
    // SAFETY: the out pointer is good.
    let memory = given(|out| unsafe { aclrtMalloc(out, GRANULE + 1, 0) }).unwrap();
    assert_eq!(free(), before - 2 * GRANULE);
    let word = 7_u64;
    // SAFETY: a word of this stack and allocated memory.
    assert_eq!(unsafe { aclrtMemcpy(memory, 8, (&raw const word).cast(), 8, 1) }, 0);
    assert_eq!((aclrtFree(memory), aclrtFree(memory)), (0, 107_000));
    assert_eq!(free(), before);
}

#[test]
fn host_memory_is_pinned_once_by_whole_pages() {
    let _turn = turn(0);
    let memory = vec![0_u8; 4 * 4096];
    let at = (memory.as_ptr() as usize).next_multiple_of(4096) as Pointer;
    assert_eq!(aclrtHostRegisterV2(at, 8192, 2), 107_000, "mapped is something else");
    assert_eq!(aclrtHostRegisterV2(after(at, 8), 4096, 0x1000_0000), 107_000);
    assert_eq!(aclrtHostRegisterV2(at, 8192, 0x1000_0000), 0);
    assert_ne!(aclrtHostRegisterV2(at, 4096, 0x1000_0000), 0);
    assert_eq!(aclrtHostUnregister(at), 0);
    assert_ne!(aclrtHostUnregister(at), 0);
}

#[test]
fn calls_are_counted_and_the_nth_fails_without_effect() {
    let _turn = turn(0);
    standin_fail(2, 207_001);
    let page = create(PLAIN, GRANULE).unwrap();
    assert_eq!(create(PLAIN, GRANULE), Err(207_001));
    assert_eq!(aclrtFreePhysical(page), 0);
    // SAFETY: the text ends in a zero byte.
    let count = |name: &CStr| unsafe { standin_count(name.as_ptr()) };
    assert_eq!((standin_calls(), count(c"aclrtMallocPhysical"), count(c"aclrtFreePhysical")), (3, 2, 1));
}

//! The stand-in's controls: counters, failures, leftovers, environment. `tests/gpu/conformance.rs`
//! of the root package tests the driver.

use std::ffi::{CStr, c_void};
use std::process::Command;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use cuda::control::{
    standin_calls, standin_count, standin_fail, standin_fail_second, standin_failed, standin_keep_busy,
    standin_leftovers, standin_reset_counters, standin_shuffle,
};
use cuda::device::{
    cuCtxGetCurrent, cuCtxSetCurrent, cuCtxSynchronize, cuDeviceGetCount, cuDevicePrimaryCtxRelease_v2,
    cuDevicePrimaryCtxRetain, cuDeviceTotalMem_v2, cuGetErrorName, cuInit, cuMemGetInfo_v2,
};
use cuda::graph::{
    cuGraphDestroy, cuGraphExecDestroy, cuGraphInstantiateWithFlags, cuGraphLaunch, cuMemcpyDtoH_v2,
};
use cuda::host::{cuMemHostRegister_v2, cuMemHostUnregister, cuMemcpyHtoDAsync_v2};
use cuda::stream::{
    cuEventCreate, cuEventDestroy_v2, cuEventQuery, cuEventRecord, cuStreamBeginCapture_v2, cuStreamCreate,
    cuStreamDestroy_v2, cuStreamEndCapture, cuStreamIsCapturing, cuStreamSynchronize, cuStreamWaitEvent,
};
use cuda::vmm::{
    AccessDesc, AllocationProp, Location, cuMemAddressFree, cuMemAddressReserve, cuMemCreate, cuMemMap,
    cuMemRelease, cuMemSetAccess, cuMemUnmap,
};

const GRANULE: usize = 2 << 20;

/// Serializes tests, as counters and failures are process-wide. Sets the context of `device`.
fn turn(device: i32) -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(cuInit(0), 0);
    let mut context = ptr::null_mut();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuDevicePrimaryCtxRetain(&raw mut context, device) }, 0);
    assert_eq!(cuCtxSetCurrent(context), 0);
    standin_reset_counters();
    turn
}

fn create(device: i32) -> Result<u64, i32> {
    let prop = AllocationProp {
        kind: 1,
        requested_handle_types: 0,
        location: Location { kind: 1, id: device },
        win32_handle_meta_data: ptr::null_mut(),
        alloc_flags: [0; 8],
    };
    let mut page = 0;
    // SAFETY: both pointers are good.
    match unsafe { cuMemCreate(&raw mut page, GRANULE, &raw const prop, 0) } {
        0 => Ok(page),
        code => Err(code),
    }
}

fn reserve() -> Result<u64, i32> {
    let mut base = 0;
    // SAFETY: the out pointer is good.
    match unsafe { cuMemAddressReserve(&raw mut base, GRANULE, 0, 0, 0) } {
        0 => Ok(base),
        code => Err(code),
    }
}

fn count(name: &CStr) -> u64 {
    // SAFETY: the text ends in a zero byte.
    unsafe { standin_count(name.as_ptr()) }
}

fn free_bytes() -> i32 {
    let (mut free, mut total) = (0, 0);
    // SAFETY: both pointers are good.
    unsafe { cuMemGetInfo_v2(&raw mut free, &raw mut total) }
}

fn leftovers() -> [u64; 4] {
    let mut left = [0; 4];
    // SAFETY: there is room for four numbers.
    unsafe { standin_leftovers(left.as_mut_ptr()) };
    left
}

#[test]
fn the_calls_that_can_fail_are_counted() {
    let _turn = turn(0);
    let page = create(0).unwrap();
    assert_eq!(cuMemRelease(page), 0);
    assert_eq!(cuMemRelease(page), 1, "a second time");
    assert_eq!(cuStreamSynchronize(ptr::null_mut()), 0);
    assert_eq!((standin_calls(), count(c"cuMemCreate"), count(c"cuMemRelease")), (3, 1, 2));
    assert_eq!((count(c"cuStreamSynchronize"), count(c"nonsense")), (0, 0));
    standin_reset_counters();
    assert_eq!(standin_calls(), 0);
}

#[test]
fn the_nth_call_fails_without_effect_and_once() {
    let _turn = turn(0);
    let before = leftovers();
    standin_fail(2, 2);
    let page = create(0).unwrap();
    assert_eq!(cuMemRelease(page), 2);
    assert_eq!(leftovers()[0], before[0] + 1, "the page is still there");
    assert_eq!(cuMemRelease(page), 0);
    standin_fail(1, 999);
    standin_fail(0, 0);
    assert_eq!(free_bytes(), 0);
    assert_eq!(leftovers(), before);
}

#[test]
fn the_functions_that_were_made_to_fail_are_known() {
    let _turn = turn(0);
    let failed = |wanted: &CStr| {
        let times_of = |index| {
            let mut times = 0;
            // SAFETY: the out pointer is good.
            let name = unsafe { standin_failed(index, &raw mut times) };
            // SAFETY: a name is a static string.
            (!name.is_null()).then(|| (unsafe { CStr::from_ptr(name) }, times))
        };
        (0..).map_while(times_of).find(|(name, _)| *name == wanted).map(|(_, times)| times)
    };
    let before = failed(c"cuMemCreate").unwrap();
    standin_fail(1, 2);
    assert_eq!(create(0), Err(2));
    assert_eq!(failed(c"cuMemCreate"), Some(before + 1));
    // SAFETY: null is allowed.
    assert!(unsafe { standin_failed(1000, ptr::null_mut()) }.is_null());
}

#[test]
fn two_failures_are_independent() {
    let _turn = turn(0);
    standin_fail(1, 2);
    standin_fail_second(3, 719);
    assert_eq!(create(0), Err(2));
    assert_eq!((free_bytes(), free_bytes(), free_bytes()), (0, 719, 0));
}

#[test]
fn a_busy_device_answers_so_many_questions_with_not_ready() {
    let _turn = turn(0);
    let mut event = ptr::null_mut();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuEventCreate(&raw mut event, 0) }, 0);
    standin_keep_busy(2);
    assert_eq!([cuEventQuery(event), cuEventQuery(event), cuEventQuery(event)], [600, 600, 0]);
    assert_eq!(count(c"cuEventQuery"), 3);
    assert_eq!(cuEventDestroy_v2(event), 0);
}

#[test]
fn every_thread_has_a_default_stream_of_its_own() {
    let _turn = turn(0);
    let own = 2 as *mut c_void;
    let state = |stream| {
        let mut state = -1;
        // SAFETY: the out pointer is good.
        assert_eq!(unsafe { cuStreamIsCapturing(stream, &raw mut state) }, 0);
        state
    };
    let mut context = ptr::null_mut();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuCtxGetCurrent(&raw mut context) }, 0);
    assert_eq!(cuStreamBeginCapture_v2(own, 2), 0);
    let context = context as usize;
    let elsewhere = std::thread::spawn(move || {
        assert_eq!(cuCtxSetCurrent(context as *mut c_void), 0);
        let before = state(2 as *mut c_void);
        // The thread ends with this capture open.
        assert_eq!(cuStreamBeginCapture_v2(2 as *mut c_void, 2), 0);
        before
    });
    assert_eq!((elsewhere.join().unwrap(), state(own)), (0, 1));
    let mut graph = ptr::null_mut();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuStreamEndCapture(own, &raw mut graph) }, 0);
    assert_eq!(cuGraphDestroy(graph), 0);
    assert_eq!((state(own), state(ptr::null_mut())), (0, 0));
}

#[test]
fn leftovers_are_pages_reservations_mappings_events() {
    let _turn = turn(0);
    let before = leftovers();
    let (page, base) = (create(0).unwrap(), reserve().unwrap());
    assert_eq!(cuMemMap(base, GRANULE, 0, page, 0), 0);
    let mut event = ptr::null_mut();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuEventCreate(&raw mut event, 0) }, 0);
    assert_eq!(leftovers(), before.map(|n| n + 1));
    assert_eq!(cuMemAddressFree(base, GRANULE), 1, "while mapped");
    assert_eq!(cuMemUnmap(base, GRANULE), 0);
    assert_eq!(cuMemAddressFree(base, GRANULE), 0);
    assert_eq!(cuMemRelease(page), 0);
    assert_eq!(cuEventDestroy_v2(event), 0);
    assert_eq!(cuEventDestroy_v2(event), 400, "a stale handle");
    assert_eq!(leftovers(), before);
}

#[test]
fn pages_are_told_apart_across_devices() {
    let _turn = turn(1);
    let (here, there) = (create(1).unwrap(), create(0).unwrap());
    assert_ne!(here, there);
    let base = reserve().unwrap();
    assert_eq!(cuMemMap(base, GRANULE, 0, there, 0), 1, "another device's addresses");
    assert_eq!(cuMemMap(base, GRANULE, 0, here, 0), 0);
    assert_eq!(cuMemUnmap(base, GRANULE), 0);
    assert_eq!(cuMemAddressFree(base, GRANULE), 0);
    assert_eq!((cuMemRelease(here), cuMemRelease(there)), (0, 0));
}

#[test]
fn branches_of_a_graph_run_in_any_order_that_edges_allow_and_copies_read_when_they_run() {
    let _turn = turn(0);
    let made = |make: &dyn Fn(*mut *mut c_void) -> i32| {
        let mut made = ptr::null_mut();
        assert_eq!(make(&raw mut made), 0);
        made
    };
    // SAFETY: valid out pointers.
    let stream = || made(&|out| unsafe { cuStreamCreate(out, 1) });
    // SAFETY: as above.
    let event = || made(&|out| unsafe { cuEventCreate(out, 2) });
    let (page, base) = (create(0).unwrap(), reserve().unwrap());
    assert_eq!(cuMemMap(base, GRANULE, 0, page, 0), 0);
    let access = AccessDesc { location: Location { kind: 1, id: 0 }, flags: 3 };
    // SAFETY: one description.
    assert_eq!(unsafe { cuMemSetAccess(base, GRANULE, &raw const access, 1) }, 0);
    let host: *mut u8 = Box::into_raw(Box::new([0_u8; 2])).cast();
    // SAFETY: two bytes of this test, alive until unregistered.
    assert_eq!(unsafe { cuMemHostRegister_v2(host.cast(), 2, 0) }, 0);
    let (main, side) = (stream(), stream());
    let copy = |from: usize, stream| {
        // SAFETY: one of these bytes.
        unsafe { cuMemcpyHtoDAsync_v2(base, host.add(from).cast(), 1, stream) }
    };
    // Copies the first byte by the main stream and the second by the side stream, to one address:
    // ordered or not, joined or not.
    let capture = |ordered: bool, joined: bool| {
        assert_eq!(cuStreamBeginCapture_v2(main, 2), 0);
        let [fork, join] = [event(), event()];
        let forked = || assert_eq!((cuEventRecord(fork, main), cuStreamWaitEvent(side, fork, 0)), (0, 0));
        (!ordered).then(forked);
        assert_eq!(copy(0, main), 0);
        ordered.then(forked);
        assert_eq!((copy(1, side), cuEventRecord(join, side), cuStreamWaitEvent(main, join, 0)), (0, 0, 0));
        // Work after the join of its stream is not joined.
        assert_eq!(if joined { 0 } else { copy(1, side) }, 0);
        let mut graph = ptr::null_mut();
        // SAFETY: the out pointer is good.
        let code = unsafe { cuStreamEndCapture(main, &raw mut graph) };
        assert_eq!((cuEventDestroy_v2(fork), cuEventDestroy_v2(join)), (0, 0));
        (code, graph)
    };
    assert_eq!(capture(true, false), (904, ptr::null_mut()));
    let last = |ordered: bool, seed| {
        let (code, graph) = capture(ordered, true);
        assert_eq!(code, 0);
        // SAFETY: the out pointer is good.
        let exec = made(&|out| unsafe { cuGraphInstantiateWithFlags(out, graph, 0) });
        // SAFETY: nothing runs.
        unsafe { host.cast::<[u8; 2]>().write([1, 2]) };
        standin_shuffle(seed);
        assert_eq!(cuGraphLaunch(exec, main), 0);
        let mut found = 255_u8;
        // SAFETY: a byte of this stack.
        assert_eq!(unsafe { cuMemcpyDtoH_v2((&raw mut found).cast(), base, 1) }, 0);
        // SAFETY: nothing runs.
        unsafe { host.cast::<[u8; 2]>().write([0, 0]) };
        assert_eq!((cuGraphExecDestroy(exec), cuGraphDestroy(graph)), (0, 0));
        found
    };
    let of = |ordered| (0..20).map(|seed| last(ordered, seed)).collect::<Vec<_>>();
    assert_eq!(of(true), [2; 20]);
    // Without a seed, capture order; with seeds, both orders.
    let either = of(false);
    assert!(either[0] == 2 && either.contains(&1) && either[1..].contains(&2), "{either:?}");
    standin_shuffle(0);
    assert_eq!((cuStreamDestroy_v2(main), cuStreamDestroy_v2(side)), (0, 0));
    // SAFETY: as created.
    unsafe {
        assert_eq!(cuMemHostUnregister(host.cast()), 0);
        drop(Box::from_raw(host.cast::<[u8; 2]>()));
    }
    assert_eq!((cuMemUnmap(base, GRANULE), cuMemAddressFree(base, GRANULE), cuMemRelease(page)), (0, 0, 0));
}

#[test]
fn null_pointers_and_unknown_codes_are_refused() {
    let _turn = turn(0);
    // SAFETY: the stand-in must refuse null pointers.
    unsafe {
        assert_eq!(cuMemGetInfo_v2(ptr::null_mut(), ptr::null_mut()), 1);
        assert_eq!(cuMemCreate(ptr::null_mut(), GRANULE, ptr::null(), 0), 1);
        assert_eq!(cuStreamCreate(ptr::null_mut(), 0), 1);
        standin_leftovers(ptr::null_mut());
    }
    let mut text = ptr::null();
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuGetErrorName(2, &raw mut text) }, 0);
    // SAFETY: the driver's texts are static and end in a zero byte.
    assert_eq!(unsafe { CStr::from_ptr(text) }, c"CUDA_ERROR_OUT_OF_MEMORY");
    // SAFETY: the out pointer is good.
    assert_eq!(unsafe { cuGetErrorName(12345, &raw mut text) }, 1);
}

/// Returns this process's view of the stand-in as text. In a child process, `cuInit` is the first
/// call.
fn look() -> String {
    let (mut count, mut bytes, mut context) = (-1, 0, ptr::null_mut());
    // SAFETY: the out pointer is good.
    let early = unsafe { cuDeviceGetCount(&raw mut count) };
    let started = cuInit(0);
    // SAFETY: the out pointers are good.
    let codes = unsafe {
        let counted = cuDeviceGetCount(&raw mut count);
        let sized = cuDeviceTotalMem_v2(&raw mut bytes, 0);
        [counted, sized, cuDevicePrimaryCtxRetain(&raw mut context, 0)]
    };
    let current = [cuCtxSynchronize(), cuCtxSetCurrent(context), cuCtxSynchronize()];
    let released = cuDevicePrimaryCtxRelease_v2(0);
    format!("{early} {started} {codes:?} {count} {bytes} {current:?} {released} {}", cuCtxSynchronize())
}

const CHILD: &str = "STANDIN_CUDA_TEST_CHILD";

#[test]
fn child() {
    if std::env::var_os(CHILD).is_some() {
        println!("<{}>", look());
    }
}

#[test]
fn the_environment_says_how_many_devices_of_what_size() {
    let see = |devices: &str, memory: &str| {
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child", "--nocapture"])
            .env(CHILD, "1")
            .env("STANDIN_CUDA_DEVICES", devices)
            .env("STANDIN_CUDA_MEMORY", memory)
            .output()
            .unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        text.split(['<', '>']).nth(1).unwrap_or_default().to_owned()
    };
    // 201: no context; 709: a destroyed context.
    assert_eq!(see("3", "1073741824"), "3 0 [0, 0, 0] 3 1073741824 [201, 0, 0] 0 709");
    assert_eq!(see("", ""), "3 0 [0, 0, 0] 2 68719476736 [201, 0, 0] 0 709");
    assert_eq!(see("0", ""), "3 100 [3, 3, 3] -1 0 [3, 3, 3] 3 3");
}

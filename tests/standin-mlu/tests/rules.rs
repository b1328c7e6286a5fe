//! Tests of the stand-in's rules: refusals by CNDrv, from its header and guide.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use standin_mlu::control::{standin_fail, standin_keep_busy, standin_leftovers, standin_reset_counters};
use standin_mlu::copy::{cnMemcpyDtoH, cnMemcpyHtoD, cnMemsetD32Async};
use standin_mlu::device::{
    cnCtxGetCurrent, cnCtxSetCurrent, cnDeviceGet, cnDeviceGetAttribute, cnDeviceGetName, cnGetErrorName,
    cnInit, cnMemGetInfo, cnSharedContextAcquire, cnSharedContextRelease,
};
use standin_mlu::queue::{
    cnCreateNotifier, cnCreateQueue, cnCtxSync, cnDestroyNotifier, cnDestroyQueue, cnPlaceNotifier,
    cnQueryNotifier, cnQueueBeginCapture, cnQueueEndCapture, cnQueueIsCapturing, cnQueueSync,
    cnQueueWaitNotifier, cnThreadExchangeQueueCaptureMode, cnWaitNotifier,
};
use standin_mlu::topo::{
    cnTaskTopoDestroy, cnTaskTopoEntityDestroy, cnTaskTopoEntityInvoke, cnTaskTopoInstantiate,
};
use standin_mlu::vmm::{
    AccessDesc, AllocationProp, Location, cnMemAddressFree, cnMemAddressReserve, cnMemCreate,
    cnMemGetAllocationGranularity, cnMemMap, cnMemRelease, cnMemSetAccess, cnMemUnmap,
};

const GRANULE: u64 = 2 << 20;
const INVALID: i32 = 100_006;
const PLAIN: AllocationProp = AllocationProp {
    kind: 1,
    handle_types: 0,
    location: Location { kind: 1, id: 0 },
    compression: 0,
    security: 0,
};
const ACCESS: AccessDesc = AccessDesc { location: PLAIN.location, access: 0, cache: 0, pinned: 0 };

type Pointer = *mut c_void;

/// Returns the out parameter of a function, or its code.
fn given<T: Default>(call: impl FnOnce(*mut T) -> i32) -> Result<T, i32> {
    let mut out = T::default();
    match call(&raw mut out) {
        0 => Ok(out),
        code => Err(code),
    }
}

fn pointed(call: impl FnOnce(*mut Pointer) -> i32) -> Result<Pointer, i32> {
    let mut out = ptr::null_mut();
    match call(&raw mut out) {
        0 => Ok(out),
        code => Err(code),
    }
}

/// Serializes tests, as state is process-wide. The first device's context is current.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    assert_eq!(cnInit(0), 0);
    assert_eq!(cnCtxSetCurrent(context(0)), 0);
    standin_reset_counters();
    turn
}

/// Returns a device's context, acquired until the process ends.
fn context(ordinal: i32) -> Pointer {
    // SAFETY: the out pointers are good.
    let device = given(|out| unsafe { cnDeviceGet(out, ordinal) }).unwrap();
    // SAFETY: as above.
    pointed(|out| unsafe { cnSharedContextAcquire(out, device) }).unwrap()
}

fn create(mut prop: AllocationProp, bytes: u64) -> Result<u64, i32> {
    // SAFETY: both pointers are good.
    given(|out| unsafe { cnMemCreate(out, bytes, &raw mut prop, 0) })
}

fn reserve(bytes: u64) -> u64 {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { cnMemAddressReserve(out, bytes, 0, 0, 0) }).unwrap()
}

fn access(at: u64, bytes: u64, mut desc: AccessDesc, count: u64) -> i32 {
    // SAFETY: the pointer is good for one.
    unsafe { cnMemSetAccess(at, bytes, &raw mut desc, count) }
}

fn queue() -> Pointer {
    // SAFETY: the out pointer is good.
    pointed(|out| unsafe { cnCreateQueue(out, 0) }).unwrap()
}

fn notifier() -> Pointer {
    // SAFETY: the out pointer is good.
    pointed(|out| unsafe { cnCreateNotifier(out, 4) }).unwrap()
}

fn status(queue: Pointer) -> Result<i32, i32> {
    // SAFETY: the out pointer is good.
    given(|out| unsafe { cnQueueIsCapturing(queue, out) })
}

fn end(queue: Pointer) -> Result<Pointer, i32> {
    // SAFETY: the out pointer is good.
    pointed(|out| unsafe { cnQueueEndCapture(queue, out) })
}

fn exchange(mut mode: i32) -> i32 {
    // SAFETY: the pointer is good.
    assert_eq!(unsafe { cnThreadExchangeQueueCaptureMode(&raw mut mode) }, 0);
    mode
}

fn leftovers() -> [u64; 4] {
    let mut left = [0; 4];
    // SAFETY: there is room for four numbers.
    unsafe { standin_leftovers(left.as_mut_ptr()) };
    left
}

#[test]
fn results_have_names_and_names_have_to_fit() {
    let _turn = turn();
    // SAFETY: the out pointer is good, and the text static.
    let name = |code| unsafe {
        let mut text = ptr::null();
        assert_eq!(cnGetErrorName(code, &raw mut text), 0);
        CStr::from_ptr(text)
    };
    assert_eq!(name(100_100), c"CN_MEMORY_ERROR_OUT_OF_MEMORY");
    assert!(name(4711).to_str().unwrap().contains("not in the scope"));
    let mut room = [0; 64];
    // SAFETY: the buffer has the length given.
    unsafe {
        assert_eq!(cnDeviceGetName(room.as_mut_ptr(), 12, 1), INVALID);
        assert_eq!(cnDeviceGetName(room.as_mut_ptr(), 64, 1), 0);
        assert_eq!(CStr::from_ptr(room.as_ptr()), c"Stand-in MLU");
        assert_eq!(cnDeviceGetName(room.as_mut_ptr(), 64, 0), 100_005);
    }
    // SAFETY: the out pointer is good.
    let attribute = |number| given(|out| unsafe { cnDeviceGetAttribute(out, number, 1) });
    assert_eq!((attribute(0x30B), attribute(0x30C)), (Ok(1), Err(INVALID)));
    assert_eq!(cnInit(1), INVALID);
}

#[test]
fn a_page_is_mapped_whole_and_a_map_needs_access_of_its_own() {
    let _turn = turn();
    let before = leftovers();
    let (page, base) = (create(PLAIN, 2 * GRANULE).unwrap(), reserve(6 * GRANULE));
    assert_ne!(cnMemMap(base, GRANULE, 0, page, 0), 0, "a part");
    assert_eq!(cnMemMap(base, 2 * GRANULE, GRANULE, page, 0), INVALID, "an offset");
    assert_eq!(cnMemMap(base, 2 * GRANULE, 0, page, 1), INVALID, "flags");
    let second = base + 2 * GRANULE;
    for at in [base, second] {
        assert_eq!(cnMemMap(at, 2 * GRANULE, 0, page, 0), 0);
    }
    assert_eq!(cnMemMap(base + GRANULE, 2 * GRANULE, 0, page, 0), INVALID, "over another");
    let (mut word, seven) = (0_u64, 7_u64);
    // SAFETY: a word of this stack.
    let write = |at| unsafe { cnMemcpyHtoD(at, (&raw const seven).cast(), 8) };
    assert_ne!(write(base), 0, "before it has access");
    assert_eq!(access(base, 4 * GRANULE, ACCESS, 1), INVALID, "two maps");
    assert_eq!(access(base, GRANULE, ACCESS, 1), INVALID, "half a map");
    assert_eq!(access(base, 2 * GRANULE, ACCESS, 2), INVALID, "two descriptions");
    // CUDA's read and write is 3.
    assert_eq!(access(base, 2 * GRANULE, AccessDesc { access: 3, ..ACCESS }, 1), INVALID);
    let other = AccessDesc { location: Location { kind: 1, id: 1 }, ..ACCESS };
    assert_eq!(access(base, 2 * GRANULE, other, 1), INVALID, "another device");
    assert_eq!((access(base, 2 * GRANULE, ACCESS, 1), access(second, 2 * GRANULE, ACCESS, 1)), (0, 0));
    assert_eq!(write(base), 0);
    // SAFETY: a word of this stack.
    assert_eq!(unsafe { cnMemcpyDtoH((&raw mut word).cast(), second, 8) }, 0);
    assert_eq!(word, 7);
    assert_eq!(cnMemUnmap(base, 4 * GRANULE), INVALID, "two maps");
    assert_eq!(cnMemUnmap(base + GRANULE, GRANULE), INVALID, "a part");
    assert_eq!(cnMemAddressFree(base, 6 * GRANULE), INVALID, "while mapped");
    assert_eq!(cnMemRelease(page), 0, "while mapped");
    assert_eq!((cnMemUnmap(base, 2 * GRANULE), cnMemUnmap(base, 2 * GRANULE)), (0, INVALID));
    assert_eq!((cnMemUnmap(second, 2 * GRANULE), cnMemAddressFree(base, 6 * GRANULE)), (0, 0));
    assert_eq!(leftovers(), before);
}

#[test]
fn a_page_is_plain_memory_of_a_device_that_there_is() {
    let _turn = turn();
    for prop in [
        AllocationProp { kind: 0, ..PLAIN },
        AllocationProp { handle_types: 1, ..PLAIN },
        AllocationProp { location: Location { kind: 0, id: 1 }, ..PLAIN },
        AllocationProp { compression: 1, ..PLAIN },
        AllocationProp { security: 1, ..PLAIN },
    ] {
        assert_eq!(create(prop, GRANULE), Err(INVALID), "{prop:?}");
    }
    assert_eq!(
        create(AllocationProp { location: Location { kind: 1, id: 9 }, ..PLAIN }, GRANULE),
        Err(100_005)
    );
    assert_eq!(create(PLAIN, GRANULE + 4096), Err(INVALID));
    assert_eq!(create(PLAIN, 65 << 30), Err(100_100));
    let mut prop = PLAIN;
    // SAFETY: both pointers are good.
    let granularity =
        |option| given(|out| unsafe { cnMemGetAllocationGranularity(out, &raw mut prop, option) });
    assert_eq!([0, 1, 2].map(granularity), [Ok(GRANULE), Ok(GRANULE), Err(INVALID)]);
}

#[test]
fn queues_notifiers_and_copies_need_a_context_and_pages_do_not() {
    let _turn = turn();
    let (mine, placed) = (queue() as usize, notifier() as usize);
    let second = context(1) as usize;
    std::thread::spawn(move || {
        let (mine, placed) = (mine as Pointer, placed as Pointer);
        let (mut free, mut total, mut word) = (0, 0, 0_u64);
        // SAFETY: out pointers are good.
        unsafe {
            assert_eq!(pointed(|out| cnCtxGetCurrent(out)), Ok(ptr::null_mut()), "none is null");
            assert_eq!(pointed(|out| cnCreateQueue(out, 0)), Err(100_201));
            assert_eq!(pointed(|out| cnCreateNotifier(out, 4)), Err(100_201));
            assert_eq!(cnMemGetInfo(&raw mut free, &raw mut total), 100_201);
            assert_eq!(cnMemcpyDtoH((&raw mut word).cast(), 0, 8), 100_201);
        }
        assert_eq!((cnPlaceNotifier(placed, mine), status(mine)), (100_201, Ok(0)));
        assert_eq!(create(PLAIN, GRANULE).map(|page| cnMemRelease(page)), Ok(0));
        assert_eq!(cnCtxSetCurrent(8 as Pointer), 100_201);
        assert_eq!(cnCtxSetCurrent(second as Pointer), 0);
        assert_eq!((cnPlaceNotifier(placed, mine), cnDestroyQueue(mine)), (100_201, 100_201), "another's");
        assert_eq!(cnCtxSetCurrent(ptr::null_mut()), 0, "there is a way back to none");
    })
    .join()
    .unwrap();
    assert_eq!((cnDestroyQueue(mine as Pointer), cnDestroyNotifier(placed as Pointer)), (0, 0));
    assert_eq!([1, 2].map(|number| cnQueueSync(number as Pointer)), [100_014; 2], "numbers are no queues");
    assert_eq!(cnSharedContextRelease(2), 0);
}

#[test]
fn a_notifier_has_to_be_placed_before_anybody_asks() {
    let _turn = turn();
    // SAFETY: the out pointer is good.
    let of_kind = |flag| pointed(|out| unsafe { cnCreateNotifier(out, flag) });
    assert_eq!([0, 2, 8].map(of_kind), [Err(INVALID); 3]);
    let (queue, notifier) = (queue(), notifier());
    let asked =
        || [cnQueryNotifier(notifier), cnWaitNotifier(notifier), cnQueueWaitNotifier(queue, notifier)];
    assert_eq!(asked(), [100_080; 3]);
    assert_eq!((cnPlaceNotifier(notifier, queue), cnPlaceNotifier(notifier, queue)), (0, 0));
    assert_eq!(asked(), [0; 3]);
    standin_keep_busy(1);
    assert_eq!([cnQueryNotifier(notifier), cnQueryNotifier(notifier)], [1, 0]);
    standin_fail(1, 200_000);
    assert_eq!((cnDestroyNotifier(notifier), cnDestroyNotifier(notifier)), (200_000, 0));
    assert_eq!((cnDestroyNotifier(notifier), cnDestroyQueue(queue)), (100_014, 0));
}

#[test]
fn what_is_unsafe_loses_every_capture_unless_the_thread_is_relaxed() {
    let _turn = turn();
    let (captured, other, notifier) = (queue(), queue(), notifier());
    assert_eq!(cnPlaceNotifier(notifier, other), 0);
    let page = create(PLAIN, GRANULE).unwrap();
    let base = reserve(GRANULE);
    let mut word = 0_u64;
    let word = (&raw mut word) as usize;
    let calls: [(&str, &dyn Fn() -> i32); 9] = [
        ("create", &|| create(PLAIN, GRANULE).map_or_else(|code| code, |page| cnMemRelease(page))),
        ("reserve", &|| {
            // SAFETY: the out pointer is good.
            let made = given(|out| unsafe { cnMemAddressReserve(out, GRANULE, 0, 0, 0) });
            made.map_or_else(|code| code, |base| cnMemAddressFree(base, GRANULE))
        }),
        ("map", &|| cnMemMap(base, GRANULE, 0, page, 0)),
        ("access", &|| access(base, GRANULE, ACCESS, 1)),
        // SAFETY: a word of this stack.
        ("read", &|| unsafe { cnMemcpyDtoH(word as Pointer, base, 8) }),
        ("unmap", &|| cnMemUnmap(base, GRANULE)),
        ("query", &|| cnQueryNotifier(notifier)),
        ("wait", &|| cnWaitNotifier(notifier)),
        ("synchronise", &|| cnQueueSync(other)),
    ];
    for mode in 0..=2 {
        for (what, call) in &calls {
            assert_eq!(cnQueueBeginCapture(captured, mode), 0);
            assert_eq!((call(), status(captured)), (100_360, Ok(2)), "{what} in mode {mode}");
            assert_eq!(end(captured), Err(100_361));
        }
        assert_eq!(cnQueueBeginCapture(captured, mode), 0);
        let before = exchange(2);
        for (what, call) in &calls {
            assert_eq!((call(), status(captured)), (0, Ok(1)), "{what}, relaxed, in mode {mode}");
        }
        assert_eq!(exchange(before), 2);
        assert_eq!(end(captured).map(|topo| cnTaskTopoDestroy(topo)), Ok(0));
        // Waiting for the context is refused in any mode.
        assert_eq!(cnQueueBeginCapture(captured, mode), 0);
        let before = exchange(2);
        assert_eq!(cnCtxSync(), 100_360);
        exchange(before);
        assert_eq!(end(captured), Err(100_361));
    }
    assert_eq!((cnMemRelease(page), cnMemAddressFree(base, GRANULE)), (0, 0));
    assert_eq!((cnDestroyNotifier(notifier), cnDestroyQueue(captured), cnDestroyQueue(other)), (0, 0, 0));
}

#[test]
fn the_default_queue_is_not_captured_nor_used_meanwhile() {
    let _turn = turn();
    let (captured, event) = (queue(), notifier());
    let null = ptr::null_mut();
    assert_eq!(cnPlaceNotifier(event, null), 0);
    assert_ne!(cnQueueBeginCapture(null, 0), 0);
    assert_eq!(cnQueueBeginCapture(captured, 0), 0);
    assert_eq!(cnPlaceNotifier(event, null), 100_360);
    assert_eq!(status(null), Err(100_014), "nor asked");
    assert_eq!(end(captured).map(|topo| cnTaskTopoDestroy(topo)), Ok(0), "and the capture goes on");
    assert_eq!((cnDestroyNotifier(event), cnDestroyQueue(captured)), (0, 0));
}

#[test]
fn a_capture_is_work_that_runs_when_its_entity_is_invoked() {
    let _turn = turn();
    let queue = queue();
    let (page, base) = (create(PLAIN, GRANULE).unwrap(), reserve(GRANULE));
    assert_eq!((cnMemMap(base, GRANULE, 0, page, 0), access(base, GRANULE, ACCESS, 1)), (0, 0));
    assert_eq!(cnQueueBeginCapture(queue, 0), 0);
    assert_eq!(cnMemsetD32Async(base, 5, 2, queue), 0);
    let topo = end(queue).unwrap();
    // SAFETY: the out pointer is good; node and log are optional.
    let entity =
        pointed(|out| unsafe { cnTaskTopoInstantiate(out, topo, ptr::null_mut(), ptr::null_mut(), 0) })
            .unwrap();
    let mut words = [0_u32; 2];
    // SAFETY: two words of this stack.
    let mut read = || unsafe { cnMemcpyDtoH(words.as_mut_ptr().cast(), base, 8) };
    assert_eq!((read(), cnTaskTopoEntityInvoke(entity, queue), read()), (0, 0, 0));
    assert_eq!(words, [5, 5]);
    assert_eq!((cnTaskTopoDestroy(topo), cnTaskTopoEntityDestroy(entity)), (0, 0));
    assert_eq!((cnTaskTopoDestroy(topo), cnTaskTopoEntityDestroy(entity)), (100_014, 100_014));
    assert_eq!((cnMemUnmap(base, GRANULE), cnMemAddressFree(base, GRANULE), cnMemRelease(page)), (0, 0, 0));
    assert_eq!(cnDestroyQueue(queue), 0);
}

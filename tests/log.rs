//! A log sink is called without a library lock: it may call the library.
//!
//! The sink is process-wide, so these tests have their own program and run one at a time. A hang
//! fails after a timeout.

#![allow(clippy::undocumented_unsafe_blocks, reason = "each call's contract allows its arguments")]

use std::ffi::{c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use vmmgraph::capi::*;
use vmmgraph::{Device, DriverChoice, HostOptions, Options, SharedVmmAllocator, Stream};

static TURN: Mutex<()> = Mutex::new(());
static DEVICE: AtomicUsize = AtomicUsize::new(0);
static ARENA: AtomicUsize = AtomicUsize::new(0);

/// A line, and the library's answers at its delivery.
#[derive(Clone, Debug)]
struct Seen {
    text: String,
    thread: ThreadId,
    answers: [i32; 3],
    spaces: u64,
    json: String,
}

static RUST: Mutex<Option<Arc<SharedVmmAllocator>>> = Mutex::new(None);

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

fn seen() -> MutexGuard<'static, Vec<Seen>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lines(word: &str) -> Vec<Seen> {
    seen().iter().filter(|seen| seen.text.contains(word)).cloned().collect()
}

/// Queries the library about a device and an arena, then stores the line.
unsafe extern "C" fn curious(_: i32, text: *const c_char, length: usize, _: *mut c_void) {
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    let (device, arena) = (DEVICE.load(Ordering::SeqCst), ARENA.load(Ordering::SeqCst));
    let mut device_stats: vmmgraph_device_stats_t = unsafe { zeroed() };
    device_stats.struct_size = size_of::<vmmgraph_device_stats_t>();
    let mut stats: vmmgraph_arena_stats_t = unsafe { zeroed() };
    stats.struct_size = size_of::<vmmgraph_arena_stats_t>();
    let (mut json, mut needed) = (vec![0u8; 1 << 16], 0);
    let answers = unsafe {
        [
            vmmgraph_device_stats(device as _, &raw mut device_stats),
            vmmgraph_arena_stats(arena as _, &raw mut stats),
            vmmgraph_arena_stats_json(arena as _, json.as_mut_ptr().cast(), json.len(), &raw mut needed),
        ]
    };
    let rust = RUST.lock().unwrap_or_else(PoisonError::into_inner).clone();
    assert!(rust.is_none_or(|rust| rust.stats().spaces <= 1));
    // An error inside the sink must not reach the caller.
    assert_eq!(vmmgraph_arena_mark(null_mut()), VMMGRAPH_ERROR_INVALID_HANDLE);
    json.truncate(needed.saturating_sub(1));
    seen().push(Seen {
        text: String::from_utf8_lossy(text).into_owned(),
        thread: thread::current().id(),
        answers,
        spaces: stats.spaces,
        json: String::from_utf8_lossy(&json).into_owned(),
    });
}

/// Runs a test with the sink on its own thread, for a minute at most.
fn watched(body: impl FnOnce() + Send + 'static) {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    seen().clear();
    let (done, finished) = mpsc::channel();
    let work = thread::spawn(move || {
        let all = VMMGRAPH_LOG_TRACE;
        assert_eq!(unsafe { vmmgraph_set_log_sink(Some(curious), null_mut(), None, all) }, VMMGRAPH_OK);
        body();
        assert_eq!(unsafe { vmmgraph_set_log_sink(None, null_mut(), None, 0) }, VMMGRAPH_OK);
        let _ = done.send(());
    });
    match finished.recv_timeout(Duration::from_secs(60)) {
        Err(mpsc::RecvTimeoutError::Timeout) => {
            // A hung thread cannot be joined, and later tests would hang.
            eprintln!("hangs after {:?}", SEEN.try_lock().map(|seen| seen.len()));
            std::process::exit(1);
        }
        _ => work.join().unwrap(),
    }
}

fn small_arena(ordinal: i32) -> (vmmgraph_device_t, vmmgraph_arena_t) {
    let mut options: vmmgraph_device_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_device_options_t>();
    (options.driver, options.device, options.host_granularity_bytes) = (VMMGRAPH_DRIVER_HOST, ordinal, 4096);
    let (mut device, mut arena) = (null_mut(), null_mut());
    assert_eq!(unsafe { vmmgraph_device_open(&raw const options, &raw mut device) }, VMMGRAPH_OK);
    DEVICE.store(device as usize, Ordering::SeqCst);
    let mut options: vmmgraph_arena_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_arena_options_t>();
    (options.small_page_bytes, options.large_page_bytes) = (64 << 10, 1 << 20);
    options.budget_bytes = 4 << 20;
    assert_eq!(unsafe { vmmgraph_arena_create(device, &raw const options, &raw mut arena) }, VMMGRAPH_OK);
    ARENA.store(arena as usize, Ordering::SeqCst);
    (device, arena)
}

fn open(arena: vmmgraph_arena_t) -> vmmgraph_space_t {
    let mut space = null_mut();
    assert_eq!(unsafe { vmmgraph_space_open(arena, &raw mut space) }, VMMGRAPH_OK);
    space
}

fn allocate(space: vmmgraph_space_t, bytes: u64) -> i32 {
    let mut block = null_mut();
    unsafe { vmmgraph_space_allocate(space, bytes, null_mut(), &raw mut block) }
}

fn last_status() -> i32 {
    let mut info: vmmgraph_error_info_t = unsafe { zeroed() };
    info.struct_size = size_of::<vmmgraph_error_info_t>();
    assert_eq!(unsafe { vmmgraph_last_error(&raw mut info) }, VMMGRAPH_OK);
    info.status
}

fn wait_for(what: &str, ready: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !ready() {
        assert!(Instant::now() < deadline, "{what} never came: {:?}", seen());
        thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_sink_may_ask_while_spaces_grow_fail_are_sealed_trimmed_and_destroyed() {
    watched(|| {
        let (device, arena) = small_arena(1);
        let space = open(arena);
        assert_eq!(allocate(space, 2 << 20), VMMGRAPH_OK);
        assert_eq!(allocate(space, 3 << 20), VMMGRAPH_ERROR_OVER_BUDGET);
        assert_eq!(last_status(), VMMGRAPH_ERROR_OVER_BUDGET);
        assert_eq!(lines("growing a space failed").len(), 1, "{:?}", seen());
        assert_eq!(unsafe { vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, null_mut()) }, VMMGRAPH_OK);
        let sealed = lines("space sealed");
        assert_eq!(sealed.len(), 1, "{:?}", seen());
        assert_eq!((sealed[0].answers, sealed[0].spaces), ([VMMGRAPH_OK; 3], 1));
        assert!(sealed[0].json.contains("\"phase\":\"sealed\""), "{}", sealed[0].json);
        assert_eq!(unsafe { vmmgraph_arena_trim(arena, null_mut()) }, VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
        let at = |word: &str| seen().iter().position(|seen| seen.text.contains(word));
        assert!(at("arena created") < at("growing a space failed") && at("growing") < at("space sealed"));
        assert!(seen().iter().all(|seen| seen.thread == thread::current().id()), "{:?}", seen());
    });
}

#[test]
fn lines_of_calls_inside_a_launch_come_when_the_replay_has_ended() {
    struct Inside {
        other: vmmgraph_space_t,
        lines: [usize; 2],
    }
    unsafe extern "C" fn launch(user: *mut c_void) {
        let inside = unsafe { &mut *user.cast::<Inside>() };
        inside.lines[0] = seen().len();
        assert_eq!(allocate(inside.other, 8 << 20), VMMGRAPH_ERROR_OVER_BUDGET);
        inside.lines[1] = seen().len();
    }
    watched(|| {
        let (device, arena) = small_arena(2);
        let [replayed, other] = [open(arena), open(arena)];
        assert_eq!(allocate(replayed, 1 << 20), VMMGRAPH_OK);
        let retain = VMMGRAPH_RETAIN_SHARED_PAGES;
        assert_eq!(unsafe { vmmgraph_space_seal(replayed, retain, null_mut()) }, VMMGRAPH_OK);
        let mut inside = Inside { other, lines: [0; 2] };
        let user = (&raw mut inside).cast();
        assert_eq!(unsafe { vmmgraph_space_replay(replayed, null_mut(), Some(launch), user) }, VMMGRAPH_OK);
        assert_eq!(inside.lines[0], inside.lines[1], "a line came inside the launch");
        let failed = lines("growing a space failed");
        assert_eq!(failed.len(), 1, "{:?}", seen());
        assert_eq!((failed[0].answers, failed[0].spaces), ([VMMGRAPH_OK; 3], 2));
        assert_eq!(unsafe { vmmgraph_arena_trim(arena, null_mut()) }, VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_destroy(replayed), VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_destroy(other), VMMGRAPH_OK);
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

static FIRST: AtomicU32 = AtomicU32::new(0);
static DROPPED: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn replaces_itself(_: i32, _: *const c_char, _: usize, _: *mut c_void) {
    FIRST.fetch_add(1, Ordering::SeqCst);
    let all = VMMGRAPH_LOG_TRACE;
    assert_eq!(unsafe { vmmgraph_set_log_sink(Some(curious), null_mut(), None, all) }, VMMGRAPH_OK);
    assert_eq!(DROPPED.load(Ordering::SeqCst), 0, "dropped while it is in use");
}

unsafe extern "C" fn dropped(_: *mut c_void) {
    DROPPED.fetch_add(1, Ordering::SeqCst);
}

#[test]
fn a_sink_may_put_another_in_its_place() {
    watched(|| {
        let all = VMMGRAPH_LOG_TRACE;
        let set = unsafe { vmmgraph_set_log_sink(Some(replaces_itself), null_mut(), Some(dropped), all) };
        assert_eq!(set, VMMGRAPH_OK);
        let (device, arena) = small_arena(3);
        assert_eq!((FIRST.load(Ordering::SeqCst), DROPPED.load(Ordering::SeqCst)), (1, 1));
        assert_eq!(lines("arena created").len(), 1, "{:?}", seen());
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

#[test]
fn many_threads_log_at_once_and_each_in_its_order() {
    watched(|| {
        let (device, arena) = small_arena(4);
        let arena_number = arena as usize;
        let threads: Vec<_> = (0..8)
            .map(|_| {
                thread::spawn(move || {
                    for _ in 0..20 {
                        let space = open(arena_number as _);
                        assert_eq!(allocate(space, 8 << 20), VMMGRAPH_ERROR_OVER_BUDGET);
                        assert_eq!(unsafe { vmmgraph_space_seal(space, 0, null_mut()) }, VMMGRAPH_OK);
                        assert_eq!(vmmgraph_space_destroy(space), VMMGRAPH_OK);
                    }
                    thread::current().id()
                })
            })
            .collect();
        for thread in threads {
            let id = thread.join().unwrap();
            let of_thread: Vec<_> = seen().iter().filter(|seen| seen.thread == id).cloned().collect();
            let words: Vec<_> = of_thread.iter().map(|seen| seen.text.contains("space sealed")).collect();
            assert_eq!(words.iter().filter(|sealed| **sealed).count(), 20, "{of_thread:?}");
            assert!(!words[0] && words.chunks(2).all(|pair| pair == [false, true]), "{of_thread:?}");
            assert!(of_thread.iter().all(|seen| seen.answers == [VMMGRAPH_OK; 3]));
        }
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

#[test]
fn lines_of_rust_callers_come_without_a_lock_too() {
    watched(|| {
        let (device, arena) = small_arena(5);
        let host = HostOptions { granularity: 4096, ..HostOptions::default() };
        let shared = Device::open(DriverChoice::HOST, 5, host).unwrap();
        let options = Options {
            small_page_bytes: 64 << 10,
            large_page_bytes: 1 << 20,
            budget_bytes: Some(4 << 20),
            ..Options::default()
        };
        let rust = Arc::new(SharedVmmAllocator::new(&shared, &options).unwrap());
        *RUST.lock().unwrap() = Some(Arc::clone(&rust));
        let worker = thread::spawn(move || {
            for _ in 0..10 {
                let space = rust.open_space().unwrap();
                assert!(space.allocate(8 << 20, Stream::LEGACY).is_err());
                space.seal().unwrap();
            }
        });
        worker.join().unwrap();
        wait_for("a line", || lines("space sealed").len() == 10);
        let words: Vec<_> = seen()
            .iter()
            .filter(|seen| seen.text.contains("growing") || seen.text.contains("sealed"))
            .map(|seen| seen.text.contains("sealed"))
            .collect();
        assert_eq!(words.len(), 20);
        assert!(words.chunks(2).all(|pair| pair == [false, true]), "{words:?}");
        assert!(lines("space sealed").iter().all(|seen| seen.answers == [VMMGRAPH_OK; 3]));
        *RUST.lock().unwrap() = None;

        // Rust and C calls on one thread keep their order.
        seen().clear();
        let mut expected = Vec::new();
        let rust = SharedVmmAllocator::new(&shared, &options).unwrap();
        for _ in 0..50 {
            let space = rust.open_space().unwrap();
            expected.push(space.id());
            space.seal().unwrap();
            let space = open(arena);
            let mut stats: vmmgraph_space_stats_t = unsafe { zeroed() };
            stats.struct_size = size_of::<vmmgraph_space_stats_t>();
            assert_eq!(unsafe { vmmgraph_space_stats(space, &raw mut stats) }, VMMGRAPH_OK);
            expected.push(stats.id);
            assert_eq!(unsafe { vmmgraph_space_seal(space, 0, null_mut()) }, VMMGRAPH_OK);
            assert_eq!(vmmgraph_space_destroy(space), VMMGRAPH_OK);
        }
        wait_for("a line", || lines("space sealed").len() == expected.len());
        let found: Vec<u64> = lines("space sealed")
            .iter()
            .filter_map(|seen| seen.text.split("space=").nth(1)?.split(' ').next()?.parse().ok())
            .collect();
        assert_eq!(found, expected);
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

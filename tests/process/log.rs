//! Log lines reach the sink in order, when the outermost C function ends.
//!
//! The sink is process-wide, so these tests have their own program and run one at a time. A hang
//! fails after a timeout.

#![allow(clippy::undocumented_unsafe_blocks, reason = "each call's contract allows its arguments")]

use std::ffi::{c_char, c_void};
use std::mem::{size_of, zeroed};
use std::ptr::null_mut;
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, ThreadId};
use std::time::Duration;

use vmmgraph::capi::*;
use vmmgraph::{Device, DriverChoice, HostOptions, Options, SharedVmmAllocator, Stream};
use vmmgraph_testkit::alone;

/// A line and its thread.
#[derive(Clone, Debug)]
struct Seen {
    text: String,
    thread: ThreadId,
}

static SEEN: Mutex<Vec<Seen>> = Mutex::new(Vec::new());

fn seen() -> MutexGuard<'static, Vec<Seen>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lines(word: &str) -> Vec<Seen> {
    seen().iter().filter(|seen| seen.text.contains(word)).cloned().collect()
}

/// Keeps the line.
unsafe extern "C" fn keep(_: i32, text: *const c_char, length: usize, _: *mut c_void) {
    let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
    let text = String::from_utf8_lossy(text).into_owned();
    seen().push(Seen { text, thread: thread::current().id() });
}

/// Runs a test with the sink on its own thread, for a minute at most.
fn watched(body: impl FnOnce() + Send + 'static) {
    let _turn = alone();
    seen().clear();
    let (done, finished) = mpsc::channel();
    let work = thread::spawn(move || {
        let all = VMMGRAPH_LOG_TRACE;
        assert_eq!(unsafe { vmmgraph_set_log_sink(Some(keep), null_mut(), None, all) }, VMMGRAPH_OK);
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
    let mut options: vmmgraph_arena_options_t = unsafe { zeroed() };
    options.struct_size = size_of::<vmmgraph_arena_options_t>();
    (options.small_page_bytes, options.large_page_bytes) = (64 << 10, 1 << 20);
    options.budget_bytes = 4 << 20;
    assert_eq!(unsafe { vmmgraph_arena_create(device, &raw const options, &raw mut arena) }, VMMGRAPH_OK);
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

#[test]
fn lines_come_in_order_on_the_thread_of_the_call() {
    watched(|| {
        let (device, arena) = small_arena(1);
        let space = open(arena);
        assert_eq!(allocate(space, 2 << 20), VMMGRAPH_OK);
        assert_eq!(allocate(space, 3 << 20), VMMGRAPH_ERROR_OVER_BUDGET);
        assert_eq!(lines("growing a space failed").len(), 1, "{:?}", seen());
        assert_eq!(unsafe { vmmgraph_space_seal(space, VMMGRAPH_RETAIN_DEFAULT, null_mut()) }, VMMGRAPH_OK);
        let sealed = lines("space sealed");
        assert_eq!(sealed.len(), 1, "{:?}", seen());
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
        assert_eq!(unsafe { vmmgraph_arena_trim(arena, null_mut()) }, VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_destroy(replayed), VMMGRAPH_OK);
        assert_eq!(vmmgraph_space_destroy(other), VMMGRAPH_OK);
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
        }
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

#[test]
fn lines_of_rust_callers_come_with_the_next_c_function() {
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
        let rust = SharedVmmAllocator::new(&shared, &options).unwrap();
        let worker = thread::spawn(move || {
            for _ in 0..10 {
                let space = rust.open_space().unwrap();
                assert!(space.allocate(8 << 20, Stream::LEGACY).is_err());
                space.seal().unwrap();
            }
        });
        // The thread is gone; its lines come with the next C function.
        worker.join().unwrap();
        assert!(lines("space sealed").is_empty());
        assert_eq!(vmmgraph_arena_mark(arena), VMMGRAPH_OK);
        assert_eq!(lines("space sealed").len(), 10);
        let words: Vec<_> = seen()
            .iter()
            .filter(|seen| seen.text.contains("growing") || seen.text.contains("sealed"))
            .map(|seen| seen.text.contains("sealed"))
            .collect();
        assert_eq!(words.len(), 20);
        assert!(words.chunks(2).all(|pair| pair == [false, true]), "{words:?}");

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
        let found: Vec<u64> = lines("space sealed")
            .iter()
            .filter_map(|seen| seen.text.split("space=").nth(1)?.split(' ').next()?.parse().ok())
            .collect();
        assert_eq!(found, expected);
        vmmgraph_arena_destroy(arena);
        vmmgraph_device_close(device);
    });
}

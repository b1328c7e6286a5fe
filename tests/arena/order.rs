//! Replay order: the driver calls that establish it, without gaps.

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cudarc::driver::sys;
use vmmgraph::driver::{CudaDriver, HostDriver};
use vmmgraph::{Device, Error, HostOptions, Options, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{FaultyDriver, MIB, alone, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

fn logged() -> (Arc<FaultyDriver>, SharedVmmAllocator) {
    logged_with(&Options::default())
}

fn logged_with(options: &Options) -> (Arc<FaultyDriver>, SharedVmmAllocator) {
    let driver = FaultyDriver::new(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let device = Device::with_driver(driver.clone());
    let arena = SharedVmmAllocator::new(&device, options).unwrap();
    driver.start_log();
    (driver, arena)
}

fn sealed(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().unwrap();
    let block = space.allocate(MIB, A).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    space
}

#[test]
fn the_same_stream_costs_no_driver_call_and_another_one_waits_for_an_event() {
    let (driver, arena) = logged();
    let spaces = [sealed(&arena), sealed(&arena)];
    let _ = driver.take_log();

    for turn in 0..4 {
        spaces[turn % 2].replay(A, || assert!(driver.take_log().is_empty())).unwrap();
    }
    assert!(driver.take_log().is_empty());

    let calls = ["event_create", "event_record Event(1) Stream(160)", "event_wait Event(1) Stream(176)"];
    spaces[0].replay(B, || assert_eq!(driver.take_log(), calls)).unwrap();
    spaces[1].replay(B, || assert!(driver.take_log().is_empty())).unwrap();

    // A mark records once; the next change of stream only waits.
    arena.mark().unwrap();
    assert_eq!(driver.take_log(), ["event_create", "event_record Event(2) Stream(176)"]);
    arena.mark().unwrap();
    let third = arena.open_space().unwrap();
    assert!(driver.take_log().is_empty());
    // After a mark every stream waits, even with the same handle, which may be reused.
    spaces[0].replay(B, || assert_eq!(driver.take_log(), ["event_wait Event(2) Stream(176)"])).unwrap();
    spaces[0]
        .replay(A, || {
            assert_eq!(
                driver.take_log(),
                ["event_record Event(1) Stream(176)", "event_wait Event(1) Stream(160)"]
            );
        })
        .unwrap();

    // Opening a space marks: its capture may use the last replay's stream.
    let fourth = arena.open_space().unwrap();
    assert_eq!(driver.take_log(), ["event_record Event(2) Stream(160)"]);
    drop((third, fourth));
}

/// The mark comes during a launch on the same stream, or after an earlier mark.
#[test]
fn a_mark_that_another_thread_takes_during_a_launch_does_not_cover_it() {
    for replayed_before in [true, false] {
        let (driver, arena) = logged();
        let space = sealed(&arena);
        if replayed_before {
            space.replay(A, || ()).unwrap();
        }
        let _ = driver.take_log();
        let record = |number| format!("event_record Event({number}) Stream(160)");
        let marked = |number| vec!["event_create".to_owned(), record(number)];
        space
            .replay(A, || {
                std::thread::scope(|threads| threads.spawn(|| arena.mark().unwrap()).join().unwrap());
                assert_eq!(driver.take_log(), marked(1));
            })
            .unwrap();
        let wait = "event_wait Event(2) Stream(176)".to_owned();
        space.replay(B, || assert_eq!(driver.take_log(), [marked(2), vec![wait]].concat())).unwrap();
    }
}

#[test]
fn what_a_replayed_space_leaves_is_unmapped_when_the_replays_are_done_and_nobody_waits_for_that() {
    let (driver, arena) = logged();
    let space = sealed(&arena);
    space.replay(B, || ()).unwrap();
    driver.set_busy(true);
    let _ = driver.take_log();
    drop(space);
    let log = driver.take_log();
    assert!(log.iter().any(|call| call.starts_with("event_record")), "{log:?}");
    assert!(
        !log.iter().any(|call| call.starts_with("event_synchronize") || call.starts_with("unmap")),
        "{log:?}"
    );
    assert_eq!(arena.device().stats().pending, 1);
    drop(sealed(&arena));
    assert_eq!(arena.device().stats().pending, 2);
    driver.set_busy(false);
    arena.trim().unwrap();
    assert_eq!((arena.device().stats().pending, arena.device().stats().physical_bytes), (0, 0));
}

#[test]
fn a_launch_that_panics_leaves_the_order_usable() {
    let (_, arena) = logged();
    let space = sealed(&arena);
    let panics =
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| space.replay(A, || panic!("planted"))));
    assert!(panics.is_err());
    assert_eq!(space.replay(B, || 7), Ok(7));
}

#[test]
fn a_launch_that_uses_the_order_of_its_own_arena_is_refused_and_does_not_hang() {
    let (_, arena) = logged();
    let (outer, inner) = (sealed(&arena), sealed(&arena));
    let mut dropped = Some(sealed(&arena));
    let refused = |result: Result<(), Error>| {
        assert!(matches!(result, Err(Error::WrongState { sentence }) if sentence.contains("under way")))
    };
    let block = outer
        .replay(A, || {
            refused(inner.replay(A, || panic!("launched")));
            refused(arena.mark());
            refused(arena.trim().map(drop));
            refused(arena.open_space().map(drop));
            refused(arena.switch_to_new_virtual_space());
            // Never replayed, so destroyed at once.
            drop(dropped.take());
            assert_eq!(arena.device().stats().pending, 0);
            refused(arena.allocate(MIB, A).map(drop));
            assert!(arena.stats().spaces >= 2 && arena.device().trim().is_ok());
        })
        .and_then(|()| arena.allocate(MIB, A));
    assert!(block.is_ok());
    let (_, other) = logged();
    let elsewhere = sealed(&other);
    assert_eq!(outer.replay(A, || elsewhere.replay(B, || 5)), Ok(Ok(5)));
}

#[test]
fn an_open_space_cannot_be_replayed_and_a_sealed_one_cannot_grow() {
    let (_, arena) = logged();
    let space = arena.open_space().unwrap();
    let refused = space.replay(A, || panic!("launched"));
    assert!(
        matches!(refused, Err(Error::WrongState { sentence }) if sentence.contains("it is open; seal it first"))
    );
    space.seal().unwrap();
    assert!(
        matches!(space.allocate(1, A), Err(Error::WrongState { sentence }) if sentence.contains("it is sealed"))
    );
    assert!(matches!(space.seal(), Err(Error::WrongState { .. })));
}

#[test]
fn launches_of_many_threads_never_overlap() {
    let (_, arena) = logged();
    let spaces = [sealed(&arena), sealed(&arena), sealed(&arena)];
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for (thread, space) in spaces.iter().enumerate() {
            let inside = &inside;
            scope.spawn(move || {
                for turn in 0..2_000 {
                    let launch = || {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two launches at once");
                        std::hint::spin_loop();
                        inside.fetch_sub(1, Ordering::SeqCst);
                    };
                    space.replay(stream((thread as u64 + turn) % 4), launch).unwrap();
                }
            });
        }
    });
}

#[test]
fn entering_and_leaving_is_a_replay_in_two_calls() {
    let (driver, arena) = logged();
    let (space, other) = (sealed(&arena), sealed(&arena));
    let refused = |result| assert!(matches!(result, Err(Error::WrongState { .. })));
    refused(space.leave());
    refused(arena.open_space().unwrap().enter(A));
    assert_eq!(arena.stats().replays, 0);

    space.replay(A, || ()).unwrap();
    let _ = driver.take_log();
    space.enter(B).unwrap();
    assert_eq!(
        driver.take_log(),
        ["event_create", "event_record Event(1) Stream(160)", "event_wait Event(1) Stream(176)"]
    );
    // This thread holds the replay slot and would wait for itself.
    refused(other.enter(B));
    refused(other.replay(B, || ()));
    refused(arena.mark());
    std::thread::scope(|scope| {
        let late = scope.spawn(|| other.replay(B, || std::thread::current().id()).unwrap());
        // Only the thread that entered can leave.
        scope.spawn(|| refused(space.leave())).join().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!late.is_finished(), "a replay overtook one that was entered");
        other.leave().unwrap();
        assert_ne!(late.join().unwrap(), std::thread::current().id());
    });
    refused(space.leave());
    space.replay(B, || refused(space.leave())).unwrap();
    assert_eq!(arena.stats().replays, 4);
    space.replay(A, || ()).unwrap();
    assert_eq!(arena.stats().replays, 5);
}

#[test]
fn entered_replays_of_many_threads_never_overlap() {
    let (_, arena) = logged();
    let spaces = [sealed(&arena), sealed(&arena), sealed(&arena)];
    let inside = AtomicU32::new(0);
    std::thread::scope(|scope| {
        for (thread, space) in spaces.iter().enumerate() {
            let inside = &inside;
            scope.spawn(move || {
                for turn in 0..2_000 {
                    space.enter(stream((thread as u64 + turn) % 4)).unwrap();
                    assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two launches at once");
                    std::hint::spin_loop();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    space.leave().unwrap();
                }
            });
        }
    });
}

#[test]
fn a_stream_being_captured_is_never_touched() {
    let _alone = alone();
    fn ok(code: sys::CUresult) {
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
    }
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let mut context = ptr::null_mut();
    let (mut a, mut b) = (ptr::null_mut(), ptr::null_mut());
    let mut graph = ptr::null_mut();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    // SAFETY: out pointers on this stack; the context is retained and current until the end of the
    // test.
    unsafe {
        ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
        ok(sys::cuCtxPushCurrent_v2(context));
        ok(sys::cuStreamCreate(&raw mut a, 1));
        ok(sys::cuStreamCreate(&raw mut b, 1));
    }
    let (on_a, on_b) = (stream(a as u64), stream(b as u64));
    let (first, second) = (sealed(&arena), sealed(&arena));
    first.replay(on_a, || ()).unwrap();

    // SAFETY: a live stream of the current context.
    ok(unsafe { sys::cuStreamBeginCapture_v2(a, mode) });
    let refused = second.replay(on_b, || panic!("launched"));
    assert_eq!(refused, Err(Error::StreamCapturing { stream: on_a.raw() }));
    let refused = second.replay(on_a, || panic!("launched into the capture"));
    assert_eq!(refused, Err(Error::StreamCapturing { stream: on_a.raw() }));
    drop(arena.open_space().unwrap());
    // SAFETY: as above; the capture is intact.
    unsafe {
        ok(sys::cuStreamEndCapture(a, &raw mut graph));
        ok(sys::cuGraphDestroy(graph));
    }

    let space = arena.open_space().unwrap();
    // SAFETY: as above.
    ok(unsafe { sys::cuStreamBeginCapture_v2(a, mode) });
    let block = space.allocate(40 * MIB, on_a).unwrap();
    assert_eq!(second.replay(on_b, || 1), Ok(1));
    space.free(block).unwrap();
    // A space dropped while the last replay's stream is captured is destroyed by a later trim.
    first.replay(on_b, || ()).unwrap();
    // SAFETY: as above.
    ok(unsafe { sys::cuStreamBeginCapture_v2(b, mode) });
    let mapped = device.stats().mappings;
    drop(first);
    assert_eq!((device.stats().pending, device.stats().mappings), (1, mapped));
    // SAFETY: as above.
    unsafe {
        for stream in [a, b] {
            ok(sys::cuStreamEndCapture(stream, &raw mut graph));
            ok(sys::cuGraphDestroy(graph));
        }
    }
    arena.trim().unwrap();
    assert_eq!(device.stats().pending, 0);
    space.seal().unwrap();
    drop((space, second, arena));
    assert_eq!(device.stats().physical_bytes, 0);
    // SAFETY: streams and context are no longer used.
    unsafe {
        ok(sys::cuStreamDestroy_v2(a));
        ok(sys::cuStreamDestroy_v2(b));
        ok(sys::cuCtxPopCurrent_v2(&raw mut context));
        ok(sys::cuDevicePrimaryCtxRelease_v2(0));
    }
}

#[test]
fn a_serial_arena_refuses_other_streams_and_threads_and_counts_what_it_launched() {
    let (_, arena) = logged_with(&serial());
    let spaces = [sealed(&arena), sealed(&arena)];
    assert_eq!(arena.replay_seq(), 0);
    for turn in 0..3 {
        let number = turn as u64 + 1;
        spaces[turn % 2].replay(A, || assert_eq!(arena.replay_seq(), number)).unwrap();
    }
    elsewhere(spaces[0].replay(B, || panic!("launched")));
    std::thread::scope(|scope| {
        scope.spawn(|| elsewhere(spaces[0].replay(A, || panic!("launched")))).join().unwrap();
    });
    spaces[1].replay(A, || ()).unwrap();
    assert_eq!(arena.replay_seq(), 4);
    assert_eq!(arena.stats().replays, 4);
    elsewhere(arena.eager_scope(B).map(drop));
    drop(arena.eager_scope(A).unwrap());
    assert_eq!(arena.replay_seq(), 5);
}

fn serial() -> Options {
    Options { serial: true, ..Options::default() }
}

fn elsewhere(result: Result<(), Error>) {
    assert!(
        matches!(&result, Err(Error::WrongState { sentence }) if sentence.contains("serial")),
        "{result:?}"
    );
}

#[test]
fn what_a_serial_arena_refuses_is_refused_before_anything_is_prepared() {
    let (driver, arena) = logged_with(&serial());
    let space = sealed(&arena);
    space.replay(A, || ()).unwrap();
    let scope = arena.eager_scope(A).unwrap();
    let result = scope.allocate(MIB).unwrap();
    drop(scope);
    let _ = driver.take_log();
    elsewhere(space.replay(B, || panic!("launched")));
    std::thread::scope(|scope| {
        scope.spawn(|| elsewhere(space.replay(A, || panic!("launched")))).join().unwrap();
    });
    assert_eq!(driver.take_log(), [""; 0]);
    space.replay(A, || assert!(!driver.take_log().is_empty())).unwrap();
    arena.eager_blocks().free(result, &[]).unwrap();
}

#[test]
fn only_a_replay_that_is_launched_says_where_those_of_a_serial_arena_have_to_be() {
    let (driver, arena) = logged_with(&serial());
    let space = sealed(&arena);
    driver.set_capturing(A, true);
    let refused = space.replay(A, || panic!("launched"));
    assert!(matches!(refused, Err(Error::StreamCapturing { .. })), "{refused:?}");
    driver.set_capturing(A, false);
    space.replay(B, || ()).unwrap();
    elsewhere(space.replay(A, || panic!("launched")));
    assert_eq!(arena.replay_seq(), 1);
}

#[test]
fn a_serial_arena_moves_when_it_is_lifted_and_not_before_a_launch_ends() {
    let (driver, arena) = logged_with(&serial());
    let space = sealed(&arena);
    std::thread::scope(|scope| {
        scope.spawn(|| space.replay(A, || ()).unwrap()).join().unwrap();
    });
    elsewhere(space.replay(A, || panic!("launched")));
    arena.lift_serial().unwrap();
    let _ = driver.take_log();
    space.replay(B, || assert!(driver.take_log().iter().any(|call| call.starts_with("event_wait")))).unwrap();
    elsewhere(space.replay(A, || panic!("launched")));
    let inside = space.replay(B, || arena.lift_serial()).unwrap();
    assert!(
        matches!(&inside, Err(Error::WrongState { sentence }) if sentence.contains("under way")),
        "{inside:?}"
    );
    space.enter(B).unwrap();
    std::thread::scope(|scope| {
        let lifted = scope.spawn(|| {
            arena.lift_serial().unwrap();
            arena.replay_seq()
        });
        std::thread::sleep(std::time::Duration::from_millis(20));
        assert!(!lifted.is_finished());
        space.leave().unwrap();
        assert_eq!(lifted.join().unwrap(), 4);
    });
    space.replay(A, || ()).unwrap();
    let (_, usual) = logged();
    usual.lift_serial().unwrap();
    let space = sealed(&usual);
    space.replay(A, || ()).unwrap();
    space.replay(B, || ()).unwrap();
}

/// A thread that replays in two arenas captures on its stream; other threads continue with both.
#[test]
fn replays_go_on_elsewhere_while_their_stream_is_captured_where_the_device_was_told() {
    let (driver, first) = logged();
    let device = Arc::clone(first.device());
    let others: Vec<_> =
        (0..2).map(|_| SharedVmmAllocator::new(&device, &Options::default()).unwrap()).collect();
    let spaces: Vec<_> = [&first, &others[0], &others[1]].into_iter().map(sealed).collect();
    spaces[0].replay(A, || ()).unwrap();
    spaces[1].replay(A, || ()).unwrap();
    spaces[2].replay(B, || ()).unwrap();
    let _ = driver.take_log();
    device.mark(A).unwrap();
    let records = driver.take_log();
    assert_eq!(records.iter().filter(|call| call.starts_with("event_record")).count(), 2, "{records:?}");
    device.mark(A).unwrap();
    assert_eq!(driver.take_log(), [""; 0], "nothing was replayed since");
    driver.set_capturing(A, true);
    for space in &spaces {
        space.replay(B, || ()).unwrap();
    }
    driver.set_capturing(A, false);
    spaces.iter().for_each(|space| space.replay(A, || ()).unwrap());
    driver.set_capturing(A, true);
    assert!(matches!(device.mark(A), Err(Error::StreamCapturing { .. })));
    assert!(matches!(spaces[0].replay(B, || ()), Err(Error::StreamCapturing { .. })));
    assert_eq!(driver.broken_captures(), [""; 0]);
    driver.set_capturing(A, false);
    spaces[0].replay(B, || ()).unwrap();
}

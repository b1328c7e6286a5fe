//! Streams of others: default ones while a green context is current, which are that context's, whoever asks CUDA's driver, and no two of which are one;
//! and such as go behind their replay. Over the stand-in; `tests/gpu.rs` has replays in green contexts on a GPU.

use std::ptr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cudarc::driver::sys;
use green::GreenContext;
use vmmgraph::driver::CudaDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{Device, Error, Options, SharedVmmAllocator, Space, Stream, VmmTorchAllocator};

mod green;

/// Calls are counted for the whole process.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How often a function of the driver was called since the last time anybody asked.
fn calls(name: &std::ffi::CStr) -> u64 {
    // SAFETY: the stand-in declares them so; the name ends in a zero.
    unsafe {
        let count = sys::culib()
            .get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(b"standin_count\0")
            .unwrap();
        let counted = count(name.as_ptr());
        sys::culib().get::<unsafe extern "C" fn()>(b"standin_reset_counters\0").unwrap()();
        counted
    }
}

/// The device, its primary context, so many others and an arena.
fn open(
    contexts: usize,
) -> (MutexGuard<'static, ()>, Arc<Device>, Primary, Vec<GreenContext>, SharedVmmAllocator) {
    let alone = alone();
    let device = Device::with_driver(Arc::new(CudaDriver::new(0).unwrap()));
    let primary = Primary::current();
    let contexts = if contexts > 0 { GreenContext::several(contexts) } else { Vec::new() };
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    (alone, device, primary, contexts, arena)
}

/// A sealed space, with a block that is live.
fn graph(arena: &SharedVmmAllocator) -> (Arc<Space>, vmmgraph::Address) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(1 << 20, Stream::LEGACY).unwrap();
    space.seal().unwrap();
    (space, block)
}

/// The primary context, current on this thread.
struct Primary;

impl Primary {
    fn current() -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: out pointers on this stack; the device is open, so the context is there.
        unsafe {
            assert_eq!(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0), sys::CUresult::CUDA_SUCCESS);
            assert_eq!(sys::cuCtxPushCurrent_v2(context), sys::CUresult::CUDA_SUCCESS);
        }
        Self
    }
}

impl Drop for Primary {
    fn drop(&mut self) {
        let mut context = ptr::null_mut();
        // SAFETY: pops and releases what was pushed and retained.
        unsafe {
            sys::cuCtxPopCurrent_v2(&raw mut context);
            sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

fn capture_begins() {
    // SAFETY: the calling thread's default stream, as the handle is.
    let code = unsafe {
        sys::cuStreamBeginCapture_v2(
            ptr::null_mut(),
            sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        )
    };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

fn capture_ends() {
    let mut made = ptr::null_mut();
    // SAFETY: as above; then the graph of that capture.
    unsafe {
        let code = sys::cuStreamEndCapture(ptr::null_mut(), &raw mut made);
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "somebody touched the capture");
        sys::cuGraphDestroy(made);
    }
}

#[test]
fn replays_on_two_contexts_default_streams_wait_for_one_another() {
    let (_alone, _device, _primary, contexts, arena) = open(2);
    let (space, _) = graph(&arena);
    let replay = || space.replay(Stream::LEGACY, || ()).unwrap();

    replay();
    calls(c"cuStreamWaitEvent");
    replay();
    assert_eq!(calls(c"cuStreamWaitEvent"), 0, "the same stream is in order by itself");
    contexts[0].current(replay);
    assert_eq!(calls(c"cuStreamWaitEvent"), 1, "the context's stream waits for the primary one's");
    contexts[1].current(replay);
    assert_eq!(calls(c"cuStreamWaitEvent"), 1, "another context's for it");
    replay();
    assert_eq!(calls(c"cuStreamWaitEvent"), 1, "and the primary one's for that");
    contexts[1].current(replay);
    assert_eq!(calls(c"cuStreamWaitEvent"), 1);
    // A context that goes and one that comes back with its handle are not told apart, so this waits too.
    contexts[1].current(replay);
    assert_eq!(calls(c"cuStreamWaitEvent"), 1);
    // Created streams are the same wherever they are named.
    let created = vmmgraph_testkit::stream(contexts[0].stream() as u64);
    space.replay(created, || ()).unwrap();
    assert_eq!(calls(c"cuStreamWaitEvent"), 1);
    contexts[1].current(|| space.replay(created, || ()).unwrap());
    assert_eq!(calls(c"cuStreamWaitEvent"), 0);
}

#[test]
fn a_capture_of_a_contexts_default_stream_is_seen_there_and_only_there() {
    let (_alone, _device, _primary, contexts, arena) = open(1);
    let (space, _) = graph(&arena);
    let replay = || space.replay(Stream::LEGACY, || ());

    contexts[0].current(|| {
        capture_begins();
        assert!(matches!(replay(), Err(Error::StreamCapturing { .. })));
    });
    replay().unwrap();
    // The mark behind that is of the primary context's stream, though the other one is current.
    contexts[0].current(|| {
        arena.mark().unwrap();
        capture_ends();
        replay().unwrap();
    });
}

#[test]
fn a_replay_that_was_not_marked_in_its_context_is_not_taken_for_one_elsewhere() {
    let (_alone, _device, _primary, contexts, arena) = open(1);
    let (space, _) = graph(&arena);

    // The stream is captured from within the launch on, so that nothing can be recorded behind it.
    contexts[0].current(|| space.replay(Stream::LEGACY, capture_begins)).unwrap();
    assert!(matches!(space.replay(Stream::LEGACY, || ()), Err(Error::StreamCapturing { .. })));
    contexts[0].current(capture_ends);
    assert!(matches!(space.replay(Stream::LEGACY, || ()), Err(Error::StreamCapturing { .. })));
    contexts[0].current(|| arena.mark()).unwrap();
    space.replay(Stream::LEGACY, || ()).unwrap();
}

#[test]
fn an_eager_scope_ends_in_the_context_whose_default_stream_it_is_on() {
    let (_alone, _device, _primary, contexts, arena) = open(1);
    let (space, _) = graph(&arena);
    let end = contexts[0].current(|| arena.eager_scope(Stream::LEGACY)).unwrap().into_end();
    assert!(matches!(end.end(), Err(Error::WrongState { .. })));
    contexts[0].current(|| end.end()).unwrap();
    space.replay(Stream::LEGACY, || ()).unwrap();

    // One on the primary context's stream ends anywhere.
    let end = arena.eager_scope(Stream::LEGACY).unwrap().into_end();
    contexts[0].current(|| end.end()).unwrap();
    space.replay(Stream::LEGACY, || ()).unwrap();
}

#[test]
fn what_is_noted_in_a_context_is_waited_for_elsewhere() {
    let (_alone, device, _primary, contexts, arena) = open(1);
    let retired = || {
        let space = arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        let block = blocks.allocate(8 << 20, Stream::LEGACY, false).unwrap();
        space.seal().unwrap();
        (blocks, block)
    };
    let (blocks, block) = retired();
    calls(c"cuEventRecord");
    contexts[0].current(|| blocks.record_stream(block, Stream::LEGACY)).unwrap();
    assert_eq!(calls(c"cuEventRecord"), 1, "nobody may come there again");
    blocks.free(block, &[]).unwrap();
    assert_eq!(calls(c"cuEventRecord"), 0, "the primary context's stream is another one");
    drop(blocks);
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);

    // Freed there, it waits for the primary context's stream too, on which it may have been read before.
    let (blocks, block) = retired();
    calls(c"cuEventRecord");
    contexts[0].current(|| blocks.free(block, &[Stream::LEGACY])).unwrap();
    assert_eq!(calls(c"cuEventRecord"), 2);
    drop(blocks);
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

#[test]
fn what_a_thread_noted_that_has_ended_goes() {
    let (_alone, device, _primary, _, arena) = open(0);
    let space = arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let block = blocks.allocate(8 << 20, Stream::LEGACY, false).unwrap();
    space.seal().unwrap();
    drop(space);
    let note = || blocks.record_stream(block, Stream::PER_THREAD).unwrap();
    std::thread::scope(|scope| scope.spawn(note).join().unwrap());
    blocks.free(block, &[]).unwrap();
    drop(blocks);
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

#[test]
fn a_regions_block_is_its_threads_until_that_says_that_it_is_done_or_ends() {
    let (_alone, device, _primary, _, _arena) = open(0);
    let region = device.region("weights", vmmgraph::RegionOptions::default()).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    let (end, ended) = std::sync::mpsc::channel::<()>();
    let block = std::thread::scope(|scope| {
        let region = &region;
        let thread = scope.spawn(move || {
            tell.send(region.allocate(1 << 20, Stream::PER_THREAD).unwrap()).unwrap();
            ended.recv().unwrap();
        });
        let block = told.recv().unwrap();
        region.free(block).unwrap();
        // What its thread gave its stream since the allocation nobody else knows.
        assert_ne!(region.allocate(1 << 20, Stream::LEGACY).unwrap(), block);
        assert!(matches!(region.pause(Fence::default()), Err(Error::StreamCapturing { stream: 2 })));
        end.send(()).unwrap();
        // All of it: a scope waits for less.
        thread.join().unwrap();
        block
    });
    // The legacy default stream has waited for that of the thread.
    calls(c"cuEventRecord");
    assert_eq!(region.allocate(1 << 20, Stream::LEGACY).unwrap(), block);
    assert_eq!(calls(c"cuEventRecord"), 1);
    region.pause(Fence::default()).unwrap().complete().unwrap();
}

#[test]
fn what_outlives_eager_work_in_a_context_goes_elsewhere() {
    let (_alone, device, _primary, contexts, arena) = open(1);
    let scope = contexts[0].current(|| arena.eager_scope(Stream::LEGACY)).unwrap();
    let block = scope.allocate(8 << 20).unwrap();
    let blocks = scope.blocks();
    contexts[0].current(|| scope.into_end().end()).unwrap();
    blocks.free(block, &[]).unwrap();
    drop(blocks);
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
}

#[test]
fn behind_a_mark_of_its_space_a_stream_may_go() {
    let (_alone, _device, _primary, _, arena) = open(0);
    let (space, _) = graph(&arena);
    for marked in [true, false] {
        let mut stream = ptr::null_mut();
        // SAFETY: out pointer on this stack; destroyed once. The stand-in takes the handle of a stream that is gone for an error.
        let code = unsafe { sys::cuStreamCreate(&raw mut stream, 1) };
        assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
        space.replay(vmmgraph_testkit::stream(stream as u64), || ()).unwrap();
        if marked {
            space.mark().unwrap();
        }
        // SAFETY: as above.
        assert_eq!(unsafe { sys::cuStreamDestroy_v2(stream) }, sys::CUresult::CUDA_SUCCESS);
        assert_eq!(space.replay(Stream::LEGACY, || ()).is_ok(), marked);
    }
}

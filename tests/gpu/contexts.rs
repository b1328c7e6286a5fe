//! Default streams of green contexts, each distinct, and streams destroyed after their replay. On
//! the stand-in; `tests/gpu/graphs.rs` replays in green contexts on a GPU.

use std::ptr;
use std::sync::{Arc, MutexGuard};

use crate::green::GreenContext;
use cudarc::driver::sys;
use vmmgraph::driver::CudaDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{Device, Error, Options, SharedVmmAllocator, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::alone;

fn calls(name: &std::ffi::CStr) -> u64 {
    // SAFETY: the stand-in's signatures; the name is zero-terminated.
    unsafe {
        let count = sys::culib()
            .get::<unsafe extern "C" fn(*const std::ffi::c_char) -> u64>(b"standin_count\0")
            .unwrap();
        let counted = count(name.as_ptr());
        sys::culib().get::<unsafe extern "C" fn()>(b"standin_reset_counters\0").unwrap()();
        counted
    }
}

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

fn graph(arena: &SharedVmmAllocator) -> (Arc<Space>, vmmgraph::Address) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(1 << 20, Stream::LEGACY).unwrap();
    space.seal().unwrap();
    (space, block)
}

struct Primary;

impl Primary {
    fn current() -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: out pointers on this stack; the open device keeps the context alive.
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
        // SAFETY: pops and releases the context of `current`.
        unsafe {
            sys::cuCtxPopCurrent_v2(&raw mut context);
            sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

fn capture_begins() {
    // SAFETY: the default stream of the current context.
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
    // SAFETY: as above; then the captured graph.
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
    contexts[1].current(replay);
    assert_eq!(calls(c"cuStreamWaitEvent"), 1);
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
    // The mark is recorded on the primary context's stream, although a green context is current.
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

    // The launch begins a capture on the stream, so no record is possible after it.
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

    // A block freed in a green context also waits for the primary context's stream, an earlier
    // reader.
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
        // Later work of the allocating thread on its stream is unknown.
        assert_ne!(region.allocate(1 << 20, Stream::LEGACY).unwrap(), block);
        assert!(matches!(region.pause(Fence::default()), Err(Error::StreamCapturing { stream: 2 })));
        end.send(()).unwrap();
        // Full join: a scope would not wait for thread-local destructors.
        thread.join().unwrap();
        block
    });
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
        // SAFETY: an out pointer on this stack; destroyed once. The stand-in refuses destroyed
        // handles.
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

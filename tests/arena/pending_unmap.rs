//! Spaces dropped while the device may still run their graphs: destroyed later, neither too early
//! nor never.

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::{
    Device, HostOptions, Options, RetainPolicy, SharedVmmAllocator, Space, Stream, VmmTorchAllocator,
};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = Stream::LEGACY;
/// Stream of readers. During its capture, no event can mark their end.
const SIDE: Stream = stream(7);

fn sealed(arena: &SharedVmmAllocator) -> Arc<Space> {
    let space = arena.open_space().unwrap();
    space.allocate(20 * MIB, A).unwrap();
    space.seal().unwrap();
    space
}

fn device() -> (Arc<HostDriver>, Arc<FaultyDriver>, Arc<Device>) {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    (host, faulty.clone(), Device::with_driver(faulty))
}

#[test]
fn what_is_left_when_everything_goes_is_taken_back_when_its_device_opens_again() {
    let (host, faulty, device) = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = sealed(&arena);
    space.replay(A, || ()).unwrap();
    faulty.set_busy(true);
    drop((space, arena, device));
    assert!(host.leftovers()[2] > 0, "unmapped while a replay runs");
    drop(Device::with_driver(faulty.clone()));
    assert!(host.leftovers()[2] > 0, "unmapped while a replay runs");
    faulty.set_busy(false);
    // Opening a different device makes no call to this driver, which may hang.
    faulty.arm(&[]);
    let unrelated = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    drop(Device::with_driver(unrelated));
    assert_eq!(faulty.calls(), 0);
    assert!(host.leftovers()[2] > 0, "not its own");
    drop(Device::with_driver(faulty));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn a_stream_that_is_captured_again_is_waited_for_again() {
    let (host, faulty, device) = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (first, second) = (sealed(&arena), sealed(&arena));
    let unmaps = || faulty.count("unmap");
    let before = unmaps();
    first.replay(A, || ()).unwrap();
    faulty.set_capturing(A, true);
    drop(first);
    faulty.set_capturing(A, false);
    device.give_back(Duration::ZERO);
    assert_eq!(unmaps(), before + 1);
    second.replay(A, || ()).unwrap();
    faulty.set_capturing(A, true);
    drop(second);
    device.give_back(Duration::ZERO);
    assert_eq!((unmaps(), device.stats().pending), (before + 1, 1), "unmapped while its replay may run");
    faulty.set_capturing(A, false);
    device.give_back(Duration::ZERO);
    assert_eq!((unmaps(), device.stats().pending), (before + 2, 0));
    assert_eq!(faulty.broken_captures(), [""; 0]);
    drop((arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn another_arenas_trim_does_not_tear_down_what_may_still_run() {
    let (host, faulty, device) = device();
    let [arena, other] = [0, 1].map(|_| SharedVmmAllocator::new(&device, &Options::default()).unwrap());
    let dying = sealed(&arena);
    dying.replay(A, || ()).unwrap();
    faulty.set_busy(true);
    drop((dying, arena));
    let before = faulty.count("unmap");
    // A trim would wait for the device; an allocation polls and continues.
    let space = other.open_space().unwrap();
    space.allocate(40 * MIB, A).unwrap();
    drop(space);
    assert_eq!((faulty.count("unmap") - before, device.stats().pending), (1, 1));
    faulty.set_busy(false);
    other.trim().unwrap();
    assert_eq!((device.stats().pending, device.stats().physical_bytes), (0, 0));
    drop((other, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn a_reader_of_a_block_that_outlived_its_graph_is_waited_for() {
    for policy in [RetainPolicy::Retain, RetainPolicy::Share] {
        let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        for (graph_first, noted) in [(true, true), (false, true), (true, false), (false, false)] {
            let space = arena.open_space().unwrap();
            let tensors = VmmTorchAllocator::new(&space);
            let block = tensors.allocate(4 * MIB, A, false).unwrap();
            space.seal_with(policy).unwrap();
            space.replay(A, || ()).unwrap();
            if noted {
                tensors.record_stream(block, SIDE).unwrap();
            }
            faulty.set_capturing(SIDE, true);
            let mut graph = Some(space);
            if graph_first {
                graph = None;
            }
            arena.trim().unwrap();
            let before = faulty.count("unmap");
            tensors.free(block, if noted { &[] } else { &[SIDE] }).unwrap();
            drop((tensors, graph));
            arena.trim().unwrap();
            assert_eq!(faulty.count("unmap"), before, "{policy:?}: unmapped under the reader");
            assert!(arena.mapped_size() >= 4 * MIB, "{policy:?}: for others while it is read");
            faulty.set_capturing(SIDE, false);
            arena.trim().unwrap();
            assert_eq!(arena.mapped_size(), 0, "{policy:?}");
        }
        assert_eq!(faulty.broken_captures(), [""; 0]);
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// The capture begins between the state query and the record: the event belongs to the capture and
/// must not be used.
#[test]
fn a_stream_whose_capture_begins_as_it_is_recorded_is_recorded_again_behind_it() {
    for reader in [true, false] {
        let (host, faulty, device) = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let block = tensors.allocate(4 * MIB, A, false).unwrap();
        space.seal().unwrap();
        space.replay(if reader { A } else { SIDE }, || ()).unwrap();
        let captures = faulty.clone();
        faulty.set_hook(Some(Arc::new(move |name| {
            if name == "event_record" {
                captures.set_capturing(SIDE, true);
            }
        })));
        tensors.free(block, if reader { &[SIDE] } else { &[] }).unwrap();
        drop((tensors, space));
        faulty.set_hook(None);
        let touched = faulty.broken_captures().len();
        assert!(touched > 0, "no record met the capture");
        device.give_back(Duration::ZERO);
        assert!(arena.mapped_size() > 0, "unmapped though nobody can say that it is not used");
        faulty.set_busy(true);
        faulty.set_capturing(SIDE, false);
        device.give_back(Duration::ZERO);
        assert!(arena.mapped_size() > 0, "unmapped while it is used");
        faulty.set_busy(false);
        arena.trim().unwrap();
        assert_eq!(arena.mapped_size(), 0);
        assert_eq!(faulty.broken_captures().len(), touched, "{:?}", faulty.broken_captures());
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

#[test]
fn a_page_of_two_blocks_waits_for_the_readers_of_both() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    let device = Device::with_driver(faulty.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let [read, other] = [0, 1].map(|_| space.allocate(4096, A).unwrap());
    assert_eq!(space.seal().unwrap().retained_bytes, 2 * MIB);
    space.record_stream(read, SIDE).unwrap();
    faulty.set_capturing(SIDE, true);
    space.free(read).unwrap();
    space.free(other).unwrap();
    let next = || {
        let next = arena.open_space().unwrap();
        next.allocate(4096, A).unwrap();
        arena.stats().retained_bytes
    };
    assert_eq!(next(), 2 * MIB, "the page is for others while it is read");
    faulty.set_capturing(SIDE, false);
    assert_eq!(next(), 0);
    drop((space, arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn a_mark_behind_a_capture_frees_what_waits_from_the_stream() {
    for of_space in [false, true] {
        let (host, faulty, device) = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let [space, other] = [0, 1].map(|_| sealed(&arena));
        let stream = vmmgraph_testkit::stream(0xa0);
        space.replay(stream, || ()).unwrap();
        faulty.set_capturing(stream, true);
        drop(space);
        assert_eq!(device.stats().pending, 1);
        faulty.set_capturing(stream, false);
        if of_space { other.mark() } else { arena.mark() }.unwrap();
        // The stream is destroyed; a captured one reuses its handle and must not be touched.
        faulty.set_capturing(stream, true);
        drop(other);
        assert!(device.trim().is_ok());
        assert_eq!((device.stats().pending, device.stats().mappings), (0, 0));
        assert!(faulty.broken_captures().is_empty());
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// A mark after the capture records the reader of a freed block; its stream may then be destroyed.
#[test]
fn a_mark_behind_a_capture_frees_what_waits_from_a_reader() {
    for (kept, graph_first, alive) in [false, true]
        .into_iter()
        .flat_map(|kept| [(kept, true, false), (kept, false, true), (kept, false, false)])
    {
        let (host, faulty, device) = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let block = if kept { space.allocate_kept(4096, A) } else { space.allocate(4096, A) }.unwrap();
        space.seal().unwrap();
        space.replay(A, || ()).unwrap();
        tensors.record_stream(block, SIDE).unwrap();
        faulty.set_capturing(SIDE, true);
        let mut graph = (!graph_first).then_some(space);
        tensors.free(block, &[]).unwrap();
        if !alive {
            graph = None;
        }
        drop(tensors);
        faulty.set_capturing(SIDE, false);
        faulty.set_busy(true);
        arena.mark().unwrap();
        // A captured stream reuses the handle and must not be touched.
        faulty.set_capturing(SIDE, true);
        faulty.set_busy(false);
        drop(graph);
        arena.trim().unwrap();
        let stats = device.stats();
        assert_eq!(
            (stats.pending, stats.mappings, stats.physical_bytes),
            (0, 0, 0),
            "{kept} {graph_first} {alive}"
        );
        assert_eq!(faulty.broken_captures(), [""; 0]);
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// A range, and a part pending on a reader, destroyed by two threads: no double unmap, no leak.
#[test]
fn a_range_and_a_part_of_it_are_not_torn_down_at_once() {
    for part_first in [true, false] {
        let (host, faulty, device) = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let blocks = [0, 1].map(|_| tensors.allocate(3 * MIB, A, false).unwrap());
        space.seal().unwrap();
        drop(space);
        faulty.set_capturing(SIDE, true);
        let freed = if part_first { 1 } else { 2 };
        blocks[..freed].iter().for_each(|block| tensors.free(*block, &[SIDE]).unwrap());
        faulty.set_capturing(SIDE, false);
        let before = device.stats();
        assert_eq!(before.pending, freed as u64);

        let drop_all: Box<dyn FnOnce() + Send> = Box::new(move || drop(tensors));
        let come_by: Box<dyn FnOnce() + Send> = {
            let device = Arc::clone(&device);
            Box::new(move || {
                device.give_back(Duration::ZERO);
            })
        };
        let (first, second) = if part_first { (come_by, drop_all) } else { (drop_all, come_by) };
        let second = Mutex::new(Some(second));
        faulty.start_log();
        faulty.set_hook(Some(Arc::new(move |name| {
            let second = if name == "unmap" { second.lock().unwrap().take() } else { None };
            if let Some(second) = second {
                thread::spawn(second).join().unwrap();
            }
        })));
        first();
        faulty.set_hook(None);
        let stats = device.stats();
        assert_eq!(
            (stats.pending, stats.mappings, stats.reservations),
            (0, 0, 0),
            "part first: {part_first}"
        );
        assert_eq!(faulty.take_unmapped(), before.mappings * 2 * MIB, "part first: {part_first}");
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    }
}

/// Repeated failed captures free tensors while the device still works.
#[test]
fn a_capture_takes_pages_that_the_device_is_done_with_before_it_creates_new_ones() {
    let (host, faulty, device) = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let mut held = Vec::new();
    for _ in 0..6 {
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let block = tensors.allocate(48 * MIB, A, false).unwrap();
        held.push(device.stats().physical_bytes);
        space.seal().unwrap();
        drop(space);
        faulty.set_busy(true);
        tensors.free(block, &[A]).unwrap();
        drop(tensors);
        assert!(device.stats().pending > 0, "the device may still use it");
        faulty.set_busy(false);
    }
    assert!(held.iter().all(|bytes| *bytes == held[0]), "each capture left its pages: {held:?}");
    drop((arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

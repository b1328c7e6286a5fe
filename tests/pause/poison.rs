//! Poisoned shared pages expose graphs that rely on stale contents; other memory is unchanged.

use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::{HostDriver, SharedDriver};
use vmmgraph::pages::Fence;
use vmmgraph::{
    Address, Device, Difference, HostOptions, Options, POISON, RetainPolicy, SharedVmmAllocator, Space,
    Stream,
};
use vmmgraph_testkit::{Delay, FaultyDriver, LateDriver, MIB, child};

const A: Stream = Stream::LEGACY;

fn device() -> Arc<Device> {
    Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()))
}

fn poke(at: Address, value: u32) {
    // SAFETY: tests pass live blocks of the host driver, memory of this process.
    unsafe { (at.0 as *mut u32).write_volatile(value) };
}

fn peek(at: Address) -> u32 {
    // SAFETY: as in `poke`.
    unsafe { (at.0 as *const u32).read_volatile() }
}

struct Captured {
    space: Arc<Space>,
    scratch: Address,
    output: Address,
}

fn captured(arena: &SharedVmmAllocator) -> Captured {
    let space = arena.open_space().unwrap();
    let scratch = space.allocate(40 * MIB, A).unwrap();
    let output = space.allocate(MIB, A).unwrap();
    space.free(scratch).unwrap();
    space.seal().unwrap();
    Captured { space, scratch, output }
}

fn kernels(captured: &Captured, right: bool) {
    if right {
        poke(captured.scratch.plus(8), 41);
    }
    poke(captured.output, 1);
    poke(captured.output.plus(512), peek(captured.scratch.plus(8)).wrapping_add(1));
}

#[test]
fn a_graph_that_relies_on_stale_memory_is_caught_and_named() {
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let graphs: Vec<_> = (0..5).map(|_| captured(&arena)).collect();
    // By chance the wrong graph works: earlier graphs leave the expected value.
    for _ in 0..3 {
        for (number, graph) in graphs.iter().enumerate() {
            graph.space.replay(A, || kernels(graph, number != 3)).unwrap();
            assert_eq!(peek(graph.output.plus(512)), 42);
        }
    }
    let verify = |(number, graph): (usize, &Captured)| {
        let outputs = [(graph.output, 256), (graph.output.plus(512), 256)];
        // SAFETY: the outputs are live blocks.
        unsafe { graph.space.verify(A, &outputs, || kernels(graph, number != 3)) }.unwrap()
    };
    let verified: Vec<_> = graphs.iter().enumerate().map(verify).collect();
    let found = Difference { space: graphs[3].space.id(), output: 1, offset: 0 };
    assert_eq!(verified, [None, None, None, Some(found), None]);
}

#[test]
fn poison_fills_every_shared_page_once_and_nothing_that_is_kept() {
    let faulty = FaultyDriver::new(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let device = Device::with_driver(faulty.clone());
    let options = Options { poison: true, ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let graph = captured(&arena);
    // Some pages are mapped at two addresses: `between` keeps `third` from continuing the first
    // block's addresses.
    let large = arena.open_space().unwrap();
    let first = large.allocate(70 * MIB, A).unwrap();
    let between = large.allocate(16 * MIB, A).unwrap();
    large.free(first).unwrap();
    let second = large.allocate(40 * MIB, A).unwrap();
    let third = large.allocate(70 * MIB, A).unwrap();
    for block in [between, second, third] {
        large.free(block).unwrap();
    }
    let shown = large.seal().unwrap().large_pages;
    assert!(large.stats().maps > shown);
    poke(graph.output, 7);
    faulty.start_log();
    large.replay(A, || assert_eq!(peek(third), POISON)).unwrap();
    let filled = faulty.take_log().iter().filter(|call| call.starts_with("fill")).count() as u64;
    assert_eq!(filled, shown, "not each page once");
    assert_eq!(peek(graph.output), 7, "a kept output was poisoned");
    graph.space.replay(A, || assert_eq!((peek(graph.scratch), peek(graph.output)), (POISON, 7))).unwrap();
    // `enter` and `leave` poison, too; after a failed fill, `enter` frees the replay slot.
    poke(graph.scratch, 8);
    graph.space.enter(A).unwrap();
    assert_eq!((peek(graph.scratch), peek(graph.output)), (POISON, 7));
    graph.space.leave().unwrap();
    faulty.refuse("fill", true);
    assert!(graph.space.enter(A).is_err());
    faulty.refuse("fill", false);
    graph.space.enter(A).unwrap();
    graph.space.leave().unwrap();
}

#[test]
fn with_the_share_policy_outputs_are_poisoned_too() {
    let device = device();
    let options = Options { poison: true, retain: RetainPolicy::Share, ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    let graph = captured(&arena);
    poke(graph.output, 7);
    graph.space.replay(A, || assert_eq!(peek(graph.output), POISON)).unwrap();
}

#[test]
fn the_environment_turns_it_on() {
    if std::env::var_os("VMMGRAPH_POISON").is_none() {
        let output = child!("the_environment_turns_it_on")
            .env("VMMGRAPH_POISON", "1")
            .env("VMMGRAPH_TRACE_BLOCKS", "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let graph = captured(&arena);
    graph.space.replay(A, || assert_eq!(peek(graph.scratch), POISON)).unwrap();
    let blocks = graph.space.blocks();
    assert_eq!((blocks.len(), blocks[0].address, blocks[0].allocation), (1, graph.output.0, 2));
    assert!(blocks[0].age.is_some());
    let origin = blocks[0].origin.as_ref().unwrap();
    assert!(origin.contains("captured\n") && origin.contains("tests/pause/poison.rs:"), "{origin}");
}

#[test]
fn blocks_are_listed_by_address_with_their_place_in_the_capture() {
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    for space in [arena.open_space().unwrap(), arena.open_bump_space().unwrap()] {
        let sizes = [3 * MIB, 700, 40 * MIB, 2 * MIB];
        let blocks: Vec<_> = sizes.iter().map(|bytes| space.allocate(*bytes, A).unwrap()).collect();
        space.free(blocks[0]).unwrap();
        let report = space.seal().unwrap();
        assert_eq!((report.allocations, report.retained.len()), (4, 3));
        assert_eq!(report.retained, space.blocks());
        assert!(report.retained.windows(2).all(|pair| pair[0].address < pair[1].address));
        for (number, (address, bytes)) in (1..).zip(blocks.iter().zip(sizes)).skip(1) {
            let listed = report.retained.iter().find(|block| block.address == address.0).unwrap();
            assert_eq!((listed.allocation, listed.bytes), (number, bytes.next_multiple_of(512)));
            assert_eq!((listed.age, &listed.origin), (None, &None));
        }
    }
}

/// Outputs are read into memory that is not registered: the read is over when they are compared.
#[test]
fn outputs_are_read_when_the_graph_is_done_where_streams_work_late() {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let late = FaultyDriver::new(Arc::new(LateDriver::new(host, Delay::Right)));
    late.refuse("host_register", true);
    let device = Device::with_driver(late.clone());
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let graph = captured(&arena);
    let driver: SharedDriver = late;
    // What it leaves on shared pages is its output.
    let launch = || {
        let mut found = [0; 8];
        // SAFETY: a block of the graph; a replay's fill is on this stream.
        unsafe {
            let mut events = Fence::default();
            events.add(device.pool().events(), A);
            events.block(device.pool().events(), Duration::MAX).unwrap();
            driver.read(graph.scratch, &mut found).unwrap();
            driver.write(graph.output, &found).unwrap();
        }
    };
    // SAFETY: the output is a live block.
    let found = unsafe { graph.space.verify(A, &[(graph.output, 256)], launch) }.unwrap();
    assert_eq!(found, Some(Difference { space: graph.space.id(), output: 0, offset: 0 }));
}

//! The library on a real GPU. Ignored in `cargo test`, which loads the stand-in; `scripts/gpu.sh`
//! runs these tests.

use std::os::fd::AsFd;
use std::path::Path;
use std::ptr;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

use crate::green::GreenContext;
use cudarc::driver::sys;
use vmmgraph::driver::platform::PLATFORMS;
use vmmgraph::driver::{CudaDriver, DeviceOptions, Handles, Transfer as _, Whole};
use vmmgraph::{Address, driver::HostDriver};
use vmmgraph::{Device, Error, HostOptions, Options, PeerExtent, Peers, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{Captured, MIB, Order, Stamps, Trace, capture, capture_by, median, replay, shuffle};

/// Serializes tests that measure time or free memory.
fn alone() -> MutexGuard<'static, ()> {
    // SAFETY: looks up a symbol of the stand-in.
    let standin = unsafe { sys::culib().get::<unsafe extern "C" fn() -> u64>(b"standin_calls\0") }.is_ok();
    assert!(!standin, "this is the stand-in, not a GPU");
    vmmgraph_testkit::alone()
}

fn device() -> Arc<Device> {
    Device::with_driver(Arc::new(CudaDriver::new(0).expect("a GPU")))
}

fn trace(name: &str) -> Trace {
    let root = std::env::var("VMMGRAPH_TEST_ROOT").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").to_owned());
    Trace::load(&Path::new(&root).join("tests/data"), name).unwrap()
}

fn ok(code: sys::CUresult) {
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

struct Context(sys::CUcontext);

impl Context {
    fn new() -> Self {
        let mut context = ptr::null_mut();
        // SAFETY: out pointers on this stack; released in `drop`.
        unsafe {
            ok(sys::cuInit(0));
            ok(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
            ok(sys::cuCtxPushCurrent_v2(context));
        }
        Self(context)
    }

    fn stream(&self) -> sys::CUstream {
        let mut stream = ptr::null_mut();
        // SAFETY: out pointer on this stack; 1 is CU_STREAM_NON_BLOCKING.
        ok(unsafe { sys::cuStreamCreate(&raw mut stream, 1) });
        stream
    }

    fn synchronize(&self) {
        // SAFETY: the context is current.
        ok(unsafe { sys::cuCtxSynchronize() });
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: balances `new`.
        unsafe {
            ok(sys::cuCtxPopCurrent_v2(&raw mut self.0));
            ok(sys::cuDevicePrimaryCtxRelease_v2(0));
        }
    }
}

fn handle(stream: sys::CUstream) -> Stream {
    vmmgraph_testkit::stream(stream as u64)
}

fn capture_all(arena: &SharedVmmAllocator, trace: &Trace) -> (Vec<Captured>, Duration) {
    let start = Instant::now();
    let captured = trace.shapes.iter().map(|shape| capture(arena, shape, Stream::LEGACY).unwrap()).collect();
    (captured, start.elapsed())
}

/// Measures the driver alone: `maps` maps of pages of 16 MiB, each of 64 pages at many addresses.
fn maps_alone(device: &Device, maps: u64) -> Duration {
    const PAGES: u64 = 64;
    let (driver, bytes) = (device.driver(), 16 * MIB);
    let pages: Vec<_> = (0..PAGES).map(|_| driver.create(bytes).unwrap()).collect();
    let bases: Vec<_> = (0..maps.div_ceil(PAGES)).map(|_| driver.reserve(PAGES * bytes).unwrap()).collect();
    let places =
        || bases.iter().flat_map(|base| (0..).zip(&pages).map(|(number, page)| (*base, number, *page)));
    let start = Instant::now();
    for (base, number, page) in places().take(maps as usize) {
        // SAFETY: reserved and created above.
        unsafe { driver.map(base.plus(number * bytes), &[Whole { page, bytes }], Peers::default()) }.unwrap();
    }
    let time = start.elapsed();
    // SAFETY: nothing uses these mappings and pages.
    unsafe {
        for (base, number, _) in places().take(maps as usize) {
            driver.unmap(base.plus(number * bytes), bytes).unwrap();
        }
        pages.iter().for_each(|page| driver.release(*page).unwrap());
        bases.iter().for_each(|base| driver.free_addresses(*base, PAGES * bytes).unwrap());
    }
    time
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn the_trace_takes_the_same_pages_as_on_the_host_and_its_driver_work_is_short() {
    let _alone = alone();
    let all = trace("capture-trace-65");
    let host = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let host_arena = SharedVmmAllocator::new(&host, &Options::default()).unwrap();
    let _host_captured = capture_all(&host_arena, &all);

    let larger = Options { large_page_bytes: 32 * MIB, ..Options::default() };
    let (mut times, mut bare, mut of_larger) = (Vec::new(), Vec::new(), Vec::new());
    for order in [Order::Ascending, Order::Descending, Order::Random(1), Order::Ascending, Order::Ascending] {
        let ordered = all.ordered(order);
        let device = device();
        bare.push(maps_alone(&device, host.stats().maps));
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let (captured, time) = capture_all(&arena, &ordered);
        let (on_gpu, on_host) = (device.stats(), host.stats());
        assert_eq!(
            (on_gpu.physical_bytes, on_gpu.peak_physical_bytes, on_gpu.pages_created, on_gpu.maps),
            (on_host.physical_bytes, on_host.peak_physical_bytes, on_host.pages_created, on_host.maps)
        );
        println!(
            "RESULT capture of 65 shapes, {order}: {:.1} ms, {} maps, {} pages",
            time.as_secs_f64() * 1e3,
            on_gpu.maps,
            on_gpu.pages
        );
        times.push(time);
        drop((captured, arena));
        let arena = SharedVmmAllocator::new(&device, &larger).unwrap();
        let (_captured, time) = capture_all(&arena, &ordered);
        of_larger.push((time, device.stats().maps - on_gpu.maps, arena.mapped_size()));
    }
    times.sort_unstable();
    bare.sort_unstable();
    of_larger.sort_unstable();
    let (median, bare) = (times[times.len() / 2], bare[bare.len() / 2]);
    println!(
        "RESULT capture of 65 shapes, median of {}: {:.1} ms; as many maps by the driver alone {:.1}",
        times.len(),
        median.as_secs_f64() * 1e3,
        bare.as_secs_f64() * 1e3
    );
    let (larger, maps, held) = of_larger[of_larger.len() / 2];
    println!(
        "RESULT capture of 65 shapes on pages of 32 MiB: {:.1} ms, {maps} maps, {:.3} of the floor",
        larger.as_secs_f64() * 1e3,
        held as f64 / all.floor_bytes() as f64
    );
    assert!(larger < median, "{larger:?} on pages of 32 MiB, {median:?} on the usual ones");
    assert!(median <= Duration::from_millis(60), "{median:?}, and as many maps by the driver alone {bare:?}");
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn pages_for_other_processes_and_for_a_peer_cost_no_page_more() {
    const ROUNDS: usize = 9;
    let _alone = alone();
    let all = trace("capture-trace-65");
    let peer = device().driver().capabilities().peers.iter().next();
    let plain = Options::default();
    let mut ways = vec![
        ("for this device", Handles::None, plain.clone(), false),
        ("for processes", Handles::Fd, plain.clone(), false),
    ];
    if let Some(peer) = peer.map(Peers::one) {
        // Two of twelve blocks, as for the two all-reduces of a layer.
        let marked = Options { remote_peers: peer, ..plain.clone() };
        ways.push(("for processes, with remote blocks", Handles::Fd, plain.clone(), true));
        ways.push(("for a peer too, those of remote blocks", Handles::Fd, marked, true));
        ways.push(("for a peer too", Handles::Fd, Options { peers: peer, ..plain }, false));
    }
    let mut times = vec![Vec::new(); ways.len()];
    let mut counts = [Vec::new(), Vec::new()];
    for round in 0..ROUNDS {
        for at in 0..ways.len() {
            let way = (round + at) % ways.len();
            let (_, sharing, options, marks) = &ways[way];
            let cuda = &PLATFORMS[0];
            let driver =
                (cuda.open)(0, DeviceOptions { sharing: *sharing, ..DeviceOptions::default() }).unwrap();
            let device = Device::with_driver(driver);
            let arena = SharedVmmAllocator::new(&device, options).unwrap();
            let start = Instant::now();
            let captured = all.shapes.iter().map(|shape| {
                capture_by(&arena, shape, |space, id, bytes| {
                    if *marks && id % 6 == 5 {
                        space.allocate_remote(bytes, Stream::LEGACY)
                    } else {
                        space.allocate(bytes, Stream::LEGACY)
                    }
                })
            });
            let _captured: Vec<_> = captured.map(Result::unwrap).collect();
            times[way].push(start.elapsed().as_secs_f64() * 1e3);
            let stats = device.stats();
            counts[usize::from(*marks)].push((stats.physical_bytes, stats.pages_created, stats.maps));
        }
    }
    for alike in &counts {
        assert!(alike.windows(2).all(|two| two[0] == two[1]), "{alike:?}");
    }
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[ROUNDS / 2]
        })
        .collect();
    for ((name, ..), median) in ways.iter().zip(&medians) {
        println!(
            "RESULT capture of 65 shapes, pages {name}: {median:.1} ms, {:.3} of the first",
            median / medians[0]
        );
    }
    let mib = |of: &[(u64, u64, u64)]| of.first().map_or(0, |(bytes, ..)| bytes >> 20);
    println!(
        "RESULT capture of 65 shapes, {} MiB, with remote blocks {} MiB",
        mib(&counts[0]),
        mib(&counts[1])
    );
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn pages_for_network_cards_and_for_the_fabric_serve_graphs_as_others_do() {
    let _alone = alone();
    let cuda = &PLATFORMS[0];
    let asked = DeviceOptions { sharing: Handles::Fabric, rdma: true, ..DeviceOptions::default() };
    let driver = (cuda.open)(0, asked).unwrap();
    assert!(driver.rdma());
    let granted = Handles::of(&*driver);
    assert!(granted >= Handles::Fd);
    let device = Device::with_driver(driver);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate_remote(5 * MIB, Stream::LEGACY).unwrap();
    space.free(block).unwrap();
    space.seal().unwrap();
    let extent = space.export(block, 5 * MIB).unwrap()[0];
    let exported = device.export_page(extent.page).unwrap();
    let imported = device.import(exported.fd.as_fd(), extent.page_bytes).unwrap();
    let part = PeerExtent { page: &imported, offset: extent.offset, bytes: extent.bytes };
    let theirs = device.map_peer(&[part]).unwrap();
    let stamps = Stamps::new(device.driver(), Stream::LEGACY);
    stamps.write(block, 5 * MIB, 0x51).unwrap();
    assert!(stamps.holds(theirs.address(), 5 * MIB, 0x51).unwrap());
    println!("RESULT pages for network cards, asked for by the fabric: granted {granted:?}");
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn the_page_map_is_the_hosts_and_what_a_dropped_shape_gives_back_the_driver_has() {
    let _alone = alone();
    let facts = |map: &vmmgraph::ArenaMap| {
        let tiles = |space: &vmmgraph::map::MapSpace| {
            let mut tiles: Vec<_> = space.maps.iter().map(|tile| (tile.page, tile.covered_bytes)).collect();
            tiles.sort_unstable();
            tiles
        };
        let pages: Vec<_> = map.pages.iter().map(|p| (p.class, p.number, p.bytes, p.spaces)).collect();
        let spaces = map.spaces.iter();
        let spaces: Vec<_> = spaces
            .map(|s| (tiles(s), s.peak_live_bytes, s.shown_bytes, s.alone_bytes, s.drop_gives_bytes))
            .collect();
        (pages, spaces)
    };
    let all = trace("capture-trace-65");
    let host = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let host_arena = SharedVmmAllocator::new(&host, &Options::default()).unwrap();
    let _host_captured = capture_all(&host_arena, &all);
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (mut captured, _) = capture_all(&arena, &all);
    let start = Instant::now();
    let map = arena.map();
    println!("RESULT page map of 65 shapes: {:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    assert_eq!(facts(&map), facts(&host_arena.map()));
    for point in &map.curve[..5] {
        let now = arena.map();
        let gives = now.spaces.iter().find(|space| space.id == point.space).unwrap().drop_gives_bytes;
        let (free, held) = (device.driver().free_bytes().unwrap(), device.stats().physical_bytes);
        captured.retain(|one| one.space.id() != point.space);
        arena.trim().unwrap();
        assert_eq!(held - device.stats().physical_bytes, gives);
        assert!(device.driver().free_bytes().unwrap() >= free + gives);
        assert_eq!(arena.mapped_size(), point.without_bytes);
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn blocks_written_by_memsets_and_read_by_copies_hold_their_contents() {
    let _alone = alone();
    for name in ["capture-trace-65", "capture-trace-65-retained"] {
        let all = trace(name);
        let device = device();
        let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
        let (captured, _) = capture_all(&arena, &all);
        let stamps = Stamps::new(device.driver(), Stream::LEGACY);
        let (mut blocks, mut wrong, mut lost) = (0, 0, 0);
        for round in 0..2 {
            let mut order: Vec<usize> = (0..all.shapes.len()).collect();
            shuffle(&mut order, u64::from(round) + 3);
            for index in order {
                let found = replay(&captured[index], &all.shapes[index], &stamps, round).unwrap();
                blocks += found.blocks;
                wrong += found.wrong;
            }
            lost += captured.iter().map(|c| c.lost_retained(&stamps, round).unwrap()).sum::<u64>();
        }
        println!("RESULT {name}: {blocks} blocks checked, {wrong} wrong, {lost} retained blocks lost");
        assert_eq!((wrong, lost), (0, 0));
        drop((captured, arena));
        assert_eq!(device.stats().physical_bytes, 0);
    }
}

/// A graph of memsets in a space that grows during the capture, launched by replays.
struct Graph {
    space: Arc<Space>,
    exec: sys::CUgraphExec,
    output: (Address, u32),
}

impl Graph {
    fn capture(
        arena: &SharedVmmAllocator,
        stream: sys::CUstream,
        number: u32,
        mode: sys::CUstreamCaptureMode,
    ) -> Self {
        let space = arena.open_space().unwrap();
        let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live stream; every memset writes a block live at its capture.
        unsafe {
            ok(sys::cuStreamBeginCapture_v2(stream, mode));
            for layer in 0..4u64 {
                let bytes = (u64::from(number) + 3) * 8 * MIB + layer * 3 * MIB;
                let scratch = space.allocate(bytes, handle(stream)).unwrap();
                ok(sys::cuMemsetD32Async(scratch.0, 0xdead_0000 + number, bytes as usize / 4, stream));
                space.free(scratch).unwrap();
            }
            let output = space.allocate(6 * MIB, handle(stream)).unwrap();
            let value = 0x600d_0000 + number;
            ok(sys::cuMemsetD32Async(output.0, value, 6 * MIB as usize / 4, stream));
            ok(sys::cuStreamEndCapture(stream, &raw mut graph));
            ok(sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
            ok(sys::cuGraphDestroy(graph));
            assert_eq!(space.seal().unwrap().retained.len(), 1);
            Self { space, exec, output: (output, value) }
        }
    }

    fn replay(&self, stream: sys::CUstream) {
        // SAFETY: a live executable and stream; the launch uses the replay's stream.
        self.space.replay(handle(stream), || ok(unsafe { sys::cuGraphLaunch(self.exec, stream) })).unwrap();
    }

    fn output_holds(&self, device: &Device) -> bool {
        let mut bytes = vec![0; 6 * MIB as usize];
        // SAFETY: a live-out block.
        unsafe { device.driver().read(self.output.0, &mut bytes) }.unwrap();
        bytes.chunks_exact(4).all(|word| word == self.output.1.to_ne_bytes())
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn real_graphs_keep_their_outputs_while_others_replay_on_other_streams() {
    let _alone = alone();
    let context = Context::new();
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let streams = [context.stream(), context.stream(), context.stream()];
    let modes = [
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED,
    ];
    let mut graphs: Vec<Graph> =
        (0..12).map(|n| Graph::capture(&arena, streams[0], n, modes[n as usize % 3])).collect();
    for graph in &graphs {
        graph.replay(streams[0]);
    }
    for turn in 0..600usize {
        graphs[turn * 7 % 12].replay(streams[turn * 5 % 3]);
    }
    context.synchronize();
    assert!(graphs.iter().all(|graph| graph.output_holds(&device)), "an output was destroyed");

    for graph in graphs.split_off(6) {
        graphs[0].replay(streams[1]);
        // SAFETY: not launched again; CUDA keeps the executable until its last launch is done.
        ok(unsafe { sys::cuGraphExecDestroy(graph.exec) });
        drop(graph.space);
    }
    arena.trim().unwrap();
    assert_eq!(device.stats().free_bytes, 0);
    let last = *streams.last().unwrap();
    graphs[1].replay(last);
    graphs.push(Graph::capture(&arena, last, 20, modes[1]));
    for (turn, graph) in graphs.iter().enumerate() {
        graph.replay(streams[turn % 3]);
    }
    context.synchronize();
    assert!(graphs.iter().all(|graph| graph.output_holds(&device)), "an output was destroyed");
    for graph in &graphs {
        // SAFETY: as above; the context is idle.
        ok(unsafe { sys::cuGraphExecDestroy(graph.exec) });
    }
    drop((graphs, arena));
    assert_eq!(device.stats().physical_bytes, 0);
}

/// Captures repeated fills of a block and a copy of its end to an output: wrong if another graph
/// runs concurrently.
fn capture_slow(arena: &SharedVmmAllocator, stream: sys::CUstream, number: u32) -> Graph {
    let (bytes, output_bytes) = (256 * MIB, 6 * MIB);
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    let value = 0x600d_0000 + number;
    let space = arena.open_space().unwrap();
    let (mut graph, mut exec) = (ptr::null_mut(), ptr::null_mut());
    // SAFETY: a live stream; captured work uses live blocks.
    unsafe {
        ok(sys::cuStreamBeginCapture_v2(stream, mode));
        let scratch = space.allocate(bytes, handle(stream)).unwrap();
        let output = space.allocate(output_bytes, handle(stream)).unwrap();
        for _ in 0..4 {
            ok(sys::cuMemsetD32Async(scratch.0, value, bytes as usize / 4, stream));
        }
        let end = scratch.0 + bytes - output_bytes;
        ok(sys::cuMemcpyDtoDAsync_v2(output.0, end, output_bytes as usize, stream));
        space.free(scratch).unwrap();
        ok(sys::cuStreamEndCapture(stream, &raw mut graph));
        ok(sys::cuGraphInstantiateWithFlags(&raw mut exec, graph, 0));
        ok(sys::cuGraphDestroy(graph));
        space.seal().unwrap();
        Graph { space, exec, output: (output, value) }
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn replays_on_default_streams_of_green_contexts_are_in_order() {
    let _alone = alone();
    let context = Context::new();
    let device = device();
    let contexts = GreenContext::several(2);
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let (stream, own) = (context.stream(), contexts[1].stream());
    let graphs: Vec<Graph> = (0..6).map(|number| capture_slow(&arena, stream, number)).collect();
    let on = |turn: usize, launch: &dyn Fn(sys::CUstream)| match turn % 5 {
        0 => launch(ptr::null_mut()),
        1 | 2 => contexts[turn % 5 - 1].current(|| launch(ptr::null_mut())),
        3 => launch(stream),
        _ => launch(own),
    };
    let wrong = |launch: &dyn Fn(&Graph, sys::CUstream)| {
        let mut wrong = 0;
        for round in 0..20 {
            for (number, graph) in graphs.iter().enumerate() {
                on(round + number, &|stream| launch(graph, stream));
            }
            contexts.iter().for_each(|green| green.current(|| context.synchronize()));
            context.synchronize();
            wrong += graphs.iter().filter(|graph| !graph.output_holds(&device)).count();
        }
        wrong
    };
    let by_replay = wrong(&|graph, stream| {
        let stream_named = if stream.is_null() { Stream::LEGACY } else { handle(stream) };
        // SAFETY: a live executable; the launch uses the replay's stream.
        let launch = || ok(unsafe { sys::cuGraphLaunch(graph.exec, stream) });
        graph.space.replay(stream_named, launch).unwrap();
    });
    // SAFETY: a live executable and stream.
    let around_it = wrong(&|graph, stream| ok(unsafe { sys::cuGraphLaunch(graph.exec, stream) }));
    println!("RESULT replays in green contexts: {by_replay} of 120 wrong, {around_it} around the order");
    assert_eq!(by_replay, 0);
    assert!(around_it > 0, "nothing was wrong without the order either, so this shows nothing");
    for graph in &graphs {
        // SAFETY: the contexts are idle.
        ok(unsafe { sys::cuGraphExecDestroy(graph.exec) });
    }
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn out_of_memory_is_a_value_and_the_next_call_works() {
    let _alone = alone();
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let small = space.allocate(64 * MIB, Stream::LEGACY).unwrap();
    let before = device.stats();
    let free = device.driver().free_bytes().unwrap();
    let refused = space.allocate(free + 1024 * MIB, Stream::LEGACY);
    assert!(matches!(refused, Err(Error::OutOfMemory { device: 0, .. })), "{refused:?}");
    let after = device.stats();
    assert_eq!(
        (after.physical_bytes, after.mappings, after.pending),
        (before.physical_bytes, before.mappings, 0)
    );
    space.free(small).unwrap();
    assert_eq!(space.allocate(64 * MIB, Stream::LEGACY), Ok(small));
    assert!(device.driver().free_bytes().unwrap() + 64 * MIB >= free);
}

#[test]
#[ignore = "SKIPPED: needs a GPU, scripts/gpu.sh runs it"]
fn costs_on_this_machine() {
    let _alone = alone();
    let device = device();
    let arena = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    let space = arena.open_space().unwrap();
    let block = space.allocate(24 * MIB, Stream::LEGACY).unwrap();
    space.free(block).unwrap();
    let time = |what: &str, turns: u32, body: &mut dyn FnMut()| {
        let time = median(51, turns, body);
        println!("RESULT {what}: {time:?} (median of 51 x {turns})");
        time
    };
    let allocate = time("allocate + free, mapped", 1000, &mut || {
        let block = space.allocate(24 * MIB, Stream::LEGACY).unwrap();
        space.free(block).unwrap();
    });
    let open = time("open + drop a space", 100, &mut || drop(arena.open_space().unwrap()));
    let first = time("open, first block of a page (reserve, map), drop", 5, &mut || {
        let space = arena.open_space().unwrap();
        space.allocate(32 * MIB, Stream::LEGACY).unwrap();
    });
    let sealed = arena.open_space().unwrap();
    sealed.seal().unwrap();
    let same = time("replay order, same stream", 1000, &mut || sealed.replay(Stream::LEGACY, || ()).unwrap());
    let context = Context::new();
    let streams = [context.stream(), context.stream()];
    let mut turn = 0;
    let other = time("replay order, another stream", 100, &mut || {
        turn += 1;
        sealed.replay(handle(streams[turn % 2]), || ()).unwrap();
    });
    assert!(allocate < Duration::from_micros(1) && open < Duration::from_micros(5), "{allocate:?} {open:?}");
    assert!(
        first < Duration::from_millis(2)
            && same < Duration::from_micros(1)
            && other < Duration::from_micros(50)
    );
}

/// A second device writes pages of the first one: listed by the arena, and added later.
#[test]
#[ignore = "SKIPPED: needs two GPUs, scripts/gpu.sh runs it"]
fn a_peer_reads_and_writes_what_is_mapped() {
    const BYTES: u64 = 40 * MIB;
    let _alone = alone();
    let device = device();
    if device.driver().capabilities().peers.without(Peers::one(1)) == device.driver().capabilities().peers {
        println!("SKIPPED: needs two GPUs that reach each other's memory");
        return;
    }
    let peer = CudaDriver::new(1).unwrap();
    let listed = Options { peers: Peers::one(1), ..Options::default() };
    let arenas =
        [listed, Options::default()].map(|options| SharedVmmAllocator::new(&device, &options).unwrap());
    let spaces = arenas.each_ref().map(|arena| arena.open_space().unwrap());
    let blocks = spaces.each_ref().map(|space| space.allocate(BYTES, Stream::LEGACY).unwrap());
    device.admit(Peers::one(1)).unwrap();
    for (number, block) in blocks.into_iter().enumerate() {
        let value = 0x00c0_ffee + number as u32;
        let mut found = [[0; 4]; 2];
        // SAFETY: live blocks, accessible to the second device and otherwise unused; the reads
        // follow the fill, the first one in stream order.
        unsafe {
            peer.fill(block, BYTES, value, Stream::LEGACY).unwrap();
            peer.read(block.plus(BYTES - 4), &mut found[0]).unwrap();
            device.driver().read(block, &mut found[1]).unwrap();
        }
        assert_eq!(found.map(u32::from_ne_bytes), [value; 2]);
    }
}

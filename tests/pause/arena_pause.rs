//! Paused arenas: memory is freed, addresses and graphs stay, live-out contents return.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, Instant};

use vmmgraph::driver::{CudaDriver, HostDriver, SharedDriver};
use vmmgraph::pages::Fence;
use vmmgraph::pause::{Moved, PauseHooks};
use vmmgraph::{
    Address, ArenaStats, Device, Error, HostOptions, Options, Policy, RegionOptions, SharedVmmAllocator,
    Space, Stream, VmmTorchAllocator,
};
use vmmgraph_testkit::{
    Delay, FaultyDriver, LateDriver, MIB, ReorderingDriver, Stamps, alone, child, stream,
};

const A: Stream = Stream::LEGACY;
const NOW: Duration = Duration::ZERO;

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
}

fn bench() -> Bench {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    Bench { device: Device::with_driver(faulty.clone()), host, faulty }
}

impl Bench {
    fn arena(&self, tag: &str) -> SharedVmmAllocator {
        arena_of(&self.device, tag)
    }

    fn end(self) {
        self.device.trim().unwrap();
        assert_eq!(self.device.pool().audit_idle(), Ok(()));
        assert_eq!(self.device.stats().absent_bytes, 0);
        self.device.host_pool().trim().unwrap();
        assert_eq!(self.device.host_pool().stats().held_bytes, 0, "contents stay on the host");
        drop(self.device);
        assert_eq!((self.host.leftovers(), self.host.host_leftovers()), ([0; 4], [0; 2]));
    }
}

fn arena_of(device: &Arc<Device>, tag: &str) -> SharedVmmAllocator {
    SharedVmmAllocator::new(device, &Options { tag: tag.to_owned(), ..Options::default() }).unwrap()
}

struct Graph {
    space: Arc<Space>,
    passing: Vec<(Address, u64)>,
    staying: Vec<(Address, u64)>,
    stamp: u32,
}

impl Graph {
    fn capture(arena: &SharedVmmAllocator, number: u64) -> Self {
        let space = arena.open_space().unwrap();
        let block = |bytes| (space.allocate(bytes, A).unwrap(), bytes);
        let mut passing = vec![block((20 + 6 * number) * MIB), block(3 * MIB)];
        let mut staying = vec![block(4000), block(5 * MIB)];
        passing.drain(..1).for_each(|(at, _)| space.free(at).unwrap());
        passing.push(block(33 * MIB));
        staying.push((space.allocate_kept(3000 * (number + 1), A).unwrap(), 3000 * (number + 1)));
        passing.iter().for_each(|(at, _)| space.free(*at).unwrap());
        space.seal().unwrap();
        Self { space, passing, staying, stamp: 0 }
    }

    fn replay(&mut self, stamps: &Stamps, stamp: u32) {
        let (passing, staying) = (&self.passing, &self.staying);
        let launch = || {
            for (at, bytes) in passing {
                stamps.write(*at, *bytes, stamp)?;
                assert!(stamps.holds(*at, *bytes, stamp)?);
            }
            staying.iter().try_for_each(|(at, bytes)| stamps.write(*at, *bytes, stamp))
        };
        self.space.replay(A, launch).unwrap().unwrap();
        self.stamp = stamp;
    }

    fn holds(&self, stamps: &Stamps) -> bool {
        self.staying.iter().all(|(at, bytes)| stamps.holds(*at, *bytes, self.stamp).unwrap())
    }
}

fn refused<T>(result: vmmgraph::Result<T>, found: &str) {
    match result {
        Err(Error::WrongState { sentence }) => assert!(sentence.contains(found), "{sentence}"),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("not refused"),
    }
}

/// Serializes tests: counters of the stand-in are process-wide.
fn stand_in() -> (SharedDriver, MutexGuard<'static, ()>) {
    let alone = alone();
    (Arc::new(CudaDriver::new(0).unwrap()), alone)
}

fn cycles(driver: &SharedDriver) {
    let device = Device::with_driver(driver.clone());
    let before = driver.free_bytes().unwrap();
    let stamps = Stamps::new(driver, A);
    let arena = arena_of(&device, "graphs");
    let mut graphs: Vec<_> = (0..4).map(|number| Graph::capture(&arena, number)).collect();
    for (number, graph) in graphs.iter_mut().enumerate() {
        graph.replay(&stamps, number as u32 + 1);
    }
    let there = arena.stats();
    let mut random = 1_u64;
    for cycle in 0..50 {
        let report = arena.pause(Fence::default()).unwrap();
        assert_eq!((report.complete(), report.regions), (Ok(()), 1));
        assert_eq!(report.bytes, there.physical_bytes);
        assert_eq!(report.copied_bytes, there.retained_bytes + there.kept_bytes);
        device.give_back(NOW);
        assert_eq!(driver.free_bytes().unwrap(), before, "not all of the arena is back");
        let paused = arena.stats();
        assert!(paused.paused && paused.physical_bytes == 0 && paused.account.charged_bytes == 0);
        assert_eq!((arena.audit(), device.stats().absent_bytes), (Ok(()), report.bytes));
        let back = arena.resume(NOW).unwrap();
        assert_eq!((back.regions, back.bytes, back.copied_bytes), (1, report.bytes, report.copied_bytes));
        assert_eq!(arena.stats(), ArenaStats { replays: arena.stats().replays, ..there });
        assert_eq!(arena.audit(), Ok(()));
        for _ in 0..2 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let graph = (random >> 33) as usize % graphs.len();
            graphs[graph].replay(&stamps, 10 * cycle + 7);
            assert!(graphs.iter().all(|graph| graph.holds(&stamps)), "cycle {cycle}");
        }
    }
    drop((graphs, arena));
    device.trim().unwrap();
    assert_eq!(device.pool().audit_idle(), Ok(()));
    assert_eq!(driver.free_bytes().unwrap(), before);
}

#[test]
fn graphs_replay_right_after_fifty_cycles_and_nothing_is_held_between() {
    let host: SharedDriver = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    cycles(&host);
}

#[test]
fn the_same_on_the_stand_in() {
    let (driver, _alone) = stand_in();
    cycles(&driver);
}

#[test]
fn a_paused_arena_refuses_what_needs_its_memory_and_nothing_else() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("");
    let mut graph = Graph::capture(&arena, 0);
    graph.replay(&stamps, 3);
    let replays = arena.replay_seq();
    arena.pause(Fence::default()).unwrap();
    let launched = AtomicBool::new(false);
    refused(graph.space.replay(A, || launched.store(true, Relaxed)), "paused");
    // SAFETY: no output is named.
    refused(unsafe { graph.space.verify(A, &[], || launched.store(true, Relaxed)) }, "paused");
    assert!(!launched.load(Relaxed) && arena.replay_seq() == replays);
    refused(arena.open_space(), "paused");
    refused(arena.open_bump_space(), "paused");
    refused(arena.switch_to_new_virtual_space(), "paused");
    refused(arena.allocate(512, A), "paused");
    refused(graph.space.allocate(512, A), "sealed");
    refused(graph.space.seal(), "sealed");
    arena.mark().unwrap();
    graph.space.wait().unwrap();
    arena.trim().unwrap();
    graph.space.record_stream(graph.staying[0].0, stream(0x50)).unwrap();
    let freed = graph.staying.remove(0);
    graph.space.free(freed.0).unwrap();
    assert!(matches!(graph.space.free(freed.0), Err(Error::DoubleFree { .. })));
    assert_eq!((arena.audit(), arena.pause(Fence::default()).unwrap().calls), (Ok(()), 0));
    arena.resume(NOW).unwrap();
    assert!(graph.holds(&stamps));
    let next = Graph::capture(&arena, 1);
    graph.replay(&stamps, 4);
    drop((next, graph, arena));
    bench.end();
}

/// An arena with the serial names always has a current space.
#[test]
fn a_current_space_refuses_a_pause_from_its_first_block_on() {
    let bench = bench();
    let arena = bench.arena("graphs");
    for _ in 0..2 {
        arena.switch_to_new_virtual_space().unwrap();
        arena.allocate(9 * MIB, A).unwrap();
        refused(arena.pause(Fence::default()), "spaces of it are open");
        arena.switch_to_new_virtual_space().unwrap();
        arena.pause(Fence::default()).unwrap();
        assert_eq!(bench.device.pool().stats().physical_bytes, 0);
        refused(arena.allocate(512, A), "paused");
        refused(arena.switch_to_new_virtual_space(), "paused");
        arena.resume(NOW).unwrap();
        arena.allocate(512, A).unwrap();
        assert_eq!(arena.audit(), Ok(()));
    }
    arena.switch_to_new_virtual_space().unwrap();
    arena.pause(Fence::default()).unwrap();
    drop(arena);
    bench.end();
}

#[test]
fn a_capture_a_launch_and_a_captured_stream_refuse_the_pause_and_nothing_has_changed() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("graphs");
    let mut graph = Graph::capture(&arena, 0);
    graph.replay(&stamps, 2);
    let open = arena.open_space().unwrap();
    refused(arena.pause(Fence::default()), "spaces of it are open");
    refused(bench.device.pause(&["graphs"], Fence::default()), "spaces of it are open");
    open.allocate(9 * MIB, A).unwrap();
    // A space dropped without a seal; its blocks live on.
    let holder = VmmTorchAllocator::new(&open);
    drop(open);
    let inside = graph.space.replay(A, || arena.pause(Fence::default())).unwrap();
    refused(inside, "under way");
    let captured = stream(0x60);
    graph.space.replay(captured, || ()).unwrap();
    bench.faulty.set_capturing(captured, true);
    assert!(matches!(arena.pause(Fence::default()), Err(Error::StreamCapturing { .. })));
    bench.faulty.set_capturing(captured, false);
    // A stream recorded for a block, and a stream of the caller's fence.
    graph.space.record_stream(graph.staying[1].0, stream(0x61)).unwrap();
    bench.faulty.set_capturing(stream(0x61), true);
    assert!(matches!(arena.pause(Fence::default()), Err(Error::StreamCapturing { .. })));
    bench.faulty.set_capturing(stream(0x61), false);
    let mut fence = Fence::default();
    bench.faulty.set_capturing(captured, true);
    fence.add(bench.device.pool().events(), captured);
    assert!(matches!(arena.pause(fence), Err(Error::StreamCapturing { .. })));
    bench.faulty.set_capturing(captured, false);
    assert_eq!(bench.faulty.broken_captures(), [""; 0]);
    assert!(!arena.stats().paused && graph.holds(&stamps));
    graph.replay(&stamps, 3);
    assert_eq!(arena.resume(NOW).unwrap().regions, 0);
    assert_eq!(arena.pause(Fence::default()).unwrap().left_bytes, 0);
    drop((holder, graph, arena));
    bench.end();
}

#[test]
fn arenas_are_found_by_tag_beside_regions_and_all_or_none_come_back() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let (first, second, nameless) = (bench.arena("graphs"), bench.arena("draft"), bench.arena(""));
    let mut graphs = [&first, &second, &nameless].map(|arena| Graph::capture(arena, 0));
    graphs.iter_mut().for_each(|graph| graph.replay(&stamps, 9));
    let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
    let region = bench.device.region("graphs", options).unwrap();
    region.allocate(4 * MIB, A).unwrap();
    let paused = |report: vmmgraph::Result<vmmgraph::pause::PauseReport>| report.unwrap().regions;
    assert_eq!(paused(bench.device.pause(&["other"], Fence::default())), 0);
    assert_eq!(paused(bench.device.pause(&["graphs"], Fence::default())), 2);
    assert!(first.stats().paused && region.stats().paused && !second.stats().paused);
    assert_eq!(paused(bench.device.pause(&[], Fence::default())), 2);
    assert_eq!(bench.device.stats().physical_bytes, 0);
    bench.device.set_budget(Some(70 * MIB));
    assert!(matches!(bench.device.resume(&[], NOW), Err(Error::OverBudget { .. })));
    assert!(first.stats().paused && second.stats().paused && nameless.stats().paused);
    assert_eq!(bench.device.stats().physical_bytes, 0);
    bench.device.set_budget(None);
    assert_eq!(bench.device.resume(&["draft"], NOW).unwrap().regions, 1);
    // Spaces keep their arena known to the device after its handle is dropped.
    drop(nameless);
    assert_eq!(bench.device.resume(&[], NOW).unwrap().regions, 3);
    assert!(graphs.iter().all(|graph| graph.holds(&stamps)));
    graphs.iter_mut().for_each(|graph| graph.replay(&stamps, 10));
    drop((graphs, region, first, second));
    bench.end();
}

#[test]
fn a_resume_without_room_is_a_value_waits_until_its_deadline_and_can_be_repeated() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let (arena, other) = (bench.arena(""), bench.arena(""));
    let mut graph = Graph::capture(&arena, 1);
    graph.replay(&stamps, 8);
    let need = arena.stats().physical_bytes;
    arena.pause(Fence::default()).unwrap();
    bench.device.give_back(NOW);
    bench.device.set_budget(Some(need + 20 * MIB));
    let taken = Graph::capture(&other, 0);
    assert!(matches!(arena.resume(NOW), Err(Error::OverBudget { .. })));
    let start = Instant::now();
    assert!(arena.resume(Duration::from_millis(40)).is_err());
    assert!(start.elapsed() >= Duration::from_millis(40));
    assert!(arena.stats().paused && arena.stats().physical_bytes == 0);
    assert_eq!((arena.audit(), other.audit()), (Ok(()), Ok(())));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            drop(taken);
        });
        let report = arena.resume(Duration::from_secs(30)).unwrap();
        assert_eq!((report.regions, report.bytes), (1, need));
    });
    assert!(graph.holds(&stamps));
    graph.replay(&stamps, 9);
    drop((graph, arena, other));
    bench.end();
}

#[test]
fn spaces_blocks_and_the_arena_may_go_while_it_is_paused() {
    for whole in [false, true] {
        let bench = bench();
        let stamps = Stamps::new(bench.device.driver(), A);
        let arena = bench.arena("");
        let mut graphs: Vec<_> = (0..3).map(|number| Graph::capture(&arena, number)).collect();
        for graph in &mut graphs {
            graph.replay(&stamps, 5);
        }
        let tensors = VmmTorchAllocator::new(&graphs[2].space);
        let mut orphan = graphs.pop().unwrap();
        let Graph { space, staying, stamp, .. } = &mut orphan;
        let (staying, stamp) = (std::mem::take(staying), *stamp);
        drop(std::mem::replace(space, Arc::clone(&graphs[0].space)));
        arena.pause(Fence::default()).unwrap();
        let unmaps = bench.faulty.count("unmap");
        drop(graphs.remove(1));
        let (freed, _) = graphs[0].staying.remove(1);
        graphs[0].space.free(freed).unwrap();
        tensors.free(staying[1].0, &[]).unwrap();
        bench.device.trim().unwrap();
        assert_eq!(bench.faulty.count("unmap"), unmaps, "what is absent was unmapped");
        assert_eq!(bench.device.pool().audit_idle(), Ok(()));
        if whole {
            drop((orphan, graphs, tensors, arena));
        } else {
            arena.resume(NOW).unwrap();
            assert!(graphs[0].holds(&stamps));
            for (at, bytes) in [staying[0], staying[2]] {
                assert!(stamps.holds(at, bytes, stamp).unwrap(), "a tensor's contents were lost");
            }
            graphs[0].replay(&stamps, 6);
            Graph::capture(&arena, 2).replay(&stamps, 7);
            assert!(graphs[0].holds(&stamps) && arena.audit().is_ok());
            drop((orphan, graphs, tensors, arena));
        }
        bench.end();
    }
}

#[test]
fn what_cannot_go_stays_is_reported_and_goes_with_the_next_pause() {
    for what in ["unmap", "copy_to_host", "release"] {
        let bench = bench();
        let stamps = Stamps::new(bench.device.driver(), A);
        let arena = bench.arena("");
        let mut graphs: Vec<_> = (0..2).map(|number| Graph::capture(&arena, number)).collect();
        graphs.iter_mut().for_each(|graph| graph.replay(&stamps, 5));
        let held = arena.stats();
        bench.faulty.refuse(what, true);
        let report = arena.pause(Fence::default()).unwrap();
        assert!(!report.failures.is_empty() && report.regions == 1 && arena.stats().paused);
        match what {
            "unmap" => assert_eq!((report.bytes, report.left_bytes), (0, held.physical_bytes)),
            "copy_to_host" => assert_eq!(report.left_bytes, held.retained_bytes + held.kept_bytes),
            _ => assert_eq!((report.bytes, report.left_bytes), (held.physical_bytes, 0)),
        }
        assert_eq!(arena.stats().physical_bytes, report.left_bytes);
        refused(graphs[0].space.replay(A, || ()), "paused");
        assert_eq!(arena.audit(), Ok(()));
        bench.faulty.refuse(what, false);
        if what == "unmap" {
            arena.resume(NOW).unwrap();
            assert!(graphs.iter().all(|graph| graph.holds(&stamps)));
            bench.faulty.refuse(what, true);
            arena.pause(Fence::default()).unwrap();
            bench.faulty.refuse(what, false);
        }
        let rest = arena.pause(Fence::default()).unwrap();
        assert_eq!((rest.regions, rest.complete(), rest.left_bytes), (0, Ok(()), 0));
        assert_eq!(arena.stats().physical_bytes, 0);
        arena.resume(NOW).unwrap();
        assert!(graphs.iter().all(|graph| graph.holds(&stamps)), "{what}");
        graphs[1].replay(&stamps, 6);
        assert!(graphs.iter().all(|graph| graph.holds(&stamps)));
        drop((graphs, arena));
        bench.end();
    }
}

#[test]
fn a_resume_that_fails_leaves_it_paused_and_the_contents_on_the_host() {
    for what in ["map", "copy_from_host", "create"] {
        let bench = bench();
        let stamps = Stamps::new(bench.device.driver(), A);
        let arena = bench.arena("");
        let mut graph = Graph::capture(&arena, 1);
        graph.replay(&stamps, 5);
        arena.pause(Fence::default()).unwrap();
        bench.device.give_back(NOW);
        for _ in 0..2 {
            bench.faulty.refuse(what, true);
            assert!(arena.resume(NOW).is_err());
            bench.faulty.refuse(what, false);
            assert!(arena.stats().paused && bench.device.stats().physical_bytes == 0);
            assert_eq!((arena.audit(), bench.device.pool().audit_idle()), (Ok(()), Ok(())));
            refused(graph.space.replay(A, || ()), "paused");
        }
        arena.resume(NOW).unwrap();
        assert!(graph.holds(&stamps), "{what}");
        drop((graph, arena));
        bench.end();
    }
}

#[test]
fn a_replay_after_a_resume_without_waiting_waits_for_the_contents() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("graphs");
    let mut graph = Graph::capture(&arena, 0);
    graph.replay(&stamps, 5);
    arena.pause(Fence::default()).unwrap();
    bench.faulty.set_busy(true);
    let (_, mut ready) = bench.device.resume_async(&["graphs"], NOW).unwrap();
    assert!(!ready[0].done().unwrap());
    let waits = bench.faulty.count("event_wait");
    graph.space.replay(A, || ()).unwrap();
    let first = bench.faulty.count("event_wait");
    assert!(first > waits, "nothing orders the replay behind the contents");
    graph.space.replay(A, || ()).unwrap();
    assert_eq!(bench.faulty.count("event_wait"), first, "the second one is in order by itself");
    bench.faulty.set_busy(false);
    ready[0].wait().unwrap();
    assert!(graph.holds(&stamps));
    drop((ready, graph, arena));
    bench.end();
}

/// On CUDA, mapping takes a millisecond per page while copies of one direction run.
#[test]
fn everything_is_mapped_before_the_first_copy() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("graphs");
    let mut graph = Graph::capture(&arena, 0);
    graph.replay(&stamps, 5);
    let policies = [Policy::Backup, Policy::Discard, Policy::Backup];
    let regions = policies.map(|policy| {
        let options = RegionOptions { policy, page_bytes: 2 * MIB, ..RegionOptions::default() };
        let region = bench.device.region("weights", options).unwrap();
        region.allocate(10 * MIB, A).unwrap();
        region
    });
    bench.device.pause(&[], Fence::default()).unwrap();
    bench.faulty.start_log();
    bench.device.resume(&[], NOW).unwrap();
    let log = bench.faulty.take_log();
    let named =
        |name: &str| -> Vec<usize> { (0..log.len()).filter(|at| log[*at].starts_with(name)).collect() };
    let (copies, maps) = (named("copy_from_host"), named("map"));
    assert!(
        copies.len() > 10 && maps.len() > 15,
        "two of three regions of five pages, and the graph's: {log:#?}"
    );
    assert!(maps.iter().max() < copies.iter().min(), "{log:#?}");
    assert!(graph.holds(&stamps));
    drop((regions, graph, arena));
    bench.end();
}

/// The driver refuses to unmap a freed tensor: the arena keeps its page.
#[test]
fn what_was_refused_once_stays_while_contents_come_to_it() {
    let bench = bench();
    let arena = bench.arena("graphs");
    let space = arena.open_space().unwrap();
    let tensors = VmmTorchAllocator::new(&space);
    let block = space.allocate(5 * MIB, A).unwrap();
    space.seal().unwrap();
    drop(space);
    bench.faulty.refuse("unmap", true);
    tensors.free(block, &[]).unwrap();
    drop(tensors);
    bench.faulty.refuse("unmap", false);
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    bench.faulty.set_busy(true);
    let (report, mut ready) = bench.device.resume_async(&[], NOW).unwrap();
    assert!(report.copied_bytes > 0, "nothing comes back: {report:?}");
    let unmapped = bench.faulty.count("unmap");
    bench.device.pool().retry().unwrap();
    assert_eq!(bench.faulty.count("unmap"), unmapped, "unmapped under the copies");
    bench.faulty.set_busy(false);
    ready[0].wait().unwrap();
    drop((ready, arena));
    bench.end();
}

/// True if unmapped; arena id, generation, ranges.
type Told = (bool, u64, u64, Vec<(Address, u64)>);

struct Hooks {
    arena: Mutex<Option<Arc<SharedVmmAllocator>>>,
    told: Mutex<Vec<Told>>,
}

impl Hooks {
    fn note(&self, gone: bool, moved: &Moved<'_>) {
        self.told.lock().unwrap().push((gone, moved.region, moved.generation, moved.ranges.to_vec()));
        if let Some(arena) = &*self.arena.lock().unwrap() {
            refused(arena.pause(Fence::default()), "this thread is doing so already");
            refused(arena.open_space(), if gone { "being paused" } else { "being resumed" });
            arena.trim().unwrap();
        }
    }
}

impl PauseHooks for Hooks {
    fn before_unmap(&self, moved: &Moved<'_>) {
        self.note(true, moved);
    }
    fn after_map(&self, moved: &Moved<'_>) {
        self.note(false, moved);
    }
}

#[test]
fn hooks_are_told_with_all_addresses_and_a_generation() {
    let bench = bench();
    let arena = Arc::new(bench.arena("graphs"));
    let graph = Graph::capture(&arena, 0);
    let hooks = Arc::new(Hooks { arena: Mutex::default(), told: Mutex::default() });
    let told: Arc<dyn PauseHooks> = hooks.clone();
    bench.device.add_pause_hooks("graphs", &told);
    *hooks.arena.lock().unwrap() = Some(Arc::clone(&arena));
    for _ in 0..2 {
        arena.pause(Fence::default()).unwrap();
        arena.resume(NOW).unwrap();
    }
    *hooks.arena.lock().unwrap() = None;
    let told = std::mem::take(&mut *hooks.told.lock().unwrap());
    let steps: Vec<_> =
        told.iter().map(|(gone, region, generation, _)| (*gone, *region, *generation)).collect();
    let id = arena.id();
    assert_eq!(steps, [(true, id, 1), (false, id, 2), (true, id, 2), (false, id, 3)]);
    for (.., ranges) in &told {
        assert_eq!(ranges, &told[0].3);
        assert!(ranges.windows(2).all(|pair| pair[0].0.0 + pair[0].1 < pair[1].0.0));
        for (at, bytes) in &graph.staying {
            assert!(ranges.iter().any(|(from, long)| from.0 <= at.0 && at.0 + bytes <= from.0 + long));
        }
    }
    drop((graph, arena));
    bench.end();
}

struct Stop<'a>(&'a AtomicBool);

impl Drop for Stop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Relaxed);
    }
}

#[test]
fn pauses_replays_captures_and_ends_on_many_threads() {
    let bench = bench();
    let arena = bench.arena("graphs");
    let [launches, reads, pauses] = [0; 3].map(AtomicU64::new);
    let inside = AtomicBool::new(false);
    let (stop, stamps) = (AtomicBool::new(false), Stamps::new(bench.device.driver(), A));
    let shared = Mutex::new(Graph::capture(&arena, 0));
    shared.lock().unwrap().replay(&stamps, 1);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Relaxed) {
                    match bench.device.pause(&["graphs"], Fence::default()) {
                        Ok(report) => {
                            assert_eq!(report.complete(), Ok(()));
                            pauses.fetch_add(report.regions, Relaxed);
                        }
                        Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
                    }
                    assert!(!inside.load(Relaxed) || !arena.stats().paused);
                    bench.device.resume(&["graphs"], NOW).unwrap();
                    thread::sleep(Duration::from_millis(1));
                }
            });
        }
        for number in 1..3 {
            let (arena, stop, launches) = (&arena, &stop, &launches);
            scope.spawn(move || {
                let stamps = Stamps::new(arena.device().driver(), A);
                while !stop.load(Relaxed) {
                    let space = match arena.open_space() {
                        Ok(space) => space,
                        Err(error) => {
                            assert!(matches!(error, Error::WrongState { .. }), "{error}");
                            continue;
                        }
                    };
                    let block = space.allocate(number * 3 * MIB, A).unwrap();
                    space.allocate(number * 9 * MIB, A).unwrap();
                    space.seal().unwrap();
                    let launch = || stamps.write(block, number * 3 * MIB, 77);
                    match space.replay(stream(0x70 + number), launch) {
                        Ok(written) => {
                            written.unwrap();
                            launches.fetch_add(1, Relaxed);
                        }
                        Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
                    }
                }
            });
        }
        scope.spawn(|| {
            let _stopped = Stop(&stop);
            let enough = |of: &AtomicU64| of.load(Relaxed) > 10;
            let start = Instant::now();
            while !(enough(&launches) && enough(&reads) && enough(&pauses)) {
                assert!(start.elapsed() < Duration::from_secs(300), "{launches:?} {reads:?} {pauses:?}");
                let graph = shared.lock().unwrap();
                let read = || {
                    inside.store(true, Relaxed);
                    assert!(graph.holds(&stamps), "contents were lost");
                    inside.store(false, Relaxed);
                };
                match graph.space.replay(A, read) {
                    Ok(()) => drop(reads.fetch_add(1, Relaxed)),
                    Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
                }
            }
        });
    });
    arena.resume(NOW).unwrap();
    assert!(shared.lock().unwrap().holds(&stamps));
    assert_eq!((arena.audit(), bench.device.pool().audit_idle()), (Ok(()), Ok(())));
    drop((shared, arena));
    bench.end();
}

#[test]
#[ignore = "ends its process"]
fn exits_while_paused() {
    let arena = Box::leak(Box::new(bench().arena("")));
    let graph = Box::leak(Box::new(Graph::capture(arena, 0)));
    arena.pause(Fence::default()).unwrap();
    refused(graph.space.replay(A, || ()), "paused");
    std::process::exit(7);
}

#[test]
fn a_process_may_end_while_an_arena_is_paused() {
    let child = child!("exits_while_paused").args(["--ignored", "--test-threads=1"]).output().unwrap();
    assert_eq!(child.status.code(), Some(7), "{}", String::from_utf8_lossy(&child.stdout));
}

/// A block unknown to every space at the pause, with a running reader.
#[derive(Clone, Copy, Debug)]
enum Gone {
    Retained,
    Kept,
    /// As above, where the space is alive.
    KeptOfItsSpace,
    /// It outlived its scope, and is used on its own stream.
    Outlived,
    OldAddresses,
}

#[test]
fn a_pause_waits_for_who_uses_blocks_that_are_gone() {
    const SIDE: Stream = stream(7);
    for gone in [Gone::Retained, Gone::Kept, Gone::KeptOfItsSpace, Gone::Outlived, Gone::OldAddresses] {
        let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
        let late = ReorderingDriver::new(host.clone(), 1);
        let device = Device::with_driver(late.clone());
        let arena = arena_of(&device, "graphs");
        let read = Arc::new(AtomicBool::new(false));
        // Long work: each driver query does a few pieces.
        let reads = || {
            (0..300).for_each(|_| late.launch(SIDE, |_| ()));
            let read = Arc::clone(&read);
            late.launch(SIDE, move |_| read.store(true, Relaxed));
        };
        let other = Graph::capture(&arena, 0);
        let mut alive = None;
        match gone {
            Gone::Retained | Gone::Kept | Gone::KeptOfItsSpace => {
                let space = arena.open_space().unwrap();
                let tensors = VmmTorchAllocator::new(&space);
                let kept = !matches!(gone, Gone::Retained);
                let block =
                    if kept { space.allocate_kept(5000, A) } else { space.allocate(5 * MIB, A) }.unwrap();
                space.seal().unwrap();
                reads();
                tensors.record_stream(block, SIDE).unwrap();
                tensors.free(block, &[]).unwrap();
                alive = matches!(gone, Gone::KeptOfItsSpace).then_some(space);
            }
            Gone::Outlived | Gone::OldAddresses => {
                let scope = arena.eager_scope(SIDE).unwrap();
                let block = scope.allocate(5 * MIB).unwrap();
                drop(scope);
                if matches!(gone, Gone::OldAddresses) {
                    arena.trim().unwrap();
                }
                // Later work on the stream belongs to no replay.
                other.space.replay(A, || ()).unwrap();
                reads();
                arena.eager_blocks().record_stream(block, SIDE).unwrap();
                if matches!(gone, Gone::OldAddresses) {
                    arena.eager_blocks().free(block, &[SIDE]).unwrap();
                }
            }
        }
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        assert!(read.load(Relaxed), "{gone:?}: its memory went while it was read");
        drop((other, alive, arena));
        late.drain();
        device.trim().unwrap();
        assert_eq!((late.failed(), device.pool().audit_idle()), (vec![], Ok(())));
    }
}

/// The pause begins between two driver calls of a space's destruction: its readers still count.
#[test]
fn a_pause_in_the_middle_of_a_spaces_end_waits_for_its_readers() {
    const SIDE: Stream = stream(7);
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(Arc::new(LateDriver::new(host, Delay::Right)));
    let device = Device::with_driver(faulty.clone());
    let arena = arena_of(&device, "graphs");
    let other = arena.open_space().unwrap();
    other.allocate_kept(2000, A).unwrap();
    other.seal().unwrap();
    let mut found = [0_u8; 2];
    for held in [false, true] {
        let space = arena.open_space().unwrap();
        let tensors = held.then(|| VmmTorchAllocator::new(&space));
        let blocks = [space.allocate(6000, A).unwrap(), space.allocate_kept(2000, A).unwrap()];
        space.seal().unwrap();
        for (number, block) in blocks.into_iter().enumerate() {
            // SAFETY: a live block of the host driver; `found` outlives the copies.
            unsafe {
                (block.0 as *mut u8).write_volatile(0x5a);
                device.driver().copy_to_host(block, found.as_mut_ptr().add(number), 1, SIDE).unwrap();
            }
            space.record_stream(block, SIDE).unwrap();
        }
        let begun = Arc::new(AtomicBool::new(false));
        let begin = Arc::clone(&begun);
        faulty.set_hook(Some(Arc::new(move |_| {
            if !begin.swap(true, Relaxed) {
                thread::sleep(Duration::from_millis(50));
            }
        })));
        faulty.watch_only(Some(thread::current().id()));
        thread::scope(|threads| {
            threads.spawn(|| {
                while !begun.load(Relaxed) {
                    thread::yield_now();
                }
                arena.pause(Fence::default()).unwrap().complete().unwrap();
            });
            drop((space, tensors));
            assert!(begun.load(Relaxed), "the end of a space asked the driver nothing");
        });
        faulty.set_hook(None);
        faulty.watch_only(None);
        device.pool().events().record(SIDE).unwrap().block().expect("memory went while it was read");
        assert_eq!(std::mem::take(&mut found), [0x5a; 2]);
        arena.resume(NOW).unwrap();
    }
}

/// What a space leaves goes when the pause no longer holds its addresses, not at the next look.
#[test]
fn a_space_that_ends_in_the_middle_of_a_pause_goes_at_its_end() {
    let bench = bench();
    let arena = bench.arena("graphs");
    let _stays = Graph::capture(&arena, 0);
    let ends = Mutex::new(Some(Graph::capture(&arena, 1)));
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        if call == "unmap" {
            drop(ends.lock().unwrap().take());
        }
    })));
    arena.pause(Fence::default()).unwrap();
    bench.faulty.set_hook(None);
    assert_eq!(bench.device.stats().pending, 0, "something waits for nobody");
    arena.resume(NOW).unwrap();
    assert_eq!(arena.audit(), Ok(()));
    drop((_stays, arena));
    bench.end();
}

/// Copies that were begun before one failed still write to pages that the undoing unmaps.
#[test]
fn a_resume_that_fails_unmaps_nothing_under_its_copies() {
    for waits in [true, false] {
        let bench = bench();
        let stamps = Stamps::new(bench.device.driver(), A);
        let arena = bench.arena("graphs");
        let mut graph = Graph::capture(&arena, 1);
        graph.replay(&stamps, 5);
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        let (copies, refusing) = (AtomicU64::new(0), Arc::downgrade(&bench.faulty));
        bench.faulty.set_hook(Some(Arc::new(move |call| {
            if let ("copy_from_host", Some(faulty)) = (call, refusing.upgrade()) {
                faulty.refuse(call, copies.fetch_add(1, Relaxed) == 1);
            }
        })));
        bench.faulty.set_busy(true);
        let unmaps = bench.faulty.count("unmap");
        thread::scope(|scope| {
            let resume = scope.spawn(|| {
                if waits {
                    arena.resume(NOW).map(drop)
                } else {
                    bench.device.resume_async(&["graphs"], NOW).map(drop)
                }
            });
            thread::sleep(Duration::from_millis(30));
            let meanwhile = bench.faulty.count("unmap");
            bench.faulty.set_busy(false);
            assert!(resume.join().unwrap().is_err());
            assert_eq!(meanwhile, unmaps, "unmapped under the first copy");
        });
        bench.faulty.set_hook(None);
        bench.faulty.refuse("copy_from_host", false);
        arena.resume(NOW).unwrap();
        assert!(graph.holds(&stamps));
        drop((graph, arena));
        bench.end();
    }
}

/// The page of contents that did not come stays mapped, since the driver does not unmap it either.
#[test]
fn contents_come_back_to_a_page_that_a_failed_resume_left_mapped() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("");
    let mut graph = Graph::capture(&arena, 1);
    graph.replay(&stamps, 5);
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    bench.device.give_back(NOW);
    for what in ["copy_from_host", "unmap"] {
        bench.faulty.refuse(what, true);
    }
    assert!(arena.resume(NOW).is_err());
    for what in ["copy_from_host", "unmap"] {
        bench.faulty.refuse(what, false);
    }
    arena.resume(NOW).unwrap();
    assert!(graph.holds(&stamps));
    drop((graph, arena));
    bench.end();
}

/// Contents on the host of a space that ends while its arena is paused are nobody's.
#[test]
fn the_host_memory_of_a_space_that_ends_while_paused_is_free() {
    let bench = bench();
    let stamps = Stamps::new(bench.device.driver(), A);
    let arena = bench.arena("");
    let mut graphs = [0, 1].map(|number| Graph::capture(&arena, number));
    graphs.iter_mut().for_each(|graph| graph.replay(&stamps, 5));
    let report = arena.pause(Fence::default()).unwrap();
    let held = || {
        let stats = bench.device.host_pool().stats();
        stats.held_bytes - stats.free_bytes
    };
    assert_eq!(held(), report.copied_bytes);
    let [stays, ends] = graphs;
    drop(ends);
    let left = held();
    assert!(left < report.copied_bytes, "contents of a graph that is gone stay on the host");
    let resumed = arena.resume(NOW).unwrap();
    assert_eq!(resumed.copied_bytes, left);
    assert!(stays.holds(&stamps));
    drop((stays, arena));
    bench.end();
}

/// What another thread unmaps just now is not this pause's to unmap.
#[test]
fn a_pause_waits_for_a_teardown_under_way() {
    let bench = bench();
    let arena = bench.arena("graphs");
    let stays = Graph::capture(&arena, 0);
    let ends = Graph::capture(&arena, 1);
    bench.faulty.set_busy(true);
    ends.space.replay(A, || ()).unwrap();
    drop(ends);
    assert!(bench.device.stats().pending > 0, "the end waits for its replay");
    bench.faulty.set_busy(false);
    let (inside, meanwhile) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (begun, unmaps) = (Arc::clone(&inside), Arc::clone(&meanwhile));
    let (faulty, this) = (Arc::downgrade(&bench.faulty), thread::current().id());
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        let (Some(faulty), "unmap") = (faulty.upgrade(), call) else { return };
        if thread::current().id() == this && !begun.swap(true, Relaxed) {
            let before = faulty.count(call);
            thread::sleep(Duration::from_millis(50));
            unmaps.store(faulty.count(call) - before, Relaxed);
        }
    })));
    thread::scope(|threads| {
        let pause = threads.spawn(|| {
            while !inside.load(Relaxed) {
                thread::yield_now();
            }
            arena.pause(Fence::default()).unwrap().complete().unwrap();
        });
        bench.device.trim().unwrap();
        assert!(inside.load(Relaxed), "nothing was torn down");
        pause.join().unwrap();
    });
    bench.faulty.set_hook(None);
    assert_eq!(meanwhile.load(Relaxed), 0, "two threads unmapped at once");
    arena.resume(NOW).unwrap();
    assert_eq!((arena.audit(), bench.device.pool().audit()), (Ok(()), Ok(())));
    drop((stays, arena));
    bench.end();
}

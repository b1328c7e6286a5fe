//! Sparse large pages are replaced by small ones: contents, refusals, exceptions.

use std::sync::Arc;
use std::time::Duration;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Fence;
use vmmgraph::{
    Borrower, Device, ElasticOptions, Error, HostOptions, Options, RetainPolicy, SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::{
    Captured, IdleBorrower, MIB, Replayed, Stamps, Trace, capture, capture_with, random_model, replay,
    shuffle,
};

const STREAM: Stream = Stream::LEGACY;

fn open(options: &Options) -> (Arc<Device>, SharedVmmAllocator) {
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    let arena = SharedVmmAllocator::new(&device, options).unwrap();
    (device, arena)
}

fn shrink(arena: &SharedVmmAllocator) -> u64 {
    let saved = arena.shrink_to_fit(Fence::default()).unwrap();
    assert_eq!(arena.audit(), Ok(()));
    saved
}

fn models(count: usize) -> impl Iterator<Item = Trace> {
    (0..).map(random_model).filter(|trace| (32 * MIB..80 * MIB).contains(&trace.floor_bytes())).take(count)
}

fn replay_all(trace: &Trace, captured: &[Captured], stamps: &Stamps, round: u32) {
    let mut order: Vec<usize> = (0..captured.len()).collect();
    shuffle(&mut order, u64::from(round) + 3);
    for index in order {
        let found = replay(&captured[index], &trace.shapes[index], stamps, round).unwrap();
        assert_eq!(Replayed { wrong: 0, ..found }, found, "{} {index}", trace.name);
    }
    let lost: u64 = captured.iter().map(|one| one.lost_retained(stamps, round).unwrap()).sum();
    assert_eq!(lost, 0, "{}", trace.name);
}

#[test]
fn every_graph_has_its_own_contents_before_and_after() {
    let mut saved = 0;
    for (number, mut trace) in models(6).enumerate() {
        for shape in &mut trace.shapes {
            let frees = shape.events.len();
            shape.events.truncate(frees - number % 3);
        }
        let (device, arena) = open(&Options::default());
        let mark = number % 2 == 0;
        let mut captured: Vec<_> =
            trace.shapes.iter().map(|shape| capture_with(&arena, shape, STREAM, mark).unwrap()).collect();
        let stamps = Stamps::new(device.driver(), STREAM);
        if number < 3 {
            replay_all(&trace, &captured, &stamps, 0);
        }
        saved += shrink(&arena);
        if number < 3 {
            let lost: u64 = captured.iter().map(|one| one.lost_retained(&stamps, 0).unwrap()).sum();
            assert_eq!(lost, 0, "{}", trace.name);
        }
        replay_all(&trace, &captured, &stamps, 1);

        captured.push(capture(&arena, &trace.shapes[0], STREAM).unwrap());
        captured.push(capture(&arena, trace.shapes.last().unwrap(), STREAM).unwrap());
        trace.shapes.extend([trace.shapes[0].clone(), trace.shapes.last().unwrap().clone()]);
        replay_all(&trace, &captured, &stamps, 2);
        arena.pause(Fence::default()).unwrap().complete().unwrap();
        let refused = arena.shrink_to_fit(Fence::default());
        assert!(
            matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("paused")),
            "{refused:?}"
        );
        arena.resume(Duration::from_secs(10)).unwrap();
        replay_all(&trace, &captured, &stamps, 3);
        let scope = arena.eager_scope(STREAM).unwrap();
        let result = scope.allocate(20 * MIB).unwrap();
        stamps.write(result, 20 * MIB, 7).unwrap();
        drop(scope);
        replay_all(&trace, &captured, &stamps, 4);
        shrink(&arena);
        replay_all(&trace, &captured, &stamps, 5);
        assert!(stamps.holds(result, 20 * MIB, 7).unwrap());
        drop((captured, arena));
    }
    assert!(saved > 20 * MIB, "{saved}");
}

#[test]
fn pages_with_live_blocks_stay_where_they_are() {
    let options = Options { retain: RetainPolicy::Share, ..Options::default() };
    let (device, arena) = open(&options);
    let space = arena.open_space().unwrap();
    let passing = space.allocate(20 * MIB, STREAM).unwrap();
    let output = space.allocate(MIB, STREAM).unwrap();
    space.free(passing).unwrap();
    space.seal().unwrap();
    let stamps = Stamps::new(device.driver(), STREAM);
    space.replay(STREAM, || stamps.write(output, MIB, 9)).unwrap().unwrap();
    assert_eq!(shrink(&arena), 0);
    assert!(stamps.holds(output, MIB, 9).unwrap());
    space.free(output).unwrap();
    // 21 MiB on two large pages.
    assert_eq!(shrink(&arena), 10 * MIB);
    space.replay(STREAM, || stamps.write(passing, 20 * MIB, 10)).unwrap().unwrap();
    assert!(stamps.holds(passing, 20 * MIB, 10).unwrap());
}

#[test]
fn it_is_refused_while_somebody_needs_the_pages_as_they_are() {
    let (device, arena) = open(&Options::default());
    let space = arena.open_space().unwrap();
    let block = space.allocate(18 * MIB, STREAM).unwrap();
    let refused = arena.shrink_to_fit(Fence::default());
    assert!(
        matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("are open")),
        "{refused:?}"
    );
    space.free(block).unwrap();
    space.seal().unwrap();
    let options = ElasticOptions { page_bytes: 16 * MIB, ..ElasticOptions::default() };
    let buffer = Arc::new(device.elastic_buffer(64 * MIB, &options).unwrap());
    let borrower: Arc<dyn Borrower> = Arc::new(IdleBorrower);
    let lease = arena.lend(&buffer, 0..16 * MIB, &borrower).unwrap();
    let refused = arena.shrink_to_fit(Fence::default());
    assert!(
        matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("on lease")),
        "{refused:?}"
    );
    lease.recall(Duration::from_secs(10)).unwrap();
    space.replay(STREAM, || ()).unwrap();
    assert!(shrink(&arena) > 0);
}

#[test]
fn without_memory_for_the_small_pages_everything_stays_and_it_can_be_repeated() {
    let (device, arena) = open(&Options::default());
    let capture = |mib: u64| {
        let space = arena.open_space().unwrap();
        let block = space.allocate(mib * MIB, STREAM).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        (space, block)
    };
    let spaces = [capture(18), capture(20)];
    let stamps = Stamps::new(device.driver(), STREAM);
    arena.set_budget(Some(33 * MIB));
    let refused = arena.shrink_to_fit(Fence::default());
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    assert_eq!(arena.audit(), Ok(()));
    let work = |mib: u64, (space, block): &(_, _), round| {
        let space: &Arc<vmmgraph::Space> = space;
        space.replay(STREAM, || stamps.write(*block, mib * MIB, round)).unwrap().unwrap();
        assert!(stamps.holds(*block, mib * MIB, round).unwrap());
    };
    work(18, &spaces[0], 1);
    work(20, &spaces[1], 2);
    arena.set_budget(None);
    assert_eq!(shrink(&arena), 12 * MIB);
    work(18, &spaces[0], 3);
    work(20, &spaces[1], 4);
}

/// A page that eager work shows stays where it is, so small ones beside it would be more memory.
#[test]
fn pages_that_eager_work_shows_are_not_replaced() {
    let (device, arena) = open(&Options::default());
    for _ in 0..2 {
        let space = arena.open_space().unwrap();
        let block = space.allocate(3 * MIB, STREAM).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        let scope = arena.eager_scope(STREAM).unwrap();
        let shown = scope.allocate(3 * MIB).unwrap();
        scope.free(shown).unwrap();
        drop(scope);
        let before = device.stats().physical_bytes;
        assert_eq!(shrink(&arena), 0);
        assert_eq!(device.stats().physical_bytes, before);
        space.replay(STREAM, || ()).unwrap();
    }
}

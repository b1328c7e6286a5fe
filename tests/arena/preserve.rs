//! Preserved contents across a seal, while a second thread frees the blocks.

use std::sync::Arc;

use vmmgraph::{Address, Error, RetainPolicy, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::{Bench, MIB, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

trait More {
    fn graph(&self) -> (Arc<Space>, Address);
}

impl More for Bench {
    fn graph(&self) -> (Arc<Space>, Address) {
        let space = self.arena.open_space().unwrap();
        let passing = space.allocate(16 * MIB, A).unwrap();
        space.free(passing).unwrap();
        space.seal().unwrap();
        (space, passing)
    }
}

/// Seen from Python on H200: a replay sealed another thread's capture and restored the saved
/// contents of a freed tensor to shared pages, under a third graph.
#[test]
fn what_is_put_back_to_a_block_that_was_freed_meanwhile_reaches_nobody() {
    let bench = Bench::new(A);
    let (_graph, passing) = bench.graph();
    let space = bench.arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let [dropped, stays] = [16 * MIB, 20 * MIB].map(|bytes| blocks.allocate(bytes, A, false).unwrap());
    bench.stamps.write(dropped, 16 * MIB, 5).unwrap();
    let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
    assert_eq!(preserved.blocks(), [(dropped, 16 * MIB), (stays, 20 * MIB)]);
    std::thread::scope(|scope| scope.spawn(|| blocks.free(dropped, &[]).unwrap()).join()).unwrap();
    assert_eq!(space.live_blocks(), [dropped, stays], "it goes later");
    let report = space.seal().unwrap();
    assert_eq!(report.retained.len(), 2);
    // Simulates a replay on the page shared by both graphs.
    bench.stamps.write(passing, 16 * MIB, 7).unwrap();
    bench.stamps.write(dropped, 16 * MIB, 5).unwrap();
    assert!(bench.stamps.holds(passing, 16 * MIB, 7).unwrap());
    drop(preserved);
    assert_eq!(space.live_blocks(), [stays]);
    assert!(matches!(blocks.free(dropped, &[]), Err(Error::DoubleFree { .. })));
    drop((space, blocks, _graph));
    bench.end();
}

#[test]
fn a_block_that_was_freed_meanwhile_goes_behind_those_who_read_it() {
    let bench = Bench::new(A);
    let space = bench.arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let block = blocks.allocate(2 * MIB, A, false).unwrap();
    let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
    blocks.free(block, &[B]).unwrap();
    space.seal().unwrap();
    bench.faulty.set_busy(true);
    drop(preserved);
    bench.stamps.write(block, 2 * MIB, 5).unwrap();
    // A small block meanwhile needs a different page.
    let other = bench.arena.open_space().unwrap();
    for _ in 0..2 {
        let at = other.allocate(4096, A).unwrap();
        bench.stamps.write(at, 4096, 9).unwrap();
        other.record_stream(at, B).unwrap();
    }
    assert!(bench.stamps.holds(block, 2 * MIB, 5).unwrap());
    bench.faulty.set_busy(false);
    drop((space, blocks, other));
    bench.end();
}

#[test]
fn only_what_the_seal_may_move_is_carried() {
    let bench = Bench::new(A);
    let space = bench.arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let local = blocks.allocate(3 * MIB, A, false).unwrap();
    let kept = blocks.allocate(5000, A, true).unwrap();
    let remote = blocks.allocate_remote(3 * MIB, A).unwrap();
    let freed = blocks.allocate(3 * MIB, A, false).unwrap();
    blocks.free(freed, &[]).unwrap();
    let carried =
        |policy| blocks.preserve(policy).unwrap().blocks().iter().map(|(at, _)| *at).collect::<Vec<_>>();
    let mut all = vec![local, remote];
    all.sort_unstable();
    assert_eq!(carried(RetainPolicy::Retain), all);
    assert_eq!(carried(RetainPolicy::ShareRemote), [local]);
    assert_eq!(carried(RetainPolicy::Share), []);
    assert_eq!(carried(RetainPolicy::InPlace), []);
    let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
    blocks.free(kept, &[]).unwrap();
    assert!(space.live_blocks().contains(&kept));
    drop(preserved);
    assert!(!space.live_blocks().contains(&kept));
    let bump = bench.arena.open_bump_space().unwrap();
    bump.allocate(3 * MIB, A).unwrap();
    assert_eq!(VmmTorchAllocator::new(&bump).preserve(RetainPolicy::Share).unwrap().blocks(), []);
    drop((space, blocks, bump));
    bench.end();
}

#[test]
fn what_is_wrong_is_refused_and_a_seal_that_fails_changes_nothing() {
    let bench = Bench::new(A);
    let space = bench.arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let [one, two, crossing] =
        [3 * MIB, 20 * MIB, MIB].map(|bytes| blocks.allocate(bytes, A, false).unwrap());
    blocks.record_stream(crossing, B).unwrap();
    blocks.free(crossing, &[]).unwrap();
    let (_graph, _) = bench.graph();
    let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
    assert!(matches!(blocks.preserve(RetainPolicy::Retain), Err(Error::WrongState { .. })));
    blocks.free(one, &[]).unwrap();
    for freed in [one, crossing] {
        assert!(matches!(blocks.free(freed, &[]), Err(Error::DoubleFree { .. })));
    }
    for foreign in [one.plus(512), Address(4096)] {
        assert!(matches!(blocks.free(foreign, &[]), Err(Error::ForeignPointer { .. })));
    }
    bench.device.set_budget(Some(bench.device.stats().physical_bytes));
    assert!(matches!(space.seal(), Err(Error::OverBudget { .. })));
    bench.device.set_budget(None);
    drop(preserved);
    assert_eq!(space.live_blocks(), [two]);
    assert_eq!(blocks.allocate(3 * MIB, A, false), Ok(one));
    let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
    space.seal().unwrap();
    drop((space, blocks));
    drop(preserved);
    drop(_graph);
    bench.end();
}

/// Only a thread itself can name its default stream: what it was given when the block was freed is
/// noted there.
#[test]
fn a_block_that_was_freed_meanwhile_goes_behind_the_default_stream_of_the_thread_that_freed_it() {
    for captured in [false, true] {
        let bench = Bench::new(A);
        let space = bench.arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        let block = blocks.allocate(2 * MIB, A, false).unwrap();
        let preserved = blocks.preserve(RetainPolicy::Retain).unwrap();
        // While it is captured there is nothing to note but that it is to be asked later.
        bench.faulty.set_capturing(Stream::PER_THREAD, captured);
        let (freed, free) = std::sync::mpsc::channel::<()>();
        let (end, ends) = std::sync::mpsc::channel::<()>();
        std::thread::scope(|scope| {
            let blocks = &blocks;
            let thread = scope.spawn(move || {
                blocks.free(block, &[Stream::PER_THREAD]).unwrap();
                drop(freed);
                let _ = ends.recv();
            });
            let _ = free.recv();
            space.seal().unwrap();
            bench.faulty.set_busy(true);
            drop(preserved);
            bench.stamps.write(block, 2 * MIB, 5).unwrap();
            let other = bench.arena.open_space().unwrap();
            for _ in 0..2 {
                let at = other.allocate(4096, A).unwrap();
                bench.stamps.write(at, 4096, 9).unwrap();
                other.record_stream(at, B).unwrap();
            }
            assert!(bench.stamps.holds(block, 2 * MIB, 5).unwrap(), "captured: {captured}");
            bench.faulty.set_capturing(Stream::PER_THREAD, false);
            bench.faulty.set_busy(false);
            drop((other, end));
            thread.join().unwrap();
        });
        drop((space, blocks));
        bench.end();
    }
}

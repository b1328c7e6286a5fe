//! Blocks freed between their capture and the first replay cost as much as blocks freed before the
//! seal.

use std::sync::Arc;
use std::time::Duration;

use vmmgraph::pages::Fence;
use vmmgraph::{Address, Borrower, ElasticOptions, Error, Space, Stream, VmmTorchAllocator};
use vmmgraph_testkit::{Bench, IdleBorrower, MIB, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);

struct Capture {
    space: Arc<Space>,
    blocks: VmmTorchAllocator,
    passing: Vec<Address>,
    outputs: Vec<Address>,
}

trait More {
    fn capture(&self, replayed_only: bool, early: bool) -> Capture;
    fn held(&self) -> u64;
}

impl More for Bench {
    /// Captures two outputs of a few MiB among transient blocks; with `early` they are freed before
    /// the seal.
    fn capture(&self, replayed_only: bool, early: bool) -> Capture {
        let space = self.arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(replayed_only);
        let sizes = [6, 3, 20, 5, 40].map(|size| size * MIB);
        let all = sizes.map(|bytes| blocks.allocate(bytes, A, false).unwrap());
        let (outputs, passing) = (vec![all[1], all[3]], vec![all[0], all[2], all[4]]);
        let freed: &[Address] = if early { &outputs } else { &[] };
        passing.iter().chain(freed).for_each(|at| blocks.free(*at, &[]).unwrap());
        space.seal().unwrap();
        Capture { space, blocks, passing, outputs }
    }

    fn held(&self) -> u64 {
        self.device.trim().unwrap();
        assert_eq!(self.arena.audit(), Ok(()));
        self.arena.stats().physical_bytes
    }
}

impl Capture {
    fn drop_outputs(&self, readers: &[Stream]) {
        self.outputs.iter().for_each(|at| self.blocks.free(*at, readers).unwrap());
    }

    fn replay(&self) {
        self.space.replay(A, || ()).unwrap();
    }

    fn own_bytes(&self) -> u64 {
        self.space.stats().retained_bytes
    }
}

#[test]
fn what_goes_before_the_first_replay_costs_nothing() {
    let held = |when: &str| {
        let bench = Bench::new(A);
        let captures: Vec<Capture> = (0..3)
            .map(|_| {
                let capture = bench.capture(when != "unknown launches", when == "before the seal");
                match when {
                    "behind the seal" | "unknown launches" => capture.drop_outputs(&[A]),
                    "behind a replay" => {
                        capture.replay();
                        capture.drop_outputs(&[A]);
                    }
                    _ => {}
                }
                capture
            })
            .collect();
        captures.iter().for_each(Capture::replay);
        let held = bench.held();
        assert!(captures.iter().all(|capture| capture.own_bytes() == 0));
        drop(captures);
        bench.end();
        held
    };
    let floor = held("before the seal");
    assert_eq!(held("behind the seal"), floor);
    assert_eq!(held("unknown launches"), held("behind a replay"));
    assert!(held("behind a replay") > floor, "the test shows nothing");
}

#[test]
fn an_output_that_stays_keeps_its_bytes_beside_one_that_goes() {
    let bench = Bench::new(A);
    let other = bench.capture(true, true);
    let capture = bench.capture(true, false);
    let [first, second] = capture.outputs[..] else { panic!() };
    bench.stamps.write(first, 3 * MIB, 5).unwrap();
    bench.stamps.write(second, 5 * MIB, 6).unwrap();
    capture.blocks.free(first, &[A]).unwrap();
    other.passing.iter().for_each(|at| bench.stamps.write(*at, 6 * MIB, 7).unwrap());
    assert!(bench.stamps.holds(second, 5 * MIB, 6).unwrap());
    capture.replay();
    other.passing.iter().for_each(|at| bench.stamps.write(*at, 6 * MIB, 7).unwrap());
    assert!(bench.stamps.holds(second, 5 * MIB, 6).unwrap());
    capture.blocks.free(second, &[A]).unwrap();
    drop((other, capture));
    bench.end();
}

/// A reader may still run: the mapping is restored at a later poll.
#[test]
fn what_somebody_still_reads_comes_back_behind_him() {
    for looks in ["the next capture", "a trim", "its first replay", "its first replay, which waits"] {
        let bench = Bench::new(A);
        let capture = bench.capture(true, false);
        let own = capture.own_bytes();
        bench.faulty.set_busy(true);
        capture.drop_outputs(&[B]);
        bench.stamps.write(capture.outputs[0], 3 * MIB, 5).unwrap();
        bench.stamps.write(capture.outputs[1], 5 * MIB, 6).unwrap();
        let beside = bench.capture(true, true);
        beside.passing.iter().for_each(|at| bench.stamps.write(*at, 6 * MIB, 7).unwrap());
        assert!(bench.stamps.holds(capture.outputs[0], 3 * MIB, 5).unwrap());
        assert!(bench.stamps.holds(capture.outputs[1], 5 * MIB, 6).unwrap());
        assert_eq!(capture.own_bytes(), own);
        bench.faulty.set_busy(false);
        if looks.ends_with("waits") {
            bench.faulty.set_busy_for(5);
        }
        let unmaps = bench.faulty.count("unmap");
        match looks {
            "the next capture" => drop(bench.capture(true, true)),
            "a trim" => drop(bench.arena.trim().unwrap()),
            _ => capture.replay(),
        }
        assert_eq!(capture.own_bytes(), 0, "{looks}");
        assert!(bench.faulty.count("unmap") > unmaps, "{looks}: they are the arena's, and not free");
        drop((beside, capture));
        bench.end();
    }
}

/// The program used a captured block without recording its stream, which may be under capture at
/// the free.
#[test]
fn work_on_the_stream_that_was_captured_is_waited_for() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    capture.blocks.captured_on(A);
    bench.faulty.set_capturing(A, true);
    capture.drop_outputs(&[]);
    assert!(capture.own_bytes() > 0);
    bench.faulty.set_capturing(A, false);
    bench.faulty.set_busy(true);
    drop(bench.capture(true, true));
    assert!(capture.own_bytes() > 0);
    bench.faulty.set_busy(false);
    drop(bench.capture(true, true));
    assert_eq!((capture.own_bytes(), bench.faulty.broken_captures()), (0, Vec::new()));
    drop(capture);
    bench.end();
}

/// The first replay waits for readers. A captured reader cannot be waited for, so its page stays.
#[test]
fn a_first_replay_does_not_fail_for_a_reader_that_is_captured() {
    for noted in [true, false] {
        let bench = Bench::new(A);
        let capture = bench.capture(true, false);
        if !noted {
            capture.blocks.captured_on(B);
        }
        bench.faulty.set_capturing(B, true);
        capture.drop_outputs(if noted { &[B] } else { &[] });
        capture.replay();
        assert!(capture.own_bytes() > 0, "it is the reader's still");
        bench.faulty.set_capturing(B, false);
        bench.arena.trim().unwrap();
        assert!(bench.faulty.broken_captures().is_empty());
        drop(capture);
        bench.end();
    }
}

#[test]
fn nothing_comes_back_once_others_may_launch() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    capture.blocks.launch_by_replay_only(false);
    let unmaps = bench.faulty.count("unmap");
    capture.drop_outputs(&[A]);
    assert_eq!(bench.faulty.count("unmap"), unmaps);
    let late = bench.capture(false, false);
    late.blocks.launch_by_replay_only(true);
    let unmaps = bench.faulty.count("unmap");
    late.drop_outputs(&[A]);
    assert_eq!(bench.faulty.count("unmap"), unmaps);
    drop((capture, late));
    bench.end();
}

/// Eager work must not overwrite freed outputs that a capture outside the library may read.
#[test]
fn what_a_capture_of_somebody_elses_may_read_is_there_for_it() {
    for (launched, noted) in [(false, false), (true, false), (false, true), (true, true)] {
        let bench = Bench::new(A);
        let capture = bench.capture(true, false);
        if launched {
            capture.replay();
        }
        if noted {
            bench.device.note_capture();
        }
        capture.drop_outputs(&[A]);
        capture.replay();
        capture.outputs.iter().for_each(|at| bench.stamps.write(*at, 3 * MIB, 5).unwrap());
        let scope = bench.arena.eager_scope(A).unwrap();
        for bytes in [4 * MIB; 30].into_iter().chain([MIB / 8; 400]) {
            let at = scope.allocate(bytes).unwrap();
            bench.stamps.write(at, bytes, 6).unwrap();
        }
        drop(scope);
        let there = capture.outputs.iter().all(|at| bench.stamps.holds(*at, 3 * MIB, 5).unwrap());
        assert_eq!(there, noted, "launched: {launched}");
        drop(capture);
        bench.end();
    }
}

#[test]
fn a_paused_arena_stays_where_it_is_and_what_went_comes_back_behind_it() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    bench.arena.pause(Fence::default()).unwrap().complete().unwrap();
    capture.drop_outputs(&[A]);
    assert_eq!(bench.arena.stats().physical_bytes, 0);
    bench.arena.resume(std::time::Duration::ZERO).unwrap();
    capture.replay();
    assert_eq!(capture.own_bytes(), 0);
    drop(capture);
    bench.end();
}

#[test]
fn a_page_stays_until_a_resume_has_copied_what_was_there() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    bench.stamps.write(capture.outputs[0], 3 * MIB, 5).unwrap();
    let own = capture.own_bytes();
    bench.arena.pause(Fence::default()).unwrap().complete().unwrap();
    bench.faulty.set_busy(true);
    let (_, ready) = bench.device.resume_async(&[], std::time::Duration::ZERO).unwrap();
    let unmaps = bench.faulty.count("unmap");
    capture.drop_outputs(&[]);
    drop(bench.capture(true, true));
    assert_eq!((capture.own_bytes(), bench.faulty.count("unmap")), (own, unmaps));
    bench.faulty.set_busy(false);
    drop((ready, bench.capture(true, true)));
    assert_eq!(capture.own_bytes(), 0);
    drop(capture);
    bench.end();
}

#[test]
fn a_page_that_others_have_stays_theirs() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    let extents = capture.space.export(capture.outputs[0], 3 * MIB).unwrap();
    let pin = bench.device.pin_page(extents[0].page).unwrap();
    capture.drop_outputs(&[A]);
    capture.replay();
    assert!(capture.own_bytes() > 0);
    drop((pin, capture));
    bench.end();
}

/// Driver calls of a restore fail singly and in pairs. Only pages are lost; the first replay
/// repairs the rest.
#[test]
fn a_driver_that_refuses_costs_pages_and_nothing_else() {
    let refused = |calls: &[u64], again: u64| {
        let bench = Bench::new(A);
        let [other, capture] = [true, false].map(|early| bench.capture(true, early));
        bench.faulty.arm(calls);
        capture.drop_outputs(&[A]);
        let failed = bench.faulty.failed().values().sum::<u64>();
        assert_eq!(bench.arena.audit(), Ok(()), "{calls:?}");
        bench.faulty.arm(&[again]);
        let launched = capture.space.replay(A, || ());
        bench.faulty.arm(&[]);
        if launched.is_err() {
            capture.replay();
        }
        assert_eq!((bench.arena.audit(), capture.own_bytes()), (Ok(()), 0), "{calls:?}");
        for (at, bytes) in capture.passing.iter().zip([6, 20, 40]).chain(capture.outputs.iter().zip([3, 5])) {
            bench.stamps.write(*at, bytes * MIB, 7).unwrap();
            assert!(bench.stamps.holds(*at, bytes * MIB, 7).unwrap());
        }
        let mapped = bench.arena.stats().mapped_bytes;
        drop((capture, other));
        assert_eq!(bench.arena.stats().mapped_bytes, 0, "{calls:?}: of {mapped}");
        bench.end();
        failed
    };
    let calls = (1..).find(|call| refused(&[*call], 0) == 0).unwrap();
    assert!(calls > 4, "it makes no call that could fail");
    for first in 1..calls {
        for second in first + 1..first + 12 {
            refused(&[first, second], 0);
            if second < first + 5 {
                (1..6).for_each(|again| assert!(refused(&[first, second], again) > 0));
            }
        }
    }
}

#[test]
fn a_block_is_freed_once() {
    let bench = Bench::new(A);
    let capture = bench.capture(true, false);
    capture.drop_outputs(&[]);
    for at in &capture.outputs {
        assert_eq!(capture.blocks.free(*at, &[]), Err(Error::DoubleFree { address: *at }));
    }
    drop(capture);
    bench.end();
}

/// The page that was there before the seal may be on lease by now. The graph does without it, and
/// its replay waits for nobody.
#[test]
fn a_page_that_is_on_lease_does_not_come_back() {
    const PAGE: u64 = 16 * MIB;
    let bench = Bench::new(A);
    let other = bench.capture(true, true);
    let capture = bench.capture(true, false);
    let options = ElasticOptions { page_bytes: PAGE, ..ElasticOptions::default() };
    let buffer = Arc::new(bench.device.elastic_buffer(16 * PAGE, &options).unwrap());
    let borrower: Arc<dyn Borrower> = Arc::new(IdleBorrower);
    let all = bench.arena.lendable_bytes();
    let lease = bench.arena.lend(&buffer, 0..all, &borrower).unwrap();
    let shown = capture.space.leases();
    bench.stamps.write(buffer.base(), all, 7).unwrap();
    let maps = bench.device.stats().maps;
    capture.drop_outputs(&[A]);
    assert_eq!(
        (bench.device.stats().maps, capture.space.leases()),
        (maps, shown),
        "a page on lease is mapped"
    );
    assert!(bench.stamps.holds(buffer.base(), all, 7).unwrap());
    lease.recall(Duration::from_secs(20)).unwrap();
    capture.replay();
    other.replay();
    drop((lease, buffer, borrower, capture, other));
    bench.end();
}

/// A graph that was captured while an output was alive may read it wherever it runs: the output's
/// addresses show its page until that replay is over.
#[test]
fn pages_of_an_output_do_not_change_under_a_replay_that_may_read_it() {
    const PAGE: u64 = 16 * MIB;
    let bench = Bench::new(A);
    // An output of a whole page, which other graphs show too.
    let graph = || {
        let space = bench.arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(true);
        let [passing, output] = [PAGE; 2].map(|bytes| blocks.allocate(bytes, A, false).unwrap());
        blocks.free(passing, &[]).unwrap();
        space.seal().unwrap();
        Capture { space, blocks, passing: vec![passing], outputs: vec![output] }
    };
    let shows = bench.capture(true, true);
    let first = graph();
    let readers = [bench.capture(true, true), {
        // Its page serves graphs that are captured later.
        first.drop_outputs(&[]);
        bench.capture(true, true)
    }];
    let second = graph();
    let reader = bench.capture(true, true);
    readers.iter().chain([&reader]).for_each(Capture::replay);
    bench.faulty.set_busy(true);
    reader.replay();
    let unmaps = bench.device.stats().unmaps;
    second.drop_outputs(&[]);
    assert_eq!(bench.device.stats().unmaps, unmaps, "exchanged under a reader");
    // Its first replay waits for that, so that it need not keep the page.
    std::thread::scope(|scope| {
        let replay = scope.spawn(|| second.replay());
        std::thread::sleep(Duration::from_millis(30));
        let early = replay.is_finished();
        bench.faulty.set_busy(false);
        replay.join().unwrap();
        assert!(!early, "the output's page stays the graph's for ever");
    });
    assert!(bench.device.stats().unmaps > unmaps, "the control exchanges nothing");
    drop((shows, first, second, readers, reader));
    bench.end();
}

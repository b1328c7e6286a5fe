//! Regions: blocks at fixed addresses with replaceable pages, compared with a naive model and in
//! single cases.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{CopyPath, Fence};
use vmmgraph::pause::{Moved, PauseHooks};
use vmmgraph::{Address, Device, Error, HostOptions, Pinning, Policy, Region, RegionOptions, Result, Stream};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = Stream::LEGACY;
const NOW: Duration = Duration::ZERO;
const POLICIES: [Policy; 4] = [Policy::Discard, Policy::Zero, Policy::Backup, Policy::Keep];

struct Bench {
    host: Arc<HostDriver>,
    faulty: Arc<FaultyDriver>,
    device: Arc<Device>,
}

fn bench() -> Bench {
    bench_of(HostOptions::default())
}

fn bench_of(options: HostOptions) -> Bench {
    let host = Arc::new(HostDriver::new(0, options).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    Bench { device: Device::with_driver(faulty.clone()), host, faulty }
}

impl Bench {
    fn region(&self, tag: &str, policy: Policy) -> Arc<Region> {
        self.device.region(tag, RegionOptions { policy, ..RegionOptions::default() }).unwrap()
    }

    fn end(self) {
        self.device.trim().unwrap();
        assert_eq!(self.device.pool().audit_idle(), Ok(()));
        drop(self.device);
        assert_eq!((self.host.leftovers(), self.host.host_leftovers()), ([0; 4], [0; 2]));
    }
}

/// Returns a word that depends on the address: torn and exchanged copies show.
fn pattern(stamp: u64, at: Address, offset: u64) -> u64 {
    (stamp << 48) ^ (at.0 + offset).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn write(at: Address, bytes: u64, stamp: u64) {
    for offset in places(bytes) {
        // SAFETY: a live block of a resident region of the host driver.
        unsafe { ((at.0 + offset) as *mut u64).write_volatile(pattern(stamp, at, offset)) };
    }
}

fn holds(at: Address, bytes: u64, stamp: u64) -> bool {
    // SAFETY: as above.
    places(bytes).all(
        |offset| unsafe { ((at.0 + offset) as *const u64).read_volatile() } == pattern(stamp, at, offset),
    )
}

fn backup_holds(region: &Region, at: Address, bytes: u64, stamp: u64) -> bool {
    let rounded = bytes.next_multiple_of(512);
    let read = |skip: u64, bytes: u64| {
        let mut into = vec![0xee; bytes as usize];
        region.get_backup(at, skip, &mut into).unwrap();
        into
    };
    let all = read(0, rounded);
    let word = |offset: u64| u64::from_le_bytes(all[offset as usize..][..8].try_into().unwrap());
    let parts = [(rounded / 2, rounded / 2), (rounded / 3, rounded / 3), (rounded - 8, 8), (rounded, 0)];
    places(bytes).all(|offset| word(offset) == pattern(stamp, at, offset))
        && parts.iter().all(|(skip, bytes)| read(*skip, *bytes) == all[*skip as usize..][..*bytes as usize])
}

fn is_zero(at: Address, bytes: u64) -> bool {
    // SAFETY: as above.
    places(bytes).all(|offset| unsafe { ((at.0 + offset) as *const u64).read_volatile() } == 0)
}

fn places(bytes: u64) -> impl Iterator<Item = u64> {
    let rounded = bytes.next_multiple_of(512);
    (0..rounded).step_by(32 << 10).chain([rounded - 8])
}

#[test]
fn contents_go_and_come_as_the_policy_says_at_the_same_addresses() {
    let bench = bench();
    for page_bytes in [0, 4 * MIB] {
        let options = RegionOptions { page_bytes, ..RegionOptions::default() };
        let region = bench.device.region("all", options).unwrap();
        let mut blocks = Vec::new();
        for (number, bytes) in [600, 3 * MIB, 700, 20 * MIB + 1, 512, 5 * MIB].into_iter().enumerate() {
            for policy in POLICIES {
                let at = region.allocate_as(bytes, policy, A).unwrap();
                write(at, bytes, number as u64 + 1);
                blocks.push((at, bytes, policy, number as u64 + 1));
            }
        }
        let before = region.stats();
        assert_eq!((before.paused_bytes, before.generation, before.blocks), (0, 1, 24));
        for round in 0..3 {
            let report = region.pause(Fence::default()).unwrap();
            assert_eq!(report.complete(), Ok(()));
            assert_eq!((report.regions, report.left_bytes, report.clean_bytes), (1, 0, 0));
            assert_eq!(report.bytes + report.kept_bytes, before.resident_bytes);
            assert!(report.copied_bytes >= 28 * MIB && report.copied_bytes < 40 * MIB, "{report:?}");
            assert_eq!(report.path, CopyPath::Registered);
            let paused = region.stats();
            assert!(paused.paused && paused.paused_bytes == report.bytes);
            assert_eq!(paused.resident_bytes, report.kept_bytes);
            let pool = bench.device.stats();
            assert_eq!(pool.physical_bytes - pool.free_bytes, report.kept_bytes);
            let (at, bytes, _, stamp) = blocks[14];
            let mut word = [0; 8];
            region.get_backup(at, 32 << 10, &mut word).unwrap();
            assert_eq!(u64::from_le_bytes(word), pattern(stamp, at, 32 << 10), "{bytes}");
            let back = region.resume(NOW).unwrap();
            assert_eq!((back.bytes, back.copied_bytes), (report.bytes, report.copied_bytes));
            assert_eq!(region.stats().generation, round + 2);
            for (at, bytes, policy, stamp) in &blocks {
                match policy {
                    Policy::Backup | Policy::Keep => assert!(holds(*at, *bytes, *stamp), "{policy:?}"),
                    Policy::Zero => assert!(is_zero(*at, *bytes)),
                    Policy::Discard => {}
                }
                write(*at, *bytes, *stamp);
            }
        }
        assert_eq!(region.stats().host_bytes, 0);
    }
    bench.end();
}

#[test]
fn pausing_twice_and_resuming_what_is_there_do_nothing() {
    let bench = bench();
    let region = bench.region("weights", Policy::Backup);
    let at = region.allocate(9 * MIB, A).unwrap();
    write(at, 9 * MIB, 5);
    assert_eq!(region.resume(NOW).unwrap().regions, 0);
    assert_eq!(region.pause(Fence::default()).unwrap().regions, 1);
    let again = region.pause(Fence::default()).unwrap();
    assert_eq!((again.regions, again.bytes, again.calls), (0, 0, 0));
    assert!(
        matches!(region.allocate(512, A), Err(Error::WrongState { sentence }) if sentence.contains("it is paused"))
    );
    assert!(
        matches!(region.before(A), Err(Error::WrongState { sentence }) if sentence.contains("it is paused"))
    );
    assert_eq!(region.resume(NOW).unwrap().regions, 1);
    assert_eq!(region.before(A), Ok(()));
    assert_eq!(region.resume(NOW).unwrap().regions, 0);
    assert!(holds(at, 9 * MIB, 5));
    drop(region);
    bench.end();
}

#[test]
fn blocks_are_freed_while_paused_and_their_pages_do_not_come_back() {
    let bench = bench();
    let region = bench.region("kv", Policy::Backup);
    let blocks: Vec<_> = (0..4).map(|_| region.allocate(8 * MIB, A).unwrap()).collect();
    blocks.iter().for_each(|at| write(*at, 8 * MIB, 7));
    region.pause(Fence::default()).unwrap();
    region.free(blocks[1]).unwrap();
    region.free(blocks[3]).unwrap();
    assert!(matches!(region.free(blocks[1]), Err(Error::ForeignPointer { .. } | Error::DoubleFree { .. })));
    let back = region.resume(NOW).unwrap();
    assert_eq!((back.bytes, region.stats().blocks), (16 * MIB, 2));
    assert!(holds(blocks[0], 8 * MIB, 7) && holds(blocks[2], 8 * MIB, 7));
    let new = region.allocate(8 * MIB, A).unwrap();
    write(new, 8 * MIB, 8);
    assert!(holds(blocks[0], 8 * MIB, 7) && holds(blocks[2], 8 * MIB, 7));
    drop(region);
    bench.end();
}

#[test]
fn a_region_may_go_while_it_is_paused() {
    let bench = bench();
    let (one, other) = (bench.region("a", Policy::Backup), bench.region("b", Policy::Keep));
    one.allocate(5 * MIB, A).unwrap();
    other.allocate(5 * MIB, A).unwrap();
    bench.device.pause(&[], Fence::default()).unwrap();
    drop((one, other));
    assert_eq!(bench.device.resume(&[], NOW).unwrap().regions, 0);
    bench.end();
}

#[test]
fn clean_regions_are_copied_once_and_what_is_written_again() {
    let bench = bench();
    for verify_clean in [false, true] {
        let options = RegionOptions {
            policy: Policy::Backup,
            read_only: true,
            verify_clean,
            ..RegionOptions::default()
        };
        let region = bench.device.region("weights", options).unwrap();
        let blocks: Vec<_> = (0..3).map(|_| region.allocate(16 * MIB, A).unwrap()).collect();
        blocks.iter().for_each(|at| write(*at, 16 * MIB, 1));
        let first = region.pause(Fence::default()).unwrap();
        assert_eq!((first.copied_bytes, first.clean_bytes), (48 * MIB, 0));
        region.resume(NOW).unwrap();
        assert_eq!(region.stats().host_bytes, 48 * MIB);
        let second = region.pause(Fence::default()).unwrap();
        assert_eq!((second.copied_bytes, second.clean_bytes, second.stale_pages), (0, 48 * MIB, 0));
        region.resume(NOW).unwrap();
        write(blocks[1], 16 * MIB, 2);
        region.mark_written(Some(blocks[1])).unwrap();
        let third = region.pause(Fence::default()).unwrap();
        assert_eq!((third.copied_bytes, third.clean_bytes), (16 * MIB, 32 * MIB));
        region.resume(NOW).unwrap();
        assert!(holds(blocks[0], 16 * MIB, 1) && holds(blocks[1], 16 * MIB, 2));
        // An undeclared write: the debug option detects and keeps it.
        write(blocks[2], 16 * MIB, 3);
        let fourth = region.pause(Fence::default()).unwrap();
        assert_eq!(fourth.stale_pages, u64::from(verify_clean));
        region.resume(NOW).unwrap();
        assert!(holds(blocks[2], 16 * MIB, if verify_clean { 3 } else { 1 }));
        let new = region.allocate(MIB, A).unwrap();
        write(new, MIB, 4);
        region.pause(Fence::default()).unwrap();
        region.resume(NOW).unwrap();
        assert!(holds(new, MIB, 4));
    }
    bench.end();
}

#[test]
fn a_driver_that_refuses_registration_works_and_the_report_says_so() {
    for refused in [1, u64::MAX] {
        let bench = bench();
        bench.faulty.refuse("host_register", refused == u64::MAX);
        // Fails the backup memory only; staging buffers are registered.
        bench.faulty.arm(&[]);
        let region = bench.region("weights", Policy::Backup);
        let blocks: Vec<_> =
            [40 * MIB, 3 * MIB, 70 * MIB].map(|bytes| (region.allocate(bytes, A).unwrap(), bytes)).into();
        blocks.iter().for_each(|(at, bytes)| write(*at, *bytes, 9));
        if refused == 1 {
            bench.faulty.arm(&[1]);
        }
        bench.device.host_pool().prepare(128 * MIB).unwrap();
        bench.faulty.arm(&[]);
        assert_eq!(bench.device.host_pool().stats().registered_bytes, 0);
        for _ in 0..2 {
            let report = region.pause(Fence::default()).unwrap();
            let path = if refused == 1 { CopyPath::Ring } else { CopyPath::Pageable };
            assert_eq!((report.complete(), report.path), (Ok(()), path));
            assert_eq!(region.resume(NOW).unwrap().path, path);
            assert!(blocks.iter().all(|(at, bytes)| holds(*at, *bytes, 9)));
        }
        drop(region);
        bench.faulty.refuse("host_register", false);
        bench.device.host_pool().prepare(1).unwrap();
        assert_eq!(bench.device.host_pool().stats().registered_bytes, 128 * MIB);
        bench.end();
    }
}

#[test]
fn host_memory_is_bounded_prepared_and_given_back() {
    let bench = bench();
    let host = bench.device.host_pool();
    host.set_limit(Some(32 * MIB));
    assert!(matches!(host.prepare(64 * MIB), Err(Error::OutOfHostMemory { limit, .. }) if limit == 32 * MIB));
    host.prepare(20 * MIB).unwrap();
    assert_eq!((host.stats().held_bytes, host.stats().free_bytes), (20 * MIB, 20 * MIB));
    assert_eq!(host.trim(), Ok(20 * MIB));
    let region = bench.region("weights", Policy::Backup);
    let blocks: Vec<_> = (0..4).map(|_| region.allocate(16 * MIB, A).unwrap()).collect();
    blocks.iter().for_each(|at| write(*at, 16 * MIB, 3));
    // Pages without room on the host stay, and the report names them.
    let report = region.pause(Fence::default()).unwrap();
    assert_eq!((report.bytes, report.left_bytes, report.failures.len()), (32 * MIB, 32 * MIB, 2));
    assert!(matches!(report.complete(), Err(Error::OutOfHostMemory { .. })));
    assert!(host.stats().held_bytes <= 32 * MIB);
    assert_eq!(host.trim(), Ok(0));
    host.set_limit(None);
    let rest = region.pause(Fence::default()).unwrap();
    assert_eq!((rest.regions, rest.bytes, rest.complete()), (0, 32 * MIB, Ok(())));
    region.resume(NOW).unwrap();
    assert!(blocks.iter().all(|at| holds(*at, 16 * MIB, 3)));
    assert_eq!(host.trim(), Ok(64 * MIB));
    drop(region);
    bench.end();
}

#[test]
fn a_resume_without_memory_is_a_value_waits_until_its_deadline_and_can_be_repeated() {
    let bench = bench();
    let (weights, kv) = (bench.region("weights", Policy::Backup), bench.region("kv", Policy::Discard));
    let at = weights.allocate(40 * MIB, A).unwrap();
    write(at, 40 * MIB, 6);
    kv.allocate(40 * MIB, A).unwrap();
    bench.device.pause(&[], Fence::default()).unwrap();
    bench.device.set_budget(Some(60 * MIB));
    let refused = bench.device.resume(&["weights", "kv"], NOW);
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    assert_eq!(bench.device.stats().physical_bytes, 0);
    assert!(weights.stats().paused && kv.stats().paused);
    let mut word = [0; 8];
    weights.get_backup(at, 0, &mut word).unwrap();
    assert_eq!(u64::from_le_bytes(word), pattern(6, at, 0));
    let start = Instant::now();
    assert!(bench.device.resume(&[], Duration::from_millis(40)).is_err());
    assert!(start.elapsed() >= Duration::from_millis(40));
    assert_eq!(bench.device.resume(&["weights"], NOW).unwrap().regions, 1);
    assert!(holds(at, 40 * MIB, 6));
    thread::scope(|scope| {
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            bench.device.set_budget(None);
        });
        let report = bench.device.resume(&[], Duration::from_secs(30)).unwrap();
        assert_eq!(report.regions, 1);
        assert!(report.waited_micros > 5000, "{report:?}");
    });
    drop((weights, kv));
    bench.end();
}

#[test]
fn a_pause_in_a_capture_is_refused_and_breaks_nothing() {
    let bench = bench();
    let (captured, other) = (stream(0x40), stream(0x41));
    let region = bench.region("weights", Policy::Backup);
    let at = region.allocate(4 * MIB, other).unwrap();
    write(at, 4 * MIB, 2);
    bench.faulty.set_capturing(captured, true);
    let mut fence = Fence::default();
    fence.add(bench.device.pool().events(), captured);
    assert!(matches!(region.pause(fence), Err(Error::StreamCapturing { .. })));
    assert!(!region.stats().paused && holds(at, 4 * MIB, 2));
    region.record_stream(at, captured).unwrap();
    assert!(matches!(bench.device.pause(&[], Fence::default()), Err(Error::StreamCapturing { .. })));
    assert!(!region.stats().paused);
    bench.faulty.set_capturing(captured, false);
    assert_eq!(region.pause(Fence::default()).unwrap().complete(), Ok(()));
    assert_eq!(bench.faulty.broken_captures(), Vec::<String>::new());
    bench.faulty.set_capturing(captured, true);
    region.resume(NOW).unwrap();
    bench.faulty.set_capturing(captured, false);
    assert_eq!(bench.faulty.broken_captures(), Vec::<String>::new());
    assert!(holds(at, 4 * MIB, 2));
    drop(region);
    bench.end();
}

#[test]
fn statistics_give_up_the_pages_of_blocks_that_the_device_is_done_with() {
    let bench = bench();
    let region = bench.region("weights", Policy::Discard);
    let block = region.allocate(3 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    region.free(block).unwrap();
    assert!(region.stats().resident_bytes >= 3 * MIB, "the device may still use them");
    bench.faulty.set_busy(false);
    let reserved = region.stats().reserved_bytes;
    assert_eq!(region.stats().resident_bytes, 0);
    // Reservations stay for the next pages.
    let stats = bench.device.stats();
    assert_eq!((stats.reserved_bytes, region.stats().reserved_bytes), (reserved, reserved));
    assert!(reserved > 0);
    bench.device.trim().unwrap();
    assert_eq!(bench.device.stats().physical_bytes, 0);
    drop(region);
    bench.end();
}

#[test]
fn a_pause_waits_for_its_fence() {
    let bench = bench();
    let region = bench.region("weights", Policy::Discard);
    region.allocate(4 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    thread::scope(|scope| {
        let pause = scope.spawn(|| region.pause(Fence::default()).unwrap());
        thread::sleep(Duration::from_millis(30));
        assert_eq!((region.stats().resident_bytes, pause.is_finished()), (4 * MIB, false));
        bench.faulty.set_busy(false);
        assert_eq!(pause.join().unwrap().bytes, 4 * MIB);
    });
    drop(region);
    bench.end();
}

#[test]
fn a_region_that_goes_leaves_its_pages_to_work_under_way() {
    let bench = bench();
    let region = bench.region("weights", Policy::Discard);
    region.allocate(4 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    drop(region);
    bench.device.give_back(NOW);
    assert_eq!(bench.device.stats().physical_bytes, 4 * MIB, "the device may still use them");
    bench.faulty.set_busy(false);
    bench.end();
}

#[test]
fn a_freed_place_is_used_again_and_a_block_takes_no_more_pages_than_it_lacks() {
    let bench = bench();
    let region = bench.region("weights", Policy::Discard);
    let blocks = [0; 2].map(|_| region.allocate(3 * MIB, A).unwrap());
    assert_eq!(region.stats().resident_bytes, 6 * MIB);
    bench.faulty.set_busy(true);
    region.free(blocks[0]).unwrap();
    bench.faulty.set_busy(false);
    // The allocation polls the freed block.
    assert_eq!(region.allocate(MIB, A), Ok(blocks[0]));
    drop(region);
    bench.end();
}

/// The checksum of a page covers live bytes only.
#[test]
fn a_block_that_is_freed_is_no_page_that_was_written() {
    // The first of three blocks, or a short middle one, is freed; neighbours are copied together.
    for (freed, while_paused) in [(0, false), (0, true), (1, false), (1, true)] {
        let bench = bench();
        let options = RegionOptions {
            policy: Policy::Backup,
            read_only: true,
            verify_clean: true,
            ..RegionOptions::default()
        };
        let region = bench.device.region("weights", options).unwrap();
        let sizes = [MIB / 2, MIB / 32, MIB / 2];
        let blocks = sizes.map(|bytes| region.allocate(bytes, A).unwrap());
        blocks.iter().zip(sizes).for_each(|(at, bytes)| write(*at, bytes, 1));
        region.pause(Fence::default()).unwrap().complete().unwrap();
        if while_paused {
            region.free(blocks[freed]).unwrap();
        }
        region.resume(NOW).unwrap();
        assert!(holds(blocks[2], MIB / 2, 1));
        if !while_paused {
            write(blocks[freed], sizes[freed], 2);
            region.free(blocks[freed]).unwrap();
        }
        let second = region.pause(Fence::default()).unwrap();
        assert_eq!((second.complete(), second.stale_pages), (Ok(()), 0), "{freed}, {while_paused}");
        region.resume(NOW).unwrap();
        assert!(holds(blocks[2], MIB / 2, 1));
        drop(region);
        bench.end();
    }
}

/// Verification compares checksums of unchanged pages: pages are not joined.
#[test]
fn a_region_that_verifies_finds_no_page_written_where_none_was() {
    let bench = bench_of(HostOptions { granularity: 4096, ..HostOptions::default() });
    let (read_only, verify_clean) = (true, true);
    let options =
        RegionOptions { policy: Policy::Backup, read_only, verify_clean, ..RegionOptions::default() };
    let region = bench.device.region("weights", options).unwrap();
    let blocks = [0; 100].map(|_| region.allocate(5000, A).unwrap());
    blocks.iter().for_each(|at| write(*at, 5000, 6));
    let first = region.pause(Fence::default()).unwrap();
    for _ in 0..2 {
        region.resume(NOW).unwrap();
        let again = region.pause(Fence::default()).unwrap();
        assert_eq!((again.clean_bytes, again.stale_pages), (first.copied_bytes, 0));
    }
    drop(region);
    bench.end();
}

#[test]
fn a_pause_in_part_that_is_refused_when_it_is_repeated_stays_one() {
    let bench = bench();
    let captured = stream(0x40);
    let region = bench.region("weights", Policy::Backup);
    let blocks = [0; 2].map(|_| region.allocate(16 * MIB, A).unwrap());
    blocks.iter().for_each(|at| write(*at, 16 * MIB, 3));
    bench.device.host_pool().set_limit(Some(16 * MIB));
    assert_eq!(region.pause(Fence::default()).unwrap().left_bytes, 16 * MIB);
    bench.faulty.set_capturing(captured, true);
    let mut fence = Fence::default();
    fence.add(bench.device.pool().events(), captured);
    assert!(matches!(region.pause(fence), Err(Error::StreamCapturing { .. })));
    assert!(region.stats().paused, "half of its pages are gone");
    bench.faulty.set_capturing(captured, false);
    region.resume(NOW).unwrap();
    assert!(blocks.iter().all(|at| holds(*at, 16 * MIB, 3)));
    drop(region);
    bench.end();
}

/// The reader's stream is known although the block is gone.
#[test]
fn a_pause_waits_for_the_readers_of_freed_blocks() {
    let bench = bench();
    let region = bench.region("weights", Policy::Discard);
    let block = region.allocate(4 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    region.free(block).unwrap();
    thread::scope(|scope| {
        let pause = scope.spawn(|| region.pause(Fence::default()).unwrap());
        thread::sleep(Duration::from_millis(30));
        assert!(!pause.is_finished());
        bench.faulty.set_busy(false);
        pause.join().unwrap();
    });
    assert_eq!(region.stats().resident_bytes, 0);
    drop(region);
    bench.end();
}

#[test]
fn a_driver_that_cannot_be_asked_is_taken_for_busy() {
    const SIDE: Stream = stream(0x31);
    let bench = bench();
    let region = bench.region("weights", Policy::Backup);
    let blocks = [0; 2].map(|_| region.allocate(MIB, A).unwrap());
    bench.faulty.set_busy(true);
    bench.faulty.refuse("event_query", true);
    region.free(blocks[0]).unwrap();
    let free = region.stats().free_bytes;
    assert!(region.allocate(2 * MIB, A).is_ok() && free == 0, "its bytes are in use for all that is known");
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    assert_eq!(region.stats().free_bytes, MIB);
    // A new block in a range under restore makes its stream wait, or is refused.
    region.pause(Fence::default()).unwrap().complete().unwrap();
    bench.faulty.set_busy(true);
    let (_, ready) = bench.device.resume_async(&[], NOW).unwrap();
    bench.faulty.refuse("event_query", true);
    let waits = bench.faulty.count("event_wait");
    let refused = region.allocate(MIB, SIDE).is_err();
    assert_eq!(region.stats().blocks, 2 + u64::from(!refused), "a refused block is not there");
    assert!(refused || bench.faulty.count("event_wait") > waits, "it is not behind the contents");
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    drop((region, ready));
    bench.end();
}

#[test]
fn blocks_are_freed_while_pages_move() {
    for while_resuming in [false, true] {
        let bench = bench();
        let region = bench.region("weights", Policy::Backup);
        let blocks = [0; 4].map(|_| region.allocate(8 * MIB, A).unwrap());
        blocks.iter().for_each(|at| write(*at, 8 * MIB, 3));
        let (moves, freed) = (if while_resuming { "map" } else { "unmap" }, AtomicU64::new(0));
        let (weak, gone) = (Arc::downgrade(&region), [blocks[0], blocks[2]]);
        let hook = move |name: &str| {
            if name == moves && freed.fetch_add(1, Relaxed) == 0 {
                let region = weak.upgrade().unwrap();
                gone.iter().for_each(|at| region.free(*at).unwrap());
                assert_eq!(region.stats().blocks, 2);
            }
        };
        if while_resuming {
            region.pause(Fence::default()).unwrap().complete().unwrap();
        }
        bench.faulty.set_hook(Some(Arc::new(hook)));
        if while_resuming {
            region.resume(NOW).unwrap();
        } else {
            region.pause(Fence::default()).unwrap().complete().unwrap();
        }
        bench.faulty.set_hook(None);
        region.resume(NOW).unwrap();
        assert_eq!(bench.device.pool().audit_idle(), Ok(()));
        assert_eq!((region.stats().blocks, region.stats().resident_bytes), (2, 16 * MIB));
        assert!(holds(blocks[1], 8 * MIB, 3) && holds(blocks[3], 8 * MIB, 3));
        drop(region);
        bench.end();
    }
}

/// Two ranges may be adjacent; each page lies in one of them.
#[test]
fn places_of_two_ranges_are_not_joined() {
    const GIB: u64 = 1 << 30;
    let bench = bench_of(HostOptions { memory_bytes: 64 << 30, ..HostOptions::default() });
    let region = bench.region("kv", Policy::Discard);
    // Each range begins and ends with a short page, in either order.
    for _ in 0..2 {
        for bytes in [GIB / 4, 15 * GIB + GIB / 4, GIB / 2] {
            region.allocate(bytes, A).unwrap();
        }
    }
    assert_eq!(region.stats().reserved_bytes, 32 * GIB);
    for _ in 0..2 {
        region.pause(Fence::default()).unwrap().complete().unwrap();
        region.resume(NOW).unwrap();
        // Pages per range: 0.25, 15 times 1, and 0.25 + 0.5 GiB, which could be joined across
        // ranges.
        assert_eq!(region.stats().pages, 34);
    }
    drop(region);
    bench.end();
}

#[test]
fn an_allocation_waits_for_freed_blocks_before_it_fails() {
    let bench = bench();
    let options = RegionOptions { budget_bytes: Some(4 * MIB), ..RegionOptions::default() };
    let region = bench.device.region("kv", options).unwrap();
    let first = region.allocate(4 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    region.free(first).unwrap();
    thread::scope(|scope| {
        let second = scope.spawn(|| region.allocate(4 * MIB, stream(1)));
        thread::sleep(Duration::from_millis(30));
        assert!(!second.is_finished());
        bench.faulty.set_busy(false);
        region.free(second.join().unwrap().unwrap()).unwrap();
    });
    drop(region);
    bench.end();
}

#[test]
fn pages_of_freed_blocks_are_there_for_others_that_ask() {
    let bench = bench();
    let (kv, weights) = (bench.region("kv", Policy::Discard), bench.region("weights", Policy::Discard));
    bench.device.set_budget(Some(64 * MIB));
    let first = kv.allocate(48 * MIB, A).unwrap();
    bench.faulty.set_busy(true);
    kv.free(first).unwrap();
    bench.faulty.set_busy(false);
    // Statistics of the region would poll.
    assert_eq!(bench.device.stats().free_bytes, 0, "nobody has looked yet");
    let second = weights.allocate(48 * MIB, A).unwrap();
    assert_eq!(kv.stats().resident_bytes, 0);
    bench.faulty.set_busy(true);
    weights.free(second).unwrap();
    bench.faulty.set_busy(false);
    assert!(bench.device.give_back(NOW) >= 48 * MIB);
    assert_eq!(bench.device.stats().physical_bytes, 0);
    drop((kv, weights));
    bench.end();
}

/// Records calls, and makes calls that need a free lock.
#[derive(Default)]
struct Witness {
    seen: Mutex<Vec<(bool, String, u64, u64)>>,
    region: Mutex<Option<Arc<Region>>>,
}

impl Witness {
    fn note(&self, moved: &Moved<'_>, gone: bool) {
        let bytes = moved.ranges.iter().map(|(_, bytes)| bytes).sum();
        self.seen.lock().unwrap().push((gone, moved.tag.to_owned(), moved.generation, bytes));
        if let Some(region) = &*self.region.lock().unwrap() {
            // Works without a lock; calls that would deadlock are errors.
            let _ = (region.stats(), region.device().stats());
            assert!(matches!(region.pause(Fence::default()), Err(Error::WrongState { .. })));
            assert!(matches!(region.resume(NOW), Err(Error::WrongState { .. })));
            if !gone {
                let at = region.allocate(512, A).unwrap();
                region.free(at).unwrap();
            }
        }
    }
}

impl PauseHooks for Witness {
    fn before_unmap(&self, moved: &Moved<'_>) {
        self.note(moved, true);
    }
    fn after_map(&self, moved: &Moved<'_>) {
        self.note(moved, false);
    }
}

#[test]
fn hooks_hear_of_their_tag_with_a_generation_and_without_locks() {
    let bench = bench();
    let (weights, kv) = (bench.region("weights", Policy::Backup), bench.region("kv", Policy::Discard));
    weights.allocate(6 * MIB, A).unwrap();
    kv.allocate(2 * MIB, A).unwrap();
    let (witness, all) = (Arc::new(Witness::default()), Arc::new(Witness::default()));
    let as_hooks = |hooks: &Arc<Witness>| -> Arc<dyn PauseHooks> { hooks.clone() };
    let (of_weights, of_all) = (as_hooks(&witness), as_hooks(&all));
    bench.device.add_pause_hooks("weights", &of_weights);
    bench.device.add_pause_hooks("", &of_all);
    *witness.region.lock().unwrap() = Some(Arc::clone(&weights));
    for _ in 0..2 {
        bench.device.pause(&[], Fence::default()).unwrap();
        bench.device.resume(&[], NOW).unwrap();
    }
    let weights_tag = || "weights".to_owned();
    let expected = [(true, 1), (false, 2), (true, 2), (false, 3)]
        .map(|(gone, generation)| (gone, weights_tag(), generation, 6 * MIB));
    assert_eq!(*witness.seen.lock().unwrap(), expected);
    assert_eq!(all.seen.lock().unwrap().len(), 8);
    // A dropped hook is not called.
    *witness.region.lock().unwrap() = None;
    drop((witness, of_weights));
    bench.device.pause(&["weights"], Fence::default()).unwrap();
    assert_eq!(all.seen.lock().unwrap().len(), 9);
    drop((weights, kv));
    bench.end();
}

#[test]
fn memory_that_stays_is_announced_to_nobody() {
    let bench = bench();
    let region = bench.region("kv", Policy::Keep);
    region.allocate(2 * MIB, A).unwrap();
    let all = Arc::new(Witness::default());
    let hooks: Arc<dyn PauseHooks> = all.clone();
    bench.device.add_pause_hooks("", &hooks);
    for regions in [1, 0] {
        let paused = region.pause(Fence::default()).unwrap();
        assert_eq!((paused.regions, paused.pages), (regions, 0));
    }
    assert_eq!((region.resume(NOW).unwrap().regions, region.stats().generation), (1, 1));
    assert!(all.seen.lock().unwrap().is_empty());
    drop(region);
    bench.end();
}

#[test]
fn tags_come_back_in_the_order_asked_for_each_behind_an_event_of_its_own() {
    let bench = bench();
    let (kv, weights) = (bench.region("kv", Policy::Zero), bench.region("weights", Policy::Backup));
    let at = weights.allocate(6 * MIB, A).unwrap();
    write(at, 6 * MIB, 4);
    let zeros = kv.allocate(2 * MIB, A).unwrap();
    write(zeros, 2 * MIB, 4);
    bench.device.pause(&["kv", "weights"], Fence::default()).unwrap();
    let (report, mut ready) = bench.device.resume_async(&["weights", "kv"], NOW).unwrap();
    assert_eq!((report.regions, report.bytes, report.copy_micros), (2, 8 * MIB, 0));
    assert_eq!(ready.iter().map(|ready| ready.tag()).collect::<Vec<_>>(), ["weights", "kv"]);
    for ready in &mut ready {
        ready.before(stream(0x30)).unwrap();
        ready.wait().unwrap();
        assert!(ready.done().unwrap());
    }
    weights.before(stream(0x31)).unwrap();
    assert!(holds(at, 6 * MIB, 4) && is_zero(zeros, 2 * MIB));
    drop((weights, kv, ready));
    bench.end();
}

/// A freed block with a running reader is restored, too, and reclaimed during the copy. Its
/// addresses, without other blocks, stay until the copy ends.
#[test]
fn addresses_without_blocks_wait_for_the_contents_that_come_there() {
    const SIDE: Stream = stream(0x31);
    let bench = bench_of(HostOptions { memory_bytes: 64 << 30, ..HostOptions::default() });
    let region = bench.region("weights", Policy::Backup);
    let first = region.allocate(2 * MIB, SIDE).unwrap();
    let second = region.allocate_as(17 << 30, Policy::Discard, A).unwrap();
    bench.device.pause(&[], Fence::default()).unwrap().complete().unwrap();
    bench.faulty.set_capturing(SIDE, true);
    region.free(first).unwrap();
    bench.faulty.set_busy(true);
    let (_, mut ready) = bench.device.resume_async(&[], NOW).unwrap();
    bench.faulty.set_capturing(SIDE, false);
    let before = bench.device.stats();
    // The first query reports the reader as done; then the device is busy with copies.
    bench.faulty.set_busy(false);
    let (asked, faulty) = (AtomicU64::new(0), Arc::downgrade(&bench.faulty));
    bench.faulty.set_hook(Some(Arc::new(move |name| {
        if name == "event_query" && asked.fetch_add(1, Relaxed) == 1 {
            faulty.upgrade().unwrap().set_busy(true);
        }
    })));
    let pages = region.stats().pages;
    bench.faulty.set_hook(None);
    let stats = bench.device.stats();
    assert_eq!((before.reservations, pages), (2, 17), "the block is not gone");
    assert_eq!((stats.mappings, stats.reservations), (before.mappings, 2), "unmapped under a copy");
    bench.faulty.set_busy(false);
    ready[0].wait().unwrap();
    region.free(second).unwrap();
    drop((region, ready));
    bench.end();
}

/// Each page's copy had its own event, and each poll queried all events: cubic in the number of
/// pages.
#[test]
fn whoever_waits_for_contents_asks_once_for_all_pages() {
    let bench = bench();
    let regions = [Policy::Backup, Policy::Zero].map(|policy| {
        let options = RegionOptions { policy, page_bytes: 2 * MIB, ..RegionOptions::default() };
        let region = bench.device.region("weights", options).unwrap();
        let at = region.allocate(200 * MIB, A).unwrap();
        write(at, 200 * MIB, 4);
        (region, at)
    });
    for _ in 0..2 {
        bench.device.pause(&[], Fence::default()).unwrap().complete().unwrap();
        let calls = || ["event_record", "event_query", "event_wait"].map(|name| bench.faulty.count(name));
        let before = calls();
        bench.faulty.set_busy(true);
        let (report, mut ready) = bench.device.resume_async(&[], NOW).unwrap();
        ready[0].before(stream(0x30)).unwrap();
        assert!(!ready[0].done().unwrap());
        let after = calls();
        let seen: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
        assert_eq!(report.pages, 200);
        assert!(seen[0] <= 2 && seen[1] <= 10 && seen[2] <= 2, "{seen:?}");
        bench.faulty.set_busy(false);
        ready[0].wait().unwrap();
        assert!(holds(regions[0].1, 200 * MIB, 4) && is_zero(regions[1].1, 200 * MIB));
    }
    drop(regions);
    bench.end();
}

#[test]
fn threads_pause_resume_allocate_and_free_at_once() {
    let bench = bench();
    let regions: Vec<_> =
        [Policy::Backup, Policy::Discard, Policy::Backup].map(|policy| bench.region("shared", policy)).into();
    let fixed: Vec<_> =
        regions.iter().map(|region| region.allocate_as(5 * MIB, Policy::Backup, A).unwrap()).collect();
    fixed.iter().for_each(|at| write(*at, 5 * MIB, 1));
    let (barrier, allocated) = (Barrier::new(4), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                barrier.wait();
                for _ in 0..30 {
                    bench.device.pause(&["shared"], Fence::default()).unwrap().complete().unwrap();
                    bench.device.resume(&["shared"], NOW).unwrap();
                }
            });
        }
        for thread in 0..2 {
            let (regions, barrier, allocated) = (&regions, &barrier, &allocated);
            scope.spawn(move || {
                barrier.wait();
                for round in 0..300 {
                    let region = &regions[(round + thread) % 3];
                    match region.allocate(((round as u64 % 7) + 1) * MIB / 2, A) {
                        Ok(at) => {
                            allocated.fetch_add(1, Relaxed);
                            region.free(at).unwrap();
                        }
                        Err(Error::WrongState { .. }) => thread::yield_now(),
                        Err(error) => panic!("{error}"),
                    }
                }
            });
        }
    });
    bench.device.resume(&[], NOW).unwrap();
    assert!(fixed.iter().all(|at| holds(*at, 5 * MIB, 1)));
    assert!(allocated.load(Relaxed) > 0);
    assert_eq!(bench.device.pool().audit_idle(), Ok(()));
    drop(regions);
    bench.end();
}

#[test]
fn a_budget_of_its_own_holds_and_what_stepped_aside_does_not_count() {
    let bench = bench();
    let budget =
        |budget_bytes| RegionOptions { budget_bytes, policy: Policy::Backup, ..RegionOptions::default() };
    let region = bench.device.region("weights", budget(Some(16 * MIB))).unwrap();
    let at = region.allocate(10 * MIB, A).unwrap();
    let refused = region.allocate(10 * MIB, A).unwrap_err();
    assert!(
        matches!(&refused, Error::OverBudget { account: Some(account), .. } if account.contains("weights")),
        "{refused}"
    );
    region.allocate(6 * MIB, A).unwrap();
    region.pause(Fence::default()).unwrap();
    assert_eq!((region.stats().account.charged_bytes, region.stats().paused_bytes), (0, 16 * MIB));
    region.resume(NOW).unwrap();
    assert_eq!(region.stats().account.charged_bytes, 16 * MIB);
    region.free(at).unwrap();
    assert!(region.allocate(10 * MIB, A).is_ok());
    drop(region);
    bench.end();
}

#[test]
fn what_is_wrong_is_an_error_with_its_numbers() {
    let bench = bench();
    let odd = RegionOptions { page_bytes: 3 * MIB, ..RegionOptions::default() };
    assert!(matches!(bench.device.region("odd", odd), Err(Error::InvalidPageSize { .. })));
    let region = bench.region("weights", Policy::Discard);
    assert!(matches!(region.allocate(0, A), Err(Error::InvalidSize { .. })));
    assert!(
        matches!(region.allocate(1 << 45, A), Err(Error::OutOfMemory { requested, .. }) if requested == 1 << 45)
    );
    let at = region.allocate(100, A).unwrap();
    for foreign in [at.plus(512), Address(64)] {
        assert!(matches!(region.free(foreign), Err(Error::ForeignPointer { .. })));
        assert!(matches!(region.record_stream(foreign, A), Err(Error::ForeignPointer { .. })));
        assert!(matches!(region.mark_written(Some(foreign)), Err(Error::ForeignPointer { .. })));
    }
    let mut bytes = [0; 16];
    assert!(
        matches!(region.get_backup(at, 0, &mut bytes), Err(Error::WrongState { sentence }) if sentence.contains("it is resident"))
    );
    region.pause(Fence::default()).unwrap();
    assert!(matches!(region.get_backup(at, 500, &mut bytes), Err(Error::InvalidSize { limit: 12, .. })));
    assert!(
        matches!(region.get_backup(at, 0, &mut bytes), Err(Error::WrongState { sentence }) if sentence.contains("the block"))
    );
    assert!(matches!(region.mark_written(None), Err(Error::WrongState { .. })));
    drop(region);
    bench.end();
}

#[test]
fn many_blocks_lie_packed_on_few_pages() {
    let bench = bench_of(HostOptions { memory_bytes: 64 << 30, ..HostOptions::default() });
    for tensors in [1_u64, 64, 2048] {
        let region = bench.region("weights", Policy::Discard);
        for _ in 0..tensors {
            region.allocate((8 << 30) / tensors, A).unwrap();
        }
        let stats = region.stats();
        assert!(stats.pages <= 90, "{tensors} tensors: {} pages", stats.pages);
        assert!(stats.resident_bytes <= 9 << 30);
        let report = region.pause(Fence::default()).unwrap();
        assert_eq!((report.pages, report.calls), (stats.pages, 2 * stats.pages));
        assert!(region.resume(NOW).unwrap().calls <= 3 * stats.pages);
    }
    bench.end();
}

/// A resume uses few pages, also after a failed resume and beside a page that was not paused.
#[test]
fn what_comes_back_is_joined_and_its_contents_are_what_they_were() {
    let bench = bench_of(HostOptions { memory_bytes: 64 << 30, ..HostOptions::default() });
    for policy in [Policy::Backup, Policy::Zero] {
        let region = bench
            .device
            .region("weights", RegionOptions { policy, read_only: true, ..RegionOptions::default() })
            .unwrap();
        let bytes = 600 << 10;
        let blocks: Vec<_> = (0..1000).map(|_| region.allocate(bytes, A).unwrap()).collect();
        blocks.iter().enumerate().for_each(|(number, at)| write(*at, bytes, number as u64));
        let grown = region.stats().pages;
        bench.faulty.arm(&(30..60).collect::<Vec<_>>());
        let first = region.pause(Fence::default()).unwrap();
        assert!(!first.failures.is_empty() && first.pages > 0 && first.left_bytes > 0, "{first:?}");
        bench.faulty.arm(&[]);
        bench.faulty.refuse("map", true);
        assert!(region.resume(NOW).is_err());
        bench.faulty.refuse("map", false);
        region.resume(NOW).unwrap();
        let right = |except: &[usize]| {
            blocks.iter().enumerate().filter(|(number, _)| !except.contains(number)).all(|(number, at)| {
                holds(*at, bytes, number as u64) || (policy == Policy::Zero && is_zero(*at, bytes))
            })
        };
        // A block across a paused and an unpaused page is unusable.
        assert!(policy == Policy::Zero || right(&[]));
        // Clean state is per page: a written block dirties its pages only.
        let second = region.pause(Fence::default()).unwrap();
        assert_eq!(second.complete(), Ok(()));
        assert!(second.copied_bytes <= first.left_bytes);
        region.resume(NOW).unwrap();
        let now = region.stats().pages;
        assert!(now * 3 <= grown, "{grown} pages came back as {now}");
        write(blocks[3], bytes, 4711);
        region.mark_written(Some(blocks[3])).unwrap();
        region.pause(Fence::default()).unwrap();
        region.resume(NOW).unwrap();
        assert!(right(&[3]) && (policy == Policy::Zero || holds(blocks[3], bytes, 4711)));
        let held = region.stats().resident_bytes;
        blocks[..500].iter().for_each(|at| region.free(*at).unwrap());
        assert!(region.stats().resident_bytes < held * 3 / 4);
        drop(region);
    }
    bench.end();
}

/// A resume joins neighbouring places with separate host runs. A block lies across the boundary.
#[test]
fn backups_of_blocks_over_joined_places_are_read_whole() {
    const LAYER: [u64; 6] = [8192, 3 * MIB, 2 * MIB, 11 * MIB, 5632 << 10, 2048];
    for read_only in [false, true] {
        let bench = bench_of(HostOptions { memory_bytes: 2 << 30, ..HostOptions::default() });
        let options = RegionOptions { policy: Policy::Backup, read_only, ..RegionOptions::default() };
        let region = bench.device.region("weights", options).unwrap();
        let sizes = LAYER.iter().cycle().take(12 * LAYER.len());
        let blocks: Vec<_> = sizes.map(|bytes| (region.allocate(*bytes, A).unwrap(), *bytes)).collect();
        let numbered = || (1..).zip(&blocks);
        let right = || numbered().all(|(stamp, (at, bytes))| backup_holds(&region, *at, *bytes, stamp));
        numbered().for_each(|(stamp, (at, bytes))| write(*at, *bytes, stamp));
        region.pause(Fence::default()).unwrap().complete().unwrap();
        let before = region.stats().pages;
        assert!(right(), "after the first pause");
        bench.device.set_budget(Some(2 * MIB));
        assert!(matches!(region.resume(NOW), Err(Error::OverBudget { .. })));
        bench.device.set_budget(None);
        assert!(region.stats().pages < before, "nothing was joined");
        assert!(right(), "after a resume that found no memory");
        region.resume(NOW).unwrap();
        region.pause(Fence::default()).unwrap().complete().unwrap();
        assert!(right(), "after the second pause");
        region.resume(NOW).unwrap();
        assert!(numbered().all(|(stamp, (at, bytes))| holds(*at, *bytes, stamp)));
        drop(region);
        bench.end();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64, usize),
    Free(usize),
    Write(usize),
    Pause,
    Resume,
    ResumeShort,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    // On pages of 4 KiB: many blocks slightly longer than a page, across boundaries of joined
    // places.
    let sizes = prop_oneof![6 => 3000_u64..6000, 2 => 1_u64..50_000, 1 => MIB..3 * MIB];
    let policies = prop_oneof![2 => Just(2_usize), 1 => 0_usize..4];
    let step = prop_oneof![
        12 => (sizes, policies).prop_map(|(bytes, policy)| Step::Allocate(bytes, policy)),
        3 => (0_usize..64).prop_map(Step::Free),
        2 => (0_usize..64).prop_map(Step::Write),
        2 => Just(Step::Pause),
        2 => Just(Step::Resume),
        1 => Just(Step::ResumeShort),
    ];
    prop::collection::vec(step, 1..200)
}

type Known = (u64, Policy, Option<u64>);

fn run(steps: Vec<Step>, read_only: bool, page_bytes: u64) -> Result<()> {
    let bench = bench_of(HostOptions { granularity: 4096, ..HostOptions::default() });
    let options = RegionOptions { policy: Policy::Backup, read_only, page_bytes, ..RegionOptions::default() };
    let region = bench.device.region("twin", options)?;
    let mut blocks: BTreeMap<Address, Known> = BTreeMap::new();
    let (mut paused, mut stamp) = (false, 0);
    let nth = |blocks: &BTreeMap<Address, Known>, n: usize| {
        (!blocks.is_empty())
            .then(|| blocks.iter().nth(n % blocks.len()).map(|(at, known)| (*at, *known)))
            .flatten()
    };
    for step in steps {
        stamp += 1;
        match step {
            Step::Allocate(bytes, policy) => {
                let result = region.allocate_as(bytes, POLICIES[policy], A);
                if paused {
                    assert!(matches!(result, Err(Error::WrongState { .. })));
                    continue;
                }
                let (at, end) = (result?, |at: Address, bytes: u64| at.0 + bytes.next_multiple_of(512));
                for (other, (size, ..)) in &blocks {
                    assert!(end(at, bytes) <= other.0 || end(*other, *size) <= at.0, "two blocks at {at:?}");
                }
                write(at, bytes, stamp);
                blocks.insert(at, (bytes, POLICIES[policy], Some(stamp)));
            }
            Step::Free(n) => {
                if let Some((at, _)) = nth(&blocks, n) {
                    region.free(at)?;
                    blocks.remove(&at);
                    assert!(region.free(at).is_err());
                }
            }
            Step::Write(n) => {
                if let Some((at, (bytes, policy, _))) = nth(&blocks, n).filter(|_| !paused) {
                    write(at, bytes, stamp);
                    region.mark_written(Some(at))?;
                    blocks.insert(at, (bytes, policy, Some(stamp)));
                }
            }
            Step::Pause => {
                region.pause(Fence::default())?.complete()?;
                paused = true;
            }
            Step::Resume | Step::ResumeShort => {
                bench.device.set_budget(matches!(step, Step::ResumeShort).then_some(1));
                let resumed = region.resume(NOW);
                bench.device.set_budget(None);
                match resumed {
                    Ok(_) => {}
                    Err(Error::OverBudget { .. }) if matches!(step, Step::ResumeShort) => continue,
                    Err(error) => return Err(error),
                }
                if std::mem::take(&mut paused) {
                    for (at, (bytes, policy, holds_stamp)) in &mut blocks {
                        match policy {
                            Policy::Discard => *holds_stamp = None,
                            Policy::Zero => {
                                assert!(is_zero(*at, *bytes));
                                *holds_stamp = None;
                            }
                            _ => {}
                        }
                    }
                }
            }
        }
        let there = |policy: Policy| !paused || policy == Policy::Keep;
        for (at, (bytes, policy, stamp)) in &blocks {
            if let Some(stamp) = stamp.filter(|_| there(*policy)) {
                assert!(holds(*at, *bytes, stamp), "{at:?} of {bytes} bytes, {policy:?}");
            }
            match (stamp, policy) {
                (Some(stamp), Policy::Backup) if paused => {
                    assert!(backup_holds(&region, *at, *bytes, *stamp), "{at:?} of {bytes} bytes");
                }
                _ => {
                    let refused = region.get_backup(*at, 0, &mut [0; 8]);
                    assert!(matches!(refused, Err(Error::WrongState { .. })), "{refused:?}");
                }
            }
        }
        let stats = region.stats();
        assert_eq!((stats.blocks, stats.paused), (blocks.len() as u64, paused));
        assert_eq!(
            stats.live_bytes,
            blocks.values().map(|(bytes, ..)| bytes.next_multiple_of(512)).sum::<u64>()
        );
        assert_eq!(stats.live_bytes + stats.free_bytes, stats.resident_bytes + stats.paused_bytes);
        assert_eq!(stats.account.charged_bytes, stats.resident_bytes);
        bench.device.pool().audit_idle()?;
    }
    drop(region);
    bench.end();
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_region_does_what_a_table_of_blocks_does(steps in steps(), read_only: bool, fixed: bool) {
        run(steps, read_only, if fixed { 16 << 10 } else { 0 }).unwrap();
    }
}

#[test]
fn two_threads_that_prepare_host_memory_at_once_stay_within_its_limit() {
    let bench = bench();
    let host = bench.device.host_pool();
    host.set_limit(Some(24 * MIB));
    let (there, second) = (Arc::downgrade(&bench.device), Arc::new(Mutex::new(None)));
    let told = Arc::clone(&second);
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        // The first thread's memory is not in the books yet.
        if let ("host_register", Some(device)) = (call, there.upgrade()) {
            *told.lock().unwrap() = Some(device.host_pool().prepare(16 * MIB));
        }
    })));
    host.prepare(16 * MIB).unwrap();
    bench.faulty.set_hook(None);
    let second = second.lock().unwrap().take();
    assert!(matches!(second, Some(Err(Error::OutOfHostMemory { .. }))), "{second:?}");
    assert_eq!(host.stats().held_bytes, 16 * MIB);
    bench.end();
}

/// Contents that are on their way from host memory when the driver cannot be asked: that memory is
/// nobody else's.
#[test]
fn host_memory_is_in_use_while_the_driver_cannot_say_whether_its_copy_is_over() {
    let bench = bench();
    let region = bench.region("weights", Policy::Backup);
    let block = region.allocate(4 * MIB, A).unwrap();
    write(block, 4 * MIB, 3);
    region.pause(Fence::default()).unwrap().complete().unwrap();
    let free = bench.device.host_pool().stats().free_bytes;
    bench.faulty.set_busy(true);
    let (_, ready) = {
        // From the first copy on.
        let refusing = Arc::downgrade(&bench.faulty);
        bench.faulty.set_hook_behind(Some(Arc::new(move |call| {
            if let ("copy_from_host", Some(faulty)) = (call, refusing.upgrade()) {
                faulty.refuse("event_query", true);
            }
        })));
        bench.device.resume_async(&[], NOW).unwrap()
    };
    bench.faulty.set_hook_behind(None);
    assert_eq!(bench.device.host_pool().stats().free_bytes, free, "memory that is read is taken for free");
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    drop((ready, region));
    bench.end();
}

#[test]
fn a_wait_for_copies_that_fails_once_is_done_again() {
    let bench = bench();
    let region = bench.region("weights", Policy::Backup);
    let block = region.allocate(4 * MIB, A).unwrap();
    write(block, 4 * MIB, 3);
    let (refused, refusing) = (AtomicU64::new(0), Arc::downgrade(&bench.faulty));
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        let Some(faulty) = refusing.upgrade() else { return };
        if call == "copy_to_host" {
            faulty.set_busy_for(6);
        }
        if call == "event_synchronize" {
            faulty.refuse(call, refused.fetch_add(1, Relaxed) == 0);
        }
    })));
    let report = region.pause(Fence::default()).unwrap();
    bench.faulty.set_hook(None);
    assert_eq!(bench.faulty.failed().get("event_synchronize"), Some(&1), "the control failed nothing");
    assert!(report.complete().is_ok() && report.left_bytes == 0, "{report:?}");
    region.resume(NOW).unwrap();
    assert!(holds(block, 4 * MIB, 3));
    drop(region);
    bench.end();
}

/// Copies that do not end, and registrations that the driver keeps: the memory stays with the
/// process.
#[test]
fn host_memory_that_the_driver_may_use_outlives_its_device() {
    let is_mapped = |at: usize| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (from, to) = line.split(' ').next().unwrap().split_once('-').unwrap();
            let number = |text| usize::from_str_radix(text, 16).unwrap();
            (number(from)..number(to)).contains(&at)
        })
    };
    for what in ["host_unregister", "event_query"] {
        let bench = bench();
        let region = bench.region("weights", Policy::Backup);
        let block = region.allocate(4 * MIB, A).unwrap();
        write(block, 4 * MIB, 3);
        let buffer = bench.device.host_buffer(MIB, Pinning::Required).unwrap();
        let at = buffer.as_ptr() as usize;
        drop(buffer);
        region.pause(Fence::default()).unwrap().complete().unwrap();
        // Contents are on their way from there as everything goes.
        bench.faulty.set_busy(what == "event_query");
        bench.device.resume_async(&[], NOW).unwrap();
        bench.faulty.refuse(what, true);
        bench.faulty.refuse("event_synchronize", true);
        let unregistered = bench.faulty.count("host_unregister");
        drop((region, bench.device));
        assert!(is_mapped(at), "{what}: memory is gone that the driver may use");
        let tried = bench.faulty.count("host_unregister") > unregistered;
        assert_eq!(tried, what == "host_unregister");
    }
}

/// A page whose contents lie in two places of the host's memory, of which the second copy fails:
/// the first is under way.
#[test]
fn host_memory_of_a_backup_that_failed_half_way_goes_behind_its_copies() {
    let bench = bench();
    let host = bench.device.host_pool();
    let options = RegionOptions { policy: Policy::Backup, page_bytes: 2 * MIB, ..RegionOptions::default() };
    let region = bench.device.region("weights", options).unwrap();
    let block = region.allocate(2 * MIB, A).unwrap();
    write(block, 2 * MIB, 3);
    host.prepare(4 * MIB).unwrap();
    let mut taken: Vec<_> =
        (0..4).map(|_| bench.device.host_buffer(MIB, Pinning::Required).unwrap()).collect();
    drop((taken.remove(2), taken.remove(0)));
    assert_eq!(host.stats().free_bytes, 2 * MIB);
    let (copies, there) = (AtomicU64::new(0), Arc::downgrade(&bench.faulty));
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        if let ("copy_to_host", Some(faulty)) = (call, there.upgrade()) {
            faulty.set_busy(true);
            faulty.refuse(call, copies.fetch_add(1, Relaxed) == 1);
        }
    })));
    let report = region.pause(Fence::default()).unwrap();
    bench.faulty.set_hook(None);
    assert_eq!(bench.faulty.failed().get("copy_to_host"), Some(&1), "the contents lie in one place");
    assert_eq!((report.left_bytes, report.failures.len()), (2 * MIB, 1));
    assert_eq!(host.stats().free_bytes, 0, "memory that the device writes to is taken for free");
    bench.faulty.refuse("copy_to_host", false);
    bench.faulty.set_busy(false);
    region.pause(Fence::default()).unwrap().complete().unwrap();
    region.resume(NOW).unwrap();
    assert!(holds(block, 2 * MIB, 3));
    drop((region, taken));
    bench.end();
}

/// The small registered buffers serve others afterwards, in both directions.
#[test]
fn a_copy_through_buffers_that_fails_is_not_over_before_what_it_began() {
    let bench = bench();
    // A page of several buffers.
    let options = RegionOptions { policy: Policy::Backup, page_bytes: 40 * MIB, ..RegionOptions::default() };
    let region = bench.device.region("weights", options).unwrap();
    let block = region.allocate(40 * MIB, A).unwrap();
    write(block, 40 * MIB, 3);
    // The contents' memory is not registered, and the buffers are.
    bench.faulty.arm(&[1]);
    bench.device.host_pool().prepare(64 * MIB).unwrap();
    bench.faulty.arm(&[]);
    let (copies, there) = (AtomicU64::new(0), Arc::downgrade(&bench.faulty));
    bench.faulty.set_hook(Some(Arc::new(move |call| {
        if let ("copy_to_host", Some(faulty)) = (call, there.upgrade()) {
            faulty.set_busy(true);
            faulty.refuse(call, copies.fetch_add(1, Relaxed) > 0);
        }
    })));
    thread::scope(|scope| {
        let pause = scope.spawn(|| region.pause(Fence::default()).unwrap());
        while !pause.is_finished() && bench.faulty.count("copy_to_host") < 2 {
            thread::yield_now();
        }
        thread::sleep(Duration::from_millis(50));
        let early = pause.is_finished();
        bench.faulty.set_hook(None);
        bench.faulty.refuse("copy_to_host", false);
        bench.faulty.set_busy(false);
        assert!(pause.join().unwrap().left_bytes > 0 && !early, "a buffer is free under a copy");
    });
    region.pause(Fence::default()).unwrap().complete().unwrap();
    region.resume(NOW).unwrap();
    assert!(holds(block, 40 * MIB, 3));
    drop(region);
    bench.end();
}

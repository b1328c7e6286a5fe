//! The locks, under many interleavings: `cargo test --features shuttle --test shuttle`.
#![cfg(feature = "shuttle")]

use std::sync::Arc;

use shuttle::thread;
use vmmgraph::driver::HostDriver;
use vmmgraph::{Device, HostOptions, Options, SharedVmmAllocator, Stream};

const KIB: u64 = 1 << 10;

/// Small pages, so that thousands of runs cost little.
fn small() -> (Arc<HostDriver>, Arc<Device>, Arc<SharedVmmAllocator>) {
    let options = HostOptions { granularity: 4096, memory_bytes: 1 << 30 };
    let host = Arc::new(HostDriver::new(0, options).unwrap());
    let device = Device::with_driver(host.clone());
    let options = Options { small_page_bytes: 4096, large_page_bytes: 16384, ..Options::default() };
    let arena = SharedVmmAllocator::new(&device, &options).unwrap();
    (host, device, Arc::new(arena))
}

/// Captures with a retained block, replays, frees it, and drops the space.
fn life(arena: &SharedVmmAllocator, number: u64) {
    let space = arena.open_space().unwrap();
    let passing = space.allocate((20 + number) * KIB, Stream(number)).unwrap();
    let kept = space.allocate(6 * KIB, Stream(number)).unwrap();
    space.free(passing).unwrap();
    assert_eq!(space.seal().unwrap().retained.len(), 1);
    assert_eq!(space.replay(Stream(number), || number), Ok(number));
    space.free(kept).unwrap();
}

#[test]
fn spaces_live_and_die_beside_trims_and_statistics() {
    let model = || {
        let (host, device, arena) = small();
        let lives = [1, 2].map(|number| {
            let arena = Arc::clone(&arena);
            thread::spawn(move || life(&arena, number))
        });
        let watcher = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                arena.trim().unwrap();
                let stats = arena.stats();
                assert!(stats.physical_bytes >= stats.retained_bytes);
            })
        };
        for thread in lives.into_iter().chain([watcher]) {
            thread.join().unwrap();
        }
        arena.trim().unwrap();
        assert_eq!(device.stats().physical_bytes, 0);
        drop((device, arena));
        assert_eq!(host.leftovers(), [0; 4]);
    };
    shuttle::check_random(model, 400);
    shuttle::check_pct(model, 400, 3);
}

#[test]
fn one_space_used_by_two_threads_keeps_its_blocks_apart() {
    let model = || {
        let (_, _, arena) = small();
        let space = arena.open_space().unwrap();
        let users = [1u64, 2].map(|number| {
            let space = Arc::clone(&space);
            thread::spawn(move || {
                for bytes in [700, 9 * KIB] {
                    let block = space.allocate(bytes, Stream(0)).unwrap();
                    // SAFETY: a live block of the host driver, of at least eight bytes.
                    unsafe { (block.0 as *mut u64).write_volatile(number) };
                    thread::yield_now();
                    // SAFETY: as above.
                    assert_eq!(unsafe { (block.0 as *const u64).read_volatile() }, number);
                    space.free(block).unwrap();
                }
            })
        });
        for thread in users {
            thread.join().unwrap();
        }
        assert!(space.seal().unwrap().retained.is_empty());
    };
    shuttle::check_random(model, 400);
    shuttle::check_pct(model, 400, 3);
}

#[test]
fn replays_of_two_threads_never_overlap() {
    let model = || {
        let (_, _, arena) = small();
        let inside = Arc::new(std::sync::atomic::AtomicU32::new(0));
        let threads = [1u64, 2].map(|number| {
            let space = arena.open_space().unwrap();
            space.seal().unwrap();
            let inside = Arc::clone(&inside);
            thread::spawn(move || {
                let launch = || {
                    assert_eq!(inside.fetch_add(1, std::sync::atomic::Ordering::SeqCst), 0);
                    thread::yield_now();
                    inside.fetch_sub(1, std::sync::atomic::Ordering::SeqCst);
                };
                space.replay(Stream(number), launch).unwrap();
                space.replay(Stream(0), launch).unwrap();
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
    };
    shuttle::check_random(model, 400);
}

//! Explores lock interleavings: `cargo test --features shuttle --test shuttle`.
#![cfg(feature = "shuttle")]

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use shuttle::thread;
use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{Fence, Reclaimer};
use vmmgraph::ring::HostRun;
use vmmgraph::{
    BlockBorrower, Borrower, Device, ElasticOptions, Error, HostOptions, KvLayout, KvOptions, Options,
    Pinning, Policy, Region, RegionOptions, RetainPolicy, RingCaptureOptions, RingGraph, RingOptions,
    RingUnit, SharedVmmAllocator, SpaceStats, Stream, VacateBlocks, Vacated, VmmTorchAllocator,
};
use vmmgraph_testkit::{CopyingDriver, FaultyDriver, IdleBorrower, stream};

const KIB: u64 = 1 << 10;

/// Small pages: thousands of runs must be cheap.
fn small() -> (Arc<HostDriver>, Arc<Device>, Arc<SharedVmmAllocator>) {
    of_memory(1 << 30)
}

fn of_memory(memory_bytes: u64) -> (Arc<HostDriver>, Arc<Device>, Arc<SharedVmmAllocator>) {
    let options = HostOptions { granularity: 4096, memory_bytes };
    let host = Arc::new(HostDriver::new(0, options).unwrap());
    let device = Device::with_driver(host.clone());
    let arena = of_device(&device);
    (host, device, arena)
}

fn of_device(device: &Arc<Device>) -> Arc<SharedVmmAllocator> {
    let options = Options { small_page_bytes: 4096, large_page_bytes: 16384, ..Options::default() };
    Arc::new(SharedVmmAllocator::new(device, &options).unwrap())
}

fn life(arena: &SharedVmmAllocator, number: u64) {
    let space = arena.open_space().unwrap();
    let passing = space.allocate((20 + number) * KIB, stream(number)).unwrap();
    let kept = space.allocate(6 * KIB, stream(number)).unwrap();
    space.free(passing).unwrap();
    assert_eq!(space.seal().unwrap().retained.len(), 1);
    assert_eq!(space.replay(stream(number), || number), Ok(number));
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

/// Parts of a range pending on a reader, and the range itself, destroyed by two threads: no double
/// unmap, no leak.
#[test]
fn what_outlived_a_graph_goes_beside_trims() {
    const SIDE: Stream = stream(7);
    let model = || {
        let options = HostOptions { granularity: 4096, memory_bytes: 1 << 30 };
        let host = Arc::new(HostDriver::new(0, options).unwrap());
        let faulty = FaultyDriver::new(host.clone());
        let device = Device::with_driver(faulty.clone());
        let arena = of_device(&device);
        let space = arena.open_space().unwrap();
        let tensors = VmmTorchAllocator::new(&space);
        let blocks = [6, 3].map(|kib| tensors.allocate(kib * KIB, stream(1), false).unwrap());
        space.seal().unwrap();
        drop(space);
        faulty.set_capturing(SIDE, true);
        blocks.iter().for_each(|block| tensors.free(*block, &[SIDE]).unwrap());
        faulty.set_capturing(SIDE, false);
        let mapped = device.stats().mappings;
        faulty.start_log();
        let goes = thread::spawn(move || drop(tensors));
        let trims = {
            let device = Arc::clone(&device);
            thread::spawn(move || device.trim().map(drop).unwrap())
        };
        device.give_back(std::time::Duration::ZERO);
        goes.join().unwrap();
        trims.join().unwrap();
        assert_eq!(faulty.take_unmapped(), mapped * 4096);
        let stats = device.stats();
        assert_eq!((stats.pending, stats.mappings, stats.reservations), (0, 0, 0));
        assert_eq!(device.pool().audit_idle(), Ok(()));
        device.trim().unwrap();
        drop((arena, device, faulty));
        assert_eq!(host.leftovers(), [0; 4]);
    };
    explore(model);
}

/// One thread announces its capture of the last replay's stream while another marks the stream: the
/// mark must be recorded first.
#[test]
fn a_mark_is_recorded_before_the_stream_is_captured() {
    const ON: Stream = stream(7);
    let model = || {
        let host =
            Arc::new(HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 1 << 30 }).unwrap());
        let faulty = FaultyDriver::new(host);
        let device = Device::with_driver(faulty.clone());
        let arena = of_device(&device);
        let space = arena.open_space().unwrap();
        space.seal().unwrap();
        space.replay(ON, || ()).unwrap();
        faulty.set_hook(Some(Arc::new(|_| thread::yield_now())));
        let marks = thread::spawn(move || arena.mark());
        device.mark(ON).unwrap();
        faulty.set_capturing(ON, true);
        assert_eq!(marks.join().unwrap(), Ok(()));
    };
    explore(model);
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
                    let block = space.allocate(bytes, Stream::LEGACY).unwrap();
                    // SAFETY: a live block of the host driver with at least eight bytes.
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
                space.replay(stream(number), launch).unwrap();
                space.replay(Stream::LEGACY, launch).unwrap();
            })
        });
        for thread in threads {
            thread.join().unwrap();
        }
    };
    shuttle::check_random(model, 400);
}

fn end(host: &HostDriver, device: Arc<Device>, arena: Arc<SharedVmmAllocator>) {
    assert_eq!(device.pool().audit_idle(), Ok(()));
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
    drop((device, arena));
    assert_eq!(host.leftovers(), [0; 4]);
}

fn explore(model: impl Fn() + Send + Sync + Copy + 'static) {
    shuttle::check_random(model, 2000);
    shuttle::check_pct(model, 2000, 3);
}

#[test]
fn two_arenas_at_the_end_of_memory_never_hold_more_than_there_is() {
    explore(|| {
        const MEMORY: u64 = 40 << 10;
        let (host, device, arena) = of_memory(MEMORY);
        // Two arenas, since one arena creates its pages one after another.
        let captures = [(1, Arc::clone(&arena)), (2, of_device(&device))].map(|(number, arena)| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                let space = arena.open_space().unwrap();
                let before = space.stats();
                match space.allocate(24 * KIB, stream(number)) {
                    Ok(block) => space.free(block).unwrap(),
                    Err(error) => {
                        assert!(error.is_out_of_memory(), "{error}");
                        let after = SpaceStats { maps: before.maps, ..space.stats() };
                        assert_eq!(after, before, "a failed call changed something");
                    }
                }
                let _ = space.seal().unwrap();
                assert!(device.stats().peak_physical_bytes <= MEMORY);
                device.pool().audit().unwrap();
            })
        });
        captures.into_iter().for_each(|thread| thread.join().unwrap());
        end(&host, device, arena);
    });
}

#[test]
fn a_budget_holds_against_two_threads() {
    explore(|| {
        const BUDGET: u64 = 32 << 10;
        let (host, device, arena) = small();
        device.set_budget(Some(BUDGET));
        let captures = [(1, Arc::clone(&arena)), (2, of_device(&device))].map(|(number, arena)| {
            thread::spawn(move || {
                let space = arena.open_space().unwrap();
                let result = space.allocate(28 * KIB, stream(number));
                assert!(
                    matches!(result, Ok(_) | Err(Error::OverBudget { budget: BUDGET, .. })),
                    "{result:?}"
                );
            })
        });
        captures.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(device.stats().peak_physical_bytes <= BUDGET);
        end(&host, device, arena);
    });
}

#[test]
fn an_arenas_budget_holds_against_captures_and_retained_pages_of_two_threads() {
    explore(|| {
        const BUDGET: u64 = 44 << 10;
        let (host, device, arena) = small();
        arena.set_budget(Some(BUDGET));
        // Two large pages shared by both; at the seal each needs two small ones, and three of four
        // fit.
        let captures = [1, 2].map(|number| {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let space = arena.open_space().unwrap();
                let captured = (|| {
                    let passing = space.allocate(16 * KIB, stream(number))?;
                    let _kept = space.allocate(7 * KIB, stream(number))?;
                    space.free(passing)?;
                    space.seal()
                })();
                match captured {
                    Ok(report) => assert_eq!(report.retained.len(), 1),
                    Err(Error::OverBudget { budget: BUDGET, account: Some(of), .. }) => {
                        assert_eq!(of, format!("arena {}", arena.id()))
                    }
                    Err(error) => panic!("{error}"),
                }
            })
        });
        captures.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(device.stats().peak_physical_bytes <= BUDGET);
        assert_eq!(arena.mapped_size() + device.stats().free_bytes, device.stats().physical_bytes);
        end(&host, device, arena);
    });
}

#[test]
fn blocks_are_freed_on_one_thread_while_another_seals() {
    explore(|| {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let other = arena.open_space().unwrap();
        other.allocate(30 * KIB, Stream::LEGACY).unwrap();
        let blocks = [700, 18 * KIB, 5 * KIB].map(|bytes| space.allocate(bytes, Stream::LEGACY).unwrap());
        let freeing = {
            let space = Arc::clone(&space);
            thread::spawn(move || {
                space.record_stream(blocks[1], stream(1)).unwrap();
                for block in blocks {
                    space.free(block).unwrap();
                    assert!(matches!(
                        space.free(block),
                        Err(Error::DoubleFree { .. } | Error::ForeignPointer { .. })
                    ));
                }
            })
        };
        let trimming = {
            let (arena, device) = (Arc::clone(&arena), Arc::clone(&device));
            thread::spawn(move || {
                arena.trim().unwrap();
                device.pool().audit().unwrap();
            })
        };
        assert!(space.seal().unwrap().retained.len() <= 3);
        [freeing, trimming].into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((space.stats().blocks, space.stats().retained_bytes), (0, 0));
        drop((space, other));
        end(&host, device, arena);
    });
}

#[test]
fn a_space_dies_on_whichever_thread_is_last() {
    explore(|| {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        space.allocate(20 * KIB, Stream::LEGACY).unwrap();
        space.seal_with(RetainPolicy::Share).unwrap();
        let users = [1, 2].map(|number| {
            let space = Arc::clone(&space);
            thread::spawn(move || {
                space.replay(stream(number), || ()).unwrap();
                assert!(space.stats().mapped_bytes > 0);
            })
        });
        let looking = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let snapshot = arena.snapshot();
                assert!(snapshot.spaces.len() <= 2 && !snapshot.to_json().is_empty());
                arena.mark().unwrap();
                drop(arena.open_space().unwrap());
            })
        };
        drop(space);
        users.into_iter().chain([looking]).for_each(|thread| thread.join().unwrap());
        assert_eq!(device.stats().mappings, 0);
        end(&host, device, arena);
    });
}

#[test]
fn the_arena_goes_first_while_its_spaces_live_on_other_threads() {
    explore(|| {
        let (host, device, arena) = small();
        let threads = [1, 2].map(|number| {
            let space = arena.open_space().unwrap();
            thread::spawn(move || {
                let kept = space.allocate(12 * KIB, stream(number)).unwrap();
                space.seal().unwrap();
                space.free(kept).unwrap();
                space.replay(stream(number), || ()).unwrap();
            })
        });
        drop(arena);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!((device.pool().audit_idle(), device.stats().pages), (Ok(()), 0));
        drop(device);
        assert_eq!(host.leftovers(), [0; 4]);
    });
}

#[test]
fn the_serial_names_on_two_threads() {
    explore(|| {
        let (host, device, arena) = small();
        let threads = [1, 2].map(|number| {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                // The second thread may seal the space, and its blocks, between the calls.
                let block = match arena.allocate(9 * KIB, stream(number)) {
                    Err(Error::WrongState { .. }) => return,
                    other => other.unwrap(),
                };
                arena.switch_to_new_virtual_space().unwrap();
                arena.deallocate(block).unwrap();
                let _ = (arena.mapped_size(), arena.current_offset(), arena.high_water_mark());
            })
        });
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(arena.stats().blocks, 0);
        device.pool().audit_idle().unwrap();
        drop((arena, device));
        assert_eq!(host.leftovers(), [0; 4]);
    });
}

#[test]
fn replays_nested_in_opposite_order_never_hang_and_one_at_least_is_launched() {
    explore(|| {
        let (host, device, first) = small();
        let second = of_device(&device);
        let [a, b] = [&first, &second].map(|arena| {
            let space = arena.open_space().unwrap();
            space.seal().unwrap();
            space
        });
        let threads = [(a.clone(), b.clone()), (b.clone(), a.clone())].map(|(outer, inner)| {
            thread::spawn(move || {
                let nested = outer.replay(stream(1), || inner.replay(stream(1), || ()));
                assert!(matches!(nested, Ok(Ok(())) | Ok(Err(Error::WrongState { .. }))), "{nested:?}");
                nested.unwrap().is_ok()
            })
        });
        assert!(threads.map(|thread| thread.join().unwrap()).contains(&true));
        drop((a, b, second));
        end(&host, device, first);
    });
}

#[test]
fn reclaimers_that_pause_each_others_regions_never_hang() {
    /// Pauses the region not resumed by the requesting thread.
    struct PausesTheOther(Mutex<HashMap<thread::ThreadId, Arc<Region>>>);
    impl Reclaimer for PausesTheOther {
        fn reclaim(&self, _bytes: u64) -> u64 {
            let other = self.0.lock().unwrap().get(&thread::current().id()).cloned();
            other.map_or(0, |other| other.pause(Fence::default()).map_or(0, |report| report.bytes))
        }
        fn cost(&self) -> u64 {
            2
        }
    }
    let model = |budget: u64| {
        let (host, device, arena) = small();
        let regions = ["a", "b"].map(|tag| device.region(tag, RegionOptions::default()).unwrap());
        for region in &regions {
            region.allocate(5 * KIB, stream(1)).unwrap();
            region.pause(Fence::default()).unwrap().complete().unwrap();
        }
        let reclaimer = Arc::new(PausesTheOther(Mutex::default()));
        let known: Arc<dyn Reclaimer> = reclaimer.clone();
        device.add_reclaimer(&known);
        device.set_budget(Some(budget));
        let wakes = [(0, 1), (1, 0)].map(|(mine, its): (usize, usize)| {
            let (mine, its) = (Arc::clone(&regions[mine]), Arc::clone(&regions[its]));
            let reclaimer = Arc::clone(&reclaimer);
            thread::spawn(move || {
                reclaimer.0.lock().unwrap().insert(thread::current().id(), its);
                mine.resume(std::time::Duration::ZERO).map(drop)
            })
        });
        let woken = wakes.map(|wake| wake.join().unwrap());
        assert!(
            woken.iter().all(|woken| matches!(woken, Ok(()) | Err(Error::OverBudget { .. }))),
            "{woken:?}"
        );
        assert!(budget == 1 || woken.iter().any(Result::is_ok));
        device.set_budget(None);
        device.resume(&[], std::time::Duration::ZERO).unwrap();
        reclaimer.0.lock().unwrap().clear();
        drop((regions, known));
        end(&host, device, arena);
    };
    for budget in [8 * KIB, 1] {
        shuttle::check_random(move || model(budget), 300);
    }
}

#[test]
fn regions_step_aside_and_come_back_on_two_threads_beside_a_third_that_allocates() {
    let model = || {
        let (host, device, arena) = small();
        let options = RegionOptions { policy: Policy::Backup, ..RegionOptions::default() };
        let regions = ["weights", "kv"].map(|tag| device.region(tag, options).unwrap());
        let blocks = regions.each_ref().map(|region| region.allocate(5 * KIB, stream(1)).unwrap());
        for (number, block) in blocks.iter().enumerate() {
            // SAFETY: a live block of the host driver with at least eight bytes.
            unsafe { (block.0 as *mut u64).write_volatile(number as u64 + 5) };
        }
        let movers = [["weights", "kv"], ["kv", "weights"]].map(|tags| {
            let device = Arc::clone(&device);
            thread::spawn(move || {
                device.pause(&tags, Fence::default()).unwrap().complete().unwrap();
                device.resume(&tags, std::time::Duration::ZERO).unwrap();
            })
        });
        let allocator = {
            let region = Arc::clone(&regions[0]);
            thread::spawn(move || match region.allocate(9 * KIB, stream(2)) {
                Ok(block) => region.free(block).unwrap(),
                Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
            })
        };
        movers.into_iter().chain([allocator]).for_each(|thread| thread.join().unwrap());
        device.resume(&[], std::time::Duration::ZERO).unwrap();
        for (number, block) in blocks.iter().enumerate() {
            // SAFETY: as above; the region is resident.
            assert_eq!(unsafe { (block.0 as *const u64).read_volatile() }, number as u64 + 5);
        }
        drop(regions);
        end(&host, device, arena);
        assert_eq!(host.host_leftovers(), [0; 2]);
    };
    // Fewer runs: each maps host memory.
    shuttle::check_random(model, 400);
    shuttle::check_pct(model, 400, 3);
}

#[test]
fn elastic_memory_comes_ahead_beside_threads_that_commit_and_decommit_the_same() {
    let model = || {
        let (host, device, arena) = small();
        let options = ElasticOptions { name: "kv", page_bytes: 4096, ..ElasticOptions::default() };
        let buffer = Arc::new(device.elastic_buffer(8 * 4096, &options).unwrap());
        let ahead = buffer.commit_async(0..4 * 4096).unwrap();
        let threads = [0, 2].map(|page| {
            let buffer = Arc::clone(&buffer);
            thread::spawn(move || {
                buffer.commit(page * 4096..(page + 4) * 4096).unwrap();
                let late = buffer.commit_async((page + 1) * 4096..(page + 6) * 4096).unwrap();
                buffer.decommit(page * 4096..(page + 2) * 4096, &Fence::default()).unwrap();
                late.wait().unwrap();
                if page == 2 {
                    buffer.commit(6 * 4096..8 * 4096).unwrap();
                    // SAFETY: committed, and never decommitted.
                    unsafe { ((buffer.base().0 + 7 * 4096) as *mut u64).write_volatile(7) };
                }
            })
        });
        ahead.wait().unwrap();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(buffer.audit(), Ok(()));
        // SAFETY: as above.
        assert_eq!(unsafe { ((buffer.base().0 + 7 * 4096) as *const u64).read_volatile() }, 7);
        drop(buffer);
        end(&host, device, arena);
    };
    shuttle::check_random(model, 1000);
    shuttle::check_pct(model, 1000, 3);
}

#[test]
fn a_cache_grows_on_one_thread_while_another_releases_and_lowers_the_limit() {
    let model = || {
        let (host, device, arena) = small();
        let memory = ElasticOptions { name: "kv", page_bytes: 4096, ..ElasticOptions::default() };
        let options = KvOptions { planes: &[1024, 4096], blocks_most: 16, layout: KvLayout::ByPlane, memory };
        let cache = device.kv_cache(&options).unwrap();
        cache.grow_to(4).unwrap();
        let ahead = cache.grow_async(8).unwrap();
        let other = {
            let cache = Arc::clone(&cache);
            thread::spawn(move || {
                cache.release(1..3, &Fence::default()).unwrap();
                cache.set_limit(6, 1);
                cache.commit(1..3).unwrap();
            })
        };
        // The limit may be lowered first.
        assert!(ahead.wait().map_or_else(|error| error.is_out_of_memory(), |_| true));
        other.join().unwrap();
        for beyond in cache.beyond() {
            cache.release(beyond, &Fence::default()).unwrap();
        }
        let backed: u64 = cache.backed().iter().map(|range| range.end - range.start).sum();
        assert!((4..=6).contains(&backed) && cache.stats().blocks <= 6, "{backed}");
        assert_eq!(cache.audit(), Ok(()));
        drop(cache);
        end(&host, device, arena);
    };
    shuttle::check_random(model, 1000);
    shuttle::check_pct(model, 1000, 3);
}

#[test]
fn an_arena_is_paused_beside_replays_captures_and_ends() {
    let model = || {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let kept = space.allocate(6 * KIB, Stream::LEGACY).unwrap();
        let going = space.allocate(5 * KIB, Stream::LEGACY).unwrap();
        space.seal().unwrap();
        // SAFETY: a live block of the host driver with at least eight bytes.
        space.replay(Stream::LEGACY, || unsafe { (kept.0 as *mut u64).write_volatile(0x5a5a) }).unwrap();
        let mover = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let paused = arena.pause(Fence::default());
                assert!(matches!(paused, Ok(_) | Err(Error::WrongState { .. })), "{paused:?}");
                arena.resume(std::time::Duration::ZERO).unwrap();
            })
        };
        let replayer = {
            let (space, arena) = (Arc::clone(&space), Arc::clone(&arena));
            thread::spawn(move || {
                // SAFETY: as above; a launch has the memory mapped.
                let read = || unsafe { (kept.0 as *const u64).read_volatile() };
                match space.replay(stream(1), read) {
                    Ok(found) => assert_eq!(found, 0x5a5a),
                    Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
                }
                space.free(going).unwrap();
                arena
                    .pause(Fence::default())
                    .map_or_else(|_| (), |report| assert_eq!(report.complete(), Ok(())));
            })
        };
        let capturer = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let Ok(space) = arena.open_space() else { return };
                space.allocate(9 * KIB, stream(2)).unwrap();
                space.seal().unwrap();
            })
        };
        for thread in [mover, replayer, capturer] {
            thread.join().unwrap();
        }
        arena.resume(std::time::Duration::ZERO).unwrap();
        // SAFETY: as above.
        assert_eq!(unsafe { (kept.0 as *const u64).read_volatile() }, 0x5a5a);
        assert_eq!((arena.audit(), device.pool().audit_idle()), (Ok(()), Ok(())));
        drop(space);
        end(&host, device, arena);
    };
    shuttle::check_random(model, 300);
    shuttle::check_pct(model, 300, 3);
}

#[test]
fn outputs_go_beside_their_first_replay_a_pause_and_a_capture() {
    let model = || {
        let (host, device, arena) = small();
        let other = arena.open_space().unwrap();
        let passing = other.allocate(40 * KIB, stream(1)).unwrap();
        other.free(passing).unwrap();
        other.seal().unwrap();
        let space = arena.open_space().unwrap();
        let blocks = VmmTorchAllocator::new(&space);
        blocks.launch_by_replay_only(true);
        blocks.captured_on(stream(1));
        let all =
            [3, 20, 6, 5].map(|size| (blocks.allocate(size * KIB, stream(1), false).unwrap(), size * KIB));
        blocks.free(all[1].0, &[]).unwrap();
        space.seal().unwrap();
        // SAFETY: mapped memory of the host driver during a launch.
        let write = move || {
            // SAFETY: live blocks of the host driver, memory of this process.
            all.iter().for_each(|(at, bytes)| unsafe { (at.0 as *mut u8).write_bytes(7, *bytes as usize) })
        };
        let replay = {
            let space = Arc::clone(&space);
            move || {
                let replayed = space.replay(stream(1), write);
                assert!(matches!(replayed, Ok(()) | Err(Error::WrongState { .. })), "{replayed:?}");
            }
        };
        let again = replay.clone();
        let dropper = thread::spawn(move || {
            [0, 2].into_iter().for_each(|number: usize| blocks.free(all[number].0, &[stream(2)]).unwrap());
            blocks
        });
        let replayer = thread::spawn(replay);
        let beside = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                drop(arena.open_space().and_then(|space| {
                    space.allocate(9 * KIB, stream(2))?;
                    space.seal()
                }));
                drop(arena.pause(Fence::default()));
                arena.resume(std::time::Duration::ZERO).unwrap();
            })
        };
        let blocks = dropper.join().unwrap();
        replayer.join().unwrap();
        beside.join().unwrap();
        again();
        assert_eq!((arena.audit(), device.pool().audit_idle()), (Ok(()), Ok(())));
        blocks.free(all[3].0, &[]).unwrap();
        drop((space, blocks, again, other));
        end(&host, device, arena);
    };
    shuttle::check_random(model, 1000);
    shuttle::check_pct(model, 1000, 3);
}

/// Two threads end a scope while its thread allocates and a fourth one replays: each block is the
/// scope's or refused.
#[test]
fn eager_work_is_ended_by_other_threads() {
    let model = || {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let passing = space.allocate(16 * KIB, Stream::LEGACY).unwrap();
        space.free(passing).unwrap();
        space.seal().unwrap();
        let blocks = arena.eager_blocks();
        let scope = Arc::new(arena.eager_scope(stream(1)).unwrap().into_end());
        let enders: Vec<_> = (0..2)
            .map(|_| {
                let scope = Arc::clone(&scope);
                thread::spawn(move || scope.end().unwrap())
            })
            .collect();
        let replayer = {
            let space = Arc::clone(&space);
            thread::spawn(move || {
                // SAFETY: a block of the host driver; during a launch it belongs to the graph.
                let write = || unsafe { (passing.0 as *mut u64).write_volatile(99) };
                space.replay(stream(2), write).unwrap();
            })
        };
        let result = blocks.allocate(10 * KIB, stream(1), false).ok();
        if let Some(at) = result {
            // SAFETY: a live block of the host driver with at least eight bytes.
            unsafe { (at.0 as *mut u64).write_volatile(7) };
        }
        enders.into_iter().for_each(|one| one.join().unwrap());
        replayer.join().unwrap();
        if let Some(at) = result {
            // SAFETY: as above.
            assert_eq!(unsafe { (at.0 as *const u64).read_volatile() }, 7);
            blocks.free(at, &[]).unwrap();
        }
        drop(arena.eager_scope(stream(3)).unwrap());
        assert_eq!(
            (arena.eager_stats().scopes, arena.audit(), device.pool().audit_idle()),
            (2, Ok(()), Ok(()))
        );
        drop((space, scope, blocks));
        end(&host, device, arena);
    };
    shuttle::check_random(model, 300);
    shuttle::check_pct(model, 300, 3);
}

/// Prefill, replays and a capture on three threads: prefill results must remain.
#[test]
fn eager_work_runs_beside_replays_captures_and_ends() {
    let model = || {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let passing = space.allocate(16 * KIB, Stream::LEGACY).unwrap();
        space.free(passing).unwrap();
        space.seal().unwrap();
        let eager = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let mut results = Vec::new();
                for round in 1..3_u64 {
                    let scope = arena.eager_scope(stream(1)).unwrap();
                    let result = scope.allocate((10 + 4 * round) * KIB).unwrap();
                    // SAFETY: a live block of the host driver with at least eight bytes.
                    unsafe { (result.0 as *mut u64).write_volatile(round) };
                    drop(scope);
                    results.push((result, round));
                }
                results
            })
        };
        let replayer = {
            let space = Arc::clone(&space);
            thread::spawn(move || {
                for _ in 0..2 {
                    // SAFETY: as above; during a launch the memory belongs to the graph.
                    let write = || unsafe { (passing.0 as *mut u64).write_volatile(99) };
                    space.replay(stream(2), write).unwrap();
                }
            })
        };
        let capturer = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let Ok(space) = arena.open_space() else { return };
                let block = space.allocate(9 * KIB, stream(3)).unwrap();
                space.allocate(20 * KIB, stream(3)).unwrap();
                space.free(block).unwrap();
                space.allocate(14 * KIB, stream(3)).unwrap();
                space.seal().unwrap();
                // SAFETY: as above.
                let write = || unsafe { (block.0 as *mut u64).write_volatile(98) };
                space.replay(stream(3), write).unwrap();
                arena.trim().unwrap();
            })
        };
        let results = eager.join().unwrap();
        replayer.join().unwrap();
        capturer.join().unwrap();
        for (at, round) in &results {
            // SAFETY: as above.
            assert_eq!(unsafe { (at.0 as *const u64).read_volatile() }, *round);
        }
        assert_eq!((arena.audit(), device.pool().audit_idle()), (Ok(()), Ok(())));
        results.iter().for_each(|(at, _)| arena.eager_blocks().free(*at, &[]).unwrap());
        drop(space);
        end(&host, device, arena);
    };
    shuttle::check_random(model, 300);
    shuttle::check_pct(model, 300, 3);
}

struct Vacant;

impl BlockBorrower for Vacant {
    fn vacate(&self, asked: &VacateBlocks) -> vmmgraph::Result<Vacated> {
        Ok(Vacated { blocks: asked.blocks.clone(), fence: Fence::default() })
    }
}

/// A page forbidden to eager work gets a slot just chosen by eager work.
#[test]
fn eager_work_never_shows_a_page_twice_beside_a_capture() {
    let model = || {
        let (host, device, arena) = small();
        let writes = arena.open_space().unwrap();
        let output = writes.allocate(16 * KIB, stream(1)).unwrap();
        writes.seal().unwrap();
        device.note_capture();
        writes.free(output).unwrap();
        let capturer = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let space = arena.open_space().unwrap();
                for bytes in [512, 16 * KIB] {
                    space.allocate(bytes, stream(2)).unwrap();
                }
                space
            })
        };
        let scope = arena.eager_scope(stream(1)).unwrap();
        let sizes = [512; 12].into_iter().chain([16 * KIB; 2]);
        let blocks: Vec<_> =
            sizes.zip(0_u64..).map(|(bytes, number)| (scope.allocate(bytes).unwrap(), number)).collect();
        for (at, number) in &blocks {
            // SAFETY: a live block of the host driver with at least eight bytes.
            unsafe { (at.0 as *mut u64).write_volatile(*number) };
        }
        for (at, number) in blocks {
            // SAFETY: as above.
            assert_eq!(unsafe { (at.0 as *const u64).read_volatile() }, number);
            scope.free(at).unwrap();
        }
        drop(scope);
        let space = capturer.join().unwrap();
        assert_eq!(arena.audit(), Ok(()));
        drop((space, writes));
        end(&host, device, arena);
    };
    explore(model);
}

/// A cache borrows, grows, shrinks and is limited during replays with recalls: each page is owned
/// or leased, accounts add up, limits hold.
#[test]
fn blocks_are_lent_recalled_grown_and_shrunk_beside_replays() {
    let model = || {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let block = space.allocate(64 * KIB, Stream::LEGACY).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        let minute = std::time::Duration::from_secs(60);
        arena.set_recall(Some(minute));
        let memory = ElasticOptions { page_bytes: 16 * KIB, ..ElasticOptions::default() };
        let options = KvOptions { planes: &[8 * KIB], blocks_most: 12, layout: KvLayout::ByPlane, memory };
        let cache = device.kv_cache(&options).unwrap();
        let look = {
            let (device, arena, cache) = (Arc::clone(&device), Arc::clone(&arena), Arc::clone(&cache));
            move || {
                assert_eq!(device.pool().audit(), Ok(()));
                assert!(arena.lent_bytes() <= 64 * KIB);
                assert!(cache.account().stats().charged_bytes <= 6 * 16 * KIB);
            }
        };
        let lender = {
            let (arena, cache, look) = (Arc::clone(&arena), Arc::clone(&cache), look.clone());
            thread::spawn(move || {
                let vacant: Arc<dyn BlockBorrower> = Arc::new(Vacant);
                let lease = arena.lend_blocks(&cache, 0..4, &vacant).unwrap();
                look();
                // A concurrent replay may have recalled the lease.
                lease.recall_bytes(16 * KIB, minute).unwrap();
                look();
                match arena.lend_blocks(&cache, 0..2, &vacant) {
                    Ok(again) => again.recall(minute).unwrap(),
                    Err(error) => assert!(matches!(error, Error::WrongState { .. }), "{error}"),
                }
                lease.recall(minute).unwrap();
            })
        };
        let replayer = {
            let (space, look) = (Arc::clone(&space), look.clone());
            thread::spawn(move || {
                for _ in 0..2 {
                    let leases = space.replay(Stream::LEGACY, || space.leases()).unwrap();
                    assert!(leases.is_empty(), "a graph ran over pages on lease");
                    look();
                }
            })
        };
        let grower = {
            let cache = Arc::clone(&cache);
            thread::spawn(move || {
                cache.commit(6..10).unwrap();
                cache.shrink_to(8, &[], &Fence::default()).unwrap();
                cache.set_limit(8, 1);
                assert!(matches!(cache.commit(8..10), Err(Error::OverBudget { .. })), "beyond the limit");
                look();
                cache.release(6..8, &Fence::default()).unwrap();
            })
        };
        for thread in [lender, replayer, grower] {
            thread.join().unwrap();
        }
        space.replay(Stream::LEGACY, || ()).unwrap();
        cache.reap();
        assert_eq!((arena.lent_bytes(), cache.backed()), (0, vec![]));
        assert_eq!((arena.audit(), cache.audit(), device.pool().audit_idle()), (Ok(()), Ok(()), Ok(())));
        drop((space, cache));
        end(&host, device, arena);
    };
    shuttle::check_random(model, 200);
    shuttle::check_pct(model, 200, 3);
}

/// One thread lends and recalls, one recalls, one replays: no replay runs over leased pages.
#[test]
fn pages_are_lent_and_recalled_beside_replays() {
    let model = || {
        let (host, device, arena) = small();
        let space = arena.open_space().unwrap();
        let block = space.allocate(32 * KIB, Stream::LEGACY).unwrap();
        space.free(block).unwrap();
        space.seal().unwrap();
        let options = ElasticOptions { page_bytes: 16 * KIB, ..ElasticOptions::default() };
        let buffer = Arc::new(device.elastic_buffer(64 * KIB, &options).unwrap());
        let lender = {
            let (arena, buffer) = (Arc::clone(&arena), Arc::clone(&buffer));
            thread::spawn(move || {
                let idle: Arc<dyn Borrower> = Arc::new(IdleBorrower);
                let lease = arena.lend(&buffer, 0..16 * KIB, &idle).unwrap();
                lease.recall(std::time::Duration::from_secs(60)).unwrap();
                let lease = arena.lend(&buffer, 16 * KIB..32 * KIB, &idle).unwrap();
                let other = {
                    let lease = lease.clone();
                    thread::spawn(move || lease.recall(std::time::Duration::from_secs(60)).unwrap())
                };
                lease.recall(std::time::Duration::from_secs(60)).unwrap();
                other.join().unwrap();
                assert_eq!(lease.bytes(), 0);
            })
        };
        let replayer = {
            let (space, arena) = (Arc::clone(&space), Arc::clone(&arena));
            thread::spawn(move || {
                for _ in 0..2 {
                    // A launch holds the replay slot, which excludes leases.
                    match space.replay(Stream::LEGACY, || space.leases()) {
                        Ok(leases) => assert!(leases.is_empty(), "a graph ran over pages on lease"),
                        Err(error) => assert!(matches!(error, Error::Lent { .. }), "{error}"),
                    }
                }
                arena.recall_for(&space, std::time::Duration::from_secs(60)).unwrap();
            })
        };
        let eager = {
            let arena = Arc::clone(&arena);
            thread::spawn(move || {
                let scope = arena.eager_scope_of(stream(1), 16 * KIB).unwrap();
                let block = scope.allocate(16 * KIB).unwrap();
                // A leased page is available only after a concurrent recall.
                if let Ok(more) = scope.allocate(16 * KIB) {
                    assert!(
                        arena.leases().iter().all(|lease| lease.bytes() == 0),
                        "eager work has a page on lease"
                    );
                    scope.free(more).unwrap();
                }
                scope.free(block).unwrap();
            })
        };
        lender.join().unwrap();
        replayer.join().unwrap();
        eager.join().unwrap();
        space.replay(Stream::LEGACY, || ()).unwrap();
        assert_eq!((arena.audit(), buffer.audit(), device.pool().audit_idle()), (Ok(()), Ok(()), Ok(())));
        drop((space, buffer));
        end(&host, device, arena);
    };
    shuttle::check_random(model, 300);
    shuttle::check_pct(model, 300, 3);
}

#[test]
fn a_ring_is_read_while_its_sources_change_and_others_fill_it() {
    const UNIT: u64 = 4 * KIB;
    let model = || {
        let (host, device, arena) = small();
        let options = RingOptions { slots: 2, ..RingOptions::default() };
        let ring = Arc::new(device.ring(&[RingUnit::streamed(UNIT); 4], &options).unwrap());
        let buffer = device.host_buffer(4 * UNIT, Pinning::Required).unwrap();
        for unit in 0..4 {
            buffer.write(unit * UNIT, &[unit as u8; UNIT as usize]).unwrap();
            let run = HostRun { source: Arc::clone(&buffer), from: unit * UNIT, to: 0, bytes: UNIT };
            ring.set_source(unit as usize, &[run]).unwrap();
        }
        let user = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                for unit in 0..4 {
                    ring.acquire(unit, stream(1)).unwrap();
                    let at = ring.address(unit).unwrap();
                    // SAFETY: acquired, on the host driver, with synchronous copies.
                    let bytes = unsafe { std::slice::from_raw_parts(at.0 as *const u8, UNIT as usize) };
                    let before = bytes[0];
                    thread::yield_now();
                    // One version only, despite concurrent changes.
                    assert!(bytes.iter().all(|byte| *byte == before), "unit {unit} is torn");
                    assert_eq!(usize::from(before % 16), unit);
                    ring.release(unit, stream(1)).unwrap();
                }
            })
        };
        let changer = {
            let (ring, device, buffer) = (Arc::clone(&ring), Arc::clone(&device), Arc::clone(&buffer));
            thread::spawn(move || {
                buffer.write(UNIT, &[17; UNIT as usize]).unwrap();
                let other = device.host_buffer(UNIT, Pinning::Required).unwrap();
                other.write(0, &[18; UNIT as usize]).unwrap();
                ring.set_source(2, &[HostRun { source: other, from: 0, to: 0, bytes: UNIT }]).unwrap();
            })
        };
        let filler = {
            let ring = Arc::clone(&ring);
            thread::spawn(move || {
                ring.prime().unwrap();
                assert!(ring.stats().acquired <= 1);
            })
        };
        let made = device.elastic_buffer(UNIT, &ElasticOptions::default()).unwrap();
        made.commit(0..UNIT).unwrap();
        // SAFETY: committed, on the host driver.
        unsafe { device.driver().write(made.base(), &[19; UNIT as usize]) }.unwrap();
        let flusher = {
            let (buffer, at) = (Arc::clone(&buffer), made.base());
            thread::spawn(move || {
                // SAFETY: committed until the threads have ended.
                unsafe { buffer.store(3 * UNIT, at, UNIT, stream(2)) }.unwrap();
                buffer.before(stream(2)).unwrap();
                let mut found = [0; UNIT as usize];
                buffer.read(3 * UNIT, &mut found).unwrap();
                assert_eq!(found, [19; UNIT as usize]);
            })
        };
        for thread in [user, changer, filler, flusher] {
            thread.join().unwrap();
        }
        ring.acquire(3, stream(1)).unwrap();
        let mut found = [0; UNIT as usize];
        // SAFETY: acquired, on the host driver.
        unsafe { device.driver().read(ring.address(3).unwrap(), &mut found) }.unwrap();
        assert_eq!(found, [19; UNIT as usize]);
        ring.release(3, stream(1)).unwrap();
        assert_eq!(ring.audit(), Ok(()));
        drop((ring, made, buffer, arena));
        device.host_pool().trim().unwrap();
        device.trim().unwrap();
        drop(device);
        assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
    };
    shuttle::check_random(model, 100);
    shuttle::check_pct(model, 100, 3);
}

#[test]
fn captured_steps_are_launched_while_sources_change_and_eager_work_uses_the_slots() {
    const UNIT: u64 = 4 * KIB;
    let model = || {
        let options = HostOptions { granularity: 4096, memory_bytes: 1 << 30 };
        let host = Arc::new(HostDriver::new(0, options).unwrap());
        let copying = CopyingDriver::new(host.clone());
        let device = Device::with_driver(copying.clone());
        let options = RingOptions { slots: 2, ..RingOptions::default() };
        let ring = Arc::new(device.ring(&[RingUnit::streamed(UNIT); 4], &options).unwrap());
        let buffer = device.host_buffer(4 * UNIT, Pinning::Required).unwrap();
        for unit in 0..4 {
            buffer.write(unit * UNIT, &[unit as u8; UNIT as usize]).unwrap();
            let run = HostRun { source: Arc::clone(&buffer), from: unit * UNIT, to: 0, bytes: UNIT };
            ring.set_source(unit as usize, &[run]).unwrap();
        }
        let made = device.elastic_buffer(UNIT, &ElasticOptions::default()).unwrap();
        made.commit(0..UNIT).unwrap();
        // SAFETY: committed, on the host driver.
        unsafe { device.driver().write(made.base(), &[19; UNIT as usize]) }.unwrap();
        copying.begin(stream(1));
        ring.capture_begin(stream(1), &RingCaptureOptions::default()).unwrap();
        for unit in 0..4 {
            ring.acquire(unit, stream(1)).unwrap();
            ring.release(unit, stream(1)).unwrap();
        }
        let step = ring.capture_end(stream(1)).unwrap();
        let executable = copying.end();
        // Units in copy order: the first one is resident and is copied again at the end.
        let order = [1, 2, 3, 0];
        let whole = {
            let (ring, device) = (Arc::clone(&ring), Arc::clone(&device));
            move |unit: usize| {
                let mut bytes = vec![0; UNIT as usize];
                // SAFETY: mapped, on the host driver.
                unsafe { device.driver().read(ring.address(unit).unwrap(), &mut bytes) }.unwrap();
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "unit {unit} is torn");
                assert_eq!(usize::from(bytes[0] % 16), unit);
                bytes[0]
            }
        };
        let launch = {
            let (copying, whole) = (Arc::clone(&copying), whole.clone());
            move |step: &RingGraph| {
                // SAFETY: the executable of the captured step, launched by one thread at a time.
                unsafe {
                    step.launch(executable, stream(2), || {
                        let mut found = vec![whole(0)];
                        for (node, unit) in order.into_iter().enumerate() {
                            copying.copy_half(node as u64, false)?;
                            thread::yield_now();
                            copying.copy_half(node as u64, true)?;
                            found.push(whole(unit));
                        }
                        Ok::<_, Error>(found)
                    })
                }
            }
        };
        let wrong_state = |error: &Error| matches!(error, Error::WrongState { .. });
        // Without changes, the next launch skips the sources.
        launch(&step).unwrap().unwrap();
        let launcher = {
            let launch = launch.clone();
            thread::spawn(move || {
                for _ in 0..2 {
                    // Refused while a unit is acquired.
                    match launch(&step) {
                        Ok(found) => drop(found.unwrap()),
                        Err(error) => assert!(wrong_state(&error), "{error}"),
                    }
                }
                step
            })
        };
        let changer = {
            let (ring, device, buffer) = (Arc::clone(&ring), Arc::clone(&device), Arc::clone(&buffer));
            let at = made.base();
            thread::spawn(move || {
                // Refused while a launch that reads the source is being submitted.
                while let Err(error) = buffer.write(UNIT, &[17; UNIT as usize]) {
                    assert!(wrong_state(&error), "{error}");
                    thread::yield_now();
                }
                // SAFETY: committed until all threads are done.
                while let Err(error) = unsafe { buffer.store(3 * UNIT, at, UNIT, stream(4)) } {
                    assert!(wrong_state(&error), "{error}");
                    thread::yield_now();
                }
                let other = device.host_buffer(UNIT, Pinning::Required).unwrap();
                other.write(0, &[18; UNIT as usize]).unwrap();
                ring.set_source(2, &[HostRun { source: other, from: 0, to: 0, bytes: UNIT }]).unwrap();
            })
        };
        let eager = {
            let (ring, whole) = (Arc::clone(&ring), whole.clone());
            thread::spawn(move || {
                for unit in [3, 0] {
                    match ring.acquire(unit, stream(3)) {
                        Ok(()) => {
                            whole(unit);
                            ring.release(unit, stream(3)).unwrap();
                        }
                        Err(error) => assert!(wrong_state(&error), "{error}"),
                    }
                }
            })
        };
        changer.join().unwrap();
        eager.join().unwrap();
        let step = launcher.join().unwrap();
        assert_eq!(launch(&step), Ok(Ok(vec![0, 17, 18, 19, 0])));
        assert_eq!(ring.audit(), Ok(()));
        drop((step, launch, whole, ring, buffer, made));
        device.host_pool().trim().unwrap();
        device.trim().unwrap();
        drop((device, copying));
        assert_eq!((host.leftovers(), host.host_leftovers()), ([0; 4], [0; 2]));
    };
    shuttle::check_random(model, 200);
    shuttle::check_pct(model, 200, 3);
}

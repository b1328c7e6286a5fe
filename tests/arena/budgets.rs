//! Byte budgets of arenas: charged bytes, the account named in errors, and use after a refusal.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::{Limits, Owner};
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Phase, Region, RegionOptions, Result, RetainPolicy,
    SharedVmmAllocator, Stream,
};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = Stream::LEGACY;

fn device() -> (Arc<FaultyDriver>, Arc<HostDriver>, Arc<Device>) {
    let host = Arc::new(HostDriver::new(0, HostOptions::default()).unwrap());
    let faulty = FaultyDriver::new(host.clone());
    (faulty.clone(), host, Device::with_driver(faulty))
}

fn arena(device: &Arc<Device>, budget_bytes: Option<u64>) -> SharedVmmAllocator {
    let options = Options { large_page_bytes: 16 * MIB, budget_bytes, ..Options::default() };
    SharedVmmAllocator::new(device, &options).unwrap()
}

/// Checks an `OverBudget` error of an arena, or of the device for `None`: requested, held, budget.
fn refused<T: std::fmt::Debug>(result: Result<T>, whose: Option<u64>, numbers: [u64; 3]) {
    let error = result.unwrap_err();
    assert!(
        matches!(&error, Error::OverBudget { requested, held, budget, account, device: 0, space: None, .. }
        if ([*requested, *held, *budget], account) == (numbers, &whose.map(|arena| format!("arena {arena}")))),
        "{error:?}"
    );
    assert!(error.is_out_of_memory());
    let named = match whose {
        Some(arena) => format!("over the budget of arena {arena} on device 0: "),
        None => "over the budget of device 0: ".to_owned(),
    };
    assert!(error.to_string().starts_with(&named), "{error}");
}

fn counts(arena: &SharedVmmAllocator) -> (u64, u64) {
    let stats = arena.stats();
    (stats.account.charged_bytes, stats.physical_bytes)
}

#[test]
fn a_refused_capture_leaves_everything_usable_and_an_evicted_graph_makes_room() {
    let (_, host, device) = device();
    let arena = arena(&device, Some(50 * MIB));
    assert_eq!(arena.stats().account.most_bytes, Some(50 * MIB));
    let capture = |retain| {
        let space = arena.open_space()?;
        let passing = space.allocate(32 * MIB, A)?;
        let output = space.allocate(16 * MIB, A)?;
        space.free(passing)?;
        space.seal_with(retain)?;
        Ok::<_, Error>((space, output))
    };
    let (first, output) = capture(RetainPolicy::Retain).unwrap();
    assert_eq!(counts(&arena), (48 * MIB, 48 * MIB));
    let reserved = device.stats().reserved_bytes;
    refused(capture(RetainPolicy::Retain), Some(arena.id()), [16 * MIB, 48 * MIB, 50 * MIB]);
    assert_eq!(counts(&arena), (48 * MIB, 48 * MIB));
    assert_eq!((device.stats().reserved_bytes, arena.stats().spaces), (reserved, 1));
    assert_eq!(device.pool().audit_idle(), Ok(()));
    let replayed = first.replay(A, || {
        // SAFETY: a live block of the host driver.
        unsafe { (output.0 as *mut u64).write_volatile(1) };
    });
    assert_eq!(replayed, Ok(()));

    drop(first);
    let (second, _) = capture(RetainPolicy::Share).unwrap();
    assert_eq!(counts(&arena), (48 * MIB, 48 * MIB));
    drop((second, arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn what_no_space_maps_is_given_back_before_an_allocation_or_a_seal_fails() {
    let (_, _, device) = device();
    let arena = arena(&device, Some(48 * MIB));
    let hungry = || arena.open_space().unwrap().allocate(48 * MIB, A).unwrap();
    hungry();
    assert_eq!((counts(&arena).0, device.stats().free_bytes), (0, 48 * MIB));
    let space = arena.open_space().unwrap();
    space.allocate(MIB / 4, A).unwrap();
    assert_eq!(counts(&arena).0, 2 * MIB, "the free pages stayed");
    drop(space);
    arena.trim().unwrap();

    // A live-out block that covers a page in part gets small pages before the large page is free.
    hungry();
    let space = arena.open_space().unwrap();
    space.allocate(10 * MIB, A).unwrap();
    assert_eq!((counts(&arena).0, device.stats().free_bytes), (16 * MIB, 32 * MIB));
    assert_eq!(space.seal().unwrap().retained_bytes, 10 * MIB);
    assert_eq!((arena.trim(), counts(&arena)), (Ok(48 * MIB), (10 * MIB, 10 * MIB)));

    drop(space);

    hungry();
    let bump = arena.open_bump_space().unwrap();
    bump.allocate(38 * MIB, A).unwrap();
    bump.allocate(8 * MIB, A).unwrap();
    refused(bump.allocate(4 * MIB, A), Some(arena.id()), [4 * MIB, 46 * MIB, 48 * MIB]);
}

#[test]
fn a_seal_over_budget_leaves_the_space_open_and_can_be_repeated() {
    let (_, _, device) = device();
    let arena = arena(&device, Some(24 * MIB));
    let space = arena.open_space().unwrap();
    let block = space.allocate(10 * MIB, A).unwrap();
    let before = space.stats();
    refused(space.seal(), Some(arena.id()), [2 * MIB, 24 * MIB, 24 * MIB]);
    assert_eq!((space.stats(), space.stats().phase), (before, Phase::Open));
    assert_eq!(counts(&arena), (16 * MIB, 16 * MIB));
    assert_eq!(device.pool().audit_idle(), Ok(()));
    space.free(block).unwrap();
    assert_eq!(space.allocate(10 * MIB, A), Ok(block), "the open space is not what it was");
    arena.set_budget(Some(26 * MIB));
    assert_eq!(space.seal().unwrap().retained_bytes, 10 * MIB);
    // Freeing a live-out block moves its pages within the arena.
    arena.set_budget(Some(1));
    space.free(block).unwrap();
    assert_eq!((arena.stats().retained_bytes, counts(&arena)), (0, (10 * MIB, 10 * MIB)));
}

#[test]
fn a_budget_below_what_is_held_takes_nothing_away() {
    let (_, _, device) = device();
    let arena = arena(&device, None);
    assert_eq!(arena.stats().account.most_bytes, None);
    let (large, small) = (arena.open_space().unwrap(), arena.open_space().unwrap());
    large.allocate(64 * MIB, A).unwrap();
    let block = small.allocate(16 * MIB, A).unwrap();
    arena.set_budget(Some(40 * MIB));
    assert_eq!(counts(&arena), (64 * MIB, 64 * MIB));
    // Mapped pages remain usable, also for other spaces; new pages are refused.
    small.free(block).unwrap();
    assert_eq!(small.allocate(16 * MIB, A), Ok(block));
    small.allocate(48 * MIB, A).unwrap();
    refused(small.allocate(MIB / 4, A), Some(arena.id()), [2 * MIB, 64 * MIB, 40 * MIB]);
    drop(small);
    refused(large.allocate(MIB / 4, A), Some(arena.id()), [2 * MIB, 64 * MIB, 40 * MIB]);
    drop(large);
    let space = arena.open_space().unwrap();
    space.allocate(32 * MIB, A).unwrap();
    assert_eq!((arena.trim(), counts(&arena).0), (Ok(32 * MIB), 32 * MIB));
    space.allocate(8 * MIB, A).unwrap_err();
    space.allocate(MIB / 4, A).unwrap();
    arena.set_budget(None);
    space.allocate(80 * MIB, A).unwrap();
}

#[test]
fn two_arenas_and_their_device_each_have_their_own_limit() {
    let (_, _, device) = device();
    let (one, two) = (arena(&device, Some(32 * MIB)), arena(&device, None));
    let (first, second) = (one.open_space().unwrap(), two.open_space().unwrap());
    second.allocate(64 * MIB, A).unwrap();
    first.allocate(32 * MIB, A).unwrap();
    refused(first.allocate(MIB / 4, A), Some(one.id()), [2 * MIB, 32 * MIB, 32 * MIB]);
    second.allocate(MIB / 4, A).unwrap();
    assert_eq!(
        (counts(&one).0, counts(&two).0, device.stats().physical_bytes),
        (32 * MIB, 66 * MIB, 98 * MIB)
    );

    // The tighter of two limits is named; of equal ones, the device's.
    one.set_budget(Some(48 * MIB));
    device.set_budget(Some(106 * MIB));
    refused(first.allocate(16 * MIB, A), None, [16 * MIB, 98 * MIB, 106 * MIB]);
    refused(second.allocate(16 * MIB, A), None, [16 * MIB, 98 * MIB, 106 * MIB]);
    one.set_budget(Some(38 * MIB));
    refused(first.allocate(16 * MIB, A), Some(one.id()), [16 * MIB, 32 * MIB, 38 * MIB]);
    one.set_budget(Some(40 * MIB));
    refused(first.allocate(16 * MIB, A), None, [16 * MIB, 98 * MIB, 106 * MIB]);
    first.allocate(MIB / 4, A).unwrap();
    assert_eq!(counts(&one).0, 34 * MIB);

    let gone = one.id();
    drop((first, one));
    device.set_budget(None);
    let text = two.snapshot().to_string();
    assert!(!text.contains(&format!("arena {gone},")) && !text.contains("of its budget"), "{text}");
    two.set_budget(Some(70 * MIB));
    let text = two.snapshot().to_string();
    assert!(text.contains(&format!(", {} of {} bytes of its budget\n", 66 * MIB, 70 * MIB)), "{text}");
    let json = two.snapshot().to_json();
    assert!(json.contains(&format!("\"charged_bytes\":{},\"most_bytes\":{}", 66 * MIB, 70 * MIB)), "{json}");
}

#[test]
fn the_budget_holds_while_threads_race_and_others_change_it() {
    const KIB: u64 = 1 << 10;
    const BUDGET: u64 = 2048 * KIB;
    const SLACK: u64 = 1024 * KIB;
    let host = HostOptions { granularity: 4096, memory_bytes: 1 << 30 };
    let host = Arc::new(HostDriver::new(0, host).unwrap());
    let device = Device::with_driver(host.clone());
    let make = |budget_bytes| {
        let (small_page_bytes, large_page_bytes) = (16 * KIB, 128 * KIB);
        let options = Options { small_page_bytes, large_page_bytes, budget_bytes, ..Options::default() };
        SharedVmmAllocator::new(&device, &options).unwrap()
    };
    // The neighbour's memory is constant: the device's peak measures the arena.
    let (arena, neighbour) = (make(Some(BUDGET)), make(None));
    let next_door = neighbour.open_space().unwrap();
    next_door.allocate(5000 * KIB, A).unwrap();
    let beside = device.stats().physical_bytes;
    device.set_budget(Some(BUDGET + beside + SLACK));
    let [fitted, over, looks] = [0; 3].map(AtomicU64::new);
    let ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let captures: Vec<_> = (1..=6u64)
            .map(|thread| {
                let (arena, fitted, over) = (&arena, &fitted, &over);
                let looks = &looks;
                scope.spawn(move || {
                    // Runs until the checks have seen enough, even with few concurrent threads.
                    let enough = || looks.load(Relaxed) >= 20 && over.load(Relaxed) > 20;
                    for round in (0..).take_while(|round| *round < 150 || *round < 5000 && !enough()) {
                        let space = arena.open_space().unwrap();
                        let mut kept: Vec<Address> = Vec::new();
                        let result = (0..4).try_for_each(|n| {
                            let bytes = (thread * 37 + round * 101 + n * 71) % 300 * KIB + 700;
                            kept.push(space.allocate(bytes, stream(thread))?);
                            std::thread::yield_now();
                            if n % 2 == 0 { space.free(kept.swap_remove(0)) } else { Ok(()) }
                        });
                        match result.and_then(|()| space.seal()) {
                            Ok(_) => fitted.fetch_add(1, Relaxed),
                            Err(Error::OverBudget { account: Some(named), .. })
                                if named == format!("arena {}", arena.id()) =>
                            {
                                over.fetch_add(1, Relaxed)
                            }
                            Err(error) => panic!("{error}"),
                        };
                        if round % 16 == 0 {
                            arena.trim().unwrap();
                        }
                    }
                })
            })
            .collect();
        let (arena, ended, device, looks) = (&arena, &ended, &device, &looks);
        let watching = scope.spawn(move || {
            while !ended.load(Relaxed) {
                let of_arena = device.pool().owned_pages().into_iter().filter(|held| match held.owner {
                    Owner::Shared { arena: of } | Owner::Retained { arena: of, .. } => of == arena.id(),
                    _ => false,
                });
                assert!(of_arena.map(|held| held.bytes).sum::<u64>() <= BUDGET);
                assert!(arena.stats().account.charged_bytes <= BUDGET);
                assert_eq!(device.pool().audit(), Ok(()));
                arena.set_budget(Some(BUDGET - looks.fetch_add(1, Relaxed) % 3 * 256 * KIB));
            }
        });
        let captured: Vec<_> = captures.into_iter().map(|thread| thread.join()).collect();
        ended.store(true, Relaxed);
        watching.join().unwrap();
        captured.into_iter().for_each(|result| result.unwrap());
    });
    assert!(device.stats().peak_physical_bytes <= BUDGET + beside + SLACK);
    let (fitted, over) = (fitted.into_inner(), over.into_inner());
    assert!(fitted > 20 && over > 20, "{fitted} captures fitted, {over} were over budget");
    drop(next_door);
    for arena in [&arena, &neighbour] {
        arena.trim().unwrap();
    }
    assert_eq!((counts(&arena), device.stats().physical_bytes), ((0, 0), 0));
    drop((arena, neighbour, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn an_account_is_of_one_device() {
    let (_, _, device) = device();
    let (_, _, other) = self::device();
    let (least, none) = (Limits { most: None, least: MIB }, Limits::default());
    let tenant = device.account("tenant", None, none).unwrap();
    let refused =
        |result: Result<()>| assert!(matches!(result, Err(Error::InvalidArgument { .. })), "{result:?}");
    refused(other.account("model", Some(&tenant), least).map(drop));
    refused(SharedVmmAllocator::in_account(&other, &Options::default(), Some(&tenant)).map(drop));
    refused(Region::in_account(&other, "weights", RegionOptions::default(), Some(&tenant)).map(drop));
    device.account("model", Some(&tenant), least).unwrap();
    assert_eq!(tenant.stats().charged_bytes, 0, "the least goes with its account");
}

#[test]
fn leasts_beyond_all_addresses_overflow_no_sum() {
    let (_, _, device) = device();
    let endless = Limits { most: None, least: u64::MAX };
    let tenant = device.account("tenant", None, Limits::default()).unwrap();
    let models = [0; 3].map(|_| device.account("model", Some(&tenant), endless).unwrap());
    let least = models[0].stats().least_bytes;
    assert_eq!(tenant.stats().charged_bytes, 3 * least);
    let options = Options { least_bytes: u64::MAX, ..Options::default() };
    let arena = SharedVmmAllocator::in_account(&device, &options, Some(&models[0])).unwrap();
    arena.open_space().unwrap().allocate(MIB, A).unwrap();
    assert_eq!(tenant.stats().charged_bytes, 3 * least);
    models.iter().for_each(|model| model.set_limits(endless));
    device.set_budget(Some(64 * MIB));
    assert!(device.account("model", Some(&tenant), endless).is_err());
    drop((arena, models));
    assert_eq!(tenant.stats().charged_bytes, 0);
}

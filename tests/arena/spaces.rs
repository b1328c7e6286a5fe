//! Spaces on the host driver with real contents: sharing, live-out blocks, refusals, capacity.

use std::sync::Arc;

use vmmgraph::driver::HostDriver;
use vmmgraph::pages::Owner;
use vmmgraph::{
    Address, Device, Error, HostOptions, Options, Phase, RetainPolicy, SharedVmmAllocator, Space, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{Bench, MIB, child, stream};

const A: Stream = Stream::LEGACY;
const B: Stream = stream(1);

fn device(options: HostOptions) -> (Arc<HostDriver>, Arc<Device>) {
    let host = Arc::new(HostDriver::new(0, options).unwrap());
    (host.clone(), Device::with_driver(host))
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    let options = Options { large_page_bytes: 16 * MIB, ..Options::default() };
    SharedVmmAllocator::new(device, &options).unwrap()
}

fn poke(at: Address, value: u64) {
    // SAFETY: tests pass live blocks of the host driver, memory of this process.
    unsafe { (at.0 as *mut u64).write_volatile(value) };
}

fn peek(at: Address) -> u64 {
    // SAFETY: as in `poke`.
    unsafe { (at.0 as *const u64).read_volatile() }
}

#[test]
fn two_spaces_show_the_same_page_and_a_retained_block_leaves_it() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let open = || {
        let space = arena.open_space().unwrap();
        let passing = space.allocate(48 * MIB, A).unwrap();
        space.free(passing).unwrap();
        (space, passing)
    };
    let ((first, in_first), (second, in_second)) = (open(), open());
    assert_ne!(in_first, in_second);
    poke(in_first, 1);
    assert_eq!(peek(in_second), 1, "the spaces share no page");

    let kept = first.allocate(48 * MIB, A).unwrap();
    let shared = second.allocate(48 * MIB, A).unwrap();
    let report = first.seal().unwrap();
    assert_eq!(report.retained.len(), 1);
    assert_eq!((report.retained[0].address, report.retained[0].bytes), (kept.0, 48 * MIB));
    assert_eq!(second.seal_with(RetainPolicy::Share).unwrap().retained_bytes, 0);
    poke(kept, 2);
    poke(shared, 3);
    assert_eq!((peek(kept), peek(shared)), (2, 3), "a retained block shares memory");

    let before = device.stats().physical_bytes;
    first.free(kept).unwrap();
    assert_eq!(first.free(kept), Err(Error::DoubleFree { address: kept }));
    assert_eq!(first.stats().retained_bytes, 0);
    let third = arena.open_space().unwrap();
    let a = third.allocate(48 * MIB, A).unwrap();
    let b = third.allocate(48 * MIB, A).unwrap();
    assert_eq!(device.stats().physical_bytes, before, "the freed pages were not used again");
    poke(kept, 4);
    let pages = [a, b].into_iter().flat_map(|block| (0..3).map(move |page| block.plus(page * 16 * MIB)));
    assert!(pages.into_iter().any(|at| peek(at) == 4), "the first space lost its page");
}

#[test]
fn a_retained_block_costs_what_it_covers() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    // Captured on a large page; live-out on 5 small pages.
    let sizes = [10 * MIB, 4000, 16 * MIB];
    let expected = [10 * MIB, 2 * MIB, 16 * MIB];
    for (bytes, own) in sizes.into_iter().zip(expected) {
        let space = arena.open_space().unwrap();
        let block = space.allocate(bytes, A).unwrap();
        assert_eq!(space.seal().unwrap().retained_bytes, own);
        poke(block.plus(bytes - 8), 7);
        assert_eq!(peek(block.plus(bytes - 8)), 7);
        assert_eq!(device.stats().retained_bytes, own);
    }
}

#[test]
fn blocks_of_two_streams_never_share_a_page_in_one_space() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let a = space.allocate(MIB, A).unwrap();
    space.free(a).unwrap();
    let b = space.allocate(MIB, B).unwrap();
    poke(a, 1);
    poke(b, 2);
    assert_eq!(peek(a), 1);
    space.record_stream(b, A).unwrap();
    space.free(b).unwrap();
    let again = space.allocate(MIB, B).unwrap();
    poke(again, 3);
    assert_eq!(peek(b), 2);
    assert_eq!(space.seal().unwrap().retained.len(), 1);
}

/// The caller saw the join of both streams in the captured graph.
#[test]
fn a_parked_block_is_used_again_once_its_streams_are_joined() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let blocks = VmmTorchAllocator::new(&space);
    let block = blocks.allocate(3 * MIB, B, false).unwrap();
    assert_eq!(blocks.record_stream(block, B), Ok(None));
    assert_eq!(blocks.record_stream(block, A), Ok(Some(B)));
    assert_eq!(blocks.free_parked(block), Err(Error::DoubleFree { address: block }), "it is alive");
    blocks.free(block, &[]).unwrap();
    let beside = blocks.allocate(3 * MIB, B, false).unwrap();
    assert_ne!(beside, block);
    assert_eq!(space.stats().blocks, 2);
    blocks.free_parked(block).unwrap();
    assert_eq!(blocks.free_parked(block), Err(Error::DoubleFree { address: block }));
    assert_eq!((space.stats().blocks, arena.stats().blocks), (1, 1));
    assert_eq!(blocks.allocate(3 * MIB, B, false), Ok(block));
    assert_eq!(blocks.record_stream(block, A), Ok(Some(B)));
    blocks.free(block, &[]).unwrap();
    assert_eq!(space.seal().unwrap().retained.len(), 1);
    assert_eq!(blocks.free_parked(block), Ok(()));
    assert_eq!(arena.audit(), Ok(()));
}

#[test]
fn what_is_not_a_block_is_refused_and_changes_nothing() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let (space, other) = (arena.open_space().unwrap(), arena.open_space().unwrap());
    let block = space.allocate(3 * MIB, A).unwrap();
    for address in [Address(0), Address(1), Address(u64::MAX), block.plus(512), block.plus(2 * MIB)] {
        assert_eq!(space.free(address), Err(Error::ForeignPointer { address }));
        assert_eq!(space.record_stream(address, B), Err(Error::ForeignPointer { address }));
        assert_eq!(arena.deallocate(address), Err(Error::ForeignPointer { address }));
    }
    assert_eq!(other.free(block), Err(Error::ForeignPointer { address: block }));
    for bytes in [0, 1 << 63, u64::MAX] {
        assert!(matches!(space.allocate(bytes, A), Err(Error::InvalidSize { bytes: b, .. }) if b == bytes));
    }
    assert!(matches!(
        space.allocate(1 << 46, A),
        Err(Error::OutOfAddresses { .. } | Error::OutOfMemory { .. })
    ));
    assert_eq!(space.stats().blocks, 1);
    space.free(block).unwrap();
    assert_eq!(space.free(block), Err(Error::DoubleFree { address: block }));
}

#[test]
fn out_of_memory_and_over_budget_leave_everything_usable() {
    let (_, device) = device(HostOptions { memory_bytes: 64 * MIB, ..HostOptions::default() });
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let block = space.allocate(48 * MIB, A).unwrap();
    let before = (device.stats(), space.stats());
    let refused = space.allocate(32 * MIB, A);
    assert!(
        matches!(refused, Err(Error::OutOfMemory { requested, free, total, device: 0, space: None })
        if (requested, free, total) == (16 * MIB, 0, 64 * MIB)),
        "{refused:?}"
    );
    let after = device.stats();
    assert_eq!((after.physical_bytes, after.mappings), (before.0.physical_bytes, before.0.mappings));
    assert_eq!((space.stats().blocks, space.stats().mapped_bytes), (1, before.1.mapped_bytes));
    space.free(block).unwrap();
    assert_eq!(space.allocate(48 * MIB, A), Ok(block));

    device.set_budget(Some(50 * MIB));
    let refused = space.allocate(16 * MIB, A);
    assert!(
        matches!(refused, Err(Error::OverBudget { requested, held, budget, .. })
        if (requested, held, budget) == (16 * MIB, 48 * MIB, 50 * MIB)),
        "{refused:?}"
    );
    device.set_budget(None);
    space.allocate(16 * MIB, A).unwrap();
}

#[test]
fn pages_that_nobody_maps_are_given_back_before_an_allocation_fails() {
    let (_, device) = device(HostOptions { memory_bytes: 64 * MIB, ..HostOptions::default() });
    let arena = arena(&device);
    let large = arena.open_space().unwrap();
    large.allocate(64 * MIB, A).unwrap();
    drop(large);
    assert_eq!(device.stats().free_bytes, 64 * MIB);
    let small = arena.open_space().unwrap();
    small.allocate(MIB / 4, A).unwrap();
    assert_eq!(device.stats().physical_bytes, 50 * MIB);
}

#[test]
fn ten_thousand_spaces_are_open_at_once() {
    let (host, device) = device(HostOptions::default());
    let arena = arena(&device);
    let spaces: Vec<Arc<Space>> = (0..10_000)
        .map(|_| {
            let space = arena.open_space().unwrap();
            for bytes in [1000, 3 * MIB] {
                let block = space.allocate(bytes, A).unwrap();
                poke(block, bytes);
                space.free(block).unwrap();
            }
            space
        })
        .collect();
    let stats = arena.stats();
    assert_eq!(stats.spaces, 10_000);
    assert_eq!(
        stats.physical_bytes,
        18 * MIB,
        "each needs a small and a large page, and they are the same two"
    );
    assert!(stats.reserved_bytes < 1 << 46, "{} bytes of addresses", stats.reserved_bytes);
    drop((spaces, arena));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn spaces_of_many_threads_grow_one_arena() {
    let (host, device) = device(HostOptions::default());
    let arena = arena(&device);
    std::thread::scope(|scope| {
        for thread in 0..8u64 {
            let arena = &arena;
            scope.spawn(move || {
                for round in 0..20 {
                    let space = arena.open_space().unwrap();
                    let blocks: Vec<_> = (1..=6)
                        .map(|n| space.allocate((n * 3 + thread + round) * MIB / 2, A).unwrap())
                        .collect();
                    for block in &blocks[1..] {
                        space.free(*block).unwrap();
                    }
                    let report = space.seal().unwrap();
                    assert_eq!(report.retained.len(), 1);
                    poke(blocks[0], thread << 32 | round);
                    assert_eq!(space.replay(stream(thread), || peek(blocks[0])), Ok(thread << 32 | round));
                    if round % 5 == 0 {
                        arena.trim().unwrap();
                    }
                    let _ = arena.snapshot().to_json();
                }
            });
        }
    });
    assert_eq!(device.stats().retained_bytes, 0);
    arena.trim().unwrap();
    assert_eq!(device.stats().physical_bytes, 0);
    drop((arena, device));
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn spaces_outlive_their_arena() {
    let (host, device) = device(HostOptions::default());
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let block = space.allocate(20 * MIB, A).unwrap();
    drop((arena, device));
    poke(block, 5);
    space.allocate(MIB, A).unwrap();
    space.seal().unwrap();
    assert_eq!(space.replay(A, || peek(block)), Ok(5));
    drop(space);
    assert_eq!(host.leftovers(), [0; 4]);
}

#[test]
fn other_page_sizes_and_granularities_work() {
    for (granularity, small, large) in
        [(4096, 0, 0), (4096, 8192, 8192), (65536, 65536, 1 << 20), (1 << 24, 0, 0)]
    {
        let (_, device) = device(HostOptions { granularity, ..HostOptions::default() });
        let options = Options { small_page_bytes: small, large_page_bytes: large, ..Options::default() };
        let arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let space = arena.open_space().unwrap();
        for bytes in [100, 5000, 70_000, 3 * MIB] {
            let block = space.allocate(bytes, A).unwrap();
            poke(block.plus((bytes - 8) & !7), bytes);
            space.free(block).unwrap();
        }
        space.seal().unwrap();
    }
    let (_, device) = device(HostOptions { granularity: 2 * MIB, ..HostOptions::default() });
    let options = Options { small_page_bytes: MIB, ..Options::default() };
    assert!(
        matches!(SharedVmmAllocator::new(&device, &options), Err(Error::InvalidPageSize { bytes, .. }) if bytes == MIB)
    );
}

#[test]
fn a_snapshot_says_who_holds_what() {
    let (_, device) = device(HostOptions::default());
    let arenas = [arena(&device), arena(&device)];
    let spaces = arenas.each_ref().map(|arena| arena.open_space().unwrap());
    let passing = spaces[0].allocate(40 * MIB, A).unwrap();
    spaces[0].allocate(700, A).unwrap();
    spaces[0].free(passing).unwrap();
    spaces[0].seal().unwrap();
    spaces[1].allocate(2 * MIB, A).unwrap();

    let snapshot = arenas[0].snapshot();
    let held: Vec<_> =
        snapshot.owners.iter().map(|held| (held.owner, held.pages, held.bytes, held.mappings)).collect();
    let ids = [arenas[0].id(), arenas[1].id()];
    let retained = Owner::Retained { arena: ids[0], space: spaces[0].id() };
    let mut expected = vec![
        (Owner::Shared { arena: ids[0] }, 3, 48 * MIB, 3),
        (Owner::Shared { arena: ids[1] }, 1, 16 * MIB, 1),
        (retained, 1, 2 * MIB, 1),
    ];
    expected.sort_unstable();
    assert_eq!(held, expected);
    let all: u64 = snapshot.owners.iter().map(|held| held.bytes).sum();
    assert_eq!(all, snapshot.pool.physical_bytes);
    let text = snapshot.to_string();
    let line =
        format!("arena {}, space {}, retained: 2097152 bytes in 1 pages, 1 mappings", ids[0], spaces[0].id());
    assert!(text.contains(&line) && text.contains("(Sealed): 1 blocks of 1024 bytes"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&snapshot.to_json()).unwrap();
    let kinds: Vec<_> =
        json["holders"].as_array().unwrap().iter().map(|held| &held["holder"]["kind"]).collect();
    assert_eq!(kinds, ["shared", "shared", "retained"]);
}

#[test]
fn a_retained_block_that_a_second_stream_uses_can_be_freed() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let [large, packed] = [20 * MIB, 700].map(|bytes| space.allocate(bytes, A).unwrap());
    space.seal().unwrap();
    for block in [large, packed] {
        space.record_stream(block, B).unwrap();
        space.free(block).unwrap();
        assert!(matches!(space.free(block), Err(Error::DoubleFree { .. })));
        assert!(matches!(space.record_stream(block, B), Err(Error::DoubleFree { .. })));
    }
    let stats = space.stats();
    assert_eq!((stats.blocks, stats.live_bytes, stats.retained_bytes), (0, 0, 0));
}

fn in_a_child(test: &str) -> std::process::Output {
    child!(test).env("VMMGRAPH_TEST_CHILD", "1").output().unwrap()
}

fn is_child() -> bool {
    std::env::var_os("VMMGRAPH_TEST_CHILD").is_some()
}

#[test]
fn a_dropped_space_is_really_unmapped() {
    if is_child() {
        let (_, device) = device(HostOptions::default());
        let arena = arena(&device);
        let space = arena.open_space().unwrap();
        let block = space.allocate(MIB, A).unwrap();
        poke(block, 1);
        println!("written");
        drop(space);
        poke(block, 2);
        println!("still mapped");
        return;
    }
    let output = in_a_child("a_dropped_space_is_really_unmapped");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("written") && !text.contains("still mapped") && !output.status.success(), "{text}");
}

#[test]
fn running_out_of_descriptors_is_its_own_error() {
    if is_child() {
        use rustix::process::{Resource, Rlimit, setrlimit};
        setrlimit(Resource::Nofile, Rlimit { current: Some(40), maximum: Some(40) }).unwrap();
        let (_, device) = device(HostOptions::default());
        let options = Options { large_page_bytes: 2 * MIB, ..Options::default() };
        let arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let space = arena.open_space().unwrap();
        let expected = Error::OutOfDescriptors { requested: 2 * MIB, limit: 40, device: 0 };
        assert_eq!(space.allocate(100 * MIB, A), Err(expected));
        assert_eq!(device.stats().pages, 0);
        space.allocate(20 * MIB, A).unwrap();
        println!("went on");
        return;
    }
    let output = in_a_child("running_out_of_descriptors_is_its_own_error");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        text.contains("went on") && output.status.success(),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[test]
fn a_retained_block_among_freed_ones_costs_its_own_bytes_and_what_is_around_it_stays_shared() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    // Three blocks on one large page, [0, 9) MiB; the middle one is live-out.
    let capture = || {
        let space = arena.open_space().unwrap();
        let blocks: Vec<_> = (0..3).map(|_| space.allocate(3 * MIB, A).unwrap()).collect();
        assert!(blocks.windows(2).all(|pair| pair[0].0 + 3 * MIB == pair[1].0), "{blocks:?}");
        space.free(blocks[0]).unwrap();
        space.free(blocks[2]).unwrap();
        let report = space.seal().unwrap();
        // [3, 6) MiB on two private small pages, the rest of [0, 10) on three shared ones.
        assert_eq!((report.retained_bytes, report.small_pages), (4 * MIB, 3));
        (space, blocks)
    };
    let captured: Vec<_> = (0..4).map(|_| capture()).collect();
    assert_eq!(device.stats().retained_bytes, 4 * 4 * MIB);
    assert_eq!(arena.stats().shared_pages, 3);
    for (value, (_, blocks)) in (0..).zip(&captured) {
        blocks.iter().for_each(|block| poke(*block, value));
    }
    for (value, (_, blocks)) in (0..).zip(&captured) {
        assert_eq!(peek(blocks[1]), value, "a kept output was overwritten");
        assert_eq!(peek(blocks[0]), 3, "what passes is not shared");
    }
    captured[0].0.free(captured[0].1[1]).unwrap();
    assert_eq!(device.stats().retained_bytes, 3 * 4 * MIB);
}

#[test]
fn a_seal_reports_every_driver_call_of_its_space() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let first = arena.open_space().unwrap();
    // One range of each kind, a small page, three large ones.
    first.allocate(1000, A).unwrap();
    let block = first.allocate(40 * MIB, A).unwrap();
    first.free(block).unwrap();
    let report = first.seal_with(RetainPolicy::Share).unwrap();
    assert_eq!((report.driver_calls, report.maps), (2 + 4 + 2 * 4, 4));
    assert!(!report.driver_time.is_zero());
    // The second space maps existing pages; its block moves: one create, one unmap, one map.
    let second = arena.open_space().unwrap();
    second.allocate(1000, A).unwrap();
    let report = second.seal().unwrap();
    assert_eq!((report.driver_calls, report.maps), (1 + 2 + 1 + 1 + 2, 2));
    let stats = device.stats();
    let made = stats.maps * 2 + stats.unmaps + stats.pages_created + stats.reservations;
    assert_eq!(made, 14 + 7, "the device counted other calls");
}

#[test]
fn bump_spaces_share_one_tape_that_is_as_long_as_the_longest_of_them() {
    // Torch's segments: 2 and 20 MiB; larger ones are rounded up to 2 MiB.
    let sizes = |seed: u64, count: u64| {
        (0..count).map(move |n| match (n * 7 + seed * 13) % 5 {
            0 | 1 => 2 * MIB,
            2 | 3 => 20 * MIB,
            more => (10 + more * (seed % 30)) / 2 * 2 * MIB,
        })
    };
    let (_, device) = device(HostOptions::default());
    for reverse in [false, true] {
        let arena = arena(&device);
        let mut order: Vec<u64> = (1..30).collect();
        if reverse {
            order.reverse();
        }
        let mut longest = 0;
        let mut spaces = Vec::new();
        for seed in order {
            let space = arena.open_bump_space().unwrap();
            let blocks: Vec<_> = sizes(seed, 3 * seed)
                .map(|bytes| {
                    let block = space.allocate(bytes, A).unwrap();
                    poke(block, 1);
                    poke(block.plus(bytes - 8), block.0);
                    (block, bytes)
                })
                .collect();
            assert!(blocks.iter().all(|(block, bytes)| peek(block.plus(bytes - 8)) == block.0));
            longest = longest.max(sizes(seed, 3 * seed).sum::<u64>());
            space.free(blocks[0].0).unwrap();
            assert_eq!(space.free(blocks[0].0), Err(Error::DoubleFree { address: blocks[0].0 }));
            assert_eq!(
                space.free(blocks[0].0.plus(512)),
                Err(Error::ForeignPointer { address: blocks[0].0.plus(512) })
            );
            let another = space.allocate(blocks[0].1, A).unwrap();
            assert!(blocks.iter().all(|(block, _)| *block != another));
            longest = longest.max(sizes(seed, 3 * seed).sum::<u64>() + blocks[0].1);
            assert!(matches!(
                space.seal_with(RetainPolicy::Retain),
                Err(Error::InvalidArgument { what: "the retain policy", .. })
            ));
            let report = space.seal().unwrap();
            assert_eq!((report.retained_bytes, report.retained.len()), (0, blocks.len()));
            spaces.push((space, blocks));
        }
        poke(spaces[0].1[0].0, 77);
        assert!(spaces.iter().all(|(_, blocks)| peek(blocks[0].0) == 77));
        // The last page may exceed the need by less than a sixteenth of the tape and half a large
        // page.
        let held = arena.mapped_size();
        assert!((longest..longest + (longest / 16).min(8 * MIB)).contains(&held), "{held} for {longest}");
        let stats = device.stats();
        let blocks: usize = spaces.iter().map(|(_, blocks)| blocks.len() + 1).sum();
        println!("{} maps for {blocks} blocks", stats.maps);
        spaces.sort_by_key(|(space, _)| space.stats().mapped_bytes);
        let next = spaces[spaces.len() - 2].0.stats().mapped_bytes;
        spaces.pop();
        assert_eq!(arena.trim().unwrap(), held - arena.mapped_size());
        assert!(arena.mapped_size() <= next);
        drop(spaces);
        arena.trim().unwrap();
        assert_eq!(arena.mapped_size(), 0);
    }
}

#[test]
fn the_layout_hash_tells_captures_apart_and_is_the_same_for_the_same_requests() {
    let capture = |arena: &SharedVmmAllocator, sizes: &[u64], keep: bool| {
        let space = arena.open_space().unwrap();
        let blocks: Vec<_> = sizes.iter().map(|bytes| space.allocate(*bytes, A).unwrap()).collect();
        if !keep {
            blocks.into_iter().for_each(|block| space.free(block).unwrap());
        }
        (space.seal().unwrap().layout_hash, space)
    };
    let sizes = [24 * MIB, 4096, 3 * MIB, 24 * MIB];
    let (_, device) = device(HostOptions::default());
    let (one, other) = (arena(&device), arena(&device));
    let (hash, _space) = capture(&one, &sizes, false);
    let (_, _before) = capture(&other, &[64 * MIB, 512], true);
    assert_eq!(capture(&other, &sizes, false).0, hash);
    for different in [&sizes[1..], &[24 * MIB, 4096, 3 * MIB, 40 * MIB], &[4096, 24 * MIB, 3 * MIB, 24 * MIB]]
    {
        assert_ne!(capture(&one, different, false).0, hash, "{different:?}");
    }
    let retained = capture(&one, &sizes, true).0;
    assert_ne!(retained, hash);
    let options = Options { retain: RetainPolicy::Share, ..Options::default() };
    let sharing = SharedVmmAllocator::new(&device, &options).unwrap();
    assert!(![retained, hash].contains(&capture(&sharing, &sizes, true).0));
    // Other page sizes have other boundaries, even if blocks are at the same places.
    let options = Options { large_page_bytes: 32 * MIB, ..Options::default() };
    let larger = SharedVmmAllocator::new(&device, &options).unwrap();
    assert_ne!(capture(&larger, &[4096], false).0, capture(&one, &[4096], false).0);
}

#[test]
fn the_layout_hash_tells_pages_apart_that_show_at_the_same_places() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    // The last block has new addresses each time, over the first block's pages or new ones.
    let capture = |first: Stream, second: Stream, early: bool| {
        let space = arena.open_space().unwrap();
        let one = space.allocate(32 * MIB, first).unwrap();
        let between = space.allocate(16 * MIB, first).unwrap();
        if early {
            space.free(one).unwrap();
        }
        let two = space.allocate(48 * MIB, second).unwrap();
        assert_eq!(two.0 - one.0, 48 * MIB);
        if !early {
            space.free(one).unwrap();
        }
        for block in [between, two] {
            space.free(block).unwrap();
        }
        let report = space.seal().unwrap();
        (report.layout_hash, report.large_pages)
    };
    let reused = capture(A, A, true);
    let apart = capture(A, A, false);
    assert_eq!((reused.1, apart.1), (4, 6));
    assert_ne!(reused.0, apart.0);
    // Streams never share pages; handle values do not matter.
    assert_eq!(capture(A, B, true), apart);
    assert_eq!(capture(B, A, true), apart);
    assert_eq!(capture(B, B, true), reused);
}

#[test]
fn a_seal_in_place_exchanges_no_page() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let open = || {
        let space = arena.open_space().unwrap();
        let retained = space.allocate(4 * MIB, A).unwrap();
        space.free(space.allocate(8 * MIB, A).unwrap()).unwrap();
        (space, retained)
    };
    let (alone, kept) = open();
    let before = device.stats();
    let report = alone.seal_with(RetainPolicy::InPlace).unwrap();
    assert_eq!((report.retained_bytes, report.retained.len()), (16 * MIB, 1));
    let after = device.stats();
    assert_eq!((before.maps, before.unmaps, before.pages), (after.maps, after.unmaps, after.pages));
    poke(kept, 7);

    let (first, _first) = open();
    let (second, block) = open();
    let refused = second.seal_with(RetainPolicy::InPlace);
    assert!(
        matches!(refused, Err(Error::WrongState { ref sentence }) if sentence.contains("cannot seal in place")),
        "{refused:?}"
    );
    assert_eq!(second.phase(), Phase::Open);
    poke(block, 9);
    second.free(block).unwrap();
    second.seal_with(RetainPolicy::InPlace).unwrap();
    drop(first);
    assert_eq!(peek(kept), 7);
    arena.audit().unwrap();
}

/// A block used by a second stream is parked until the seal, which an abandoned capture never
/// reaches.
#[test]
fn blocks_of_an_abandoned_capture_count_no_longer_than_it() {
    let (_, device) = device(HostOptions::default());
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    let tensors = VmmTorchAllocator::new(&space);
    let [parked, stays] = [3 * MIB, 5 * MIB].map(|bytes| space.allocate(bytes, A).unwrap());
    space.record_stream(parked, B).unwrap();
    space.free(parked).unwrap();
    assert_eq!((arena.stats().blocks, arena.stats().live_bytes), (2, 8 * MIB));
    drop(space);
    assert_eq!((arena.stats().blocks, arena.stats().live_bytes), (1, 5 * MIB));
    tensors.free(stays, &[]).unwrap();
    assert_eq!((arena.stats().blocks, arena.stats().live_bytes), (0, 0));
    drop(tensors);
    assert_eq!((arena.stats().blocks, arena.stats().live_bytes), (0, 0));
}

/// More than the device has is refused before a page is planned: the list of its pages alone would
/// be long.
#[test]
fn a_block_that_the_device_cannot_have_costs_no_driver_call() {
    let bench = Bench::new(Stream::LEGACY);
    let space = bench.arena.open_space().unwrap();
    for bytes in [1 << 44, (1 << 46) - 512] {
        let calls = ["create", "reserve", "map"].map(|name| bench.faulty.count(name));
        let refused = space.allocate(bytes, Stream::LEGACY);
        assert!(
            matches!(refused, Err(Error::OutOfMemory { requested, .. }) if requested == bytes),
            "{refused:?}"
        );
        assert_eq!(["create", "reserve", "map"].map(|name| bench.faulty.count(name)), calls);
    }
    drop(space);
    bench.end();
}

/// Bytes of a kept block are nobody else's while the driver cannot say whether its last user is
/// done.
#[test]
fn a_kept_block_is_not_used_again_while_the_driver_cannot_be_asked() {
    let bench = Bench::new(Stream::LEGACY);
    let space = bench.arena.open_space().unwrap();
    let kept = [0; 2].map(|_| space.allocate_kept(4096, Stream::LEGACY).unwrap());
    space.seal().unwrap();
    // The second one is a tensor's, and its page stays.
    let tensors = VmmTorchAllocator::new(&space);
    space.replay(Stream::LEGACY, || ()).unwrap();
    bench.faulty.set_busy(true);
    space.free(kept[0]).unwrap();
    drop(space);
    bench.faulty.refuse("event_query", true);
    let other = bench.arena.open_space().unwrap();
    let next = other.allocate_kept(4096, Stream::LEGACY);
    assert_ne!(next, Ok(kept[0]), "bytes that a replay may use");
    bench.faulty.refuse("event_query", false);
    bench.faulty.set_busy(false);
    tensors.free(kept[1], &[]).unwrap();
    drop((tensors, other));
    bench.end();
}

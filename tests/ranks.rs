//! Ranks compare their replays: results, and no hangs.

use std::sync::{Arc, Barrier, Mutex};

use vmmgraph::driver::HostDriver;
use vmmgraph::{Agreement, Device, Error, HostOptions, Options, Result, SharedVmmAllocator, Space, Stream};
use vmmgraph_testkit::{FaultyDriver, MIB, stream};

const A: Stream = stream(0xa0);
const B: Stream = stream(0xb0);
const DIGEST_BYTES: usize = SharedVmmAllocator::digest_bytes();

struct Group {
    ranks: usize,
    all: Mutex<Vec<u8>>,
    meet: Barrier,
}

impl Group {
    fn gather(&self, rank: usize, mine: &[u8], all: &mut [u8]) {
        assert_eq!((mine.len(), all.len()), (DIGEST_BYTES, self.ranks * DIGEST_BYTES));
        self.all.lock().unwrap()[rank * DIGEST_BYTES..][..DIGEST_BYTES].copy_from_slice(mine);
        self.meet.wait();
        all.copy_from_slice(&self.all.lock().unwrap());
        self.meet.wait();
    }
}

struct Rank<'a> {
    rank: u32,
    group: &'a Group,
    arena: SharedVmmAllocator,
    shapes: Vec<Arc<Space>>,
}

impl Rank<'_> {
    fn replay(&self, shape: usize) -> Result<()> {
        self.shapes[shape].replay(A, || ())
    }

    fn gather(&self) -> impl FnOnce(&[u8], &mut [u8]) -> Result<()> {
        |mine, all| {
            self.group.gather(self.rank as usize, mine, all);
            Ok(())
        }
    }

    fn compare(&self) -> Result<Agreement> {
        self.arena.compare_order(self.rank, self.group.ranks as u32, self.gather())
    }

    fn agree_on(&self, next: u64) -> Result<Agreement> {
        self.arena.agree_on(next, self.rank, self.group.ranks as u32, self.gather())
    }
}

fn arena_with(options: &Options) -> SharedVmmAllocator {
    let device = Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
    SharedVmmAllocator::new(&device, options).unwrap()
}

fn arena() -> SharedVmmAllocator {
    arena_with(&Options { check_order: true, ..Options::default() })
}

fn capture(arena: &SharedVmmAllocator, bytes: u64) -> (Arc<Space>, u64) {
    let space = arena.open_space().unwrap();
    let block = space.allocate(bytes, A).unwrap();
    space.free(block).unwrap();
    let hash = space.seal().unwrap().layout_hash;
    (space, hash)
}

fn on_ranks<T: Send>(ranks: usize, program: impl Fn(&Rank) -> T + Sync) -> Vec<T> {
    let group = Group { ranks, all: Mutex::new(vec![0; ranks * DIGEST_BYTES]), meet: Barrier::new(ranks) };
    std::thread::scope(|scope| {
        let run = |rank: usize| {
            let (program, group) = (&program, &group);
            scope.spawn(move || {
                let arena = arena();
                let shapes = [MIB, 3 * MIB].map(|bytes| capture(&arena, bytes).0).into();
                program(&Rank { rank: rank as u32, group, arena, shapes })
            })
        };
        let threads: Vec<_> = (0..ranks).map(run).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn off(result: Result<impl Sized>) {
    let result = result.map(drop);
    assert!(
        matches!(&result, Err(Error::WrongState { sentence }) if sentence.contains("does not note")),
        "{result:?}"
    );
}

#[test]
fn ranks_that_replay_alike_agree_and_one_that_is_behind_may_catch_up() {
    let found = on_ranks(3, |rank| {
        let nothing = rank.compare().unwrap();
        for turn in 0..300 {
            rank.replay(turn % 2).unwrap();
        }
        let all = rank.compare().unwrap();
        if rank.rank < 2 {
            rank.replay(1).unwrap();
        }
        let behind = rank.compare().unwrap();
        if rank.rank == 2 {
            rank.replay(1).unwrap();
        }
        assert_eq!(rank.arena.replay_seq(), 301);
        [nothing, all, behind, rank.agree_on(5).unwrap()]
    });
    for agreements in found {
        let numbers = agreements.map(|agreed| (agreed.same, agreed.most));
        assert_eq!(numbers, [(0, 0), (300, 300), (300, 301), (302, 302)]);
    }
}

#[test]
fn ranks_that_replay_in_opposite_orders_are_told_on_which_rank_and_where_and_launch_nothing_more() {
    let found = on_ranks(4, |rank| {
        rank.replay(0).unwrap();
        let order = if rank.rank == 2 { [1, 0] } else { [0, 1] };
        order.into_iter().for_each(|shape| rank.replay(shape).unwrap());
        let differs = rank.compare().unwrap_err();
        // Refused instead of a deadlock between ranks.
        let launched = rank.arena.replay_seq();
        assert_eq!(rank.shapes[0].replay(A, || panic!("launched")), Err(differs.clone()));
        assert_eq!(rank.shapes[0].enter(A), Err(differs.clone()));
        assert_eq!(rank.arena.eager_scope(A).map(drop), Err(differs.clone()));
        assert_eq!(rank.arena.replay_seq(), launched);
        // A second comparison returns the same result on all ranks.
        assert_eq!(rank.compare(), Err(differs.clone()));
        rank.arena.restart_order().unwrap();
        rank.replay(1).unwrap();
        let keys = [0, 1].map(|shape| capture(&arena(), [MIB, 3 * MIB][shape]).1);
        assert_eq!(rank.compare(), Ok(Agreement { same: 1, most: 1 }));
        (differs, keys)
    });
    let (_, [first, second]) = found[0];
    let expected = Error::RanksDiffer {
        replay: 2,
        exact: true,
        rank: 2,
        had: Some(second),
        other: 0,
        other_had: Some(first),
        ranks: 1,
        launched: true,
    };
    assert!(found.iter().all(|(error, _)| *error == expected), "{found:?}");
    let said = expected.to_string();
    let words = ["replay 2:", "rank 2 had 0x", "rank 0 had 0x", "1 rank(s)", "nothing more is launched"];
    assert!(words.iter().all(|word| said.contains(word)), "{said}");
}

#[test]
fn ranks_that_captured_otherwise_are_told_before_anything_is_launched_or_by_their_first_replay() {
    let found = on_ranks(2, |rank| {
        let (space, hash) = capture(&rank.arena, if rank.rank == 0 { 40 * MIB } else { 24 * MIB });
        let before = rank.agree_on(hash).unwrap_err();
        space.replay(A, || ()).unwrap();
        let after = rank.compare().unwrap_err();
        rank.arena.restart_order().unwrap();
        space.set_order_key(64);
        space.replay(A, || ()).unwrap();
        space.set_order_key(65);
        space.replay(A, || ()).unwrap();
        assert_eq!(rank.compare(), Ok(Agreement { same: 2, most: 2 }));
        space.set_order_key(0);
        space.replay(A, || ()).unwrap();
        (hash, before, after, rank.compare().unwrap_err())
    });
    let hashes = [found[0].0, found[1].0];
    for (_, before, after, last) in found {
        for (error, number, was_launched) in [(before, 1, false), (after, 1, true), (last, 3, true)] {
            let expected = Error::RanksDiffer {
                replay: number,
                exact: true,
                rank: 1,
                had: Some(hashes[1]),
                other: 0,
                other_had: Some(hashes[0]),
                ranks: 1,
                launched: was_launched,
            };
            assert_eq!(error, expected);
        }
    }
}

#[test]
fn a_rank_that_would_launch_alone_or_works_eagerly_instead_is_named() {
    let found = on_ranks(2, |rank| {
        rank.replay(0).unwrap();
        if rank.rank == 1 {
            rank.replay(1).unwrap();
        }
        let alone = rank.agree_on(9).unwrap_err();
        rank.arena.restart_order().unwrap();
        if rank.rank == 0 {
            rank.replay(0).unwrap()
        } else {
            drop(rank.arena.eager_scope(A).unwrap())
        }
        (alone, rank.compare().unwrap_err())
    });
    for (alone, eager) in found {
        // Rank 0 is about to launch its second replay; rank 1 launched a different one.
        assert!(
            matches!(alone, Error::RanksDiffer { replay: 2, exact: true, launched: true, .. }),
            "{alone}"
        );
        assert!(matches!(eager, Error::RanksDiffer { replay: 1, rank: 1, other: 0, .. }), "{eager}");
    }
}

#[test]
fn a_gather_that_fails_or_lies_is_refused_and_stops_nothing() {
    let arena = arena();
    let (space, _) = capture(&arena, MIB);
    space.replay(A, || ()).unwrap();
    let copy = |mine: &[u8], all: &mut [u8]| {
        all.chunks_exact_mut(DIGEST_BYTES).for_each(|place| place.copy_from_slice(mine));
        Ok(())
    };
    let given_up = Error::Closed { what: "the process group" };
    assert_eq!(arena.compare_order(0, 2, |_, _| Err(given_up.clone())), Err(given_up));
    for (rank, ranks) in [(0, 0), (2, 2), (7, 3), (0, 4097), (u32::MAX, u32::MAX)] {
        let refused = arena.compare_order(rank, ranks, |_, _| panic!("gathered"));
        assert!(matches!(refused, Err(Error::InvalidArgument { .. })), "{refused:?}");
    }
    // An empty gather; own bytes in a wrong place; bytes of a different library.
    let refused = arena.compare_order(0, 2, |_, _| Ok(()));
    assert!(matches!(refused, Err(Error::InvalidArgument { what: "the rank", value: 0, .. })), "{refused:?}");
    let refused = arena.compare_order(1, 2, |mine, all| {
        all[..DIGEST_BYTES].copy_from_slice(mine);
        Ok(())
    });
    assert!(matches!(refused, Err(Error::InvalidArgument { what: "the rank", value: 1, .. })), "{refused:?}");
    for byte in [0, 7] {
        let refused = arena.compare_order(0, 3, |mine, all| {
            copy(mine, all)?;
            all[2 * DIGEST_BYTES + byte] ^= 1;
            Ok(())
        });
        assert!(matches!(refused, Err(Error::InvalidArgument { what: "rank", value: 2, .. })), "{refused:?}");
    }
    let panics = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        arena.compare_order(0, 2, |_, _| panic!("planted"))
    }));
    assert!(panics.is_err());
    space.replay(A, || ()).unwrap();
    assert_eq!(arena.compare_order(1, 3, copy), Ok(Agreement { same: 2, most: 2 }));
    arena.close();
    assert_eq!(arena.compare_order(0, 1, copy), Err(Error::Closed { what: "the arena" }));
}

#[test]
fn a_gather_may_use_the_arena_and_what_was_forgotten_meanwhile_refuses_nothing() {
    let arena = arena();
    let (space, _) = capture(&arena, MIB);
    space.replay(A, || ()).unwrap();
    let other = self::arena();
    let (elsewhere, _) = capture(&other, 3 * MIB);
    elsewhere.replay(A, || ()).unwrap();
    let mut theirs = vec![0; DIGEST_BYTES];
    let alone = other.compare_order(0, 1, |mine, all| {
        theirs.copy_from_slice(mine);
        all.copy_from_slice(mine);
        Ok(())
    });
    assert_eq!(alone, Ok(Agreement { same: 1, most: 1 }));
    let differs = arena.compare_order(0, 2, |mine, all| {
        let (first, second) = all.split_at_mut(DIGEST_BYTES);
        first.copy_from_slice(mine);
        second.copy_from_slice(&theirs);
        // No lock and no replay slot is held.
        std::thread::scope(|scope| {
            scope.spawn(|| space.replay(A, || ()).unwrap()).join().unwrap();
        });
        let nested = arena.compare_order(0, 1, |mine, all| {
            all.copy_from_slice(mine);
            Ok(())
        });
        assert_eq!(nested, Ok(Agreement { same: 2, most: 2 }));
        arena.restart_order()
    });
    assert!(matches!(differs, Err(Error::RanksDiffer { replay: 1, .. })), "{differs:?}");
    // The difference was in forgotten replays.
    space.replay(A, || ()).unwrap();
    let inside = space.replay(A, || {
        arena.compare_order(0, 1, |mine, all| {
            all.copy_from_slice(mine);
            Ok(())
        })
    });
    assert_eq!(inside, Ok(Ok(Agreement { same: 2, most: 2 })));
}

#[test]
fn what_was_not_launched_is_not_compared_and_an_arena_without_the_check_says_so() {
    let arena = arena();
    let (space, _) = capture(&arena, MIB);
    let open = arena.open_space().unwrap();
    assert!(open.replay(A, || panic!("launched")).is_err());
    drop(open);
    space.replay(A, || ()).unwrap();
    assert!(space.replay(A, || space.replay(A, || panic!("launched"))).unwrap().is_err());
    let itself = |mine: &[u8], all: &mut [u8]| {
        all.copy_from_slice(mine);
        Ok(())
    };
    assert_eq!(arena.compare_order(0, 1, itself), Ok(Agreement { same: 2, most: 2 }));

    let without = arena_with(&Options::default());
    let (space, _) = capture(&without, MIB);
    space.set_order_key(3);
    space.replay(A, || ()).unwrap();
    off(without.compare_order(0, 1, |_, _| panic!("gathered")));
    off(without.agree_on(1, 0, 1, |_, _| panic!("gathered")));
    off(without.restart_order());
}

#[test]
fn a_replay_that_the_driver_refuses_is_not_compared_and_binds_no_serial_arena() {
    let itself = |mine: &[u8], all: &mut [u8]| {
        all.copy_from_slice(mine);
        Ok(())
    };
    let (mut refused, mut fail) = (0, 1);
    loop {
        let driver = FaultyDriver::new(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()));
        let device = Device::with_driver(driver.clone());
        let options = Options { check_order: true, serial: true, ..Options::default() };
        let arena = SharedVmmAllocator::new(&device, &options).unwrap();
        let (space, _) = capture(&arena, MIB);
        space.replay(A, || ()).unwrap();
        // Eager work keeps the page: the next replay maps a new one and, on a second stream, waits
        // for a mark.
        let scope = arena.eager_scope(A).unwrap();
        let result = scope.allocate(MIB).unwrap();
        drop(scope);
        arena.lift_serial().unwrap();
        driver.arm(&[fail]);
        let launched = space.replay(B, || ()).is_ok();
        let over = driver.calls() < fail;
        driver.arm(&[]);
        let replays = 2 + u64::from(launched);
        assert_eq!(arena.replay_seq(), replays, "call {fail}");
        let agreed = arena.compare_order(0, 1, itself);
        assert_eq!(agreed, Ok(Agreement { same: replays, most: replays }), "call {fail}");
        assert_eq!(space.replay(A, || ()).is_ok(), !launched, "call {fail}");
        refused += u32::from(!launched);
        arena.eager_blocks().free(result, &[]).unwrap();
        if over {
            break;
        }
        fail += 1;
    }
    assert!(refused > 3, "{refused} of {fail} calls");
}

#![allow(clippy::single_range_in_vec_init, reason = "one span of many, not its numbers")]

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

fn pool(blocks: u64, a_page: u64, backed: u64) -> BlockPool {
    let mut pool = BlockPool::new(blocks, a_page, 10).unwrap();
    pool.back(&(0..backed));
    pool
}

#[test]
fn blocks_go_to_the_tightest_page_that_holds_them_and_empty_pages_come_last() {
    let mut pool = pool(40, 8, 40);
    let all = pool.allocate(40).unwrap();
    assert_eq!((all.len(), pool.available(), pool.allocate(1)), (40, 0, None));
    // Room: page 0: 5, page 1: 2, page 2: 8, page 3: 3.
    pool.free(&[0, 1, 2, 3, 4, 8, 9, 24, 25, 26]).unwrap();
    assert_eq!(pool.free(&(16..24).collect::<Vec<_>>()).unwrap(), [2]);
    assert_eq!(pool.allocate(3).unwrap(), [24, 25, 26]);
    assert_eq!(pool.allocate(2).unwrap(), [8, 9]);
    assert_eq!(pool.allocate(4).unwrap(), [0, 1, 2, 3]);
    // The rest of page 0, then the empty page.
    assert_eq!(pool.allocate(2).unwrap(), [4, 16]);
    assert_eq!(pool.available(), 7);
}

#[test]
fn reserved_blocks_are_nobody_elses_until_the_limit_falls_below_them() {
    let mut pool = pool(32, 8, 16);
    assert!(pool.reserve(10) && !pool.reserve(7));
    assert_eq!((pool.available(), pool.allocate(7)), (6, None));
    assert_eq!(pool.allocate(6).unwrap().len(), 6);
    assert_eq!(pool.allocate_reserved(4).unwrap().len(), 4);
    assert_eq!((pool.reserved(), pool.allocate_reserved(7)), (6, None));
    // Blocks 0 to 9 are used; two are left below 12.
    assert_eq!((pool.set_limit(12), pool.reserved(), pool.available()), (4, 2, 0));
    pool.unreserve(1);
    assert_eq!(pool.allocate(1).unwrap(), [10]);
    assert_eq!((pool.set_limit(32), pool.available()), (0, 4));
}

#[test]
fn what_to_back_is_whole_pages_and_what_to_give_back_is_the_highest_empty_ones() {
    let mut pool = pool(30, 8, 8);
    assert_eq!(pool.shortfall(8), Some(vec![]));
    assert_eq!(pool.shortfall(9), Some(vec![8..16]));
    assert_eq!(pool.shortfall(30), Some(vec![8..30]));
    assert_eq!(pool.shortfall(31), None);
    pool.back(&(16..30));
    assert_eq!(pool.shortfall(23), Some(vec![8..16]));
    assert_eq!(
        (pool.surplus(0), pool.surplus(8), pool.surplus(20)),
        (vec![0..8, 16..30], vec![16..30], vec![])
    );
    assert_eq!(pool.surplus(9), [24..30]);
    pool.allocate(1).unwrap();
    assert_eq!(pool.surplus(0), [16..30]);
    // Pages beyond the limit are surplus, whatever `keep` says.
    pool.set_limit(8);
    assert_eq!(pool.surplus(1000), [16..30]);
    pool.unback(&(0..30));
    assert_eq!((pool.available(), pool.surplus(0)), (7, vec![]));
}

#[test]
fn the_engine_is_asked_for_the_pages_with_the_fewest_blocks_and_never_for_one_in_use() {
    let mut pool = pool(40, 8, 32);
    let all = pool.allocate(32).unwrap();
    let keep = |block: &u64| [0, 1, 8, 9, 10, 16, 24].contains(block);
    pool.free(&all.into_iter().filter(|block| !keep(block)).collect::<Vec<_>>()).unwrap();
    let ask = pool.ask(160, 7, |block| block != 16);
    assert_eq!((ask.bytes, ask.there, ask.by), (160, 160, 7));
    assert_eq!(
        ask.pages,
        [Candidate { page: 3, blocks: vec![24] }, Candidate { page: 0, blocks: vec![0, 1] },]
    );
    // Although more blocks are used.
    pool.set_limit(8);
    assert_eq!(pool.ask(80, 0, |_| true).pages, [Candidate { page: 2, blocks: vec![16] }]);
    assert_eq!(pool.ask(1000, 0, |_| true).pages.last().unwrap().page, 0);
    let freed: Vec<u64> = ask.pages.iter().flat_map(|page| page.blocks.clone()).collect();
    assert_eq!(pool.free(&freed).unwrap(), [0, 3]);
    assert_eq!(pool.ask(100, 0, |_| false), Ask { pages: vec![], bytes: 100, there: 160, by: 0 });
}

#[test]
fn a_wrong_free_changes_nothing() {
    let mut pool = pool(16, 8, 16);
    let blocks = pool.allocate(3).unwrap();
    for wrong in [&[blocks[0], blocks[1], blocks[0]][..], &[blocks[0], 15], &[99]] {
        assert!(matches!(pool.free(wrong), Err(Error::InvalidArgument { .. })));
        assert!(
            blocks.iter().all(|block| pool.is_used(*block)) && pool.in_use() == 3 && pool.available() == 13
        );
    }
    assert!(
        [(0, 1, 1), (1, 0, 1), (1, 1, 0), (1 << 33, 1, 1)]
            .iter()
            .all(|(a, b, c)| BlockPool::new(*a, *b, *c).is_err())
    );
    // Sums of bytes would overflow.
    for (blocks, each) in [(1, 1 << 63), (2, 1 << 46), (1 << 20, 1 << 44)] {
        assert!(matches!(BlockPool::new(blocks, 1, each), Err(Error::InvalidSize { .. })), "{blocks} {each}");
    }
    let mut most = BlockPool::new(2, 1, 1 << 45).unwrap();
    most.back(&(0..2));
    assert_eq!((most.empty_bytes(), most.ask(u64::MAX, 0, |_| true).there), (1 << 46, 1 << 46));
}

/// Staggered lengths leave holes; with best fit, pages still run empty.
#[test]
fn after_staggered_lives_few_pages_are_held() {
    let (mut pool, mut live, mut seed) = (pool(64 * 32, 32, 64 * 32), Vec::new(), 1_u64);
    for step in 0..4000_u64 {
        seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        if let Some(blocks) = pool.allocate(1 + (seed >> 33) % 16) {
            live.push((step + 10 + (seed >> 40) % 100, blocks));
        }
        for (_, blocks) in live.extract_if(.., |(end, _)| *end <= step) {
            pool.free(&blocks).unwrap();
        }
    }
    // A few lives are left.
    live.truncate(live.len() / 4);
    let used: BTreeSet<u64> =
        live.iter().flat_map(|(_, blocks)| blocks.iter().map(|block| block / 32)).collect();
    assert!(!live.is_empty() && used.len() <= 64);
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(u64),
    Free(usize, usize),
    Reserve(u64),
    AllocateReserved(u64),
    Back(u64, u64),
    Unback(u64, u64),
    Limit(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0_u64..20).prop_map(Step::Allocate),
        6 => (any::<usize>(), 1_usize..12).prop_map(|(at, count)| Step::Free(at, count)),
        1 => (0_u64..10).prop_map(Step::Reserve),
        1 => (0_u64..10).prop_map(Step::AllocateReserved),
        2 => (0_u64..100, 0_u64..100).prop_map(|(a, b)| Step::Back(a, b)),
        2 => (0_u64..100, 0_u64..100).prop_map(|(a, b)| Step::Unback(a, b)),
        1 => (0_u64..110).prop_map(Step::Limit),
    ];
    prop::collection::vec(step, 1..80)
}

/// `empty_bytes` once walked all pages.
#[test]
fn what_is_asked_at_every_step_does_not_walk_over_the_pages() {
    let pool = BlockPool::new(1 << 20, 1, 3).unwrap();
    let start = std::time::Instant::now();
    let asked = |_| pool.empty_bytes() + pool.available() + pool.in_use() + pool.reserved();
    assert_eq!((0..10_000).map(asked).sum::<u64>(), 0);
    assert!(start.elapsed() < std::time::Duration::from_secs(1), "{:?}", start.elapsed());
}

proptest! {
    #[test]
    fn a_pool_does_what_sets_of_numbers_do(steps in steps(), blocks in 1_u64..100, a_page in 1_u64..17) {
        let mut pool = BlockPool::new(blocks, a_page, 3).unwrap();
        let (mut used, mut backed) = (BTreeSet::new(), BTreeSet::new());
        let (mut limit, mut reserved) = (blocks, 0);
        let page_of = |block: u64| block / a_page;
        for step in steps {
            let available = |used: &BTreeSet<u64>, backed: &BTreeSet<u64>, limit: u64, reserved: u64| {
                let free = (0..limit).filter(|block| backed.contains(&page_of(*block)) && !used.contains(block));
                (free.count() as u64).saturating_sub(reserved)
            };
            let before = available(&used, &backed, limit, reserved);
            let check = |got: &Option<Vec<u64>>, count: u64, there: bool, used: &mut BTreeSet<u64>| {
                assert_eq!(got.is_some(), there);
                for block in got.iter().flatten() {
                    assert!(*block < limit && backed.contains(&page_of(*block)) && used.insert(*block));
                }
                assert!(got.as_ref().is_none_or(|got| got.len() as u64 == count));
            };
            match step {
                Step::Allocate(count) => {
                    let got = pool.allocate(count);
                    check(&got, count, count <= before, &mut used);
                }
                Step::AllocateReserved(count) => {
                    let got = pool.allocate_reserved(count);
                    check(&got, count, count <= reserved, &mut used);
                    if got.is_some() {
                        reserved -= count;
                    }
                }
                Step::Reserve(count) => {
                    prop_assert_eq!(pool.reserve(count), count <= before);
                    if count <= before {
                        reserved += count;
                    }
                }
                Step::Free(at, count) => {
                    let some: Vec<u64> = used.iter().copied().cycle().skip(at % used.len().max(1)).take(count.min(used.len())).collect();
                    some.iter().for_each(|block| assert!(used.remove(block)));
                    let touched: BTreeSet<u64> = some.iter().map(|block| page_of(*block)).collect();
                    let empty = touched.into_iter().filter(|page| used.iter().all(|block| page_of(*block) != *page));
                    prop_assert_eq!(pool.free(&some).unwrap(), empty.collect::<Vec<_>>());
                }
                Step::Back(a, b) | Step::Unback(a, b) => {
                    let range = a.min(b)..a.max(b);
                    let whole = |page: u64| {
                        let blocks = pool.blocks_of(page);
                        !blocks.is_empty() && range.start <= blocks.start && blocks.end <= range.end
                    };
                    let pages: Vec<u64> = (0..=page_of(blocks - 1)).filter(|page| whole(*page)).collect();
                    for page in pages {
                        if matches!(step, Step::Back(..)) {
                            backed.insert(page);
                        } else if used.iter().all(|block| page_of(*block) != page) {
                            backed.remove(&page);
                        }
                    }
                    let lost = reserved.saturating_sub(available(&used, &backed, limit, 0));
                    prop_assert_eq!(if matches!(step, Step::Back(..)) { pool.back(&range); 0 } else { pool.unback(&range) }, lost);
                    reserved -= lost;
                }
                Step::Limit(to) => {
                    limit = to.min(blocks);
                    let lost = reserved.saturating_sub(available(&used, &backed, limit, 0));
                    prop_assert_eq!(pool.set_limit(to), lost);
                    reserved -= lost;
                }
            }
            prop_assert_eq!(pool.in_use(), used.len() as u64);
            prop_assert_eq!(pool.reserved(), reserved);
            let now = available(&used, &backed, limit, reserved);
            prop_assert_eq!(pool.available(), now);
            let listed: Vec<u64> = pool.used(&(3..blocks + 9)).into_iter().flatten().collect();
            prop_assert_eq!(listed, used.range(3..).copied().collect::<Vec<_>>());
            let empty = backed.iter().map(|page| pool.blocks_of(*page)).filter(|on| used.range(on.clone()).next().is_none());
            prop_assert_eq!(pool.empty_bytes(), 3 * empty.map(|on| on.end - on.start).sum::<u64>());
            // The shortfall is sufficient, and giving back the surplus leaves `keep` blocks.
            if let Some(missing) = pool.shortfall(now + 5) {
                let mut more = pool.clone();
                missing.iter().for_each(|blocks| more.back(blocks));
                prop_assert!(more.available() >= now + 5);
            }
            let mut less = pool.clone();
            prop_assert!(pool.surplus(3).iter().all(|blocks| less.unback(blocks) == 0));
            prop_assert!(less.available() >= now.min(3) && less.in_use() == pool.in_use());
        }
    }
}

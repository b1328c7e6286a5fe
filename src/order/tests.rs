use std::collections::BTreeMap;

use proptest::prelude::*;

use super::compare::{Agreement, Difference, compare};
use super::history::{DIGEST_BYTES, History, RING};

/// A rank with its full history: launched keys and the next key.
#[derive(Clone, Debug)]
struct Rank {
    launched: Vec<u64>,
    next: Option<u64>,
}

impl Rank {
    /// Digest sent to the other ranks.
    fn digest(&self) -> [u8; DIGEST_BYTES] {
        let mut history = History::new();
        self.launched.iter().for_each(|key| history.note(*key));
        self.next.map_or_else(|| history.digest(), |key| history.ahead(key).digest())
    }

    fn all(&self) -> Vec<u64> {
        self.launched.iter().chain(&self.next).copied().collect()
    }
}

fn compared(ranks: &[Rank]) -> Result<Agreement, Difference> {
    let histories: Vec<History> =
        ranks.iter().map(|rank| History::of_digest(&rank.digest()).expect("a digest")).collect();
    compare(&histories)
}

/// Naive majority search: lowest rank outside, lowest rank inside, number outside.
fn odd<T: Ord + Clone>(values: &[T]) -> (usize, usize, usize) {
    let mut groups: BTreeMap<T, Vec<usize>> = BTreeMap::new();
    for (rank, value) in values.iter().enumerate() {
        groups.entry(value.clone()).or_default().push(rank);
    }
    let most = groups.values().map(Vec::len).max().unwrap();
    let other = groups.values().filter(|group| group.len() == most).map(|group| group[0]).min().unwrap();
    let outside = |rank: &usize| values[*rank] != values[other];
    ((0..values.len()).find(outside).unwrap(), other, values.len() - most)
}

/// Naive comparison over the full history.
fn naive(ranks: &[Rank]) -> Result<Agreement, Difference> {
    let all: Vec<Vec<u64>> = ranks.iter().map(Rank::all).collect();
    let last = all.iter().map(Vec::len).min().unwrap();
    let most = all.iter().map(Vec::len).max().unwrap();
    let forgotten = most.saturating_sub(RING);
    let met = forgotten <= last;
    let differ = |replay: usize, exact: bool, (rank, other, count): (usize, usize, usize)| {
        let key = |rank: usize| if exact { all[rank].get(replay - 1).copied() } else { None };
        Err(Difference {
            replay: replay as u64,
            exact,
            rank: (rank as u32, key(rank)),
            other: (other as u32, key(other)),
            ranks: count as u32,
            launched: ranks.iter().any(|rank| rank.launched.len() >= replay),
        })
    };
    if met {
        let before: Vec<&[u64]> = all.iter().map(|keys| &keys[..forgotten]).collect();
        if before.iter().any(|keys| *keys != before[0]) {
            return differ(forgotten, false, odd(&before));
        }
        for replay in forgotten + 1..=last {
            let keys: Vec<u64> = all.iter().map(|keys| keys[replay - 1]).collect();
            if keys.iter().any(|key| *key != keys[0]) {
                return differ(replay, true, odd(&keys));
            }
        }
    }
    if most > last && ranks.iter().any(|rank| rank.next.is_some()) {
        let there: Vec<bool> = all.iter().map(|keys| keys.len() > last).collect();
        return differ(last + 1, met, odd(&there));
    }
    Ok(Agreement { same: if met { last as u64 } else { 0 }, most: most as u64 })
}

/// Ranks of one program. Some stop early, some have one different key.
fn ranks() -> impl Strategy<Value = Vec<Rank>> {
    let program = prop::collection::vec(0_u64..3, 0..900);
    let way = (0_usize..4, 0_usize..320, prop::option::weighted(0.3, (0_usize..900, 0_u64..3)), 0_u64..6);
    (program, prop::collection::vec(way, 1..6)).prop_map(|(program, ways)| {
        let follow = |(lags, behind, other, next): (usize, usize, Option<(usize, u64)>, u64)| {
            let behind = if lags == 0 { behind } else { 0 };
            let mut launched = program[..program.len().saturating_sub(behind)].to_vec();
            if let Some((place, key)) = other
                && let Some(there) = launched.get_mut(place)
            {
                *there = key;
            }
            Rank { launched, next: (next < 2).then_some(next) }
        };
        ways.into_iter().map(follow).collect()
    })
}

proptest! {
    #[test]
    fn ranks_are_told_what_a_look_at_all_that_was_launched_tells(ranks in ranks()) {
        prop_assert_eq!(compared(&ranks), naive(&ranks));
    }

    #[test]
    fn a_digest_is_read_as_it_was_written_and_any_other_bytes_are_none(
        launched in prop::collection::vec(any::<u64>(), 0..600),
        next in any::<Option<u64>>(),
        place in 0..DIGEST_BYTES,
        change in 1_u8..,
    ) {
        let mut digest = Rank { launched, next }.digest();
        let read = History::of_digest(&digest).expect("a digest");
        prop_assert_eq!(read.digest(), digest);
        // A changed digest decodes to a different history or to none, and never panics in a
        // comparison.
        digest[place] ^= change;
        if let Some(other) = History::of_digest(&digest) {
            prop_assert_ne!(&other, &read);
            let _ = compare(&[other, read]);
        }
        prop_assert_eq!(History::of_digest(&digest[1..]), None);
    }
}

#[test]
fn a_difference_is_named_as_long_as_it_is_in_the_ring_and_known_to_be_there_afterwards() {
    let rank = |odd: bool, count: usize| {
        let mut launched = vec![7; count];
        launched[4] = if odd { 8 } else { 7 };
        Rank { launched, next: None }
    };
    for count in [5, 6, RING, RING + 4] {
        let found = compared(&[rank(false, count), rank(true, count), rank(false, count)]).unwrap_err();
        assert_eq!((found.replay, found.exact), (5, true), "{count}");
        assert_eq!((found.rank, found.other, found.ranks), ((1, Some(8)), (0, Some(7)), 1), "{count}");
    }
    for count in [RING + 5, RING + 6, 10 * RING] {
        let found = compared(&[rank(false, count), rank(true, count), rank(false, count)]).unwrap_err();
        assert_eq!((found.replay, found.exact), ((count - RING) as u64, false), "{count}");
        assert_eq!((found.rank, found.other, found.ranks), ((1, None), (0, None), 1), "{count}");
    }
}

#[test]
fn a_rank_that_is_behind_is_none_until_somebody_asks_before_a_launch() {
    let rank = |count: usize, next| Rank { launched: vec![1; count], next };
    assert_eq!(compared(&[rank(3, None), rank(5, None)]), Ok(Agreement { same: 3, most: 5 }));
    assert_eq!(compared(&[rank(3, Some(1)), rank(3, Some(1))]), Ok(Agreement { same: 4, most: 4 }));
    let apart = compared(&[rank(3, Some(1)), rank(3, None)]).unwrap_err();
    assert_eq!((apart.replay, apart.exact, apart.launched), (4, true, false));
    assert_eq!((apart.rank, apart.other), ((1, None), (0, Some(1))));
    let other = compared(&[rank(3, Some(2)), rank(3, Some(1)), rank(3, Some(1))]).unwrap_err();
    assert_eq!((other.replay, other.rank, other.other), (4, (0, Some(2)), (1, Some(1))));
    // One rank is so far behind that its last keys are no longer stored.
    assert_eq!(compared(&[rank(1, None), rank(900, None)]), Ok(Agreement { same: 0, most: 900 }));
    let far = compared(&[rank(1, Some(1)), rank(900, None)]).unwrap_err();
    assert_eq!((far.replay, far.exact, far.launched), (3, false, true));
}

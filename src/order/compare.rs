//! Finds the first difference between the replays of several ranks.
//!
//! Plain code, as [`history`](super::history). Every rank has the same input and computes the same
//! result.

use super::history::History;

/// Result of a comparison without differences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// Number of the last replay up to which all ranks agree. 0: none yet, or one rank is so far
    /// behind that the keys of its last replays are no longer stored on the other ranks.
    pub same: u64,
    /// Replays of the most advanced rank.
    pub most: u64,
}

/// First difference between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Replay number, from 1.
    pub(super) replay: u64,
    /// Whether `replay` is exact; else the difference is at `replay` or earlier, beyond the stored
    /// keys.
    pub(super) exact: bool,
    /// Lowest rank outside the majority, and its key; `None` if missing or no longer stored.
    pub(super) rank: (u32, Option<u64>),
    /// Lowest rank of the majority, and its key. Of groups of equal size, the one with the lowest
    /// rank counts.
    pub(super) other: (u32, Option<u64>),
    /// Number of ranks outside the majority.
    pub(super) ranks: u32,
    /// Whether a rank launched the replay. Otherwise the ranks may decide again.
    pub(super) launched: bool,
}

/// Compares the launches of all ranks. A rank merely behind is no difference, unless one rank
/// compares before a launch: then all must be equally far.
pub(super) fn compare(ranks: &[History]) -> Result<Agreement, Difference> {
    let first = ranks.iter().map(History::first_known).max().unwrap_or(1);
    let last = ranks.iter().map(History::last).min().unwrap_or(0);
    let most = ranks.iter().map(History::last).max().unwrap_or(0);
    let all_to_be_there = ranks.iter().any(History::is_ahead);
    let difference = |replay: u64, exact: bool, odd: Odd| {
        let had = |rank: usize| (rank as u32, ranks[rank].key(replay).filter(|_| exact));
        let launched = ranks.iter().any(|rank| rank.launched(replay));
        Difference { replay, exact, rank: had(odd.rank), other: had(odd.other), ranks: odd.ranks, launched }
    };
    // First the replays before the stored keys, if every rank knows the hash up to the same number.
    let met = first <= last + 1;
    if met {
        if let Some(odd) = odd(ranks, |rank| rank.hash_to(first - 1)) {
            return Err(difference(first - 1, false, odd));
        }
        for number in first..=last {
            if let Some(odd) = odd(ranks, |rank| rank.key(number)) {
                return Err(difference(number, true, odd));
            }
        }
    }
    if all_to_be_there && let Some(odd) = odd(ranks, |rank| rank.last() > last) {
        return Err(difference(last + 1, met, odd));
    }
    Ok(Agreement { same: if met { last } else { 0 }, most })
}

/// Ranks outside the majority.
struct Odd {
    rank: usize,
    other: usize,
    ranks: u32,
}

/// Finds the ranks whose value of `of` differs from the majority; `None` if all are equal.
fn odd<T: PartialEq>(ranks: &[History], of: impl Fn(&History) -> T) -> Option<Odd> {
    let values: Vec<T> = ranks.iter().map(of).collect();
    let same_as = |rank: usize| values.iter().filter(|value| **value == values[rank]).count();
    if values.is_empty() || same_as(0) == values.len() {
        return None;
    }
    // Only on a difference, so once. Of the largest groups, the one with the lowest rank.
    let other = (0..values.len()).rev().max_by_key(|rank| same_as(*rank))?;
    let rank = (0..values.len()).find(|rank| values[*rank] != values[other])?;
    Some(Odd { rank, other, ranks: (values.len() - same_as(other)) as u32 })
}

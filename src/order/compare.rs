//! Where the replays of several ranks differ first.
//!
//! Plain code, as [`history`](super::history): every rank has the same bytes of all ranks, and comes to the same end.

use super::history::History;

/// As far as ranks were compared, they had the same replays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Agreement {
    /// The number of the last replay up to which all ranks had the same; 0: there is none yet, or some rank is so far behind that the
    /// others do not remember what it launched last.
    pub same: u64,
    /// Replays of the rank that is furthest.
    pub most: u64,
}

/// The first replay that is not the same on all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    /// Its number, from 1.
    pub(super) replay: u64,
    /// It is that one; else that one or one before, which are forgotten.
    pub(super) exact: bool,
    /// The lowest rank that is otherwise than most, and the key it had; `None`: it has no such replay, or it is forgotten.
    pub(super) rank: (u32, Option<u64>),
    /// The lowest rank of most, in the same way; of groups of one size, the one of the lowest rank is most.
    pub(super) other: (u32, Option<u64>),
    /// Ranks that are otherwise than most.
    pub(super) ranks: u32,
    /// Some rank has launched it. Else all were asked in time, and may decide anew.
    pub(super) launched: bool,
}

/// Compares what each rank launched. A rank that is behind is no difference, unless somebody asks before a launch: then all are to be there.
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
    // What was before all that everybody knows by key, if everybody knows the hash up to there.
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

/// Who is otherwise than most.
struct Odd {
    rank: usize,
    other: usize,
    ranks: u32,
}

/// Who is otherwise than most by what `of` says; nobody if all are the same.
fn odd<T: PartialEq>(ranks: &[History], of: impl Fn(&History) -> T) -> Option<Odd> {
    let values: Vec<T> = ranks.iter().map(of).collect();
    let same_as = |rank: usize| values.iter().filter(|value| **value == values[rank]).count();
    if values.is_empty() || same_as(0) == values.len() {
        return None;
    }
    // Only where they differ, once: of the largest groups the one of the lowest rank.
    let other = (0..values.len()).rev().max_by_key(|rank| same_as(*rank))?;
    let rank = (0..values.len()).find(|rank| values[*rank] != values[other])?;
    Some(Odd { rank, other, ranks: (values.len() - same_as(other)) as u32 })
}

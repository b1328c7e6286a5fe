//! Check of equal replay order on all ranks: the launches of this rank and the result of
//! comparisons.

use super::compare::{Agreement, Difference, compare};
use super::history::{DIGEST_BYTES, History};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Larger numbers of ranks are refused as mistakes.
const RANKS_MOST: u32 = 4096;

/// State of one rank. The lock is never held during a callback.
#[derive(Debug)]
pub(super) struct OrderCheck(Mutex<State>);

#[derive(Debug)]
struct State {
    history: History,
    /// Launched replays differ: further launches are refused.
    difference: Option<Error>,
    restarts: u64,
}

impl From<Difference> for Error {
    fn from(found: Difference) -> Self {
        let Difference { replay, exact, rank: (rank, had), other: (other, other_had), ranks, launched } =
            found;
        Self::RanksDiffer { replay, exact, rank, had, other, other_had, ranks, launched }
    }
}

impl OrderCheck {
    pub(super) fn new() -> Self {
        Self(Mutex::new(State { history: History::new(), difference: None, restarts: 0 }))
    }

    /// Returns the recorded difference as an error, if any.
    pub(super) fn usable(&self) -> Result<()> {
        self.0.lock().difference.clone().map_or(Ok(()), Err)
    }

    pub(super) fn note(&self, key: u64) {
        self.0.lock().history.note(key);
    }

    /// Clears the state: the next replay has number 1.
    pub(super) fn restart(&self) {
        let state = &mut *self.0.lock();
        (state.history, state.difference) = (History::new(), None);
        state.restarts += 1;
    }

    /// Compares the launches of all ranks; with `next`, as if a replay of this key had been
    /// launched. `gather` is called without a lock, also after a known difference: other ranks may
    /// wait in their gather.
    pub(super) fn compare(
        &self,
        (rank, ranks): (u32, u32),
        next: Option<u64>,
        gather: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<Agreement> {
        let refused = |what, value: u32, expected| {
            Err(Error::InvalidArgument { what, value: i128::from(value), expected })
        };
        if !(1..=RANKS_MOST).contains(&ranks) {
            return refused("the number of ranks", ranks, "between 1 and 4096");
        }
        if rank >= ranks {
            return refused("the rank", rank, "below the number of ranks");
        }
        let bytes = ranks as usize * DIGEST_BYTES;
        let mut all = Vec::new();
        let short =
            |_| Error::OutOfHostMemory { requested: bytes as u64, held: 0, limit: 0, available: None };
        all.try_reserve_exact(bytes).map_err(short)?;
        all.resize(bytes, 0);
        let (mine, restarts) = {
            let state = self.0.lock();
            let history = &state.history;
            (next.map_or_else(|| history.digest(), |key| history.ahead(key).digest()), state.restarts)
        };
        gather(&mine, &mut all)?;
        let gathered: Vec<&[u8]> = all.chunks_exact(DIGEST_BYTES).collect();
        if gathered[rank as usize] != mine {
            return refused("the rank", rank, "where the gather put what this rank gave it");
        }
        let mut histories = Vec::with_capacity(gathered.len());
        for (rank, digest) in (0..).zip(gathered) {
            match History::of_digest(digest) {
                Some(history) => histories.push(history),
                None => return refused("rank", rank, "one that gave a digest of this library's version"),
            }
        }
        compare(&histories).map_err(|found| {
            let error = Error::from(found);
            let mut state = self.0.lock();
            // A restart invalidates the result, and a difference before any launch is harmless.
            if found.launched && state.restarts == restarts {
                state.difference.get_or_insert_with(|| error.clone());
            }
            error
        })
    }
}

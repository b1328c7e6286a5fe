//! The check that ranks launch the same replays in the same order: what this one launched, and what came of comparing it.

use super::compare::{Agreement, Difference, compare};
use super::history::{DIGEST_BYTES, History};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// More ranks than this are a number that nobody meant.
const RANKS_MOST: u32 = 4096;

/// What one rank knows. The lock is never held while anybody is called.
#[derive(Debug)]
pub(super) struct OrderCheck(Mutex<State>);

#[derive(Debug)]
struct State {
    history: History,
    /// Ranks launched different replays: nothing more is launched.
    difference: Option<Error>,
    /// How often it began anew.
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

    /// That no difference was found.
    pub(super) fn usable(&self) -> Result<()> {
        self.0.lock().difference.clone().map_or(Ok(()), Err)
    }

    /// A replay of this key is launched.
    pub(super) fn note(&self, key: u64) {
        self.0.lock().history.note(key);
    }

    /// Begins anew, with replay 1.
    pub(super) fn restart(&self) {
        let state = &mut *self.0.lock();
        (state.history, state.difference) = (History::new(), None);
        state.restarts += 1;
    }

    /// Compares with the other ranks what was launched; with a key, as if a replay of it was launched now. `gather` is called without a
    /// lock, also when a difference is known already: the other ranks may wait for this one.
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
            // What was compared may be forgotten by now; and what nobody launched does no harm.
            if found.launched && state.restarts == restarts {
                state.difference.get_or_insert_with(|| error.clone());
            }
            error
        })
    }
}

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{AccountId, PagePool};
use crate::error::Error;
use crate::sync::{Mutex, thread_token};

const TRIES: u32 = 8;
/// Longest wait for memory in use by the device; one attempt waits up to twice.
const PATIENCE: Duration = Duration::from_secs(2);

/// Source of memory in a shortage, for example an engine with a cache.
pub trait Reclaimer: Send + Sync {
    /// Frees as much as possible of the `bytes` missing, and returns the freed bytes:
    /// `vmmgraph_device_add_reclaimer`. Runs without library locks.
    fn reclaim(&self, bytes: u64) -> u64;

    /// Account of the reclaimer's memory, or an ancestor. `None`: any memory of the device; asked
    /// only if the device or its budget is short.
    fn account(&self) -> Option<AccountId> {
        None
    }

    /// Cost of freeing memory, in the caller's own unit: cheapest first.
    fn cost(&self) -> u64;
}

/// Each list has its own lock, not held during calls.
#[derive(Default)]
pub(super) struct Reclaimers {
    all: Mutex<Vec<Weak<dyn Reclaimer>>>,
    reclaiming: Mutex<HashSet<u64>>,
}

struct ReclaimCall<'a>(&'a Reclaimers);

impl<'a> ReclaimCall<'a> {
    /// `None`: a reclaimer on this thread is itself short of memory.
    fn begin(reclaimers: &'a Reclaimers) -> Option<Self> {
        let begins = reclaimers.reclaiming.lock().insert(thread_token());
        begins.then(|| Self(reclaimers))
    }
}

impl Drop for ReclaimCall<'_> {
    fn drop(&mut self) {
        self.0.reclaiming.lock().remove(&thread_token());
    }
}

impl PagePool {
    /// Registers a reclaimer, until dropped by its owner.
    pub fn add_reclaimer(&self, reclaimer: &Arc<dyn Reclaimer>) {
        let mut all = self.reclaimers.all.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(reclaimer));
    }

    pub(crate) fn memory_retry(&self) -> MemoryRetry<'_> {
        MemoryRetry { pool: self, tries: 0 }
    }

    /// Asks reclaimers, cheapest first, until `bytes` are freed. Returns whether a retry is useful.
    /// With `lowest`, asks only those within that account. The caller has no lock.
    pub(crate) fn ask_reclaimers(&self, bytes: u64, lowest: Option<u64>) -> bool {
        let Some(_call) = ReclaimCall::begin(&self.reclaimers) else { return false };
        let mut all: Vec<_> = self.reclaimers.all.lock().iter().filter_map(Weak::upgrade).collect();
        if let Some(key) = lowest {
            all.retain(|reclaimer| {
                reclaimer.account().is_some_and(|own| self.lock().accounts.is_within(own, key))
            });
        }
        all.sort_by_key(|reclaimer| reclaimer.cost());
        let mut given = 0;
        for reclaimer in all {
            given = reclaimer.reclaim(bytes.saturating_sub(given)).saturating_add(given);
            if given >= bytes {
                break;
            }
        }
        self.wait_and_reap(PATIENCE) || given > 0
    }
}

pub(crate) struct MemoryRetry<'a> {
    pool: &'a PagePool,
    tries: u32,
}

impl MemoryRetry<'_> {
    /// Returns true if the call should try again, at most eight times. The caller has no lock.
    pub(crate) fn helps(&mut self, error: &Error) -> bool {
        self.helps_with(error, || false)
    }

    /// Retries as [`helps`](Self::helps), after the caller's own measures; `own` returns whether
    /// they helped.
    pub(crate) fn helps_with(&mut self, error: &Error, own: impl FnOnce() -> bool) -> bool {
        if self.tries == TRIES || !error.is_out_of_memory() {
            return false;
        }
        let own = own();
        self.once(error) || own
    }

    /// Retries as [`helps`](Self::helps), without a limit of attempts. Asks reclaimers if no
    /// pending memory finished, and from the second attempt on: in a busy process some always
    /// finishes.
    pub(crate) fn once(&mut self, error: &Error) -> bool {
        self.tries = self.tries.saturating_add(1);
        let finished = self.pool.wait_and_reap(PATIENCE);
        if finished && self.tries == 1 {
            return true;
        }
        self.pool.ask_reclaimers(error.requested_bytes(), error.lowest()) || finished
    }
}

impl fmt::Debug for Reclaimers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reclaimers", self.all.lock().len())
    }
}

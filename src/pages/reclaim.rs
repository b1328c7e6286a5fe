//! Who is asked for memory before anybody sees that there is none.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::{AccountId, PagePool};
use crate::error::Error;
use crate::sync::{Mutex, thread_token};

/// How often a call asks for memory again after somebody gave some back.
const TRIES: u32 = 8;
/// How long an allocation waits for what the device still uses before it fails.
const PATIENCE: Duration = Duration::from_secs(2);

/// Somebody who can give memory back when the pool is short: an engine with a cache, a buffer that can shrink.
pub trait Reclaimer: Send + Sync {
    /// Gives back what it can, of `bytes` that are missing, and returns how many bytes that was. Called from whichever thread runs
    /// short, with no lock of the library held, also while that thread captures: it may free blocks, drop spaces, and allocate. What runs short on its
    /// thread meanwhile asks nobody.
    fn reclaim(&self, bytes: u64) -> u64;

    /// The account that its memory counts toward, or one above that. `None`, for any memory of the device: it is asked where the device or the device's budget
    /// is short, and not where a budget below that is, since what does not count toward that one would not help.
    fn account(&self) -> Option<AccountId> {
        None
    }

    /// What giving back costs, in units of the caller's own: the cheapest is asked first.
    fn cost(&self) -> u64;
}

/// Those who asked to be asked.
#[derive(Default)]
pub(super) struct Reclaimers {
    all: Mutex<Vec<Weak<dyn Reclaimer>>>,
    /// The threads that are asking.
    asking: Mutex<HashSet<u64>>,
}

/// This thread is asking as long as it lives.
struct Asking<'a>(&'a Reclaimers);

impl<'a> Asking<'a> {
    /// `None`: it is asking already, and whoever is asked ran short himself.
    fn begin(reclaimers: &'a Reclaimers) -> Option<Self> {
        let begins = reclaimers.asking.lock().insert(thread_token());
        begins.then(|| Self(reclaimers))
    }
}

impl Drop for Asking<'_> {
    fn drop(&mut self) {
        self.0.asking.lock().remove(&thread_token());
    }
}

impl PagePool {
    /// Asks `reclaimer` when memory is short, as long as it lives.
    pub fn add_reclaimer(&self, reclaimer: &Arc<dyn Reclaimer>) {
        let mut all = self.reclaimers.all.lock();
        all.retain(|known| known.strong_count() > 0);
        all.push(Arc::downgrade(reclaimer));
    }

    /// What is done for one call that is short of memory.
    pub(crate) fn relief(&self) -> Relief<'_> {
        Relief { pool: self, tries: 0 }
    }

    /// Asks the reclaimers, cheapest first, until one has given `bytes`; whether it is worth trying again. With `lowest`, those whose memory counts toward
    /// the account of that key. The caller holds no lock.
    pub(crate) fn ask(&self, bytes: u64, lowest: Option<u64>) -> bool {
        let Some(_asking) = Asking::begin(&self.reclaimers) else { return false };
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
        // What they gave may wait for the device as well.
        self.finish_waiting(PATIENCE) || given > 0
    }
}

/// One call that is short of memory, as often as it tries.
pub(crate) struct Relief<'a> {
    pool: &'a PagePool,
    tries: u32,
}

impl Relief<'_> {
    /// Whether it is worth trying again after this error: eight times at most. The caller holds no lock.
    pub(crate) fn helps(&mut self, error: &Error) -> bool {
        self.helps_with(error, || false)
    }

    /// As [`helps`](Self::helps), after what the caller does himself first, which says whether that was of use.
    pub(crate) fn helps_with(&mut self, error: &Error, own: impl FnOnce() -> bool) -> bool {
        if self.tries == TRIES || !error.is_out_of_memory() {
            return false;
        }
        let own = own();
        self.once(error) || own
    }

    /// As [`helps`](Self::helps), as often as the caller likes: what only waits for the device is waited for, and if that was nothing, or not enough once,
    /// reclaimers are asked. In a busy process something of others is over all the time.
    pub(crate) fn once(&mut self, error: &Error) -> bool {
        self.tries = self.tries.saturating_add(1);
        let finished = self.pool.finish_waiting(PATIENCE);
        if finished && self.tries == 1 {
            return true;
        }
        self.pool.ask(error.requested_bytes(), error.lowest()) || finished
    }
}

impl fmt::Debug for Reclaimers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reclaimers", self.all.lock().len())
    }
}

//! Who is asked for memory before anybody sees that there is none.

use std::collections::HashSet;
use std::fmt;
use std::sync::{Arc, Weak};
use std::time::Duration;

use super::PagePool;
use crate::sync::{Mutex, thread_token};

/// How long an allocation waits for what the device still uses before it fails.
const PATIENCE: Duration = Duration::from_secs(2);

/// Somebody who can give memory back when the pool is short: an engine with a cache, a buffer that can shrink.
pub trait Reclaimer: Send + Sync {
    /// Gives back what it can, of `bytes` that are missing, and returns how many bytes that was. Called from whichever thread runs
    /// short, with no lock of the library held, also while that thread captures: it may free blocks, drop spaces, and allocate. What runs short on its
    /// thread meanwhile asks nobody.
    fn reclaim(&self, bytes: u64) -> u64;

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

    /// Memory is short: waits for what only waits for the device, then asks the reclaimers, cheapest first, until one has given
    /// `bytes`; whether it is worth trying again. The caller holds no lock.
    pub(crate) fn relieve(&self, bytes: u64) -> bool {
        if self.finish_waiting(PATIENCE) {
            return true;
        }
        let Some(_asking) = Asking::begin(&self.reclaimers) else { return false };
        let mut all: Vec<_> = self.reclaimers.all.lock().iter().filter_map(Weak::upgrade).collect();
        all.sort_by_key(|reclaimer| reclaimer.cost());
        let mut given = 0;
        for reclaimer in all {
            given += reclaimer.reclaim(bytes.saturating_sub(given));
            if given >= bytes {
                break;
            }
        }
        // What they gave may wait for the device as well.
        self.finish_waiting(PATIENCE) || given > 0
    }
}

impl fmt::Debug for Reclaimers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} reclaimers", self.all.lock().len())
    }
}

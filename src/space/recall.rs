//! Recall on demand: work which needs leased pages waits for the leases, if the arena is set to
//! wait.

use std::fmt;
use std::sync::Weak;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::Common;
use crate::error::{Error, Result};
use crate::sync::{Mutex, yield_now};

pub(crate) trait Recall: Send + Sync {
    /// Recalls these leases within one deadline. The caller holds no lock.
    fn recall(&self, leases: &[u64], deadline: Duration) -> Result<()>;
}

#[derive(Default)]
pub(crate) struct Recalls {
    /// Microseconds to wait; 0: the work is refused.
    micros: AtomicU64,
    by: Mutex<Option<Weak<dyn Recall>>>,
}

impl Recalls {
    pub(crate) fn by(&self, by: Weak<dyn Recall>) {
        *self.by.lock() = Some(by);
    }

    pub(crate) fn set(&self, wait: Option<Duration>) {
        let micros = wait.map_or(0, |wait| u64::try_from(wait.as_micros()).unwrap_or(u64::MAX).max(1));
        self.micros.store(micros, Ordering::Relaxed);
    }

    pub(crate) fn wait(&self) -> Option<Duration> {
        let micros = self.micros.load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }
}

impl Common {
    /// Retries `work` after recalling the leases in its way, if the arena waits. The caller holds
    /// no lock, but may hold the replay slot. Free while nothing is leased.
    #[inline]
    pub(super) fn recalled<T>(&self, mut work: impl FnMut() -> Result<T>) -> Result<T> {
        work().or_else(|error| self.recalled_of(error, &mut work))
    }

    #[cold]
    fn recalled_of<T>(&self, error: Error, work: &mut dyn FnMut() -> Result<T>) -> Result<T> {
        let since = Instant::now();
        let mut result = Err(error);
        loop {
            let Err(Error::Lent { leases }) = &result else { return result };
            let Some(wait) = self.recalls.wait() else { return result };
            let left = wait.saturating_sub(since.elapsed());
            let by = self.recalls.by.lock().as_ref().and_then(Weak::upgrade);
            match by {
                Some(by) if !left.is_zero() => by.recall(leases, left)?,
                _ => return result,
            }
            // The lending thread has not told the arena of a new lease yet.
            yield_now();
            result = work();
        }
    }
}

impl fmt::Debug for Recalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Recalls").field("wait", &self.wait()).finish_non_exhaustive()
    }
}

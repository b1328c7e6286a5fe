//! Leases: arena pages lent to elastic memory while the graphs which need them are not replayed.
//!
//! ```text
//! lend     arena's replay slot -> pages mapped by the fewest spaces -> mapped at the borrower too,
//!          in one transaction; no unmap
//! replay   of a graph with a lent page: Error::Lent with the leases, no launch (space/refresh.rs),
//!          or a recall first (space/recall.rs)
//! recall   borrower vacates, without locks -> its fence -> unmap at the borrower -> graph may run
//! ```
//!
//! A page is on lease while mapped at the place of its lease (`pages/lent.rs`), so any unmap ends
//! the lease. The mutex of an arena's leases is held across no call of a borrower.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::elastic::Lender;
use crate::error::{Error, Result};
use crate::pages::{LentPlace, PageId, Transaction, next_number};
use crate::pause::HookGuard;
use crate::space::{Common, Recall};
use crate::sync::{Mutex, thread_token, yield_now};
use crate::units::Stream;

mod borrower;

pub(crate) use borrower::To;
use borrower::bytes_of_lease;
pub use borrower::{BlockBorrower, Borrower, Vacate, VacateBlocks, Vacated};

/// Between two polls of the borrower's fence.
const PAUSE: Duration = Duration::from_micros(50);

struct Inner {
    id: u64,
    part: Range<u64>,
    to: To,
    common: Arc<Common>,
    /// Thread that recalls the lease; 0: none.
    recalling: Mutex<u64>,
}

/// Lease: pages of an arena also mapped in elastic memory, which it keeps alive, not the graphs.
/// Clones are the same lease. Drop has no effect.
#[derive(Clone)]
pub struct Lease(Arc<Inner>);

struct Recalling<'a>(&'a Inner);

impl Drop for Recalling<'_> {
    fn drop(&mut self) {
        *self.0.recalling.lock() = 0;
    }
}

impl Lease {
    /// Returns the lease number.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Returns the lent part of the buffer; empty for a cache.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        if matches!(self.0.to, To::Buffer(..)) { self.0.part.clone() } else { 0..0 }
    }

    /// Returns the lent blocks of the cache; empty for a buffer.
    #[must_use]
    pub fn blocks(&self) -> Range<u64> {
        if matches!(self.0.to, To::Cache(..)) { self.0.part.clone() } else { 0..0 }
    }

    /// Returns the bytes still on lease. 0: the lease has ended.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let common = &self.0.common;
        common.pool().lent_bytes(Some(self.0.id), common.shared.account())
    }

    /// Makes later work of a stream wait for the graphs that used the pages. Required before the
    /// borrower's first work there.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.0.to.before(stream)
    }

    /// Recalls all pages from the borrower: `vmmgraph_lease_recall`. Errors of the borrower are
    /// passed on; its own callback must not recall.
    pub fn recall(&self, deadline: Duration) -> Result<()> {
        self.recall_bytes(u64::MAX, deadline)
    }

    /// [Recalls](Self::recall) at least `bytes`, or all. The lease continues with the rest.
    pub fn recall_bytes(&self, bytes: u64, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let wait = || {
            yield_now();
            std::thread::sleep(PAUSE.min(left()));
        };
        let (inner, me) = (&*self.0, thread_token());
        loop {
            {
                let mut thread = inner.recalling.lock();
                match *thread {
                    0 => {
                        *thread = me;
                        break;
                    }
                    own if own == me => return Err(late("being recalled by this thread")),
                    _ => {}
                }
            }
            HookGuard::refuse("a lease")?;
            if left().is_zero() {
                return Err(late("being recalled by another thread"));
            }
            wait();
        }
        let _over = Recalling(inner);
        let there = self.bytes();
        let stay = there - bytes.min(there);
        while self.bytes() > stay {
            let lent = inner.common.pool().lent_places(inner.id);
            let now = self.bytes();
            let given = inner.to.vacate(inner.id, &lent, now.saturating_sub(stay), left())?;
            let going = now.saturating_sub(given.bytes).max(stay);
            loop {
                inner.to.reap();
                if self.bytes() <= going {
                    break;
                }
                if left().is_zero() {
                    return Err(late("in use by the device"));
                }
                wait();
            }
            if self.bytes() > stay {
                // Ask again: another thread has backed a block since.
                if !given.all || left().is_zero() {
                    return Err(late("needed by its borrower"));
                }
                wait();
            }
        }
        let micros = start.elapsed().as_micros() as u64;
        let back = there.saturating_sub(self.bytes());
        tracing::debug!(lease = inner.id, bytes = back, micros, "pages on lease are back");
        Ok(())
    }
}

fn late(reason: &'static str) -> Error {
    Error::wrong_state(format!(
        "cannot recall the lease by the deadline: its pages are {reason}; try again with a later deadline"
    ))
}

#[derive(Default)]
pub(crate) struct Leases(Mutex<VecDeque<Lease>>);

impl Leases {
    /// See [`SharedVmmAllocator::lend`](crate::SharedVmmAllocator::lend).
    pub(crate) fn lend(&self, common: &Arc<Common>, to: To, part: Range<u64>) -> Result<Lease> {
        let large = common.shared.geometry().large();
        to.check(large, &common.device, &part)?;
        let (pool, account, id) = (common.pool(), common.shared.account(), next_number());
        let mut choose = |transaction: &mut Transaction<'_>, places: &[LentPlace]| -> Result<Vec<PageId>> {
            let bytes = large * places.len() as u64;
            if places.is_empty() {
                return Err(bytes_of_lease(bytes, "at least one page"));
            }
            let pages = common.shared.to_lend(transaction, places.len());
            if pages.len() < places.len() {
                return Err(bytes_of_lease(
                    bytes,
                    "no more than the arena's large pages that are not on lease",
                ));
            }
            let placed: Vec<_> = pages.iter().copied().zip(places.iter().copied()).collect();
            pool.lend(id, (account, to.account()), large, &placed)?;
            Ok(pages)
        };
        // Between two replays, so each later launch sees the lease.
        let lent = common.order.between(|| {
            common.require_resident()?;
            let fence = common.order.fence();
            let lent = to.borrow(&part, Lender { choose: &mut choose, fence });
            if lent.is_err() {
                pool.unlend(id);
            }
            common.shared.lent();
            lent
        })?;
        let (common, recalling) = (Arc::clone(common), Mutex::default());
        let lease = Lease(Arc::new(Inner { id, part, to, common, recalling }));
        // After the mutex: the last reference to a borrower runs the drop of its owner.
        let mut ended = Vec::new();
        let mut known = self.0.lock();
        // Two per new lease, so ended leases do not accumulate.
        for _ in 0..2 {
            match known.pop_front() {
                Some(oldest) if oldest.bytes() > 0 => known.push_back(oldest),
                oldest => ended.extend(oldest),
            }
        }
        if lease.bytes() > 0 {
            // Also after a failed undo: a recall returns these pages.
            known.push_back(lease.clone());
        }
        drop(known);
        lent?;
        tracing::debug!(lease = id, bytes = lease.bytes(), "pages lent");
        Ok(lease)
    }

    pub(crate) fn current(&self) -> Vec<Lease> {
        let mut known = self.0.lock();
        let (active, ended): (VecDeque<_>, VecDeque<_>) =
            known.drain(..).partition(|lease| lease.bytes() > 0);
        *known = active;
        let mut leases: Vec<Lease> = known.iter().cloned().collect();
        drop(known);
        // Without the mutex: the last reference to a borrower runs the drop of its owner.
        drop(ended);
        leases.sort_unstable_by_key(Lease::id);
        leases
    }

    /// Recalls leases within one deadline. Tries all, and returns the first error.
    pub(crate) fn recall(&self, which: impl Fn(&Lease) -> bool, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let mut result = Ok(());
        for lease in self.current().iter().filter(|lease| which(lease)) {
            result = result.and(lease.recall(deadline.saturating_sub(start.elapsed())));
        }
        result
    }
}

impl Recall for Leases {
    fn recall(&self, leases: &[u64], deadline: Duration) -> Result<()> {
        Self::recall(self, |lease| leases.contains(&lease.id()), deadline)
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} of {:?})", self.0.id, self.0.part)
    }
}

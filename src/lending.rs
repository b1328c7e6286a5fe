//! Pages that only some graphs of an arena need, on lease to elastic memory while those are not replayed.
//!
//! ```text
//!   lend      the arena's turn -> pages that the fewest spaces show -> mapped at the borrower's addresses too, one change; unmapped nowhere
//!   replay    of a graph that shows one: Error::Lent with the leases; nothing is launched (space/refresh.rs), or a recall first (space/recall.rs)
//!   recall    the borrower vacates, without locks -> its fence -> unmapped from its addresses -> the graph may be replayed
//! ```
//!
//! A page is on lease as long as it shows at the place where it was lent: that is what the pool's books say (`pages/lent.rs`), so a lease
//! ends whoever unmapped it, a recall, a decommit of the borrower's own, or the end of his memory.

use std::collections::VecDeque;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::elastic::Lender;
use crate::error::{Error, Result};
use crate::pages::{Change, HookGuard, LentPlace, PageId, next_number};
use crate::space::{Common, Recall};
use crate::sync::{Mutex, thread_token, yield_now};
use crate::units::Stream;

mod borrower;

pub(crate) use borrower::To;
use borrower::bytes_of_lease;
pub use borrower::{BlockBorrower, Borrower, Vacate, VacateBlocks, Vacated};

/// How long a recall sleeps between two looks at the borrower's fence.
const PAUSE: Duration = Duration::from_micros(50);

struct Inner {
    id: u64,
    part: Range<u64>,
    to: To,
    common: Arc<Common>,
    /// The thread that recalls it; 0: nobody.
    recalling: Mutex<u64>,
}

/// Pages of an arena that show in elastic memory as well. Clones are the same lease. Holds that memory and not the graphs.
///
/// Dropping it changes nothing: the pages are on lease until the borrower has them no more.
#[derive(Clone)]
pub struct Lease(Arc<Inner>);

/// Nobody recalls it any more.
struct Recalling<'a>(&'a Inner);

impl Drop for Recalling<'_> {
    fn drop(&mut self) {
        *self.0.recalling.lock() = 0;
    }
}

impl Lease {
    /// Its number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Bytes of the buffer, from its base, where the pages were lent; empty for a cache.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        if matches!(self.0.to, To::Buffer(..)) { self.0.part.clone() } else { 0..0 }
    }

    /// The blocks of the cache that pages were lent for; empty for a buffer.
    #[must_use]
    pub fn blocks(&self) -> Range<u64> {
        if matches!(self.0.to, To::Cache(..)) { self.0.part.clone() } else { 0..0 }
    }

    /// Bytes that are still on lease; 0: it is over.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let common = &self.0.common;
        common.pool().lent_bytes(Some(self.0.id), common.shared.account())
    }

    /// Makes later work of a stream, the borrower's first on these pages, wait for the graphs that used them before.
    ///
    /// # Errors
    /// Those of [`ElasticBuffer::before`](crate::ElasticBuffer::before).
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.0.to.before(stream)
    }

    /// Has the pages given back: asks the borrower, waits for its fence, and unmaps them from its memory. Over already: nothing. One
    /// thread recalls at a time; others wait for it, until their deadline, and go on with what is left. Until the pages are back, nothing is
    /// committed in their places.
    ///
    /// # Errors
    /// What the borrower says; [`Error::WrongState`] if it gave up too little, if its fence is not over at the deadline (then the pages are no
    /// longer the borrower's and come back when somebody looks again), and in the borrower's own callback. What the driver says of
    /// unmapping is logged and tried again.
    pub fn recall(&self, deadline: Duration) -> Result<()> {
        self.recall_bytes(u64::MAX, deadline)
    }

    /// As [`recall`](Self::recall), so many bytes at least, or all there are. The lease goes on with the rest.
    ///
    /// # Errors
    /// As [`recall`](Self::recall).
    pub fn recall_bytes(&self, bytes: u64, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let wait = || {
            // Another thread may be unmapping them just now.
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
                inner.to.settle();
                if self.bytes() <= going {
                    break;
                }
                if left().is_zero() {
                    return Err(late("in use by the device"));
                }
                wait();
            }
            if self.bytes() > stay {
                // A borrower that gave up all it was asked for is asked again: another thread has backed something there since.
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

/// The leases of an arena.
#[derive(Default)]
pub(crate) struct Leases(Mutex<VecDeque<Lease>>);

impl Leases {
    /// See [`SharedVmmAllocator::lend`](crate::SharedVmmAllocator::lend).
    pub(crate) fn lend(&self, common: &Arc<Common>, to: To, part: Range<u64>) -> Result<Lease> {
        let large = common.shared.geometry().large();
        to.check(large, &common.device, &part)?;
        let (pool, account, id) = (common.pool(), common.shared.account(), next_number());
        let mut choose = |change: &mut Change<'_>, places: &[LentPlace]| -> Result<Vec<PageId>> {
            let bytes = large * places.len() as u64;
            if places.is_empty() {
                return Err(bytes_of_lease(bytes, "at least one page"));
            }
            let pages = common.shared.to_lend(change, places.len());
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
        // Between two replays: none is launched that does not see it.
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
        let mut known = self.0.lock();
        // Two that are known are looked at for one that comes: those that are over do not gather, and a
        // lease costs the same among many.
        for _ in 0..2 {
            let oldest = known.pop_front().filter(|known| known.bytes() > 0);
            known.extend(oldest);
        }
        if lease.bytes() > 0 {
            // Also where the driver would neither map them all nor undo that: they go at a recall.
            known.push_back(lease.clone());
        }
        drop(known);
        lent?;
        tracing::debug!(lease = id, bytes = lease.bytes(), "pages lent");
        Ok(lease)
    }

    /// Those that are not over, by number.
    pub(crate) fn current(&self) -> Vec<Lease> {
        let mut known = self.0.lock();
        known.retain(|lease| lease.bytes() > 0);
        let mut leases: Vec<Lease> = known.iter().cloned().collect();
        leases.sort_unstable_by_key(Lease::id);
        leases
    }

    /// Recalls some; they share the time. All are tried; the first failure.
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

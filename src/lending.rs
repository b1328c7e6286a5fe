//! Pages that only some graphs of an arena need, on lease to an elastic buffer while those are not replayed.
//!
//! ```text
//!   lend      the arena's turn -> pages that the fewest spaces show -> mapped at the buffer's addresses too, one change; unmapped nowhere
//!   replay    of a graph that shows one: Error::Lent with the leases; nothing is launched (space/refresh.rs)
//!   recall    the borrower vacates, without locks -> its fence -> unmapped from the buffer -> the graph may be replayed
//! ```
//!
//! A page is on lease as long as it shows at the place in the buffer where it was lent: that is what the pool's books say, so a lease ends
//! whoever unmapped it, a recall, a decommit of the borrower's own, or the end of the buffer.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::elastic::ElasticBuffer;
use crate::error::{Error, Result};
use crate::pages::{Fence, HookGuard, next_number};
use crate::space::Common;
use crate::sync::{Monitor, Mutex, thread_token, yield_now};

/// How long a recall sleeps between two looks at the borrower's fence.
const PAUSE: Duration = Duration::from_micros(50);

/// What a borrower is asked for.
#[derive(Clone, Debug)]
pub struct Vacate {
    /// The lease.
    pub lease: u64,
    /// Bytes of the buffer, from its base, that are to be given back.
    pub range: Range<u64>,
    /// What else is committed there, and is not on lease.
    pub instead: Vec<Range<u64>>,
    /// How much time is left. Afterwards the recall fails, and the pages go all the same once they are given back.
    pub deadline: Duration,
}

/// Who uses pages on lease, and can do without.
pub trait Borrower: Send + Sync {
    /// Stops using a range: no work on it is given to the device from now on; behind the fence there is none left. Called on the thread that
    /// recalls, with no lock held. It may commit other parts of the buffer, and not wait for this lease.
    ///
    /// # Errors
    /// The borrower needs them still; the recall returns this, and the lease goes on.
    fn vacate(&self, asked: &Vacate) -> Result<Fence>;
}

struct Inner {
    id: u64,
    range: Range<u64>,
    buffer: Arc<ElasticBuffer>,
    borrower: Arc<dyn Borrower>,
    common: Arc<Common>,
    /// The thread that recalls it; 0: nobody.
    recalling: Monitor<u64>,
}

/// Pages of an arena that show in an elastic buffer as well. Clones are the same lease. Holds the buffer and not the graphs.
///
/// Dropping it changes nothing: the pages are on lease until the buffer has them no more.
#[derive(Clone)]
pub struct Lease(Arc<Inner>);

/// Nobody recalls it any more.
struct Recalling<'a>(&'a Inner);

impl Drop for Recalling<'_> {
    fn drop(&mut self) {
        self.0.recalling.change(|thread| *thread = 0);
    }
}

impl Lease {
    /// Its number, unique in the process.
    #[must_use]
    pub fn id(&self) -> u64 {
        self.0.id
    }

    /// Bytes of the buffer, from its base, where the pages were lent.
    #[must_use]
    pub fn range(&self) -> Range<u64> {
        self.0.range.clone()
    }

    /// Bytes that are still on lease; 0: it is over.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.common.shared.lent_bytes(Some(self.0.id))
    }

    /// Makes later work of a stream, the borrower's first on these pages, wait for the graphs that used them before.
    ///
    /// # Errors
    /// Those of [`ElasticBuffer::before`].
    pub fn before(&self, stream: crate::units::Stream) -> Result<()> {
        self.0.buffer.before(stream)
    }

    /// Has the pages given back: asks the borrower, waits for its fence, and unmaps them from the buffer. Over already: nothing. One thread
    /// recalls at a time; others wait for it, and go on with what is left.
    ///
    /// # Errors
    /// What the borrower says; [`Error::WrongState`] if its fence is not over at the deadline: then the pages are no longer the borrower's and
    /// come back when somebody looks again; in the borrower's own callback. What the driver says of unmapping is logged and tried again.
    pub fn recall(&self, deadline: Duration) -> Result<()> {
        let start = Instant::now();
        let left = || deadline.saturating_sub(start.elapsed());
        let inner = &*self.0;
        let me = thread_token();
        inner.recalling.wait_for(|thread| match *thread {
            0 => {
                *thread = me;
                Some(Ok(()))
            }
            own if own == me => Some(Err(waits_for_itself())),
            _ => HookGuard::refuse("a lease").err().map(Err),
        })?;
        let _over = Recalling(inner);
        if self.bytes() == 0 {
            return Ok(());
        }
        let asked =
            Vacate { lease: inner.id, range: self.range(), instead: inner.buffer.owned(), deadline: left() };
        let fence = {
            let _inside = HookGuard::enter();
            inner.borrower.vacate(&asked)?
        };
        inner.buffer.decommit(self.range(), &fence)?;
        loop {
            inner.buffer.settle();
            if self.bytes() == 0 {
                tracing::debug!(
                    lease = inner.id,
                    micros = start.elapsed().as_micros() as u64,
                    "a lease is over"
                );
                return Ok(());
            }
            if left().is_zero() {
                let (expected, found) = ("given back by the deadline", "in use by the device");
                return Err(Error::WrongState { what: "a lease", expected, found });
            }
            // Another thread may be unmapping them just now.
            yield_now();
            std::thread::sleep(PAUSE.min(left()));
        }
    }
}

fn waits_for_itself() -> Error {
    let (expected, found) = ("recalled once at a time", "being recalled by this thread");
    Error::WrongState { what: "a lease", expected, found }
}

/// The leases of an arena.
#[derive(Default)]
pub(crate) struct Leases(Mutex<Vec<Lease>>);

impl Leases {
    /// See [`SharedVmmAllocator::lend`](crate::SharedVmmAllocator::lend).
    pub(crate) fn lend(
        &self,
        common: &Arc<Common>,
        buffer: &Arc<ElasticBuffer>,
        range: Range<u64>,
        borrower: &Arc<dyn Borrower>,
    ) -> Result<Lease> {
        let (page, large) = (buffer.page_bytes(), common.shared.geometry().large());
        if page != large {
            return Err(Error::InvalidPageSize {
                what: "a page of the buffer",
                bytes: page,
                granularity: large,
            });
        }
        if !Arc::ptr_eq(buffer.device(), &common.device) {
            let (value, expected) = (i128::from(buffer.device().driver().info().ordinal), "the arena's");
            return Err(Error::InvalidArgument { what: "the buffer's device", value, expected });
        }
        let wrong = |value: u64, expected| Error::InvalidArgument {
            what: "bytes of a lease",
            value: value.into(),
            expected,
        };
        if range.start >= range.end {
            return Err(wrong(0, "at least one page"));
        }
        let bytes = range.end - range.start;
        if !range.start.is_multiple_of(page) || !bytes.is_multiple_of(page) {
            return Err(wrong(bytes, "whole pages of the buffer"));
        }
        let id = next_number();
        // Between two replays: none is launched that does not see it.
        common.order.between(|| {
            common.require_resident()?;
            let account = common.shared.account().stats();
            let sure = account.least_bytes + common.shared.lent_bytes(None);
            if account.charged_bytes.saturating_sub(sure) < bytes {
                return Err(wrong(bytes, "no more than the arena has above what it is sure to get"));
            }
            let mut pages = common.shared.lendable();
            if (pages.len() as u64) * page < bytes {
                return Err(wrong(bytes, "no more than the arena's large pages that are not on lease"));
            }
            pages.truncate((bytes / page) as usize);
            let places =
                buffer.borrow_pages(range.clone(), &pages, common.shared.holder(), common.order.fence())?;
            common.shared.lend(id, &places);
            Ok(())
        })??;
        tracing::debug!(lease = id, bytes, arena = common.shared.arena(), "pages lent");
        let (buffer, borrower, common) = (Arc::clone(buffer), Arc::clone(borrower), Arc::clone(common));
        let recalling = Monitor::default();
        let lease = Lease(Arc::new(Inner { id, range, buffer, borrower, common, recalling }));
        let mut known = self.0.lock();
        known.retain(|known| known.bytes() > 0);
        known.push(lease.clone());
        Ok(lease)
    }

    /// Those that are not over.
    pub(crate) fn current(&self) -> Vec<Lease> {
        let mut leases = self.0.lock();
        leases.retain(|lease| lease.bytes() > 0);
        leases.clone()
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

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Lease({} of {:?})", self.0.id, self.0.range)
    }
}

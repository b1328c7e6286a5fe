//! Lending pages of an arena, and recalling leases.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::SharedVmmAllocator;
use crate::elastic::{ElasticBuffer, KvCache};
use crate::error::Result;
use crate::lending::{BlockBorrower, Borrower, Lease, To};
use crate::space::Space;

impl SharedVmmAllocator {
    /// Lends large pages to an uncommitted part of a buffer, in whole pages. The pages are also
    /// mapped in the buffer and usable, with undefined contents. They stay mapped for the graphs.
    /// Until a [recall](Lease::recall), graphs with a lent page are not replayed, and captures and
    /// eager work do not get lent pages ([`Error::Lent`](crate::Error::Lent)). Pages mapped by the
    /// fewest spaces are lent first. Lent pages stay charged to the arena. Guaranteed bytes are not
    /// lent.
    ///
    /// The first work on lent pages must wait by [`Lease::before`]. The call waits for a replay or
    /// scope of a different thread, not for the device. A different thread may recall the lease
    /// before the return: a caller with its own records adds the lease before the call, and checks
    /// again afterwards.
    ///
    /// # Errors
    /// Nothing changed: [`Error::InvalidPageSize`](crate::Error::InvalidPageSize) with both sizes
    /// if the buffer's pages differ from the arena's large pages;
    /// [`Error::WrongState`](crate::Error::WrongState) while paused, inside a launch or scope of
    /// the arena, or if a part of the range is committed;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for an empty range, partial pages,
    /// a range beyond the buffer's end, more pages than can be lent, or a buffer of a different
    /// device; driver errors of the map.
    pub fn lend(
        &self,
        buffer: &Arc<ElasticBuffer>,
        range: Range<u64>,
        borrower: &Arc<dyn Borrower>,
    ) -> Result<Lease> {
        self.usable()?;
        let to = To::Buffer(Arc::clone(buffer), Arc::clone(borrower));
        self.leases.lend(&self.common, to, range)
    }

    /// As [`lend`](Self::lend), for unbacked blocks of a KV cache, in all planes or in none. Each
    /// missing page of these blocks is lent; pages already present for neighbour blocks stay. Lent
    /// pages stay charged to the arena, not to the cache.
    ///
    /// # Errors
    /// Nothing changed: as [`lend`](Self::lend); [`Error::WrongState`](crate::Error::WrongState) if
    /// one of the blocks is backed; [`Error::OverBudget`](crate::Error::OverBudget) above the
    /// cache's limit.
    pub fn lend_blocks(
        &self,
        cache: &Arc<KvCache>,
        blocks: Range<u64>,
        borrower: &Arc<dyn BlockBorrower>,
    ) -> Result<Lease> {
        self.usable()?;
        let to = To::Cache(Arc::clone(cache), Arc::clone(borrower));
        self.leases.lend(&self.common, to, blocks)
    }

    /// Returns the bytes that could be lent now to a borrower without common accounts: large pages
    /// not on lease, up to the bytes of the arena's account and its ancestors above their
    /// guarantees.
    #[must_use]
    pub fn lendable_bytes(&self) -> u64 {
        let shared = &self.common.shared;
        let pages = shared.lendable() * shared.geometry().large();
        pages.min(self.common.pool().lendable(shared.account(), None))
    }

    /// Returns the bytes on lease.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        self.common.pool().lent_bytes(None, self.common.shared.account())
    }

    /// Sets the behaviour of replays, eager scopes and captures that need pages on lease. With a
    /// time, they recall these leases and wait at most so long. `None` (default): they return
    /// [`Error::Lent`](crate::Error::Lent). In no case does work run over lent pages. A wait may
    /// occupy the arena's replay slot (in a scope or a launch), so other replays wait too.
    pub fn set_recall(&self, wait: Option<Duration>) {
        self.common.recalls.set(wait);
    }

    /// Returns the active leases.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        self.leases.current()
    }

    /// Recalls every lease that blocks a replay of `space`, within one common deadline.
    ///
    /// # Errors
    /// First error of a [recall](Lease::recall). All leases are tried.
    pub fn recall_for(&self, space: &Space, deadline: Duration) -> Result<()> {
        let needed = space.leases();
        self.leases.recall(|lease| needed.contains(&lease.id()), deadline)
    }

    /// Recalls every lease, within one common deadline.
    ///
    /// # Errors
    /// As [`recall_for`](Self::recall_for).
    pub fn recall_all(&self, deadline: Duration) -> Result<()> {
        self.leases.recall(|_| true, deadline)
    }
}

//! An arena lends pages, and has them back.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::SharedVmmAllocator;
use crate::elastic::{ElasticBuffer, KvCache};
use crate::error::Result;
use crate::lending::{BlockBorrower, Borrower, Lease, To};
use crate::space::Space;

impl SharedVmmAllocator {
    /// Lends large pages to a part of a buffer, in whole pages, where nothing is committed: they show there too and are usable, with
    /// undefined contents. They stay mapped for the graphs; those that show one are not replayed until a [recall](Lease::recall), nor are
    /// they given to captures and eager work ([`Error::Lent`](crate::Error::Lent)). Of the pages that are not on lease those go that the fewest spaces show. They count
    /// for the arena; what its account is sure to get is not lent.
    ///
    /// Work on them waits for [`Lease::before`] first. Waits for the end of a replay or scope that another thread is at, not for the device. Another thread
    /// may have them recalled before this returns: whoever keeps account of what he has notes them before, and looks again afterwards.
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`](crate::Error::InvalidPageSize) with both sizes if the buffer's pages are not as long as the arena's large ones; [`Error::WrongState`](crate::Error::WrongState) while
    /// the arena is paused, inside a launch or scope of it, or if something of the range is there; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for a range
    /// that is empty, of no whole pages, beyond the buffer's end or of more pages than there are to lend, and for another device's buffer;
    /// what the driver says of mapping. Nothing has changed then.
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

    /// As [`lend`](Self::lend), for blocks of a KV cache of which none is backed: in all planes, or in none. Wherever a page of theirs is
    /// missing, one is lent; where neighbours have brought a page already, that stays. They count for the arena, not for the cache.
    ///
    /// # Errors
    /// As [`lend`](Self::lend), with [`Error::WrongState`](crate::Error::WrongState) if a block of these is backed; [`Error::OverBudget`](crate::Error::OverBudget) beyond the cache's limit.
    /// Nothing has changed then.
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

    /// Bytes that could be lent now, to somebody who shares none of the arena's accounts: of its large pages that are not on lease,
    /// as much as its account, and those above it, have beyond what they are sure to get.
    #[must_use]
    pub fn lendable_bytes(&self) -> u64 {
        let shared = &self.common.shared;
        let pages = shared.lendable() * shared.geometry().large();
        pages.min(self.common.pool().lendable(shared.account(), None))
    }

    /// Bytes on lease.
    #[must_use]
    pub fn lent_bytes(&self) -> u64 {
        self.common.pool().lent_bytes(None, self.common.shared.account())
    }

    /// What becomes of replays, eager scopes and captures that need pages on lease, from now on: with a time, they recall those leases
    /// themselves and wait so long at most; `None`, as at first: they are [`Error::Lent`](crate::Error::Lent). Either way nothing runs over such pages. What waits
    /// may wait with the arena's turn (in a scope or a launch), so that other replays wait too.
    pub fn set_recall(&self, wait: Option<Duration>) {
        self.common.recalls.set(wait);
    }

    /// The leases that are not over.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        self.leases.current()
    }

    /// Recalls every lease that stands in the way of a space's replay; they share the time.
    ///
    /// # Errors
    /// The first failure of a [recall](Lease::recall); the others were tried too.
    pub fn recall_for(&self, space: &Space, deadline: Duration) -> Result<()> {
        let needed = space.leases();
        self.leases.recall(|lease| needed.contains(&lease.id()), deadline)
    }

    /// Recalls every lease; they share the time.
    ///
    /// # Errors
    /// As [`recall_for`](Self::recall_for).
    pub fn recall_all(&self, deadline: Duration) -> Result<()> {
        self.leases.recall(|_| true, deadline)
    }
}

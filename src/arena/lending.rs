use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::SharedVmmAllocator;
use crate::elastic::{ElasticBuffer, KvCache};
use crate::error::Result;
use crate::lending::{BlockBorrower, Borrower, Lease, To};
use crate::space::Space;

impl SharedVmmAllocator {
    /// Lends large pages to an uncommitted part of a buffer, in whole pages, until a
    /// [recall](Lease::recall): `vmmgraph_arena_lend`.
    pub fn lend(
        &self,
        buffer: &Arc<ElasticBuffer>,
        range: Range<u64>,
        borrower: &Arc<dyn Borrower>,
    ) -> Result<Lease> {
        self.common.require_usable()?;
        let to = To::Buffer(Arc::clone(buffer), Arc::clone(borrower));
        self.leases.lend(&self.common, to, range)
    }

    /// Lends pages to unbacked blocks of a KV cache: `vmmgraph_arena_lend_blocks`.
    pub fn lend_blocks(
        &self,
        cache: &Arc<KvCache>,
        blocks: Range<u64>,
        borrower: &Arc<dyn BlockBorrower>,
    ) -> Result<Lease> {
        self.common.require_usable()?;
        let to = To::Cache(Arc::clone(cache), Arc::clone(borrower));
        self.leases.lend(&self.common, to, blocks)
    }

    /// Returns the bytes that could be lent to a borrower without common accounts.
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

    /// Sets the behaviour of work that needs pages on lease: `vmmgraph_arena_set_recall`. `None`
    /// returns [`Error::Lent`](crate::Error::Lent). A wait may occupy the arena's replay slot.
    pub fn set_recall(&self, wait: Option<Duration>) {
        self.common.recalls.set(wait);
    }

    /// Returns the active leases.
    #[must_use]
    pub fn leases(&self) -> Vec<Lease> {
        self.leases.current()
    }

    /// Recalls every lease that blocks a replay of `space`, within one deadline. Tries all; returns
    /// the first error of a [recall](Lease::recall).
    pub fn recall_for(&self, space: &Space, deadline: Duration) -> Result<()> {
        let needed = space.leases();
        self.leases.recall(|lease| needed.contains(&lease.id()), deadline)
    }

    /// Recalls every lease, like [`recall_for`](Self::recall_for).
    pub fn recall_all(&self, deadline: Duration) -> Result<()> {
        self.leases.recall(|_| true, deadline)
    }
}

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::elastic::{ElasticBuffer, KvCache, Lender};
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, LentPlace};
use crate::pause::HookGuard;
use crate::units::Stream;

/// Request to the user of a buffer.
#[derive(Clone, Debug)]
pub struct Vacate {
    /// Lease number.
    pub lease: u64,
    /// Bytes to vacate, from the buffer's base.
    pub range: Range<u64>,
    /// Other committed parts of the buffer.
    pub instead: Vec<Range<u64>>,
    /// Remaining time. Pages vacated later still return.
    pub deadline: Duration,
}

/// User of a buffer with pages on lease.
pub trait Borrower: Send + Sync {
    /// Stops using a range, and returns a fence after its last work. Called on the recalling
    /// thread, without a lock. May commit other parts of the buffer; must not wait for this lease.
    /// An error refuses: the recall returns it, and the lease continues.
    fn vacate(&self, asked: &Vacate) -> Result<Fence>;
}

/// Request to the user of a KV cache: vacate some of these blocks.
#[derive(Clone, Debug)]
pub struct VacateBlocks {
    /// Lease number.
    pub lease: u64,
    /// Backed blocks on the lease's pages. A page returns once none of its blocks is backed: see
    /// [`BlockPool::ask_of`](crate::BlockPool::ask_of).
    pub blocks: Vec<Range<u64>>,
    /// Requested bytes of pages.
    pub bytes: u64,
    /// Backed blocks outside the lease's pages.
    pub instead: Vec<Range<u64>>,
    /// Remaining time. Pages vacated later still return.
    pub deadline: Duration,
}

/// Answer of the user of a KV cache.
#[derive(Debug, Default)]
pub struct Vacated {
    /// Vacated blocks, released by the library.
    pub blocks: Vec<Range<u64>>,
    /// After this fence no work uses the blocks.
    pub fence: Fence,
}

/// User of a KV cache with pages on lease.
pub trait BlockBorrower: Send + Sync {
    /// Stops using blocks and names them. Called on the recalling thread, without a lock. May back
    /// other blocks of the cache; must not wait for this lease. Vacated blocks cannot be backed
    /// again until their pages are back. An error refuses: the recall returns it, and the lease
    /// continues.
    fn vacate(&self, asked: &VacateBlocks) -> Result<Vacated>;
}

pub(super) struct Given {
    pub(super) bytes: u64,
    /// All requested blocks were vacated.
    pub(super) all: bool,
}

fn covered(range: &Range<u64>, by: &[Range<u64>]) -> bool {
    let mut at = range.start;
    while at < range.end {
        match by.iter().find(|other| other.contains(&at)) {
            Some(other) => at = other.end,
            None => return false,
        }
    }
    true
}

pub(crate) enum To {
    Buffer(Arc<ElasticBuffer>, Arc<dyn Borrower>),
    Cache(Arc<KvCache>, Arc<dyn BlockBorrower>),
}

impl To {
    fn page(&self) -> (&'static str, u64) {
        match self {
            Self::Buffer(buffer, _) => ("a page of the buffer", buffer.page_bytes()),
            Self::Cache(cache, _) => ("a page of the cache", cache.page_bytes()),
        }
    }

    fn device(&self) -> &Arc<Device> {
        match self {
            Self::Buffer(buffer, _) => buffer.device(),
            Self::Cache(cache, _) => cache.device(),
        }
    }

    pub(super) fn account(&self) -> &Account {
        match self {
            Self::Buffer(buffer, _) => buffer.account(),
            Self::Cache(cache, _) => cache.account(),
        }
    }

    pub(super) fn check(&self, large: u64, device: &Arc<Device>, part: &Range<u64>) -> Result<()> {
        let (what, page) = self.page();
        if page != large {
            return Err(Error::InvalidPageSize { what, bytes: page, granularity: large });
        }
        if !Arc::ptr_eq(self.device(), device) {
            let (value, expected) = (i128::from(self.device().driver().info().ordinal), "the arena's");
            return Err(Error::InvalidArgument { what: "the borrower's device", value, expected });
        }
        if part.start >= part.end {
            return Err(bytes_of_lease(0, "at least one page"));
        }
        let bytes = part.end - part.start;
        if matches!(self, Self::Buffer(..))
            && !(part.start.is_multiple_of(page) && bytes.is_multiple_of(page))
        {
            return Err(bytes_of_lease(bytes, "whole pages of the buffer"));
        }
        Ok(())
    }

    pub(super) fn borrow(&self, part: &Range<u64>, lender: Lender<'_>) -> Result<()> {
        match self {
            Self::Buffer(buffer, _) => buffer.borrow_pages(part.clone(), lender),
            Self::Cache(cache, _) => cache.borrow_pages(part, lender),
        }
    }

    /// Vacates pages, unmapped after the user's fence. The caller has no lock.
    pub(super) fn vacate(
        &self,
        lease: u64,
        lent: &[LentPlace],
        bytes: u64,
        deadline: Duration,
    ) -> Result<Given> {
        match self {
            Self::Buffer(buffer, borrower) => {
                // From the end of the part.
                let keep = lent.len().saturating_sub(bytes.div_ceil(buffer.page_bytes()) as usize);
                let lent = lent.get(keep..).unwrap_or(lent);
                let fence = match buffer.in_use(lent) {
                    Some(range) => {
                        let asked = Vacate { lease, range, instead: buffer.owned(), deadline };
                        let _inside = HookGuard::enter();
                        borrower.vacate(&asked)?
                    }
                    None => Fence::default(),
                };
                Ok(Given { bytes: buffer.give_back(lent, &fence)?, all: false })
            }
            Self::Cache(cache, borrower) => {
                let (blocks, instead) = cache.blocks_on(lent);
                let (done, all) = if blocks.is_empty() {
                    (Vacated::default(), true)
                } else {
                    let asked = VacateBlocks { lease, blocks, bytes, instead, deadline };
                    let _inside = HookGuard::enter();
                    let done = borrower.vacate(&asked)?;
                    let all = asked.blocks.iter().all(|range| covered(range, &done.blocks));
                    (done, all)
                };
                Ok(Given { bytes: cache.give_back(lent, &done.blocks, &done.fence)?, all })
            }
        }
    }

    pub(super) fn reap(&self) {
        match self {
            Self::Buffer(buffer, _) => buffer.reap(),
            Self::Cache(cache, _) => cache.reap(),
        };
    }

    pub(super) fn before(&self, stream: Stream) -> Result<()> {
        match self {
            Self::Buffer(buffer, _) => buffer.before(stream),
            Self::Cache(cache, _) => cache.before(stream),
        }
    }
}

pub(super) fn bytes_of_lease(value: u64, expected: &'static str) -> Error {
    Error::InvalidArgument { what: "bytes of a lease", value: value.into(), expected }
}

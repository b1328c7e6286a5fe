//! Who uses pages on lease: a buffer's user, or that of a KV cache.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::elastic::{ElasticBuffer, KvCache, Lender};
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, HookGuard, LentPlace};
use crate::units::Stream;

/// What the user of a buffer is asked for.
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

/// What the user of a KV cache is asked for: which of these blocks, so many bytes of pages, by then.
#[derive(Clone, Debug)]
pub struct VacateBlocks {
    /// The lease.
    pub lease: u64,
    /// The blocks that lie on its pages, as far as they have memory. A page comes back once none of its blocks has:
    /// [`BlockPool::ask_of`](crate::BlockPool::ask_of) finds those that cost least.
    pub blocks: Vec<Range<u64>>,
    /// Bytes of pages that are wanted; all that these blocks lie on, if the lease is to end.
    pub bytes: u64,
    /// Blocks that have memory and lie on none of its pages.
    pub instead: Vec<Range<u64>>,
    /// How much time is left. Afterwards the recall fails, and the pages go all the same once they are given back.
    pub deadline: Duration,
}

/// What the user of a KV cache gave up.
#[derive(Debug, Default)]
pub struct Vacated {
    /// Blocks that it does not use any more: the library releases those that were asked for.
    pub blocks: Vec<Range<u64>>,
    /// Behind this, no work of the device uses them.
    pub fence: Fence,
}

/// Who uses blocks on pages on lease, and can do without.
pub trait BlockBorrower: Send + Sync {
    /// Stops using blocks, and says which: no work on them is given to the device from now on. Called on the thread that recalls, with no
    /// lock held. It may back other blocks of the cache, and not wait for this lease. Until their pages are back, blocks that were
    /// vacated cannot be backed again.
    ///
    /// # Errors
    /// The borrower needs them all; the recall returns this, and the lease goes on.
    fn vacate(&self, asked: &VacateBlocks) -> Result<Vacated>;
}

/// What a borrower gave up.
pub(super) struct Given {
    /// Bytes of pages that go back.
    pub(super) bytes: u64,
    /// All blocks that it was asked for.
    pub(super) all: bool,
}

/// Whether every block of a range is in one of others.
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

/// Where the pages of a lease show.
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

    /// That pages of this size, of that device, can show in this part.
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

    /// Shows a lender's pages in a part of it.
    pub(super) fn borrow(&self, part: &Range<u64>, lender: Lender<'_>) -> Result<()> {
        match self {
            Self::Buffer(buffer, _) => buffer.borrow_pages(part.clone(), lender),
            Self::Cache(cache, _) => cache.borrow_pages(part, lender),
        }
    }

    /// Has its user vacate `bytes` of these pages, which go behind the fence that he gives. Holds no lock.
    pub(super) fn vacate(
        &self,
        lease: u64,
        lent: &[LentPlace],
        bytes: u64,
        deadline: Duration,
    ) -> Result<Given> {
        match self {
            Self::Buffer(buffer, borrower) => {
                // A part of a buffer is given back from its end.
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

    /// Unmaps what was given back and is no longer in use.
    pub(super) fn settle(&self) {
        match self {
            Self::Buffer(buffer, _) => buffer.settle(),
            Self::Cache(cache, _) => cache.settle(),
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

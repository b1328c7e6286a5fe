use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::backing::{Backing, Lender, page_bytes};
use super::planes::Shape;
use super::table::Request;
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, LentPlace};
use crate::units::{Address, Stream, checked_size};

/// Elastic buffer: addresses for the maximum size, with pages for the committed part. Addresses
/// never move, so captured graphs stay valid. Thread-safe: only calls about the same pages wait for
/// each other. Before dropping the last handle, decommit all pages with a fence, or wait for the
/// device.
pub struct ElasticBuffer {
    backing: Arc<Backing>,
    bytes: u64,
}

impl Device {
    /// Creates an elastic buffer: `bytes` of addresses without memory.
    ///
    /// # Errors
    /// [`Error::InvalidSize`], [`Error::InvalidPageSize`], [`Error::OutOfAddresses`];
    /// [`Error::OverBudget`] if the guaranteed bytes do not fit.
    pub fn elastic_buffer(
        self: &Arc<Self>,
        bytes: u64,
        options: &ElasticOptions<'_>,
    ) -> Result<ElasticBuffer> {
        checked_size("an elastic buffer", bytes)?;
        let shape = Shape::of_pages(bytes, page_bytes(self, &[bytes], options.page_bytes)?)?;
        Ok(ElasticBuffer { backing: Backing::new(self, shape, options)?, bytes })
    }
}

impl ElasticBuffer {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.backing.device()
    }

    /// First address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.backing.base(0).unwrap_or(Address(0))
    }

    /// Bytes of addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    /// The account.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Maps all absent pages of a range, rounded outward, or none:
    /// `vmmgraph_elastic_buffer_commit`. Refused in an observer if other threads move these pages.
    pub fn commit(&self, range: Range<u64>) -> Result<Committed> {
        self.backing.commit(&self.outward(&range)?)
    }

    /// [Commits](Self::commit) on a thread of the library: during copies CUDA may take a
    /// millisecond to map a page (docs/performance.md, Regions). Calls about the same pages take
    /// effect in the order of their beginning.
    pub fn commit_async(&self, range: Range<u64>) -> Result<Pending> {
        Ok(self.backing.commit_async(self.outward(&range)?))
    }

    /// Decommits the pages of a range, rounded inward, and returns their bytes:
    /// `vmmgraph_elastic_buffer_decommit`. Until `fence` is done, the unmap is left to a later call
    /// or out-of-memory retry. Refused unmaps are logged and retried.
    pub fn decommit(&self, range: Range<u64>, fence: &Fence) -> Result<u64> {
        let pages = self.inward(&range)?;
        if pages.is_empty() { Ok(0) } else { self.backing.decommit(&pages, fence) }
    }

    /// Maps a lender's pages in an absent range of whole pages, until a decommit. Work there waits
    /// by [`before`](Self::before).
    pub(crate) fn borrow_pages(&self, range: Range<u64>, lender: Lender<'_>) -> Result<()> {
        self.backing.borrow(&self.outward(&range)?, true, lender)
    }

    /// From the first to the last committed of these leased pages.
    pub(crate) fn in_use(&self, lent: &[LentPlace]) -> Option<Range<u64>> {
        let places = self.backing.places(lent);
        let (pages, _) = self.backing.read(|table| table.backed_on(&places));
        let (first, last) = pages.first().zip(pages.last())?;
        Some(first.start * self.page_bytes()..last.end * self.page_bytes())
    }

    /// Bytes of these leased pages, decommitted now or before. Commits there fail until the unmap.
    pub(crate) fn give_back(&self, lent: &[LentPlace], fence: &Fence) -> Result<u64> {
        let places = self.backing.places(lent);
        let all = 0..self.backing.shape().most();
        self.backing.give_back(&places, std::slice::from_ref(&all), fence)
    }

    pub(crate) fn owned(&self) -> Vec<Range<u64>> {
        self.bytes_of(self.backing.read(|table| table.owned()))
    }

    /// Unmaps decommitted pages with finished fences, without a wait. Returns the bytes.
    pub fn settle(&self) -> u64 {
        self.backing.settle()
    }

    /// Makes later work of a stream wait for earlier users of revived pages, without blocking.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.backing.before(stream)
    }

    /// Committed byte ranges, in whole pages.
    #[must_use]
    pub fn committed(&self) -> Vec<Range<u64>> {
        self.bytes_of(self.backing.read(|table| table.backed()))
    }

    fn bytes_of(&self, pages: Vec<Range<u64>>) -> Vec<Range<u64>> {
        let page = self.page_bytes();
        pages.into_iter().map(|pages| pages.start * page..pages.end * page).collect()
    }

    /// Notifies `observer` of maps and unmaps until the observer is dropped.
    pub fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.backing.observe(observer);
    }

    /// Current state and counters.
    #[must_use]
    pub fn stats(&self) -> ElasticStats {
        self.backing.stats()
    }

    /// Checks the page table against the pool. No other call may run.
    pub fn audit(&self) -> Result<()> {
        self.backing.audit()
    }

    fn outward(&self, range: &Range<u64>) -> Result<Request> {
        self.check(range)?;
        let page = self.page_bytes();
        let first = range.start / page;
        let blocks = first..if range.is_empty() { first } else { range.end.div_ceil(page) };
        Ok(Request { after: blocks.clone(), blocks, ahead: None })
    }

    fn inward(&self, range: &Range<u64>) -> Result<Range<u64>> {
        self.check(range)?;
        let page = self.page_bytes();
        // The last page may be partial: no byte follows.
        let end = if range.end == self.bytes { range.end.div_ceil(page) } else { range.end / page };
        Ok(range.start.div_ceil(page)..end)
    }

    fn check(&self, range: &Range<u64>) -> Result<()> {
        let wrong =
            |what, value: u64, expected| Err(Error::InvalidArgument { what, value: value.into(), expected });
        if range.end > self.bytes {
            return wrong("the end of a range", range.end, "at most the buffer's bytes");
        }
        if range.start > range.end {
            return wrong("the beginning of a range", range.start, "at most its end");
        }
        Ok(())
    }
}

impl fmt::Debug for ElasticBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ElasticBuffer({:?} + {:#x})", self.base(), self.bytes)
    }
}

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

/// Elastic buffer: virtual extent for the maximum size, with pages for the committed part.
/// Addresses never move, so captured graphs stay valid. Thread-safe: only calls about the same
/// pages wait for each other. Before dropping the last handle, decommit all pages with a fence, or
/// wait for the device.
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
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.backing.device()
    }

    /// Returns the first address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.backing.base(0).unwrap_or(Address(0))
    }

    /// Returns the bytes of addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    /// Returns the account.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Maps all absent pages of a range, rounded outward, or none:
    /// `vmmgraph_elastic_buffer_commit`. Refused in an observer, for pages being moved by other
    /// threads.
    pub fn commit(&self, range: Range<u64>) -> Result<Committed> {
        self.backing.commit(&self.outward(&range)?)
    }

    /// [Commits](Self::commit) on a thread of the library: during copies CUDA may take a
    /// millisecond to map a page (docs/performance.md, Regions). Later calls about the same pages
    /// wait for this commit. If an earlier call still moves some, this commit is ordered from its
    /// beginning, after that call.
    pub fn commit_async(&self, range: Range<u64>) -> Result<Pending> {
        Ok(self.backing.commit_async(self.outward(&range)?))
    }

    /// Decommits the pages of a range, rounded inward, and returns their bytes:
    /// `vmmgraph_elastic_buffer_decommit`. Pages are unmapped in a later call of this buffer or
    /// out-of-memory retry, if `fence` is not done. Refused unmaps are logged and retried.
    pub fn decommit(&self, range: Range<u64>, fence: &Fence) -> Result<u64> {
        let pages = self.inward(&range)?;
        if pages.is_empty() { Ok(0) } else { self.backing.decommit(&pages, fence) }
    }

    /// Maps a lender's pages in an absent range of whole pages, until a decommit. Work there must
    /// wait by [`before`](Self::before).
    pub(crate) fn borrow_pages(&self, range: Range<u64>, lender: Lender<'_>) -> Result<()> {
        self.backing.borrow(&self.outward(&range)?, true, lender)
    }

    /// Range from the first to the last committed page of these leased pages.
    pub(crate) fn in_use(&self, lent: &[LentPlace]) -> Option<Range<u64>> {
        let places = self.backing.places(lent);
        let (pages, _) = self.backing.read(|table| table.backed_on(&places));
        let (first, last) = pages.first().zip(pages.last())?;
        Some(first.start * self.page_bytes()..last.end * self.page_bytes())
    }

    /// Returns the bytes of these leased pages, decommitted now or before. Commits there fail until
    /// the unmap.
    pub(crate) fn give_back(&self, lent: &[LentPlace], fence: &Fence) -> Result<u64> {
        let places = self.backing.places(lent);
        let all = 0..self.backing.shape().most();
        self.backing.give_back(&places, std::slice::from_ref(&all), fence)
    }

    pub(crate) fn owned(&self) -> Vec<Range<u64>> {
        self.bytes_of(self.backing.read(|table| table.owned()))
    }

    /// Unmaps decommitted pages with finished fences and returns the bytes. Does not wait.
    pub fn reap(&self) -> u64 {
        self.backing.reap()
    }

    /// Makes later work of a stream wait for previous users of pages committed again before their
    /// unmap. Does not block.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.backing.before(stream)
    }

    /// Returns the committed byte ranges, in whole pages.
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

    /// Returns the current state and counters.
    #[must_use]
    pub fn stats(&self) -> ElasticStats {
        self.backing.stats()
    }

    /// Checks that the page table and the pool agree. No other call may run.
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

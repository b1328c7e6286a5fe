//! One range of addresses whose parts come and go.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::backing::{Backing, Lender};
use super::books::{Run, runs_of};
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, LentPlace};
use crate::units::{Address, Stream};

/// Addresses for the most that something may ever be, and pages for what is used of it. They never move: captured graphs that use
/// what is there stay valid while other parts come and go.
///
/// A page is committed or not; nobody counts how often. Thread-safe: calls about the same pages wait for each other, others do not.
/// What is not committed has no memory: a device that uses it faults. Before the last handle is dropped, everything is decommitted
/// behind a fence, or the device is done with it.
pub struct ElasticBuffer {
    backing: Arc<Backing>,
    bytes: u64,
}

impl Device {
    /// An elastic buffer: `bytes` of addresses, without memory yet.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for zero and for more than can be addressed; [`Error::InvalidPageSize`];
    /// [`Error::OutOfAddresses`]; [`Error::OverBudget`] if there is no room for the least.
    pub fn elastic_buffer(
        self: &Arc<Self>,
        bytes: u64,
        options: &ElasticOptions<'_>,
    ) -> Result<ElasticBuffer> {
        Ok(ElasticBuffer { backing: Backing::new(self, &[bytes], options)?, bytes })
    }
}

impl ElasticBuffer {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.backing.device()
    }

    /// The first address. It never changes.
    #[must_use]
    pub fn base(&self) -> Address {
        self.backing.base(0).unwrap_or(Address(0))
    }

    /// Bytes of addresses, as asked for.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    /// Its account, to limit it or to ask what counts toward it.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Makes every byte of a range usable: maps those of its pages, rounded outward, that are not there. All of them or none. Free pages
    /// of the device are taken first; before there is no memory, others are asked to give some back.
    ///
    /// Contents of pages that come are anything. Pages that wait for the fence of a [`decommit`](Self::decommit) stay, with their
    /// contents: work on other streams than those of the fence is to wait for [`before`](Self::before).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::OverBudget`], or what the driver says, with everything as it was.
    /// [`Error::InvalidArgument`] beyond the buffer's end. [`Error::WrongState`] in an observer, for pages that others are moving.
    pub fn commit(&self, range: Range<u64>) -> Result<Committed> {
        let run = self.outward(&range)?;
        self.backing.patiently(|| self.backing.try_commit(&[run]))
    }

    /// As [`commit`](Self::commit), on a thread of the library: mapping there costs neither the caller nor the device anything, but beside copies
    /// between host and device CUDA may take a millisecond a page (docs/performance.md, Regions). Nobody is asked to give memory up for what is ahead
    /// of need: without a free page and room for a new one it fails.
    ///
    /// A later call about the same pages waits for it, so the order of calls is kept; but while some of them are being moved by an
    /// earlier call, this one begins only when that is over, and its order with others is that of its beginning.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the buffer's end; all others come by the result.
    pub fn commit_async(&self, range: Range<u64>) -> Result<Pending> {
        Ok(self.backing.commit_async(vec![self.outward(&range)?]))
    }

    /// Gives back the pages of a range, rounded inward: bytes outside of it keep their memory. They are not to be used from now on, and go
    /// behind `fence`: at once if that is over; else when somebody comes by who finds it over, the next call here or whoever runs short
    /// of memory. Nobody waits for the device. They are then the device's free pages, and nothing is mapped in their place. Until then they
    /// count toward the account. Returns the bytes of what was there.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the buffer's end. [`Error::WrongState`] in an observer, for pages that others are moving. What
    /// the driver refuses is logged and tried again.
    pub fn decommit(&self, range: Range<u64>, fence: &Fence) -> Result<u64> {
        let run = self.inward(&range)?;
        if run.first >= run.end { Ok(0) } else { self.backing.decommit(&[run], fence) }
    }

    /// Shows pages of a lender, who keeps them, in a range of whole pages where nothing is. They are committed as any until they are
    /// decommitted; work on them is to wait for [`before`](Self::before), which is behind the lender's fence too.
    pub(crate) fn borrow_pages(&self, range: Range<u64>, lender: Lender<'_>) -> Result<()> {
        self.backing.borrow(&[self.outward(&range)?], true, lender)
    }

    /// The range from the first to the last of these pages of a lender that is committed; `None`: none is.
    pub(crate) fn in_use(&self, lent: &[LentPlace]) -> Option<Range<u64>> {
        let here = self.backing.here(&runs_of(self.backing.places(lent)));
        let (first, last) = here.first().zip(here.last())?;
        Some(first.first * self.page_bytes()..last.end * self.page_bytes())
    }

    /// Decommits these pages of a lender; the bytes that go, those that were decommitted before included. Nothing is committed there
    /// before they have gone.
    pub(crate) fn give_back(&self, lent: &[LentPlace], fence: &Fence) -> Result<u64> {
        let places = self.backing.places(lent);
        self.backing.recall(&places);
        self.backing.decommit(&runs_of(places.iter().copied()), fence)?;
        Ok(places.len() as u64 * self.page_bytes())
    }

    /// The parts that are committed and whose pages are its own.
    pub(crate) fn owned(&self) -> Vec<Range<u64>> {
        let page = self.page_bytes();
        let all = Run { range: 0, first: 0, end: self.bytes.div_ceil(page) };
        self.backing.owned(&[all]).into_iter().map(|run| run.first * page..run.end * page).collect()
    }

    /// Unmaps what was decommitted and is no longer in use; the bytes. Does not wait.
    pub fn settle(&self) -> u64 {
        self.backing.settle()
    }

    /// Makes later work of a stream wait for what may still use pages that were committed again before they went. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], or what the driver says.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.backing.before(stream)
    }

    /// The parts that are committed, in order, as bytes from the base, in whole pages.
    #[must_use]
    pub fn committed(&self) -> Vec<Range<u64>> {
        let page = self.page_bytes();
        let all = Run { range: 0, first: 0, end: self.bytes.div_ceil(page) };
        self.backing.here(&[all]).into_iter().map(|run| run.first * page..run.end * page).collect()
    }

    /// Tells `observer` when memory comes and goes, as long as it lives.
    pub fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.backing.observe(observer);
    }

    /// What it holds now.
    #[must_use]
    pub fn stats(&self) -> ElasticStats {
        self.backing.stats()
    }

    /// Whether its books and the pool's agree, while no other call is under way. Walks everything.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first thing that disagrees.
    pub fn audit(&self) -> Result<()> {
        self.backing.audit()
    }

    fn outward(&self, range: &Range<u64>) -> Result<Run> {
        self.check(range)?;
        let page = self.page_bytes();
        let first = range.start / page;
        Ok(Run { range: 0, first, end: if range.is_empty() { first } else { range.end.div_ceil(page) } })
    }

    fn inward(&self, range: &Range<u64>) -> Result<Run> {
        self.check(range)?;
        let page = self.page_bytes();
        // Nothing lies behind the last byte.
        let end = if range.end == self.bytes { range.end.div_ceil(page) } else { range.end / page };
        Ok(Run { range: 0, first: range.start.div_ceil(page), end })
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

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::backing::{Backing, Lender, page_bytes};
use super::limits::LimitChange;
use super::planes::{KvLayout, Shape};
use super::table::Request;
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, LentPlace};
use crate::units::{Address, Stream};

/// Options of a KV cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvOptions<'a> {
    /// Bytes of a block in each plane (keys or values of one layer).
    pub planes: &'a [u64],
    /// Addresses are reserved for this many blocks.
    pub blocks_most: u64,
    /// Order of planes and blocks in memory.
    pub layout: KvLayout,
    /// Name, page size and budget.
    pub memory: ElasticOptions<'a>,
}

/// Current state of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStats {
    /// Usable blocks: backed numbers below this one.
    pub blocks: u64,
    /// Limit of [`KvCache::set_limit`], else `most_blocks`.
    pub limit_blocks: u64,
    /// Revision of the limit, if set.
    pub revision: Option<u64>,
    /// Maximum number of blocks.
    pub most_blocks: u64,
    /// Blocks with memory.
    pub backed_blocks: u64,
    /// Part of `backed_blocks` at or beyond `blocks`: freed at their release.
    pub beyond_blocks: u64,
    /// Bytes of a block in all planes.
    pub block_bytes: u64,
    /// State of the memory.
    pub memory: ElasticStats,
}

/// KV cache: planes of blocks which grow and shrink together, with addresses for the maximum. A
/// block has memory in all planes, or in none. Addresses never change, so captured graphs stay
/// valid. Thread-safe. Growing calls wait for each other; releasing calls do not wait.
pub struct KvCache {
    backing: Arc<Backing>,
}

impl Device {
    /// Creates a KV cache without memory.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] without planes or blocks, or beyond the address space; errors of
    /// [`elastic_buffer`](Self::elastic_buffer).
    pub fn kv_cache(self: &Arc<Self>, options: &KvOptions<'_>) -> Result<Arc<KvCache>> {
        let shape = Shape::new(options.layout, options.planes, options.blocks_most)?;
        let page = page_bytes(self, &shape.lengths(), options.memory.page_bytes)?;
        let backing = Backing::new(self, shape.with_pages(page), &options.memory)?;
        Ok(Arc::new(KvCache { backing }))
    }
}

impl KvCache {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.backing.device()
    }

    /// Returns the number of planes.
    #[must_use]
    pub fn planes(&self) -> usize {
        self.backing.shape().planes().len()
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.backing.shape().layout()
    }

    /// Returns the address of a block in a plane, backed or not, if they exist.
    #[must_use]
    pub fn address(&self, plane: usize, block: u64) -> Option<Address> {
        let (range, offset, _) = self.backing.shape().place(plane, block)?;
        Some(self.backing.base(range)?.plus(offset))
    }

    /// Returns the bytes from one block of a plane to the next.
    #[must_use]
    pub fn stride(&self, plane: usize) -> Option<u64> {
        self.backing.shape().place(plane, 0).map(|(.., stride)| stride)
    }

    /// Returns the bytes of a block in a plane.
    #[must_use]
    pub fn block_bytes(&self, plane: usize) -> Option<u64> {
        self.backing.shape().planes().get(plane).copied()
    }

    /// Returns the number of consecutive blocks on the same pages, for
    /// [`BlockPool`](crate::BlockPool). Approximate if pages do not divide into blocks.
    #[must_use]
    pub fn blocks_a_page(&self) -> u64 {
        self.backing.shape().blocks_a_page()
    }

    /// Returns the account.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Backs the blocks below `blocks` and makes them usable; never shrinks. Like
    /// [`commit`](Self::commit).
    pub fn grow_to(&self, blocks: u64) -> Result<Committed> {
        self.commit(0..blocks)
    }

    /// [Grows](Self::grow_to) on a thread of the library, without reclaimers.
    pub fn grow_async(self: &Arc<Self>, blocks: u64) -> Result<Pending> {
        self.commit_async(0..blocks)
    }

    /// Backs a range of blocks in all planes, or in none: `vmmgraph_kv_cache_commit`. Refused in an
    /// observer, while a commit runs.
    pub fn commit(&self, blocks: Range<u64>) -> Result<Committed> {
        self.backing.commit(&self.request(blocks)?)
    }

    /// [Commits](Self::commit) on a thread of the library: `vmmgraph_kv_cache_commit_async`.
    pub fn commit_async(self: &Arc<Self>, blocks: Range<u64>) -> Result<Pending> {
        let request = self.request(blocks)?;
        let ahead = self.backing.read(|table| table.limits().begin_ahead());
        Ok(self.backing.commit_async(Request { ahead: Some(ahead), ..request }))
    }

    /// Returns the bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    /// Shrinks the cache to `blocks`. Blocks beyond are freed after `fence`, but `busy` ones at
    /// their [release](Self::release). Returns the number of busy blocks.
    pub fn shrink_to(&self, blocks: u64, busy: &[Range<u64>], fence: &Fence) -> Result<u64> {
        self.check(&(0..blocks))?;
        Ok(self.backing.release(|table| table.shrink(blocks, busy, fence)))
    }

    /// Releases blocks after `fence`: `vmmgraph_kv_cache_release`.
    pub fn release(&self, blocks: Range<u64>, fence: &Fence) -> Result<()> {
        self.check(&blocks)?;
        self.backing.release(|table| table.release(&blocks, fence));
        Ok(())
    }

    /// Sets an external limit of blocks for all later grants. Older revisions are ignored.
    pub fn set_limit(&self, blocks: u64, revision: u64) -> LimitChange {
        self.backing.read(|table| table.set_limit(blocks, revision))
    }

    /// Returns blocks with memory beyond the usable number, to be released.
    #[must_use]
    pub fn beyond(&self) -> Vec<Range<u64>> {
        self.backing.read(|table| table.beyond())
    }

    /// Returns the blocks with memory.
    #[must_use]
    pub fn backed(&self) -> Vec<Range<u64>> {
        self.backing.read(|table| table.backed())
    }

    /// Unmaps released pages with finished fences and returns the bytes. Does not wait.
    pub fn reap(&self) -> u64 {
        self.backing.reap()
    }

    /// Makes later work of a stream wait for previous users of blocks backed again before their
    /// unmap. Does not block.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.backing.before(stream)
    }

    /// Notifies `observer` of maps and unmaps until the observer is dropped.
    pub fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.backing.observe(observer);
    }

    /// Returns the current state.
    #[must_use]
    pub fn stats(&self) -> KvStats {
        let memory = self.backing.stats();
        self.backing.read(|table| table.kv_stats(memory))
    }

    /// Checks that exactly the pages of backed blocks are mapped. No other call may run.
    pub fn audit(&self) -> Result<()> {
        self.backing.audit()
    }

    /// Backs unbacked blocks with a lender's pages, wherever no page is mapped, until released.
    /// Work there must wait by [`before`](Self::before).
    pub(crate) fn borrow_pages(&self, blocks: &Range<u64>, lender: Lender<'_>) -> Result<()> {
        self.backing.borrow(&self.request(blocks.clone())?, false, lender)
    }

    /// The backed blocks on these pages, and all other backed blocks.
    pub(crate) fn blocks_on(&self, lent: &[LentPlace]) -> (Vec<Range<u64>>, Vec<Range<u64>>) {
        let places = self.backing.places(lent);
        self.backing.read(|table| table.backed_on(&places))
    }

    /// See `Backing::give_back`.
    pub(crate) fn give_back(&self, lent: &[LentPlace], blocks: &[Range<u64>], fence: &Fence) -> Result<u64> {
        self.backing.give_back(&self.backing.places(lent), blocks, fence)
    }

    /// Growing calls take turns.
    fn request(&self, blocks: Range<u64>) -> Result<Request> {
        self.check(&blocks)?;
        Ok(Request { blocks, after: 0..self.backing.shape().most(), ahead: None })
    }

    fn check(&self, blocks: &Range<u64>) -> Result<()> {
        let wrong =
            |what, value: u64, expected| Err(Error::InvalidArgument { what, value: value.into(), expected });
        if blocks.end > self.backing.shape().most() {
            return wrong("the end of a range of blocks", blocks.end, "at most blocks_most of the cache");
        }
        if blocks.start > blocks.end {
            return wrong("the beginning of a range of blocks", blocks.start, "at most its end");
        }
        Ok(())
    }
}

impl fmt::Debug for KvCache {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvCache")
            .field("id", &self.backing.id())
            .field("planes", &self.planes())
            .finish_non_exhaustive()
    }
}

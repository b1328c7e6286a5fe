//! KV cache: planes of blocks which grow and shrink together.
//!
//! The mutex `states` guards the block states and is held for short updates only. The monitor
//! `commit_section` gives one thread the right to commit and decommit. Growing calls wait for the
//! commit section. Releasing calls queue in `BlockStates::released` for the owner of the commit
//! section. Lock order: `commit_section`, `states`, the page states of `Backing`.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::backing::{Backing, Refused};
use super::page_states::{Place, Run, runs_of};
use super::planes::{KvLayout, Shape};
use super::worker::refuse_waiting;
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence};
use crate::sync::{Monitor, Mutex};
use crate::units::{Address, Stream};

mod block_states;
mod lent;

pub use block_states::LimitChange;
use block_states::{BlockStates, count};

/// Options of a KV cache.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvOptions<'a> {
    /// Bytes of a block in each plane (keys or values of one layer). Planes may differ.
    pub planes: &'a [u64],
    /// Maximum number of blocks; addresses are reserved for all.
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
    /// Limit set by [`KvCache::set_limit`]; otherwise `most_blocks`.
    pub limit_blocks: u64,
    /// Revision of the limit. `None`: never set.
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

/// Planes of blocks: addresses for the maximum number of blocks, pages for the backed blocks.
///
/// A block has memory in all planes, or in none. Addresses never change, so captured graphs stay
/// valid. Thread-safe. Growing calls wait for each other; releasing calls do not wait.
pub struct KvCache {
    backing: Arc<Backing>,
    shape: Shape,
    states: Mutex<BlockStates>,
    /// Whether a thread has the commit section.
    commit_section: Monitor<bool>,
}

impl Device {
    /// Creates a KV cache without memory.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] without planes or blocks, or beyond the address space; errors of
    /// [`elastic_buffer`](Self::elastic_buffer).
    pub fn kv_cache(self: &Arc<Self>, options: &KvOptions<'_>) -> Result<Arc<KvCache>> {
        let shape = Shape::new(options.layout, options.planes, options.blocks_most)?;
        let backing = Backing::new(self, &shape.lengths(), &options.memory)?;
        let shape = shape.with_pages(backing.page());
        let states = Mutex::new(BlockStates::new(options.blocks_most));
        Ok(Arc::new(KvCache { backing, shape, states, commit_section: Monitor::default() }))
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
        self.shape.planes().len()
    }

    /// Returns the layout.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.shape.layout()
    }

    /// Returns the address of a block in a plane, backed or not. A tensor over the plane begins at
    /// block 0. `None`: the plane or block does not exist.
    #[must_use]
    pub fn address(&self, plane: usize, block: u64) -> Option<Address> {
        let (range, offset, _) = self.shape.place(plane, block)?;
        Some(self.backing.base(range)?.plus(offset))
    }

    /// Returns the bytes from one block of a plane to the next.
    #[must_use]
    pub fn stride(&self, plane: usize) -> Option<u64> {
        self.shape.place(plane, 0).map(|(.., stride)| stride)
    }

    /// Returns the bytes of a block in a plane.
    #[must_use]
    pub fn block_bytes(&self, plane: usize) -> Option<u64> {
        self.shape.planes().get(plane).copied()
    }

    /// Returns the number of consecutive blocks on the same pages, for
    /// [`BlockPool`](crate::BlockPool). Groups begin at multiples of this number. Approximate if
    /// pages do not divide into blocks.
    #[must_use]
    pub fn blocks_a_page(&self) -> u64 {
        self.shape.blocks_a_page()
    }

    /// Returns the account, for limits and statistics.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Backs the blocks below `blocks` in all planes, or in none, and makes them usable. Never
    /// shrinks. Calls reclaimers before failing.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn grow_to(&self, blocks: u64) -> Result<Committed> {
        self.commit(0..blocks)
    }

    /// As [`grow_to`](Self::grow_to), on a thread of the library and without reclaimers.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end. All other errors are returned by the
    /// result.
    pub fn grow_async(self: &Arc<Self>, blocks: u64) -> Result<Pending> {
        self.commit_async(0..blocks)
    }

    /// Backs a range of blocks in all planes, or in none, and makes the numbers up to its end
    /// usable.
    ///
    /// New memory has undefined contents. Blocks released, but not unmapped yet, keep their
    /// contents: work on streams outside their fence must wait by [`before`](Self::before).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::OverBudget`] (also beyond the limit) or driver errors, all
    /// without effect. [`Error::InvalidArgument`] beyond the cache's end. [`Error::WrongState`] in
    /// an observer, while another thread has the commit section.
    pub fn commit(&self, blocks: Range<u64>) -> Result<Committed> {
        self.check(&blocks)?;
        self.backing.patiently(|| self.try_commit(&blocks, None))
    }

    /// As [`commit`](Self::commit), on a thread of the library and without reclaimers. Ordered with
    /// other calls from its beginning on the thread, except that a later
    /// [`shrink_to`](Self::shrink_to) or limit cuts the request.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end. All other errors are returned by the
    /// result.
    pub fn commit_async(self: &Arc<Self>, blocks: Range<u64>) -> Result<Pending> {
        self.check(&blocks)?;
        let there = Arc::clone(self);
        let number = self.states.lock().begin_ahead();
        let work = move |_: Option<()>| {
            let done = there.try_commit(&blocks, Some(number)).map_err(|refused| refused.error);
            there.states.lock().end_ahead(number);
            done
        };
        Ok(self.backing.worker().push(|| None, work))
    }

    /// Commits; `ahead` is the number of a request ahead of need.
    fn try_commit(&self, blocks: &Range<u64>, ahead: Option<u64>) -> Result<Committed, Refused> {
        let _section = self.enter_commit_section()?;
        // First, so blocks released before this call do not count as backed.
        self.let_go_now();
        let missing = {
            let states = self.states.lock();
            if blocks.end > states.limit {
                return Err(self.beyond_limit(&states, blocks.end).into());
            }
            states.backed.missing(&(blocks.start..blocks.end.min(states.cap(ahead))))
        };
        let runs: Vec<Run> = missing.iter().flat_map(|span| self.shape.pages(span)).collect();
        let done = self.backing.try_commit(&runs)?;
        self.note_committed(blocks.end, &missing, ahead);
        Ok(done)
    }

    /// Marks missing blocks as backed. The caller has the commit section.
    fn note_committed(&self, end: u64, missing: &[Range<u64>], ahead: Option<u64>) {
        let (stayed, users) = self.states.lock().note_committed(&self.shape, end, missing, ahead);
        self.backing.previous_users(stayed, users);
    }

    /// Returns the bytes of a page.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    fn beyond_limit(&self, states: &BlockStates, blocks: u64) -> Error {
        let bytes = |blocks: u64| blocks * self.shape.block();
        Error::OverBudget {
            requested: bytes(blocks - states.limit),
            held: bytes(states.backed.count()),
            budget: bytes(states.limit),
            device: self.device().driver().info().ordinal,
            account: Some(format!("the block limit of elastic buffer {}", self.backing.id())),
            lowest: Some(0),
            space: None,
        }
    }

    /// Shrinks the cache to `blocks`. Blocks beyond, except the `busy` ones, are freed after
    /// `fence`; busy blocks keep their memory until their [release](Self::release). Returns the
    /// number of busy blocks.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end.
    pub fn shrink_to(&self, blocks: u64, busy: &[Range<u64>], fence: &Fence) -> Result<u64> {
        self.check(&(0..blocks))?;
        let left = self.states.lock().shrink(blocks, busy, fence);
        self.let_go();
        Ok(left)
    }

    /// Releases blocks. A page is unmapped after `fence`, once no block on the page is backed. Does
    /// not wait: if another thread has the commit section, that thread unmaps. Ignores blocks
    /// without memory.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end.
    pub fn release(&self, blocks: Range<u64>, fence: &Fence) -> Result<()> {
        self.check(&blocks)?;
        self.states.lock().released.push_back((blocks, fence.clone()));
        self.let_go();
        Ok(())
    }

    /// Sets an external limit of blocks for all later grants; clamped to the maximum. Revisions
    /// grow; older revisions are ignored.
    pub fn set_limit(&self, blocks: u64, revision: u64) -> LimitChange {
        self.states.lock().set_limit(blocks, revision)
    }

    /// Returns blocks with memory beyond the usable number. The engine should release these blocks.
    #[must_use]
    pub fn beyond(&self) -> Vec<Range<u64>> {
        self.states.lock().beyond()
    }

    /// Returns the blocks with memory.
    #[must_use]
    pub fn backed(&self) -> Vec<Range<u64>> {
        self.states.lock().backed.within(&(0..self.shape.most()))
    }

    /// Unmaps released pages with finished fences and returns the bytes. Does not wait.
    pub fn settle(&self) -> u64 {
        self.let_go();
        self.backing.settle()
    }

    /// Makes later work of a stream wait for previous users of blocks backed again before their
    /// unmap. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`]; driver errors.
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
        let states = self.states.lock();
        KvStats {
            blocks: states.blocks,
            limit_blocks: states.limit,
            revision: states.revision,
            most_blocks: self.shape.most(),
            backed_blocks: states.backed.count(),
            beyond_blocks: count(&states.beyond()),
            block_bytes: self.shape.block(),
            memory,
        }
    }

    /// Checks that the block states and the pool agree: exactly the pages of backed blocks are
    /// mapped. No other call may run.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first difference.
    pub fn audit(&self) -> Result<()> {
        self.backing.audit()?;
        let backed = self.backed();
        let wanted = backed.iter().flat_map(|span| self.shape.pages(span)).flat_map(Run::places);
        let places: BTreeSet<Place> = wanted.collect();
        let there: u64 =
            self.backing.committed(&runs_of(places.iter().copied())).iter().map(Run::pages).sum();
        let stats = self.backing.stats();
        if places.len() as u64 != there || there * stats.page_bytes != stats.committed_bytes {
            let (wanted, bytes) = (places.len(), stats.committed_bytes);
            let what = format!(
                "elastic buffer {}: {wanted} pages of backed blocks, {there} of them and {bytes} bytes there",
                stats.id
            );
            return Err(Error::Internal { what });
        }
        Ok(())
    }

    fn check(&self, blocks: &Range<u64>) -> Result<()> {
        let wrong =
            |what, value: u64, expected| Err(Error::InvalidArgument { what, value: value.into(), expected });
        if blocks.end > self.shape.most() {
            return wrong("the end of a range of blocks", blocks.end, "at most the cache's most blocks");
        }
        if blocks.start > blocks.end {
            return wrong("the beginning of a range of blocks", blocks.start, "at most its end");
        }
        Ok(())
    }

    fn enter_commit_section(&self) -> Result<CommitSection<'_>> {
        if let Some(commit_section) = self.try_enter_commit_section() {
            return Ok(commit_section);
        }
        refuse_waiting()?;
        self.commit_section.wait_for(|taken| (!std::mem::replace(taken, true)).then_some(()));
        Ok(CommitSection(self))
    }

    fn try_enter_commit_section(&self) -> Option<CommitSection<'_>> {
        self.commit_section
            .wait_for(|taken| Some(!std::mem::replace(taken, true)))
            .then(|| CommitSection(self))
    }

    /// Decommits the pages of released blocks, or leaves this to the owner of the commit section.
    fn let_go(&self) {
        drop(self.try_enter_commit_section());
    }

    /// As [`let_go`](Self::let_go). The caller has the commit section.
    fn let_go_now(&self) {
        loop {
            let (fence, (runs, stayed, users)) = {
                let states = &mut *self.states.lock();
                let Some((blocks, fence)) = states.released.pop_front() else { return };
                let going = states.unback(&self.shape, self.device().pool().events(), &blocks, &fence);
                (fence, going)
            };
            self.backing.previous_users(stayed, users);
            // No wait: only the owner of the commit section moves pages of backed blocks.
            if let Err(error) = self.backing.decommit(&runs, &fence) {
                tracing::error!(%error, "released blocks keep their memory");
            }
        }
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // All pages are unmapped now, including pages kept for unreleased blocks.
        let (stayed, users) = self.states.get_mut().stayed();
        self.backing.previous_users(stayed, users);
    }
}

/// Right to commit and decommit. At its end, queued releases are carried out.
struct CommitSection<'a>(&'a KvCache);

impl Drop for CommitSection<'_> {
    fn drop(&mut self) {
        loop {
            self.0.let_go_now();
            self.0.commit_section.change(|taken| *taken = false);
            // Released since, by a thread which found the commit section taken.
            let again = !self.0.states.lock().released.is_empty();
            if !again || self.0.commit_section.wait_for(|taken| Some(std::mem::replace(taken, true))) {
                return;
            }
        }
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

//! A KV cache: planes that grow and shrink together, by ranges of blocks.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::backing::{Backing, Refused};
use super::books::{Place, Run, runs_of};
use super::planes::{KvLayout, Shape};
use super::worker::refuse_waiting;
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence};
use crate::sync::{Monitor, Mutex};
use crate::units::{Address, Stream};

mod books;
mod lent;

pub use books::LimitChange;
use books::{Books, count};

/// What a cache is made like.
#[derive(Clone, Copy, Debug, Default)]
pub struct KvOptions<'a> {
    /// Bytes of a block in each plane: a layer's keys, a layer's values. Any number of planes, each of any bytes.
    pub planes: &'a [u64],
    /// The most blocks it may ever have: addresses for them are reserved.
    pub blocks_most: u64,
    /// How the planes lie.
    pub layout: KvLayout,
    /// Name, pages, budget.
    pub memory: ElasticOptions<'a>,
}

/// What a cache has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvStats {
    /// Blocks that it may be used with now: numbers below this, where they are backed.
    pub blocks: u64,
    /// The most that was set from outside, or that there are addresses for.
    pub limit_blocks: u64,
    /// The revision of that; `None`: none was set.
    pub revision: Option<u64>,
    /// The most there are addresses for.
    pub most_blocks: u64,
    /// Blocks that have memory.
    pub backed_blocks: u64,
    /// Of these, beyond `blocks`: they go as they are released.
    pub beyond_blocks: u64,
    /// Bytes of a block of all planes.
    pub block_bytes: u64,
    /// Its memory.
    pub memory: ElasticStats,
}

/// Planes of blocks over elastic memory: addresses for the most blocks there may ever be, pages for those that are backed.
///
/// All planes of a block have memory, or none. Addresses never change, so graphs that were captured over them stay valid however it
/// grows and shrinks. Thread-safe; growing calls wait for each other, releasing ones for nobody.
pub struct KvCache {
    backing: Arc<Backing>,
    shape: Shape,
    books: Mutex<Books>,
    /// Whether somebody commits or lets go.
    turn: Monitor<bool>,
}

impl Device {
    /// A KV cache without memory yet.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for no plane, no block, and more than can be addressed; those of
    /// [`elastic_buffer`](Self::elastic_buffer).
    pub fn kv_cache(self: &Arc<Self>, options: &KvOptions<'_>) -> Result<Arc<KvCache>> {
        let shape = Shape::new(options.layout, options.planes, options.blocks_most)?;
        let backing = Backing::new(self, &shape.lengths(), &options.memory)?;
        let shape = shape.with_pages(backing.page());
        let books = Mutex::new(Books::new(options.blocks_most));
        Ok(Arc::new(KvCache { backing, shape, books, turn: Monitor::default() }))
    }
}

impl KvCache {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        self.backing.device()
    }

    /// How many planes.
    #[must_use]
    pub fn planes(&self) -> usize {
        self.shape.planes().len()
    }

    /// How they lie.
    #[must_use]
    pub fn layout(&self) -> KvLayout {
        self.shape.layout()
    }

    /// Where a plane of a block lies, backed or not; `None`: there is no such plane or block. A plane's block 0 is where a tensor over
    /// the plane begins.
    #[must_use]
    pub fn address(&self, plane: usize, block: u64) -> Option<Address> {
        let (range, offset, _) = self.shape.place(plane, block)?;
        Some(self.backing.base(range)?.plus(offset))
    }

    /// Bytes from one block of a plane to the next.
    #[must_use]
    pub fn stride(&self, plane: usize) -> Option<u64> {
        self.shape.place(plane, 0).map(|(.., stride)| stride)
    }

    /// Bytes of a block in a plane.
    #[must_use]
    pub fn block_bytes(&self, plane: usize) -> Option<u64> {
        self.shape.planes().get(plane).copied()
    }

    /// How many blocks behind one another share pages, the first of them a multiple of this: what a
    /// [`BlockPool`](crate::BlockPool) is to know. Where pages do not divide into blocks, as near as it comes.
    #[must_use]
    pub fn blocks_a_page(&self) -> u64 {
        self.shape.blocks_a_page()
    }

    /// Its account, to limit it or to ask what counts toward it.
    #[must_use]
    pub fn account(&self) -> &Account {
        self.backing.account()
    }

    /// Backs the blocks below `blocks` in all planes, or in none, and lets the cache be used with so many. What is backed stays as it is.
    /// Fewer than it has: nothing is taken away. Before there is no memory, others are asked to give some back.
    ///
    /// # Errors
    /// Those of [`commit`](Self::commit).
    pub fn grow_to(&self, blocks: u64) -> Result<Committed> {
        self.commit(0..blocks)
    }

    /// As [`grow_to`](Self::grow_to), on a thread of the library. Nobody is asked to give memory up for it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end; all others come by the result.
    pub fn grow_async(self: &Arc<Self>, blocks: u64) -> Result<Pending> {
        self.commit_async(0..blocks)
    }

    /// Backs a range of blocks in all planes, or in none; if it ends beyond what the cache could be used with, it now can be with those.
    /// Contents of what comes are anything; blocks that were released and had not gone yet keep theirs, and work on other streams than
    /// those of their fence is to wait for [`before`](Self::before).
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::OverBudget`], also for blocks beyond the limit, or what the driver says, with everything as it was.
    /// [`Error::InvalidArgument`] beyond the cache's end. [`Error::WrongState`] in an observer, if others are at work.
    pub fn commit(&self, blocks: Range<u64>) -> Result<Committed> {
        self.check(&blocks)?;
        self.backing.patiently(|| self.try_commit(&blocks, None))
    }

    /// As [`commit`](Self::commit), on a thread of the library. Nobody is asked to give memory up for it. Its order with other calls is that
    /// of its beginning there; but what a [`shrink_to`](Self::shrink_to) or a limit took away meanwhile it does not bring back.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end; all others come by the result.
    pub fn commit_async(self: &Arc<Self>, blocks: Range<u64>) -> Result<Pending> {
        self.check(&blocks)?;
        let there = Arc::clone(self);
        let number = self.books.lock().begin_ahead();
        let work = move |_: Option<()>| {
            let done = there.try_commit(&blocks, Some(number)).map_err(|refused| refused.error);
            there.books.lock().end_ahead(number);
            done
        };
        Ok(self.backing.worker().push(|| None, work))
    }

    /// Commits, ahead of need if that has a number.
    fn try_commit(&self, blocks: &Range<u64>, ahead: Option<u64>) -> Result<Committed, Refused> {
        let _turn = self.take_turn()?;
        // What was released before this call and is wanted again is not taken for backed.
        self.let_go_now();
        let missing = {
            let books = self.books.lock();
            if blocks.end > books.limit {
                return Err(self.beyond_limit(&books, blocks.end).into());
            }
            books.backed.missing(&(blocks.start..blocks.end.min(books.cap(ahead))))
        };
        let runs: Vec<Run> = missing.iter().flat_map(|span| self.shape.pages(span)).collect();
        let done = self.backing.try_commit(&runs)?;
        self.came(blocks.end, &missing, ahead);
        Ok(done)
    }

    /// Notes that what was missing is there. The caller has the turn.
    fn came(&self, end: u64, missing: &[Range<u64>], ahead: Option<u64>) {
        let (stayed, users) = self.books.lock().came(&self.shape, end, missing, ahead);
        self.backing.had(stayed, users);
    }

    /// Bytes of its pages.
    #[must_use]
    pub fn page_bytes(&self) -> u64 {
        self.backing.page()
    }

    fn beyond_limit(&self, books: &Books, blocks: u64) -> Error {
        let bytes = |blocks: u64| blocks * self.shape.block();
        Error::OverBudget {
            requested: bytes(blocks - books.limit),
            held: bytes(books.backed.count()),
            budget: bytes(books.limit),
            device: self.device().driver().info().ordinal,
            account: Some(format!("the block limit of elastic buffer {}", self.backing.id())),
            lowest: Some(0),
            space: None,
        }
    }

    /// Lets the cache be used with so many blocks at most, from now on. Blocks beyond that which are not `busy` go behind `fence`; the busy
    /// ones keep their memory until they are [released](Self::release). How many those are.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end.
    pub fn shrink_to(&self, blocks: u64, busy: &[Range<u64>], fence: &Fence) -> Result<u64> {
        self.check(&(0..blocks))?;
        let left = self.books.lock().shrink(blocks, busy, fence);
        self.let_go();
        Ok(left)
    }

    /// Blocks are not used any more, wherever they are: their pages go behind `fence` once no other block on them is backed. Does not wait;
    /// while another thread grows the cache, they go when it is done. Blocks that have no memory are left out.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] beyond the cache's end.
    pub fn release(&self, blocks: Range<u64>, fence: &Fence) -> Result<()> {
        self.check(&blocks)?;
        self.books.lock().released.push_back((blocks, fence.clone()));
        self.let_go();
        Ok(())
    }

    /// Sets the most blocks from outside: nothing beyond is granted from now on. Revisions grow; one that is not the latest is ignored.
    /// More than there are addresses for is as many as there are.
    pub fn set_limit(&self, blocks: u64, revision: u64) -> LimitChange {
        self.books.lock().set_limit(blocks, revision)
    }

    /// Blocks that have memory beyond what the cache may be used with: they are to be released.
    #[must_use]
    pub fn beyond(&self) -> Vec<Range<u64>> {
        self.books.lock().beyond()
    }

    /// Blocks that have memory.
    #[must_use]
    pub fn backed(&self) -> Vec<Range<u64>> {
        self.books.lock().backed.within(&(0..self.shape.most()))
    }

    /// Unmaps what was released and is no longer in use; the bytes. Does not wait.
    pub fn settle(&self) -> u64 {
        self.let_go();
        self.backing.settle()
    }

    /// Makes later work of a stream wait for what may still use blocks that were backed again before they went. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], or what the driver says.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.backing.before(stream)
    }

    /// Tells `observer` when memory comes and goes, as long as it lives.
    pub fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.backing.observe(observer);
    }

    /// What it has now.
    #[must_use]
    pub fn stats(&self) -> KvStats {
        let memory = self.backing.stats();
        let books = self.books.lock();
        KvStats {
            blocks: books.blocks,
            limit_blocks: books.limit,
            revision: books.revision,
            most_blocks: self.shape.most(),
            backed_blocks: books.backed.count(),
            beyond_blocks: count(&books.beyond()),
            block_bytes: self.shape.block(),
            memory,
        }
    }

    /// Whether its books and the pool's agree, while no other call is under way: exactly the pages of the backed blocks are there.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first thing that disagrees.
    pub fn audit(&self) -> Result<()> {
        self.backing.audit()?;
        let backed = self.backed();
        let wanted = backed.iter().flat_map(|span| self.shape.pages(span)).flat_map(Run::places);
        let places: BTreeSet<Place> = wanted.collect();
        let there: u64 = self.backing.here(&runs_of(places.iter().copied())).iter().map(Run::pages).sum();
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

    fn take_turn(&self) -> Result<Turn<'_>> {
        if let Some(turn) = self.try_turn() {
            return Ok(turn);
        }
        refuse_waiting()?;
        self.turn.wait_for(|taken| (!std::mem::replace(taken, true)).then_some(()));
        Ok(Turn(self))
    }

    fn try_turn(&self) -> Option<Turn<'_>> {
        self.turn.wait_for(|taken| Some(!std::mem::replace(taken, true))).then(|| Turn(self))
    }

    /// Decommits the pages of released blocks, unless somebody has the turn, who does it then.
    fn let_go(&self) {
        drop(self.try_turn());
    }

    /// The same, with the turn.
    fn let_go_now(&self) {
        loop {
            let (fence, (runs, stayed, users)) = {
                let books = &mut *self.books.lock();
                let Some((blocks, fence)) = books.released.pop_front() else { return };
                let going = books.unback(&self.shape, self.device().pool().events(), &blocks, &fence);
                (fence, going)
            };
            self.backing.had(stayed, users);
            // None of them is being moved: who moves pages of backed blocks has the turn.
            if let Err(error) = self.backing.decommit(&runs, &fence) {
                tracing::error!(%error, "released blocks keep their memory");
            }
        }
    }
}

impl Drop for KvCache {
    fn drop(&mut self) {
        // Its pages go now, also those that stayed for blocks that were not released.
        let (stayed, users) = self.books.get_mut().stayed();
        self.backing.had(stayed, users);
    }
}

/// The right to commit and to let go. At its end, what was released meanwhile goes.
struct Turn<'a>(&'a KvCache);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        loop {
            self.0.let_go_now();
            self.0.turn.change(|taken| *taken = false);
            // Released since the last look, by somebody who found the turn taken.
            let again = !self.0.books.lock().released.is_empty();
            if !again || self.0.turn.wait_for(|taken| Some(std::mem::replace(taken, true))) {
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

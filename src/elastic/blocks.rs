//! Block pool: chooses blocks of a cache so that whole pages run empty.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::pages::check_host_room;
use crate::units::checked_product;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// Not backed, full, or beyond the limit.
    None,
    /// Some blocks are used, this many are free.
    Partial(u64),
    /// No block is used.
    Empty(u64),
}

#[derive(Clone, Copy, Debug)]
struct Page {
    backed: bool,
    used: u64,
    room: Room,
    /// Counted in `empty_bytes`.
    idle: bool,
}

/// A page that could be vacated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Number of the page.
    pub page: u64,
    /// Used blocks.
    pub blocks: Vec<u64>,
}

/// Request to the engine: pages to vacate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ask {
    /// Cheapest first.
    pub pages: Vec<Candidate>,
    /// Requested bytes.
    pub bytes: u64,
    /// Bytes available after vacating, unused pages included.
    pub there: u64,
    /// In the caller's unit.
    pub by: u64,
}

/// Blocks of a cache, used or free; the caller backs and frees memory. `blocks_a_page` consecutive
/// blocks form one *page*. New blocks go to the page with the least sufficient room, unused pages
/// last. A lack of blocks is `None`, not an error.
#[derive(Clone, Debug)]
pub struct BlockPool {
    blocks: u64,
    a_page: u64,
    block_bytes: u64,
    limit: u64,
    pages: Vec<Page>,
    used: Vec<u64>,
    in_use: u64,
    /// Room and number of each partly used page.
    partial: BTreeSet<(u64, usize)>,
    /// Backed pages without a used block.
    empty: BTreeSet<usize>,
    /// Includes reserved blocks.
    free: u64,
    reserved: u64,
    empty_bytes: u64,
}

/// An error, not an abort, if host memory is short.
fn filled<T: Clone>(value: T, count: usize) -> Result<Vec<T>> {
    let requested = (count as u64).saturating_mul(size_of::<T>() as u64);
    check_host_room(requested, 0)?;
    let mut all = Vec::new();
    let short = |_| Error::OutOfHostMemory { requested, held: 0, limit: 0, available: None };
    all.try_reserve_exact(count).map_err(short)?;
    all.resize(count, value);
    Ok(all)
}

impl BlockPool {
    /// Creates a pool of unbacked blocks. `block_bytes`: bytes of a block in all planes.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for no blocks or more than 2^32; [`Error::InvalidSize`] for 0
    /// bytes in all or more than [`MAX_BYTES`](crate::units::MAX_BYTES); [`Error::OutOfHostMemory`]
    /// (32 bytes a page).
    pub fn new(blocks: u64, blocks_a_page: u64, block_bytes: u64) -> Result<Self> {
        let most = 1 << 32;
        for (what, value) in [("the number of blocks", blocks), ("blocks a page", blocks_a_page)] {
            if value == 0 || value > most {
                return Err(Error::InvalidArgument { what, value: value.into(), expected: "from 1 to 2^32" });
            }
        }
        checked_product("a pool of all its blocks", blocks, block_bytes)?;
        let page = Page { backed: false, used: 0, room: Room::None, idle: false };
        let (pages, words) = (blocks.div_ceil(blocks_a_page) as usize, blocks.div_ceil(64) as usize);
        Ok(Self {
            blocks,
            a_page: blocks_a_page,
            block_bytes,
            limit: blocks,
            pages: filled(page, pages)?,
            used: filled(0, words)?,
            in_use: 0,
            partial: BTreeSet::new(),
            empty: BTreeSet::new(),
            free: 0,
            reserved: 0,
            empty_bytes: 0,
        })
    }

    /// Returns the number of blocks.
    #[must_use]
    pub fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Returns the limit of blocks handed out.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// Returns the number of used blocks.
    #[must_use]
    pub fn in_use(&self) -> u64 {
        self.in_use
    }

    /// Returns the blocks backed, free, below the limit and not reserved.
    #[must_use]
    pub fn available(&self) -> u64 {
        self.free.saturating_sub(self.reserved)
    }

    /// Returns the number of reserved blocks.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Returns the blocks of a page.
    #[must_use]
    pub fn blocks_of(&self, page: u64) -> Range<u64> {
        let start = page.saturating_mul(self.a_page).min(self.blocks);
        start..start.saturating_add(self.a_page).min(self.blocks)
    }

    /// Whether the block is used.
    #[must_use]
    pub fn is_used(&self, block: u64) -> bool {
        self.used.get((block / 64) as usize).is_some_and(|word| word >> (block % 64) & 1 == 1)
    }

    /// Returns the used blocks of a range, as ranges in order: beyond a new limit, the `busy` ones
    /// of [`shrink_to`](crate::KvCache::shrink_to).
    #[must_use]
    pub fn used(&self, blocks: &Range<u64>) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        for block in blocks.start..blocks.end.min(self.blocks) {
            if self.is_used(block) {
                join(&mut found, block..block + 1);
            }
        }
        found
    }

    /// Returns the bytes of backed, unused pages, in constant time.
    #[must_use]
    pub fn empty_bytes(&self) -> u64 {
        self.empty_bytes
    }

    fn bytes_of(&self, page: u64) -> u64 {
        let blocks = self.blocks_of(page);
        (blocks.end - blocks.start) * self.block_bytes
    }

    /// Marks the pages fully covered by these blocks as backed.
    pub fn back(&mut self, blocks: &Range<u64>) {
        self.set_backed(blocks, true);
    }

    /// Marks the unused pages fully covered by these blocks as unbacked:
    /// `vmmgraph_block_pool_unback`. [Surplus](Self::surplus) pages lose no reserved block.
    pub fn unback(&mut self, blocks: &Range<u64>) -> u64 {
        self.set_backed(blocks, false);
        self.cut()
    }

    fn cut(&mut self) -> u64 {
        let lost = self.reserved.saturating_sub(self.free);
        self.reserved -= lost;
        lost
    }

    fn set_backed(&mut self, blocks: &Range<u64>, backed: bool) {
        let end = if blocks.end >= self.blocks { self.pages.len() as u64 } else { blocks.end / self.a_page };
        for index in blocks.start.div_ceil(self.a_page)..end {
            if let Some(page) = self.pages.get_mut(index as usize)
                && (backed || page.used == 0)
            {
                page.backed = backed;
                self.index(index as usize);
            }
        }
    }

    fn index(&mut self, index: usize) {
        let blocks = self.blocks_of(index as u64);
        let below = blocks.start..blocks.end.min(self.limit);
        let room = below.filter(|block| !self.is_used(*block)).count() as u64;
        let bytes = self.bytes_of(index as u64);
        let Some(page) = self.pages.get_mut(index) else { return };
        let idle = page.backed && page.used == 0;
        match (std::mem::replace(&mut page.idle, idle), idle) {
            (false, true) => self.empty_bytes += bytes,
            (true, false) => self.empty_bytes -= bytes,
            _ => {}
        }
        match page.room {
            Room::None => {}
            Room::Partial(room) => {
                self.partial.remove(&(room, index));
                self.free -= room;
            }
            Room::Empty(room) => {
                self.empty.remove(&index);
                self.free -= room;
            }
        }
        page.room = match (page.backed && room > 0, page.used) {
            (false, _) => Room::None,
            (true, 0) => Room::Empty(room),
            (true, _) => Room::Partial(room),
        };
        match page.room {
            Room::None => {}
            Room::Partial(_) => {
                self.partial.insert((room, index));
                self.free += room;
            }
            Room::Empty(_) => {
                self.empty.insert(index);
                self.free += room;
            }
        }
    }

    /// Allocates `count` blocks, or none.
    pub fn allocate(&mut self, count: u64) -> Option<Vec<u64>> {
        (count <= self.available()).then(|| self.take(count))
    }

    /// Reserves `count` blocks for [`allocate_reserved`](Self::allocate_reserved); false if too few
    /// are available.
    pub fn reserve(&mut self, count: u64) -> bool {
        let there = count <= self.available();
        if there {
            self.reserved += count;
        }
        there
    }

    /// Cancels at most `count` reservations.
    pub fn unreserve(&mut self, count: u64) {
        self.reserved = self.reserved.saturating_sub(count);
    }

    /// Allocates `count` reserved blocks, or none.
    pub fn allocate_reserved(&mut self, count: u64) -> Option<Vec<u64>> {
        if count > self.reserved {
            return None;
        }
        self.reserved -= count;
        Some(self.take(count))
    }

    /// The caller checked that enough are free.
    fn take(&mut self, count: u64) -> Vec<u64> {
        let mut taken = Vec::with_capacity(count as usize);
        while (taken.len() as u64) < count {
            let left = count - taken.len() as u64;
            // The tightest page with enough room, else the one with the most, else the first
            // unused.
            let tight = self.partial.range((left, 0)..).next();
            let found = tight.or(self.partial.last()).map(|(_, index)| *index);
            let Some(index) = found.or(self.empty.first().copied()) else { break };
            let blocks = self.blocks_of(index as u64);
            let mut more = 0;
            for block in blocks.start..blocks.end.min(self.limit) {
                if more < left && !self.is_used(block) {
                    self.mark(block, true);
                    taken.push(block);
                    more += 1;
                }
            }
            if let Some(page) = self.pages.get_mut(index) {
                page.used += more;
            }
            self.index(index);
        }
        self.in_use += taken.len() as u64;
        taken
    }

    fn mark(&mut self, block: u64, used: bool) {
        if let Some(word) = self.used.get_mut((block / 64) as usize) {
            let bit = 1 << (block % 64);
            if used { *word |= bit } else { *word &= !bit }
        }
    }

    /// Frees blocks and returns the pages without used blocks: `vmmgraph_block_pool_free`.
    pub fn free(&mut self, blocks: &[u64]) -> Result<Vec<u64>> {
        for (count, block) in blocks.iter().enumerate() {
            if !self.is_used(*block) {
                for block in blocks.iter().take(count) {
                    self.mark(*block, true);
                }
                let (value, expected) = (i128::from(*block), "a block in use, named once");
                return Err(Error::InvalidArgument { what: "a block to free", value, expected });
            }
            self.mark(*block, false);
        }
        self.in_use -= blocks.len() as u64;
        let mut touched = BTreeSet::new();
        for block in blocks {
            let index = (block / self.a_page) as usize;
            if let Some(page) = self.pages.get_mut(index) {
                page.used -= 1;
            }
            touched.insert(index);
        }
        touched.iter().for_each(|index| self.index(*index));
        let empty =
            touched.into_iter().filter(|index| self.pages.get(*index).is_some_and(|page| page.used == 0));
        Ok(empty.map(|index| index as u64).collect())
    }

    /// Sets the limit; used blocks stay used. Returns the number of lost reserved blocks.
    pub fn set_limit(&mut self, blocks: u64) -> u64 {
        let (old, new) = (self.limit, blocks.min(self.blocks));
        self.limit = new;
        let (low, high) = (old.min(new), old.max(new));
        for index in low / self.a_page..high.div_ceil(self.a_page) {
            self.index(index as usize);
        }
        self.cut()
    }

    /// Returns the blocks to back so that `count` are available: whole pages, lowest first. `None`:
    /// the limit is too low.
    #[must_use]
    pub fn shortfall(&self, count: u64) -> Option<Vec<Range<u64>>> {
        let mut missing = count.saturating_sub(self.available());
        let mut found = Vec::new();
        for (index, page) in self.pages.iter().enumerate() {
            if missing == 0 {
                break;
            }
            let blocks = self.blocks_of(index as u64);
            let room = blocks.end.min(self.limit).saturating_sub(blocks.start);
            if !page.backed && room > 0 {
                missing = missing.saturating_sub(room);
                join(&mut found, blocks);
            }
        }
        (missing == 0).then_some(found)
    }

    /// Returns backed, unused pages to unback: `vmmgraph_block_pool_surplus`.
    #[must_use]
    pub fn surplus(&self, keep: u64) -> Vec<Range<u64>> {
        let mut spare = self.available().saturating_sub(keep);
        let mut going = BTreeSet::new();
        for (index, page) in self.pages.iter().enumerate().rev() {
            if !page.backed || page.used > 0 {
                continue;
            }
            let room = if let Room::Empty(room) = page.room { room } else { 0 };
            if room <= spare {
                spare -= room;
                going.insert(index as u64);
            }
        }
        let mut found = Vec::new();
        going.into_iter().for_each(|page| join(&mut found, self.blocks_of(page)));
        found
    }

    /// Chooses pages to vacate, so that `bytes` can be freed until `by`: `vmmgraph_block_pool_ask`.
    /// The engine then [frees](Self::free) the blocks.
    #[must_use]
    pub fn ask(&self, bytes: u64, by: u64, evictable: impl Fn(u64) -> bool) -> Ask {
        let backed = self.pages.iter().enumerate().filter(|(_, page)| page.backed);
        self.ask_among(backed.collect(), (bytes, by), evictable)
    }

    /// Like [`ask`](Self::ask), for the pages of these blocks, as needed by a
    /// [recall](crate::BlockBorrower). `there` counts the pages of [`unused_of`](Self::unused_of).
    #[must_use]
    pub fn ask_of(&self, blocks: &[Range<u64>], bytes: u64, by: u64, evictable: impl Fn(u64) -> bool) -> Ask {
        let pages = self.pages_of(blocks);
        let pages = pages.iter().filter_map(|index| Some((*index, self.pages.get(*index)?)));
        self.ask_among(pages.collect(), (bytes, by), evictable)
    }

    /// Returns the unused pages among the pages of these blocks, as block ranges.
    #[must_use]
    pub fn unused_of(&self, blocks: &[Range<u64>]) -> Vec<Range<u64>> {
        let mut found = Vec::new();
        for index in self.pages_of(blocks) {
            if self.pages.get(index).is_some_and(|page| page.used == 0) {
                join(&mut found, self.blocks_of(index as u64));
            }
        }
        found
    }

    fn pages_of(&self, blocks: &[Range<u64>]) -> BTreeSet<usize> {
        let pages = |blocks: &Range<u64>| {
            let end = if blocks.is_empty() { 0 } else { blocks.end.min(self.blocks).div_ceil(self.a_page) };
            (blocks.start / self.a_page) as usize..end as usize
        };
        blocks.iter().flat_map(pages).collect()
    }

    fn ask_among(
        &self,
        among: Vec<(usize, &Page)>,
        (bytes, by): (u64, u64),
        evictable: impl Fn(u64) -> bool,
    ) -> Ask {
        let (mut order, empty): (Vec<_>, Vec<_>) = among.into_iter().partition(|(_, page)| page.used > 0);
        let mut there: u64 = empty.iter().map(|(index, _)| self.bytes_of(*index as u64)).sum();
        order.sort_by_key(|(index, page)| {
            (self.blocks_of(*index as u64).start < self.limit, page.used, *index)
        });
        let mut pages = Vec::new();
        for (index, _) in order {
            if there >= bytes {
                break;
            }
            let page = index as u64;
            let blocks: Vec<u64> = self.blocks_of(page).filter(|block| self.is_used(*block)).collect();
            if blocks.iter().all(|block| evictable(*block)) {
                there += self.bytes_of(page);
                pages.push(Candidate { page, blocks });
            }
        }
        Ask { pages, bytes, there, by }
    }
}

fn join(ranges: &mut Vec<Range<u64>>, more: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == more.start => last.end = more.end,
        _ => ranges.push(more),
    }
}

#[cfg(test)]
mod tests;

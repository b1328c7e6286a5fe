//! Persistent (kept) blocks: declared or predicted to outlive their capture, packed on pages and
//! addresses of the arena, each on bytes of its own. [`Heap`] has its own lock, taken after a
//! space's lock; [`KeptBlocks`] is under the space's lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::layout::Usage;
use super::{Core, State};
use crate::error::{Error, Result};
use crate::pages::{
    Fence, Owner, PagePool, PendingUnmap, Poll, Reservation, SharedSet, Stretches, Transaction,
};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes};

/// Addresses reserved at a time; more for a larger block.
const RANGE: u64 = 1 << 30;

#[derive(Default)]
pub(crate) struct Heap(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    ranges: Vec<Reservation>,
    end: u64,
    /// Mapped bytes without a block. A wall at the beginning of each range keeps stretches apart.
    free: Stretches,
    waiting: Vec<(Fence, Vec<(Address, u64)>)>,
}

impl Heap {
    pub(crate) fn allocate(&self, shared: &SharedSet, bytes: u64) -> Result<Address> {
        let mut inner = self.0.lock();
        inner.reap(shared.pool());
        if let Some(at) = inner.free.take(bytes) {
            return Ok(Address(at));
        }
        let at = inner.grow(shared, bytes)?;
        inner.free.cut(at, bytes);
        Ok(Address(at))
    }

    pub(crate) fn free_all(&self, pool: &PagePool, blocks: Vec<(Address, u64)>, fence: &Fence) {
        if blocks.is_empty() {
            return;
        }
        let mut inner = self.0.lock();
        inner.waiting.push((fence.clone(), blocks));
        inner.reap(pool);
    }

    pub(super) fn end(&self, pool: &PagePool) {
        let mut inner = self.0.lock();
        inner.reap(pool);
        let (mut fence, mut pending) = (Fence::default(), PendingUnmap::default());
        inner.waiting.drain(..).for_each(|(waiting, _)| fence.join(waiting));
        inner.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        pool.unmap_after(fence, pending);
    }

    pub(super) fn users(&self) -> Fence {
        let mut fence = Fence::default();
        self.0.lock().waiting.iter().for_each(|(waiting, _)| fence.join(waiting.clone()));
        fence
    }

    /// Reuses blocks with finished fences, and frees pages without blocks.
    pub(crate) fn reap(&self, pool: &PagePool) {
        self.0.lock().reap(pool);
    }
}

impl Inner {
    fn grow(&mut self, shared: &SharedSet, bytes: u64) -> Result<u64> {
        let small = shared.geometry().small();
        let mut transaction = Transaction::on(shared.pool());
        let last = self.ranges.last();
        let had = last.map_or(0, |range| self.free.before(range.base().0 + self.end));
        let more = (bytes - had.min(bytes)).next_multiple_of(small);
        let room =
            last.filter(|range| range.bytes() - self.end >= more).map(|range| (range.id(), range.base()));
        let account = shared.account().id();
        let owner = Owner::Kept { arena: shared.arena() };
        if let Some((range, base)) = room {
            let page = transaction.take(more, owner, account)?;
            transaction.map(range, self.end, &[page])?;
            transaction.commit();
            let end = base.0 + self.end;
            self.end += more;
            self.free.add(end, more);
            return Ok(end - had);
        }
        let more = bytes.next_multiple_of(small);
        let range = transaction.reserve(RANGE.max(more), 0, shared.peers())?;
        let page = transaction.take(more, owner, account)?;
        transaction.map(range, 0, &[page])?;
        let (_, reserved) = transaction.commit();
        self.ranges.extend(reserved);
        self.end = more;
        let start = self.ranges.last().map_or(0, |range| range.base().0);
        self.free.add_wall(start);
        self.free.add(start, more);
        Ok(start)
    }

    fn reap(&mut self, pool: &PagePool) {
        let (mut done, mut poll) = (Vec::new(), Poll::new(pool.events()));
        self.waiting.retain_mut(|(fence, blocks)| {
            let over = fence.done_at(&mut poll).unwrap_or(false);
            if over {
                done.append(blocks);
            }
            !over
        });
        if done.is_empty() {
            return;
        }
        done.iter().for_each(|(at, bytes)| self.free.add(at.0, *bytes));
        // Adjacent stretches have merged by now.
        let mut empty = BTreeSet::new();
        for (at, bytes) in &done {
            let range = self.ranges.iter().find(|range| {
                let base = range.base().0;
                (base..base + range.bytes()).contains(&at.0)
            });
            let Some(range) = range else { continue };
            let (base, id) = (range.base().0, range.id());
            for page in range.mapped_under(at.0 - base, *bytes) {
                if self.free.covers(base + page.offset, page.bytes) {
                    empty.insert((base + page.offset, page.bytes, id, page.offset));
                }
            }
        }
        for (from, bytes, range, offset) in &empty {
            self.free.cut(*from, *bytes);
            let mut pending = PendingUnmap::default();
            pending.add_part(*range, *offset, *bytes);
            pool.unmap_after(Fence::default(), pending);
        }
        if !empty.is_empty() {
            self.leave_empty_ranges();
        }
    }

    /// Keeps the last range, which new blocks extend.
    fn leave_empty_ranges(&mut self) {
        let last = self.ranges.len().saturating_sub(1);
        let (free, mut number) = (&mut self.free, 0);
        self.ranges.retain(|range| {
            number += 1;
            let stays = number > last || !range.mapped().is_empty();
            if !stays {
                free.remove_wall(range.base().0);
            }
            stays
        });
    }
}

impl fmt::Debug for Heap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Heap").finish_non_exhaustive()
    }
}

#[derive(Debug)]
struct Kept {
    bytes: u64,
    serial: u64,
    freed: Option<Fence>,
}

/// Bytes of a freed block stay reserved until the graph ends, because the graph writes there.
#[derive(Debug, Default)]
pub(super) struct KeptBlocks {
    blocks: BTreeMap<Address, Kept>,
    usage: Usage,
}

impl KeptBlocks {
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    pub(super) fn contains(&self, address: Address) -> bool {
        let before = self.blocks.range(..=address).next_back();
        before.is_some_and(|(at, kept)| address.0 < at.0 + kept.bytes)
    }

    pub(super) fn check(&self, address: Address) -> Result<()> {
        match self.blocks.get(&address) {
            Some(kept) if kept.freed.is_none() => Ok(()),
            Some(_) => Err(Error::DoubleFree { address }),
            None => Err(Error::ForeignPointer { address }),
        }
    }

    /// Polls fences, which records deferred events.
    pub(super) fn poll_freed(&mut self, pool: &PagePool) {
        let mut poll = Poll::new(pool.events());
        for fence in self.blocks.values_mut().filter_map(|kept| kept.freed.as_mut()) {
            let _ = fence.done_at(&mut poll);
        }
    }

    pub(super) fn readers(&self, fence: &mut Fence) {
        let freed = self.blocks.values().filter_map(|kept| kept.freed.clone());
        freed.for_each(|behind| fence.join(behind));
    }

    /// Address, bytes and number.
    pub(super) fn live(&self) -> impl Iterator<Item = (Address, u64, u64)> {
        let live = self.blocks.iter().filter(|(_, kept)| kept.freed.is_none());
        live.map(|(at, kept)| (*at, kept.bytes, kept.serial))
    }

    pub(super) fn all(&self) -> impl Iterator<Item = (Address, u64, u64)> {
        self.blocks.iter().map(|(at, kept)| (*at, kept.bytes, kept.serial))
    }

    pub(super) fn take(&mut self, all: bool, fence: &mut Fence) -> Vec<(Address, u64)> {
        let mut gone = Vec::new();
        self.blocks.retain(|at, kept| {
            let goes = all || kept.freed.is_some();
            if goes {
                gone.push((*at, kept.bytes));
                fence.join(kept.freed.take().unwrap_or_default());
            }
            !goes
        });
        gone
    }
}

impl Core {
    pub(super) fn keep(&self, state: &mut State, bytes: BlockBytes) -> Result<Address> {
        self.common.refuse_hopeless(bytes)?;
        let address = self.common.heap.allocate(&self.common.shared, bytes.get())?;
        state.layout_hash.kept(bytes);
        let serial = state.usage().allocations + state.kept.usage.add(bytes);
        state.kept.blocks.insert(address, Kept { bytes: bytes.get(), serial, freed: None });
        Ok(address)
    }

    pub(super) fn free_kept(&self, state: &mut State, address: Address) -> Result<u64> {
        let behind = self.behind_users(state, address);
        let bytes = match state.kept.blocks.get_mut(&address) {
            Some(kept) => {
                kept.freed = Some(behind);
                kept.bytes
            }
            None => return Err(Error::ForeignPointer { address }),
        };
        state.kept.usage.remove(bytes);
        if state.stage.phase() == super::Phase::Retired {
            let mut fence = self.common.order.fence();
            let freed = state.kept.take(false, &mut fence);
            self.common.heap.free_all(self.common.pool(), freed, &fence);
        }
        Ok(bytes)
    }
}

//! State of a region, under its mutex `table`. Pages of different policies are separate; a page
//! without live blocks and pending frees is removed. The pause state has the contents on the host,
//! by address of the page.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Policy;
use crate::error::{Error, Result};
use crate::pages::{
    AccountId, Events, Fence, HostPool, NamedStream, Owner, PageId, PagePool, PendingUnmap, Poll, RangeId,
    Reservation, Stretches,
};
use crate::pause::{MovedPage, PageKey, PausePage, PauseState, Phase};
use crate::units::Address;

/// Live runs closer than this, in bytes, are copied together with the gap.
const NEAR: u64 = 64 << 10;

#[derive(Debug)]
struct Extent {
    range: RangeId,
    offset: u64,
    bytes: u64,
    policy: Policy,
    /// `None`: paused.
    page: Option<PageId>,
    /// The last resume writes the page, even if its blocks were freed meanwhile.
    arrives: bool,
}

#[derive(Debug)]
struct Block {
    bytes: u64,
    policy: Policy,
    users: Vec<NamedStream>,
}

#[derive(Debug, Default)]
pub(super) struct BlockTable {
    extents: BTreeMap<u64, Extent>,
    blocks: BTreeMap<Address, Block>,
    live_bytes: u64,
    packings: [Stretches; Policy::COUNT],
    /// Freed blocks whose streams may not be done.
    waiting: Vec<(Fence, Address, u64, Policy)>,
    ranges: Vec<Reservation>,
    /// Bytes of the last range with a place.
    end: u64,
}

impl BlockTable {
    pub(super) fn bytes_of(&self, policy: Policy) -> u64 {
        let of = self.extents.values().filter(|extent| extent.policy == policy);
        of.map(|extent| extent.bytes).sum()
    }

    /// Place of the next page: range, offset, and the bytes from there on.
    pub(super) fn next_place(&self) -> Option<(RangeId, u64, u64)> {
        self.ranges.last().map(|range| (range.id(), self.end, range.bytes() - self.end))
    }

    /// Free bytes at the end of the last range.
    pub(super) fn tail(&self, policy: Policy) -> u64 {
        let last = self.ranges.last();
        last.map_or(0, |range| self.packings[policy.index()].before(range.base().0 + self.end))
    }

    pub(super) fn add_range(&mut self, range: Reservation) {
        let base = range.base().0;
        self.packings.iter_mut().for_each(|packing| packing.add_wall(base));
        self.ranges.push(range);
        self.end = 0;
    }

    /// Adds consecutive pages at the end of the last range.
    pub(super) fn add_pages(&mut self, policy: Policy, pages: &[(PageId, u64)]) {
        let Some((range, base)) = self.ranges.last().map(|range| (range.id(), range.base().0)) else {
            return;
        };
        for (page, bytes) in pages {
            let (offset, bytes) = (self.end, *bytes);
            let extent = Extent { range, offset, bytes, policy, page: Some(*page), arrives: false };
            self.extents.insert(base + offset, extent);
            self.packings[policy.index()].add(base + offset, bytes);
            self.end += bytes;
        }
    }

    /// Places a block; `None`: no stretch is long enough.
    pub(super) fn place(&mut self, bytes: u64, policy: Policy, stream: NamedStream) -> Option<Address> {
        let at = Address(self.packings[policy.index()].take(bytes)?);
        self.blocks.insert(at, Block { bytes, policy, users: Vec::new() });
        self.live_bytes += bytes;
        // The requesting stream is the first user.
        let _ = self.use_on(at, stream);
        Some(at)
    }

    /// Whether the last resume writes one of these pages.
    pub(super) fn arrives(&self, pages: &[u64]) -> bool {
        pages.iter().any(|at| self.extents.get(at).is_some_and(|extent| extent.arrives))
    }

    fn live(&mut self, address: Address) -> Result<&mut Block> {
        if let Some(block) = self.blocks.get_mut(&address) {
            return Ok(block);
        }
        let freed = self.waiting.iter().any(|(_, at, ..)| *at == address);
        Err(if freed { Error::DoubleFree { address } } else { Error::ForeignPointer { address } })
    }

    pub(super) fn bytes_at(&mut self, address: Address) -> Result<u64> {
        self.live(address).map(|block| block.bytes)
    }

    pub(super) fn use_on(&mut self, address: Address, stream: NamedStream) -> Result<()> {
        let users = &mut self.live(address)?.users;
        if !users.contains(&stream) {
            users.push(stream);
        }
        Ok(())
    }

    /// Frees a block: its bytes are reused after the work of its streams and after `contents`.
    pub(super) fn free(&mut self, address: Address, contents: Fence, events: &Arc<Events>) -> Result<()> {
        self.live(address)?;
        let Some(block) = self.blocks.remove(&address) else { return Ok(()) };
        self.live_bytes -= block.bytes;
        let mut fence = contents;
        block.users.iter().for_each(|user| fence.add_user(events, *user));
        self.waiting.push((fence, address, block.bytes, block.policy));
        Ok(())
    }

    /// Fence of freed blocks; `None`: none is pending.
    pub(super) fn freed(&self) -> Option<Fence> {
        let fences = self.waiting.iter().map(|(fence, ..)| fence.clone());
        fences.reduce(|mut all, fence| {
            all.join(fence);
            all
        })
    }

    /// Fence after the streams of all blocks.
    pub(super) fn users(&self, events: &Arc<Events>) -> Fence {
        let mut all: Vec<_> = self.blocks.values().flat_map(|block| block.users.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        let mut fence = Fence::default();
        all.into_iter().for_each(|user| fence.add_user(events, user));
        self.waiting.iter().for_each(|(waiting, ..)| fence.join(waiting.clone()));
        fence
    }

    /// Merges places as far as `join` permits, so a resume takes fewer pages.
    pub(super) fn join_places(&mut self, state: &PauseState, join: impl Fn([u64; 2], u64) -> bool) {
        let held = Policy::ALL.map(|policy| self.bytes_of(policy));
        let mut joined: BTreeMap<u64, Extent> = BTreeMap::new();
        for (at, extent) in std::mem::take(&mut self.extents) {
            if let Some(mut last) = joined.last_entry() {
                let (start, before) = (*last.key(), last.get_mut());
                let neighbours = start + before.bytes == at && before.range == extent.range;
                let alike = before.policy == extent.policy && before.page.is_none() && extent.page.is_none();
                if neighbours && alike && join([before.bytes, extent.bytes], held[extent.policy.index()]) {
                    state.with_copies(|copies| {
                        if let Some(copy) = copies.remove(&PageKey::Place(at)) {
                            let joined = copies.entry(PageKey::Place(start)).or_default();
                            joined.append(copy, before.bytes);
                        }
                    });
                    before.bytes += extent.bytes;
                    continue;
                }
            }
            joined.insert(at, extent);
        }
        self.extents = joined;
    }

    /// Pages to move; `taker`: owner and account of new memory.
    pub(super) fn pages(&self, taker: (Owner, AccountId), verify: bool) -> Vec<PausePage> {
        let moves = self.extents.iter().filter(|(_, extent)| extent.moves(false)).map(|(at, extent)| {
            let place = (extent.range, extent.offset);
            let page = PausePage::new(PageKey::Place(*at), place, extent.bytes, taker);
            let page = page.resident(extent.page.is_some(), false);
            match extent.policy {
                Policy::Zero => page.zeroed(),
                Policy::Backup => page.copied(self.runs(*at, extent.bytes), verify),
                Policy::Discard | Policy::Keep => page,
            }
        });
        moves.collect()
    }

    pub(super) fn record(&mut self, moved: &[MovedPage]) {
        for (key, page, filled) in moved {
            if let PageKey::Place(at) = key
                && let Some(extent) = self.extents.get_mut(at)
            {
                (extent.page, extent.arrives) = (*page, *filled);
            }
        }
    }

    /// Ranges told to hooks. With `present`, only places with memory.
    pub(super) fn moved_ranges(&self, present: bool) -> Vec<(Address, u64)> {
        let moved = self.extents.iter().filter(|(_, extent)| extent.moves(present));
        moved.map(|(at, extent)| (Address(*at), extent.bytes)).collect()
    }

    /// Live runs by offset; near ones are merged.
    pub(super) fn runs(&self, at: u64, bytes: u64) -> Vec<(u64, u64)> {
        let (start, end) = (Address(at), Address(at + bytes));
        let before = self.blocks.range(..start).next_back();
        let inside = self.blocks.range(start..end);
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (block, Block { bytes, .. }) in before.into_iter().chain(inside) {
            let (from, to) = (block.0.max(at) - at, (block.0 + bytes).min(end.0).saturating_sub(at));
            if to <= from {
                continue;
            }
            match runs.last_mut() {
                Some((start, length)) if from <= *start + *length + NEAR => *length = to - *start,
                _ => runs.push((from, to - from)),
            }
        }
        runs
    }

    pub(super) fn pages_under(&self, at: Address, bytes: u64) -> Vec<u64> {
        let first = self.extents.range(..=at.0).next_back().map_or(at.0, |(start, _)| *start);
        self.extents.range(first..at.0 + bytes).map(|(start, _)| *start).collect()
    }

    /// Page at an address, and the offset in the page.
    pub(super) fn page_at(&self, at: u64) -> Option<(PageKey, u64)> {
        let (start, _) = self.extents.range(..=at).next_back()?;
        Some((PageKey::Place(*start), at - start))
    }

    /// Reclaims freed blocks whose streams are done, and releases pages without blocks. No-op while
    /// pages move.
    pub(super) fn reap(&mut self, state: &PauseState, pool: &PagePool, host: &HostPool) {
        if matches!(state.phase(), Phase::Pausing | Phase::Resuming) {
            return;
        }
        let (mut done, mut poll) = (Vec::new(), Poll::new(pool.events()));
        self.waiting.retain_mut(|(fence, at, bytes, policy)| {
            let over = fence.done_at(&mut poll).unwrap_or(false);
            if over {
                done.push((*at, *bytes, *policy));
            }
            !over
        });
        for (at, bytes, policy) in &done {
            self.packings[policy.index()].add(at.0, *bytes);
        }
        let mut empty = Vec::new();
        for (at, bytes, _) in done {
            empty.extend(self.pages_under(at, bytes));
        }
        let mut pending = PendingUnmap::default();
        for at in empty {
            let Some(extent) = self.extents.get(&at) else { continue };
            let packing = &mut self.packings[extent.policy.index()];
            if !packing.covers(at, extent.bytes) {
                continue;
            }
            packing.cut(at, extent.bytes);
            let Some(extent) = self.extents.remove(&at) else { continue };
            if extent.page.is_some() {
                pending.add_part(extent.range, extent.offset, extent.bytes);
            }
            state.forget(host, [PageKey::Place(at)]);
        }
        self.leave_empty_ranges(&mut pending);
        pool.unmap_after(state.contents(), pending);
    }

    /// Frees empty ranges, except the last one.
    fn leave_empty_ranges(&mut self, pending: &mut PendingUnmap) {
        let last = self.ranges.len().saturating_sub(1);
        let (extents, packings) = (&self.extents, &mut self.packings);
        let mut number = 0;
        let empty = self.ranges.extract_if(.., |range| {
            number += 1;
            let (base, end) = (range.base().0, range.base().0 + range.bytes());
            number <= last && extents.range(base..end).next().is_none()
        });
        for range in empty {
            packings.iter_mut().for_each(|packing| packing.remove_wall(range.base().0));
            pending.join(range.leave());
        }
    }

    /// Returns all memory when the region is dropped.
    pub(super) fn leave(&mut self) -> PendingUnmap {
        let mut pending = PendingUnmap::default();
        self.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        pending
    }

    /// Bytes of blocks, and free bytes.
    pub(super) fn usage(&self) -> (u64, u64) {
        (self.live_bytes, self.packings.iter().map(Stretches::bytes).sum())
    }

    /// Bytes with memory, and paused bytes.
    pub(super) fn resident(&self) -> (u64, u64) {
        let all = self.extents.values().map(|extent| (extent.page.is_some(), extent.bytes));
        all.fold(
            (0, 0),
            |(there, gone), (is, bytes)| if is { (there + bytes, gone) } else { (there, gone + bytes) },
        )
    }

    /// Pages, and live blocks.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.extents.len() as u64, self.blocks.len() as u64)
    }

    pub(super) fn reserved(&self) -> u64 {
        self.ranges.iter().map(Reservation::bytes).sum()
    }
}

impl Extent {
    /// Whether a pause moves the page; with `present`, only if it has memory.
    fn moves(&self, present: bool) -> bool {
        self.policy != Policy::Keep && (self.page.is_some() || !present)
    }
}

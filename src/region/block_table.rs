//! State of a region: places of its pages, blocks, free stretches and freed blocks still in use.
//!
//! Guarded by the mutex `table` of `Region`. Invariants: pages of different policies are separate;
//! a page without live blocks and without pending frees is removed; contents on the host equal the
//! page, until [`written`](BlockTable::written).

use std::collections::BTreeMap;
use std::sync::Arc;

use super::Policy;
use crate::error::{Error, Result};
use crate::pages::{
    Events, Fence, HostCopy, HostPool, NamedStream, PageId, PagePool, PendingUnmap, Poll, RangeId,
    Reservation, Run, Stretches,
};
use crate::units::Address;

/// Live runs closer than this, in bytes, are copied together with the gap.
const NEAR: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    Resident,
    Pausing,
    Paused,
    Resuming,
}

impl Phase {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Resident => "resident",
            Self::Pausing => "being paused",
            Self::Paused => "paused",
            Self::Resuming => "being resumed",
        }
    }
}

/// Place of one page.
#[derive(Debug)]
pub(super) struct Extent {
    pub(super) range: RangeId,
    pub(super) offset: u64,
    pub(super) bytes: u64,
    pub(super) policy: Policy,
    /// `None`: paused.
    pub(super) page: Option<PageId>,
    /// Host copy of the contents, while the page is unwritten.
    pub(super) copy: Option<HostCopy>,
    /// Whether the last resume writes the page, even if its blocks were freed meanwhile.
    pub(super) arrives: bool,
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) bytes: u64,
    pub(super) policy: Policy,
    /// Streams which use the block, with their scope.
    users: Vec<NamedStream>,
}

#[derive(Debug)]
pub(super) struct BlockTable {
    pub(super) phase: Phase,
    /// Counts the mappings.
    pub(super) generation: u64,
    pub(super) extents: BTreeMap<u64, Extent>,
    pub(super) blocks: BTreeMap<Address, Block>,
    /// Bytes of all blocks.
    live_bytes: u64,
    /// Free stretches of each policy.
    packings: [Stretches; Policy::COUNT],
    /// Freed blocks whose streams may not be done.
    waiting: Vec<(Fence, Address, u64, Policy)>,
    ranges: Vec<Reservation>,
    /// Bytes of the last range with a place.
    pub(super) end: u64,
    /// Copies submitted by a resume.
    pub(super) contents: Fence,
}

impl BlockTable {
    pub(super) fn new() -> Self {
        Self {
            phase: Phase::Resident,
            generation: 1,
            extents: BTreeMap::new(),
            blocks: BTreeMap::new(),
            live_bytes: 0,
            packings: Default::default(),
            waiting: Vec::new(),
            ranges: Vec::new(),
            end: 0,
            contents: Fence::default(),
        }
    }

    pub(super) fn require(&self, expected: Phase) -> Result<()> {
        if self.phase == expected {
            return Ok(());
        }
        let (found, expected) = (self.phase.name(), expected.name());
        Err(Error::wrong_state(format!("cannot use the region: it is {found}; the call needs it {expected}")))
    }

    pub(super) fn bytes_of(&self, policy: Policy) -> u64 {
        let of = self.extents.values().filter(|extent| extent.policy == policy);
        of.map(|extent| extent.bytes).sum()
    }

    /// Returns key, base and bytes of the range in which pages are added.
    pub(super) fn last_range(&self) -> Option<(RangeId, u64, u64)> {
        self.ranges.last().map(|range| (range.id(), range.base().0, range.bytes()))
    }

    /// Returns the free bytes of a policy at the end of the last range.
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

    /// Adds consecutive mapped pages at the end of the last range.
    pub(super) fn add_pages(&mut self, policy: Policy, pages: &[(PageId, u64)]) {
        let Some((range, base, _)) = self.last_range() else { return };
        for (page, bytes) in pages {
            let (offset, bytes) = (self.end, *bytes);
            let extent =
                Extent { range, offset, bytes, policy, page: Some(*page), copy: None, arrives: false };
            self.extents.insert(base + offset, extent);
            self.packings[policy.index()].add(base + offset, bytes);
            self.end += bytes;
        }
    }

    /// Places a block on free bytes. `None`: no stretch is long enough.
    pub(super) fn place(&mut self, bytes: u64, policy: Policy, stream: NamedStream) -> Option<Address> {
        let at = Address(self.packings[policy.index()].take(bytes)?);
        self.blocks.insert(at, Block { bytes, policy, users: Vec::new() });
        self.live_bytes += bytes;
        // The requesting stream is the first user.
        let _ = self.use_on(at, stream);
        Some(at)
    }

    /// Returns the running copies to these pages, if any. Called for new blocks on the pages.
    pub(super) fn arriving(&mut self, pages: &[u64], events: &Arc<Events>) -> Option<Fence> {
        // A failed query means not done.
        if self.contents.done(events).unwrap_or(false) {
            return None;
        }
        let arrives = pages.iter().any(|at| self.extents.get(at).is_some_and(|extent| extent.arrives));
        arrives.then(|| self.contents.clone())
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

    /// Frees a block. Its bytes are reused after the work submitted to its streams.
    pub(super) fn free(&mut self, address: Address, events: &Arc<Events>) -> Result<()> {
        self.live(address)?;
        let Some(block) = self.blocks.remove(&address) else { return Ok(()) };
        self.live_bytes -= block.bytes;
        let mut fence = self.contents.clone();
        block.users.iter().for_each(|user| fence.add_user(events, *user));
        self.waiting.push((fence, address, block.bytes, block.policy));
        Ok(())
    }

    /// Returns the fence of all freed blocks. `None`: no freed block is pending.
    pub(super) fn freed(&self) -> Option<Fence> {
        let fences = self.waiting.iter().map(|(fence, ..)| fence.clone());
        fences.reduce(|mut all, fence| {
            all.join(fence);
            all
        })
    }

    /// Returns the fence of the work submitted to the streams of all blocks.
    pub(super) fn users(&mut self, events: &Arc<Events>) -> Fence {
        let mut all: Vec<_> = self.blocks.values().flat_map(|block| block.users.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        let mut fence = self.contents.clone();
        all.into_iter().for_each(|user| fence.add_user(events, user));
        self.waiting.iter().for_each(|(waiting, ..)| fence.join(waiting.clone()));
        fence
    }

    /// Merges neighbouring places without pages, as far as `join` permits, so a resume takes fewer
    /// pages.
    pub(super) fn join_places(&mut self, join: impl Fn([u64; 2], u64) -> bool) {
        let held = Policy::ALL.map(|policy| self.bytes_of(policy));
        let mut joined: BTreeMap<u64, Extent> = BTreeMap::new();
        for (at, extent) in std::mem::take(&mut self.extents) {
            if let Some(mut last) = joined.last_entry() {
                let (start, before) = (*last.key(), last.get_mut());
                let neighbours = start + before.bytes == at && before.range == extent.range;
                let alike = before.policy == extent.policy && before.page.is_none() && extent.page.is_none();
                if neighbours && alike && join([before.bytes, extent.bytes], held[extent.policy.index()]) {
                    if let Some(copy) = extent.copy {
                        before.copy.get_or_insert_default().append(copy, before.bytes);
                    }
                    before.bytes += extent.bytes;
                    continue;
                }
            }
            joined.insert(at, extent);
        }
        self.extents = joined;
    }

    /// Returns the live runs of a page by offset. Merges near runs.
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

    /// Returns the host run of an address and the offset in the run. A merged place has one run for
    /// each original place.
    pub(super) fn backup_at(&self, at: u64) -> Option<(&Run, u64)> {
        let (start, extent) = self.extents.range(..=at).next_back()?;
        extent.copy.as_ref()?.run_at(at - start)
    }

    pub(super) fn written(&mut self, pages: &[u64], host: &HostPool) {
        let extents = &mut self.extents;
        let copies = pages.iter().filter_map(|at| extents.get_mut(at)?.copy.take());
        host.give_copies(copies, &self.contents);
    }

    /// Reclaims freed blocks whose streams are done, and releases pages without blocks. No-op while
    /// pages move.
    pub(super) fn settle(&mut self, pool: &PagePool, host: &HostPool) {
        if !matches!(self.phase, Phase::Resident | Phase::Paused) {
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
            host.give_copies(extent.copy, &self.contents);
        }
        self.leave_empty_ranges(&mut pending);
        pool.unmap_after(self.contents.clone(), pending);
    }

    /// Frees ranges without places, except the last one.
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

    /// Returns all remaining memory and its fence. Called when the region is dropped.
    pub(super) fn leave(&mut self, events: &Arc<Events>, host: &HostPool) -> (Fence, PendingUnmap) {
        let fence = self.users(events);
        let mut pending = PendingUnmap::default();
        self.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        let extents = std::mem::take(&mut self.extents).into_values();
        host.give_copies(extents.filter_map(|extent| extent.copy), &self.contents);
        (fence, pending)
    }

    /// Returns the bytes of blocks and the free bytes.
    pub(super) fn usage(&self) -> (u64, u64) {
        (self.live_bytes, self.packings.iter().map(Stretches::bytes).sum())
    }

    pub(super) fn resident(&self) -> u64 {
        self.extents.values().filter(|extent| extent.page.is_some()).map(|extent| extent.bytes).sum()
    }

    pub(super) fn reserved(&self) -> u64 {
        self.ranges.iter().map(Reservation::bytes).sum()
    }
}

//! New addresses: what has to be mapped for a block, and that it is mapped now.

use super::{Layout, Place, Range, Slot, granules};
use crate::pages::{Class, PageNo};
use crate::space::lane::Lane;
use crate::space::page_table::{Part, TileNo};
use crate::units::BlockBytes;

/// A range starts with this many pages' worth of addresses and doubles up to [`RANGE_PAGES_MAX`].
pub(in crate::space) const RANGE_PAGES_FIRST: u64 = 64;
pub(in crate::space) const RANGE_PAGES_MAX: u64 = 256;

/// What has to be mapped before [`Layout::commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    bytes: BlockBytes,
    lane: Lane,
    /// The tile at which the block will begin.
    first: TileNo,
    /// Where the block will lie, in address order; empty for a slab.
    parts: Vec<Part>,
    /// The range they are mapped in; one more than there are: it has to be reserved first.
    pub(crate) range: usize,
    /// Bytes of that range.
    pub(crate) range_bytes: u64,
    /// Where in the range the first new tile is; the others follow without a gap.
    pub(crate) offset: u64,
    /// The pages of the new tiles, in address order; none if the block goes on where something is mapped.
    pub(crate) pages: Vec<PageNo>,
}

impl Layout {
    /// What has to be mapped for a block that [`place`](Self::place) found no room for.
    pub(crate) fn plan(&self, bytes: BlockBytes, lane: Lane) -> Growth {
        if self.packed(bytes) {
            let page = PageNo { class: Class::Small, index: self.slabs.len() as u32 };
            let (first, range_bytes) = self.next_tiles(Class::Small, lane, 1);
            let offset = first.tile as u64 * self.geometry.small();
            let (range, pages) = (first.range, vec![page]);
            return Growth { bytes, lane, first, parts: Vec::new(), range, range_bytes, offset, pages };
        }
        let mut parts = self.pages.plan(bytes.get(), lane);
        let (first, shown, range_bytes) = match self.shown_end(&parts, lane) {
            Some((first, shown)) => {
                self.begin_at(first, shown, &mut parts);
                (first, shown, self.ranges[first.range].bytes)
            }
            None => {
                let (first, range_bytes) = self.next_tiles(Class::Large, lane, parts.len());
                (first, 0, range_bytes)
            }
        };
        let offset = (first.tile + shown) as u64 * self.geometry.large();
        let new = parts.iter().skip(shown);
        let pages = new.map(|part| PageNo { class: Class::Large, index: part.page }).collect();
        Growth { bytes, lane, first, parts, range: first.range, range_bytes, offset, pages }
    }

    /// The tiles at the end of a range on which a block of these parts can begin, to go on behind them: the first, and how many. They show its head,
    /// if it has one, and free pages behind that. The most there are.
    fn shown_end(&self, parts: &[Part], lane: Lane) -> Option<(TileNo, usize)> {
        let head = parts.first().filter(|part| part.from > 0).map(|head| head.page);
        let free = parts.iter().filter(|part| self.pages.is_idle(part.page)).count();
        let mut best: Option<(TileNo, usize)> = None;
        for (range, found) in
            self.ranges.iter().enumerate().filter(|(_, range)| range.is_for(Class::Large, lane))
        {
            let mut shown = 0;
            for (behind, page) in found.tiles.iter().rev().take(free + 1).enumerate() {
                let tile = found.tiles.len() - behind - 1;
                if head == Some(*page) {
                    shown = behind + 1;
                }
                let usable = self.pages.is_idle(*page) && self.pages.lane(*page) == lane;
                if behind == free || !usable || found.tiles[tile + 1..].contains(page) {
                    break;
                }
                if head.is_none() {
                    shown = behind + 1;
                }
            }
            let room = (found.bytes / self.geometry.large()) as usize - found.tiles.len();
            if shown > best.map_or(0, |(_, most)| most) && shown + room >= parts.len() {
                best = Some((TileNo { range, tile: found.tiles.len() - shown }, shown));
            }
        }
        best
    }

    /// Exchanges the free pages of a plan, so that the block begins on tiles that are there.
    fn begin_at(&self, first: TileNo, shown: usize, parts: &mut [Part]) {
        let there = &self.ranges[first.range].tiles[first.tile..first.tile + shown];
        let planned: Vec<u32> = parts.iter().map(|part| part.page).collect();
        let others = planned.iter().filter(|page| !there.contains(page));
        let mut pages = there.iter().chain(others).filter(|page| self.pages.is_idle(**page));
        for part in parts.iter_mut().filter(|part| self.pages.is_idle(part.page)) {
            part.page = *pages.next().unwrap_or(&part.page);
        }
    }

    /// Where so many tiles of a class can follow what is mapped: the first of them, and the bytes of their range, which may be a
    /// new one.
    fn next_tiles(&self, class: Class, lane: Lane, tiles: usize) -> (TileNo, u64) {
        let page = self.page_bytes(class);
        let length = tiles as u64 * page;
        let mut fitting = self.ranges.iter().enumerate().filter(|(_, range)| range.is_for(class, lane));
        let filled = |range: &Range| range.tiles.len() as u64 * page;
        match fitting.clone().find(|(_, range)| range.bytes - filled(range) >= length) {
            Some((number, range)) => (TileNo { range: number, tile: range.tiles.len() }, range.bytes),
            None => {
                let last = fitting.next_back().map_or(page * RANGE_PAGES_FIRST / 2, |(_, range)| range.bytes);
                let bytes = (last * 2).min(page * RANGE_PAGES_MAX).max(length);
                (TileNo { range: self.ranges.len(), tile: 0 }, bytes)
            }
        }
    }

    /// Places the block on the pages of its plan, which are mapped now. Nothing may have changed since the plan.
    pub(crate) fn commit(&mut self, growth: &Growth) -> Place {
        let Growth { bytes, lane, first, parts, range, range_bytes, offset, pages } = growth;
        let class = if parts.is_empty() { Class::Small } else { Class::Large };
        if *range == self.ranges.len() {
            let (bytes, remote) = (*range_bytes, lane.remote);
            self.ranges.push(Range { class, remote, bytes, tiles: Vec::new(), used: Vec::new() });
        }
        let units = self.page_bytes(class) / self.geometry.small();
        let filled = self.ranges[*range].tiles.len() as u64 * self.page_bytes(class);
        debug_assert_eq!(filled, *offset, "the plan is stale");
        for no in pages {
            let found = &mut self.ranges[*range];
            let tile = TileNo { range: *range, tile: found.tiles.len() };
            found.tiles.push(no.index);
            found.used.resize((found.tiles.len() as u64 * units).div_ceil(64) as usize, 0);
            if class == Class::Large {
                self.pages.show(no.index, tile, *lane);
            }
        }
        if class == Class::Small {
            self.slab_tiles.push(*first);
            self.slabs.add(*lane);
            let slot = self.slabs.allocate(granules(*bytes), *lane, self.usage.allocations + 1);
            // An empty slab has room for any packed block; it is the only one that has, or there would be no plan.
            debug_assert_eq!(slot, Some(Slot { slab: self.slabs.len() - 1, granule: 0 }));
            let slot = slot.unwrap_or(Slot { slab: self.slabs.len() - 1, granule: 0 });
            return self.settle_in_slab(slot, *bytes);
        }
        let window = self.windows.add(*first, parts.len(), parts[0].from, bytes.get());
        self.settle(window, *bytes)
    }
}

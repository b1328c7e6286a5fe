use super::{Layout, Place, Range, Slot, granules};
use crate::pages::{Class, PageNo};
use crate::space::lane::Lane;
use crate::space::page_table::{PageSlot, Part};
use crate::units::BlockBytes;

/// Pages of the first range; sizes double up to [`RANGE_PAGES_MAX`].
pub(in crate::space) const RANGE_PAGES_FIRST: u64 = 64;
pub(in crate::space) const RANGE_PAGES_MAX: u64 = 256;

/// Mappings required before [`Layout::commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    bytes: BlockBytes,
    lane: Lane,
    first: PageSlot,
    /// In address order; empty for a slab.
    parts: Vec<Part>,
    /// The number of ranges: reserve a new range first.
    pub(crate) range: usize,
    pub(crate) range_bytes: u64,
    /// First new slot in the range; further slots follow without gap.
    pub(crate) offset: u64,
    /// Pages of the new slots; empty if mapped slots suffice.
    pub(crate) pages: Vec<PageNo>,
}

impl Layout {
    /// Plans mappings for a block for which [`place`](Self::place) found no room.
    pub(crate) fn plan(&self, bytes: BlockBytes, lane: Lane) -> Growth {
        if self.packed(bytes) {
            let page = PageNo { class: Class::Small, index: self.slabs.len() as u32 };
            let (first, range_bytes) = self.next_slots(Class::Small, lane, 1);
            let offset = first.index as u64 * self.geometry.small();
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
                let (first, range_bytes) = self.next_slots(Class::Large, lane, parts.len());
                (first, 0, range_bytes)
            }
        };
        let offset = (first.index + shown) as u64 * self.geometry.large();
        let new = parts.iter().skip(shown);
        let pages = new.map(|part| PageNo { class: Class::Large, index: part.page }).collect();
        Growth { bytes, lane, first, parts, range: first.range, range_bytes, offset, pages }
    }

    /// Returns the longest run of slots at the end of a range with which these parts can begin: the
    /// block's head, if any, and free pages.
    fn shown_end(&self, parts: &[Part], lane: Lane) -> Option<(PageSlot, usize)> {
        let head = parts.first().filter(|part| part.from > 0).map(|head| head.page);
        let free = parts.iter().filter(|part| self.pages.is_idle(part.page)).count();
        let mut best: Option<(PageSlot, usize)> = None;
        for (range, found) in
            self.ranges.iter().enumerate().filter(|(_, range)| range.is_for(Class::Large, lane))
        {
            let mut shown = 0;
            for (behind, page) in found.page_slots.iter().rev().take(free + 1).enumerate() {
                let page_slot = found.page_slots.len() - behind - 1;
                if head == Some(*page) {
                    shown = behind + 1;
                }
                let usable = self.pages.is_idle(*page) && self.pages.lane(*page) == lane;
                if behind == free || !usable || found.page_slots[page_slot + 1..].contains(page) {
                    break;
                }
                if head.is_none() {
                    shown = behind + 1;
                }
            }
            let room = (found.bytes / self.geometry.large()) as usize - found.page_slots.len();
            if shown > best.map_or(0, |(_, most)| most) && shown + room >= parts.len() {
                best = Some((PageSlot { range, index: found.page_slots.len() - shown }, shown));
            }
        }
        best
    }

    fn begin_at(&self, first: PageSlot, shown: usize, parts: &mut [Part]) {
        let there = &self.ranges[first.range].page_slots[first.index..first.index + shown];
        let planned: Vec<u32> = parts.iter().map(|part| part.page).collect();
        let others = planned.iter().filter(|page| !there.contains(page));
        let mut pages = there.iter().chain(others).filter(|page| self.pages.is_idle(**page));
        for part in parts.iter_mut().filter(|part| self.pages.is_idle(part.page)) {
            part.page = *pages.next().unwrap_or(&part.page);
        }
    }

    /// Returns the first new slot, and the bytes of its range, which may be new.
    fn next_slots(&self, class: Class, lane: Lane, page_slots: usize) -> (PageSlot, u64) {
        let page = self.page_bytes(class);
        let length = page_slots as u64 * page;
        let mut fitting = self.ranges.iter().enumerate().filter(|(_, range)| range.is_for(class, lane));
        let filled = |range: &Range| range.page_slots.len() as u64 * page;
        match fitting.clone().find(|(_, range)| range.bytes - filled(range) >= length) {
            Some((number, range)) => (PageSlot { range: number, index: range.page_slots.len() }, range.bytes),
            None => {
                let last = fitting.next_back().map_or(page * RANGE_PAGES_FIRST / 2, |(_, range)| range.bytes);
                let bytes = (last * 2).min(page * RANGE_PAGES_MAX).max(length);
                (PageSlot { range: self.ranges.len(), index: 0 }, bytes)
            }
        }
    }

    /// Places the block after its pages are mapped. The layout must be unchanged since the plan.
    pub(crate) fn commit(&mut self, growth: &Growth) -> Place {
        let Growth { bytes, lane, first, parts, range, range_bytes, offset, pages } = growth;
        let class = if parts.is_empty() { Class::Small } else { Class::Large };
        if *range == self.ranges.len() {
            let (bytes, remote) = (*range_bytes, lane.remote);
            self.ranges.push(Range { class, remote, bytes, page_slots: Vec::new(), used: Vec::new() });
        }
        let units = self.page_bytes(class) / self.geometry.small();
        let filled = self.ranges[*range].page_slots.len() as u64 * self.page_bytes(class);
        debug_assert_eq!(filled, *offset, "the plan is stale");
        for no in pages {
            let found = &mut self.ranges[*range];
            let page_slot = PageSlot { range: *range, index: found.page_slots.len() };
            found.page_slots.push(no.index);
            found.used.resize((found.page_slots.len() as u64 * units).div_ceil(64) as usize, 0);
            if class == Class::Large {
                self.pages.show(no.index, page_slot, *lane);
            }
        }
        if class == Class::Small {
            self.slab_slots.push(*first);
            self.slabs.add(*lane);
            let slot = self.slabs.allocate(granules(*bytes), *lane, self.usage.allocations + 1);
            debug_assert_eq!(slot, Some(Slot { slab: self.slabs.len() - 1, granule: 0 }));
            let slot = slot.unwrap_or(Slot { slab: self.slabs.len() - 1, granule: 0 });
            return self.place_in_slab(slot, *bytes);
        }
        let extent = self.extents.add(*first, parts.len(), parts[0].from, bytes.get());
        self.place_in_extent(extent, *bytes)
    }
}

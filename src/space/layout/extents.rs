use std::cell::OnceCell;
use std::collections::BTreeMap;

use super::{Layout, Place};
use crate::pages::Class;
use crate::space::bits::Bits;
use crate::space::lane::Lane;
use crate::space::page_table::{PageSlot, Stay};
use crate::space::recency::Recency;
use crate::units::BlockBytes;

/// Limit of slots visited per search: a longer search costs as much as mapping.
const MOST_PASSED: usize = 4096;

#[derive(Clone, Copy, Debug)]
struct Extent {
    first: PageSlot,
    page_slots: usize,
    /// Offset of the block in the first page, after other blocks there.
    from: u64,
    size: (usize, usize),
}

impl Extent {
    /// Blocks below a large page avoid extents of one page.
    fn is_for(&self, bytes: u64, large: u64) -> bool {
        bytes >= large || self.page_slots > 1
    }
}

#[derive(Debug, Default)]
struct Size {
    extents: Vec<usize>,
    /// Extents without a block of their own; other blocks may lie on the same pages.
    vacant: Bits,
}

#[derive(Debug, Default)]
pub(super) struct Extents {
    all: Vec<Extent>,
    recency: Recency,
    sizes: Vec<Size>,
    by_bytes: BTreeMap<u64, usize>,
}

impl Extents {
    pub(super) fn add(&mut self, first: PageSlot, page_slots: usize, from: u64, bytes: u64) -> usize {
        let number = self.all.len();
        let size = *self.by_bytes.entry(bytes).or_insert(self.sizes.len());
        if size == self.sizes.len() {
            self.sizes.push(Size::default());
        }
        let of_size = &mut self.sizes[size];
        let place = of_size.extents.len();
        of_size.extents.push(number);
        of_size.vacant.set(place, true);
        self.all.push(Extent { first, page_slots, from, size: (size, place) });
        self.recency.add();
        number
    }

    pub(super) fn set_vacant(&mut self, number: u32, vacant: bool) {
        let (size, place) = self.all[number as usize].size;
        self.sizes[size].vacant.set(place, vacant);
    }

    fn vacant(&self, bytes: u64) -> impl Iterator<Item = usize> {
        let size = self.by_bytes.get(&bytes).map(|size| &self.sizes[*size]);
        size.into_iter().flat_map(|size| size.vacant.iter().map(|place| size.extents[place]))
    }
}

/// A block without an extent of its size. It may take as many pages without blocks as stitching
/// would cost; blocks below two pages have no limit.
struct Guest {
    bytes: u64,
    lane: Lane,
    most_idle: OnceCell<u64>,
}

impl Layout {
    /// Finds an extent: first the oldest free one of the size, because identical layers settle in
    /// an order independent of use; then the first gap in the most recently used extent with one;
    /// then the first run of free slots. Gaps and runs become extents.
    pub(super) fn find(&mut self, bytes: u64, lane: Lane) -> Option<usize> {
        let large = self.geometry.large();
        let own = self.extents.vacant(bytes).find(|number| {
            let extent = self.extents.all[*number];
            extent.is_for(bytes, large) && self.covers(extent.first, extent.from, bytes, lane).is_some()
        });
        if own.is_some() || self.pages.free() < bytes {
            return own;
        }
        let guest = Guest { bytes, lane, most_idle: OnceCell::new() };
        let (first, from) = match self.gap(&guest) {
            Some((number, first, from)) => {
                let extent = self.extents.all[number];
                if (extent.first, extent.from) == (first, from) {
                    return Some(number);
                }
                (first, from)
            }
            None => self.run(&guest)?,
        };
        let page_slots = (from + bytes).div_ceil(large) as usize;
        Some(self.extents.add(first, page_slots, from, bytes))
    }

    /// Returns how many pages without blocks a block would take; `None` if any byte is covered.
    fn covers(&self, first: PageSlot, from: u64, bytes: u64, lane: Lane) -> Option<u64> {
        self.pages.covers(&self.ranges[first.range].page_slots[first.index..], from, bytes, lane)
    }

    fn admits(&self, guest: &Guest, first: PageSlot, from: u64) -> bool {
        let Guest { bytes, lane, most_idle } = guest;
        let Some(idle) = self.covers(first, from, *bytes, *lane) else { return false };
        *bytes < 2 * self.geometry.large()
            || idle <= *most_idle.get_or_init(|| self.pages.planned_free(*bytes, *lane))
    }

    /// Blocks of whole pages begin only at 0.
    fn may_begin(&self, bytes: u64, at: u64) -> bool {
        at == 0 || !bytes.is_multiple_of(self.geometry.large())
    }

    /// First gap in the most recently used extent with one.
    fn gap(&self, guest: &Guest) -> Option<(usize, PageSlot, u64)> {
        let (mut next, mut passed) = (self.extents.recency.newest(), 0);
        while let Some(number) = next.filter(|_| passed < MOST_PASSED) {
            next = self.extents.recency.older(number);
            let extent = self.extents.all[number];
            passed += extent.page_slots;
            if extent.is_for(guest.bytes, self.geometry.large())
                && let Some((page_slot, at)) = self.gap_in(extent, guest.bytes, guest.lane)
                && ((extent.first, extent.from) == (page_slot, at) || self.admits(guest, page_slot, at))
            {
                return Some((number, page_slot, at));
            }
        }
        None
    }

    fn gap_in(&self, extent: Extent, bytes: u64, lane: Lane) -> Option<(PageSlot, u64)> {
        let Extent { first, page_slots, from, .. } = extent;
        let large = self.geometry.large();
        let (mut begin, mut length) = ((first, from), 0);
        for number in 0..page_slots {
            let page_slot = PageSlot { index: first.index + number, ..first };
            let page = self.page(page_slot);
            if self.pages.lane(page) != lane {
                length = 0;
                continue;
            }
            for (at, to) in self.pages.gaps(page) {
                let at = if number == 0 { at.max(from) } else { at };
                // A gap continues only across the boundary of two slots.
                if at > 0 || length == 0 {
                    (begin, length) = ((page_slot, at), 0);
                }
                if self.may_begin(bytes, begin.1) {
                    length += to.saturating_sub(at);
                }
                if length >= bytes {
                    return Some(begin);
                }
                if to < large || to <= at {
                    length = 0;
                }
            }
        }
        None
    }

    /// First free run in address order.
    fn run(&self, guest: &Guest) -> Option<(PageSlot, u64)> {
        let (ranges, large) = (self.ranges.iter().enumerate(), self.geometry.large());
        let usable = ranges.filter(|(_, range)| range.is_for(Class::Large, guest.lane));
        let page_slots = usable.flat_map(|(range, found)| {
            found
                .page_slots
                .iter()
                .enumerate()
                .map(move |(page_slot, page)| (PageSlot { range, index: page_slot }, *page))
        });
        let begins = page_slots.take(MOST_PASSED).map(|(page_slot, page)| (page_slot, self.pages.end(page)));
        let mut begins = begins.filter(|(_, at)| *at < large && self.may_begin(guest.bytes, *at));
        begins.find(|(page_slot, at)| self.admits(guest, *page_slot, *at))
    }

    pub(super) fn place_in_extent(&mut self, extent: usize, bytes: BlockBytes) -> Place {
        let Extent { first, from, .. } = self.extents.all[extent];
        self.extents.recency.touch(extent);
        let number = extent as u32;
        self.extents.set_vacant(number, false);
        let (large, serial) = (self.geometry.large(), self.count(bytes));
        let (mut page_slot, mut start, mut rest) = (first, from, bytes.get());
        while rest > 0 {
            let end = large.min(start + rest);
            let block = if page_slot == first { bytes.get() } else { 0 };
            self.occupy(
                self.page(page_slot),
                Stay { start, end, page_slot, block, serial, extent: Some(number) },
            );
            rest -= end - start;
            start = 0;
            page_slot.index += 1;
        }
        Place { range: first.range, offset: self.offset(first) + from }
    }

    pub(super) fn place_on_page(&mut self, page: u32, start: u64, bytes: BlockBytes) -> Place {
        let (page_slot, serial) = (self.pages.first_slot(page), self.count(bytes));
        let (end, block) = (start + bytes.get(), bytes.get());
        self.occupy(page, Stay { start, end, page_slot, block, serial, extent: None });
        Place { range: page_slot.range, offset: self.offset(page_slot) + start }
    }

    fn occupy(&mut self, page: u32, stay: Stay) {
        // A shift takes a fifth of a division.
        let (log, base) = (self.geometry.small().trailing_zeros(), self.offset(stay.page_slot));
        let (mut unit, end) = ((base + stay.start) >> log, ((base + stay.end - 1) >> log) + 1);
        let used = &mut self.ranges[stay.page_slot.range].used;
        while unit < end {
            let bits = (64 - unit % 64).min(end - unit);
            used[unit as usize / 64] |= (u64::MAX >> (64 - bits)) << (unit % 64);
            unit += bits;
        }
        self.pages.occupy(page, stay);
    }
}

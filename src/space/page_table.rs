//! Page table of a layout: bytes of each large page under live blocks, and its lane.

use std::cell::Cell;
use std::collections::HashMap;

use super::bits::Bits;
use super::lane::Lane;
use crate::units::Geometry;

mod max_tree;
mod plan;

use max_tree::MaxTree;
pub(crate) use plan::Part;

/// A slot: page-sized addresses in a range, where one page is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct PageSlot {
    pub(crate) range: usize,
    pub(crate) index: usize,
}

/// Part of a page covered by a live block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) page_slot: PageSlot,
    /// Bytes of the whole block; 0 in pages after its first.
    pub(crate) block: u64,
    pub(crate) serial: u64,
    pub(crate) extent: Option<u32>,
}

#[derive(Debug)]
struct Page {
    /// Sorted, without overlaps.
    stays: Vec<Stay>,
    lane: Lane,
    first_slot: PageSlot,
    shows: u32,
    /// High-water mark of the blocks, rounded up to small pages.
    high_water: u64,
    fits: Fit,
    stale: bool,
    /// Last search to visit the page: detects a page twice in one run.
    visit: Cell<u64>,
}

/// Longest block which fits below the high-water mark, and at the end of the page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fit {
    within: u64,
    at_end: u64,
}

#[derive(Debug, Default)]
struct Fits {
    within: MaxTree,
    at_end: MaxTree,
}

#[derive(Debug)]
pub(crate) struct PageTable {
    geometry: Geometry,
    pages: Vec<Page>,
    idle: Bits,
    free: u64,
    fits: HashMap<Lane, Fits>,
    /// Updated at the next search, so blocks in extents cost nothing.
    stale: Vec<u32>,
    visits: Cell<u64>,
}

impl PageTable {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            pages: Vec::new(),
            idle: Bits::default(),
            free: 0,
            fits: HashMap::new(),
            stale: Vec::new(),
            visits: Cell::default(),
        }
    }

    fn bytes(&self) -> u64 {
        self.geometry.large()
    }

    pub(crate) fn used(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Idle pages, lowest number first.
    fn idle(&self, lane: Lane) -> impl Iterator<Item = u32> {
        let numbers = self.idle.iter().map(|number| number as u32);
        numbers.filter(move |number| self.pages[*number as usize].lane == lane)
    }

    /// Returns the lowest page without blocks; with `reached`, one with a high-water mark of at
    /// least `bytes`.
    pub(crate) fn idle_page(&self, bytes: u64, lane: Lane, reached: bool) -> Option<u32> {
        self.idle(lane).find(|number| !reached || self.pages[*number as usize].high_water >= bytes)
    }

    /// Returns the lowest page of the lane with room, and the place: at the page's end if `at_end`,
    /// else in memory used before. In a gap at the page's beginning, the block lies at the gap's
    /// end, so the beginning stays free for a tail.
    pub(crate) fn room(&mut self, bytes: u64, lane: Lane, at_end: bool) -> Option<(u32, u64)> {
        self.refresh();
        let fits = self.fits.get(&lane)?;
        let number = if at_end { fits.at_end.first(bytes) } else { fits.within.first(bytes) }? as u32;
        let page = &self.pages[number as usize];
        if at_end {
            return Some((number, self.end(number)));
        }
        let (from, to) = page.gaps(page.high_water).find(|(from, to)| to.saturating_sub(*from) >= bytes)?;
        let in_front = from == 0 && !page.stays.is_empty();
        Some((number, if in_front { to - bytes } else { from }))
    }

    /// Gaps up to the page's end, perhaps empty ones.
    pub(crate) fn gaps(&self, number: u32) -> impl Iterator<Item = (u64, u64)> {
        self.pages[number as usize].gaps(self.bytes())
    }

    pub(crate) fn end(&self, number: u32) -> u64 {
        self.pages[number as usize].stays.last().map_or(0, |stay| stay.end)
    }

    /// Whether the lane may place a block over these slots, from byte `from` of the first: all
    /// bytes free, all pages different. Returns how many pages hold no block.
    pub(crate) fn covers(&self, page_slots: &[u32], from: u64, bytes: u64, lane: Lane) -> Option<u64> {
        let (whole, visit) = (self.bytes(), self.visits.get() + 1);
        self.visits.set(visit);
        let (mut from, mut rest, mut idle) = (from, bytes, 0);
        for number in page_slots {
            let (page, to) = (&self.pages[*number as usize], whole.min(from + rest));
            if page.lane != lane || page.visit.get() == visit || !page.is_free(from, to) {
                return None;
            }
            page.visit.set(visit);
            idle += u64::from(page.stays.is_empty());
            rest -= to - from;
            if rest == 0 {
                return Some(idle);
            }
            from = 0;
        }
        None
    }

    /// Adds a slot of the page. A new page must have the next number.
    pub(crate) fn show(&mut self, number: u32, page_slot: PageSlot, lane: Lane) {
        if number as usize == self.pages.len() {
            let (stays, fits) = (Vec::new(), Fit::default());
            self.pages.push(Page {
                stays,
                lane,
                first_slot: page_slot,
                shows: 0,
                high_water: 0,
                fits,
                stale: false,
                visit: Cell::default(),
            });
            self.idle.set(number as usize, true);
            self.free += self.bytes();
        }
        self.pages[number as usize].shows += 1;
    }

    pub(crate) fn is_idle(&self, number: u32) -> bool {
        self.pages.get(number as usize).is_none_or(|page| page.stays.is_empty())
    }

    pub(crate) fn first_slot(&self, number: u32) -> PageSlot {
        self.pages[number as usize].first_slot
    }

    pub(crate) fn lane(&self, number: u32) -> Lane {
        self.pages[number as usize].lane
    }

    pub(crate) fn occupy(&mut self, number: u32, stay: Stay) {
        let small = self.geometry.small();
        let page = &mut self.pages[number as usize];
        let at = page.stays.partition_point(|other| other.start < stay.start);
        debug_assert!(page.is_free(stay.start, stay.end), "page {number} is not free there");
        if page.high_water < stay.end {
            page.high_water = stay.end.next_multiple_of(small);
        }
        page.stays.insert(at, stay);
        if page.stays.len() == 1 {
            self.idle.set(number as usize, false);
        }
        self.free -= stay.end - stay.start;
        self.outdate(number);
    }

    pub(crate) fn stay(&self, number: u32, start: u64, page_slot: PageSlot) -> Option<&Stay> {
        let stays = &self.pages[number as usize].stays;
        let found = stays.binary_search_by_key(&start, |stay| stay.start).ok()?;
        Some(&stays[found]).filter(|stay| stay.page_slot == page_slot)
    }

    pub(crate) fn stays(&self, number: u32, page_slot: PageSlot) -> impl Iterator<Item = Stay> {
        self.pages[number as usize].stays.iter().copied().filter(move |stay| stay.page_slot == page_slot)
    }

    /// Uncovers a part. The page stays in its lane until the seal.
    pub(crate) fn release(&mut self, number: u32, start: u64) -> Option<Stay> {
        let page = &mut self.pages[number as usize];
        let found = page.stays.binary_search_by_key(&start, |stay| stay.start).ok()?;
        let stay = page.stays.remove(found);
        self.free += stay.end - stay.start;
        if page.stays.is_empty() {
            self.idle.set(number as usize, true);
        }
        self.outdate(number);
        Some(stay)
    }

    /// Takes a page without blocks out of use; false if it has one.
    pub(crate) fn exclude_page(&mut self, number: u32) -> bool {
        let whole = self.bytes();
        let Some(page) = self.pages.get_mut(number as usize).filter(|page| page.stays.is_empty()) else {
            return false;
        };
        let (page_slot, extent) = (page.first_slot, None);
        page.stays.push(Stay { start: 0, end: whole, page_slot, block: 0, serial: 0, extent });
        self.idle.set(number as usize, false);
        self.free -= whole;
        self.outdate(number);
        true
    }

    fn outdate(&mut self, number: u32) {
        let page = &mut self.pages[number as usize];
        if !page.stale {
            page.stale = true;
            self.stale.push(number);
        }
    }

    fn refresh(&mut self) {
        let bytes = self.bytes();
        for number in self.stale.drain(..) {
            let page = &mut self.pages[number as usize];
            let fits = page.fit(bytes);
            page.stale = false;
            if fits != page.fits {
                page.fits = fits;
                let of_lane = self.fits.entry(page.lane).or_default();
                of_lane.within.set(number as usize, fits.within);
                of_lane.at_end.set(number as usize, fits.at_end);
            }
        }
    }
}

impl Page {
    /// Gaps between blocks. The last ends at `end`, and may be empty or inverted.
    fn gaps(&self, end: u64) -> impl Iterator<Item = (u64, u64)> {
        let begins = std::iter::once(0).chain(self.stays.iter().map(|stay| stay.end));
        begins.zip(self.stays.iter().map(|stay| stay.start).chain([end]))
    }

    fn is_free(&self, from: u64, to: u64) -> bool {
        let behind = self.stays.partition_point(|stay| stay.end <= from);
        self.stays.get(behind).is_none_or(|stay| stay.start >= to)
    }

    fn fit(&self, bytes: u64) -> Fit {
        match &self.stays[..] {
            [] => Fit::default(),
            [only] if only.end - only.start == bytes => Fit::default(),
            [.., last] => Fit {
                within: self
                    .gaps(self.high_water)
                    .map(|(from, to)| to.saturating_sub(from))
                    .max()
                    .unwrap_or(0),
                at_end: bytes - last.end,
            },
        }
    }
}

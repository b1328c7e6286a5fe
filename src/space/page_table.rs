//! Which bytes of which large page live blocks cover, and for which lane.

use std::cell::Cell;
use std::collections::HashMap;

use super::bits::Bits;
use super::lane::Lane;
use crate::units::Geometry;

mod max_tree;
mod plan;

use max_tree::MaxTree;
pub(crate) use plan::Part;

/// Where a page shows: a range and a tile in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct TileNo {
    pub(crate) range: usize,
    pub(crate) tile: usize,
}

/// A part of a page that a live block covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stay {
    /// First byte within the page.
    pub(crate) start: u64,
    /// The byte behind the last.
    pub(crate) end: u64,
    /// The tile at whose addresses the block lies.
    pub(crate) tile: TileNo,
    /// Bytes of the whole block; 0 in the pages behind its first.
    pub(crate) block: u64,
    /// The block's number.
    pub(crate) serial: u64,
    /// The window that it lies in, if it is one's.
    pub(crate) window: Option<u32>,
}

#[derive(Debug)]
struct Page {
    /// Sorted; they never overlap.
    stays: Vec<Stay>,
    /// The lane whose blocks the page holds until the seal.
    lane: Lane,
    /// The first tile that showed the page.
    home: TileNo,
    /// How many tiles show it.
    shows: u32,
    /// How far blocks ever reached into the page, in whole small pages: behind it no memory was used yet.
    reach: u64,
    /// What [`Fits`] says of the page, unless that is stale.
    fits: Fit,
    /// Whether blocks came or went since.
    stale: bool,
    /// The last search that passed here, to notice a page that shows twice.
    visit: Cell<u64>,
}

/// The longest block that fits a page that holds blocks already: before its reach, and at its end whatever the reach.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fit {
    within: u64,
    at_end: u64,
}

/// The same for every page of a lane, to be searched.
#[derive(Debug, Default)]
struct Fits {
    within: MaxTree,
    at_end: MaxTree,
}

/// Every large page number a space has used so far.
#[derive(Debug)]
pub(crate) struct PageTable {
    geometry: Geometry,
    pages: Vec<Page>,
    /// Pages that hold no block.
    idle: Bits,
    /// Bytes of all pages that no block covers.
    free: u64,
    fits: HashMap<Lane, Fits>,
    /// Pages that are stale there. Brought up to date by a search, so that blocks that come and go in windows do not pay for it.
    stale: Vec<u32>,
    visits: Cell<u64>,
}

impl PageTable {
    /// No pages yet.
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

    /// Bytes of a page.
    fn bytes(&self) -> u64 {
        self.geometry.large()
    }

    /// How many numbers have been used.
    pub(crate) fn used(&self) -> usize {
        self.pages.len()
    }

    /// Bytes that no block covers, on pages of any lane.
    pub(crate) fn free(&self) -> u64 {
        self.free
    }

    /// Pages that were used before, hold no block, and may hold the lane's; lowest number first.
    fn idle(&self, lane: Lane) -> impl Iterator<Item = u32> {
        let numbers = self.idle.iter().map(|number| number as u32);
        numbers.filter(move |number| self.pages[*number as usize].lane == lane)
    }

    /// The lowest page that was used before and holds no block; as far as `reached`, if that is asked for.
    pub(crate) fn idle_page(&self, bytes: u64, lane: Lane, reached: bool) -> Option<u32> {
        self.idle(lane).find(|number| !reached || self.pages[*number as usize].reach >= bytes)
    }

    /// The lowest page that holds blocks of the lane already and has room for one more, and where in it: in front of what
    /// begins the page not, so that its beginning stays free for a tail. Only where memory was used before, or at the page's end.
    pub(crate) fn room(&mut self, bytes: u64, lane: Lane, at_end: bool) -> Option<(u32, u64)> {
        self.refresh();
        let fits = self.fits.get(&lane)?;
        let number = if at_end { fits.at_end.first(bytes) } else { fits.within.first(bytes) }? as u32;
        let page = &self.pages[number as usize];
        if at_end {
            return Some((number, self.end(number)));
        }
        let (from, to) = page.gaps(page.reach).find(|(from, to)| to.saturating_sub(*from) >= bytes)?;
        let in_front = from == 0 && !page.stays.is_empty();
        Some((number, if in_front { to - bytes } else { from }))
    }

    /// The gaps between the blocks of a page, the last one up to its end; any may be empty.
    pub(crate) fn gaps(&self, number: u32) -> impl Iterator<Item = (u64, u64)> {
        self.pages[number as usize].gaps(self.bytes())
    }

    /// The byte behind the last block of a page.
    pub(crate) fn end(&self, number: u32) -> u64 {
        self.pages[number as usize].stays.last().map_or(0, |stay| stay.end)
    }

    /// Whether the lane may put a block over tiles of these pages, from a byte of the first one on: all must be free, and different ones. Then how
    /// many of them hold no block.
    pub(crate) fn covers(&self, tiles: &[u32], from: u64, bytes: u64, lane: Lane) -> Option<u64> {
        let (whole, visit) = (self.bytes(), self.visits.get() + 1);
        self.visits.set(visit);
        let (mut from, mut rest, mut idle) = (from, bytes, 0);
        for number in tiles {
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

    /// Notes that a tile shows the page, for the lane. Numbers come in order: the next unused one at most.
    pub(crate) fn show(&mut self, number: u32, tile: TileNo, lane: Lane) {
        if number as usize == self.pages.len() {
            let (stays, fits) = (Vec::new(), Fit::default());
            self.pages.push(Page {
                stays,
                lane,
                home: tile,
                shows: 0,
                reach: 0,
                fits,
                stale: false,
                visit: Cell::default(),
            });
            self.idle.set(number as usize, true);
            self.free += self.bytes();
        }
        self.pages[number as usize].shows += 1;
    }

    /// Whether the page holds no block.
    pub(crate) fn is_idle(&self, number: u32) -> bool {
        self.pages.get(number as usize).is_none_or(|page| page.stays.is_empty())
    }

    /// The first tile that showed the page.
    pub(crate) fn home(&self, number: u32) -> TileNo {
        self.pages[number as usize].home
    }

    /// The lane whose blocks the page holds.
    pub(crate) fn lane(&self, number: u32) -> Lane {
        self.pages[number as usize].lane
    }

    /// A block covers a part of the page now, which was free.
    pub(crate) fn occupy(&mut self, number: u32, stay: Stay) {
        let small = self.geometry.small();
        let page = &mut self.pages[number as usize];
        let at = page.stays.partition_point(|other| other.start < stay.start);
        debug_assert!(page.is_free(stay.start, stay.end), "page {number} is not free there");
        if page.reach < stay.end {
            page.reach = stay.end.next_multiple_of(small);
        }
        page.stays.insert(at, stay);
        if page.stays.len() == 1 {
            self.idle.set(number as usize, false);
        }
        self.free -= stay.end - stay.start;
        self.outdate(number);
    }

    /// The part of the page that begins at a byte and is covered at this tile.
    pub(crate) fn stay(&self, number: u32, start: u64, tile: TileNo) -> Option<&Stay> {
        let stays = &self.pages[number as usize].stays;
        let found = stays.binary_search_by_key(&start, |stay| stay.start).ok()?;
        Some(&stays[found]).filter(|stay| stay.tile == tile)
    }

    /// The parts of the page that blocks at this tile cover.
    pub(crate) fn stays(&self, number: u32, tile: TileNo) -> impl Iterator<Item = Stay> {
        self.pages[number as usize].stays.iter().copied().filter(move |stay| stay.tile == tile)
    }

    /// What begins at a byte of the page is gone from it, and returned. The page stays its lane's until the seal.
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

    /// Takes a page that holds no block out of use; whether it is now. What was placed on it before says nothing about memory that was
    /// used: its reach stays.
    pub(crate) fn set_aside(&mut self, number: u32) -> bool {
        let whole = self.bytes();
        let Some(page) = self.pages.get_mut(number as usize).filter(|page| page.stays.is_empty()) else {
            return false;
        };
        let (tile, window) = (page.home, None);
        page.stays.push(Stay { start: 0, end: whole, tile, block: 0, serial: 0, window });
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

    /// Brings what is searched up to date with the pages.
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
    /// The gaps between blocks, the last one up to `end`; that one may be empty, or its end before its beginning.
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
                within: self.gaps(self.reach).map(|(from, to)| to.saturating_sub(from)).max().unwrap_or(0),
                at_end: bytes - last.end,
            },
        }
    }
}

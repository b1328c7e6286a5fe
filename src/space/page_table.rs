//! Which bytes of which large page live blocks cover, and for which lane.

use std::collections::HashMap;

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
    visit: u64,
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
    /// One bit for each page that holds no block.
    idle: Vec<u64>,
    fits: HashMap<Lane, Fits>,
    /// Pages that are stale there. Brought up to date by a search, so that blocks that come and go in windows do not pay for it.
    stale: Vec<u32>,
    visits: u64,
}

impl PageTable {
    /// No pages yet.
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            pages: Vec::new(),
            idle: Vec::new(),
            fits: HashMap::new(),
            stale: Vec::new(),
            visits: 0,
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

    /// Pages that were used before, hold no block, and may hold the lane's; lowest number first.
    fn idle(&self, lane: Lane) -> impl Iterator<Item = u32> {
        let words = self.idle.iter().enumerate().filter(|(_, word)| **word != 0);
        let numbers = words.flat_map(|(index, word)| {
            let rests = std::iter::successors(Some(*word), |rest| Some(rest & rest.wrapping_sub(1)));
            rests.take_while(|rest| *rest != 0).map(move |rest| index as u32 * 64 + rest.trailing_zeros())
        });
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

    /// Whether the lane may put a block over tiles of these pages, from a byte of the first one on: all must be free, and different ones.
    pub(crate) fn is_free(&mut self, tiles: &[u32], from: u64, bytes: u64, lane: Lane) -> bool {
        let whole = self.bytes();
        self.visits += 1;
        let (mut from, mut rest) = (from, bytes);
        for number in tiles {
            let (page, to) = (&mut self.pages[*number as usize], whole.min(from + rest));
            if page.lane != lane || page.visit == self.visits || !page.is_free(from, to) {
                return false;
            }
            page.visit = self.visits;
            rest -= to - from;
            if rest == 0 {
                return true;
            }
            from = 0;
        }
        false
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
                visit: 0,
            });
            self.mark_idle(number, true);
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
            self.mark_idle(number, false);
        }
        self.outdate(number);
    }

    /// The part of the page that begins at a byte and is covered at this tile.
    pub(crate) fn stay(&self, number: u32, start: u64, tile: TileNo) -> Option<Stay> {
        let stays = &self.pages[number as usize].stays;
        let found = stays.binary_search_by_key(&start, |stay| stay.start).ok()?;
        Some(stays[found]).filter(|stay| stay.tile == tile)
    }

    /// The parts of the page that blocks at this tile cover.
    pub(crate) fn stays(&self, number: u32, tile: TileNo) -> impl Iterator<Item = Stay> {
        self.pages[number as usize].stays.iter().copied().filter(move |stay| stay.tile == tile)
    }

    /// The block that begins at a byte of the page is gone from it. The page stays its lane's until the seal.
    pub(crate) fn release(&mut self, number: u32, start: u64) {
        let page = &mut self.pages[number as usize];
        if let Ok(found) = page.stays.binary_search_by_key(&start, |stay| stay.start) {
            page.stays.remove(found);
        }
        if page.stays.is_empty() {
            self.mark_idle(number, true);
        }
        self.outdate(number);
    }

    /// Takes a page that holds no block out of use; whether it is now. What was placed on it before says nothing about memory that was
    /// used: its reach stays.
    pub(crate) fn set_aside(&mut self, number: u32) -> bool {
        let whole = self.bytes();
        let Some(page) = self.pages.get_mut(number as usize).filter(|page| page.stays.is_empty()) else {
            return false;
        };
        page.stays.push(Stay { start: 0, end: whole, tile: page.home, block: 0, serial: 0 });
        self.mark_idle(number, false);
        self.outdate(number);
        true
    }

    fn mark_idle(&mut self, number: u32, idle: bool) {
        let (word, bit) = (number as usize / 64, 1 << (number % 64));
        if self.idle.len() <= word {
            self.idle.resize(word + 1, 0);
        }
        self.idle[word] = if idle { self.idle[word] | bit } else { self.idle[word] & !bit };
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

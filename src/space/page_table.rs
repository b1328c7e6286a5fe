//! Which bytes of which large page live blocks cover, and for which stream.

use crate::units::Stream;

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
    /// The stream whose blocks the page holds until the seal. Another stream's work is not ordered with theirs.
    stream: Option<Stream>,
    /// The first tile that showed the page.
    home: TileNo,
    /// The last search that passed here, to notice a page that shows twice.
    visit: u64,
}

/// Every large page number a space has used so far.
#[derive(Debug)]
pub(crate) struct PageTable {
    bytes: u64,
    pages: Vec<Page>,
    visits: u64,
}

impl PageTable {
    /// No pages yet, each of which will have `bytes`.
    pub(crate) fn new(bytes: u64) -> Self {
        Self { bytes, pages: Vec::new(), visits: 0 }
    }

    /// How many numbers have been used.
    pub(crate) fn used(&self) -> usize {
        self.pages.len()
    }

    /// Wholly free pages that the stream may use, lowest number first, without end: numbers nobody used yet come last.
    pub(crate) fn free(&self, stream: Stream) -> impl Iterator<Item = u32> {
        let known = self.pages.iter().enumerate().filter(move |(_, page)| page.free_for(stream));
        known.map(|(number, _)| number as u32).chain(self.pages.len() as u32..)
    }

    /// The lowest wholly free page among those used before.
    pub(crate) fn known_free(&self, stream: Stream) -> Option<u32> {
        self.free(stream).next().filter(|number| (*number as usize) < self.pages.len())
    }

    /// The shortest gap of at least `bytes` in a page that holds a block of the stream already: the page, and the gap's end.
    pub(crate) fn gap(&self, bytes: u64, stream: Stream) -> Option<(u32, u64)> {
        let mut best: Option<(u64, u32, u64)> = None;
        for (number, page) in self.shared_with(stream) {
            let mut from = 0;
            for to in page.stays.iter().map(|stay| (stay.start, stay.end)).chain([(self.bytes, 0)]) {
                let length = to.0 - from;
                if length >= bytes && best.is_none_or(|(shortest, ..)| length < shortest) {
                    best = Some((length, number, to.0));
                }
                from = to.1;
            }
        }
        best.map(|(_, number, end)| (number, end))
    }

    /// The page with the shortest free beginning of at least `bytes` among those that hold a block of the stream already.
    pub(crate) fn beginning(&self, bytes: u64, stream: Stream) -> Option<u32> {
        let beginnings = self.shared_with(stream).map(|(number, page)| (page.stays[0].start, number));
        beginnings.filter(|(length, _)| *length >= bytes).min().map(|(_, number)| number)
    }

    /// Begins a search: every page may be visited once.
    pub(crate) fn start_search(&mut self) {
        self.visits += 1;
    }

    /// Whether the stream may use the first `bytes` of the page, and the search has not passed it yet.
    pub(crate) fn visit(&mut self, number: u32, bytes: u64, stream: Stream) -> bool {
        let page = &mut self.pages[number as usize];
        let beginning = page.stays.first().map_or(self.bytes, |stay| stay.start);
        let usable = page.serves(stream) && beginning >= bytes && page.visit != self.visits;
        page.visit = self.visits;
        usable
    }

    /// Notes that a tile shows the page. Numbers come in order: the next unused one at most.
    pub(crate) fn show(&mut self, number: u32, tile: TileNo) {
        if number as usize == self.pages.len() {
            self.pages.push(Page { stays: Vec::new(), stream: None, home: tile, visit: 0 });
        }
    }

    /// The first tile that showed the page.
    pub(crate) fn home(&self, number: u32) -> TileNo {
        self.pages[number as usize].home
    }

    /// The stream whose blocks the page holds, if any.
    pub(crate) fn stream(&self, number: u32) -> Option<Stream> {
        self.pages[number as usize].stream
    }

    /// A block of the stream covers a part of the page now, which was free.
    pub(crate) fn occupy(&mut self, number: u32, stay: Stay, stream: Stream) {
        let page = &mut self.pages[number as usize];
        let at = page.stays.partition_point(|other| other.start < stay.start);
        debug_assert!(at == 0 || page.stays[at - 1].end <= stay.start, "the part was not free");
        debug_assert!(page.stays.get(at).is_none_or(|next| stay.end <= next.start), "the part was not free");
        page.stays.insert(at, stay);
        page.stream = Some(stream);
    }

    /// The stay that begins at a byte of the page at this tile.
    pub(crate) fn stay(&self, number: u32, start: u64, tile: TileNo) -> Option<Stay> {
        let stays = &self.pages[number as usize].stays;
        let found = stays.binary_search_by_key(&start, |stay| stay.start).ok()?;
        Some(stays[found]).filter(|stay| stay.tile == tile)
    }

    /// The parts of the page that blocks at this tile cover.
    pub(crate) fn stays(&self, number: u32, tile: TileNo) -> impl Iterator<Item = Stay> {
        self.pages[number as usize].stays.iter().copied().filter(move |stay| stay.tile == tile)
    }

    /// The block that begins at a byte of the page is gone from it. The page stays its stream's until the seal.
    pub(crate) fn release(&mut self, number: u32, start: u64) {
        self.pages[number as usize].stays.retain(|stay| stay.start != start);
    }

    /// Pages that hold a block of the stream, with their numbers.
    fn shared_with(&self, stream: Stream) -> impl Iterator<Item = (u32, &Page)> {
        let held = move |(_, page): &(usize, &Page)| !page.stays.is_empty() && page.stream == Some(stream);
        self.pages.iter().enumerate().filter(held).map(|(number, page)| (number as u32, page))
    }
}

impl Page {
    fn serves(&self, stream: Stream) -> bool {
        self.stream.is_none_or(|owner| owner == stream)
    }

    fn free_for(&self, stream: Stream) -> bool {
        self.stays.is_empty() && self.serves(stream)
    }
}

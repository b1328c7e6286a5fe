//! Which addresses a space has, which page is behind each, and who uses them. Plain code over offsets and page numbers.
//!
//! ```text
//!   range     addresses reserved at once, filled from the left
//!             |--------- window 0 ---------|--- window 1 ---|- window 2 -|        (not mapped yet)
//!   tiles     | large 0 | large 1 | small 0| large 0        | small 1    |
//!                                             ^ the same page twice: its blocks never live together
//!   block     starts where a window starts and covers whole tiles; it may run on into the windows behind its own
//!   slab      a window of one small page, in ranges of its own, packed with small blocks
//! ```
//!
//! A page is busy while a live block covers a tile that shows it. A block goes to the most recently used window whose
//! leading tiles are free and waste little, so that a model's identical layers settle on the same addresses. Only when there is
//! none are free pages, lowest number first, stitched together in a new window. Nothing here depends on what other spaces
//! did: the same requests always lead to the same numbers and offsets, and the arena holds, in each class, the most pages
//! that any one space has needed at a time.

use std::collections::HashSet;

use super::page_table::PageTable;
use super::recency::Recency;
use super::slab::{NotABlock, Slab};
use crate::pages::{Class, PageNo};
use crate::units::{BLOCK_GRANULE, BlockBytes, Geometry, Stream};

/// A range starts with this many pages' worth of addresses and doubles up to [`RANGE_PAGES_MAX`].
const RANGE_PAGES_FIRST: u64 = 64;
const RANGE_PAGES_MAX: u64 = 256;

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Index of the range.
    pub(crate) range: usize,
    /// Bytes from the range's base.
    pub(crate) offset: u64,
}

/// Which ranges a window belongs to. Slabs live apart, so that they do not cut the windows' neighbourhood into pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Zone {
    Blocks,
    Slabs,
}

/// Pages to be stitched together behind new addresses, to be mapped before [`Layout::commit`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Growth {
    bytes: BlockBytes,
    stream: Stream,
    zone: Zone,
    /// The range they are mapped in; one more than there are: it has to be reserved first.
    pub(crate) range: usize,
    /// Bytes of that range.
    pub(crate) range_bytes: u64,
    /// Where in the range the first page goes; the others follow without a gap.
    pub(crate) offset: u64,
    /// The pages, in address order.
    pub(crate) pages: Vec<PageNo>,
}

/// Tiles that a freed block no longer covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) range: usize,
    first: usize,
    tiles: usize,
}

/// A tile that retained blocks cover.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RetainedTile {
    pub(crate) range: usize,
    pub(crate) offset: u64,
    pub(crate) page: PageNo,
    /// Bytes from the tile's start that any block, living or freed, has ever covered. The graph writes there on every replay.
    pub(crate) used: u64,
}

/// Why an address cannot be freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotLive {
    /// A block started there once, or (in a slab) may have.
    FreedBefore,
    /// No block of this space starts there.
    Foreign,
}

impl From<NotABlock> for NotLive {
    fn from(why: NotABlock) -> Self {
        match why {
            NotABlock::Inside => Self::Foreign,
            NotABlock::Gap => Self::FreedBefore,
        }
    }
}

/// What a space uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    /// Live blocks.
    pub(crate) blocks: u64,
    /// Their bytes.
    pub(crate) bytes: u64,
    /// The most bytes that were live at once.
    pub(crate) peak_bytes: u64,
}

#[derive(Debug)]
struct Tile {
    offset: u64,
    page: PageNo,
    used: u64,
    /// The window that starts with this tile.
    window: Option<usize>,
}

#[derive(Debug)]
struct Range {
    zone: Zone,
    bytes: u64,
    filled: u64,
    tiles: Vec<Tile>,
    /// For every small page's worth of addresses up to `filled`, the tile over it.
    tile_at: Vec<u32>,
}

#[derive(Debug)]
enum Tenant {
    None,
    Block { bytes: BlockBytes, tiles: usize },
    Slab { slab: Slab, stream: Stream },
}

#[derive(Debug)]
struct Window {
    range: usize,
    first: usize,
    tiles: usize,
    tenant: Tenant,
}

/// The state described above.
#[derive(Debug)]
pub(crate) struct Layout {
    geometry: Geometry,
    pages: PageTable,
    ranges: Vec<Range>,
    windows: Vec<Window>,
    /// The windows of each zone in the order of their use.
    recency: Recency<2>,
    /// Windows that hold a slab now, oldest first.
    slabs: Vec<usize>,
    /// Empty slabs kept for the next one.
    idle_slabs: Vec<Slab>,
    /// Live blocks that a second stream uses.
    crossing: HashSet<Place>,
    /// Such blocks after they were freed: busy until the seal.
    parked: HashSet<Place>,
    /// Whether the capture has ended.
    sealed: bool,
    usage: Usage,
}

impl Layout {
    pub(crate) fn new(geometry: Geometry) -> Self {
        Self {
            geometry,
            pages: PageTable::new(geometry),
            ranges: Vec::new(),
            windows: Vec::new(),
            recency: Recency::new(),
            slabs: Vec::new(),
            idle_slabs: Vec::new(),
            crossing: HashSet::new(),
            parked: HashSet::new(),
            sealed: false,
            usage: Usage::default(),
        }
    }

    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Numbers of small and large pages this space has ever used.
    pub(crate) fn pages(&self) -> (usize, usize) {
        self.pages.used()
    }

    /// Whether a block of this size shares its page with others.
    fn packed(&self, bytes: BlockBytes) -> bool {
        bytes.get() <= self.geometry.small() / 2
    }

    /// Places a block on addresses that are already mapped, if it can.
    pub(crate) fn place(&mut self, bytes: BlockBytes, stream: Stream) -> Option<Place> {
        if !self.packed(bytes) {
            let (window, tiles) = self.find(Zone::Blocks, bytes.get(), stream)?;
            return Some(self.settle(window, tiles, bytes, stream));
        }
        let granules = (bytes.get() / BLOCK_GRANULE) as u32;
        for &window in &self.slabs {
            let Window { range, first, tenant, .. } = &mut self.windows[window];
            if let Tenant::Slab { slab, stream: owner } = tenant
                && *owner == stream
                && let Some(start) = slab.allocate(granules)
            {
                let offset = self.ranges[*range].tiles[*first].offset + u64::from(start) * BLOCK_GRANULE;
                let place = Place { range: *range, offset };
                self.count(bytes);
                return Some(place);
            }
        }
        let (window, _) = self.find(Zone::Slabs, self.geometry.small(), stream)?;
        Some(self.open_slab(window, bytes, stream))
    }

    /// What has to be mapped for a block that [`place`](Self::place) found no room for.
    pub(crate) fn plan(&self, bytes: BlockBytes, stream: Stream) -> Growth {
        let (zone, page, large, small) = if self.packed(bytes) {
            (Zone::Slabs, self.geometry.small(), 0, 1)
        } else {
            let (large, small) = self.split(bytes.get());
            (Zone::Blocks, self.geometry.large(), large, small)
        };
        let mut pages = Vec::with_capacity(large + small);
        pages.extend(self.pages.free(Class::Large, stream).take(large));
        pages.extend(self.pages.free(Class::Small, stream).take(small));
        let length = large as u64 * self.geometry.large() + small as u64 * self.geometry.small();

        let mut fitting = self.ranges.iter().enumerate().filter(|(_, range)| range.zone == zone);
        if let Some((range, found)) = fitting.clone().find(|(_, range)| range.bytes - range.filled >= length)
        {
            return Growth {
                bytes,
                stream,
                zone,
                range,
                range_bytes: found.bytes,
                offset: found.filled,
                pages,
            };
        }
        let last = fitting.next_back().map_or(page * RANGE_PAGES_FIRST / 2, |(_, range)| range.bytes);
        let doubled = (last * 2).min(page * RANGE_PAGES_MAX);
        let range_bytes = doubled.max(length);
        Growth { bytes, stream, zone, range: self.ranges.len(), range_bytes, offset: 0, pages }
    }

    /// Places the block on the pages of its plan, which are mapped now. Nothing may have changed since the plan.
    pub(crate) fn commit(&mut self, growth: &Growth) -> Place {
        let Growth { bytes, stream, zone, range, range_bytes, offset, pages } = growth;
        if *range == self.ranges.len() {
            let (zone, bytes) = (*zone, *range_bytes);
            self.ranges.push(Range { zone, bytes, filled: 0, tiles: Vec::new(), tile_at: Vec::new() });
        }
        debug_assert_eq!(self.ranges[*range].filled, *offset, "the plan is stale");
        let window = self.windows.len();
        let first = self.ranges[*range].tiles.len();
        for page in pages {
            let page_bytes = self.pages.bytes(page.class);
            self.pages.add(*page);
            let range = &mut self.ranges[*range];
            let tile = range.tiles.len() as u32;
            range.tile_at.extend((0..page_bytes / self.geometry.small()).map(|_| tile));
            range.tiles.push(Tile { offset: range.filled, page: *page, used: 0, window: None });
            range.filled += page_bytes;
        }
        self.ranges[*range].tiles[first].window = Some(window);
        let tiles = pages.len();
        self.windows.push(Window { range: *range, first, tiles, tenant: Tenant::None });
        self.recency.add(*zone as usize);
        match zone {
            Zone::Blocks => self.settle(window, tiles, *bytes, *stream),
            Zone::Slabs => self.open_slab(window, *bytes, *stream),
        }
    }

    /// Frees the block at a place. Its pages are free for the next block of its stream, unless another stream uses it too:
    /// then they stay busy until the seal.
    pub(crate) fn free(&mut self, place: Place) -> Result<Freed, NotLive> {
        let (window, granule) = self.locate(place)?;
        let Window { range, first, tenant, .. } = &mut self.windows[window];
        let (range, first) = (*range, *first);
        let nothing = Freed { range, first, tiles: 0 };
        if !self.crossing.is_empty() && self.crossing.contains(&place) {
            self.crossing.remove(&place);
            self.parked.insert(place);
            return Ok(nothing);
        }
        if !self.parked.is_empty() && self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        let (bytes, tiles) = match tenant {
            Tenant::None => return Err(NotLive::FreedBefore),
            Tenant::Block { bytes, tiles } => (bytes.get(), *tiles),
            Tenant::Slab { slab, .. } => {
                let granules = slab.free(granule)?;
                (u64::from(granules) * BLOCK_GRANULE, usize::from(slab.live() == 0))
            }
        };
        self.usage.blocks -= 1;
        self.usage.bytes -= bytes;
        if tiles == 0 {
            return Ok(nothing);
        }
        if let Tenant::Slab { slab, .. } = std::mem::replace(tenant, Tenant::None) {
            self.slabs.retain(|w| *w != window);
            self.idle_slabs.push(slab);
        }
        for tile in first..first + tiles {
            let page = self.ranges[range].tiles[tile].page;
            self.pages.release(page);
        }
        Ok(Freed { range, first, tiles })
    }

    /// Notes that `stream` uses the block too. Without effect if that is its own stream, and after the seal: nothing is placed any
    /// more, and nothing would ever free what was parked then.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<(), NotLive> {
        let (window, granule) = self.locate(place)?;
        let Window { range, first, tenant, .. } = &self.windows[window];
        match tenant {
            Tenant::None => return Err(NotLive::FreedBefore),
            Tenant::Block { .. } => {}
            Tenant::Slab { slab, .. } => drop(slab.block(granule)?),
        }
        if self.parked.contains(&place) {
            return Err(NotLive::FreedBefore);
        }
        let page = self.ranges[*range].tiles[*first].page;
        if !self.sealed && self.pages.stream(page) != Some(stream) {
            self.crossing.insert(place);
        }
        Ok(())
    }

    /// The capture has ended: what was parked is free now, and what is live is retained.
    pub(crate) fn seal(&mut self) {
        self.sealed = true;
        self.crossing.clear();
        for place in std::mem::take(&mut self.parked) {
            // A parked place is a live block by construction, so this cannot fail.
            let freed = self.free(place);
            debug_assert!(freed.is_ok(), "a parked block was not live");
        }
    }

    /// The live blocks and their bytes, in no particular order, parked ones apart.
    pub(crate) fn blocks(&self) -> Vec<(Place, u64)> {
        let mut blocks = Vec::with_capacity(self.usage.blocks as usize);
        for window in &self.windows {
            let base = self.ranges[window.range].tiles[window.first].offset;
            let place = |offset| Place { range: window.range, offset };
            match &window.tenant {
                Tenant::None => {}
                Tenant::Block { bytes, .. } => blocks.push((place(base), bytes.get())),
                Tenant::Slab { slab, .. } => blocks.extend(slab.blocks().map(|(start, granules)| {
                    (place(base + u64::from(start) * BLOCK_GRANULE), u64::from(granules) * BLOCK_GRANULE)
                })),
            }
        }
        blocks.retain(|(place, _)| !self.parked.contains(place));
        blocks
    }

    /// The tiles that blocks cover which would be retained if the capture ended now.
    pub(crate) fn retained_tiles(&self) -> Vec<RetainedTile> {
        let mut retained = Vec::new();
        for Window { range, first, tenant, .. } in &self.windows {
            let base = self.ranges[*range].tiles[*first].offset;
            let stays = |offset| !self.parked.contains(&Place { range: *range, offset });
            let tiles = match tenant {
                Tenant::Block { tiles, .. } if stays(base) => *tiles,
                Tenant::Slab { slab, .. }
                    if slab.blocks().any(|(start, _)| stays(base + u64::from(start) * BLOCK_GRANULE)) =>
                {
                    1
                }
                _ => 0,
            };
            for tile in &self.ranges[*range].tiles[*first..first + tiles] {
                let &Tile { offset, page, used, .. } = tile;
                retained.push(RetainedTile { range: *range, offset, page, used });
            }
        }
        retained
    }

    /// The offsets of a freed block's tiles and the bytes of each.
    pub(crate) fn freed_tiles(&self, freed: Freed) -> impl Iterator<Item = (u64, u64)> {
        let tiles = &self.ranges[freed.range].tiles[freed.first..freed.first + freed.tiles];
        tiles.iter().map(|tile| (tile.offset, self.pages.bytes(tile.page.class)))
    }

    /// How many large and small pages a block of `bytes` takes: whole large pages, then a tail of small ones, or one more large
    /// page where that wastes little.
    fn split(&self, bytes: u64) -> (usize, usize) {
        let (small, large) = (self.geometry.small(), self.geometry.large());
        if small == large {
            return (0, bytes.div_ceil(small) as usize);
        }
        let (whole, tail) = (bytes / large, bytes % large);
        if tail > 0 && large - tail <= self.geometry.max_waste() {
            (whole as usize + 1, 0)
        } else {
            (whole as usize, tail.div_ceil(small) as usize)
        }
    }

    /// The window for a block of `bytes`, and how many tiles it takes: the most recently used one that holds it, or else the
    /// most recently used one from which it can run on into the windows behind.
    fn find(&mut self, zone: Zone, bytes: u64, stream: Stream) -> Option<(usize, usize)> {
        let mut running_on = None;
        let mut next = self.recency.newest(zone as usize);
        while let Some(window) = next {
            if let Some(tiles) = self.free_tiles(window, bytes, stream) {
                if tiles <= self.windows[window].tiles {
                    return Some((window, tiles));
                }
                running_on = running_on.or(Some((window, tiles)));
            }
            next = self.recency.older(window);
        }
        running_on
    }

    /// How many tiles from the window's first hold `bytes`, if those are free and waste little.
    fn free_tiles(&mut self, window: usize, bytes: u64, stream: Stream) -> Option<usize> {
        self.pages.start_search();
        let Window { range, first, .. } = self.windows[window];
        let mut covered = 0;
        for (count, tile) in self.ranges[range].tiles[first..].iter().enumerate() {
            if !self.pages.visit(tile.page, stream) {
                return None;
            }
            covered += self.pages.bytes(tile.page.class);
            if covered >= bytes {
                return (covered - bytes <= self.geometry.max_waste()).then_some(count + 1);
            }
        }
        None
    }

    /// Makes a block the tenant of a window.
    fn settle(&mut self, window: usize, tiles: usize, bytes: BlockBytes, stream: Stream) -> Place {
        self.windows[window].tenant = Tenant::Block { bytes, tiles };
        self.count(bytes);
        self.occupy(window, tiles, bytes.get(), stream)
    }

    /// Makes a slab the tenant of a window, with its first block in it.
    fn open_slab(&mut self, window: usize, bytes: BlockBytes, stream: Stream) -> Place {
        let page = self.geometry.small();
        let mut slab = self.idle_slabs.pop().unwrap_or_else(|| Slab::new(page));
        // An empty slab has room for any packed block, at its beginning.
        let start = slab.allocate((bytes.get() / BLOCK_GRANULE) as u32);
        debug_assert_eq!(start, Some(0));
        self.windows[window].tenant = Tenant::Slab { slab, stream };
        self.slabs.push(window);
        self.count(bytes);
        self.occupy(window, 1, page, stream)
    }

    fn count(&mut self, bytes: BlockBytes) {
        self.usage.blocks += 1;
        self.usage.bytes += bytes.get();
        self.usage.peak_bytes = self.usage.peak_bytes.max(self.usage.bytes);
    }

    fn occupy(&mut self, window: usize, tiles: usize, bytes: u64, stream: Stream) -> Place {
        let Window { range, first, .. } = self.windows[window];
        let mut rest = bytes;
        for tile in first..first + tiles {
            let page = self.ranges[range].tiles[tile].page;
            let covered = rest.min(self.pages.bytes(page.class));
            rest -= covered;
            let used = &mut self.ranges[range].tiles[tile].used;
            *used = covered.max(*used);
            self.pages.occupy(page, stream);
        }
        self.recency.touch(self.ranges[range].zone as usize, window);
        Place { range, offset: self.ranges[range].tiles[first].offset }
    }

    /// The window that starts at or, for a slab, holds the place, and the granule within the slab.
    fn locate(&self, place: Place) -> Result<(usize, u32), NotLive> {
        let range = self.ranges.get(place.range).ok_or(NotLive::Foreign)?;
        let unit = (place.offset / self.geometry.small()) as usize;
        let tile = range.tile_at.get(unit).ok_or(NotLive::Foreign)?;
        let tile = &range.tiles[*tile as usize];
        let window = tile.window.ok_or(NotLive::Foreign)?;
        let within = place.offset - tile.offset;
        match range.zone {
            Zone::Blocks if within == 0 => Ok((window, 0)),
            Zone::Slabs if within.is_multiple_of(BLOCK_GRANULE) => {
                Ok((window, (within / BLOCK_GRANULE) as u32))
            }
            _ => Err(NotLive::Foreign),
        }
    }
}

#[cfg(test)]
mod tests;

//! The layout against a naive twin that keeps no indices, and against what must hold whatever the policy.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;

const SMALL: u64 = 1 << 14;

fn geometry(pages_per_large: u64) -> Geometry {
    Geometry::new(SMALL, SMALL * pages_per_large, 4096).unwrap()
}

/// A layout with the addresses that an executor would have mapped.
struct Mapped {
    layout: Layout,
    maps: usize,
}

impl Mapped {
    fn new(geometry: Geometry) -> Self {
        Self { layout: Layout::new(geometry), maps: 0 }
    }

    fn allocate(&mut self, bytes: u64, stream: u64) -> (Place, Vec<PageNo>) {
        let (bytes, stream) = (BlockBytes::round_up(bytes).unwrap(), Stream(stream));
        if let Some(place) = self.layout.place(bytes, stream) {
            return (place, Vec::new());
        }
        let growth = self.layout.plan(bytes, stream);
        self.maps += growth.pages.len();
        let place = self.layout.commit(&growth);
        (place, growth.pages)
    }

    /// The page bytes behind a block: (page, first byte in it, bytes).
    fn backing(&self, place: Place, bytes: u64) -> Vec<(PageNo, u64, u64)> {
        let range = &self.layout.ranges[place.range];
        let page_bytes = self.layout.page_bytes(range.class);
        let (mut at, end) = (place.offset, place.offset + bytes);
        let mut backing = Vec::new();
        while at < end {
            let tile = (at / page_bytes) as usize;
            let tile_end = (tile as u64 + 1) * page_bytes;
            let page = PageNo { class: range.class, index: range.tiles[tile].page };
            backing.push((page, at % page_bytes, tile_end.min(end) - at));
            at = tile_end;
        }
        backing
    }
}

/// Page, first byte in it, bytes.
type Part = (u32, u64, u64);

/// The same policy for blocks that are not packed, in plain lists: everything is found by looking at everything.
#[derive(Default)]
struct Naive {
    /// (range, page) in the order of mapping.
    tiles: Vec<(usize, u32)>,
    /// First tile and number of tiles, least recently used first.
    windows: Vec<(usize, usize)>,
    /// (page, first byte, byte behind the last) of what is live.
    live: Vec<Part>,
    owner: BTreeMap<u32, u64>,
    pages: u32,
}

impl Naive {
    fn serves(&self, page: u32, stream: u64) -> bool {
        self.owner.get(&page).is_none_or(|owner| *owner == stream)
    }

    fn stays(&self, page: u32) -> Vec<(u64, u64)> {
        let mut stays: Vec<_> = self.live.iter().filter(|l| l.0 == page).map(|l| (l.1, l.2)).collect();
        stays.sort_unstable();
        stays
    }

    fn begins_free(&self, page: u32, bytes: u64, stream: u64) -> bool {
        self.serves(page, stream) && self.stays(page).iter().all(|stay| stay.0 >= bytes)
    }

    /// The lowest pages that are wholly free.
    fn free(&self, stream: u64) -> impl Iterator<Item = u32> {
        (0..).filter(move |page| self.serves(*page, stream) && self.stays(*page).is_empty())
    }

    /// The page bytes a block gets, and whether they were mapped before.
    fn allocate(&mut self, large: u64, bytes: u64, stream: u64, range: usize) -> (Vec<Part>, bool) {
        let known = self.pages;
        let got = if bytes < large {
            self.within(large, bytes, stream)
        } else {
            self.stitched(large, bytes, stream, range)
        };
        let fresh = got.1;
        self.pages = self.pages.max(got.0.iter().map(|part| part.0 + 1).max().unwrap());
        if bytes < large && self.pages > known {
            self.windows.push((self.tiles.len(), 1));
            self.tiles.push((range, got.0[0].0));
        }
        self.live.extend(got.0.iter().map(|(page, from, length)| (*page, *from, from + length)));
        self.owner.extend(got.0.iter().map(|part| (part.0, stream)));
        (got.0, !fresh)
    }

    fn within(&self, large: u64, bytes: u64, stream: u64) -> (Vec<Part>, bool) {
        let mut gaps = Vec::new();
        for page in (0..self.pages).filter(|page| self.serves(*page, stream)) {
            let stays = self.stays(page);
            let mut from = 0;
            for (start, end) in stays.iter().copied().chain([(large, 0)]) {
                if !stays.is_empty() && start - from >= bytes {
                    gaps.push((start - from, page, start));
                }
                from = end;
            }
        }
        let best = gaps.into_iter().min_by_key(|(length, page, end)| (*length, *page, *end));
        let (page, end) =
            best.map_or_else(|| (self.free(stream).next().unwrap(), large), |(_, page, end)| (page, end));
        (vec![(page, end - bytes, bytes)], page >= self.pages)
    }

    fn stitched(&mut self, large: u64, bytes: u64, stream: u64, range: usize) -> (Vec<Part>, bool) {
        let lengths: Vec<u64> = (0..bytes.div_ceil(large)).map(|n| large.min(bytes - n * large)).collect();
        let parts =
            |pages: &[u32]| pages.iter().zip(&lengths).map(|(page, length)| (*page, 0, *length)).collect();
        let mut candidates = Vec::new();
        for (index, &(first, count)) in self.windows.iter().enumerate().rev() {
            // A range that was left for a larger one may still be filled later: its tiles adjoin all the same.
            let home = self.tiles[first].0;
            let pages: Vec<u32> = self.tiles[first..]
                .iter()
                .filter(|tile| tile.0 == home)
                .take(lengths.len())
                .map(|tile| tile.1)
                .collect();
            let fits = pages.len() == lengths.len()
                && (1..pages.len()).all(|n| !pages[..n].contains(&pages[n]))
                && pages.iter().zip(&lengths).all(|(page, length)| self.begins_free(*page, *length, stream));
            if fits {
                candidates.push((pages.len() > count, index, pages));
            }
        }
        let inside = candidates.iter().position(|candidate| !candidate.0);
        if let Some(best) = inside.or((!candidates.is_empty()).then_some(0)) {
            let (_, index, pages) = candidates.swap_remove(best);
            let window = self.windows.remove(index);
            self.windows.push(window);
            return (parts(&pages), false);
        }
        let (whole, tail) = ((bytes / large) as usize, bytes % large);
        let mut pages: Vec<u32> = self.free(stream).take(whole).collect();
        if tail > 0 {
            let begun =
                (0..self.pages).filter(|page| self.serves(*page, stream) && !self.stays(*page).is_empty());
            let roomy = begun.filter(|page| self.begins_free(*page, tail, stream));
            let shortest = roomy.min_by_key(|page| (self.stays(*page)[0].0, *page));
            let next = self.free(stream).nth(whole).unwrap();
            pages.push(shortest.unwrap_or(next));
        }
        self.windows.push((self.tiles.len(), pages.len()));
        self.tiles.extend(pages.iter().map(|page| (range, *page)));
        (parts(&pages), true)
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { bytes: u64, stream: u64 },
    Free { which: usize },
    Record { which: usize, stream: u64 },
}

fn ops(streams: u64) -> impl Strategy<Value = Vec<Op>> {
    // Few distinct sizes, so that blocks find the places of others again, as in a model's layers.
    let size = prop_oneof![
        4 => (1u64..12).prop_map(|n| n * SMALL),
        2 => (1u64..12).prop_map(|n| n * SMALL - 4096),
        2 => 1u64..SMALL / 2,
        1 => (1u64..60).prop_map(|n| n * SMALL / 2 + 1),
    ];
    let op = prop_oneof![
        6 => (size, 0..streams).prop_map(|(bytes, stream)| Op::Allocate { bytes, stream }),
        5 => any::<usize>().prop_map(|which| Op::Free { which }),
        1 => (any::<usize>(), 0..streams).prop_map(|(which, stream)| Op::Record { which, stream }),
    ];
    proptest::collection::vec(op, 1..200)
}

#[derive(Clone, Debug)]
struct Block {
    place: Place,
    bytes: u64,
    stream: u64,
    crossing: bool,
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    /// Two blocks whose lifetimes meet never share a byte of a page; a page never serves two streams; a block that two
    /// streams use never gives its bytes back; and what the seal keeps is exactly what is live.
    #[test]
    fn no_two_live_blocks_share_memory(
        per_large in prop_oneof![Just(1u64), Just(4), Just(8)],
        streams in 1u64..4,
        ops in (1u64..4).prop_flat_map(ops),
    ) {
        let mut space = Mapped::new(geometry(per_large));
        let mut live: Vec<Block> = Vec::new();
        let mut parked: Vec<Block> = Vec::new();
        let mut ever: HashSet<(usize, u64)> = HashSet::new();
        let mut owner: BTreeMap<PageNo, u64> = BTreeMap::new();
        let units = |place: Place, bytes: u64| {
            let covered = place.offset / SMALL..(place.offset + bytes).div_ceil(SMALL);
            covered.map(move |unit| (place.range, unit * SMALL))
        };
        for op in ops {
            match op {
                Op::Allocate { bytes, stream } => {
                    let stream = stream % streams;
                    let (place, _) = space.allocate(bytes, stream);
                    let bytes = bytes.next_multiple_of(BLOCK_GRANULE);
                    for (page, from, length) in space.backing(place, bytes) {
                        prop_assert_eq!(*owner.entry(page).or_insert(stream), stream, "two streams on one page");
                        for other in live.iter().chain(&parked) {
                            for (theirs, start, n) in space.backing(other.place, other.bytes) {
                                let apart = theirs != page || start + n <= from || from + length <= start;
                                prop_assert!(apart, "{:?} overlaps {:?}", place, other);
                            }
                        }
                    }
                    if bytes > SMALL / 2 {
                        ever.extend(units(place, bytes));
                    }
                    live.push(Block { place, bytes, stream, crossing: false });
                }
                Op::Free { which } if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    let freed = if block.crossing { 0 } else { block.bytes };
                    prop_assert_eq!(space.layout.free(block.place), Ok(freed));
                    prop_assert_eq!(space.layout.free(block.place), Err(NotLive::FreedBefore));
                    if block.crossing {
                        parked.push(block);
                    }
                }
                Op::Record { which, stream } if !live.is_empty() => {
                    let index = which % live.len();
                    let block = &mut live[index];
                    let stream = stream % streams;
                    prop_assert!(space.layout.record_stream(block.place, Stream(stream)).is_ok());
                    block.crossing |= stream != block.stream;
                }
                _ => {}
            }
            let usage = space.layout.usage();
            prop_assert_eq!(usage.blocks as usize, live.len() + parked.len());
            prop_assert_eq!(usage.bytes, live.iter().chain(&parked).map(|b| b.bytes).sum::<u64>());
        }
        let mut kept = HashSet::new();
        let mut passing = HashSet::new();
        for tile in space.layout.retained_tiles() {
            for (unit, usage) in (0..).zip(&tile.units) {
                let at = (tile.range, tile.offset + unit * SMALL);
                match usage {
                    Unit::Idle => prop_assert!(!ever.contains(&at)),
                    Unit::Passing => prop_assert!(passing.insert(at)),
                    Unit::Retained => prop_assert!(kept.insert(at)),
                }
            }
        }
        let covered: HashSet<_> = live.iter().flat_map(|b| units(b.place, b.bytes)).collect();
        prop_assert_eq!(&kept, &covered);
        prop_assert!(passing.iter().all(|at| ever.contains(at) && !covered.contains(at)));
        space.layout.seal();
        let mut blocks: Vec<_> = space.layout.blocks().iter().map(|live| (live.place, live.bytes)).collect();
        let mut expected: Vec<_> = live.iter().map(|b| (b.place, b.bytes)).collect();
        blocks.sort_by_key(|(place, _)| (place.range, place.offset));
        expected.sort_by_key(|(place, _)| (place.range, place.offset));
        prop_assert_eq!(blocks, expected);
        while let Some(block) = live.pop() {
            prop_assert_eq!(space.layout.free(block.place), Ok(block.bytes));
            let left: HashSet<_> = live.iter().flat_map(|b| units(b.place, b.bytes)).collect();
            for (range, from) in units(block.place, block.bytes) {
                prop_assert_eq!(space.layout.covered(range, from, from + SMALL), left.contains(&(range, from)));
            }
        }
        prop_assert_eq!(space.layout.usage().bytes, 0);
        prop_assert!(space.layout.retained_tiles().is_empty());
    }

    /// Block for block the same pages as the naive twin.
    #[test]
    fn chooses_as_the_naive_twin(per_large in prop_oneof![Just(1u64), Just(4), Just(8)], ops in ops(2)) {
        let large = per_large * SMALL;
        let mut space = Mapped::new(geometry(per_large));
        let mut naive = Naive::default();
        let mut live: Vec<(Place, Vec<Part>)> = Vec::new();
        for op in ops {
            match op {
                // Packed blocks are the slabs' business; a twin of their own checks those.
                Op::Allocate { bytes, stream } if bytes > SMALL / 2 => {
                    let (place, mapped) = space.allocate(bytes, stream);
                    let bytes = bytes.next_multiple_of(BLOCK_GRANULE);
                    let parts: Vec<_> =
                        space.backing(place, bytes).iter().map(|(page, from, n)| (page.index, *from, *n)).collect();
                    let (expected, reused) = naive.allocate(large, bytes, stream, place.range);
                    prop_assert_eq!(&parts, &expected);
                    prop_assert_eq!(mapped.is_empty(), reused);
                    live.push((place, parts));
                }
                Op::Free { which } if !live.is_empty() => {
                    let (place, parts) = live.swap_remove(which % live.len());
                    prop_assert!(space.layout.free(place).is_ok());
                    naive.live.retain(|(page, from, _)| !parts.iter().any(|part| (part.0, part.1) == (*page, *from)));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn an_address_that_starts_no_block_is_told_apart_from_one_freed_before() {
    let mut space = Mapped::new(geometry(4));
    let (big, _) = space.allocate(5 * SMALL, 0);
    let (packed, _) = space.allocate(600, 0);
    let free = |space: &mut Mapped, place: Place, offset: u64| {
        space.layout.free(Place { offset: place.offset + offset, ..place }).map(drop)
    };
    assert_eq!(free(&mut space, big, SMALL), Err(NotLive::Foreign));
    assert_eq!(free(&mut space, big, 512), Err(NotLive::Foreign));
    assert_eq!(free(&mut space, packed, 512), Err(NotLive::Foreign));
    assert_eq!(free(&mut space, packed, 100), Err(NotLive::Foreign));
    assert_eq!(free(&mut space, packed, 1024), Err(NotLive::FreedBefore));
    assert_eq!(free(&mut space, Place { range: 7, offset: 0 }, 0), Err(NotLive::Foreign));
    assert_eq!(free(&mut space, Place { range: 0, offset: 1 << 40 }, 0), Err(NotLive::Foreign));
    for place in [big, packed] {
        assert_eq!(free(&mut space, place, 0), Ok(()));
        assert_eq!(free(&mut space, place, 0), Err(NotLive::FreedBefore));
        assert_eq!(space.layout.record_stream(place, Stream(1)), Err(NotLive::FreedBefore));
    }
}

#[test]
fn ranges_double_and_a_block_larger_than_any_gets_one_of_its_size() {
    let mut space = Mapped::new(geometry(8));
    let large = 8 * SMALL;
    for _ in 0..300 {
        space.allocate(large, 0);
    }
    let sizes: Vec<u64> = space.layout.ranges.iter().map(|range| range.bytes / large).collect();
    assert_eq!(sizes, [32, 64, 128, 128]);
    let (place, _) = space.allocate(1000 * large, 0);
    assert_eq!(space.layout.ranges[place.range].bytes, 1000 * large);
}

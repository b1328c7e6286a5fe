//! The layout against a naive twin that keeps no indices, and against what must hold whatever the policy.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;

const SMALL: u64 = 1 << 14;

fn geometry(pages_per_large: u64, waste: u64) -> Geometry {
    let large = SMALL * pages_per_large;
    Geometry::new(SMALL, large, waste.min(large - 1), 4096).unwrap()
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
        let (mut at, end) = (place.offset, place.offset + bytes);
        let mut backing = Vec::new();
        while at < end {
            let tile = range.tiles.iter().rev().find(|tile| tile.offset <= at).unwrap();
            let tile_end = tile.offset + self.layout.pages.bytes(tile.page.class);
            assert!(at < tile_end, "a block covers unmapped addresses");
            backing.push((tile.page, at - tile.offset, tile_end.min(end) - at));
            at = tile_end;
        }
        backing
    }
}

/// The same policy in plain lists: tiles of one zone in a row, windows in order of use, everything found by looking.
#[derive(Default)]
struct Naive {
    zones: [NaiveZone; 2],
    busy: HashSet<PageNo>,
    owner: BTreeMap<PageNo, u64>,
}

#[derive(Default)]
struct NaiveZone {
    /// (range, page)
    tiles: Vec<(usize, PageNo)>,
    /// First tile and number of tiles, least recently used first.
    windows: Vec<(usize, usize)>,
}

impl Naive {
    fn usable(&self, page: PageNo, stream: u64) -> bool {
        !self.busy.contains(&page) && self.owner.get(&page).is_none_or(|owner| *owner == stream)
    }

    /// The pages a block of `bytes` gets: those of a window, or else the numbers to map behind the zone's last tile.
    fn pages(
        &mut self,
        g: Geometry,
        zone: usize,
        bytes: u64,
        stream: u64,
        range: usize,
    ) -> (Vec<PageNo>, bool) {
        let size = |page: PageNo| if page.class == Class::Large { g.large() } else { g.small() };
        let mut candidates = Vec::new();
        for &(first, count) in self.zones[zone].windows.iter().rev() {
            let home = self.zones[zone].tiles[first].0;
            let mut pages: Vec<PageNo> = Vec::new();
            let mut covered = 0;
            // A range that was left for a larger one may still be filled later: its tiles adjoin all the same.
            for &(_, page) in self.zones[zone].tiles[first..].iter().filter(|(range, _)| *range == home) {
                if covered >= bytes || pages.contains(&page) || !self.usable(page, stream) {
                    break;
                }
                covered += size(page);
                pages.push(page);
            }
            if covered >= bytes && covered - bytes <= g.max_waste() {
                candidates.push((pages.len() > count, first, pages));
            }
        }
        let inside = candidates.iter().position(|(runs_on, ..)| !runs_on);
        if let Some(best) = inside.or((!candidates.is_empty()).then_some(0)) {
            let (_, first, pages) = candidates.swap_remove(best);
            let windows = &mut self.zones[zone].windows;
            let at = windows.iter().position(|window| window.0 == first).unwrap();
            let window = windows.remove(at);
            windows.push(window);
            self.occupy(&pages, stream);
            return (pages, true);
        }
        let (mut large, mut small) = (bytes / g.large(), (bytes % g.large()).div_ceil(g.small()));
        if small > 0 && g.large() - bytes % g.large() <= g.max_waste() {
            (large, small) = (large + 1, 0);
        }
        if g.large() == g.small() {
            (large, small) = (0, bytes.div_ceil(g.small()));
        }
        let mut pages = Vec::new();
        for (class, mut wanted) in [(Class::Large, large), (Class::Small, small)] {
            for index in 0.. {
                if wanted == 0 {
                    break;
                }
                let page = PageNo { class, index };
                if self.usable(page, stream) {
                    pages.push(page);
                    wanted -= 1;
                }
            }
        }
        let zone = &mut self.zones[zone];
        zone.windows.push((zone.tiles.len(), pages.len()));
        zone.tiles.extend(pages.iter().map(|page| (range, *page)));
        self.occupy(&pages, stream);
        (pages, false)
    }

    fn occupy(&mut self, pages: &[PageNo], stream: u64) {
        self.busy.extend(pages);
        self.owner.extend(pages.iter().map(|page| (*page, stream)));
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
    /// streams use never gives its pages back; and a class never has more pages than were busy at once (on one stream).
    #[test]
    fn no_two_live_blocks_share_memory(
        per_large in prop_oneof![Just(1u64), Just(4), Just(8)],
        waste in 0u64..8 * SMALL,
        streams in 1u64..4,
        ops in (1u64..4).prop_flat_map(ops),
    ) {
        let mut space = Mapped::new(geometry(per_large, waste));
        let mut live: Vec<Block> = Vec::new();
        let mut parked: Vec<Block> = Vec::new();
        let mut owner: BTreeMap<PageNo, u64> = BTreeMap::new();
        let mut most_busy = (0, 0);
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
                    live.push(Block { place, bytes, stream, crossing: false });
                }
                Op::Free { which } if !live.is_empty() => {
                    let block = live.swap_remove(which % live.len());
                    prop_assert!(space.layout.free(block.place).is_ok());
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
            let (busy, used) = (space.layout.pages.busy(), space.layout.pages.used());
            most_busy = (most_busy.0.max(busy.0), most_busy.1.max(busy.1));
            if streams == 1 {
                prop_assert!(used.0 <= most_busy.0 && used.1 <= most_busy.1, "pages beyond the most that were busy");
            }
        }
        // The seal frees what was parked and keeps exactly what is live.
        let retained: HashSet<PageNo> = space.layout.retained_tiles().into_iter().map(|tile| tile.page).collect();
        let covered: HashSet<PageNo> =
            live.iter().flat_map(|b| space.backing(b.place, b.bytes)).map(|(page, ..)| page).collect();
        prop_assert_eq!(retained, covered);
        space.layout.seal();
        let mut blocks: Vec<_> = space.layout.blocks();
        let mut expected: Vec<_> = live.iter().map(|b| (b.place, b.bytes)).collect();
        blocks.sort_by_key(|(place, _)| (place.range, place.offset));
        expected.sort_by_key(|(place, _)| (place.range, place.offset));
        prop_assert_eq!(blocks, expected);
        for block in live {
            prop_assert!(space.layout.free(block.place).is_ok());
        }
        prop_assert_eq!(space.layout.usage().bytes, 0);
        prop_assert_eq!(space.layout.pages.busy(), (0, 0));
    }

    /// Block for block the same pages as the naive twin.
    #[test]
    fn chooses_as_the_naive_twin(
        per_large in prop_oneof![Just(1u64), Just(4), Just(8)],
        waste in 0u64..8 * SMALL,
        ops in ops(2),
    ) {
        let g = geometry(per_large, waste);
        let mut space = Mapped::new(g);
        let mut naive = Naive::default();
        let mut live: Vec<(Place, Vec<PageNo>)> = Vec::new();
        for op in ops {
            match op {
                // Packed blocks are the slab's business; its own twin checks them.
                Op::Allocate { bytes, stream } if bytes > SMALL / 2 => {
                    let (place, mapped) = space.allocate(bytes, stream);
                    let bytes = bytes.next_multiple_of(BLOCK_GRANULE);
                    let pages: Vec<PageNo> = space.backing(place, bytes).iter().map(|(page, ..)| *page).collect();
                    let (expected, reused) = naive.pages(g, 0, bytes, stream, place.range);
                    prop_assert_eq!(&pages, &expected);
                    prop_assert_eq!(mapped.is_empty(), reused);
                    live.push((place, pages));
                }
                Op::Free { which } if !live.is_empty() => {
                    let (place, pages) = live.swap_remove(which % live.len());
                    prop_assert!(space.layout.free(place).is_ok());
                    naive.busy.retain(|page| !pages.contains(page));
                }
                _ => {}
            }
        }
    }
}

#[test]
fn an_address_that_starts_no_block_is_told_apart_from_one_freed_before() {
    let mut space = Mapped::new(geometry(4, 2 * SMALL));
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
    let mut space = Mapped::new(geometry(8, 4 * SMALL));
    let large = 8 * SMALL;
    for _ in 0..600 {
        space.allocate(large, 0);
    }
    let sizes: Vec<u64> = space.layout.ranges.iter().map(|range| range.bytes / large).collect();
    assert_eq!(sizes, [64, 128, 256, 256]);
    let (place, _) = space.allocate(1000 * large, 0);
    assert_eq!(space.layout.ranges[place.range].bytes, 1000 * large);
}

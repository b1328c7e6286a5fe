//! Compares the layout to a naive model without indices, and checks invariants of any policy.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::growth::Growth;
use super::*;
use crate::pages::PageNo;
use crate::space::page_table::Part;

mod naive;

use naive::Naive;

const SMALL: u64 = 1 << 14;
const PACKED: u64 = SMALL / 8;

fn geometry(pages_per_large: u64) -> Geometry {
    Geometry::new(SMALL, SMALL * pages_per_large, 4096).unwrap()
}

/// A layout whose plans count as mapped at once.
struct Mapped {
    layout: Layout,
}

impl Mapped {
    fn new(geometry: Geometry) -> Self {
        Self { layout: Layout::new(geometry) }
    }

    fn allocate(&mut self, bytes: u64, stream: u64) -> (Place, Option<Growth>) {
        self.allocate_in(bytes, Lane::local(Stream::numbered(stream)))
    }

    fn allocate_in(&mut self, bytes: u64, lane: Lane) -> (Place, Option<Growth>) {
        let bytes = BlockBytes::round_up(bytes).unwrap();
        if let Some(place) = self.layout.place(bytes, lane) {
            return (place, None);
        }
        let growth = self.layout.plan(bytes, lane);
        let place = self.layout.commit(&growth);
        (place, Some(growth))
    }

    /// Page bytes of a block: (page, first byte, bytes).
    fn backing(&self, place: Place, bytes: u64) -> Vec<(PageNo, u64, u64)> {
        let range = &self.layout.ranges[place.range];
        let page_bytes = self.layout.page_bytes(range.class);
        let (mut at, end) = (place.offset, place.offset + bytes);
        let mut backing = Vec::new();
        while at < end {
            let page_slot = (at / page_bytes) as usize;
            let slot_end = (page_slot as u64 + 1) * page_bytes;
            let page = PageNo { class: range.class, index: range.page_slots[page_slot] };
            backing.push((page, at % page_bytes, slot_end.min(end) - at));
            at = slot_end;
        }
        backing
    }
}

#[derive(Clone, Debug)]
enum Op {
    Allocate { bytes: u64, stream: u64 },
    Free { which: usize },
    Record { which: usize, stream: u64 },
    Join { which: usize },
}

fn ops(streams: u64) -> impl Strategy<Value = Vec<Op>> {
    let size = prop_oneof![
        4 => (1u64..12).prop_map(|n| n * SMALL),
        2 => (1u64..12).prop_map(|n| n * SMALL - 4096),
        2 => 1u64..SMALL / 8,
        1 => (1u64..60).prop_map(|n| n * SMALL / 2 + 1),
    ];
    let op = prop_oneof![
        6 => (size, 0..streams).prop_map(|(bytes, stream)| Op::Allocate { bytes, stream }),
        5 => any::<usize>().prop_map(|which| Op::Free { which }),
        1 => (any::<usize>(), 0..streams).prop_map(|(which, stream)| Op::Record { which, stream }),
        1 => any::<usize>().prop_map(|which| Op::Join { which }),
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

    /// Blocks with overlapping lifetimes share no byte, and a page serves one stream. A block used
    /// by two streams returns its bytes only after its uses are joined. The seal retains exactly
    /// the live blocks.
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
                    if bytes > PACKED {
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
                    let own = (stream != block.stream).then_some(Stream::numbered(block.stream));
                    prop_assert_eq!(space.layout.record_stream(block.place, Stream::numbered(stream)), Ok(own));
                    block.crossing |= stream != block.stream;
                }
                Op::Join { which } => {
                    if let Some(block) = live.first() {
                        prop_assert_eq!(space.layout.free_parked(block.place), Err(NotLive::FreedBefore));
                    }
                    if !parked.is_empty() {
                        let block = parked.swap_remove(which % parked.len());
                        prop_assert_eq!(space.layout.free_parked(block.place), Ok(block.bytes));
                        prop_assert_eq!(space.layout.free(block.place), Err(NotLive::FreedBefore));
                    }
                }
                _ => {}
            }
            let usage = space.layout.usage();
            let (pages, large) = (&space.layout.pages, space.layout.geometry.large());
            let uncovered = (0..pages.used() as u32).flat_map(|page| pages.gaps(page));
            prop_assert_eq!(pages.free(), uncovered.map(|(from, to)| to - from).sum::<u64>());
            prop_assert_eq!(pages.free() == pages.used() as u64 * large, live.iter().chain(&parked).all(|b| b.bytes <= PACKED));
            prop_assert_eq!(usage.blocks as usize, live.len() + parked.len());
            prop_assert_eq!(usage.bytes, live.iter().chain(&parked).map(|b| b.bytes).sum::<u64>());
        }
        let mut kept = HashSet::new();
        let mut passing = HashSet::new();
        for range in 0..space.layout.ranges.len() {
            let small = space.layout.ranges[range].class == Class::Small;
            for (unit, usage) in (0..).zip(space.layout.units(range)) {
                let at = (range, unit * SMALL);
                match usage {
                    Unit::Idle => prop_assert!(!ever.contains(&at)),
                    Unit::Passing => prop_assert!(passing.insert(at) && (small || ever.contains(&at))),
                    Unit::Retained => prop_assert!(kept.insert(at)),
                }
            }
        }
        let covered: HashSet<_> = live.iter().flat_map(|b| units(b.place, b.bytes)).collect();
        prop_assert_eq!(&kept, &covered);
        prop_assert!(passing.iter().all(|at| !covered.contains(at)));
        let pages = space.layout.pages();
        let mut sealed = space.layout.seal();
        prop_assert_eq!(sealed.pages(), pages);
        let blocks: Vec<_> = sealed.blocks().iter().map(|live| (live.place, live.bytes)).collect();
        let mut expected: Vec<_> = live.iter().map(|b| (b.place, b.bytes)).collect();
        expected.sort_unstable();
        prop_assert_eq!(blocks, expected);
        while let Some(block) = live.pop() {
            prop_assert_eq!(sealed.free(block.place), Ok(block.bytes));
            prop_assert_eq!(sealed.free(block.place), Err(NotLive::FreedBefore));
            let left: HashSet<_> = live.iter().flat_map(|b| units(b.place, b.bytes)).collect();
            for (range, from) in units(block.place, block.bytes) {
                prop_assert_eq!(sealed.covered(range, from, from + SMALL), left.contains(&(range, from)));
            }
        }
        prop_assert_eq!((sealed.usage().blocks, sealed.usage().bytes), (0, 0));
    }

    /// Its pages hold only peer-visible blocks of its stream. The seal receives all of them.
    #[test]
    fn a_remote_block_crosses_no_seam_and_has_its_like_beside_it_only(
        per_large in prop_oneof![Just(1u64), Just(4), Just(8)],
        ops in proptest::collection::vec((any::<bool>(), ops(2)), 1..4),
    ) {
        let large = per_large * SMALL;
        let mut space = Mapped::new(geometry(per_large));
        let mut live: Vec<(Place, u64, bool)> = Vec::new();
        let mut owner: BTreeMap<PageNo, (u64, bool)> = BTreeMap::new();
        let ops = ops.into_iter().flat_map(|(remote, ops)| ops.into_iter().enumerate().map(move |(n, op)| (remote ^ (n % 3 == 0), op)));
        for (remote, op) in ops {
            match op {
                Op::Allocate { mut bytes, stream } => {
                    let by = Stream::numbered(stream);
                    let lane = if remote { Lane::remote(by) } else { Lane::local(by) };
                    if remote && bytes > large {
                        bytes = bytes.next_multiple_of(large);
                    }
                    let (place, _) = space.allocate_in(bytes, lane);
                    let bytes = bytes.next_multiple_of(BLOCK_GRANULE);
                    let backing = space.backing(place, bytes);
                    for (page, from, length) in &backing {
                        prop_assert_eq!(*owner.entry(*page).or_insert((stream, remote)), (stream, remote));
                        for (other, theirs, _) in &live {
                            for (shown, start, n) in space.backing(*other, *theirs) {
                                prop_assert!(shown != *page || start + n <= *from || from + length <= start);
                            }
                        }
                    }
                    let whole = backing.iter().all(|(_, from, length)| (*from, *length) == (0, large));
                    prop_assert!(!remote || backing.len() == 1 || whole, "{:?} lies over a seam", backing);
                    live.push((place, bytes, remote));
                }
                Op::Free { which } if !live.is_empty() => {
                    let (place, ..) = live.swap_remove(which % live.len());
                    prop_assert!(space.layout.free(place).is_ok());
                }
                _ => {}
            }
            let of = live.iter().filter(|(.., remote)| *remote);
            let (count, bytes) = of.fold((0, 0), |(count, bytes), (_, more, _)| (count + 1, bytes + more));
            prop_assert_eq!(space.layout.live_remote(), (count, bytes));
        }
        let page_slots: HashSet<_> = space.layout.page_slots().filter(|(.., no)| owner.get(no).is_some_and(|(_, remote)| *remote)).map(|(range, at, _)| (range, at)).collect();
        prop_assert_eq!(space.layout.remote_slots(), page_slots);
    }

    /// Equal requests give equal plans, independent of hash order.
    #[test]
    fn the_same_requests_lead_to_the_same_plans(ops in ops(3)) {
        let mut spaces = [Mapped::new(geometry(8)), Mapped::new(geometry(8))];
        let mut live: Vec<Place> = Vec::new();
        for op in ops {
            match op {
                Op::Allocate { bytes, stream } => {
                    let [one, two] = spaces.each_mut().map(|space| space.allocate(bytes, stream));
                    prop_assert_eq!(&one, &two);
                    live.push(one.0);
                }
                Op::Free { which } if !live.is_empty() => {
                    let place = live.swap_remove(which % live.len());
                    let [one, two] = spaces.each_mut().map(|space| space.layout.free(place));
                    prop_assert_eq!(one, two);
                }
                _ => {}
            }
        }
    }

    #[test]
    fn chooses_as_the_naive_twin(per_large in prop_oneof![Just(1u64), Just(4), Just(8)], ops in ops(2)) {
        let large = per_large * SMALL;
        let mut space = Mapped::new(geometry(per_large));
        let mut naive = Naive::new(SMALL, large);
        let mut live: Vec<(Place, Vec<Part>)> = Vec::new();
        for op in ops {
            match op {
                Op::Allocate { bytes, stream } if bytes > PACKED => {
                    let (place, growth) = space.allocate(bytes, stream);
                    let bytes = bytes.next_multiple_of(BLOCK_GRANULE);
                    let backing = space.backing(place, bytes);
                    let parts: Vec<_> =
                        backing.iter().map(|(page, from, n)| Part { page: page.index, from: *from, to: from + n }).collect();
                    let first = (place.range, (place.offset / large) as usize);
                    let (expected, reused) = naive.allocate(bytes, stream, first);
                    prop_assert_eq!(&parts, &expected);
                    prop_assert_eq!(growth.is_none(), reused);
                    live.push((place, parts));
                }
                Op::Free { which } if !live.is_empty() => {
                    let (place, parts) = live.swap_remove(which % live.len());
                    prop_assert!(space.layout.free(place).is_ok());
naive.free(&parts);
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
        assert_eq!(space.layout.record_stream(place, Stream::numbered(1)), Err(NotLive::FreedBefore));
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
    assert_eq!(sizes, [64, 128, 256]);
    let (place, _) = space.allocate(1000 * large, 0);
    assert_eq!(space.layout.ranges[place.range].bytes, 1000 * large);
}

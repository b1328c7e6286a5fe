//! The page map: agreement with the statistics, and predictions compared with dropped shapes.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use vmmgraph::driver::HostDriver;
use vmmgraph::map::PageClass;
use vmmgraph::pages::Fence;
use vmmgraph::{
    ArenaMap, Device, ElasticOptions, Error, HostOptions, Options, RegionOptions, SharedVmmAllocator, Stream,
    VmmTorchAllocator,
};
use vmmgraph_testkit::{Captured, MIB, Order, Trace, capture_with};

const A: Stream = Stream::LEGACY;

/// Traces in tests/data; true: live-out blocks are persistent.
const TRACES: [(&str, bool); 6] = [
    ("capture-trace-65", false),
    ("capture-trace-65-retained", false),
    ("capture-trace-65-retained", true),
    ("capture-trace-llama-70b-tp8", false),
    ("capture-trace-qwen3-0.6b", false),
    ("capture-trace-vision", false),
];

fn device() -> Arc<Device> {
    Device::with_driver(Arc::new(HostDriver::new(0, HostOptions::default()).unwrap()))
}

fn arena(device: &Arc<Device>) -> SharedVmmAllocator {
    SharedVmmAllocator::new(device, &Options::default()).unwrap()
}

fn load(name: &str) -> Trace {
    Trace::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data"), name).unwrap()
}

fn captured(arena: &SharedVmmAllocator, trace: &Trace, kept: bool) -> BTreeMap<u64, Captured> {
    let capture = |shape| {
        let captured = capture_with(arena, shape, A, kept).unwrap();
        captured.space.set_label(&shape.label()).unwrap();
        (captured.space.id(), captured)
    };
    trace.shapes.iter().map(capture).collect()
}

fn bytes(map: &ArenaMap, wanted: impl Fn(PageClass) -> bool) -> u64 {
    map.pages.iter().filter(|page| wanted(page.class)).map(|page| page.bytes).sum()
}

fn agrees(map: &ArenaMap, arena: &SharedVmmAllocator) {
    let stats = arena.snapshot();
    assert!(map.settled);
    assert_eq!(map.held_bytes, stats.arena.physical_bytes);
    assert_eq!(map.held_bytes, bytes(map, |_| true));
    assert_eq!(bytes(map, |class| class == PageClass::Own), stats.arena.retained_bytes);
    assert_eq!(bytes(map, |class| class == PageClass::Kept), stats.arena.kept_bytes);
    assert_eq!(map.pages.len() as u64, {
        let own = format!("arena: {}", arena.id());
        let ours = stats.owners.iter().filter(|held| {
            let owner = format!("{:?}", held.owner);
            owner.contains(&format!("{own},")) || owner.contains(&format!("{own} "))
        });
        ours.map(|held| held.pages).sum::<u64>()
    });
    assert_eq!(map.spaces.len(), stats.spaces.len());
    for (space, stats) in map.spaces.iter().zip(&stats.spaces) {
        let found = (space.id, &space.label, space.peak_live_bytes, space.live_bytes, space.retained_bytes);
        let told = (stats.id, &stats.label, stats.peak_live_bytes, stats.live_bytes, stats.retained_bytes);
        assert_eq!(found, told);
        assert_eq!((space.mapped_bytes, space.kept_bytes), (stats.mapped_bytes, stats.kept_bytes));
        let shown: u64 = space.maps.iter().map(|tile| map.pages[tile.page as usize].bytes).sum();
        assert_eq!(shown, space.mapped_bytes);
        // The peak's blocks add up to the peak; no byte of a page is covered twice.
        let kept: u64 = space.kept.iter().map(|block| block.bytes).sum();
        let blocks: u64 = space.blocks.iter().map(|block| block.bytes).sum();
        assert_eq!(blocks, space.peak_live_bytes - kept);
        assert_eq!(space.maps.iter().map(|tile| tile.covered_bytes).sum::<u64>(), blocks);
        let mut covered = vec![0; map.pages.len()];
        space.maps.iter().for_each(|tile| covered[tile.page as usize] += tile.covered_bytes);
        assert!(covered.iter().zip(&map.pages).all(|(covered, page)| *covered <= page.bytes));
        assert!(space.blocks.windows(2).all(|pair| pair[0].address + pair[0].bytes <= pair[1].address));
        assert_eq!(space.kept_pages.is_empty(), space.kept.is_empty());
        let on_page = |block: &vmmgraph::map::MapBlock, page: &u64| {
            let page = &map.pages[*page as usize];
            let (from, to) = (page.address.unwrap(), page.address.unwrap() + page.bytes);
            (block.address + block.bytes).min(to).saturating_sub(block.address.max(from))
        };
        for block in &space.kept {
            let on: u64 = space.kept_pages.iter().map(|page| on_page(block, page)).sum();
            assert_eq!(on, block.bytes);
        }
    }
    assert_eq!(ArenaMap::from_json(&map.to_json()).as_ref(), Ok(map));
}

#[test]
fn every_number_is_the_statistics() {
    for (name, kept) in TRACES {
        let (trace, device) = (load(name), device());
        let arena = arena(&device);
        let captured = captured(&arena, &trace, kept);
        let map = arena.map();
        agrees(&map, &arena);
        let floor = if kept { arena.high_water_mark() } else { trace.floor_bytes() };
        assert_eq!(map.floor_bytes, floor, "{name}");
        assert_eq!(map.apart_bytes, map.spaces.iter().map(|space| space.peak_live_bytes).sum::<u64>());
        let labels: Vec<_> = map.spaces.iter().filter_map(|space| space.label.clone()).collect();
        assert_eq!(labels, trace.shapes.iter().map(|shape| shape.label()).collect::<Vec<_>>());
        assert!(map.pages.iter().all(|page| page.spaces >= 1));
        assert_eq!(map.curve.len(), captured.len());
        let last = map.curve.last().unwrap();
        assert_eq!((last.with_bytes, last.without_bytes), (map.held_bytes, 0));
        let html = map.to_html();
        println!(
            "{name}, kept {kept}: JSON {} KiB, page {} KiB",
            map.to_json().len() >> 10,
            html.len() >> 10
        );
    }
}

#[test]
fn dropping_a_shape_gives_back_what_the_map_says() {
    for (name, kept) in TRACES {
        for order in [Order::Ascending, Order::Descending] {
            let (trace, device) = (load(name).ordered(order), device());
            let arena = arena(&device);
            let mut captured = captured(&arena, &trace, kept);
            let all = arena.map();
            // In the order of the curve; each map predicts a single drop.
            for point in &all.curve {
                let map = arena.map();
                let space = map.spaces.iter().find(|space| space.id == point.space).unwrap();
                let before = device.stats().physical_bytes;
                captured.remove(&point.space).unwrap();
                arena.trim().unwrap();
                let gone = before - device.stats().physical_bytes;
                assert_eq!(gone, space.drop_gives_bytes, "{name} {:?}", space.label);
                assert_eq!(arena.mapped_size(), point.without_bytes, "{name} {:?}", space.label);
            }
            assert_eq!(arena.map().pages, []);
        }
    }
}

#[test]
fn the_largest_shapes_alone_take_what_the_curve_says() {
    let trace = load("capture-trace-65");
    let (device, label) = (device(), |id, map: &ArenaMap| {
        map.spaces.iter().find(|space| space.id == id).and_then(|space| space.label.clone()).unwrap()
    });
    let whole = arena(&device);
    let _captured = captured(&whole, &trace, false);
    let map = whole.map();
    for count in [1, 2, 5, 20] {
        let few: Vec<_> = map.curve[..count].iter().map(|point| label(point.space, &map)).collect();
        let mut some = trace.clone();
        some.shapes.retain(|shape| few.contains(&shape.label()));
        let other = arena(&device);
        let _captured = captured(&other, &some, false);
        assert_eq!(other.mapped_size(), map.curve[count - 1].with_bytes);
    }
}

/// Compared with a list: blocks allocated and freed in random order, some used by a second stream,
/// which delays their reuse.
#[test]
fn the_blocks_of_the_peak_are_those_of_a_list() {
    let device = device();
    let arena = arena(&device);
    for seed in 1..200_u64 {
        let mut random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut next = move |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        let space = arena.open_space().unwrap();
        let mut live: Vec<(u64, u64, bool, bool)> = Vec::new();
        let (mut most, mut peak) = (0, Vec::new());
        let looks = |peak: &[(u64, u64)], most: u64| {
            let map = arena.map();
            let space = map.spaces.last().unwrap();
            let found: Vec<_> = space.blocks.iter().map(|block| (block.address, block.bytes)).collect();
            assert_eq!((found.as_slice(), space.peak_live_bytes), (peak, most), "seed {seed}");
        };
        for step in 0..2 + next(60) {
            let held: Vec<usize> = (0..live.len()).filter(|index| !live[*index].2).collect();
            match next(8) {
                0..=3 => {
                    let bytes = 512 * (1 + if next(2) == 0 { next(64) } else { next(80_000) });
                    live.push((space.allocate(bytes, A).unwrap().0, bytes, false, false));
                    let now = live.iter().map(|block| block.1).sum();
                    if now > most {
                        most = now;
                        peak = live.iter().map(|block| (block.0, block.1)).collect();
                        peak.sort_unstable();
                    }
                }
                4 if !held.is_empty() => {
                    let block = &mut live[held[next(held.len() as u64) as usize]];
                    space.record_stream(vmmgraph::Address(block.0), Stream::PER_THREAD).unwrap();
                    block.3 = true;
                }
                _ if !held.is_empty() => {
                    let index = held[next(held.len() as u64) as usize];
                    space.free(vmmgraph::Address(live[index].0)).unwrap();
                    live[index].2 = true;
                    if !live[index].3 {
                        live.remove(index);
                    }
                }
                _ => {}
            }
            if step % 16 == 0 {
                looks(&peak, most);
            }
        }
        looks(&peak, most);
        space.seal().unwrap();
        looks(&peak, most);
        live.iter()
            .filter(|block| !block.2)
            .for_each(|block| space.free(vmmgraph::Address(block.0)).unwrap());
        looks(&peak, most);
    }
}

#[test]
fn bump_spaces_show_the_tape_and_it_goes_with_the_longest() {
    let device = device();
    let arena = arena(&device);
    let spaces = [20, 60, 10].map(|mib| {
        let space = arena.open_bump_space().unwrap();
        space.allocate(mib * MIB, A).unwrap();
        let passing = space.allocate(2 * MIB, A).unwrap();
        space.free(passing).unwrap();
        space.seal().unwrap();
        space
    });
    let map = arena.map();
    assert!(map.pages.iter().all(|page| page.class == PageClass::Tape));
    // In a bump space, freed bytes are not reused.
    for (space, mib) in map.spaces.iter().zip([22, 62, 12]) {
        assert_eq!(space.maps.iter().map(|tile| tile.covered_bytes).sum::<u64>(), mib * MIB);
    }
    for (space, told) in spaces.into_iter().zip(&map.spaces) {
        // Each drop frees pages mapped by no later space.
        let gives = arena.map().spaces.iter().find(|now| now.id == told.id).unwrap().drop_gives_bytes;
        let before = arena.mapped_size();
        drop(space);
        arena.trim().unwrap();
        assert_eq!(before - arena.mapped_size(), gives);
    }
    assert_eq!(arena.mapped_size(), 0);
}

#[test]
fn what_tensors_hold_of_a_graph_that_is_gone_is_seen_under_its_label() {
    let device = device();
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    space.set_label("decode 8").unwrap();
    let torch = VmmTorchAllocator::new(&space);
    let output = torch.allocate(3 * MIB, A, false).unwrap();
    let passing = torch.allocate(40 * MIB, A, false).unwrap();
    let kept = torch.allocate(4096, A, true).unwrap();
    torch.free(passing, &[]).unwrap();
    space.seal().unwrap();
    let whole = arena.map();
    agrees(&whole, &arena);
    assert_eq!(whole.spaces[0].drop_gives_bytes, whole.held_bytes, "with all that tensors hold");
    drop(space);
    arena.trim().unwrap();
    let map = arena.map();
    let [left] = &map.spaces[..] else { panic!("{:?}", map.spaces) };
    assert_eq!((left.phase.as_str(), left.label.as_deref()), ("retired", Some("decode 8")));
    assert_eq!(left.live_bytes, 3 * MIB + 4096);
    assert_eq!((left.drop_gives_bytes, map.held_bytes), (arena.mapped_size(), arena.mapped_size()));
    torch.free(output, &[]).unwrap();
    torch.free(kept, &[]).unwrap();
    arena.trim().unwrap();
    // The space owns the persistent block's bytes until its end.
    drop(torch);
    arena.trim().unwrap();
    let map = arena.map();
    assert_eq!((map.spaces.len(), map.held_bytes, arena.mapped_size()), (0, 0, 0));
}

#[test]
fn a_traced_capture_has_every_block_and_its_peak() {
    let trace = load("capture-trace-qwen3-0.6b");
    let device = device();
    let arena = arena(&device);
    let plain = arena.open_space().unwrap();
    arena.trace_events(true);
    let captured = captured(&arena, &trace, false);
    arena.trace_events(false);
    assert!(!plain.traces_events() && captured.values().all(|captured| captured.space.traces_events()));
    let map = arena.map();
    for (space, shape) in map.spaces.iter().filter(|space| space.label.is_some()).zip(&trace.shapes) {
        let blocks = space.events.as_ref().unwrap();
        assert_eq!(blocks.len() as u64, space.allocations);
        let mut changes = BTreeMap::new();
        for block in blocks {
            assert_eq!(changes.insert(block.begin, block.bytes as i64), None);
            assert_eq!(block.end.and_then(|end| changes.insert(end, -(block.bytes as i64))), None);
        }
        assert!(changes.keys().copied().eq(0..shape.events.len() as u64), "one number for each event");
        let live = changes.values().scan(0, |live, change| {
            *live += change;
            Some(*live)
        });
        assert_eq!(live.max().unwrap() as u64, space.peak_live_bytes);
        for block in &space.blocks {
            let same = |traced: &&vmmgraph::TracedBlock| traced.allocation == block.allocation;
            let traced = blocks.iter().find(same).unwrap();
            assert_eq!((traced.address, traced.bytes), (block.address, block.bytes));
        }
    }
    let timeline: serde_json::Value = serde_json::from_str(&map.to_perfetto()).unwrap();
    let events = timeline["traceEvents"].as_array().unwrap();
    let slices: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
    assert_eq!(slices.len(), map.spaces.len());
    let mut end = 0;
    for slice in slices {
        assert_eq!(slice["ts"].as_u64().unwrap(), end);
        end += slice["dur"].as_u64().unwrap();
    }
    let needed = events.iter().rfind(|event| event["name"] == "needed so far").unwrap();
    assert_eq!(needed["args"]["bytes"], map.held_bytes);
}

#[test]
fn others_who_have_memory_of_the_device_are_named() {
    let device = device();
    let (mine, other) = (arena(&device), arena(&device));
    let open = |arena: &SharedVmmAllocator, mib: u64| {
        let space = arena.open_space().unwrap();
        space.allocate(mib * MIB, A).unwrap();
        space.seal().unwrap();
        space
    };
    let _spaces = (open(&mine, 32), open(&other, 48), open(&other, 16));
    let region = device.region("weights", RegionOptions::default()).unwrap();
    region.allocate(64 * MIB, A).unwrap();
    let cache =
        device.elastic_buffer(64 * MIB, &ElasticOptions { name: "kv", ..ElasticOptions::default() }).unwrap();
    cache.commit(0..8 * MIB).unwrap();
    let map = mine.map();
    agrees(&map, &mine);
    let found = |kind: &str| {
        let rows: Vec<_> = map.holders.iter().filter(|holder| holder.kind == kind).collect();
        assert_eq!(rows.len(), 1, "{kind}: {:?}", map.holders);
        (rows[0].name.clone(), rows[0].bytes)
    };
    assert_eq!(found("arena"), (format!("arena {}", other.id()), other.mapped_size()));
    assert!(found("region").0.contains("weights") && found("region").1 == 64 * MIB);
    assert!(found("elastic").0.contains("kv") && found("elastic").1 == 8 * MIB);
    let all: u64 = map.holders.iter().map(|holder| holder.bytes).sum();
    assert_eq!(all + map.held_bytes, device.stats().physical_bytes);
}

#[test]
fn a_map_may_be_taken_while_others_capture_and_drop() {
    let device = device();
    let arena = arena(&device);
    let trace = load("capture-trace-vision");
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    drop(captured(&arena, &trace, false));
                }
            });
        }
        let mut settled = 0;
        for _ in 0..60 {
            let map = arena.map();
            assert_eq!(ArenaMap::from_json(&map.to_json()).as_ref(), Ok(&map));
            assert_eq!(map.held_bytes, bytes(&map, |_| true));
            for space in &map.spaces {
                assert!(space.drop_gives_bytes <= space.shown_bytes && space.shown_bytes <= map.held_bytes);
            }
            assert!(!map.report().is_empty());
            settled += u64::from(map.settled);
        }
        stop.store(true, Ordering::Relaxed);
        println!("{settled} of 60 settled");
    });
    agrees(&arena.map(), &arena);
}

#[test]
fn a_label_is_in_statistics_and_in_what_fails_for_lack_of_memory() {
    let host = HostOptions { memory_bytes: 64 * MIB, ..HostOptions::default() };
    let device = Device::with_driver(Arc::new(HostDriver::new(0, host).unwrap()));
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    assert_eq!(space.label(), None);
    space.set_label("decode 64").unwrap();
    let refused = space.allocate(65 * MIB, A).unwrap_err();
    assert!(matches!(&refused, Error::OutOfMemory { space: Some(label), .. } if label == "decode 64"));
    assert!(refused.to_string().contains("requested by \"decode 64\""), "{refused}");
    arena.set_budget(Some(16 * MIB));
    let refused = space.allocate(40 * MIB, A).unwrap_err();
    assert!(matches!(&refused, Error::OverBudget { space: Some(label), .. } if label == "decode 64"));
    assert!(refused.to_string().contains("requested by \"decode 64\""), "{refused}");
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.spaces[0].label.as_deref(), Some("decode 64"));
    assert!(snapshot.to_string().contains("\"decode 64\"") && snapshot.to_json().contains("decode 64"));
    let long = "x".repeat(1025);
    assert!(matches!(space.set_label(&long), Err(Error::InvalidSize { bytes: 1025, limit: 1024, .. })));
    assert_eq!(space.label().as_deref(), Some("decode 64"));
    space.set_label(&long[1..]).unwrap();
    space.set_label("").unwrap();
    assert_eq!(space.label(), None);
}

#[test]
fn where_a_shape_was_captured_is_on_the_map_and_maps_without_it_are_read() {
    let device = device();
    let arena = arena(&device);
    let space = arena.open_space().unwrap();
    space.allocate(MIB, A).unwrap();
    assert_eq!(arena.map().spaces[0].site, None);
    space.set_site("model.py:120").unwrap();
    let long = "x".repeat(1025);
    assert!(matches!(space.set_site(&long), Err(Error::InvalidSize { bytes: 1025, limit: 1024, .. })));
    let map = arena.map();
    assert_eq!(map.spaces[0].site.as_deref(), Some("model.py:120"));
    assert_eq!(ArenaMap::from_json(&map.to_json()).as_ref(), Ok(&map));
    let older = map.to_json().replace(r#""site":"model.py:120","#, "");
    assert_ne!(older, map.to_json());
    assert_eq!(ArenaMap::from_json(&older).unwrap().spaces[0].site, None);
    space.set_site(&long[1..]).unwrap();
    space.set_site("").unwrap();
    assert_eq!(arena.map().spaces[0].site, None);
}

#[test]
fn what_is_no_map_is_refused_with_the_reason() {
    let arena = arena(&device());
    let space = arena.open_space().unwrap();
    space.allocate(4 * MIB, A).unwrap();
    let json = arena.map().to_json();
    let problem = |text: &str| match ArenaMap::from_json(text) {
        Err(Error::InvalidMap { problem }) => problem,
        other => panic!("{other:?}"),
    };
    assert!(problem("").contains("EOF"));
    assert!(problem("{\"format\": 2}").contains("its format is 2, and this library reads 1"));
    assert!(problem(&json.replace("\"format\":1", "\"format\":7")).contains("its format is 7"));
    assert!(problem(&json.replace("\"page\":0", "\"page\":9")).contains("shows page 9, and there are 1"));
    assert!(
        problem(&json.replace("\"covered_bytes\":4194304", "\"covered_bytes\":99999999")).contains("covers")
    );
    // Impossible numbers must not break later output.
    let most = json.replace(&format!("\"bytes\":{}", 16 * MIB), &format!("\"bytes\":{}", u64::MAX));
    assert!(problem(&most).contains("has 18446744073709551615 bytes"));
    let most = json.replace("_bytes\":4194304", &format!("_bytes\":{}", u64::MAX));
    if let Ok(map) =
        ArenaMap::from_json(&most.replace("\"covered_bytes\":18446744073709551615", "\"covered_bytes\":0"))
    {
        assert!(!map.report().is_empty() && !map.to_html().is_empty() && !map.to_perfetto().is_empty());
    } else {
        panic!("numbers that nothing is added to are anybody's");
    }
}

#[test]
fn the_report_is_a_table_that_fits_a_log() {
    let device = device();
    let arena = arena(&device);
    let spaces = [("prefill 8192", 512), ("prefill 4096", 250), ("decode 64", 40), ("evil\n\tline", 17)].map(
        |(label, mib)| {
            let space = arena.open_space().unwrap();
            space.set_label(label).unwrap();
            let passing = space.allocate(mib * MIB, A).unwrap();
            space.free(passing).unwrap();
            if label == "decode 64" {
                space.allocate(4096, A).unwrap();
            }
            space.seal().unwrap();
            space
        },
    );
    let mut map = arena.map();
    (map.title, map.executables_bytes) = ("golden".to_owned(), Some(3 * MIB));
    (map.arena, map.device_free_bytes) = (1, None);
    map.device_total_bytes = 1024 * MIB;
    let expected = "\
arena 1, golden: 514 MiB held for 4 shapes, 1.004 x the largest shape (512 MiB); apart they need 819 MiB at least
host device 0: 1024 MiB, executables 3 MiB
dropping gives back: prefill 8192 256 MiB, decode 64 2 MiB, other shapes nothing; without the 3 largest shapes: 32 MiB
MiB           pages 0..31                       small retained peak live   mapped    alone drop gives
prefill 8192  ################################      0        -       512      512      256        256
prefill 4096  ###############+................      0        -       250      256        -          -
decode 64     ##+.............................      0        2        40       50        -          2
evil  line    #-..............................      0        -        17       32        -          -
              99755555555555553333333333333333 shapes on a page, in ninths of all; # covered at the peak, + partly, - shown, . not
";
    assert_eq!(map.report(), expected, "\n{}", map.report());
    assert!(map.report().lines().all(|line| line.chars().count() < 140));
    drop(spaces);
    arena.trim().unwrap();
    assert!(arena.map().report().starts_with(&format!("arena {}: - MiB held for 0 shapes", arena.id())));
}

#[test]
fn a_paused_arena_holds_nothing_and_its_map_says_what_comes_back() {
    let device = device();
    let arena = arena(&device);
    let trace = load("capture-trace-qwen3-0.6b");
    let captured = captured(&arena, &trace, false);
    let before = arena.map();
    arena.pause(Fence::default()).unwrap().complete().unwrap();
    let paused = arena.map();
    assert_eq!((paused.held_bytes, arena.stats().physical_bytes), (0, 0));
    assert!(paused.pages.iter().all(|page| page.absent));
    assert_eq!(bytes(&paused, |_| true), before.held_bytes);
    let drops =
        |map: &ArenaMap| -> Vec<u64> { map.spaces.iter().map(|space| space.drop_gives_bytes).collect() };
    assert_eq!((drops(&paused), &paused.curve), (drops(&before), &before.curve));
    assert!(paused.report().contains("paused: "), "{}", paused.report());
    let other = SharedVmmAllocator::new(&device, &Options::default()).unwrap();
    assert!(other.map().holders.iter().all(|holder| holder.kind != "arena"));
    assert_eq!(ArenaMap::from_json(&paused.to_json()).unwrap(), paused);
    arena.resume(std::time::Duration::ZERO).unwrap();
    assert_eq!(arena.map().held_bytes, before.held_bytes);
    drop(captured);
}

#[test]
fn what_eager_work_leaves_alive_is_on_the_map_until_it_is_freed() {
    let device = device();
    let arena = arena(&device);
    let trace = load("capture-trace-qwen3-0.6b");
    let captured = captured(&arena, &trace, false);
    let before = arena.map();
    let scope = arena.eager_scope(A).unwrap();
    let (alive, gone) = (scope.allocate(40 * MIB).unwrap(), scope.allocate(3 * MIB).unwrap());
    scope.free(gone).unwrap();
    let blocks = scope.blocks();
    drop(scope);
    for at in captured.values() {
        at.space.replay(A, || ()).unwrap();
    }
    let with = arena.map();
    assert_eq!(with.held_bytes, arena.stats().physical_bytes);
    assert!(with.held_bytes >= before.held_bytes + 40 * MIB);
    assert_eq!(with.spaces.len(), before.spaces.len());
    // Eager results change no prediction of a drop.
    let shown = |map: &ArenaMap| -> Vec<u64> { map.spaces.iter().map(|space| space.shown_bytes).collect() };
    assert_eq!(shown(&with), shown(&before));
    assert_eq!(ArenaMap::from_json(&with.to_json()).unwrap(), with);
    assert!(with.to_html().contains("</html>"));
    blocks.free(alive, &[]).unwrap();
    arena.trim().unwrap();
    assert_eq!(arena.map().held_bytes, arena.stats().physical_bytes);
}

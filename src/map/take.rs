//! Takes a page map without stopping the arena: each space under its own lock, then the pool once.
//! If anything changed in between, the read is repeated a few times.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::{ArenaMap, MAP_FORMAT, MapBlock, MapHolder, MapPage, MapSpace, MapTile, PageClass};
use crate::pages::{Class, Other, Owner, PageId, PageName, RangeId, SurveyedPage};
use crate::space::{Common, Core, Phase, Picture, Spot};

/// Attempts while the arena changes.
const TRIES: u32 = 4;

pub(crate) fn take(common: &Common, floor_bytes: u64) -> ArenaMap {
    let pool = common.pool();
    let (mut tries, mut before) = (0, pool.stats());
    let (pictures, survey, names, settled) = loop {
        let pictures = pictures(common);
        let (survey, names) = (pool.survey(common.shared.arena()), common.shared.names());
        let after = pool.stats();
        tries += 1;
        if before == after || tries == TRIES {
            break (pictures, survey, names, before == after);
        }
        before = after;
    };
    let (info, geometry) = (pool.driver().info(), common.shared.geometry());
    let mut map = ArenaMap {
        format: MAP_FORMAT,
        title: String::new(),
        driver: info.platform.to_owned(),
        device: info.ordinal,
        device_name: info.name.clone(),
        device_total_bytes: info.total_bytes,
        device_free_bytes: pool.driver().free_bytes().ok(),
        arena: common.shared.arena(),
        settled,
        small_page_bytes: geometry.small(),
        large_page_bytes: geometry.large(),
        held_bytes: 0,
        floor_bytes,
        apart_bytes: 0,
        budget_bytes: common.shared.account().stats().most_bytes,
        executables_bytes: None,
        pages: Vec::new(),
        spaces: Vec::new(),
        curve: Vec::new(),
        holders: holders(survey.others),
    };
    let slabs = pictures.iter().map(|picture| picture.slabs).max().unwrap_or(0);
    let pages = named(survey.pages, &names, slabs as u64);
    map.spaces = spaces(pictures, &pages);
    map.pages = pages.into_iter().map(|(page, _)| page).collect();
    map.sum();
    map
}

/// Pictures in the order of opening, including retired spaces with live blocks.
fn pictures(common: &Common) -> Vec<Picture> {
    let living = common.registry.spaces();
    let mut cores: Vec<Arc<Core>> = living.iter().map(|space| Arc::clone(space.core())).collect();
    cores.extend(common.registry.retired());
    let mut pictures: Vec<Picture> = cores.iter().map(|core| core.picture()).collect();
    pictures.sort_unstable_by_key(|picture| picture.id);
    // A graph may have been destroyed between the two lists.
    pictures.dedup_by_key(|picture| picture.id);
    pictures
}

/// Map pages in order, each with its mappings.
fn named(
    pages: Vec<SurveyedPage>,
    names: &HashMap<PageId, PageName>,
    slabs: u64,
) -> Vec<(MapPage, SurveyedPage)> {
    let mut named: Vec<_> =
        pages.into_iter().map(|page| (class_and_number(&page, names, slabs), page)).collect();
    // By address, so that equal captures give equal maps.
    named.sort_by_key(|(name, page)| (*name, page.shown.iter().map(|(_, at)| *at).min()));
    let mut counts: HashMap<PageClass, u64> = HashMap::new();
    let numbered = named.into_iter().map(|((class, number), page)| {
        let count = counts.entry(class).or_insert(0);
        let counted = *count;
        *count += 1;
        let number = match class {
            PageClass::Large | PageClass::Slab | PageClass::Filler => number,
            _ => counted,
        };
        let owner = match page.owner {
            Owner::Retained { space, .. } => Some(space),
            _ => None,
        };
        // Addresses of the arena, equal for all spaces.
        let common = matches!(class, PageClass::Kept | PageClass::Exclusive);
        let address = page.shown.first().filter(|_| common).map(|(_, at)| at.0);
        let (bytes, absent, lease) = (page.bytes, page.non_resident, page.lease);
        (MapPage { class, number, bytes, owner, address, spaces: 0, absent, lease }, page)
    });
    numbered.collect()
}

fn class_and_number(page: &SurveyedPage, names: &HashMap<PageId, PageName>, slabs: u64) -> (PageClass, u64) {
    match (page.owner, names.get(&page.id)) {
        (Owner::Retained { space, .. }, _) => (PageClass::Own, space),
        (Owner::Kept { .. }, _) => (PageClass::Kept, 0),
        (Owner::Exclusive { .. }, _) => (PageClass::Exclusive, 0),
        (_, Some(PageName::Tape(at))) => (PageClass::Tape, *at),
        (_, Some(PageName::Number(no))) => {
            let number = u64::from(no.index);
            match no.class {
                Class::Large => (PageClass::Large, number),
                Class::Small if number < slabs => (PageClass::Slab, number),
                Class::Small => (PageClass::Filler, number),
            }
        }
        (_, None) => (PageClass::Spare, 0),
    }
}

fn spaces(pictures: Vec<Picture>, pages: &[(MapPage, SurveyedPage)]) -> Vec<MapSpace> {
    let ranges = pictures.iter().enumerate();
    let ranges = ranges.flat_map(|(index, picture)| picture.ranges.iter().map(move |range| (*range, index)));
    let of_range: HashMap<RangeId, usize> = ranges.collect();
    let mut tiles: Vec<Vec<(u64, usize)>> = vec![Vec::new(); pictures.len()];
    let mut kept_at = BTreeMap::new();
    for (number, (page, surveyed)) in pages.iter().enumerate() {
        for (range, at) in &surveyed.shown {
            match of_range.get(range) {
                Some(space) => tiles[*space].push((at.0, number)),
                None if page.class == PageClass::Kept => {
                    kept_at.insert(at.0, number);
                }
                // A space opened or destroyed in the meantime.
                None => {}
            }
        }
    }
    let each = pictures.into_iter().zip(tiles);
    each.map(|(picture, mut tiles)| {
        tiles.sort_unstable();
        space(picture, &tiles, &kept_at, pages)
    })
    // An allocator may hold a space without memory.
    .filter(|space| {
        space.phase != phase(Phase::Retired) || !(space.maps.is_empty() && space.kept_pages.is_empty())
    })
    .collect()
}

fn space(
    picture: Picture,
    tiles: &[(u64, usize)],
    kept_at: &BTreeMap<u64, usize>,
    pages: &[(MapPage, SurveyedPage)],
) -> MapSpace {
    let bytes = |number: usize| pages[number].0.bytes;
    let mut maps = Vec::with_capacity(tiles.len());
    for (address, number) in tiles {
        let end = address + bytes(*number);
        // Spots are sorted and disjoint, so their ends are sorted too.
        let first = picture.peak.partition_point(|spot| spot.address.0 + spot.bytes <= *address);
        let inside = picture.peak[first..].iter().take_while(|spot| spot.address.0 < end);
        let covered =
            inside.map(|spot| (spot.address.0 + spot.bytes).min(end) - spot.address.0.max(*address));
        maps.push(MapTile { page: *number as u64, address: *address, covered_bytes: covered.sum() });
    }
    let mut kept_pages: Vec<u64> = Vec::new();
    for spot in &picture.kept {
        let (from, to) = (spot.address.0, spot.address.0 + spot.bytes);
        let before = kept_at.range(..=from).next_back().filter(|(at, page)| *at + bytes(**page) > from);
        let behind = kept_at.range(from + 1..to.max(from + 1));
        kept_pages.extend(before.into_iter().chain(behind).map(|(_, page)| *page as u64));
    }
    kept_pages.sort_unstable();
    kept_pages.dedup();
    let blocks = |spots: Vec<Spot>| -> Vec<MapBlock> {
        let block = |Spot { address, bytes, allocation }| MapBlock { address: address.0, bytes, allocation };
        spots.into_iter().map(block).collect()
    };
    MapSpace {
        id: picture.id,
        label: picture.label,
        site: picture.site,
        phase: phase(picture.phase).to_owned(),
        allocations: picture.allocations,
        live_bytes: picture.live_bytes,
        peak_live_bytes: picture.peak_live_bytes,
        kept_bytes: picture.kept_bytes,
        mapped_bytes: picture.mapped_bytes,
        shown_bytes: 0,
        retained_bytes: 0,
        alone_bytes: 0,
        drop_gives_bytes: 0,
        maps,
        blocks: blocks(picture.peak),
        kept: blocks(picture.kept),
        kept_pages,
        events: picture.events,
    }
}

fn phase(phase: Phase) -> &'static str {
    match phase {
        Phase::Open => "open",
        Phase::Sealed => "sealed",
        Phase::Retired => "retired",
        Phase::Broken => "broken",
    }
}

fn holders(others: Vec<Other>) -> Vec<MapHolder> {
    let mut rows: BTreeMap<(&'static str, String), (u64, u64)> = BTreeMap::new();
    for Other { owner, name, pages, bytes } in others {
        let kind = match owner {
            Owner::Shared { .. } | Owner::Retained { .. } | Owner::Kept { .. } | Owner::Exclusive { .. } => {
                "arena"
            }
            Owner::Region { .. } => "region",
            Owner::Elastic { .. } => "elastic",
            Owner::Ring { .. } => "ring",
            Owner::Workspace { .. } => "workspaces",
            Owner::Exported => "exported",
            Owner::Free => "free",
            Owner::Leaving => "leaving",
        };
        let row = rows.entry((kind, name)).or_default();
        *row = (row.0 + pages, row.1 + bytes);
    }
    let row = |((kind, name), (pages, bytes)): ((&str, String), _)| MapHolder {
        kind: kind.to_owned(),
        name,
        pages,
        bytes,
    };
    let mut rows: Vec<MapHolder> = rows.into_iter().map(row).collect();
    rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
    rows
}

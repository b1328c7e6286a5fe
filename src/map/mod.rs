//! Page map: the mapped pages of every graph of an arena, and the bytes freed by dropping each
//! graph. See docs/map.md.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::space::TracedBlock;
use crate::stats::to_json;

mod check;
mod html;
mod perfetto;
mod report;
mod sums;
mod take;

pub(crate) use take::take;

/// Version of the format.
pub const MAP_FORMAT: u64 = 1;

/// Use of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageClass {
    /// Large shared page: most blocks.
    Large,
    /// Part of the tape mapped by bump spaces.
    Tape,
    /// Small shared page for small blocks.
    Slab,
    /// Small shared page next to live-out blocks.
    Filler,
    /// Shared page formerly owned by a space, without number.
    Spare,
    /// Page of one space, under its live-out (retained) blocks.
    Own,
    /// Page of persistent (kept) blocks of any spaces.
    Kept,
    /// Page of a private (exclusive) block, used by no space.
    Exclusive,
}

/// A physical page of the arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPage {
    /// Use of the page.
    pub class: PageClass,
    /// Number within the class. For large pages, slabs and fillers, the number requested by spaces.
    pub number: u64,
    /// Bytes of the page.
    pub bytes: u64,
    /// Owning space, for a page of class [`Own`](PageClass::Own).
    pub owner: Option<u64>,
    /// Address of a page of kept or exclusive blocks.
    pub address: Option<u64>,
    /// Number of spaces which need the page. 0: an exclusive block's page, or about to be freed.
    pub spaces: u64,
    /// The arena is paused and the page non-resident: not counted as held.
    #[serde(default)]
    pub absent: bool,
    /// Lease of the page: spaces which need it cannot replay.
    #[serde(default)]
    pub lease: Option<u64>,
}

/// A page mapped at an address of a space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapTile {
    /// Index in [`ArenaMap::pages`].
    pub page: u64,
    /// Address of the page's first byte.
    pub address: u64,
    /// Bytes covered by live blocks at the space's peak.
    pub covered_bytes: u64,
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapBlock {
    /// Address.
    pub address: u64,
    /// Bytes, rounded up to 512.
    pub bytes: u64,
    /// Position in the space's allocations.
    pub allocation: u64,
}

/// A space: the addresses of one captured graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapSpace {
    /// Number; later captures have larger ones.
    pub id: u64,
    /// Label set by the owner.
    pub label: Option<String>,
    /// Source location of the capture: "model.py:120".
    #[serde(default)]
    pub site: Option<String>,
    /// "open", "sealed", "retired" (the graph is destroyed and some block still live) or "broken".
    pub phase: String,
    /// Number of allocated blocks in total.
    pub allocations: u64,
    /// Bytes of live blocks at present.
    pub live_bytes: u64,
    /// Maximum bytes of live blocks.
    pub peak_live_bytes: u64,
    /// Bytes of kept blocks, part of live_bytes.
    pub kept_bytes: u64,
    /// Bytes of mapped addresses.
    pub mapped_bytes: u64,
    /// Bytes of the needed pages.
    pub shown_bytes: u64,
    /// Bytes of its own pages.
    pub retained_bytes: u64,
    /// Bytes of shared pages needed by no other space.
    pub alone_bytes: u64,
    /// Bytes freed by dropping the space and all its blocks.
    pub drop_gives_bytes: u64,
    /// Mappings, in address order.
    pub maps: Vec<MapTile>,
    /// Blocks live at the peak; in a bump space, all blocks.
    pub blocks: Vec<MapBlock>,
    /// Kept blocks, on the arena's kept pages.
    pub kept: Vec<MapBlock>,
    /// Indices in [`ArenaMap::pages`] of these blocks.
    pub kept_pages: Vec<u64>,
    /// All blocks of the capture, if traced.
    pub events: Option<Vec<TracedBlock>>,
}

/// A point of the curve.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPoint {
    /// Space added at this point, largest first.
    pub space: u64,
    /// Bytes needed by this space and all earlier ones.
    pub with_bytes: u64,
    /// Bytes needed by the remaining spaces.
    pub without_bytes: u64,
}

/// Another owner of memory in the device's pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapHolder {
    /// "arena", "region", "elastic", "ring", "workspaces", "exported", "free" or "leaving" (refused
    /// by the driver).
    pub kind: String,
    /// Name of the owner.
    pub name: String,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
}

/// Map of an arena. Sizes are bytes; JSON keys are the field names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArenaMap {
    /// Format version: [`MAP_FORMAT`].
    pub format: u64,
    /// Title set by the caller.
    pub title: String,
    /// Platform name.
    pub driver: String,
    /// Device number.
    pub device: i32,
    /// Device name.
    pub device_name: String,
    /// Total bytes of the device.
    pub device_total_bytes: u64,
    /// Free bytes by the driver.
    pub device_free_bytes: Option<u64>,
    /// Number of the arena.
    pub arena: u64,
    /// Whether nothing changed while the map was taken. Otherwise the blocks may be of a later
    /// moment than the pages.
    pub settled: bool,
    /// Bytes of a small page.
    pub small_page_bytes: u64,
    /// Bytes of a large page.
    pub large_page_bytes: u64,
    /// Bytes of all pages of the arena.
    pub held_bytes: u64,
    /// Lower bound: peak bytes of the largest space.
    pub floor_bytes: u64,
    /// Sum of the spaces' peaks: lower bound with separate memory.
    pub apart_bytes: u64,
    /// Byte budget of the arena.
    pub budget_bytes: Option<u64>,
    /// Device bytes of executables, not in the pool.
    pub executables_bytes: Option<u64>,
    /// Pages, by class and number.
    pub pages: Vec<MapPage>,
    /// Spaces, in the order of opening.
    pub spaces: Vec<MapSpace>,
    /// One point per space, largest first.
    pub curve: Vec<MapPoint>,
    /// Other owners of memory in the pool.
    pub holders: Vec<MapHolder>,
}

impl ArenaMap {
    /// Returns the map as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }

    /// Reads a map from JSON. Unknown keys are ignored.
    ///
    /// # Errors
    /// [`Error::InvalidMap`]: invalid JSON, another format, or an invalid index.
    pub fn from_json(text: &str) -> Result<Self> {
        let invalid = |problem: String| Error::InvalidMap { problem };
        let map: Self = match serde_json::from_str(text) {
            Ok(map) => map,
            Err(error) => {
                let format = check::format_of(text).filter(|format| *format != MAP_FORMAT);
                return Err(format.map_or_else(|| invalid(error.to_string()), check::other_format));
            }
        };
        map.check()?;
        Ok(map)
    }
}

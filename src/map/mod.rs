//! The page map: which graph shows which page of an arena, and what dropping a graph gives back. Data, JSON, a page to look at, a table
//! for logs.
//!
//! ```text
//!   take      from an arena as it is now: pages from the pool, blocks from the spaces
//!   sums      what follows from that: shown, alone, given back, the curve
//!   check     of a map that was read from JSON
//!   report    a table for logs            html     one file, which needs nothing else
//!   perfetto  what a timeline viewer opens
//! ```

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

/// The version of the format.
pub const MAP_FORMAT: u64 = 1;

/// What a page is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PageClass {
    /// A large shared page: most blocks.
    Large,
    /// A stretch of the tape that bump spaces show.
    Tape,
    /// A small shared page for small blocks.
    Slab,
    /// A small shared page beside retained blocks, where only blocks that are freed were.
    Filler,
    /// A shared page that was a space's own once; no number.
    Spare,
    /// One space's own, under what it retained.
    Own,
    /// Blocks that were said to be kept, of any spaces.
    Kept,
    /// An exclusive block, which no space needs.
    Exclusive,
}

/// A physical page of the arena.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPage {
    /// What it is for.
    pub class: PageClass,
    /// Its number within its class, from 0. Those of large pages, slabs and fillers are what spaces ask for: the same requests, the same
    /// numbers. Others are counted as they are found.
    pub number: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The space that it belongs to, if it is one's own.
    pub owner: Option<u64>,
    /// Where it lies for all spaces, if it is for kept blocks or an exclusive one; others have addresses in each space.
    pub address: Option<u64>,
    /// How many spaces need it; 0: it is an exclusive block's, or goes as soon as the device is done with what is gone.
    pub spaces: u64,
    /// Its arena is paused, and it has no memory: it counts for what spaces need, and not for what is held.
    #[serde(default)]
    pub absent: bool,
    /// The lease that it is on, at its borrower's addresses too: the spaces that need it are not replayed until that is over.
    #[serde(default)]
    pub lease: Option<u64>,
}

/// A page at an address of a space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapTile {
    /// Index in [`ArenaMap::pages`].
    pub page: u64,
    /// The address; the page lies there as a whole.
    pub address: u64,
    /// How many of its bytes were under live blocks at the space's peak. A page that shows at several addresses has its blocks at one
    /// of them each.
    pub covered_bytes: u64,
}

/// A block.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapBlock {
    /// Its address.
    pub address: u64,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// It was the space's n-th, from 1.
    pub allocation: u64,
}

/// A space: one captured shape.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapSpace {
    /// Its number, unique in the process; later captures have larger ones.
    pub id: u64,
    /// What its owner calls it.
    pub label: Option<String>,
    /// Where in the owner's program it was captured, if the owner said so: "model.py:120".
    #[serde(default)]
    pub site: Option<String>,
    /// "open", "sealed", "retired" (its graph is gone and somebody has a block of it) or "broken".
    pub phase: String,
    /// Blocks that were allocated in all.
    pub allocations: u64,
    /// Bytes of blocks that are live now.
    pub live_bytes: u64,
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Of the live bytes, those of kept blocks.
    pub kept_bytes: u64,
    /// Bytes of addresses with a page behind them; a page that shows n times counts n times.
    pub mapped_bytes: u64,
    /// Bytes of the pages that it needs, each counted once.
    pub shown_bytes: u64,
    /// Bytes of its own pages.
    pub retained_bytes: u64,
    /// Bytes of shared pages that no other space needs.
    pub alone_bytes: u64,
    /// Bytes that nobody needs any more when the space and all its blocks are gone: those alone, its own ones, and kept pages on which
    /// nobody else has a block.
    pub drop_gives_bytes: u64,
    /// The pages at its addresses, in address order.
    pub maps: Vec<MapTile>,
    /// The blocks that were live at its peak, in address order; in a bump space all that were handed out.
    pub blocks: Vec<MapBlock>,
    /// Its kept blocks, on the arena's kept pages.
    pub kept: Vec<MapBlock>,
    /// The kept pages that those are on, as indices in [`ArenaMap::pages`].
    pub kept_pages: Vec<u64>,
    /// Every block of its capture, in order, if that was traced.
    pub events: Option<Vec<TracedBlock>>,
}

/// A point of the curve: what the hungriest spaces need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapPoint {
    /// The space with which it is reached: they come by the bytes of the pages that they need, the hungriest first.
    pub space: u64,
    /// Bytes that it and those before it need together.
    pub with_bytes: u64,
    /// Bytes that the others need together, once it and those before it are gone.
    pub without_bytes: u64,
}

/// Whoever else has memory of the device's pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MapHolder {
    /// "arena", "region", "elastic", "ring", "workspaces", "free" (of the pool: whoever asks next gets it) or "leaving" (the driver would not take it back).
    pub kind: String,
    /// What it is called.
    pub name: String,
    /// Its pages.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// An arena as one can see it: pages, the spaces that show them, and who else has memory of the device.
///
/// Sizes are bytes, addresses the device's. In JSON the keys are the field names.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ArenaMap {
    /// The version of this format: [`MAP_FORMAT`].
    pub format: u64,
    /// A line of the caller's: which engine, which rank.
    pub title: String,
    /// The platform's name.
    pub driver: String,
    /// The device's number.
    pub device: i32,
    /// The device's name.
    pub device_name: String,
    /// The device's bytes.
    pub device_total_bytes: u64,
    /// Those that the driver calls free; `None` if it did not say.
    pub device_free_bytes: Option<u64>,
    /// The arena's number.
    pub arena: u64,
    /// Whether nothing moved while the map was taken. Pages, and all that follows from them, are of one moment in any case; what
    /// blocks covered may then be of a later one.
    pub settled: bool,
    /// Bytes of a small page.
    pub small_page_bytes: u64,
    /// Bytes of a large page.
    pub large_page_bytes: u64,
    /// Bytes of all pages of the arena.
    pub held_bytes: u64,
    /// The most that any one space has needed at a time: no arena for these captures could hold less.
    pub floor_bytes: u64,
    /// What the spaces' peaks come to: the least that they would take with memory of their own each.
    pub apart_bytes: u64,
    /// The arena's budget.
    pub budget_bytes: Option<u64>,
    /// What executables took of the device, if the caller knows: no page of the pool.
    pub executables_bytes: Option<u64>,
    /// The pages, by class and number.
    pub pages: Vec<MapPage>,
    /// The spaces, in the order they were opened.
    pub spaces: Vec<MapSpace>,
    /// A point for each space, the hungriest first.
    pub curve: Vec<MapPoint>,
    /// Who else has memory of the pool.
    pub holders: Vec<MapHolder>,
}

impl ArenaMap {
    /// The map as one JSON object.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }

    /// A map from its JSON text. Keys that this version does not know are dropped.
    ///
    /// # Errors
    /// [`Error::InvalidMap`] says what is wrong: no such JSON, another format, an index that leads nowhere.
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

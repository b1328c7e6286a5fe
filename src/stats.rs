//! Snapshots of what is held, as plain data and as JSON text.

use std::fmt;

use serde::Serialize;

use crate::pages::{AccountStats, Holder, Holding, PoolStats};
use crate::space::SpaceStats;

/// What one arena holds. Every number is kept as it changes, so that asking costs the same with any number of spaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ArenaStats {
    /// The arena's number, unique in the process.
    pub id: u64,
    /// Bytes of physical memory: shared, retained, kept and exclusive pages.
    pub physical_bytes: u64,
    /// Bytes of shared pages. What no space maps is not the arena's any more, but free on the device.
    pub shared_bytes: u64,
    /// Shared pages.
    pub shared_pages: u64,
    /// Bytes of pages that belong to single spaces.
    pub retained_bytes: u64,
    /// Bytes of pages for kept blocks.
    pub kept_bytes: u64,
    /// Bytes of exclusive blocks, which are no blocks of a space.
    pub exclusive_bytes: u64,
    /// Of the shared bytes, those that are on lease.
    pub lent_bytes: u64,
    /// What counts toward the arena's budget, and the budget.
    pub account: AccountStats,
    /// Bytes of addresses reserved by its spaces.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them; a page that shows n times counts n times.
    pub mapped_bytes: u64,
    /// Bytes of live blocks, rounded up to 512 each.
    pub live_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// The most bytes that any one space has needed: live at once, or handed out in a bump space.
    pub high_water_bytes: u64,
    /// Spaces that are there.
    pub spaces: u64,
    /// Replays that were launched.
    pub replays: u64,
    /// Whether it is paused: then it holds no bytes but those of exclusive blocks and those that could not go.
    pub paused: bool,
}

/// An arena and the device under it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The platform's name.
    pub driver: &'static str,
    /// The device's number.
    pub device: i32,
    /// The device's name.
    pub device_name: String,
    /// The device's page pool, which other arenas may draw from too.
    pub pool: PoolStats,
    /// Who holds the pool's pages, all arenas and spaces of the device.
    pub holders: Vec<Holding>,
    /// The arena.
    pub arena: ArenaStats,
    /// Its spaces, in the order they were opened.
    pub spaces: Vec<SpaceStats>,
}

impl Snapshot {
    /// The snapshot as one JSON object, its keys the field names above.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

/// A value of plain structs of numbers and strings, which always has a JSON form.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Who holds what, a line each, for people.
impl fmt::Display for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (pool, arena) = (&self.pool, &self.arena);
        writeln!(
            f,
            "{} device {} ({}): {} bytes in {} pages ({} created, {} given back), {} mappings, {} bytes of addresses, {} pending",
            self.driver,
            self.device,
            self.device_name,
            pool.physical_bytes,
            pool.pages,
            pool.pages_created,
            pool.pages_released,
            pool.mappings,
            pool.reserved_bytes,
            pool.pending
        )?;
        for held in &self.holders {
            let Holding { pages, bytes, mappings, .. } = held;
            match held.holder {
                Holder::Shared { arena } => write!(f, "  arena {arena}, shared")?,
                Holder::Retained { arena, space } => write!(f, "  arena {arena}, space {space}, retained")?,
                Holder::Kept { arena } => write!(f, "  arena {arena}, kept")?,
                Holder::Exclusive { arena } => write!(f, "  arena {arena}, exclusive")?,
                Holder::Region { region } => write!(f, "  region {region}")?,
                Holder::Elastic { buffer } => write!(f, "  elastic buffer {buffer}")?,
                Holder::Ring { ring } => write!(f, "  ring {ring}")?,
                Holder::Workspace { group } => write!(f, "  workspaces {group}")?,
                Holder::Exported => write!(f, "  other processes")?,
                Holder::Free => write!(f, "  free")?,
                Holder::Leaving => write!(f, "  refused by the driver")?,
            }
            writeln!(f, ": {bytes} bytes in {pages} pages, {mappings} mappings")?;
        }
        write!(
            f,
            "arena {}: {} blocks of {} bytes in {} spaces",
            arena.id, arena.blocks, arena.live_bytes, arena.spaces
        )?;
        if arena.lent_bytes > 0 {
            write!(f, ", {} bytes on lease", arena.lent_bytes)?;
        }
        match arena.account.most_bytes {
            Some(budget) => writeln!(f, ", {} of {budget} bytes of its budget", arena.account.charged_bytes)?,
            None => writeln!(f)?,
        }
        for space in &self.spaces {
            write!(f, "  space {}", space.id)?;
            if let Some(label) = &space.label {
                write!(f, " {label:?}")?;
            }
            writeln!(
                f,
                " ({:?}): {} blocks of {} bytes, peak {}, {} bytes mapped by {} maps, {} retained",
                space.phase,
                space.blocks,
                space.live_bytes,
                space.peak_live_bytes,
                space.mapped_bytes,
                space.maps,
                space.retained_bytes
            )?;
        }
        Ok(())
    }
}

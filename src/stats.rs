//! Snapshots of what is held, as plain data and as JSON text.

use std::fmt;

use serde::Serialize;

use crate::driver::DriverKind;
use crate::pages::{Holding, Owner, PoolStats, SharedStats};
use crate::space::SpaceStats;

/// What one arena holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ArenaStats {
    /// The arena's number, unique in the process.
    pub id: u64,
    /// Bytes of physical memory: shared and retained pages.
    pub physical_bytes: u64,
    /// The shared pages.
    pub shared: SharedStats,
    /// Bytes of pages that belong to single spaces.
    pub retained_bytes: u64,
    /// Bytes that count toward the budget: all of those, and pages that are being created or given back, or that nobody wants any more
    /// and the driver does not have yet.
    pub charged_bytes: u64,
    /// The byte budget; `None`: none.
    pub budget_bytes: Option<u64>,
    /// Bytes of addresses reserved.
    pub reserved_bytes: u64,
    /// Bytes of addresses with a page behind them; a page that shows n times counts n times.
    pub mapped_bytes: u64,
    /// Bytes of live blocks, rounded up to 512 each.
    pub live_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// The most bytes that were live at once in any one space.
    pub high_water_bytes: u64,
    /// Every space.
    pub spaces: Vec<SpaceStats>,
}

/// An arena and the device under it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// The driver.
    pub driver: DriverKind,
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
            let Holding { pages, bytes, free_bytes, mappings, .. } = held;
            match held.owner {
                Owner::Shared { arena } => write!(f, "  arena {arena}, shared")?,
                Owner::Retained { arena, space } => write!(f, "  arena {arena}, space {space}, retained")?,
                Owner::Doomed { arena } => write!(f, "  arena {arena}, wanted by nobody")?,
            }
            writeln!(
                f,
                ": {bytes} bytes in {pages} pages, {mappings} mappings, {free_bytes} bytes mapped nowhere"
            )?;
        }
        write!(
            f,
            "arena {}: {} blocks of {} bytes in {} spaces",
            arena.id,
            arena.blocks,
            arena.live_bytes,
            arena.spaces.len()
        )?;
        match arena.budget_bytes {
            Some(budget) => writeln!(f, ", {} of {budget} bytes of its budget", arena.charged_bytes)?,
            None => writeln!(f)?,
        }
        for space in &arena.spaces {
            writeln!(
                f,
                "  space {} ({:?}): {} blocks of {} bytes, peak {}, {} bytes mapped by {} maps, {} retained",
                space.id,
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

use std::fmt;

use serde::Serialize;

use crate::pages::{AccountStats, OwnedPages, Owner, PoolStats};
use crate::space::SpaceStats;

/// Statistics of one arena, maintained incrementally.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct ArenaStats {
    /// Number of the arena.
    pub id: u64,
    /// Bytes of shared, retained, kept and exclusive pages.
    pub physical_bytes: u64,
    /// Bytes of shared pages.
    pub shared_bytes: u64,
    /// Shared pages.
    pub shared_pages: u64,
    /// Bytes of pages owned by single spaces.
    pub retained_bytes: u64,
    /// Bytes of pages for persistent (kept) blocks.
    pub kept_bytes: u64,
    /// Bytes of private (exclusive) blocks.
    pub exclusive_bytes: u64,
    /// Bytes on lease, part of shared_bytes.
    pub lent_bytes: u64,
    /// Charge and budget.
    pub account: AccountStats,
    /// Bytes of addresses reserved by the arena's spaces.
    pub reserved_bytes: u64,
    /// Bytes of mapped addresses.
    pub mapped_bytes: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Maximum bytes of any one space: live at once, or handed out in a bump space.
    pub high_water_bytes: u64,
    /// Number of spaces.
    pub spaces: u64,
    /// Launched replays.
    pub replays: u64,
    /// Whether the arena is paused.
    pub paused: bool,
}

/// An arena and its device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Platform name.
    pub driver: &'static str,
    /// Device number.
    pub device: i32,
    /// Device name.
    pub device_name: String,
    /// The device's page pool.
    pub pool: PoolStats,
    /// Owners of the pool's pages, over all arenas and spaces.
    #[serde(rename = "holders")]
    pub owners: Vec<OwnedPages>,
    /// The arena.
    pub arena: ArenaStats,
    /// Spaces of the arena.
    pub spaces: Vec<SpaceStats>,
}

impl Snapshot {
    /// Returns the snapshot as JSON; keys are field names.
    #[must_use]
    pub fn to_json(&self) -> String {
        to_json(self)
    }
}

/// Plain structs of numbers and strings cannot fail.
pub(crate) fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// One line per owner.
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
        for held in &self.owners {
            let OwnedPages { pages, bytes, mappings, .. } = held;
            match held.owner {
                Owner::Shared { arena } => write!(f, "  arena {arena}, shared")?,
                Owner::Retained { arena, space } => write!(f, "  arena {arena}, space {space}, retained")?,
                Owner::Kept { arena } => write!(f, "  arena {arena}, kept")?,
                Owner::Exclusive { arena } => write!(f, "  arena {arena}, exclusive")?,
                Owner::Region { region } => write!(f, "  region {region}")?,
                Owner::Elastic { buffer } => write!(f, "  elastic buffer {buffer}")?,
                Owner::Ring { ring } => write!(f, "  ring {ring}")?,
                Owner::Workspace { group } => write!(f, "  workspaces {group}")?,
                Owner::Exported => write!(f, "  other processes")?,
                Owner::Free => write!(f, "  free")?,
                Owner::Leaving => write!(f, "  refused by the driver")?,
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

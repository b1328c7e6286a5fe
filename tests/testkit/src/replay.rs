//! Capturing a trace into spaces, and replaying it with real contents.
//!
//! A replay stamps each block where the trace allocates it and checks the stamp where the trace frees it, at the addresses of the
//! capture. Whatever else wrote to the block's memory in between is seen.

use std::collections::HashSet;
use std::sync::Arc;

use vmmgraph::driver::SharedDriver;
use vmmgraph::{Address, Result, SealReport, SharedVmmAllocator, Space, Stream};

use crate::trace::{Event, Shape};

/// A captured shape.
#[derive(Debug)]
pub struct Captured {
    /// Its space, sealed.
    pub space: Arc<Space>,
    /// Address and bytes of every block, by id.
    pub blocks: Vec<(Address, u64)>,
    /// What the capture used.
    pub report: SealReport,
    /// Mappings made after each event.
    pub maps_after: Vec<u64>,
}

/// What replaying found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Blocks checked.
    pub blocks: u64,
    /// Blocks whose stamp was damaged before they were freed.
    pub wrong: u64,
}

/// Captures one shape: a space, the trace's allocations and frees on one stream, and the seal.
///
/// # Errors
/// What the library says; the space is dropped then.
pub fn capture(arena: &SharedVmmAllocator, shape: &Shape, stream: Stream) -> Result<Captured> {
    capture_with(arena, shape, stream, false)
}

/// As [`capture`]; with `mark`, what the shape never frees is allocated as a kept block.
///
/// # Errors
/// As [`capture`].
pub fn capture_with(
    arena: &SharedVmmAllocator,
    shape: &Shape,
    stream: Stream,
    mark: bool,
) -> Result<Captured> {
    let kept = if mark { shape.kept() } else { HashSet::new() };
    capture_by(arena, shape, |space, id, bytes| {
        if kept.contains(&id) { space.allocate_kept(bytes, stream) } else { space.allocate(bytes, stream) }
    })
}

/// As [`capture`], with blocks from wherever `allocate` has them, by their number and bytes.
///
/// # Errors
/// As [`capture`].
pub fn capture_by(
    arena: &SharedVmmAllocator,
    shape: &Shape,
    allocate: impl Fn(&Space, usize, u64) -> Result<Address>,
) -> Result<Captured> {
    let space = arena.open_space()?;
    let mut blocks = Vec::new();
    let mut maps_after = Vec::with_capacity(shape.events.len());
    for event in &shape.events {
        match *event {
            Event::Allocate { id, bytes } => {
                let at = allocate(&space, id, bytes)?;
                if blocks.len() <= id {
                    blocks.resize(id + 1, (Address(0), 0));
                }
                blocks[id] = (at, bytes);
            }
            Event::Free { id } => space.free(blocks[id].0)?,
        }
        maps_after.push(space.maps());
    }
    let report = space.seal()?;
    Ok(Captured { space, blocks, report, maps_after })
}

/// Writes and checks stamps: 32-bit values that differ between blocks and between replays.
#[derive(Clone, Debug)]
pub struct Stamps {
    driver: SharedDriver,
    stream: Stream,
}

impl Stamps {
    /// Stamps on the driver's device, written in the order of `stream`.
    #[must_use]
    pub fn new(driver: &SharedDriver, stream: Stream) -> Self {
        Self { driver: Arc::clone(driver), stream }
    }

    fn on_host(&self) -> bool {
        self.driver.info().platform == "host"
    }

    /// The offsets at which a block is looked at: its beginning, its end, and steps between. Blocks overlap by whole pages, or
    /// in a slab by whole granules of 512 bytes, so these steps miss none. On the host these are also the only places written;
    /// a GPU fills whole blocks, but is asked once a page only, since each look is a copy.
    fn offsets(&self, bytes: u64) -> impl Iterator<Item = u64> {
        let step = match (self.on_host(), bytes <= 1 << 20) {
            (true, true) => 512,
            (true, false) => 16 << 10,
            (false, _) => 2 << 20,
        };
        (0..bytes / 4 * 4).step_by(step).chain((bytes >= 8).then(|| bytes / 4 * 4 - 4))
    }

    /// Stamps a block.
    ///
    /// # Errors
    /// What the driver says.
    pub fn write(&self, at: Address, bytes: u64, stamp: u32) -> Result<()> {
        if !self.on_host() {
            // SAFETY: a live block of the caller's, and a stream it keeps.
            return unsafe { self.driver.fill(at, bytes / 4 * 4, stamp, self.stream) };
        }
        for offset in self.offsets(bytes) {
            // SAFETY: a block of the host driver is mapped memory of this process, and only this thread replays.
            unsafe { ((at.0 + offset) as *mut u32).write_volatile(stamp) };
        }
        Ok(())
    }

    /// Whether a block still holds its stamp.
    ///
    /// # Errors
    /// What the driver says.
    pub fn holds(&self, at: Address, bytes: u64, stamp: u32) -> Result<bool> {
        for offset in self.offsets(bytes) {
            let found = if self.on_host() {
                // SAFETY: as in `write`.
                unsafe { ((at.0 + offset) as *const u32).read_volatile() }
            } else {
                let mut word = [0; 4];
                // Copies from device memory wait for the default stream only: the caller replays on it.
                // SAFETY: a live block of the caller's.
                unsafe { self.driver.read(Address(at.0 + offset), &mut word) }?;
                u32::from_ne_bytes(word)
            };
            if found != stamp {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

/// The stamp of a block in a replay.
fn stamp(space: &Space, round: u32, id: usize) -> u32 {
    let mixed =
        space.id().wrapping_mul(0x9e37_79b9) ^ (id as u64).wrapping_mul(0x85eb_ca6b) ^ u64::from(round) << 17;
    (mixed ^ mixed >> 32) as u32
}

/// Replays a captured shape once, in the arena's order.
///
/// # Errors
/// What the library or the driver says.
pub fn replay(captured: &Captured, shape: &Shape, stamps: &Stamps, round: u32) -> Result<Replayed> {
    captured.space.replay(stamps.stream, || {
        let mut found = Replayed::default();
        for event in &shape.events {
            match *event {
                Event::Allocate { id, .. } => {
                    let (at, bytes) = captured.blocks[id];
                    stamps.write(at, bytes, stamp(&captured.space, round, id))?;
                }
                Event::Free { id } => {
                    let (at, bytes) = captured.blocks[id];
                    found.blocks += 1;
                    found.wrong += u64::from(!stamps.holds(at, bytes, stamp(&captured.space, round, id))?);
                }
            }
        }
        Ok(found)
    })?
}

impl Captured {
    /// Of the blocks that were live at the seal, how many no longer hold the stamp of the shape's replay `round`.
    ///
    /// # Errors
    /// What the driver says.
    pub fn lost_retained(&self, stamps: &Stamps, round: u32) -> Result<u64> {
        let mut lost = 0;
        for retained in &self.report.retained {
            let kept = self.blocks.iter().rposition(|(at, _)| at.0 == retained.address);
            let Some(id) = kept else { continue };
            let (at, bytes) = self.blocks[id];
            lost += u64::from(!stamps.holds(at, bytes, stamp(&self.space, round, id))?);
        }
        Ok(lost)
    }
}

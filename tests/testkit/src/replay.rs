//! Captures a trace into spaces and replays it with real contents.
//!
//! A replay stamps each block at its allocation and checks the stamp at its free, at the captured
//! addresses.

use std::collections::HashSet;
use std::sync::Arc;

use vmmgraph::driver::SharedDriver;
use vmmgraph::{Address, Result, SealReport, SharedVmmAllocator, Space, Stream};

use crate::trace::{Event, Shape};

/// A captured shape.
#[derive(Debug)]
pub struct Captured {
    /// The sealed space.
    pub space: Arc<Space>,
    /// Address and bytes of every block, by id.
    pub blocks: Vec<(Address, u64)>,
    /// Report of the seal.
    pub report: SealReport,
    /// Number of mappings after each event.
    pub maps_after: Vec<u64>,
}

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Checked blocks.
    pub blocks: u64,
    /// Blocks with a damaged stamp at their free.
    pub wrong: u64,
}

/// Captures one shape on one stream and seals its space.
///
/// # Errors
/// The errors of the library; the space is dropped then.
pub fn capture(arena: &SharedVmmAllocator, shape: &Shape, stream: Stream) -> Result<Captured> {
    capture_with(arena, shape, stream, false)
}

/// As [`capture`]; with `mark`, blocks that the shape never frees are persistent.
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

/// As [`capture`], with blocks from `allocate`, which receives their id and bytes.
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
    /// Creates stamps on the driver's device, written in the order of `stream`.
    #[must_use]
    pub fn new(driver: &SharedDriver, stream: Stream) -> Self {
        Self { driver: Arc::clone(driver), stream }
    }

    fn on_host(&self) -> bool {
        self.driver.info().platform == "host"
    }

    /// Returns the checked offsets: start, end and steps. Blocks overlap by whole pages, in a slab
    /// by granules of 512 bytes, so no overlap is missed. On the host only these offsets are
    /// written. A GPU is checked once a page, since each check is a copy.
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
    /// The errors of the driver.
    pub fn write(&self, at: Address, bytes: u64, stamp: u32) -> Result<()> {
        if !self.on_host() {
            // SAFETY: a live block and a live stream of the caller.
            return unsafe { self.driver.fill(at, bytes / 4 * 4, stamp, self.stream) };
        }
        for offset in self.offsets(bytes) {
            // SAFETY: a block of the host driver is mapped memory of this process; only this thread
            // replays.
            unsafe { ((at.0 + offset) as *mut u32).write_volatile(stamp) };
        }
        Ok(())
    }

    /// Returns true if a block still holds its stamp.
    ///
    /// # Errors
    /// The errors of the driver.
    pub fn holds(&self, at: Address, bytes: u64, stamp: u32) -> Result<bool> {
        for offset in self.offsets(bytes) {
            let found = if self.on_host() {
                // SAFETY: as in `write`.
                unsafe { ((at.0 + offset) as *const u32).read_volatile() }
            } else {
                let mut word = [0; 4];
                // Reads of device memory wait for the default stream only: the caller replays on
                // it.
                // SAFETY: a live block of the caller.
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

fn stamp(space: &Space, round: u32, id: usize) -> u32 {
    let mixed =
        space.id().wrapping_mul(0x9e37_79b9) ^ (id as u64).wrapping_mul(0x85eb_ca6b) ^ u64::from(round) << 17;
    (mixed ^ mixed >> 32) as u32
}

/// Replays a captured shape once, in the arena's order.
///
/// # Errors
/// The errors of the library or the driver.
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
    /// Counts the live-out blocks without the stamp of replay `round`.
    ///
    /// # Errors
    /// The errors of the driver.
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

//! The end of a capture: what is still live is retained.
//!
//! A block that outlives its capture (a graph's output, a library's cached workspace, a constant made lazily) must not share
//! pages with other graphs, or their replays destroy it. By default the addresses such a block covers get pages that belong to
//! this space alone, so that the program behaves as if the graph had a private pool. Nothing is copied: a capture has
//! recorded work, not done it, so the first contents come with the first replay.
//!
//! ```text
//!   before   | large page 3                                     |      a retained block among others, long freed
//!   blocks   [ passing  ][ retained ][ passing             ]
//!   after    | small 7 | own | own | small 8 | small 9 | .. |   |      fillers are shared small pages; a page is never cut
//! ```

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::layout::{RetainedTile, Unit};
use super::{Block, Phase, Placement, Space, State};
use crate::error::{Error, Result};
use crate::pages::{Class, PageId, PageNo, Pin, SharedSet};

/// What becomes of blocks that are live when their capture ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum RetainPolicy {
    /// They move to pages of their own: other graphs never touch them.
    #[default]
    Retain,
    /// They stay on shared pages: the next replay of another graph may overwrite them. For callers that copy their outputs out.
    Share,
}

/// What a capture used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SealReport {
    /// The most bytes that were live at once.
    pub peak_live_bytes: u64,
    /// Small shared pages this space shows.
    pub small_pages: u64,
    /// Large shared pages this space shows.
    pub large_pages: u64,
    /// Mappings made, each a map and a set-access call.
    pub maps: u64,
    /// Calls made to the driver: to reserve, create, map, set access and unmap.
    pub driver_calls: u64,
    /// Time spent in them, waiting for other spaces' calls included.
    pub driver_time: Duration,
    /// Bytes of pages that became this space's own.
    pub retained_bytes: u64,
    /// Blocks that were allocated in all.
    pub allocations: u64,
    /// Blocks that are still live, by address.
    pub retained: Vec<Block>,
}

/// A tile whose pages were exchanged, and how to undo that.
enum Exchanged {
    /// The shared page itself changed owner.
    Taken(RetainedTile),
    /// Small pages took its place.
    Replaced { tile: RetainedTile, before: Vec<(u64, Pin)>, own: Vec<PageId>, fillers: Vec<PageNo> },
}

impl Space {
    /// Ends the capture: no further blocks can be allocated, and the space can be replayed. Blocks that are still live are
    /// treated as the arena's policy says; those of a bump space stay on shared pages.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) unless the space is open. Out of memory or budget, also
    /// after the arena gave back the pages that no space maps, or what else the driver says: the space is open as before, and the
    /// call can be repeated. (If undoing fails as well the space can only be dropped.)
    pub fn seal(&self) -> Result<SealReport> {
        let policy = self.policy(&self.state.lock());
        self.seal_with(policy)
    }

    /// What a seal does unless it is told otherwise.
    pub(super) fn policy(&self, state: &State) -> RetainPolicy {
        match state.placement {
            Placement::Stitched(_) => self.common.retain,
            Placement::Bump(_) => RetainPolicy::Share,
        }
    }

    /// As [`seal`](Self::seal), with a policy of its own.
    ///
    /// # Errors
    /// As [`seal`](Self::seal); [`Error::InvalidArgument`] for a bump space and [`RetainPolicy::Retain`].
    pub fn seal_with(&self, policy: RetainPolicy) -> Result<SealReport> {
        self.usable()?;
        let mut state = self.state.lock();
        state.require(Phase::Open)?;
        let (mut retained_bytes, mut fillers) = (0, 0);
        if policy == RetainPolicy::Retain {
            let start = Instant::now();
            let retained = state.retain(&self.common.shared, self.id);
            state.work.time += start.elapsed();
            self.common.shared.pool().check();
            (retained_bytes, fillers) = retained?;
        }
        state.placement.seal();
        state.phase = Phase::Sealed;
        let usage = state.placement.usage();
        self.common.high_water.fetch_max(usage.peak_bytes, Ordering::Relaxed);
        let (small_pages, large_pages) = state.placement.pages();
        let retained = state.blocks();
        tracing::debug!(
            space = self.id,
            peak_live_bytes = usage.peak_bytes,
            maps = state.work.maps,
            driver_us = state.work.time.as_micros() as u64,
            retained = retained.len(),
            retained_bytes,
            "space sealed"
        );
        Ok(SealReport {
            peak_live_bytes: usage.peak_bytes,
            small_pages: (small_pages + fillers) as u64,
            large_pages: large_pages as u64,
            maps: state.work.maps,
            driver_calls: state.work.calls,
            driver_time: state.work.time,
            retained_bytes,
            allocations: usage.allocations,
            retained,
        })
    }
}

impl State {
    /// Puts pages of the space's own under every small page's worth of addresses that live blocks cover; their bytes, and how
    /// many numbers of small pages were needed behind those the slabs have.
    fn retain(&mut self, shared: &SharedSet, space: u64) -> Result<(u64, usize)> {
        let mut done: Vec<Exchanged> = Vec::new();
        let (mut bytes, mut fillers) = (0, 0);
        let Placement::Stitched(layout) = &self.placement else {
            let expected = "a bump space's blocks stay on shared pages";
            return Err(Error::InvalidArgument { what: "the retain policy", value: 1, expected });
        };
        for tile in layout.retained_tiles() {
            match self.exchange(shared, space, tile, &mut fillers) {
                Ok((exchanged, own)) => {
                    done.push(exchanged);
                    bytes += own;
                }
                Err(error) => {
                    for exchanged in done.into_iter().rev() {
                        self.undo(shared, exchanged);
                    }
                    return Err(error);
                }
            }
        }
        Ok((bytes, fillers))
    }

    fn exchange(
        &mut self,
        shared: &SharedSet,
        space: u64,
        tile: RetainedTile,
        fillers: &mut usize,
    ) -> Result<(Exchanged, u64)> {
        let (small, page_bytes) = (shared.geometry().small(), shared.bytes(tile.page.class));
        let wholly = tile.units.iter().all(|unit| *unit == Unit::Retained);
        if wholly && shared.take(tile.page, space) {
            return Ok((Exchanged::Taken(tile), page_bytes));
        }
        let first_filler = self.placement.pages().0 + *fillers;
        let mut parts = Parts::default();
        let result = if wholly {
            parts.create(shared, tile.offset, page_bytes, space)
        } else {
            tile.units.iter().enumerate().try_for_each(|(unit, usage)| {
                let at = tile.offset + unit as u64 * small;
                match usage {
                    Unit::Idle => Ok(()),
                    Unit::Retained => parts.create(shared, at, small, space),
                    // Any page will do that nothing else in this space is on.
                    Unit::Passing => parts.fill(shared, at, first_filler),
                }
            })
        };
        if let Err(error) = result {
            drop(std::mem::take(&mut parts.pins));
            give_up(shared, &parts.own, &parts.fillers);
            return Err(error);
        }
        let Parts { pins, own, fillers: filled, created } = parts;
        let bytes = if wholly { page_bytes } else { own.len() as u64 * small };
        let maps = pins.len() as u64;
        match self.ranges[tile.range].replace(tile.offset, page_bytes, pins) {
            Ok(before) => {
                self.work.maps += maps;
                self.work.calls += 2 * maps + (before.len() + own.len() + created) as u64;
                *fillers += filled.len();
                Ok((Exchanged::Replaced { tile, before, own, fillers: filled }, bytes))
            }
            Err(failed) => {
                give_up(shared, &own, &filled);
                if !failed.restored {
                    self.phase = Phase::Broken;
                }
                Err(failed.error)
            }
        }
    }

    fn undo(&mut self, shared: &SharedSet, exchanged: Exchanged) {
        match exchanged {
            Exchanged::Taken(tile) => {
                let mut pins = self.ranges[tile.range].mapped();
                if let Some((_, pin)) = pins.find(|(offset, _)| *offset == tile.offset) {
                    shared.put_back(tile.page, pin);
                }
            }
            Exchanged::Replaced { tile, before, own, fillers } => {
                let bytes = shared.bytes(tile.page.class);
                match self.ranges[tile.range].replace(tile.offset, bytes, before) {
                    Ok(after) => {
                        drop(after);
                        give_up(shared, &own, &fillers);
                    }
                    Err(failed) => {
                        tracing::error!(error = %failed.error, "undoing a seal failed; the space can only be dropped");
                        self.phase = Phase::Broken;
                    }
                }
            }
        }
    }
}

/// What is to be mapped in place of a page, and where.
#[derive(Default)]
struct Parts {
    pins: Vec<(u64, Pin)>,
    /// Pages created for the space.
    own: Vec<PageId>,
    /// Numbers of shared pages.
    fillers: Vec<PageNo>,
    /// How many of those had to be created.
    created: usize,
}

impl Parts {
    fn create(&mut self, shared: &SharedSet, at: u64, bytes: u64, space: u64) -> Result<()> {
        let pin = shared.create_own(bytes, space)?;
        self.own.push(pin.id());
        self.pins.push((at, pin));
        Ok(())
    }

    fn fill(&mut self, shared: &SharedSet, at: u64, first: usize) -> Result<()> {
        let no = PageNo { class: Class::Small, index: (first + self.fillers.len()) as u32 };
        let acquired = shared.acquire(no)?;
        self.fillers.push(no);
        self.created += usize::from(acquired.created);
        self.pins.push((at, acquired.pin));
        Ok(())
    }
}

/// Gives back pages that were to be mapped and are not: the space's own, and shared ones that no space maps.
fn give_up(shared: &SharedSet, own: &[PageId], fillers: &[PageNo]) {
    own.iter().for_each(|id| shared.pool().doom(*id));
    fillers.iter().for_each(|no| shared.discard(*no));
}

//! The end of a capture: what is still live is retained.
//!
//! A block that outlives its capture (a graph's output, a library's cached workspace, a constant made lazily) must not share
//! pages with other graphs, or their replays destroy it. By default every tile such a block covers gets a page that belongs to
//! this space alone, so that the program behaves as if the graph had a private pool. Nothing is copied: a capture has
//! recorded work, not done it, so the first contents come with the first replay.

use std::sync::atomic::Ordering;

use serde::Serialize;

use super::layout::RetainedTile;
use super::{Phase, Space, State};
use crate::error::Result;
use crate::pages::{Owner, Pin, SharedSet};
use crate::units::Address;

/// What becomes of blocks that are live when their capture ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RetainPolicy {
    /// They move to pages of their own: other graphs never touch them.
    #[default]
    Retain,
    /// They stay on shared pages: the next replay of another graph may overwrite them. For callers that copy their outputs out.
    Share,
}

/// A block that was live when its capture ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RetainedBlock {
    /// Its address.
    pub address: u64,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
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
    /// Bytes of pages that became this space's own.
    pub retained_bytes: u64,
    /// Blocks that are still live, by address.
    pub retained: Vec<RetainedBlock>,
}

/// A tile whose pages were exchanged, and how to undo that.
enum Exchanged {
    /// The shared page itself changed owner.
    Taken(RetainedTile),
    /// Own pages took the place of shared ones.
    Replaced(RetainedTile, Vec<Pin>),
}

impl Space {
    /// Ends the capture: no further blocks can be allocated, and the space can be replayed. Blocks that are still live are
    /// treated as the arena's policy says.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) unless the space is open. Out of memory or what else the driver says:
    /// the space is open as before, and the call can be repeated. (If undoing fails as well the space can only be dropped.)
    pub fn seal(&self) -> Result<SealReport> {
        self.seal_with(self.common.retain)
    }

    /// As [`seal`](Self::seal), with a policy of its own.
    ///
    /// # Errors
    /// As [`seal`](Self::seal).
    pub fn seal_with(&self, policy: RetainPolicy) -> Result<SealReport> {
        self.usable()?;
        let mut state = self.state.lock();
        state.require(Phase::Open)?;
        let mut retained_bytes = 0;
        if policy == RetainPolicy::Retain {
            let retained = state.retain(&self.common.shared, self.id);
            self.common.shared.pool().check();
            retained_bytes = retained?;
        }
        state.layout.seal();
        state.phase = Phase::Sealed;
        let usage = state.layout.usage();
        self.common.high_water.fetch_max(usage.peak_bytes, Ordering::Relaxed);
        let (small_pages, large_pages) = state.layout.pages();
        let blocks = state.layout.blocks().into_iter();
        let mut retained: Vec<RetainedBlock> =
            blocks.map(|(place, bytes)| RetainedBlock { address: state.address(place).0, bytes }).collect();
        retained.sort_unstable_by_key(|block| block.address);
        tracing::debug!(
            space = self.id,
            peak_live_bytes = usage.peak_bytes,
            maps = state.maps,
            retained = retained.len(),
            retained_bytes,
            "space sealed"
        );
        Ok(SealReport {
            peak_live_bytes: usage.peak_bytes,
            small_pages: small_pages as u64,
            large_pages: large_pages as u64,
            maps: state.maps,
            retained_bytes,
            retained,
        })
    }

    /// The addresses of the blocks that are live now.
    #[must_use]
    pub fn live_blocks(&self) -> Vec<Address> {
        let state = self.state.lock();
        state.layout.blocks().into_iter().map(|(place, _)| state.address(place)).collect()
    }
}

impl State {
    /// Puts pages of the space's own under every tile that live blocks cover; their bytes.
    fn retain(&mut self, shared: &SharedSet, space: u64) -> Result<u64> {
        let mut done = Vec::new();
        let mut bytes = 0;
        for tile in self.layout.retained_tiles() {
            match self.exchange(shared, space, tile) {
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
        Ok(bytes)
    }

    fn exchange(&mut self, shared: &SharedSet, space: u64, tile: RetainedTile) -> Result<(Exchanged, u64)> {
        let small = shared.geometry().small();
        let page_bytes = shared.bytes(tile.page.class);
        // Only what some block has ever covered needs memory: the rest of a large page lies behind a block's end.
        let needed = tile.used.next_multiple_of(small);
        if needed == page_bytes && shared.take(tile.page, space) {
            return Ok((Exchanged::Taken(tile), needed));
        }
        let each = if needed == page_bytes { page_bytes } else { small };
        let owner = Owner::Retained { arena: shared.arena(), space };
        let mut own: Vec<Pin> = Vec::new();
        for _ in 0..needed / each {
            match shared.pool().create(each, owner) {
                Ok(pin) => own.push(pin),
                Err(error) => {
                    own.iter().for_each(|pin| shared.pool().doom(pin.id()));
                    return Err(error);
                }
            }
        }
        let ids: Vec<_> = own.iter().map(Pin::id).collect();
        let maps = own.len() as u64;
        match self.ranges[tile.range].replace(tile.offset, page_bytes, own) {
            Ok(shared_pages) => {
                self.maps += maps;
                Ok((Exchanged::Replaced(tile, shared_pages), needed))
            }
            Err(failed) => {
                ids.into_iter().for_each(|id| shared.pool().doom(id));
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
            Exchanged::Replaced(tile, shared_pages) => {
                let bytes = shared.bytes(tile.page.class);
                match self.ranges[tile.range].replace(tile.offset, bytes, shared_pages) {
                    Ok(own) => own.iter().for_each(|pin| shared.pool().doom(pin.id())),
                    Err(failed) => {
                        tracing::error!(error = %failed.error, "undoing a seal failed; the space can only be dropped");
                        self.phase = Phase::Broken;
                    }
                }
            }
        }
    }
}

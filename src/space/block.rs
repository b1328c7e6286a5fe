//! Live blocks, as they are listed: how large, how old, and from where.

use std::backtrace::Backtrace;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Space, State};
use crate::units::Address;

/// A live block. One that is live after its capture is retained: an output, a cached workspace, a constant made lazily.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Its address.
    pub address: u64,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// It was the n-th block of its space, from 1; [`SealReport::allocations`](super::SealReport) says of how many.
    pub allocation: u64,
    /// How long ago that was, in an arena that traces blocks.
    pub age: Option<Duration>,
    /// The call stack that allocated it, in an arena that traces blocks.
    pub origin: Option<String>,
}

/// Where and when a block was allocated.
#[derive(Debug)]
pub(super) struct Origin {
    at: Instant,
    stack: Backtrace,
}

impl Origin {
    /// Of this call.
    pub(super) fn here() -> Self {
        Self { at: Instant::now(), stack: Backtrace::force_capture() }
    }
}

/// The origins of the live blocks, in an arena that traces them.
pub(super) type Origins = Option<HashMap<Address, Origin>>;

impl State {
    /// The live blocks, by address.
    pub(super) fn blocks(&self) -> Vec<Block> {
        let placed = self.placement.blocks().into_iter();
        let placed = placed.map(|live| (self.address(live.place), live.bytes, live.serial));
        let blocks = placed.chain(self.kept.live()).map(|(address, bytes, serial)| {
            let origin = self.origins.as_ref().and_then(|origins| origins.get(&address));
            Block {
                address: address.0,
                bytes,
                allocation: serial,
                age: origin.map(|origin| origin.at.elapsed()),
                origin: origin.map(|origin| origin.stack.to_string()),
            }
        });
        let mut blocks: Vec<Block> = blocks.collect();
        blocks.sort_unstable_by_key(|block| block.address);
        blocks
    }
}

impl Space {
    /// The blocks that are live now, by address.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        self.core().state.lock().blocks()
    }

    /// The addresses of the blocks that are live now, in order.
    #[must_use]
    pub fn live_blocks(&self) -> Vec<Address> {
        let state = self.core().state.lock();
        let placed = state.placement.blocks().into_iter().map(|live| state.address(live.place));
        let mut addresses: Vec<Address> = placed.chain(state.kept.live().map(|(at, ..)| at)).collect();
        addresses.sort_unstable();
        addresses
    }
}

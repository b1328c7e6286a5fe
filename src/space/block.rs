use std::backtrace::Backtrace;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::{Space, State};
use crate::units::Address;

/// A live block. After the capture it is live-out (retained).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Block {
    /// Address.
    pub address: u64,
    /// Bytes, rounded up to 512.
    pub bytes: u64,
    /// Number of the block in its space, from 1.
    pub allocation: u64,
    /// Time since the allocation, if traced.
    pub age: Option<Duration>,
    /// Call stack of the allocation, if traced.
    pub origin: Option<String>,
}

#[derive(Debug)]
pub(super) struct Origin {
    at: Instant,
    stack: Backtrace,
}

impl Origin {
    pub(super) fn here() -> Self {
        Self { at: Instant::now(), stack: Backtrace::force_capture() }
    }
}

impl State {
    pub(super) fn blocks(&self) -> Vec<Block> {
        let placed = self.placement.blocks().into_iter();
        let placed = placed.map(|live| (self.address(live.place), live.bytes, live.serial));
        let blocks = placed.chain(self.kept.live()).map(|(address, bytes, serial)| {
            let origin = self.observed.origin(address);
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
    /// Returns the live blocks, by address.
    #[must_use]
    pub fn blocks(&self) -> Vec<Block> {
        self.core().state.lock().blocks()
    }

    /// Returns the addresses of the live blocks, sorted.
    #[must_use]
    pub fn live_blocks(&self) -> Vec<Address> {
        let state = self.core().state.lock();
        let placed = state.placement.blocks().into_iter().map(|live| state.address(live.place));
        let mut addresses: Vec<Address> = placed.chain(state.kept.live().map(|(at, ..)| at)).collect();
        addresses.sort_unstable();
        addresses
    }
}

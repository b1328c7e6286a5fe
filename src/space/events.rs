//! Trace of a capture: allocations and frees in order.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::layout::Place;
use crate::units::Address;

/// A block of a traced capture. Allocations and frees are events, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedBlock {
    /// Number of the block in its space, from 1.
    pub allocation: u64,
    /// Address.
    pub address: u64,
    /// Bytes, rounded up to 512.
    pub bytes: u64,
    /// Event of the allocation.
    pub begin: u64,
    /// Event of the free; `None` if live at the end of the capture.
    pub end: Option<u64>,
}

#[derive(Debug, Default)]
pub(super) struct Events {
    blocks: Vec<TracedBlock>,
    live: HashMap<Place, usize>,
    next: u64,
}

impl Events {
    pub(super) fn allocated(&mut self, place: Place, address: Address, bytes: u64, allocation: u64) {
        self.live.insert(place, self.blocks.len());
        let (address, begin) = (address.0, self.next);
        self.blocks.push(TracedBlock { allocation, address, bytes, begin, end: None });
        self.next += 1;
    }

    pub(super) fn freed(&mut self, place: Place) {
        if let Some(index) = self.live.remove(&place) {
            self.blocks[index].end = Some(self.next);
            self.next += 1;
        }
    }

    pub(super) fn end(&mut self) {
        self.live = HashMap::new();
        self.blocks.shrink_to_fit();
    }

    pub(super) fn blocks(&self) -> &[TracedBlock] {
        &self.blocks
    }
}

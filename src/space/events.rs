//! What a capture allocates and frees, in order, where that is asked for.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::layout::Place;
use crate::units::Address;

/// A block in the course of its capture. Each allocation and each free is one event, numbered from 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracedBlock {
    /// It was the n-th block of its space, from 1.
    pub allocation: u64,
    /// Its address.
    pub address: u64,
    /// Its bytes, rounded up to 512.
    pub bytes: u64,
    /// The event with which it came.
    pub begin: u64,
    /// The event with which its memory was free; `None`: live to the end of the capture.
    pub end: Option<u64>,
}

/// The events of one capture so far.
#[derive(Debug, Default)]
pub(super) struct Events {
    blocks: Vec<TracedBlock>,
    /// Which of them is live at a place.
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

    /// The capture has ended: what is freed from now on is no event of it.
    pub(super) fn end(&mut self) {
        self.live = HashMap::new();
        self.blocks.shrink_to_fit();
    }

    pub(super) fn blocks(&self) -> &[TracedBlock] {
        &self.blocks
    }
}

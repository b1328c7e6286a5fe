//! Recorded streams: streams which use blocks, besides the streams of the allocations.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::pages::{Events, Fence, NamedStream};
use crate::units::Address;

/// Streams recorded for each block, each once. Lookups cost the same for any number of blocks.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<Address, SmallVec<[NamedStream; 1]>>);

impl Users {
    pub(super) fn note(&mut self, block: Address, stream: NamedStream) {
        let streams = self.0.entry(block).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    pub(super) fn has(&self, block: Address) -> bool {
        self.0.contains_key(&block)
    }

    /// Removes the streams recorded for a block, and returns a fence after their work.
    pub(super) fn take(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let mut fence = Fence::default();
        let streams = self.0.remove(&block).unwrap_or_default();
        streams.into_iter().for_each(|stream| fence.add_kept(events, stream));
        fence
    }

    /// Returns all recorded streams, each once per block.
    pub(super) fn all(&self) -> impl Iterator<Item = &NamedStream> {
        self.0.values().flatten()
    }
}

//! Streams that use blocks besides the streams that the blocks were allocated for.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::pages::{Events, Fence, NamedStream};
use crate::units::Address;

/// The streams noted for each block, each once. What is asked about a block costs the same among many.
#[derive(Debug, Default)]
pub(super) struct Users(BTreeMap<Address, SmallVec<[NamedStream; 1]>>);

impl Users {
    /// Notes a stream for a block.
    pub(super) fn note(&mut self, block: Address, stream: NamedStream) {
        let streams = self.0.entry(block).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    /// Whether a stream is noted for a block.
    pub(super) fn has(&self, block: Address) -> bool {
        self.0.contains_key(&block)
    }

    /// Behind the streams noted for a block, which are forgotten.
    pub(super) fn take(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let mut fence = Fence::default();
        let streams = self.0.remove(&block).unwrap_or_default();
        streams.into_iter().for_each(|stream| fence.add_kept(events, stream));
        fence
    }

    /// All of them, each stream as often as it was noted.
    pub(super) fn all(&self) -> impl Iterator<Item = &NamedStream> {
        self.0.values().flatten()
    }
}

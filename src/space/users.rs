//! Recorded streams of blocks, besides the streams of the allocations.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::pages::{Events, Fence, NamedStream};
use crate::units::Address;

#[derive(Debug, Default)]
pub(super) struct Users {
    /// Each stream once.
    live: BTreeMap<Address, SmallVec<[NamedStream; 1]>>,
    /// Unfinished users of freed blocks, whose pages may be freed later.
    freed: Fence,
}

impl Users {
    pub(super) fn note(&mut self, block: Address, stream: NamedStream) {
        let streams = self.live.entry(block).or_default();
        if !streams.contains(&stream) {
            streams.push(stream);
        }
    }

    pub(super) fn has(&self, block: Address) -> bool {
        self.live.contains_key(&block)
    }

    pub(super) fn take(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let mut fence = Fence::default();
        let streams = self.live.remove(&block).unwrap_or_default();
        streams.into_iter().for_each(|stream| fence.add_kept(events, stream));
        fence
    }

    /// Returns a fence after all users of freed blocks.
    pub(super) fn free(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let users = self.take(block, events);
        self.poll_freed(events);
        self.freed.join(users);
        self.of_freed()
    }

    /// Drops finished users, which records deferred events. Returns true if no user is left. A
    /// later poll repeats failed queries.
    pub(super) fn poll_freed(&mut self, events: &Arc<Events>) -> bool {
        self.freed.done(events).unwrap_or(false)
    }

    pub(super) fn of_freed(&self) -> Fence {
        self.freed.clone()
    }

    pub(super) fn fence(&self, events: &Arc<Events>) -> Fence {
        let mut fence = self.of_freed();
        self.all().for_each(|stream| fence.add_kept(events, *stream));
        fence
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &NamedStream> {
        self.live.values().flatten()
    }
}

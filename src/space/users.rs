//! Users of blocks: recorded streams, besides the streams of the allocations.

use std::collections::BTreeMap;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::pages::{Events, Fence, NamedStream};
use crate::units::Address;

#[derive(Debug, Default)]
pub(super) struct Users {
    /// Streams recorded for each live block, each once. Lookups cost the same for any number of
    /// blocks.
    live: BTreeMap<Address, SmallVec<[NamedStream; 1]>>,
    /// Fence after unfinished users of freed blocks. Stored because the pages may stay mapped or
    /// lie under other live blocks, and are freed later.
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

    /// Removes the streams recorded for a block, and returns a fence after their work.
    pub(super) fn take(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let mut fence = Fence::default();
        let streams = self.live.remove(&block).unwrap_or_default();
        streams.into_iter().for_each(|stream| fence.add_kept(events, stream));
        fence
    }

    /// Moves the streams recorded for a block to the users of freed blocks. Returns a fence after
    /// all of these.
    pub(super) fn free(&mut self, block: Address, events: &Arc<Events>) -> Fence {
        let users = self.take(block, events);
        self.poll_freed(events);
        self.freed.join(users);
        self.of_freed()
    }

    /// Drops finished users of freed blocks, which records deferred events. Returns true if no user
    /// is left. Failed queries are repeated by a later poll.
    pub(super) fn poll_freed(&mut self, events: &Arc<Events>) -> bool {
        self.freed.done(events).unwrap_or(false)
    }

    /// Returns a fence after unfinished users of freed blocks.
    pub(super) fn of_freed(&self) -> Fence {
        self.freed.clone()
    }

    /// Returns a fence after all users, of live and of freed blocks.
    pub(super) fn fence(&self, events: &Arc<Events>) -> Fence {
        let mut fence = self.of_freed();
        self.all().for_each(|stream| fence.add_kept(events, *stream));
        fence
    }

    /// Returns all recorded streams, each once per block.
    pub(super) fn all(&self) -> impl Iterator<Item = &NamedStream> {
        self.live.values().flatten()
    }
}

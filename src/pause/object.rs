use std::fmt;
use std::time::Duration;

use super::{MovedPage, Pausables, PausePage, PauseState};
use crate::error::{Error, Result};
use crate::pages::{Fence, Hold, PageId};
use crate::units::{Address, Stream};

/// Memory with pause and resume: regions and arenas.
pub(crate) trait Pausable: Send + Sync + fmt::Debug {
    /// Tag for lookup; empty: only in a lookup of all.
    fn tag(&self) -> &str;

    /// Number: several objects are locked in this order.
    fn id(&self) -> u64;

    fn pausables(&self) -> &Pausables;

    fn pause_state(&self) -> &PauseState;

    /// Whether the object is open; pages of a closed one do not move.
    fn usable(&self) -> bool {
        true
    }

    /// Calls `begin` between two uses of all pages.
    fn between(&self, begin: &mut dyn FnMut()) -> Result<()> {
        begin();
        Ok(())
    }

    /// Refuses a pause of a resident object with `open` [open tokens](PauseState::open).
    fn may_pause(&self, open: u64) -> Result<()> {
        // Default: no users refuse a pause.
        let _ = open;
        Ok(())
    }

    /// Refuses new uses of the pages, until [`pages_stay`](Self::pages_stay).
    fn pages_move(&self) {
        // Default: uses check the phase.
    }

    /// Called at the end of the exclusive section.
    fn pages_stay(&self);

    fn add_users(&self, fence: &mut Fence);

    /// Bytes kept resident by policy.
    fn kept_bytes(&self) -> u64;

    /// Removes or joins pages before a move. Holds their ranges if other threads could unmap them.
    fn hold(&self) -> Option<Hold<'_>>;

    /// Pages that a pause or a resume moves, with or without memory.
    fn pages(&self) -> Vec<PausePage>;

    /// Records pages moved out, or in: then complete after the fence.
    fn record(&self, pages: &[MovedPage], contents: &Fence);

    /// Addresses told to hooks.
    fn moved_ranges(&self, gone: bool) -> Vec<(Address, u64)>;

    /// Whether the object is resident in `after_map` hooks, not only after.
    fn resident_in_hooks(&self) -> bool;

    /// Whether the host copies stay valid after a resume.
    fn keeps_copies(&self) -> bool {
        false
    }

    /// Called before a pinned page is exported, which then keeps addresses and contents.
    fn pin_page(&self, page: PageId) -> Result<()> {
        let (value, expected) = (page.number().into(), "that of a page of an arena");
        Err(Error::InvalidArgument { what: "a page's number", value, expected })
    }

    fn mark_on(&self, stream: Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Polls freed memory in use by a stream. Does not wait.
    fn poll_pending(&self) {}

    /// Frees unused memory, waiting for streams at most `limit`.
    fn give_up(&self, limit: Duration) -> u64 {
        let _ = limit;
        0
    }
}

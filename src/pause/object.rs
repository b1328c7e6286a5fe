use std::fmt;
use std::time::Duration;

use super::{MovedPage, Pausables, PausePage, PauseState};
use crate::error::{Error, Result};
use crate::pages::{Fence, Hold, PageId};
use crate::units::{Address, Stream};

/// Memory with pause and resume: regions and arenas.
pub(crate) trait Pausable: Send + Sync + fmt::Debug {
    /// Tag for lookup; empty: found only by a lookup of all.
    fn tag(&self) -> &str;

    /// Number: several objects are locked in this order.
    fn id(&self) -> u64;

    fn pausables(&self) -> &Pausables;

    fn pause_state(&self) -> &PauseState;

    /// Whether the object is open: the pages of a closed one are not moved.
    fn usable(&self) -> bool {
        true
    }

    /// Calls `begin` between two uses of all pages; fails if the call would wait for itself.
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

    /// Removes or joins pages before a move, and holds their ranges if other threads could unmap
    /// them.
    fn hold(&self) -> Option<Hold<'_>>;

    /// Pages that a pause or a resume moves, with or without memory.
    fn pages(&self) -> Vec<PausePage>;

    /// Records pages moved out, or in: then complete after the fence.
    fn record(&self, pages: &[MovedPage], contents: &Fence);

    /// Addresses told to hooks: of pages about to be unmapped, or mapped again.
    fn moved_ranges(&self, gone: bool) -> Vec<(Address, u64)>;

    /// Whether the object is resident in `after_map` hooks; otherwise after the hooks.
    fn resident_in_hooks(&self) -> bool;

    /// Whether the host copies stay valid after a resume.
    fn keeps_copies(&self) -> bool {
        false
    }

    /// Called before a pinned page is exported, which then keeps addresses and contents. After a
    /// refusal the caller removes the pin.
    fn pin_page(&self, page: PageId) -> Result<()> {
        let (value, expected) = (page.number().into(), "that of a page of an arena");
        Err(Error::InvalidArgument { what: "a page's number", value, expected })
    }

    /// Marks the last replay, if it ran on this stream.
    fn mark_on(&self, stream: Stream) -> Result<()> {
        let _ = stream;
        Ok(())
    }

    /// Polls memory freed while in use by a stream. Does not wait.
    fn poll_pending(&self) {}

    /// Frees unused memory, after waiting for streams for at most `limit`. Returns the bytes.
    fn give_up(&self, limit: Duration) -> u64 {
        let _ = limit;
        0
    }
}

//! Supply of memory to the pause pipeline, implemented by regions and arenas.

use std::fmt;
use std::time::Duration;

use super::{MovedPage, Pausables, PausePage, PauseState};
use crate::error::{Error, Result};
use crate::pages::{Fence, Hold, PageId};
use crate::units::{Address, Stream};

/// Memory with pause and resume.
pub(crate) trait Pausable: Send + Sync + fmt::Debug {
    /// Tag for lookup. An object with an empty tag is found only by a lookup of all.
    fn tag(&self) -> &str;

    /// Number, unique in the process. Several objects are locked in this order.
    fn id(&self) -> u64;

    /// Returns the registry of the device.
    fn pausables(&self) -> &Pausables;

    fn pause_state(&self) -> &PauseState;

    /// Returns false after the object was closed: its pages are no longer moved.
    fn usable(&self) -> bool {
        true
    }

    /// Calls `begin`, the begin of a pause, between two uses of all pages.
    ///
    /// # Errors
    /// The call would wait for itself; `begin` was not called.
    fn between(&self, begin: &mut dyn FnMut()) -> Result<()> {
        begin();
        Ok(())
    }

    /// Refuses a pause of a resident object with `open` [open tokens](PauseState::open).
    ///
    /// # Errors
    /// The reason.
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

    /// Adds all users of the pages to a fence.
    fn add_users(&self, fence: &mut Fence);

    /// Returns the bytes kept resident by policy.
    fn kept_bytes(&self) -> u64;

    /// Removes or joins pages before a move, and holds their ranges if other threads could unmap
    /// the pages.
    fn hold(&self) -> Option<Hold<'_>>;

    /// Returns all pages that a pause or a resume moves, with or without memory.
    fn pages(&self) -> Vec<PausePage>;

    /// Records pages moved out, or in: then their contents are complete after the fence.
    fn record(&self, pages: &[MovedPage], contents: &Fence);

    /// Returns the addresses told to hooks, in order: of pages about to be unmapped, or mapped
    /// again.
    fn moved_ranges(&self, gone: bool) -> Vec<(Address, u64)>;

    /// Returns true if the object is resident in `after_map` hooks. Otherwise, after the hooks.
    fn resident_in_hooks(&self) -> bool;

    /// Returns true if the host copies stay valid after a resume.
    fn keeps_copies(&self) -> bool {
        false
    }

    /// Called before a pinned page is exported: from now on the page keeps addresses and contents.
    ///
    /// # Errors
    /// The reason of a refusal. The caller then removes the pin.
    fn pin_page(&self, page: PageId) -> Result<()> {
        let (value, expected) = (page.number().into(), "that of a page of an arena");
        Err(Error::InvalidArgument { what: "a page's number", value, expected })
    }

    /// Marks the last replay, if the replay ran on this stream.
    ///
    /// # Errors
    /// Driver errors; the stream is under capture.
    fn mark_on(&self, stream: Stream) -> Result<()> {
        // Default: no replays.
        let _ = stream;
        Ok(())
    }

    /// Polls memory freed while in use by a stream. Does not wait.
    fn poll_pending(&self) {
        // Default: no such memory.
    }

    /// Frees unused memory, after waiting for streams for at most `limit`. Returns the bytes.
    fn give_up(&self, limit: Duration) -> u64 {
        // Default: no such memory.
        let _ = limit;
        0
    }
}

//! The order of an arena's replays, as ranks that work together see it.

use super::SharedVmmAllocator;
use crate::error::Result;

impl SharedVmmAllocator {
    /// How many replays of the arena were launched, eager scopes among them: the same on ranks that replay alike. Inside a launch it is the
    /// number of that replay.
    #[must_use]
    pub fn replay_seq(&self) -> u64 {
        self.common.order.replays()
    }

    /// Lets the next replay of a [serial](super::Options::serial) arena say anew where all later ones have to be: when a warm-up is over, or
    /// the thread that launches hands over to another. Waits for the end of a replay or scope that another thread is at. The replays of the
    /// new place wait for those before, as in any arena. Without effect in one that is not serial.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) inside a launch or a scope of this arena.
    pub fn lift_serial(&self) -> Result<()> {
        self.usable()?;
        self.common.order.lift_serial()
    }
}

//! Replay count of an arena and the binding of a serial arena.

use super::SharedVmmAllocator;
use crate::error::Result;

impl SharedVmmAllocator {
    /// Returns the number of launched replays, eager scopes included: equal on ranks with equal
    /// launches. Inside a launch, the number of the current replay.
    #[must_use]
    pub fn replay_seq(&self) -> u64 {
        self.common.order.replays()
    }

    /// Unbinds a [serial](super::Options::serial) arena: its next replay binds stream and thread
    /// again. For the end of a warm-up, or a new launching thread. Waits for a replay or scope of a
    /// different thread. Later replays are ordered after earlier ones, as in any arena. No effect
    /// if not serial.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) inside a launch or scope of this arena.
    pub fn lift_serial(&self) -> Result<()> {
        self.usable()?;
        self.common.order.lift_serial()
    }
}

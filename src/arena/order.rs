use super::SharedVmmAllocator;
use crate::error::Result;

impl SharedVmmAllocator {
    /// Returns the number of launched replays: `vmmgraph_arena_replay_seq`.
    #[must_use]
    pub fn replay_seq(&self) -> u64 {
        self.common.order.replays()
    }

    /// Unbinds a [serial](super::Options::serial) arena: `vmmgraph_arena_lift_serial`.
    pub fn lift_serial(&self) -> Result<()> {
        self.common.require_usable()?;
        self.common.order.lift_serial()
    }
}

//! What freed blocks leave, when somebody is short of memory.
//!
//! A region looks after what streams still used of freed blocks at its own next call. Others cannot wait for that: they ask.

use std::time::Duration;

use super::Region;
use crate::pages::{AccountId, Reclaimer};

/// How long who finds no memory waits for streams that still use freed blocks.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

impl Region {
    /// Waits for what streams still use of freed blocks; whether there was some and is no more. The caller holds no lock.
    pub(super) fn outwait(&self, limit: Duration) -> bool {
        let freed = self.books.lock().freed();
        freed.is_some_and(|mut fence| fence.block(self.device.pool().events(), limit).unwrap_or(false))
    }

    /// Gives up the pages on which nothing is once streams are done with what was freed; their bytes.
    pub(super) fn give_up_freed(&self, limit: Duration) -> u64 {
        self.outwait(limit);
        let mut books = self.books.lock();
        let before = books.resident();
        books.settle(self.device.pool(), self.device.host_pool());
        before - books.resident()
    }
}

impl Reclaimer for Region {
    fn reclaim(&self, _bytes: u64) -> u64 {
        self.give_up_freed(PATIENCE)
    }

    fn account(&self) -> Option<AccountId> {
        Some(self.account.id())
    }

    fn cost(&self) -> u64 {
        // Nobody uses it.
        0
    }
}

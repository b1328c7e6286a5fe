//! Out-of-memory retry of a region, which otherwise reclaims freed blocks in its own next call.

use std::time::Duration;

use super::Region;
use crate::pages::{AccountId, Reclaimer};

/// For streams of freed blocks.
pub(super) const PATIENCE: Duration = Duration::from_secs(2);

impl Region {
    /// Returns whether freed blocks are now done. The caller holds no lock.
    pub(super) fn outwait(&self, limit: Duration) -> bool {
        let freed = self.table.lock().freed();
        freed.is_some_and(|mut fence| fence.block(self.device.pool().events(), limit).unwrap_or(false))
    }

    /// Releases pages without blocks, and returns their bytes.
    pub(super) fn give_up_freed(&self, limit: Duration) -> u64 {
        self.outwait(limit);
        let mut table = self.table.lock();
        let (before, _) = table.resident();
        self.reap(&mut table);
        before - table.resident().0
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
        0
    }
}

use std::time::Duration;

use super::{Policy, Region};
use crate::pages::{Fence, Hold};
use crate::pause::{MovedPage, Pausable, Pausables, PausePage, PauseState, Phase};
use crate::units::Address;

impl Pausable for Region {
    fn tag(&self) -> &str {
        &self.tag
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn pausables(&self) -> &Pausables {
        self.device.pausables()
    }

    fn pause_state(&self) -> &PauseState {
        &self.pause_state
    }

    fn pages_stay(&self) {
        self.reap(&mut self.table.lock());
    }

    fn add_users(&self, fence: &mut Fence) {
        fence.join(self.table.lock().users(self.device.pool().events()));
    }

    fn kept_bytes(&self) -> u64 {
        self.table.lock().bytes_of(Policy::Keep)
    }

    fn hold(&self) -> Option<Hold<'_>> {
        // Checksums compared by `verify_clean` need the original pages.
        if self.pause_state.phase() == Phase::Resuming && !self.options.verify_clean {
            let mut table = self.table.lock();
            table.join_places(&self.pause_state, |bytes, held| self.sizes.join(bytes, held));
        }
        None
    }

    fn pages(&self) -> Vec<PausePage> {
        self.table.lock().pages((self.owner(), self.account.id()), self.options.verify_clean)
    }

    fn record(&self, pages: &[MovedPage], _contents: &Fence) {
        self.table.lock().record(pages);
    }

    fn moved_ranges(&self, gone: bool) -> Vec<(Address, u64)> {
        // After a resume, includes pages announced by a pause but not unmapped.
        self.table.lock().moved_ranges(gone)
    }

    fn resident_in_hooks(&self) -> bool {
        true
    }

    fn keeps_copies(&self) -> bool {
        self.options.read_only
    }

    fn give_up(&self, limit: Duration) -> u64 {
        self.give_up_freed(limit)
    }
}

//! Supplies the pages of an arena to the pause (`src/pause/`). Its pages become *non-resident* and
//! keep every address (`pages/non_resident.rs`); spaces and blocks are unaware.
//!
//! Pages owned by graph or eager spaces, and the persistent heap, are copied to the host. Shared
//! pages are not: their contents last for one replay. So live-out blocks of bump spaces and under
//! [`RetainPolicy::Share`](super::RetainPolicy) are lost. Private (exclusive) blocks stay resident,
//! because peers may know their pages.

use std::time::Duration;

use super::Common;
use crate::error::{Error, Result};
use crate::pages::{ArenaPage, Fence, Hold, Owner, PageId};
use crate::pause::{MovedPage, PageKey, Pausable, Pausables, PausePage, PauseState, Phase};
use crate::units::{Address, Stream};

impl Common {
    fn number(&self) -> u64 {
        self.shared.arena()
    }

    pub(super) fn forget_copies(&self) {
        let gone = |key| matches!(key, PageKey::Page(page) if self.pool().owner(page).is_none());
        self.pause_state.forget_if(self.device.host_pool(), gone);
    }
}

impl Pausable for Common {
    fn tag(&self) -> &str {
        &self.tag
    }

    fn id(&self) -> u64 {
        self.number()
    }

    fn pausables(&self) -> &Pausables {
        self.device.pausables()
    }

    fn pause_state(&self) -> &PauseState {
        &self.pause_state
    }

    fn usable(&self) -> bool {
        self.require_usable().is_ok()
    }

    fn between(&self, begin: &mut dyn FnMut()) -> Result<()> {
        self.order.between(begin)
    }

    fn may_pause(&self, open: u64) -> Result<()> {
        let (pool, driver, number) = (self.pool(), self.pool().driver(), self.number());
        driver.capabilities().require_replacing(driver.info(), "its arenas stay")?;
        if pool.lent_bytes(None, self.shared.account()) > 0 {
            return Err(Error::wrong_state(format!(
                "cannot pause arena {number}: pages of it are on lease; recall the leases first"
            )));
        }
        let pages = pool.exported_of(number);
        if !pages.is_empty() {
            return Err(Error::Exported { pages });
        }
        if open > 0 {
            return Err(Error::wrong_state(format!(
                "cannot pause arena {number}: {open} spaces of it are open; seal or destroy them first"
            )));
        }
        Ok(())
    }

    fn pages_move(&self) {
        self.order.shut();
    }

    fn pages_stay(&self) {
        if self.pause_state.phase() == Phase::Resident {
            self.order.reopen(self.pause_state.contents());
        }
    }

    /// Includes freed blocks and dropped spaces.
    fn add_users(&self, fence: &mut Fence) {
        fence.join(self.order.fence());
        self.registry.cores().iter().for_each(|core| fence.join(core.users()));
        if let Some(eager) = self.registry.eager() {
            fence.join(eager.users());
        }
        // Last: objects dropped meanwhile left their fences here.
        fence.join(self.heap.users());
        fence.join(self.pool().pending_fence(self.number()));
    }

    fn kept_bytes(&self) -> u64 {
        self.pool().held(self.exclusive_owner()).0
    }

    fn hold(&self) -> Option<Hold<'_>> {
        self.shared.reap_returning();
        self.heap.reap(self.pool());
        self.spare_ranges.clear(self.pool());
        Some(self.pool().hold(self.number()))
    }

    fn pages(&self) -> Vec<PausePage> {
        let account = self.shared.account().id();
        let pages = self.pool().arena_pages(self.number()).into_iter().map(|page| {
            let ArenaPage { bytes, owner, .. } = page;
            let moved = PausePage::new(PageKey::Page(page.page), page.at, bytes, (owner, account));
            let moved = moved.resident(page.present, page.unmapped);
            let lasts = matches!(owner, Owner::Retained { .. } | Owner::Kept { .. });
            if lasts { moved.copied(vec![(0, bytes)], false) } else { moved }
        });
        pages.collect()
    }

    fn record(&self, _pages: &[MovedPage], contents: &Fence) {
        self.pool().arrives(self.number(), contents.clone());
    }

    fn moved_ranges(&self, _gone: bool) -> Vec<(Address, u64)> {
        self.pool().addresses(self.number())
    }

    fn resident_in_hooks(&self) -> bool {
        // Hooks renew registrations before the first use.
        false
    }

    fn pin_page(&self, page: PageId) -> Result<()> {
        self.pin_for_peers(page)
    }

    fn mark_on(&self, stream: Stream) -> Result<()> {
        self.order.mark_on(stream)
    }

    fn poll_pending(&self) {
        self.restore_replaced();
        self.shared.reap_returning();
    }

    fn give_up(&self, _limit: Duration) -> u64 {
        self.poll_pending();
        self.spare_ranges.clear(self.pool());
        // The pages count as free pages of the device.
        0
    }
}

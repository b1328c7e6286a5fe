//! Tables of the page pool, and the creation, reuse and release of pages. See the module
//! documentation of `pages`.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use slotmap::SlotMap;

use super::account::Accounts;
use super::events::Events;
use super::free::{FreePages, RunningCalls};
use super::lent::LentPages;
use super::mappings::Range;
use super::owner::{Owner, SkippedVisits, Tallies};
use super::page::Page;
use super::peer::PeerPages;
use super::pending_unmaps::PendingUnmaps;
use super::pool_stats::PoolStats;
use super::reclaim::Reclaimers;
use super::teardown::RunningTeardowns;
use super::waits::Captures;
use super::{AccountId, PageId, RangeId};
use crate::driver::{PageHandle, SharedDriver};
use crate::error::{Error, Result};
use crate::sync::atomic::AtomicU64;
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Address, Peers};

/// Attempts while other threads release memory.
const TRIES: u32 = 1000;
/// Later attempts pause, for a tenth of a second in all.
const YIELDS: u32 = 16;
const PAUSE: Duration = Duration::from_micros(100);

/// Tables of a pool, under one lock. The fields open to `pages` are objects with private fields,
/// except `pages` and `ranges`, which record each mapping twice, and `stats`, which the audit and
/// its tests read.
#[derive(Default)]
pub(super) struct State {
    pub(super) pages: SlotMap<PageId, Page>,
    pub(super) free: FreePages,
    pub(super) ranges: SlotMap<RangeId, Range>,
    pub(super) peers: Peers,
    /// Ranges by base, without those whose addresses go back to the driver.
    bases: BTreeMap<u64, RangeId>,
    pub(super) accounts: Accounts,
    pub(super) tallies: Tallies,
    /// Refused by the driver at release, and their bytes.
    refused: Vec<PageId>,
    refused_bytes: u64,
    /// Imported from other processes.
    pub(super) foreign: PeerPages,
    pub(super) pending: PendingUnmaps,
    pub(super) teardowns: RunningTeardowns,
    pub(super) lent: LentPages,
    pub(super) running: RunningCalls,
    pub(super) stats: PoolStats,
    pub(super) skipped: SkippedVisits,
}

impl State {
    /// Bytes charged to no account.
    pub(super) fn unaccounted(&self) -> u64 {
        self.stats.free_bytes + self.refused_bytes + self.running.releasing().1
    }

    /// Changes with each creation, release, reuse, map and unmap.
    fn activity(&self) -> u64 {
        let stats = &self.stats;
        stats.pages_created + stats.pages_released + stats.pages_reused + stats.maps + stats.unmaps
    }

    pub(super) fn range_at(&self, address: Address) -> Option<&Range> {
        let range = self.ranges.get(*self.bases.range(..=address.0).next_back()?.1)?;
        (address.0 - range.base.0 < range.len).then_some(range)
    }

    pub(super) fn enter_range(&mut self, range: Range) -> RangeId {
        self.stats.reserved_bytes += range.len;
        let base = range.base.0;
        let id = self.ranges.insert(range);
        self.bases.insert(base, id);
        id
    }

    /// Hides a range before its addresses go back to the driver: afterwards other threads may
    /// reserve the same addresses. Returns base and length.
    pub(super) fn begin_free(&mut self, range: RangeId) -> Option<(Address, u64)> {
        let found = self.ranges.get(range)?;
        self.bases.remove(&found.base.0);
        Some((found.base, found.len))
    }

    pub(super) fn end_free(&mut self, range: RangeId, freed: bool) {
        if !freed {
            self.bases.extend(self.ranges.get(range).map(|found| (found.base.0, range)));
        } else if let Some(gone) = self.ranges.remove(range) {
            self.stats.reserved_bytes -= gone.len;
        }
    }

    fn enter(&mut self, page: Page) -> PageId {
        self.stats.pages += 1;
        self.stats.physical_bytes += page.bytes;
        self.stats.peak_physical_bytes = self.stats.peak_physical_bytes.max(self.stats.physical_bytes);
        self.begin(&page);
        self.pages.insert(page)
    }

    fn begin(&mut self, page: &Page) {
        let (pages, bytes, mappings) = page.weight();
        match (page.owner, page.account) {
            (Owner::Free, _) => self.stats.free_bytes += page.bytes,
            (Owner::Leaving, _) => self.refused_bytes += page.bytes,
            (_, Some(account)) => {
                self.accounts.join(account);
                self.accounts.change(account, bytes, 0);
            }
            (_, None) => {}
        }
        self.count(page.owner, pages, bytes, mappings);
    }

    fn end(&mut self, page: &Page) {
        let (pages, bytes, mappings) = page.weight();
        match (page.owner, page.account) {
            (Owner::Free, _) => self.stats.free_bytes -= page.bytes,
            (Owner::Leaving, _) => self.refused_bytes -= page.bytes,
            (_, Some(account)) => {
                self.accounts.change(account, -bytes, 0);
                self.accounts.leave(account);
            }
            (_, None) => {}
        }
        self.count(page.owner, -pages, -bytes, -mappings);
    }

    pub(super) fn count(&mut self, owner: Owner, pages: i64, bytes: i64, mappings: i64) {
        self.lent.note_change(owner);
        self.tally(owner, pages, bytes, mappings);
    }

    fn tally(&mut self, owner: Owner, pages: i64, bytes: i64, mappings: i64) {
        if owner.retains() {
            self.stats.retained_bytes = self.stats.retained_bytes.saturating_add_signed(bytes);
        }
        self.tallies.count(owner, pages, bytes, mappings);
    }

    /// Counts mappings made (or, if negative, unmapped) in the driver. `lent`: of a lease.
    pub(super) fn count_mapping(&mut self, owner: Owner, mappings: i64, lent: bool) {
        if !lent {
            self.lent.note_change(owner);
        }
        self.tally(owner, 0, 0, mappings);
        self.stats.maps += mappings.max(0).unsigned_abs();
        self.stats.unmaps += mappings.min(0).unsigned_abs();
        self.stats.mappings = self.stats.mappings.saturating_add_signed(mappings);
    }

    /// Counts spaces by the tags of the ranges.
    pub(super) fn shown_by(&self, id: PageId) -> usize {
        let Some(page) = self.pages.get(id) else { return 0 };
        let ranges = page.mappings.iter().filter_map(|(range, _)| self.ranges.get(*range));
        ranges.map(|range| range.tag).collect::<BTreeSet<u64>>().len()
    }

    /// Counts memory that a page gets (1) or loses (-1) while it stays in the tables.
    pub(super) fn count_memory(&mut self, page: (Owner, Option<AccountId>), pages: i64, bytes: u64) {
        let bytes = bytes as i64 * pages;
        self.count(page.0, pages, bytes, 0);
        if let Some(account) = page.1 {
            self.accounts.change(account, bytes, 0);
        }
        let stats = &mut self.stats;
        stats.pages = stats.pages.saturating_add_signed(pages);
        stats.physical_bytes = stats.physical_bytes.saturating_add_signed(bytes);
        stats.absent_bytes = stats.absent_bytes.saturating_add_signed(-bytes);
    }

    pub(super) fn remove(&mut self, id: PageId) -> Option<Page> {
        let page = self.pages.remove(id)?;
        if page.handle.is_some() {
            self.stats.pages -= 1;
            self.stats.physical_bytes -= page.bytes;
        } else {
            self.stats.absent_bytes -= page.bytes;
        }
        self.end(&page);
        Some(page)
    }

    fn rename(&mut self, id: PageId, owner: Owner, account: Option<AccountId>) -> Option<PageId> {
        let mut page = self.pages.remove(id)?;
        self.end(&page);
        (page.owner, page.account) = (owner, account);
        self.begin(&page);
        Some(self.pages.insert(page))
    }

    /// Gives a page to an owner under the same key. Returns its bytes.
    fn give(&mut self, id: PageId, to: Owner) -> Option<u64> {
        let page = self.pages.get_mut(id)?;
        let from = std::mem::replace(&mut page.owner, to);
        let (size, (pages, bytes, mappings)) = (page.bytes, page.weight());
        self.count(from, -pages, -bytes, -mappings);
        self.count(to, pages, bytes, mappings);
        Some(size)
    }

    /// Frees an unused page under a new key, so stale keys find nothing.
    pub(super) fn free_if_unused(&mut self, id: PageId) {
        let Some(page) = self.pages.get(id) else { return };
        if page.pins > 0 || !page.mappings.is_empty() || matches!(page.owner, Owner::Free | Owner::Leaving) {
            return;
        }
        let bytes = page.bytes;
        if page.exported > 0 {
            self.give(id, Owner::Exported);
        } else if page.handle.is_none() {
            self.remove(id);
        } else if let Some(id) = self.rename(id, Owner::Free, None) {
            self.free.add(bytes, id);
        }
    }
}

/// Page pool of one device: records the owner and the mappings of every physical page. Thread-safe;
/// its mutex is a leaf lock.
pub struct PagePool {
    driver: SharedDriver,
    events: Arc<Events>,
    state: Mutex<State>,
    /// Leased pages, changed in `lent.rs` under the lock and readable without it.
    pub(super) lent: AtomicU64,
    /// Exported pages, changed in `exports.rs` under the lock and readable without it.
    pub(super) exported: AtomicU64,
    pub(super) captures: Captures,
    pub(super) reclaimers: Reclaimers,
}

impl PagePool {
    pub(crate) fn shown_by(&self, page: PageId) -> usize {
        self.lock().shown_by(page)
    }

    /// Creates an empty pool for the driver's device.
    #[must_use]
    pub fn new(driver: SharedDriver) -> Arc<Self> {
        let events = Events::new(&driver);
        let (state, reclaimers) = (Mutex::default(), Reclaimers::default());
        let (lent, exported) = (AtomicU64::new(0), AtomicU64::new(0));
        let captures = Captures::default();
        Arc::new(Self { driver, events, state, lent, exported, captures, reclaimers })
    }

    /// Returns the driver of the device.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// Fails if `requested` exceeds the device's memory; checked before a split into pages.
    pub(crate) fn refuse_hopeless(&self, requested: u64) -> Result<()> {
        let (total, device) = (self.driver.info().total_bytes, self.driver.info().ordinal);
        if requested <= total {
            return Ok(());
        }
        Err(Error::OutOfMemory { requested, free: self.driver.free_bytes()?, total, device, space: None })
    }

    /// Returns the events of the device.
    #[must_use]
    pub fn events(&self) -> &Arc<Events> {
        &self.events
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    pub(super) fn ordinal(&self) -> i32 {
        self.driver.info().ordinal
    }

    /// Takes a free page of this size, else a new one, pinned once. Returns whether it is new.
    /// Without room, reaps finished pending unmaps, then releases free pages of other sizes.
    pub(super) fn take(&self, bytes: u64, owner: Owner, account: AccountId) -> Result<(PageId, bool)> {
        let mut tries = 0;
        loop {
            let before = self.lock().activity();
            let refused = match self.try_take(bytes, owner, account) {
                Err(error) if error.is_out_of_memory() => error,
                result => return result,
            };
            if self.reap() || self.release_free(bytes) > 0 {
                continue;
            }
            // Other threads may be releasing memory, or have done so since the attempt.
            let unchanged = {
                let state = self.lock();
                !state.running.any() && state.activity() == before
            };
            tries += 1;
            if unchanged || tries > TRIES {
                return Err(refused);
            }
            // Yields may pass before a releasing thread runs again.
            if tries <= YIELDS || cfg!(feature = "shuttle") {
                std::thread::yield_now();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
    }

    fn try_take(&self, bytes: u64, owner: Owner, account: AccountId) -> Result<(PageId, bool)> {
        {
            let state = &mut *self.lock();
            let others = state.unaccounted();
            // The device account already includes a free page of this size.
            let of_device = if state.free.has(bytes) { others - bytes } else { others };
            if let Some(refusal) = state.accounts.refusal(account, bytes, of_device, self.ordinal()) {
                return Err(refusal);
            }
            if let Some(id) = state.free.take(bytes).and_then(|id| state.rename(id, owner, Some(account))) {
                if let Some(page) = state.pages.get_mut(id) {
                    page.pins = 1;
                }
                state.stats.pages_reused += 1;
                return Ok((id, false));
            }
            state.running.begin_create(bytes);
            state.accounts.join(account);
            state.accounts.change(account, 0, bytes as i64);
        }
        let created = self.driver.create(bytes);
        let state = &mut *self.lock();
        state.running.end_create(bytes);
        state.accounts.change(account, 0, -(bytes as i64));
        let entered = created.map(|handle| {
            state.stats.pages_created += 1;
            (state.enter(Page::new(handle, bytes, owner, Some(account), 1)), true)
        });
        state.accounts.leave(account);
        entered
    }

    /// `None`: the page has a different owner or key.
    pub(super) fn pin(&self, id: PageId, owner: Owner) -> Option<u64> {
        let mut state = self.lock();
        let page = state.pages.get_mut(id).filter(|page| page.owner == owner)?;
        page.pins += 1;
        Some(page.bytes)
    }

    pub(super) fn pin_any(&self, id: PageId) {
        if let Some(page) = self.lock().pages.get_mut(id) {
            page.pins += 1;
        }
    }

    pub(super) fn unpin(&self, id: PageId) {
        let mut state = self.lock();
        if let Some(page) = state.pages.get_mut(id) {
            page.pins -= 1;
            state.free_if_unused(id);
        }
    }

    /// Releases an unused page to the driver, to undo a creation and to pause memory. Returns false
    /// if the driver refused.
    pub(super) fn unpin_and_release(&self, id: PageId) -> bool {
        let unused = {
            let mut state = self.lock();
            let Some(page) = state.pages.get_mut(id) else { return true };
            page.pins -= 1;
            let unused = page.pins == 0 && page.mappings.is_empty() && page.exported == 0;
            if unused {
                state.leave(id)
            } else {
                state.free_if_unused(id);
                None
            }
        };
        unused.is_none_or(|page| self.release(page))
    }

    /// Changes the owner and returns the page's bytes. With `sole`, only if the page has one
    /// mapping and no pin. `None`: nothing changed.
    pub(crate) fn hand_over(&self, id: PageId, from: Owner, to: Owner, sole: bool) -> Option<u64> {
        let mut state = self.lock();
        let page = state.pages.get(id)?;
        if page.owner != from || sole && (page.mappings.len(), page.pins) != (1, 0) {
            return None;
        }
        state.give(id, to)
    }

    /// Returns the owner of a page. `None`: the key is stale.
    #[must_use]
    pub fn owner(&self, id: PageId) -> Option<Owner> {
        self.lock().pages.get(id).map(|page| page.owner)
    }

    /// Owner of a page, and the ranges that map it.
    pub(crate) fn showing(&self, id: PageId) -> Option<(Owner, BTreeSet<RangeId>)> {
        let state = self.lock();
        let page = state.pages.get(id)?;
        Some((page.owner, page.mappings.iter().map(|(range, _)| *range).collect()))
    }

    /// Releases free pages to the driver, largest first, until `bytes` are released. Returns the
    /// released bytes.
    pub fn release_free(&self, bytes: u64) -> u64 {
        let mut released = 0;
        while released < bytes {
            let page = {
                let mut state = self.lock();
                state.free.take_largest().and_then(|id| state.leave(id))
            };
            let Some(page) = page else { break };
            let bytes = page.bytes;
            if self.release(page) {
                released += bytes;
            }
        }
        released
    }

    /// Releases a page already removed from the tables. Returns false if the driver refused: it is
    /// retried later.
    fn release(&self, page: Page) -> bool {
        page.handle.is_none_or(|handle| self.release_handle(handle, page.bytes))
    }

    /// Releases memory counted in `State::running`.
    pub(super) fn release_handle(&self, handle: PageHandle, bytes: u64) -> bool {
        // SAFETY: our page without mappings, removed from the tables: released once.
        let result = unsafe { self.driver.release(handle) };
        let mut state = self.lock();
        state.running.end_release(bytes);
        let Err(error) = result else {
            state.stats.pages_released += 1;
            return true;
        };
        let id = state.enter(Page::new(handle, bytes, Owner::Leaving, None, 0));
        state.refused.push(id);
        drop(state);
        tracing::warn!(%error, bytes, "the driver did not take a page back; kept for another try");
        false
    }

    pub(super) fn retry_pages(&self) -> Result<()> {
        let refused = std::mem::take(&mut self.lock().refused);
        let mut left = 0;
        for id in refused {
            let page = self.lock().leave(id);
            left += u64::from(page.is_some_and(|page| !self.release(page)));
        }
        if left == 0 {
            return Ok(());
        }
        Err(Error::Driver { call: "release", code: -1, name: format!("{left} pages were refused again") })
    }

    /// Returns the current counts.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.lock();
        PoolStats {
            budget_bytes: state.accounts.stats(state.accounts.root()).most_bytes,
            reservations: state.ranges.len() as u64,
            pending: (state.refused.len() + state.pending.len() + state.foreign.pending()) as u64,
            ..state.stats
        }
    }

    /// Returns base and tag of the range with this address.
    #[must_use]
    pub fn range_at(&self, address: Address) -> Option<(Address, u64)> {
        let state = self.lock();
        state.range_at(address).map(|range| (range.base, range.tag))
    }
}

impl State {
    fn leave(&mut self, id: PageId) -> Option<Page> {
        let page = self.remove(id)?;
        if page.handle.is_some() {
            self.running.begin_release(page.bytes);
        }
        Some(page)
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool").field("device", self.driver.info()).field("stats", &self.stats()).finish()
    }
}

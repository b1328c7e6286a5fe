//! The page pool of one device: every page, who holds it, and how one is had.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use slotmap::SlotMap;

use super::account::Accounts;
use super::deferred::{Arriving, ArrivingId, Deferred, DeferredId};
use super::events::Events;
use super::ledger::{Holder, Tally};
use super::lent::LentPages;
use super::mappings::Range;
use super::peer::PeerPages;
use super::reclaim::Reclaimers;
use super::teardown::Leaving;
use super::waits::Captures;
use super::{AccountId, PageId, RangeId};
use crate::driver::{PageHandle, SharedDriver};
use crate::error::{Error, Result};
use crate::sync::atomic::AtomicU64;
use crate::sync::{Mutex, MutexGuard};
use crate::units::{Address, Peers};

/// How often a page is asked for again while other threads give some back.
const TRIES: u32 = 1000;

#[derive(Debug)]
pub(super) struct Page {
    /// `None`: it is absent, see [`absent`](super::absent). Holder, account and mappings stay.
    pub(super) handle: Option<PageHandle>,
    pub(super) bytes: u64,
    pub(super) holder: Holder,
    /// Whose budget it counts toward; `None` if it is free, or the driver would not take it back.
    pub(super) account: Option<AccountId>,
    /// Where it shows.
    pub(super) mappings: BTreeSet<(RangeId, u64)>,
    /// Those of them that the driver does not have: all while it is absent, some where it went or came half-way.
    pub(super) away: BTreeSet<(RangeId, u64)>,
    /// Changes under way that rely on it.
    pub(super) pins: u32,
    /// How often it was said that others have it.
    pub(super) exported: u32,
}

impl Page {
    /// A page that shows nowhere yet.
    fn new(handle: PageHandle, bytes: u64, holder: Holder, account: Option<AccountId>, pins: u32) -> Self {
        let (mappings, away) = (BTreeSet::new(), BTreeSet::new());
        Self { handle: Some(handle), bytes, holder, account, mappings, away, pins, exported: 0 }
    }

    /// What it counts for: pages, bytes and mappings that the driver has.
    pub(super) fn weight(&self) -> (i64, i64, i64) {
        let mappings = (self.mappings.len() - self.away.len()) as i64;
        if self.handle.is_some() { (1, self.bytes as i64, mappings) } else { (0, 0, mappings) }
    }
}

/// Exact counts of one device's pages and driver calls since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolStats {
    /// Bytes held from the driver now.
    pub physical_bytes: u64,
    /// The most bytes ever held at once.
    pub peak_physical_bytes: u64,
    /// Bytes held for single spaces, for kept blocks and for exclusive ones.
    pub retained_bytes: u64,
    /// Bytes of free pages: nobody maps them, and whoever asks next gets them.
    pub free_bytes: u64,
    /// The byte budget; `None`: none.
    pub budget_bytes: Option<u64>,
    /// Bytes of pages that stepped aside: they have a holder and addresses, and no memory.
    pub absent_bytes: u64,
    /// Bytes of pages that other processes have too ([`Device::export_page`](crate::Device::export_page)): they stay until that is over.
    pub exported_bytes: u64,
    /// Pages held now.
    pub pages: u64,
    /// Pages created so far.
    pub pages_created: u64,
    /// Pages given back so far.
    pub pages_released: u64,
    /// How often a free page was had without a call to the driver.
    pub pages_reused: u64,
    /// Mappings that exist now.
    pub mappings: u64,
    /// Mappings made so far.
    pub maps: u64,
    /// Mappings taken away so far.
    pub unmaps: u64,
    /// Bytes of addresses reserved now.
    pub reserved_bytes: u64,
    /// Reservations that exist now.
    pub reservations: u64,
    /// Things that wait for a fence, and things that the driver has refused to take back so far: both are tried again.
    pub pending: u64,
}

pub(super) struct State {
    pub(super) pages: SlotMap<PageId, Page>,
    /// Pages that nobody maps or has pinned, by size.
    pub(super) free: BTreeMap<u64, Vec<PageId>>,
    pub(super) ranges: SlotMap<RangeId, Range>,
    /// Who may use what is mapped in all of them.
    pub(super) peers: Peers,
    /// Every range by its base.
    pub(super) bases: BTreeMap<u64, RangeId>,
    pub(super) accounts: Accounts,
    pub(super) tallies: HashMap<Holder, Tally>,
    /// Bytes of free pages, and of those that the driver would not take back.
    pub(super) free_bytes: u64,
    pub(super) refused_bytes: u64,
    /// Pages that the driver would not take back.
    pub(super) refused: Vec<PageId>,
    /// Pages that are absent, and their bytes.
    pub(super) absent: (u64, u64),
    /// Pages that others have too, and their bytes.
    pub(super) exported: (u64, u64),
    /// Pages of other processes.
    pub(super) foreign: PeerPages,
    /// Ranges whose teardown it refused.
    pub(super) stuck: Vec<RangeId>,
    pub(super) deferred: SlotMap<DeferredId, Deferred>,
    /// Parts of ranges that are being torn down, by where they begin; none overlaps another.
    pub(super) leaving: BTreeMap<(RangeId, u64), Leaving>,
    /// Arenas whose contents are on their way.
    pub(super) arriving: SlotMap<ArrivingId, Arriving>,
    /// Pages on lease.
    pub(super) lent: LentPages,
    /// Counts what changes at pages of arenas, but not what leases do there.
    pub(super) shared_changes: u64,
    /// Bytes that the driver is being asked for.
    pub(super) creating: u64,
    /// Pages that the driver is being given back, and their bytes.
    pub(super) releasing: (u64, u64),
    pub(super) stats: PoolStats,
}

impl State {
    /// Bytes of the device that are in nobody's account.
    pub(super) fn unaccounted(&self) -> u64 {
        self.free_bytes + self.refused_bytes + self.releasing.1
    }

    /// A number that changes with every page that comes, goes or changes hands.
    fn activity(&self) -> u64 {
        let stats = &self.stats;
        stats.pages_created + stats.pages_released + stats.pages_reused + stats.maps + stats.unmaps
    }

    /// Whether bytes are on their way from or to the driver.
    fn others_at_work(&self) -> bool {
        self.releasing.0 > 0 || self.creating > 0
    }

    /// Adds a page to the books.
    fn enter(&mut self, page: Page) -> PageId {
        self.stats.physical_bytes += page.bytes;
        self.stats.peak_physical_bytes = self.stats.peak_physical_bytes.max(self.stats.physical_bytes);
        self.begin(&page);
        self.pages.insert(page)
    }

    /// What depends on holder and account, added.
    fn begin(&mut self, page: &Page) {
        let (pages, bytes, mappings) = page.weight();
        match (page.holder, page.account) {
            (Holder::Free, _) => self.free_bytes += page.bytes,
            (Holder::Leaving, _) => self.refused_bytes += page.bytes,
            (_, Some(account)) => {
                self.accounts.join(account);
                self.accounts.change(account, bytes, 0);
            }
            (_, None) => {}
        }
        self.count(page.holder, pages, bytes, mappings);
    }

    /// The same, taken away.
    pub(super) fn end(&mut self, page: &Page) {
        let (pages, bytes, mappings) = page.weight();
        match (page.holder, page.account) {
            (Holder::Free, _) => self.free_bytes -= page.bytes,
            (Holder::Leaving, _) => self.refused_bytes -= page.bytes,
            (_, Some(account)) => {
                self.accounts.change(account, -bytes, 0);
                self.accounts.leave(account);
            }
            (_, None) => {}
        }
        self.count(page.holder, -pages, -bytes, -mappings);
    }

    /// Changes what a holder has.
    pub(super) fn count(&mut self, holder: Holder, pages: i64, bytes: i64, mappings: i64) {
        self.shared_changes += u64::from(matches!(holder, Holder::Shared { .. }));
        if holder.retains() {
            self.stats.retained_bytes = self.stats.retained_bytes.saturating_add_signed(bytes);
        }
        let tally = self.tallies.entry(holder).or_default();
        tally.pages = tally.pages.saturating_add_signed(pages);
        tally.bytes = tally.bytes.saturating_add_signed(bytes);
        tally.mappings = tally.mappings.saturating_add_signed(mappings);
        if *tally == Tally::default() {
            self.tallies.remove(&holder);
        }
    }

    /// A holder's page is mapped or unmapped; `lent`: at the place where it is on lease.
    pub(super) fn count_mapping(&mut self, holder: Holder, mappings: i64, lent: bool) {
        let before = self.shared_changes;
        self.count(holder, 0, 0, mappings);
        if lent {
            self.shared_changes = before;
        }
    }

    /// How many tags the ranges have in which a page shows: how many spaces show it.
    pub(super) fn shown_by(&self, id: PageId) -> usize {
        let Some(page) = self.pages.get(id) else { return 0 };
        let ranges = page.mappings.iter().filter_map(|(range, _)| self.ranges.get(*range));
        ranges.map(|range| range.tag).collect::<BTreeSet<u64>>().len()
    }

    /// Takes a page off the books.
    fn remove(&mut self, id: PageId) -> Option<Page> {
        let page = self.pages.remove(id)?;
        if page.handle.is_some() {
            self.stats.physical_bytes -= page.bytes;
        } else {
            self.absent = (self.absent.0 - 1, self.absent.1 - page.bytes);
        }
        self.end(&page);
        Some(page)
    }

    fn rename(&mut self, id: PageId, holder: Holder, account: Option<AccountId>) -> Option<PageId> {
        let mut page = self.pages.remove(id)?;
        self.end(&page);
        (page.holder, page.account) = (holder, account);
        self.begin(&page);
        Some(self.pages.insert(page))
    }

    /// A page that nobody maps or has pinned any more is free, under another name: whoever still knows the old one finds nothing.
    pub(super) fn settle(&mut self, id: PageId) {
        let Some(page) = self.pages.get(id) else { return };
        if page.pins > 0 || !page.mappings.is_empty() || matches!(page.holder, Holder::Free | Holder::Leaving)
        {
            return;
        }
        let bytes = page.bytes;
        if page.exported > 0 {
            self.abandon(id);
        } else if page.handle.is_none() {
            // Nothing of it is left.
            self.remove(id);
        } else if let Some(id) = self.rename(id, Holder::Free, None) {
            self.free.entry(bytes).or_default().push(id);
        }
    }

    fn pop_free(&mut self, bytes: u64) -> Option<PageId> {
        let list = self.free.get_mut(&bytes)?;
        let id = list.pop();
        if list.is_empty() {
            self.free.remove(&bytes);
        }
        id
    }
}

/// Every physical page of one device, who holds it, and where it shows.
///
/// Thread-safe. Its lock is a leaf.
pub struct PagePool {
    driver: SharedDriver,
    events: Arc<Events>,
    state: Mutex<State>,
    /// How many pages are on lease, to be asked without the lock.
    pub(super) lent: AtomicU64,
    /// How many pages others have too, to be asked without the lock.
    pub(super) exported: AtomicU64,
    pub(super) captures: Captures,
    pub(super) reclaimers: Reclaimers,
}

impl PagePool {
    /// How many spaces show a page.
    pub(crate) fn shown_by(&self, page: PageId) -> usize {
        self.lock().shown_by(page)
    }

    /// A pool without pages on the driver's device.
    #[must_use]
    pub fn new(driver: SharedDriver) -> Arc<Self> {
        let state = State {
            pages: SlotMap::default(),
            free: BTreeMap::new(),
            ranges: SlotMap::default(),
            peers: Peers::NONE,
            bases: BTreeMap::new(),
            accounts: Accounts::new(),
            tallies: HashMap::new(),
            free_bytes: 0,
            refused_bytes: 0,
            refused: Vec::new(),
            absent: (0, 0),
            exported: (0, 0),
            foreign: PeerPages::default(),
            stuck: Vec::new(),
            deferred: SlotMap::with_key(),
            leaving: BTreeMap::new(),
            arriving: SlotMap::with_key(),
            lent: LentPages::default(),
            shared_changes: 0,
            creating: 0,
            releasing: (0, 0),
            stats: PoolStats::default(),
        };
        let events = Events::new(&driver);
        let (state, reclaimers) = (Mutex::new(state), Reclaimers::default());
        let (lent, exported) = (AtomicU64::new(0), AtomicU64::new(0));
        let captures = Captures::default();
        Arc::new(Self { driver, events, state, lent, exported, captures, reclaimers })
    }

    /// The driver of the device.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// [`Error::OutOfMemory`] for more than the device has in all, before a page of it is looked at: there may be very many.
    pub(crate) fn refuse_hopeless(&self, requested: u64) -> Result<()> {
        let (total, device) = (self.driver.info().total_bytes, self.driver.info().ordinal);
        if requested <= total {
            return Ok(());
        }
        Err(Error::OutOfMemory { requested, free: self.driver.free_bytes()?, total, device, space: None })
    }

    /// The events of the device.
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

    /// A page of `bytes` for a holder, pinned once, and whether it was created for that: a free one of that size, else a new one. If
    /// the device or its budget has no room for a new one, free pages of other sizes go back first, and what waits for fences
    /// that are done.
    ///
    /// # Errors
    /// [`Error::OverBudget`], of the account or of one above it, or what the driver says.
    pub(super) fn take(&self, bytes: u64, holder: Holder, account: AccountId) -> Result<(PageId, bool)> {
        let mut tries = 0;
        loop {
            let before = self.lock().activity();
            let refused = match self.try_take(bytes, holder, account) {
                Err(error) if error.is_out_of_memory() => error,
                result => return result,
            };
            if self.finish_done() || self.release_free(bytes) > 0 {
                continue;
            }
            // What other threads are giving back just now is not there yet; what they gave back meanwhile may be.
            let unchanged = {
                let state = self.lock();
                !state.others_at_work() && state.activity() == before
            };
            tries += 1;
            if unchanged || tries > TRIES {
                return Err(refused);
            }
            std::thread::yield_now();
        }
    }

    fn try_take(&self, bytes: u64, holder: Holder, account: AccountId) -> Result<(PageId, bool)> {
        {
            let state = &mut *self.lock();
            let others = state.unaccounted();
            // A free page counts toward the device already.
            let of_device = if state.free.contains_key(&bytes) { others - bytes } else { others };
            if let Some(refusal) = state.accounts.refusal(account, bytes, of_device, self.ordinal()) {
                return Err(refusal);
            }
            if let Some(id) = state.pop_free(bytes).and_then(|id| state.rename(id, holder, Some(account))) {
                if let Some(page) = state.pages.get_mut(id) {
                    page.pins = 1;
                }
                state.stats.pages_reused += 1;
                return Ok((id, false));
            }
            state.creating += bytes;
            state.accounts.join(account);
            state.accounts.change(account, 0, bytes as i64);
        }
        let created = self.driver.create(bytes);
        let state = &mut *self.lock();
        state.creating -= bytes;
        state.accounts.change(account, 0, -(bytes as i64));
        let entered = created.map(|handle| {
            state.stats.pages_created += 1;
            (state.enter(Page::new(handle, bytes, holder, Some(account), 1)), true)
        });
        state.accounts.leave(account);
        entered
    }

    /// Relies on a page that a holder has, until [`unpin`](Self::unpin); its bytes. `None`: the holder does not have it any more.
    pub(super) fn pin(&self, id: PageId, holder: Holder) -> Option<u64> {
        let mut state = self.lock();
        let page = state.pages.get_mut(id).filter(|page| page.holder == holder)?;
        page.pins += 1;
        Some(page.bytes)
    }

    /// As [`pin`](Self::pin), whoever holds it.
    pub(super) fn pin_any(&self, id: PageId) {
        if let Some(page) = self.lock().pages.get_mut(id) {
            page.pins += 1;
        }
    }

    pub(super) fn unpin(&self, id: PageId) {
        let mut state = self.lock();
        if let Some(page) = state.pages.get_mut(id) {
            page.pins -= 1;
            state.settle(id);
        }
    }

    /// As [`unpin`](Self::unpin); what is free then goes back to the driver, and whether that took it. For the undoing of what was
    /// created, and for memory that steps aside.
    pub(super) fn unpin_and_release(&self, id: PageId) -> bool {
        let unused = {
            let mut state = self.lock();
            let Some(page) = state.pages.get_mut(id) else { return true };
            page.pins -= 1;
            let unused = page.pins == 0 && page.mappings.is_empty() && page.exported == 0;
            if unused {
                state.leave(id)
            } else {
                state.settle(id);
                None
            }
        };
        unused.is_none_or(|page| self.release(page))
    }

    /// Changes a page's holder, if it has the holder that is expected and, if `sole`, one mapping and no pin; the page's bytes if it did.
    pub(crate) fn hand_over(&self, id: PageId, from: Holder, to: Holder, sole: bool) -> Option<u64> {
        let state = &mut *self.lock();
        let page = state.pages.get_mut(id)?;
        if page.holder != from || sole && (page.mappings.len(), page.pins) != (1, 0) {
            return None;
        }
        page.holder = to;
        let (size, (pages, bytes, mappings)) = (page.bytes, page.weight());
        state.count(from, -pages, -bytes, -mappings);
        state.count(to, pages, bytes, mappings);
        Some(size)
    }

    /// Who holds a page; `None`: it is gone, or was free in between.
    #[must_use]
    pub fn holder(&self, id: PageId) -> Option<Holder> {
        self.lock().pages.get(id).map(|page| page.holder)
    }

    /// Who holds a page and in which ranges it shows.
    pub(crate) fn showing(&self, id: PageId) -> Option<(Holder, BTreeSet<RangeId>)> {
        let state = self.lock();
        let page = state.pages.get(id)?;
        Some((page.holder, page.mappings.iter().map(|(range, _)| *range).collect()))
    }

    /// Bytes that a holder has, and how many pages.
    #[must_use]
    pub fn held(&self, holder: Holder) -> (u64, u64) {
        self.lock().tallies.get(&holder).map_or((0, 0), |tally| (tally.bytes, tally.pages))
    }

    /// Gives free pages back to the driver, the longest first, until `bytes` are; how many bytes were.
    pub fn release_free(&self, bytes: u64) -> u64 {
        let mut released = 0;
        while released < bytes {
            let page = {
                let mut state = self.lock();
                let longest = state.free.keys().next_back().copied();
                let id = longest.and_then(|longest| state.pop_free(longest));
                id.and_then(|id| state.leave(id))
            };
            let Some(page) = page else { break };
            let bytes = page.bytes;
            if self.release(page) {
                released += bytes;
            }
        }
        released
    }

    /// Gives a page that is off the books back; whether the driver took it. If not, it is kept for another try.
    fn release(&self, page: Page) -> bool {
        page.handle.is_none_or(|handle| self.release_handle(handle, page.bytes))
    }

    /// As [`release`](Self::release), for the memory of a page; it counts as being released.
    pub(super) fn release_handle(&self, handle: PageHandle, bytes: u64) -> bool {
        // SAFETY: a page of this driver that nobody maps; it is off the books, so that nobody else releases it.
        let result = unsafe { self.driver.release(handle) };
        let mut state = self.lock();
        state.releasing = (state.releasing.0 - 1, state.releasing.1 - bytes);
        let Err(error) = result else {
            state.stats.pages_released += 1;
            return true;
        };
        let id = state.enter(Page::new(handle, bytes, Holder::Leaving, None, 0));
        state.refused.push(id);
        drop(state);
        tracing::warn!(%error, bytes, "the driver did not take a page back; kept for another try");
        false
    }

    /// Tries again to give back the pages that the driver refused.
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

    /// The counts as they are now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.lock();
        PoolStats {
            free_bytes: state.free_bytes,
            budget_bytes: state.accounts.stats(state.accounts.root()).most_bytes,
            absent_bytes: state.absent.1,
            exported_bytes: state.exported.1,
            pages: state.pages.len() as u64 - state.absent.0,
            reservations: state.ranges.len() as u64,
            pending: (state.refused.len()
                + state.stuck.len()
                + state.deferred.len()
                + state.foreign.pending()) as u64,
            ..state.stats
        }
    }

    /// The range that an address lies in: its base and the tag it was reserved with.
    #[must_use]
    pub fn range_at(&self, address: Address) -> Option<(Address, u64)> {
        let state = self.lock();
        let (base, id) = state.bases.range(..=address.0).next_back()?;
        let range = state.ranges.get(*id)?;
        (address.0 - base < range.len).then_some((range.base, range.tag))
    }
}

impl State {
    /// Takes a page off the books that is about to go back.
    fn leave(&mut self, id: PageId) -> Option<Page> {
        let page = self.remove(id)?;
        // Before the driver is asked: once it has the memory back, another thread may create a page of it.
        if page.handle.is_some() {
            self.releasing = (self.releasing.0 + 1, self.releasing.1 + page.bytes);
        }
        Some(page)
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool").field("device", self.driver.info()).field("stats", &self.stats()).finish()
    }
}

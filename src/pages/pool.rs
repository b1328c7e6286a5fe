//! The page pool of one device.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use slotmap::SlotMap;

use super::PageId;
use super::budget::Accounts;
use super::reservation::Remains;
use crate::driver::{Event, PageHandle, SharedDriver};
use crate::error::{Error, Result};
use crate::sync::Mutex;

/// Who a page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Owner {
    /// An arena: every space of it may map the page.
    Shared {
        /// The arena's number.
        arena: u64,
    },
    /// One space: the page holds retained blocks, and no other space maps it.
    Retained {
        /// The arena's number.
        arena: u64,
        /// The space's number.
        space: u64,
    },
    /// Nobody: it goes back to the driver with its last pin.
    Doomed {
        /// The number of the arena whose it was, against which it counts until the driver has it.
        arena: u64,
    },
}

impl Owner {
    /// The number of the arena whose page it is, or was before nobody wanted it any more.
    #[must_use]
    pub fn arena(self) -> u64 {
        match self {
            Self::Shared { arena } | Self::Retained { arena, .. } | Self::Doomed { arena } => arena,
        }
    }

    pub(super) fn is_doomed(self) -> bool {
        matches!(self, Self::Doomed { .. })
    }
}

pub(super) struct Page {
    handle: PageHandle,
    pub(super) bytes: u64,
    pub(super) owner: Owner,
    pub(super) pins: u32,
}

/// Exact counts of one device's pages and driver calls since the device was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolStats {
    /// Bytes held from the driver now.
    pub physical_bytes: u64,
    /// The most bytes ever held at once.
    pub peak_physical_bytes: u64,
    /// Bytes owned by single spaces (retained blocks).
    pub retained_bytes: u64,
    /// Bytes of pages that are mapped nowhere.
    pub free_bytes: u64,
    /// The byte budget; `None`: none.
    pub budget_bytes: Option<u64>,
    /// Pages held now.
    pub pages: u64,
    /// Pages created so far.
    pub pages_created: u64,
    /// Pages given back so far.
    pub pages_released: u64,
    /// Mappings that exist now.
    pub mappings: u64,
    /// Mappings made so far (each is one map and one set-access call).
    pub maps: u64,
    /// Mappings taken away so far.
    pub unmaps: u64,
    /// Bytes of addresses reserved now.
    pub reserved_bytes: u64,
    /// Reservations that exist now.
    pub reservations: u64,
    /// Things the driver has refused to take back so far, kept for the next try.
    pub pending: u64,
}

#[derive(Default)]
pub(super) struct State {
    pub(super) pages: SlotMap<PageId, Page>,
    /// Ranges whose teardown the driver refused.
    remains: Vec<Remains>,
    /// Ranges that the replays of an arena may still be using.
    deferred: Vec<(u64, Remains)>,
    /// Events it would not destroy.
    events: Vec<Event>,
    pub(super) stats: PoolStats,
    /// Bytes that the driver is being asked for.
    pub(super) creating: u64,
    /// Pages that the driver is being given back, and their bytes.
    pub(super) releasing: (u64, u64),
    /// The same bytes by arena.
    pub(super) accounts: Accounts,
}

impl State {
    fn hold(&mut self, page: Page) -> PageId {
        self.stats.physical_bytes += page.bytes;
        self.stats.peak_physical_bytes = self.stats.peak_physical_bytes.max(self.stats.physical_bytes);
        self.accounts.change(page.owner.arena(), |account| account.held += page.bytes);
        self.pages.insert(page)
    }
}

/// Every physical page of one device, and what each is for.
///
/// Thread-safe. Its lock is never held across a driver call, and no other lock of this crate is taken inside it.
pub struct PagePool {
    driver: SharedDriver,
    pub(super) state: Mutex<State>,
}

impl PagePool {
    /// A pool without pages on the driver's device.
    #[must_use]
    pub fn new(driver: SharedDriver) -> Arc<Self> {
        Arc::new(Self { driver, state: Mutex::new(State::default()) })
    }

    /// The driver of the device.
    #[must_use]
    pub fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// Limits the bytes this pool may hold from now on; `None` lifts the limit. Nothing is taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.state.lock().stats.budget_bytes = bytes;
    }

    /// Creates a page of `bytes` and pins it once.
    ///
    /// # Errors
    /// [`Error::OverBudget`], of the device or of the owner's arena, or what the driver says; nothing has changed then.
    pub fn create(self: &Arc<Self>, bytes: u64, owner: Owner) -> Result<Pin> {
        {
            let mut state = self.state.lock();
            if let Some(refusal) = state.refusal(bytes, owner.arena(), self.driver.info().ordinal) {
                return Err(refusal);
            }
            state.creating += bytes;
            state.accounts.change(owner.arena(), |account| account.moving += bytes);
        }
        let created = self.driver.create(bytes);
        let mut state = self.state.lock();
        state.creating -= bytes;
        state.accounts.change(owner.arena(), |account| account.moving -= bytes);
        let handle = created?;
        state.stats.pages_created += 1;
        let id = state.hold(Page { handle, bytes, owner, pins: 1 });
        Ok(Pin { pool: Arc::clone(self), id, bytes })
    }

    /// Pins a page that is not doomed.
    pub(super) fn pin(self: &Arc<Self>, id: PageId) -> Result<Pin> {
        let mut state = self.state.lock();
        let page = state.pages.get_mut(id).filter(|page| !page.owner.is_doomed());
        let page = page.ok_or_else(|| Error::Internal { what: format!("page {id:?} is gone") })?;
        page.pins += 1;
        Ok(Pin { pool: Arc::clone(self), id, bytes: page.bytes })
    }

    /// How often a page is pinned: by mappings, and by those about to map it.
    pub(super) fn pins(&self, id: PageId) -> u32 {
        self.state.lock().pages.get(id).map_or(0, |page| page.pins)
    }

    /// Who owns a page; `None`: the driver has it back.
    #[must_use]
    pub fn owner(&self, id: PageId) -> Option<Owner> {
        self.state.lock().pages.get(id).map(|page| page.owner)
    }

    /// Changes a page's owner. A doomed page stays doomed. From one arena to another it counts toward the other's budget, which
    /// cannot refuse it: budgets limit what is created.
    pub fn hand_over(&self, id: PageId, to: Owner) {
        let state = &mut *self.state.lock();
        let Some(page) = state.pages.get_mut(id).filter(|page| !page.owner.is_doomed()) else { return };
        let from = std::mem::replace(&mut page.owner, to);
        if from.arena() != to.arena() {
            state.accounts.change(from.arena(), |account| account.held -= page.bytes);
            state.accounts.change(to.arena(), |account| account.held += page.bytes);
        }
    }

    /// Nobody wants the page any more: it goes back to the driver with its last pin, at once if it has none.
    pub fn doom(&self, id: PageId) {
        if let Some(page) = self.state.lock().pages.get_mut(id) {
            page.owner = Owner::Doomed { arena: page.owner.arena() };
        }
        self.collect(id);
    }

    fn unpin(&self, id: PageId) {
        if let Some(page) = self.state.lock().pages.get_mut(id) {
            page.pins -= 1;
        }
        self.collect(id);
    }

    /// Gives a page back if it is doomed and unpinned.
    fn collect(&self, id: PageId) {
        let page = {
            let mut state = self.state.lock();
            let page = match state.pages.get(id) {
                Some(page) if page.owner.is_doomed() && page.pins == 0 => state.pages.remove(id),
                _ => None,
            };
            let Some(page) = page else { return };
            // Before the driver is asked: once it has the memory back, another thread may create a page of it.
            state.stats.physical_bytes -= page.bytes;
            state.releasing = (state.releasing.0 + 1, state.releasing.1 + page.bytes);
            state.accounts.change(page.owner.arena(), |account| {
                account.held -= page.bytes;
                account.moving += page.bytes;
            });
            page
        };
        let result = self.driver.release(page.handle);
        let mut state = self.state.lock();
        state.releasing = (state.releasing.0 - 1, state.releasing.1 - page.bytes);
        state.accounts.change(page.owner.arena(), |account| account.moving -= page.bytes);
        match result {
            Ok(()) => state.stats.pages_released += 1,
            Err(error) => {
                tracing::warn!(%error, bytes = page.bytes, "the driver did not take a page back; kept for another try");
                state.hold(page);
            }
        }
    }

    /// Keeps a range whose teardown the driver refused.
    pub(super) fn keep(&self, remains: Remains) {
        self.state.lock().remains.push(remains);
    }

    /// Keeps a range that the replays of this arena may still be using.
    pub(super) fn defer(&self, arena: u64, remains: Remains) {
        self.state.lock().deferred.push((arena, remains));
    }

    /// Whether something was deferred for this arena.
    pub(super) fn deferred(&self, arena: u64) -> bool {
        self.state.lock().deferred.iter().any(|(waiting, _)| *waiting == arena)
    }

    /// The replays of this arena are done: the next [`retry`](Self::retry) tears down what was deferred for them.
    pub(super) fn settle(&self, arena: u64) {
        let mut state = self.state.lock();
        let (done, waiting): (Vec<_>, _) =
            std::mem::take(&mut state.deferred).into_iter().partition(|(waiting, _)| *waiting == arena);
        state.deferred = waiting;
        state.remains.extend(done.into_iter().map(|(_, remains)| remains));
    }

    /// Destroys an event; if the driver refuses, at a later try.
    pub fn destroy_event(&self, event: Event) {
        if let Err(error) = self.driver.event_destroy(event) {
            tracing::warn!(%error, "the driver did not destroy an event; kept for another try");
            self.state.lock().events.push(event);
        }
    }

    /// Tries again to give back everything the driver refused earlier.
    ///
    /// # Errors
    /// The first refusal; what is refused again stays on the list.
    pub fn retry(&self) -> Result<()> {
        let (remains, events) = {
            let mut state = self.state.lock();
            (std::mem::take(&mut state.remains), std::mem::take(&mut state.events))
        };
        let mut first = Ok(());
        for event in events {
            self.destroy_event(event);
        }
        for mut range in remains {
            if let Err(error) = range.tear_down(self) {
                self.keep(range);
                first = first.and(Err(error));
            }
        }
        let doomed: Vec<PageId> = {
            let state = self.state.lock();
            let pages = state.pages.iter();
            pages.filter(|(_, page)| page.owner.is_doomed() && page.pins == 0).map(|(id, _)| id).collect()
        };
        for id in doomed {
            self.collect(id);
        }
        self.check();
        first
    }

    /// Records driver work that the other files of this layer did.
    pub(super) fn record(&self, change: impl FnOnce(&mut PoolStats)) {
        change(&mut self.state.lock().stats);
    }

    /// The counts as they are now.
    #[must_use]
    pub fn stats(&self) -> PoolStats {
        let state = self.state.lock();
        let mut stats = state.stats;
        stats.pages = state.pages.len() as u64;
        stats.pending = (state.remains.len() + state.deferred.len() + state.events.len()) as u64;
        for page in state.pages.values() {
            stats.retained_bytes += u64::from(matches!(page.owner, Owner::Retained { .. })) * page.bytes;
            stats.free_bytes += u64::from(page.pins == 0) * page.bytes;
            stats.pending += u64::from(page.pins == 0 && page.owner.is_doomed());
        }
        stats
    }
}

impl Drop for PagePool {
    fn drop(&mut self) {
        // Last chance for what was refused before; at process exit the driver may be gone, and then nothing is lost either.
        if let Err(error) = self.retry() {
            tracing::warn!(%error, "memory could not be given back");
        }
    }
}

impl fmt::Debug for PagePool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PagePool").field("device", self.driver.info()).field("stats", &self.stats()).finish()
    }
}

/// A claim on a page: while it lives, the page does.
#[derive(Debug)]
pub struct Pin {
    pool: Arc<PagePool>,
    id: PageId,
    bytes: u64,
}

impl Pin {
    /// The page.
    #[must_use]
    pub fn id(&self) -> PageId {
        self.id
    }

    /// Bytes of the page.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn handle(&self) -> Result<PageHandle> {
        let state = self.pool.state.lock();
        let page = state.pages.get(self.id);
        page.map(|page| page.handle)
            .ok_or_else(|| Error::Internal { what: format!("page {:?} is gone", self.id) })
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        self.pool.unpin(self.id);
    }
}

//! Accounts: a tree of budgets, apart from who holds a page. Device, then tenants or models, then what each has memory for.

use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use slotmap::{Key, SlotMap};

use super::{AccountId, PagePool};
use crate::error::{Error, Result};
use crate::units::MAX_BYTES;

/// What an account may and is sure to have, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// The most that its pages may take, those of the accounts below it included; `None`: no limit but those above.
    pub most: Option<u64>,
    /// What it is sure to get: counts toward the accounts above it, whether it is used or not. Guaranteed only below an account
    /// that has a `most`, as nobody else's use is bounded otherwise.
    pub least: u64,
}

impl Limits {
    /// More than there are addresses for is as much as that, so that no sum of leasts overflows.
    fn bounded(self) -> Self {
        Self { least: self.least.min(MAX_BYTES), ..self }
    }
}

/// What counts toward an account now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccountStats {
    /// Bytes of its pages and of the accounts below it, each with its least at least, and of what the driver is being asked for.
    pub charged_bytes: u64,
    /// The most it may have; `None`: no limit.
    pub most_bytes: Option<u64>,
    /// What it is sure to get.
    pub least_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    label: String,
    parent: Option<AccountId>,
    limits: Limits,
    /// Bytes of pages, and what the accounts below are charged.
    used: u64,
    /// Bytes that the driver is being asked for.
    moving: u64,
    /// Bytes of its pages, and of those below it, that are on lease to somebody who is not below it.
    lent: u64,
    /// Handles to it, pages in it, and accounts below it.
    users: u64,
}

impl Entry {
    /// What it counts for in the account above: its least beside what it has lent, so that it gets that also if what it used goes.
    fn charge(&self) -> u64 {
        self.charge_of(self.used + self.moving)
    }

    fn charge_of(&self, bytes: u64) -> u64 {
        bytes.max(self.limits.least + self.lent)
    }
}

/// All accounts of a device. The first one is the device's.
#[derive(Debug)]
pub(super) struct Accounts {
    entries: SlotMap<AccountId, Entry>,
    root: AccountId,
}

impl Accounts {
    pub(super) fn new() -> Self {
        let mut entries = SlotMap::with_key();
        let (limits, label) = (Limits::default(), String::new());
        let root =
            entries.insert(Entry { label, parent: None, limits, used: 0, moving: 0, lent: 0, users: 1 });
        Self { entries, root }
    }

    pub(super) fn label(&self, id: AccountId) -> Option<&str> {
        self.entries.get(id).map(|entry| entry.label.as_str())
    }

    pub(super) fn root(&self) -> AccountId {
        self.root
    }

    pub(super) fn stats(&self, id: AccountId) -> AccountStats {
        self.entries.get(id).map_or(AccountStats::default(), |entry| AccountStats {
            charged_bytes: entry.used + entry.moving,
            most_bytes: entry.limits.most,
            least_bytes: entry.limits.least,
        })
    }

    /// The account that leaves too little room for `bytes` more, the tightest if there are several, the one above of two; `held`: bytes of the device that
    /// count toward no account but the device's.
    pub(super) fn refusal(&self, id: AccountId, bytes: u64, held: u64, device: i32) -> Option<Error> {
        let (mut tightest, mut lowest, mut more): (Option<(u64, Error)>, _, _) = (None, None, bytes);
        for id in self.up_from(id) {
            let entry = &self.entries[id];
            let below = entry.parent.is_some();
            let held = entry.used + entry.moving + if below { 0 } else { held };
            if let Some(budget) = entry.limits.most {
                let left = budget.saturating_sub(held);
                if more > left {
                    lowest = lowest.or(below.then(|| id.data().as_ffi()));
                    if tightest.as_ref().is_none_or(|(least, _)| left <= *least) {
                        let account = below.then(|| entry.label.clone());
                        let error = Error::OverBudget {
                            requested: bytes,
                            held,
                            budget,
                            device,
                            account,
                            lowest,
                            space: None,
                        };
                        tightest = Some((left, error));
                    }
                }
            }
            more = entry.charge_of(entry.used + entry.moving + more) - entry.charge();
        }
        tightest.map(|(_, error)| error)
    }

    /// Changes what counts toward an account and those above it.
    pub(super) fn change(&mut self, id: AccountId, used: i64, moving: i64) {
        let (mut next, mut used, mut moving) = (Some(id), used, moving);
        while let Some(entry) = next.and_then(|id| self.entries.get_mut(id)) {
            let before = entry.charge();
            entry.used = entry.used.saturating_add_signed(used);
            entry.moving = entry.moving.saturating_add_signed(moving);
            (used, moving) = (entry.charge() as i64 - before as i64, 0);
            next = entry.parent;
        }
    }

    /// An account and those above it, up to the device's; nothing for one that is gone.
    fn up_from(&self, id: AccountId) -> impl Iterator<Item = AccountId> + '_ {
        let first = self.entries.contains_key(id).then_some(id);
        std::iter::successors(first, |id| self.entries.get(*id).and_then(|entry| entry.parent))
    }

    /// Whether what counts toward an account counts toward that of this key as well.
    pub(super) fn is_within(&self, id: AccountId, key: u64) -> bool {
        self.up_from(id).any(|id| id.data().as_ffi() == key)
    }

    /// Those from an account up to the device's, that one left out, which are not above another account as well.
    fn apart(&self, from: AccountId, to: AccountId) -> Vec<AccountId> {
        let both: Vec<AccountId> = self.up_from(to).chain([self.root]).collect();
        self.up_from(from).take_while(|id| !both.contains(id)).collect()
    }

    /// How many bytes an account can lend to another one: what all that are [apart](Self::apart) have above their least.
    pub(super) fn lendable(&self, from: AccountId, to: AccountId) -> u64 {
        let entries = self.apart(from, to).into_iter().filter_map(|id| self.entries.get(id));
        let beyond = entries.map(|entry| entry.used.saturating_sub(entry.limits.least + entry.lent));
        beyond.min().unwrap_or(u64::MAX)
    }

    /// So many bytes more are on lease, or fewer.
    pub(super) fn lend(&mut self, from: AccountId, to: AccountId, bytes: i64) {
        for id in self.apart(from, to) {
            let Some(entry) = self.entries.get_mut(id) else { return };
            let before = entry.charge();
            entry.lent = entry.lent.saturating_add_signed(bytes);
            let (delta, parent) = (entry.charge() as i64 - before as i64, entry.parent);
            if let Some(parent) = parent {
                self.change(parent, delta, 0);
            }
        }
    }

    fn limit(&mut self, id: AccountId, limits: Limits) {
        let Some(entry) = self.entries.get_mut(id) else { return };
        let before = entry.charge();
        entry.limits = limits;
        let (delta, parent) = (entry.charge() as i64 - before as i64, entry.parent);
        if let Some(parent) = parent {
            self.change(parent, delta, 0);
        }
    }

    /// One more user.
    pub(super) fn join(&mut self, id: AccountId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.users += 1;
        }
    }

    /// One user less; an account without any goes.
    pub(super) fn leave(&mut self, id: AccountId) {
        let mut next = Some(id);
        while let Some(id) = next {
            let Some(entry) = self.entries.get_mut(id) else { return };
            entry.users -= 1;
            if entry.users > 0 {
                return;
            }
            self.limit(id, Limits::default());
            next = self.entries.remove(id).and_then(|entry| entry.parent);
        }
    }

    /// What each account has, less what the accounts below it are charged; for the audit.
    pub(super) fn own(&self) -> impl Iterator<Item = (AccountId, &str, u64, u64)> {
        self.entries.iter().map(|(id, entry)| {
            let below = self.entries.values().filter(|other| other.parent == Some(id));
            let below: u64 = below.map(Entry::charge).sum();
            (id, entry.label.as_str(), entry.used.saturating_sub(below), entry.moving)
        })
    }
}

/// A budget in the tree. It stays while a handle to it, a page in it or an account below it is there.
pub struct Account {
    pool: Arc<PagePool>,
    id: AccountId,
}

impl Account {
    /// A new account below another one; `None`: below the device.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if the accounts above have no room for its least; [`Error::InvalidArgument`] for a parent of another pool.
    pub fn new(pool: &Arc<PagePool>, parent: Option<&Self>, label: String, limits: Limits) -> Result<Self> {
        if let Some(parent) = parent
            && !Arc::ptr_eq(&parent.pool, pool)
        {
            let (what, expected) = ("the device of the account above", "the same device, as it is open now");
            return Err(Error::InvalidArgument { what, value: i128::from(parent.pool.ordinal()), expected });
        }
        let limits = limits.bounded();
        let mut state = pool.lock();
        let parent = parent.map_or(state.accounts.root(), |parent| parent.id);
        let held = state.unaccounted();
        if limits.least > 0
            && let Some(refusal) = state.accounts.refusal(parent, limits.least, held, pool.ordinal())
        {
            return Err(refusal);
        }
        let entry = Entry {
            label,
            parent: Some(parent),
            limits: Limits { most: None, least: 0 },
            used: 0,
            moving: 0,
            lent: 0,
            users: 1,
        };
        let id = state.accounts.entries.insert(entry);
        state.accounts.join(parent);
        state.accounts.limit(id, limits);
        Ok(Self { pool: Arc::clone(pool), id })
    }

    /// Its key in the pool.
    #[must_use]
    pub fn id(&self) -> AccountId {
        self.id
    }

    /// Sets its limits. Nothing is taken away: with less than is held, every page that is missing is refused until enough is given
    /// back.
    pub fn set_limits(&self, limits: Limits) {
        self.pool.lock().accounts.limit(self.id, limits.bounded());
    }

    /// What counts toward it now.
    #[must_use]
    pub fn stats(&self) -> AccountStats {
        self.pool.lock().accounts.stats(self.id)
    }
}

impl Drop for Account {
    fn drop(&mut self) {
        self.pool.lock().accounts.leave(self.id);
    }
}

impl fmt::Debug for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Account").field(&self.id).finish()
    }
}

impl PagePool {
    /// Bytes of the pages in an account and below it, without what the driver is being asked for.
    #[must_use]
    pub fn account_bytes(&self, account: &Account) -> u64 {
        self.lock().accounts.entries.get(account.id).map_or(0, |entry| entry.used)
    }

    /// Limits the bytes of the device that this pool may hold from now on, free pages included; `None` lifts the limit. Nothing is
    /// taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        let mut state = self.lock();
        let root = state.accounts.root();
        state.accounts.limit(root, Limits { most: bytes, least: 0 });
    }
}

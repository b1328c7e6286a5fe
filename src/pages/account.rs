//! Accounts: a tree of budgets, independent of page owners. Guaranteed bytes are reserved in all
//! ancestors even while unused or on lease. The mutex of [`PagePool`] guards the tree.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use serde::Serialize;
use slotmap::{Key, SlotMap};

use super::{AccountId, PagePool};
use crate::error::{Error, Result};
use crate::units::MAX_BYTES;

/// Limit and guaranteed bytes of an account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    /// Limit in bytes for the account and its descendants. `None`: only the limits of the
    /// ancestors.
    pub most: Option<u64>,
    /// Guaranteed bytes, charged to the ancestors even while unused. Needs an ancestor with a
    /// limit: otherwise the use by other accounts is unbounded.
    pub least: u64,
}

impl Limits {
    /// Limits whose sums cannot overflow.
    fn bounded(self) -> Self {
        Self { least: self.least.min(MAX_BYTES), ..self }
    }
}

/// Current charge of an account.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AccountStats {
    /// Bytes of its pages, of pages in creation, and of the charges of its children (each at least
    /// its guarantee).
    pub charged_bytes: u64,
    /// Limit in bytes. `None`: no limit.
    pub most_bytes: Option<u64>,
    /// Guaranteed bytes.
    pub least_bytes: u64,
}

#[derive(Debug)]
struct Entry {
    label: String,
    parent: Option<AccountId>,
    limits: Limits,
    /// Bytes of own pages, plus the charges of child accounts.
    used: u64,
    moving: u64,
    /// Bytes of the subtree on lease to borrowers outside.
    lent: u64,
    /// Handles, pages and child accounts.
    users: u64,
}

impl Entry {
    /// max(used, guaranteed + lent), so the guarantee still fits if used memory is freed during a
    /// loan.
    fn charge(&self) -> u64 {
        self.charge_of(self.used + self.moving)
    }

    fn charge_of(&self, bytes: u64) -> u64 {
        bytes.max(self.limits.least + self.lent)
    }
}

/// The root is the device's account.
#[derive(Debug)]
pub(super) struct Accounts {
    entries: SlotMap<AccountId, Entry>,
    root: AccountId,
}

impl Default for Accounts {
    fn default() -> Self {
        let mut entries = SlotMap::with_key();
        let (limits, label) = (Limits::default(), String::new());
        let root =
            entries.insert(Entry { label, parent: None, limits, used: 0, moving: 0, lent: 0, users: 1 });
        Self { entries, root }
    }
}

impl Accounts {
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

    /// Names the tightest account without room; of two equal ones, the ancestor. `held`: bytes
    /// charged to the device only.
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

    /// The account and its ancestors; empty for a removed account.
    fn up_from(&self, id: AccountId) -> impl Iterator<Item = AccountId> + '_ {
        let first = self.entries.contains_key(id).then_some(id);
        std::iter::successors(first, |id| self.entries.get(*id).and_then(|entry| entry.parent))
    }

    /// Whether `key` names the account or an ancestor.
    pub(super) fn is_within(&self, id: AccountId, key: u64) -> bool {
        self.up_from(id).any(|id| id.data().as_ffi() == key)
    }

    /// `from` and its ancestors below the first one shared with `to`, or below the device.
    fn apart(&self, from: AccountId, to: AccountId) -> Vec<AccountId> {
        let both: Vec<AccountId> = self.up_from(to).chain([self.root]).collect();
        self.up_from(from).take_while(|id| !both.contains(id)).collect()
    }

    /// The minimum, over the accounts [apart](Self::apart), of used bytes above the guarantee.
    pub(super) fn lendable(&self, from: AccountId, to: AccountId) -> u64 {
        let entries = self.apart(from, to).into_iter().filter_map(|id| self.entries.get(id));
        let beyond = entries.map(|entry| entry.used.saturating_sub(entry.limits.least + entry.lent));
        beyond.min().unwrap_or(u64::MAX)
    }

    /// Adds to the bytes on lease; negative at the end of a lease.
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

    pub(super) fn join(&mut self, id: AccountId) {
        if let Some(entry) = self.entries.get_mut(id) {
            entry.users += 1;
        }
    }

    /// Removes a user. An account without users is removed.
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

    /// For the audit: each account's used bytes without those of its children, and bytes in
    /// creation.
    pub(super) fn own(&self) -> impl Iterator<Item = (AccountId, &str, u64, u64)> {
        let mut charged_below: HashMap<AccountId, u64> = HashMap::new();
        for entry in self.entries.values() {
            if let Some(parent) = entry.parent {
                *charged_below.entry(parent).or_default() += entry.charge();
            }
        }
        self.entries.iter().map(move |(id, entry)| {
            let below = charged_below.get(&id).copied().unwrap_or_default();
            (id, entry.label.as_str(), entry.used.saturating_sub(below), entry.moving)
        })
    }
}

/// A budget in the tree. Lives as long as a handle, a charged page or a child account.
pub struct Account {
    pool: Arc<PagePool>,
    id: AccountId,
}

impl Account {
    /// Creates an account below `parent`, or below the device.
    ///
    /// # Errors
    /// [`Error::OverBudget`] if an ancestor has no room for the guarantee;
    /// [`Error::InvalidArgument`] for a parent of a different pool.
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

    /// Returns the key in the pool.
    #[must_use]
    pub fn id(&self) -> AccountId {
        self.id
    }

    /// Sets the limits. Frees nothing: an account above its limit gets no new pages.
    pub fn set_limits(&self, limits: Limits) {
        self.pool.lock().accounts.limit(self.id, limits.bounded());
    }

    /// Returns the current charge.
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
    /// Returns the bytes of pages in an account and its descendants.
    #[must_use]
    pub fn account_bytes(&self, account: &Account) -> u64 {
        self.lock().accounts.entries.get(account.id).map_or(0, |entry| entry.used)
    }

    /// Limits the bytes held by this pool, free pages included. Frees nothing.
    pub fn set_budget(&self, bytes: Option<u64>) {
        let mut state = self.lock();
        let root = state.accounts.root();
        state.accounts.limit(root, Limits { most: bytes, least: 0 });
    }
}

//! Byte budgets, of the device and of each arena: what counts toward them, and whose refuses a page.

use std::collections::BTreeMap;

use super::PagePool;
use super::pool::State;
use crate::error::Error;

/// What counts toward one arena's budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Account {
    /// Bytes of its pages, also of those that only wait for their last pin or for a driver that refused them.
    pub(super) held: u64,
    /// Bytes that the driver is being asked for, or being given back.
    pub(super) moving: u64,
    pub(super) budget: Option<u64>,
}

/// The accounts of all arenas that hold something or have a budget.
#[derive(Default)]
pub(super) struct Accounts(BTreeMap<u64, Account>);

impl Accounts {
    fn get(&self, arena: u64) -> Account {
        self.0.get(&arena).copied().unwrap_or_default()
    }

    /// The one way to change an account, so that those of arenas that are gone go too.
    pub(super) fn change(&mut self, arena: u64, change: impl FnOnce(&mut Account)) {
        let account = self.0.entry(arena).or_default();
        change(account);
        if *account == Account::default() {
            self.0.remove(&arena);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, Account)> {
        self.0.iter().map(|(arena, account)| (*arena, *account))
    }
}

impl State {
    /// Why no page of `bytes` may be created for an arena: the budget that leaves less room, if two are too small for it.
    pub(super) fn refusal(&self, bytes: u64, arena: u64, device: i32) -> Option<Error> {
        let account = self.accounts.get(arena);
        // What is under way counts, so that threads cannot pass a budget together.
        let of_device = self.stats.physical_bytes + self.creating + self.releasing.1;
        let limits = [
            (None, of_device, self.stats.budget_bytes),
            (Some(arena), account.held + account.moving, account.budget),
        ];
        let tightest = limits
            .into_iter()
            .filter_map(|(whose, held, budget)| budget.map(|budget| (whose, held, budget)))
            .min_by_key(|(_, held, budget)| budget.saturating_sub(*held))?;
        let (arena, held, budget) = tightest;
        let refused = bytes > budget.saturating_sub(held);
        refused.then_some(Error::OverBudget { requested: bytes, held, budget, device, arena })
    }
}

impl PagePool {
    /// Limits the bytes that one arena's pages may take of this pool from now on; `None` lifts the limit. Nothing is taken away.
    pub(super) fn set_arena_budget(&self, arena: u64, bytes: Option<u64>) {
        self.state.lock().accounts.change(arena, |account| account.budget = bytes);
    }

    /// The bytes that count toward an arena's budget, and the budget.
    pub(super) fn arena_budget(&self, arena: u64) -> (u64, Option<u64>) {
        let account = self.state.lock().accounts.get(arena);
        (account.held + account.moving, account.budget)
    }
}

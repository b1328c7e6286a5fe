//! Tests of the audit with corrupted tables.

use std::sync::Arc;

use super::{Faulty, OWNERS, RANGE, UNIT};
use crate::pages::page::Page;
use crate::pages::pool::State;
use crate::pages::{Account, AccountId, Limits, Owner, PagePool, Reservation, Transaction};
use crate::units::Peers;

/// A pool with one mapped page of a tenant and one free page.
struct Books {
    pool: Arc<PagePool>,
    _range: std::mem::ManuallyDrop<Reservation>,
    tenant: Account,
}

impl Books {
    fn new() -> Self {
        let pool = PagePool::new(Faulty::new());
        let tenant = Account::new(&pool, None, "the tenant".to_owned(), Limits::default()).unwrap();
        let mut transaction = Transaction::on(&pool);
        let range = transaction.reserve(RANGE, 0, Peers::NONE).unwrap();
        let page = transaction.take(UNIT, OWNERS[2], tenant.id()).unwrap();
        transaction.take(2 * UNIT, OWNERS[0], tenant.id()).unwrap();
        transaction.map(range, 0, &[page]).unwrap();
        let (_, mut reserved) = transaction.commit();
        assert_eq!(pool.audit_idle(), Ok(()));
        // Corrupted tables cannot be torn down.
        Self { pool, _range: std::mem::ManuallyDrop::new(reserved.remove(0)), tenant }
    }
}

/// Keeps corrupted pools until the process ends, reachable for leak checkers.
fn keep(books: Books) {
    static KEPT: std::sync::Mutex<Vec<Books>> = std::sync::Mutex::new(Vec::new());
    KEPT.lock().unwrap().push(books);
}

fn held(state: &mut State) -> &mut Page {
    state.pages.values_mut().find(|page| page.owner != Owner::Free).unwrap()
}

#[test]
fn every_miscount_is_found_and_named() {
    type Plant = fn(&mut State, AccountId);
    let plants: &[(&str, Plant)] = &[
        ("pages created", |state, _| state.stats.pages_created += 1),
        ("pages created", |state, _| state.stats.pages_released += 1),
        ("bytes counted", |state, _| state.stats.physical_bytes += 1),
        ("pages counted", |state, _| state.stats.pages += 1),
        ("absent bytes counted", |state, _| state.stats.absent_bytes += 512),
        ("is absent and mapped", |state, _| {
            let range = state.ranges.keys().next().unwrap();
            held(state).unmapped.insert((range, UNIT));
            state.stats.mappings -= 1;
            state.stats.unmaps += 1;
        }),
        ("mappings counted", |state, _| state.stats.mappings += 1),
        ("mappings made", |state, _| state.stats.maps += 1),
        ("mappings made", |state, _| state.stats.unmaps += 1),
        ("bytes of addresses counted", |state, _| state.stats.reserved_bytes += 1),
        ("retained bytes counted", |state, _| state.stats.retained_bytes += 1),
        ("counted for Retained { arena: 1, space: 7 }", |state, _| state.count(OWNERS[2], 1, 0, 0)),
        ("counted for Free", |state, _| state.count(Owner::Free, 0, 0, 1)),
        ("which has nothing", |state, _| state.count(OWNERS[1], 1, 0, 0)),
        ("in account None", |state, _| held(state).account = None),
        ("the account \"the tenant\"", |state, tenant| state.accounts.change(tenant, 512, 0)),
        ("on their way into accounts", |state, tenant| state.accounts.change(tenant, 0, 512)),
        ("on their way into accounts", |state, _| state.running.begin_create(512)),
        ("lists of free pages", |state, _| state.free.clear()),
        ("is free, pinned 1 times", |state, _| {
            let free = state.pages.values_mut().find(|page| page.owner == Owner::Free);
            free.unwrap().pins = 1;
        }),
        ("is mapped nowhere", |state, _| {
            held(state).mappings.clear();
            state.count(OWNERS[2], 0, 0, -1);
        }),
        ("listed at pages", |state, _| {
            let range = state.ranges.keys().next().unwrap();
            held(state).mappings.insert((range, UNIT));
            state.count(OWNERS[2], 0, 0, 1);
        }),
        ("which does not know it", |state, _| {
            let range = state.ranges.values_mut().next().unwrap();
            let page = range.mapped.remove(&0).unwrap();
            range.mapped.insert(UNIT, page);
        }),
        ("one beyond its end", |state, _| {
            let range = state.ranges.values_mut().next().unwrap();
            range.len = UNIT / 2;
            state.stats.reserved_bytes = UNIT / 2;
        }),
    ];
    for (number, (named, plant)) in plants.iter().enumerate() {
        let books = Books::new();
        plant(&mut books.pool.lock(), books.tenant.id());
        let found = books.pool.audit().expect_err(named).to_string();
        assert!(found.contains(named), "{number}: {named:?} is called {found:?}");
        keep(books);
    }
}

#[test]
fn what_is_under_way_is_named_when_nothing_should_be() {
    type Plant = fn(&mut State);
    let plants: &[(&str, Plant)] = &[
        ("1 pins", |state| held(state).pins = 1),
        ("(1, 512) being released", |state| {
            state.running.begin_release(512);
            state.stats.pages_created += 1;
        }),
        ("or its pages move", |state| state.ranges.values_mut().for_each(|range| range.held = true)),
        ("being torn down", |state| {
            let range = state.ranges.keys().next().unwrap();
            assert!(state.begin_teardown(&[(range, 0, UNIT)], false));
        }),
    ];
    for (named, plant) in plants {
        let books = Books::new();
        plant(&mut books.pool.lock());
        let found = books.pool.audit_idle().expect_err(named).to_string();
        assert!(found.contains(named), "{named:?} is called {found:?}");
        keep(books);
    }
}

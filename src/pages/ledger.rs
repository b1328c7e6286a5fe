//! The pool's books: who holds what, and whether the counts agree with each other.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Owner, PagePool};
use crate::error::{Error, Result};

/// What one owner holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Holding {
    /// Whose the pages are.
    pub owner: Owner,
    /// How many.
    pub pages: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Bytes of those that are mapped nowhere.
    pub free_bytes: u64,
    /// How often they are mapped, all together.
    pub mappings: u64,
}

impl PagePool {
    /// Every owner and what it holds, in the order of [`Owner`]. Mappings that are being made or taken away count.
    #[must_use]
    pub fn holdings(&self) -> Vec<Holding> {
        let mut owners: BTreeMap<Owner, Holding> = BTreeMap::new();
        for page in self.state.lock().pages.values() {
            let empty = Holding { owner: page.owner, pages: 0, bytes: 0, free_bytes: 0, mappings: 0 };
            let held = owners.entry(page.owner).or_insert(empty);
            held.pages += 1;
            held.bytes += page.bytes;
            held.free_bytes += u64::from(page.pins == 0) * page.bytes;
            held.mappings += u64::from(page.pins);
        }
        owners.into_values().collect()
    }

    /// Whether the books balance, whatever other threads are doing: pages created less pages given back are those held, their
    /// bytes are the bytes counted, in all and for each arena, mappings made less those taken away are those there, each with a
    /// pin of its own.
    ///
    /// Debug builds look after every call through C and after every trim, seal and teardown, and log what is wrong as an error.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first count that disagrees, and with what.
    pub fn audit(&self) -> Result<()> {
        let state = self.state.lock();
        let stats = &state.stats;
        let bytes: u64 = state.pages.values().map(|page| page.bytes).sum();
        let pins: u64 = state.pages.values().map(|page| u64::from(page.pins)).sum();
        let (releasing, _) = state.releasing;
        let equal = [
            (
                "pages created",
                stats.pages_created,
                "held and given back",
                state.pages.len() as u64 + releasing + stats.pages_released,
            ),
            ("bytes counted", stats.physical_bytes, "bytes held", bytes),
            ("mappings made", stats.maps, "there and taken away", stats.mappings + stats.unmaps),
        ];
        for (left, counted, right, found) in equal {
            if counted != found {
                return Err(Error::Internal {
                    what: format!("the books: {counted} {left}, {found} {right}"),
                });
            }
        }
        let mut accounts: BTreeMap<u64, (u64, u64)> = BTreeMap::new();
        for page in state.pages.values() {
            accounts.entry(page.owner.arena()).or_default().0 += page.bytes;
        }
        let mut moving = 0;
        for (arena, account) in state.accounts.iter() {
            accounts.entry(arena).or_default().1 = account.held;
            moving += account.moving;
        }
        if let Some((arena, (held, counted))) = accounts.iter().find(|(_, (held, counted))| held != counted) {
            let what = format!("the books: {counted} bytes counted for arena {arena}, {held} bytes held");
            return Err(Error::Internal { what });
        }
        let under_way = state.creating + state.releasing.1;
        if moving != under_way {
            let what = format!("the books: {moving} bytes under way for the arenas, {under_way} in all");
            return Err(Error::Internal { what });
        }
        if pins < stats.mappings {
            let what = format!("the books: {pins} pins for {} mappings", stats.mappings);
            return Err(Error::Internal { what });
        }
        Ok(())
    }

    /// As [`audit`](Self::audit), while no other call is under way: then every pin is a mapping, and a page of a space is mapped.
    ///
    /// # Errors
    /// As [`audit`](Self::audit).
    pub fn audit_idle(&self) -> Result<()> {
        self.audit()?;
        let mappings = self.state.lock().stats.mappings;
        let holdings = self.holdings();
        let pins: u64 = holdings.iter().map(|held| held.mappings).sum();
        if pins != mappings {
            return Err(Error::Internal { what: format!("the books: {pins} pins for {mappings} mappings") });
        }
        let idle = |held: &&Holding| matches!(held.owner, Owner::Retained { .. }) && held.free_bytes > 0;
        match holdings.iter().find(idle) {
            Some(held) => Err(Error::Internal { what: format!("the books: mapped nowhere: {held:?}") }),
            None => Ok(()),
        }
    }

    /// The audit of debug builds.
    pub(crate) fn check(&self) {
        if cfg!(debug_assertions)
            && let Err(error) = self.audit()
        {
            tracing::error!(%error, "the page pool's books do not balance");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::driver::{HostDriver, HostOptions};

    #[test]
    fn a_count_that_is_off_by_one_is_found_and_named() {
        let driver = HostDriver::new(0, HostOptions { granularity: 4096, memory_bytes: 1 << 20 }).unwrap();
        let pool = PagePool::new(Arc::new(driver));
        let owner = Owner::Retained { arena: 1, space: 2 };
        let pin = pool.create(8192, owner).unwrap();
        assert_eq!(pool.audit(), Ok(()));
        assert!(pool.audit_idle().unwrap_err().to_string().contains("1 pins for 0 mappings"));
        assert_eq!(pool.holdings(), [Holding { owner, pages: 1, bytes: 8192, free_bytes: 0, mappings: 1 }]);

        for (wrong, named) in [
            ((|stats| stats.pages_created += 1) as fn(&mut super::super::PoolStats), "2 pages created"),
            (|stats| stats.physical_bytes -= 1, "8191 bytes counted, 8192 bytes held"),
            (|stats| stats.maps += 1, "1 mappings made"),
            (|stats| (stats.mappings, stats.maps) = (2, 2), "1 pins for 2 mappings"),
        ] {
            let right = pool.state.lock().stats;
            pool.record(wrong);
            let error = pool.audit().unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
            pool.record(|stats| *stats = right);
        }
        // Which arena's, and what is counted for an arena that has nothing.
        for (arena, named) in
            [(1, "8193 bytes counted for arena 1, 8192 bytes held"), (7, "1 bytes counted for arena 7, 0")]
        {
            pool.state.lock().accounts.change(arena, |account| account.held += 1);
            let error = pool.audit().unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
            pool.state.lock().accounts.change(arena, |account| account.held -= 1);
        }
        pool.state.lock().accounts.change(1, |account| account.moving += 3);
        assert!(pool.audit().unwrap_err().to_string().contains("3 bytes under way for the arenas, 0 in all"));
        pool.state.lock().accounts.change(1, |account| account.moving -= 3);

        let id = pin.id();
        drop(pin);
        assert!(pool.audit_idle().unwrap_err().to_string().contains("mapped nowhere"));
        pool.doom(id);
        assert_eq!((pool.audit_idle(), pool.holdings()), (Ok(()), Vec::new()));
    }
}

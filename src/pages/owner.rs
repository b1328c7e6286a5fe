use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::PagePool;
use super::pool::State;
use crate::error::{Error, Result};

/// Number of a region, an arena or a lease, unique in the process.
pub(crate) fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Owner of a page. Its account is independent: see [`Account`](super::Account).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum Owner {
    /// An arena, whose spaces may map the page.
    Shared {
        /// Arena number.
        arena: u64,
    },
    /// One space: the page has live-out (retained) blocks and is mapped by no other space.
    Retained {
        /// Arena number.
        arena: u64,
        /// Space number.
        space: u64,
    },
    /// An arena, for persistent (kept) blocks, which do not overlap.
    Kept {
        /// Arena number.
        arena: u64,
    },
    /// An arena, for one private (exclusive) block. Never replaced.
    Exclusive {
        /// Arena number.
        arena: u64,
    },
    /// A region, whose blocks do not overlap.
    Region {
        /// Region number.
        region: u64,
    },
    /// An elastic buffer or cache; nothing else maps the page.
    Elastic {
        /// Buffer number.
        buffer: u64,
    },
    /// A ring: the units of one slot, used one after the other.
    Ring {
        /// Ring number.
        ring: u64,
    },
    /// Workspaces of one stream, used one after the other.
    Workspace {
        /// Number of the workspace group.
        group: u64,
    },
    /// Only other processes map the page. Free after the last export pin.
    Exported,
    /// The device: the next allocation may take the page.
    Free,
    /// No owner: the driver refused the release, retried later.
    Leaving,
}

impl Owner {
    pub(super) fn arena(self) -> Option<u64> {
        match self {
            Self::Exclusive { arena } => Some(arena),
            other => other.movable_arena(),
        }
    }

    /// The arena whose pause releases the page, if any.
    pub(super) fn movable_arena(self) -> Option<u64> {
        match self {
            Self::Shared { arena } | Self::Retained { arena, .. } | Self::Kept { arena } => Some(arena),
            Self::Exclusive { .. } | Self::Region { .. } | Self::Elastic { .. } | Self::Ring { .. } => None,
            Self::Workspace { .. } | Self::Exported | Self::Free | Self::Leaving => None,
        }
    }

    /// Whether the owner's blocks outlive replays and do not overlap.
    pub(super) fn retains(self) -> bool {
        matches!(self, Self::Retained { .. } | Self::Kept { .. } | Self::Exclusive { .. })
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    pub(super) pages: u64,
    pub(super) bytes: u64,
    pub(super) mappings: u64,
}

/// Tallies of all owners with pages.
#[derive(Debug, Default)]
pub(super) struct Tallies(HashMap<Owner, Tally>);

impl Tallies {
    pub(super) fn count(&mut self, owner: Owner, pages: i64, bytes: i64, mappings: i64) {
        let tally = self.0.entry(owner).or_default();
        tally.pages = tally.pages.saturating_add_signed(pages);
        tally.bytes = tally.bytes.saturating_add_signed(bytes);
        tally.mappings = tally.mappings.saturating_add_signed(mappings);
        if *tally == Tally::default() {
            self.0.remove(&owner);
        }
    }

    fn of(&self, owner: Owner) -> Tally {
        self.0.get(&owner).copied().unwrap_or_default()
    }
}

/// Visits of skipped audits, for debug builds.
#[derive(Debug, Default)]
pub(super) struct SkippedVisits(u64);

/// Pages of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct OwnedPages {
    /// The owner.
    #[serde(rename = "holder")]
    pub owner: Owner,
    /// Number of pages.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Number of mappings of these pages.
    pub mappings: u64,
}

fn wrong(what: String) -> Result<()> {
    Err(Error::Internal { what: format!("the page tables: {what}") })
}

impl PagePool {
    /// Returns the pages of every owner, in the order of [`Owner`].
    #[must_use]
    pub fn owned_pages(&self) -> Vec<OwnedPages> {
        let mut all: Vec<_> = self.lock().tallies.0.iter().map(|(owner, tally)| (*owner, *tally)).collect();
        all.sort_unstable_by_key(|(owner, _)| *owner);
        let owned = |(owner, Tally { pages, bytes, mappings })| OwnedPages { owner, pages, bytes, mappings };
        all.into_iter().map(owned).collect()
    }

    /// Returns bytes and number of an owner's pages.
    #[must_use]
    pub fn held(&self, owner: Owner) -> (u64, u64) {
        let tally = self.lock().tallies.of(owner);
        (tally.bytes, tally.pages)
    }

    /// Checks the invariants of the tables (see the module), also while other threads use the pool.
    /// Walks all pages and mappings.
    ///
    /// # Errors
    /// [`Error::Internal`] names the first violation.
    pub fn audit(&self) -> Result<()> {
        let state = self.lock();
        state.audit_counts(self.exported.load(Ordering::SeqCst))?;
        state.audit_owners()?;
        state.audit_mappings()
    }

    /// [Audits](Self::audit), and checks that no pin or unfinished driver call is left. No other
    /// call may run.
    pub fn audit_idle(&self) -> Result<()> {
        self.audit()?;
        let state = self.lock();
        let pins: u64 = state.pages.values().map(|page| u64::from(page.pins)).sum();
        let at_work = state.ranges.iter().find(|(id, range)| range.held || state.is_in_teardown(*id));
        if let Some((_, range)) = at_work {
            return wrong(format!("the range at {:?} is being torn down, or its pages move", range.base));
        }
        let (creating, releasing) = (state.running.creating(), state.running.releasing());
        if pins != 0 || creating != 0 || releasing != (0, 0) {
            return wrong(format!(
                "{pins} pins, {creating} bytes being created, {releasing:?} being released"
            ));
        }
        Ok(())
    }

    /// Audits in debug builds and logs a violation. An audit visits each slot of pages and
    /// ranges and each mapping: a pool with more than 64 of them skips calls in proportion.
    pub(crate) fn check(&self) {
        if cfg!(debug_assertions)
            && self.lock().is_audit_due()
            && let Err(error) = self.audit()
        {
            tracing::error!(%error, "the page pool's tables do not agree");
        }
    }
}

impl State {
    fn is_audit_due(&mut self) -> bool {
        self.skipped.0 += 64;
        let slots = self.pages.capacity() + self.ranges.capacity();
        let visits = slots as u64 + self.stats.mappings;
        let is_due = self.skipped.0 >= visits;
        if is_due {
            self.skipped.0 = 0;
        }
        is_due
    }

    fn audit_counts(&self, exported_pages: u64) -> Result<()> {
        let stats = &self.stats;
        let there = || self.pages.values().filter(|page| page.handle.is_some());
        let bytes: u64 = there().map(|page| page.bytes).sum();
        let unmapped: u64 = self.pages.values().map(|page| page.unmapped.len() as u64).sum();
        let shown: u64 = self.ranges.values().map(|range| range.mapped.len() as u64).sum();
        let mappings = shown.saturating_sub(unmapped);
        let all: u64 = self.pages.values().map(|page| page.bytes).sum();
        let reserved: u64 = self.ranges.values().map(|range| range.len).sum();
        let retained: u64 = there().filter(|page| page.owner.retains()).map(|page| page.bytes).sum();
        let pages = there().count() as u64;
        let created = pages + self.running.releasing().0 + stats.pages_released;
        let exported = || self.pages.values().filter(|page| page.exported > 0);
        let exported_bytes: u64 = exported().map(|page| page.bytes).sum();
        let equal = [
            ("pages created", stats.pages_created, "held and given back", created),
            ("bytes counted", stats.physical_bytes, "bytes held", bytes),
            ("pages counted", stats.pages, "pages held", pages),
            ("absent bytes counted", stats.absent_bytes, "bytes absent", all - bytes),
            ("exported pages counted", exported_pages, "exported", exported().count() as u64),
            ("exported bytes counted", stats.exported_bytes, "bytes exported", exported_bytes),
            ("mappings counted", stats.mappings, "mappings there", mappings),
            ("mappings made", stats.maps, "there and taken away", mappings + stats.unmaps),
            ("bytes of addresses counted", stats.reserved_bytes, "bytes reserved", reserved),
            ("retained bytes counted", stats.retained_bytes, "bytes retained", retained),
        ];
        for (left, counted, right, found) in equal {
            if counted != found {
                return wrong(format!("{counted} {left}, {found} {right}"));
            }
        }
        Ok(())
    }

    fn audit_owners(&self) -> Result<()> {
        let mut tallies = Tallies::default();
        let mut accounts = BTreeMap::new();
        let mut free: BTreeMap<u64, BTreeSet<super::PageId>> = BTreeMap::new();
        for (id, page) in &self.pages {
            let (pages, bytes, mappings) = page.weight();
            tallies.count(page.owner, pages, bytes, mappings);
            if let Some(account) = page.account {
                *accounts.entry(account).or_insert(0) += bytes as u64;
            }
            let idle = matches!(page.owner, Owner::Free | Owner::Leaving);
            let all_unmapped = page.unmapped == page.mappings;
            if !page.unmapped.is_subset(&page.mappings) || page.handle.is_none() && (idle || !all_unmapped) {
                return wrong(format!("{id:?} of {:?} is absent and mapped", page.owner));
            }
            if page.account.is_none() != matches!(page.owner, Owner::Free | Owner::Leaving) {
                return wrong(format!("{id:?} of {:?} is in account {:?}", page.owner, page.account));
            }
            if page.owner == Owner::Free {
                free.entry(page.bytes).or_default().insert(id);
                if page.pins > 0 || !page.mappings.is_empty() {
                    return wrong(format!("{id:?} is free, pinned {} times and mapped", page.pins));
                }
            } else if page.exported > 0 && page.handle.is_none()
                || page.owner == Owner::Exported && (page.exported == 0 || !page.mappings.is_empty())
            {
                return wrong(format!("{id:?} of {:?} is with others {} times", page.owner, page.exported));
            } else if page.owner == Owner::Exported {
            } else if page.owner != Owner::Leaving && page.pins == 0 && page.mappings.is_empty() {
                return wrong(format!("{id:?} of {:?} is mapped nowhere", page.owner));
            }
        }
        for (owner, found) in &tallies.0 {
            let counted = self.tallies.of(*owner);
            if counted != *found {
                return wrong(format!("{counted:?} counted for {owner:?}, {found:?} held"));
            }
        }
        if let Some(owner) = self.tallies.0.keys().find(|owner| !tallies.0.contains_key(owner)) {
            return wrong(format!("something is counted for {owner:?}, which has nothing"));
        }
        let listed = self.free.lists().map(|(bytes, ids)| (bytes, ids.iter().copied().collect()));
        if listed.collect::<BTreeMap<u64, BTreeSet<_>>>() != free {
            return wrong("the lists of free pages are not the free pages".to_owned());
        }
        let mut moving = 0;
        for (account, label, own, creating) in self.accounts.own() {
            moving += creating;
            let held: u64 = accounts.get(&account).copied().unwrap_or(0);
            if held != own {
                return wrong(format!("{own} bytes counted for the account {label:?}, {held} bytes held"));
            }
        }
        if moving != self.running.creating() {
            return wrong(format!(
                "{moving} bytes on their way into accounts, {} in all",
                self.running.creating()
            ));
        }
        Ok(())
    }

    fn audit_mappings(&self) -> Result<()> {
        for (range, found) in &self.ranges {
            let mut end = 0;
            for (at, (id, bytes)) in &found.mapped {
                let page = self.pages.get(*id);
                if page.is_none_or(|page| page.bytes != *bytes || !page.mappings.contains(&(range, *at))) {
                    return wrong(format!("{range:?} shows {id:?} at {at:#x}, which does not know it"));
                }
                if *at < end || at + bytes > found.len {
                    return wrong(format!("{range:?} shows two pages at {at:#x}, or one beyond its end"));
                }
                end = at + bytes;
            }
        }
        let listed: u64 = self.pages.values().map(|page| page.weight().2 as u64).sum();
        if listed != self.stats.mappings {
            return wrong(format!("{listed} mappings listed at pages, {} at ranges", self.stats.mappings));
        }
        Ok(())
    }
}

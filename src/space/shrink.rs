//! Replaces large pages with little use by small ones, after all captures of an arena: 50 MiB on 16
//! MiB pages hold 64 MiB. See docs/design/capture.md.
//!
//! ```text
//!   before   | large page 2                  | large page 3                  |
//!   used     | ============================= | ======                        |
//!   after    | large page 2                  | small 4 | small 5 |           |
//! ```
//!
//! Addresses stay, and pages with live blocks stay. Each space takes the lowest possible small page
//! numbers, so the result does not depend on the order of captures.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::{Common, Core, Phase, State};
use crate::error::{Error, Result};
use crate::pages::{Class, Fence, Mapping, PageId, PageNo, Transaction};
use crate::pause::exclude_users;

/// Replacing must save one part in this many of the shared memory.
const LEAST_PART: u64 = 32;

#[derive(Debug, Default)]
struct Use {
    small: HashSet<PageId>,
    /// Units of every large page on which a block ever lay.
    units: BTreeMap<PageId, BTreeSet<u64>>,
    live: HashSet<PageId>,
}

type UnitOf = (PageId, u64);

impl Common {
    /// See [`shrink_to_fit`](crate::SharedVmmAllocator::shrink_to_fit).
    pub(crate) fn shrink_to_fit(&self, fence: Fence) -> Result<u64> {
        let driver = self.pool().driver();
        driver.capabilities().require_replacing(driver.info(), "an arena keeps the pages that it has")?;
        let _go_on = self.pool().begin_waits()?;
        let Some(_guard) = exclude_users(self, fence)? else {
            return Err(Error::wrong_state("cannot shrink the arena: it is paused; resume it first"));
        };
        let before = self.pool().held(self.shared.owner()).0;
        let cores = self.registry.cores();
        let pages = self.worth_replacing(&cores, before);
        if !pages.is_empty() {
            cores.iter().try_for_each(|core| core.shrink(&pages))?;
        }
        let saved = before.saturating_sub(self.pool().held(self.shared.owner()).0);
        tracing::debug!(arena = self.shared.arena(), replaced = pages.len(), saved, "arena shrunk");
        self.pool().check();
        Ok(saved)
    }

    /// Selects pages mapped by the fewest spaces, as many as save the most.
    fn worth_replacing(&self, cores: &[Arc<Core>], held: u64) -> HashSet<PageId> {
        let (small, large) = (self.shared.page_bytes(Class::Small), self.shared.page_bytes(Class::Large));
        if small == large {
            return HashSet::new();
        }
        let mut candidates = self.shared.free_large_pages();
        let known: HashSet<PageId> = candidates.iter().copied().collect();
        let uses: Vec<Use> = cores.iter().filter_map(|core| core.uses(&known)).collect();
        candidates.retain(|page| {
            let showing = uses.iter().filter(|of| of.units.contains_key(page)).count();
            showing == self.pool().shown_by(*page) && !uses.iter().any(|of| of.live.contains(page))
        });

        let there = uses.iter().flat_map(|of| &of.small).collect::<HashSet<_>>().len() as u64;
        let mut needed: Vec<u64> = uses.iter().map(|of| of.small.len() as u64).collect();
        let (mut best, mut most_saved) = (0, held / LEAST_PART);
        for (count, page) in (1_u64..).zip(&candidates) {
            for (needed, of) in needed.iter_mut().zip(&uses) {
                *needed += of.units.get(page).map_or(0, BTreeSet::len) as u64;
            }
            let more = needed.iter().copied().max().unwrap_or(0).saturating_sub(there);
            let saved = (count * large).saturating_sub(more * small);
            if saved > most_saved {
                (best, most_saved) = (count as usize, saved);
            }
        }
        candidates.truncate(best);
        candidates.into_iter().collect()
    }
}

impl Core {
    /// `None` if the space's pages must not be replaced.
    fn uses(&self, known: &HashSet<PageId>) -> Option<Use> {
        let state = self.state.lock();
        if state.stage.phase() != Phase::Sealed || !state.holes.is_empty() {
            return None;
        }
        let (shared, mut found) = (&self.common.shared, Use::default());
        for (number, range) in state.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                if known.contains(&mapped.page) {
                    let units = state.units_of(number, mapped, shared.page_bytes(Class::Small));
                    found.units.entry(mapped.page).or_default().extend(units);
                    if state.placement.covered(number, mapped.offset, mapped.offset + mapped.bytes) {
                        found.live.insert(mapped.page);
                    }
                } else if mapped.bytes == shared.page_bytes(Class::Small) && shared.is_ours(mapped.page) {
                    found.small.insert(mapped.page);
                }
            }
        }
        Some(found)
    }

    /// Maps small pages in one transaction.
    fn shrink(&self, pages: &HashSet<PageId>) -> Result<()> {
        let state = &mut *self.state.lock();
        let shared = &self.common.shared;
        let small = shared.page_bytes(Class::Small);
        let ranges = state.ranges.iter().enumerate();
        let slots: Vec<(usize, Mapping)> = ranges
            .flat_map(|(number, range)| range.mapped().into_iter().map(move |mapped| (number, mapped)))
            .filter(|(_, mapped)| pages.contains(&mapped.page))
            .collect();
        if slots.is_empty() {
            return Ok(());
        }
        let mut transaction = Transaction::on(self.common.pool());
        let mut shown = state.shown();
        let mut instead: HashMap<UnitOf, PageId> = HashMap::new();
        let done = (|| {
            // Taking pages may fail: before the first driver call.
            let units: BTreeSet<UnitOf> = slots
                .iter()
                .flat_map(|(number, mapped)| {
                    state.units_of(*number, *mapped, small).map(|unit| (mapped.page, unit))
                })
                .collect();
            transaction.expect_bytes(units.len() as u64 * small);
            for unit in units {
                let lowest = PageNo { class: Class::Small, index: 0 };
                let page = shared.page_apart(&mut transaction, lowest, &shown, self.id)?;
                shown.insert(page);
                instead.insert(unit, page);
            }
            for (number, mapped) in &slots {
                let range = state.ranges[*number].id();
                transaction.unmap(range, mapped.offset, mapped.bytes)?;
                for unit in state.units_of(*number, *mapped, small) {
                    let lost = || Error::Internal { what: "a small page's worth has no page".into() };
                    let page = *instead.get(&(mapped.page, unit)).ok_or_else(lost)?;
                    transaction.map(range, mapped.offset + unit * small, &[page])?;
                }
            }
            Ok(())
        })();
        if let Err(error) = done {
            state.undo(transaction);
            return Err(error);
        }
        let (calls, reserved) = transaction.commit();
        state.adopt(&self.common, calls, reserved);
        Ok(())
    }
}

impl State {
    /// Units on which a block ever lay, from the beginning of the mapping.
    fn units_of(&self, range: usize, mapped: Mapping, small: u64) -> impl Iterator<Item = u64> + '_ {
        let first = mapped.offset / small;
        (0..mapped.bytes / small).filter(move |unit| self.placement.was_used(range, first + unit))
    }
}

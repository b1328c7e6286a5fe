//! Replaces large pages of which little is used by small ones, once an arena has its captures.
//!
//! A large page is one allocation of the driver, so an arena that needs 50 MiB on pages of 16 holds 64. Small pages from the beginning
//! would cost every capture of a large model its maps, and how much an arena comes to need is known only when all captures are made.
//!
//! ```text
//!   before   | large page 2                  | large page 3                  |     what this space uses: ==
//!   used     | ============================= | ======                        |
//!   after    | large page 2                  | small 4 | small 5 |           |     each space shows the lowest small pages that it can
//! ```
//!
//! Addresses stay, and so do pages with live blocks. Spaces share small pages as they shared the large ones: the arena needs as many as
//! the space that needs the most. What it comes to depends on what the spaces use only, in whatever order they were captured.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use super::{Common, Core, Phase, State};
use crate::error::{Error, Result};
use crate::pages::{Change, Class, Fence, Mapping, PageId, PageNo};

/// Replacing pays if it saves one part in so many of what the arena's graphs share: of large arenas it would save little, for many calls.
const LEAST_PART: u64 = 32;

/// What one space shows of pages that might be replaced.
#[derive(Debug, Default)]
struct Use {
    /// Shared small pages.
    small: HashSet<PageId>,
    /// Which small pages' worths of each large page its blocks ever lay on.
    units: BTreeMap<PageId, BTreeSet<u64>>,
    /// Large pages with live blocks of the space.
    live: HashSet<PageId>,
}

/// A small page's worth of a large page.
type UnitOf = (PageId, u64);

impl Common {
    /// See [`SharedVmmAllocator::shrink_to_fit`](crate::SharedVmmAllocator::shrink_to_fit).
    pub(crate) fn shrink_to_fit(&self, fence: Fence) -> Result<u64> {
        let driver = self.pool().driver();
        driver.capabilities().require_replacing(driver.info(), "an arena keeps the pages that it has")?;
        let _go_on = self.pool().begin_waits()?;
        let _turn = self.keep_out(fence)?;
        let before = self.pool().held(self.shared.holder()).0;
        let cores = self.cores();
        let pages = self.worth_replacing(&cores, before);
        if !pages.is_empty() {
            cores.iter().try_for_each(|core| core.shrink(&pages))?;
        }
        let saved = before.saturating_sub(self.pool().held(self.shared.holder()).0);
        tracing::debug!(arena = self.shared.arena(), replaced = pages.len(), saved, "arena shrunk");
        self.pool().check();
        Ok(saved)
    }

    /// The large pages to replace: of those that the fewest spaces show, as many as save the most.
    fn worth_replacing(&self, cores: &[Arc<Core>], held: u64) -> HashSet<PageId> {
        let (small, large) = (self.shared.page_bytes(Class::Small), self.shared.page_bytes(Class::Large));
        if small == large {
            return HashSet::new();
        }
        let mut candidates = self.shared.free_large_pages();
        let known: HashSet<PageId> = candidates.iter().copied().collect();
        let uses: Vec<Use> = cores.iter().filter_map(|core| core.uses(&known)).collect();
        // Others that show a page, such as eager work, keep it.
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
    /// What it uses of these large pages. `None`: its pages are not to be replaced.
    fn uses(&self, known: &HashSet<PageId>) -> Option<Use> {
        let state = self.state.lock();
        if state.phase != Phase::Sealed || !state.holes.is_empty() {
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

    /// Shows small pages wherever it used one of these large pages; all or nothing.
    fn shrink(&self, pages: &HashSet<PageId>) -> Result<()> {
        let state = &mut *self.state.lock();
        let shared = &self.common.shared;
        let small = shared.page_bytes(Class::Small);
        let ranges = state.ranges.iter().enumerate();
        let tiles: Vec<(usize, Mapping)> = ranges
            .flat_map(|(number, range)| range.mapped().into_iter().map(move |mapped| (number, mapped)))
            .filter(|(_, mapped)| pages.contains(&mapped.page))
            .collect();
        if tiles.is_empty() {
            return Ok(());
        }
        let mut change = Change::on(self.common.pool());
        let mut shown = state.shown();
        let mut instead: HashMap<UnitOf, PageId> = HashMap::new();
        let done = (|| {
            // Pages first: that may fail, and then there is nothing to undo at the driver.
            let units: BTreeSet<UnitOf> = tiles
                .iter()
                .flat_map(|(number, mapped)| {
                    state.units_of(*number, *mapped, small).map(|unit| (mapped.page, unit))
                })
                .collect();
            change.announce(units.len() as u64 * small);
            for unit in units {
                let lowest = PageNo { class: Class::Small, index: 0 };
                let page = shared.page_apart(&mut change, lowest, &shown, self.id)?;
                shown.insert(page);
                instead.insert(unit, page);
            }
            for (number, mapped) in &tiles {
                let range = state.ranges[*number].id();
                change.unmap(range, mapped.offset, mapped.bytes)?;
                for unit in state.units_of(*number, *mapped, small) {
                    let lost = || Error::Internal { what: "a small page's worth has no page".into() };
                    let page = *instead.get(&(mapped.page, unit)).ok_or_else(lost)?;
                    change.map(range, mapped.offset + unit * small, &[page])?;
                }
            }
            Ok(())
        })();
        if let Err(error) = done {
            state.undo(change);
            return Err(error);
        }
        let (calls, reserved) = change.commit();
        state.adopt(&self.common, calls, reserved);
        Ok(())
    }
}

impl State {
    /// Which small pages' worths of what is mapped there any block ever lay on, counted from its beginning.
    fn units_of(&self, range: usize, mapped: Mapping, small: u64) -> impl Iterator<Item = u64> + '_ {
        let first = mapped.offset / small;
        (0..mapped.bytes / small).filter(move |unit| self.placement.was_used(range, first + unit))
    }
}

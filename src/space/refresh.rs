//! Replaces pages which left the arena's shared set before a space which maps them is replayed: the
//! graph must not write to live contents of eager work. The choice of pages is free, as long as all
//! pages differ. A space under capture is not replayed, so its mappings stay until its first
//! replay.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Common, Core, State};
use crate::error::{Error, Result};
use crate::order::Entered;
use crate::pages::{Class, Owner, PageId, PageNo, Transaction};
use crate::units::Stream;

/// A mapping of a page which left, or of a hole: range, offset, bytes and page.
pub(super) type Stale = (usize, u64, u64, PageId);

impl Core {
    pub(super) fn enter(&self, stream: Stream) -> Result<Entered<'_>> {
        self.common.require_usable()?;
        self.require_sealed()?;
        self.begin(stream).or_else(|error| self.enter_again(stream, error))
    }

    #[inline]
    fn begin(&self, stream: Stream) -> Result<Entered<'_>> {
        self.common.order.begin(stream, || self.bring_up())
    }

    #[cold]
    fn enter_again(&self, stream: Stream, error: Error) -> Result<Entered<'_>> {
        let mut first = Some(error);
        self.common.recalled(|| {
            self.with_memory_retry(|| match first.take() {
                Some(error) => Err(error),
                None => self.begin(stream),
            })
        })
    }

    pub(super) fn is_behind(&self) -> bool {
        self.seen.load(Ordering::SeqCst) != self.common.shared.version()
    }

    /// Replaces pages which left. The caller holds the replay slot, so no page leaves meanwhile.
    /// Waits for this space's last replay if a page is replaced.
    fn bring_up(&self) -> Result<()> {
        self.begin_launches();
        let (seen, version) = (self.seen.load(Ordering::SeqCst), self.common.shared.version());
        if seen == version { Ok(()) } else { self.bring_up_to(seen, version) }
    }

    #[cold]
    fn bring_up_to(&self, seen: u64, version: u64) -> Result<()> {
        let common = &self.common;
        if !self.state.lock().stale(common, self.own()).0.is_empty() {
            match common.shared.behind(seen) {
                Some(mark) => mark.block()?,
                None => {
                    common.order.fence().block(common.pool().events(), Duration::MAX)?;
                }
            }
            self.replace(&mut self.state.lock())?;
        }
        let leases = self.leases();
        if !leases.is_empty() {
            // The version stays unseen, so the next attempt checks again.
            return Err(Error::Lent { leases });
        }
        self.seen.store(version, Ordering::SeqCst);
        Ok(())
    }

    pub(super) fn leases(&self) -> Vec<u64> {
        if !self.common.pool().any_lent() {
            return Vec::new();
        }
        let shown = self.state.lock().shown();
        self.common.pool().leases(shown.iter())
    }

    fn replace(&self, state: &mut State) -> Result<()> {
        let shared = &self.common.shared;
        let (stale, holes) = state.stale(&self.common, self.own());
        let mut shown = state.shown();
        let mut transaction = Transaction::on(self.common.pool());
        let pages: HashMap<PageId, u64> = stale.iter().map(|(.., bytes, page)| (*page, *bytes)).collect();
        transaction.expect_bytes(pages.values().sum());
        let mut instead: HashMap<PageId, PageId> = HashMap::new();
        let done = stale.iter().enumerate().try_for_each(|(number, (range, offset, bytes, page))| {
            let new = match instead.get(page) {
                Some(new) => *new,
                None => {
                    let class = shared.class_of(*bytes)?;
                    let new =
                        shared.page_apart(&mut transaction, PageNo { class, index: 0 }, &shown, self.id)?;
                    shown.insert(new);
                    instead.insert(*page, new);
                    new
                }
            };
            let range = state.ranges[*range].id();
            if number >= holes {
                transaction.unmap(range, *offset, *bytes)?;
            }
            transaction.map(range, *offset, &[new])
        });
        if let Err(error) = done {
            if !transaction.undo() {
                // The next attempt maps a page at each hole.
                let before = std::mem::take(&mut state.holes);
                state.note_mapped(&self.common, 0, before.iter().map(|(_, _, bytes, _)| bytes).sum());
                self.note_holes(state, stale);
            }
            return Err(error);
        }
        state.holes.clear();
        let (calls, reserved) = transaction.commit();
        state.adopt(&self.common, calls, reserved);
        self.common.totals.add_refreshed(calls.maps);
        Ok(())
    }

    /// Records mappings lost by a refused undo. The next replay maps new pages.
    pub(super) fn note_holes(&self, state: &mut State, before: Vec<Stale>) {
        let gone =
            |(range, offset, bytes, _): &Stale| state.ranges[*range].gap(*offset, *offset + *bytes).is_some();
        let holes: Vec<Stale> = before.into_iter().filter(gone).collect();
        state.note_mapped(&self.common, holes.iter().map(|(_, _, bytes, _)| bytes).sum(), 0);
        state.holes.extend(holes);
        self.seen.store(self.common.shared.version().wrapping_sub(1), Ordering::SeqCst);
    }
}

impl State {
    pub(super) fn shown(&self) -> HashSet<PageId> {
        self.ranges.iter().flat_map(|range| range.mapped()).map(|mapped| mapped.page).collect()
    }

    /// Holes first; and the number of holes.
    fn stale(&self, common: &Common, own: Owner) -> (Vec<Stale>, usize) {
        let mut stale = self.holes.clone();
        let holes = stale.len();
        for (number, range) in self.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                let owner = common.pool().owner(mapped.page);
                if owner != Some(common.shared.owner()) && owner != Some(own) {
                    stale.push((number, mapped.offset, mapped.bytes, mapped.page));
                }
            }
        }
        (stale, holes)
    }

    /// Returns the pages of these numbers for a space under capture, which has seen version `seen`.
    /// If pages left since, a mapped number keeps its page, and a new number gets a page not mapped
    /// by the space.
    pub(super) fn pages_of(
        &self,
        common: &Common,
        (space, seen): (u64, u64),
        transaction: &mut Transaction,
        numbers: &[PageNo],
    ) -> Result<Vec<PageId>> {
        let shared = &common.shared;
        if shared.version() == seen {
            let pages = numbers.iter().map(|no| shared.page(transaction, *no, space));
            let pages = pages.collect::<Result<Vec<_>>>()?;
            if shared.version() == seen {
                return Ok(pages);
            }
        }
        let Some(layout) = self.placement.layout() else {
            return Err(Error::Internal { what: "only a stitched space has numbers".into() });
        };
        let mapped = self.ranges.iter().map(|range| {
            let mapped = range.mapped().into_iter().map(|mapped| (mapped.offset, mapped.page));
            mapped.collect::<HashMap<u64, PageId>>()
        });
        let mapped: Vec<_> = mapped.collect();
        let mut known: HashMap<PageNo, PageId> = layout
            .page_slots()
            .filter_map(|(range, offset, no)| Some((no, *mapped.get(range)?.get(&offset)?)))
            .collect();
        let mut shown = self.shown();
        let page = |no: &PageNo| {
            if let Some(page) = known.get(no) {
                // Its owner may change at this moment; a free is impossible, because this space
                // maps the page.
                let pinned = (0..2).any(|_| {
                    common.pool().owner(*page).is_some_and(|has| transaction.pin_owned(*page, has).is_some())
                });
                let lost = || Error::Internal { what: "a space lost a page".into() };
                return pinned.then_some(*page).ok_or_else(lost);
            }
            let page = shared.page_apart(transaction, *no, &shown, space)?;
            shown.insert(page);
            known.insert(*no, page);
            Ok(page)
        };
        numbers.iter().map(page).collect()
    }
}

impl crate::pages::SharedSet {
    fn class_of(&self, bytes: u64) -> Result<Class> {
        let of = [Class::Large, Class::Small].into_iter().find(|class| self.page_bytes(*class) == bytes);
        of.ok_or_else(|| Error::Internal { what: format!("a numbered page of {bytes} bytes") })
    }
}

//! Begin and end of a scope: pages leave the arena's shared set and return.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use super::generation::Generation;
use super::slots::{Slot, lowest_free};
use super::{Common, EagerSpace, State};
use crate::error::{Error, Result};
use crate::pages::{Class, PageId, PageNo, SharedSet, Transaction};
use crate::space::layout::Layout;
use crate::units::Stream;

/// Announces eager work until dropped: pages cannot be pinned meanwhile.
struct UnderWay<'a>(&'a SharedSet);

impl Drop for UnderWay<'_> {
    fn drop(&mut self) {
        self.0.end_eager();
    }
}

impl EagerSpace {
    /// Takes the replay slot and updates the mappings. Returns the number of the scope.
    pub(super) fn enter(self: &Arc<Self>, stream: Stream, bytes: Option<u64>) -> Result<u64> {
        let common = &self.common;
        common.shared.begin_eager();
        let under_way = UnderWay(&common.shared);
        let entered = common
            .recalled(|| common.with_memory_retry(|| common.order.begin(stream, || self.bring_up(bytes))))?;
        let mark = common.pool().events().record(stream)?;
        let state = &mut *self.state.lock();
        state.scope = Some((common.pool().events().name(stream), mark));
        state.counts.scopes += 1;
        self.reap(state, Some(stream));
        exclude_leased(state);
        std::mem::forget(under_way);
        entered.stay_entered();
        Ok(state.counts.scopes)
    }

    /// Maps the right page at every slot. The caller holds the replay slot.
    fn bring_up(&self, bytes: Option<u64>) -> Result<()> {
        let common = &self.common;
        let mut waited = false;
        loop {
            let last = {
                let state = &mut *self.state.lock();
                if state.broken || state.current.sprawls() {
                    self.renew(state);
                }
                let version = common.shared.version();
                state.lent = match bytes {
                    Some(bytes) => common.shared.beside_leases(bytes)?,
                    None => common.shared.on_lease(),
                };
                if state.seen != version {
                    let needed = |no| bytes.is_none() || !on_lease(&state.current, &state.lent, no);
                    let slots = state.current.slots.all().into_iter();
                    let pages: Vec<PageId> =
                        slots.filter(|(no, _)| needed(*no)).map(|(_, slot)| slot.page).collect();
                    let leases = common.pool().leases(pages.iter());
                    if !leases.is_empty() {
                        return Err(Error::Lent { leases });
                    }
                }
                if !state.moved && state.seen == version {
                    return Ok(());
                }
                state.current.slots.assign(&common.shared, &state.lent);
                let stale = stale(state, common);
                if stale.is_empty() {
                    state.brought_up(version);
                    return Ok(());
                }
                if waited {
                    self.replace(state, &stale)?;
                    state.brought_up(version);
                    return Ok(());
                }
                state.moved = true;
                state.last.clone()
            };
            // Waits without a lock.
            match last {
                Some(mark) => mark.block()?,
                None => {
                    common.order.fence().block(common.pool().events(), Duration::MAX)?;
                }
            }
            waited = true;
        }
    }

    pub(super) fn put_back(&self, state: &mut State) {
        if state.lent.is_empty() {
            return;
        }
        state.lent = self.common.shared.on_lease();
        let State { excluded, lent, current, .. } = state;
        excluded.retain(|no| {
            let stays = on_lease(current, lent, *no);
            if !stays {
                current.layout.put_back(*no);
            }
            stays
        });
    }

    /// Maps the current pages at the slots of these numbers, in one transaction.
    fn replace(&self, state: &mut State, stale: &[(PageNo, u32)]) -> Result<()> {
        let shared = &self.common.shared;
        let mut transaction = Transaction::on(self.common.pool());
        let mut now: Vec<(PageNo, Slot)> = Vec::new();
        let made = &state.current;
        let done = (|| {
            for (no, number) in stale {
                let page = shared.page(&mut transaction, PageNo { class: no.class, index: *number }, 0)?;
                now.push((*no, Slot { page, shared: Some(*number) }));
            }
            now.retain(|(no, slot)| made.slots.get(*no).is_none_or(|before| before.page != slot.page));
            for (range, offset, no) in made.layout.page_slots() {
                let Some((_, slot)) = now.iter().find(|(stale, _)| *stale == no) else { continue };
                let range = made.ranges[range].id();
                transaction.unmap(range, offset, shared.page_bytes(no.class))?;
                transaction.map(range, offset, &[slot.page])?;
            }
            Ok(())
        })();
        if let Err(error) = done {
            state.broken |= !transaction.undo();
            return Err(error);
        }
        let (calls, _) = transaction.commit();
        state.counts.maps += calls.maps;
        now.into_iter().for_each(|(no, slot)| state.current.slots.set(no, slot));
        Ok(())
    }

    /// Ends the scope of this number. Returns false if not active.
    pub(super) fn end(&self, number: u64) -> bool {
        let common = &self.common;
        let (shared, own) = (&common.shared, self.own());
        let state = &mut *self.state.lock();
        if state.counts.scopes != number || state.scope.is_none() {
            return false;
        }
        self.reap(state, None);
        let Some((stream, before)) = state.scope.take() else { return false };
        // Later frees may run where the stream cannot be named.
        common.pool().events().keep_named(stream);
        let made = &mut state.current;
        state.excluded.drain(..).for_each(|no| made.layout.put_back(no));
        for live in made.layout.blocks() {
            state.outlived.entry(made.address(live.place)).or_insert(stream);
        }
        for waiting in &state.waiting {
            state.outlived.remove(&waiting.address);
        }
        for address in state.kept.keys() {
            state.outlived.entry(*address).or_insert(stream);
        }
        let (mut leaving, mut returned) = (Vec::new(), 0);
        for (no, slot) in made.slots.all() {
            match (made.layout.holds(no), slot.shared) {
                (true, Some(number)) => {
                    leaving.push((PageNo { class: no.class, index: number }, slot.page));
                    made.slots.set(no, Slot { shared: None, ..slot });
                }
                (false, None) => {
                    let number = lowest_free(shared, no.class, &made.slots.taken(no.class), &state.lent);
                    let listed =
                        shared.return_page(slot.page, own, PageNo { class: no.class, index: number });
                    made.slots.set(no, Slot { shared: Some(number), ..slot });
                    state.moved |= !listed;
                    returned += 1;
                }
                _ => {}
            }
        }
        let left = shared.leave(&leaving, own, before);
        if left < leaving.len() as u64 {
            tracing::error!(space = ?self, "pages under live blocks were not the arena's");
        }
        // Recorded even if no page left: leases and pins also change pages here.
        state.last = common.pool().events().record_named(stream).ok();
        state.counts.pages_left += left;
        state.counts.pages_returned += returned;
        shared.end_eager();
        common.pool().check();
        true
    }

    /// Restarts with new addresses, outside any scope. Earlier addresses stay only under live
    /// blocks.
    pub(super) fn renew(&self, state: &mut State) {
        let common = &self.common;
        let layout = Layout::new(common.shared.geometry());
        let mut old = std::mem::replace(&mut state.current, Generation::new(layout));
        for waiting in state.waiting.drain(..) {
            if old.layout.free(waiting.place).is_ok() {
                old.readers.join(waiting.all());
            }
        }
        let mut fence = common.order.fence();
        fence.join(old.readers.clone());
        if old.layout.usage().blocks == 0 {
            old.leave(common, fence);
        } else {
            let idle: Vec<PageNo> =
                old.slots.all().iter().map(|(no, _)| *no).filter(|no| !old.layout.holds(*no)).collect();
            old.unmap(common, fence, |no| idle.contains(&no));
            state.old.push(old);
        }
        (state.moved, state.broken, state.seen) = (false, false, common.shared.version());
        state.counts.renewals += 1;
    }
}

impl State {
    /// Records the version. With leased pages mapped, the next scope checks again.
    fn brought_up(&mut self, version: u64) {
        let on_lease = |no| on_lease(&self.current, &self.lent, no);
        let looks_again = self.current.slots.all().into_iter().any(|(no, _)| on_lease(no));
        self.moved = looks_again;
        if !looks_again {
            self.seen = version;
        }
    }
}

fn on_lease(made: &Generation, lent: &BTreeSet<u32>, no: PageNo) -> bool {
    let number = made.slots.get(no).and_then(|slot| slot.shared);
    no.class == Class::Large && number.is_some_and(|number| lent.contains(&number))
}

fn exclude_leased(state: &mut State) {
    let State { excluded, lent, current, .. } = state;
    let numbers = current.slots.all().into_iter().map(|(no, _)| no);
    *excluded = numbers.filter(|no| on_lease(current, lent, *no)).collect();
    excluded.retain(|no| current.layout.exclude_page(*no));
}

fn stale(state: &State, common: &Common) -> Vec<(PageNo, u32)> {
    let all = state.current.slots.all().into_iter();
    let wanted = |(no, slot): (PageNo, Slot)| {
        let number = slot.shared?;
        let there: Option<PageId> = common.shared.listed(PageNo { class: no.class, index: number });
        (there != Some(slot.page)).then_some((no, number))
    };
    all.filter_map(wanted).collect()
}

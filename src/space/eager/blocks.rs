//! Blocks of eager work: allocation and free.

use super::generation::Generation;
use super::slots::{Slot, lowest_free};
use super::{ANY, EagerSpace, State};
use crate::error::{Error, Result};
use crate::pages::{Class, Fence, PageNo, Poll, Reservation, Transaction};
use crate::space::lane::Lane;
use crate::space::layout::Place;
use crate::units::{Address, BlockBytes, Stream};

/// A freed block, perhaps still in use.
#[derive(Debug)]
pub(super) struct Waiting {
    pub(super) address: Address,
    pub(super) place: Place,
    pub(super) bytes: u64,
    /// Fence after the block's stream and the streams named at the free. Later scopes may wait for
    /// it.
    own: Fence,
    /// Fence after the recorded streams, which is only polled.
    noted: Fence,
}

impl Waiting {
    pub(super) fn all(&self) -> Fence {
        let mut fence = self.own.clone();
        fence.join(self.noted.clone());
        fence
    }
}

impl EagerSpace {
    pub(super) fn place(&self, state: &mut State, bytes: BlockBytes) -> Result<Address> {
        let place = match state.current.layout.place(bytes, Lane::local(ANY)) {
            Some(place) => place,
            None => {
                self.reap(state, None);
                self.put_back(state);
                match state.current.layout.place(bytes, Lane::local(ANY)) {
                    Some(place) => place,
                    None => self.grow(state, bytes)?,
                }
            }
        };
        let usage = state.current.layout.usage();
        state.counts.peak_live_bytes = state.counts.peak_live_bytes.max(usage.bytes);
        self.common.totals.raise_high_water(usage.bytes);
        Ok(state.current.address(place))
    }

    /// Maps pages at new addresses. Changes nothing on error.
    fn grow(&self, state: &mut State, bytes: BlockBytes) -> Result<Place> {
        self.common.refuse_hopeless(bytes)?;
        if state.broken {
            return Err(Error::wrong_state(
                "cannot allocate eager memory: the driver did not undo an earlier failure; end this scope and begin another",
            ));
        }
        let (shared, made) = (&self.common.shared, &mut state.current);
        let growth = made.layout.plan(bytes, Lane::local(ANY));
        let mut transaction = Transaction::on(self.common.pool());
        transaction.expect_bytes(growth.pages.iter().map(|no| shared.page_bytes(no.class)).sum());
        let mut fresh: Vec<(Class, Slot)> = Vec::new();
        let done = (|| {
            let known = made.ranges.get(growth.range).map(Reservation::id);
            let range =
                known.map_or_else(|| transaction.reserve(growth.range_bytes, self.id, shared.peers()), Ok)?;
            let mut pages = Vec::with_capacity(growth.pages.len());
            for no in &growth.pages {
                let slots = made.slots.of(no.class);
                let known = slots.get(no.index as usize).copied();
                let known = known.or_else(|| {
                    let behind = (no.index as usize).checked_sub(slots.len())?;
                    fresh.get(behind).map(|(_, slot)| *slot)
                });
                if let Some(slot) = known {
                    let owner = if slot.shared.is_some() { shared.owner() } else { self.own() };
                    if transaction.pin_owned(slot.page, owner).is_none() {
                        return Err(Error::Internal { what: "an eager space lost a page".into() });
                    }
                    pages.push(slot.page);
                    continue;
                }
                let mut taken = made.slots.taken(no.class);
                taken.extend(fresh.iter().filter_map(|(_, slot)| slot.shared));
                let number = lowest_free(shared, no.class, &taken, &state.lent);
                let numbered = PageNo { class: no.class, index: number };
                if no.class == Class::Large
                    && !state.lent.is_empty()
                    && shared.listed(numbered).is_none()
                    && !shared.listed_above(number)
                {
                    // A new page would stay after the leased ones return.
                    let leases = shared.leases(growth.pages.len());
                    if !leases.is_empty() {
                        return Err(Error::Lent { leases });
                    }
                }
                let page = shared.page(&mut transaction, numbered, 0)?;
                fresh.push((no.class, Slot { page, shared: Some(number) }));
                pages.push(page);
            }
            transaction.map(range, growth.offset, &pages)
        })();
        if let Err(error) = done {
            state.broken |= !transaction.undo();
            return Err(error);
        }
        let (calls, reserved) = transaction.commit();
        self.common.totals.note_reserved(0, reserved.iter().map(Reservation::bytes).sum());
        made.ranges.extend(reserved);
        fresh.into_iter().for_each(|(class, slot)| made.slots.of_mut(class).push(slot));
        made.note_mapped(&self.common, 0, calls.mapped_bytes);
        state.counts.maps += calls.maps;
        Ok(made.layout.commit(&growth))
    }

    pub(super) fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.common.require_usable()?;
        let state = &mut *self.state.lock();
        let now = state.scope.as_ref().map(|(stream, _)| *stream);
        let events = self.common.pool().events();
        let noted = |state: &mut State| state.users.take(address, events);
        if let Some(bytes) = state.kept.remove(&address) {
            let mut fence = noted(state);
            let own = state.outlived.remove(&address).or(now);
            events
                .name_readers(readers)
                .into_iter()
                .chain(own)
                .for_each(|stream| fence.add_kept(events, stream));
            self.common.heap.free_all(self.common.pool(), vec![(address, bytes)], &fence);
            state.live_count.remove(1, bytes);
            return Ok(());
        }
        if let Some(place) = state.current.place_of(address) {
            let bytes = state.current.layout.bytes_at(place).map_err(|why| why.at(address))?;
            if state.waiting.iter().any(|waiting| waiting.address == address) {
                return Err(Error::DoubleFree { address });
            }
            let before = state.outlived.remove(&address);
            if !state.users.has(address) && now.is_some() && before.is_none_or(|stream| Some(stream) == now) {
                state.current.layout.free(place).map_err(|why| why.at(address))?;
            } else {
                let (mut own, noted) = (Fence::default(), noted(state));
                if now.is_none() || before.is_some() {
                    let streams = events.name_readers(readers).into_iter().chain(before);
                    streams.for_each(|stream| own.add_kept(events, stream));
                }
                state.waiting.push(Waiting { address, place, bytes, own, noted });
            }
            state.live_count.remove(1, bytes);
            return Ok(());
        }
        let found = state.old.iter().position(|old| old.place_of(address).is_some());
        let Some(index) = found else { return Err(Error::ForeignPointer { address }) };
        let old = &mut state.old[index];
        let Some(place) = old.place_of(address) else { return Err(Error::ForeignPointer { address }) };
        let bytes = old.layout.free(place).map_err(|why| why.at(address))?;
        let mut fence = noted(state);
        let own = state.outlived.remove(&address);
        events.name_readers(readers).into_iter().chain(own).for_each(|stream| fence.add_kept(events, stream));
        fence.join(self.common.order.fence());
        state.old[index].readers.join(fence);
        state.live_count.remove(1, bytes);
        self.shrink_old(state, index, place, bytes);
        Ok(())
    }

    fn shrink_old(&self, state: &mut State, index: usize, place: Place, bytes: u64) {
        let old: &mut Generation = &mut state.old[index];
        let _ = old.readers.done(self.common.pool().events());
        let fence = old.readers.clone();
        if old.layout.usage().blocks == 0 {
            let old = state.old.remove(index);
            return old.leave(&self.common, fence);
        }
        let under = old.layout.under(place, bytes);
        let idle: Vec<_> = under.into_iter().filter(|no| !old.layout.holds(*no)).collect();
        if !idle.is_empty() {
            old.unmap(&self.common, fence, |no| idle.contains(&no));
        }
    }

    pub(super) fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.common.require_usable()?;
        let stream = self.common.pool().events().keep(stream);
        let state = &mut *self.state.lock();
        if !state.kept.contains_key(&address) {
            let made = state.old.iter().chain([&state.current]);
            let mut found =
                made.filter_map(|made| made.place_of(address).map(|place| made.layout.bytes_at(place)));
            found.next().ok_or(Error::ForeignPointer { address })?.map_err(|why| why.at(address))?;
            if state.waiting.iter().any(|waiting| waiting.address == address) {
                return Err(Error::DoubleFree { address });
            }
        }
        let now = state.scope.as_ref().map(|(stream, _)| *stream);
        let own = state.outlived.get(&address).copied().or(now);
        if own != Some(stream) {
            state.users.note(address, stream);
        }
        Ok(())
    }

    /// Takes back freed blocks no longer in use. With `before`, this stream waits for the blocks'
    /// own streams instead.
    pub(super) fn reap(&self, state: &mut State, before: Option<Stream>) {
        let events = self.common.pool().events();
        let State { waiting, current, .. } = state;
        let mut poll = Poll::new(events);
        waiting.retain_mut(|block| {
            let over = block.noted.done_at(&mut poll).unwrap_or(false)
                && match before {
                    Some(stream) => block.own.before(events, stream).is_ok(),
                    None => block.own.done_at(&mut poll).unwrap_or(false),
                };
            // Cannot fail: the block was live when added.
            !over || current.layout.free(block.place).is_err()
        });
    }
}

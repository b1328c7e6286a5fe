//! Eager work over a ring: units are filled ahead, read between acquire and release, and their
//! slots refilled. The mutex `state` is held while copies are submitted.

use std::ops::Range;
use std::sync::Arc;

use super::host::next_change;
use super::runs::{Run, Runs, merge};
use super::schedule::Held;
use super::state::{RingState, Source, User};
use super::{HostRun, Ring, gone, no_unit};
use crate::error::{Error, Result};
use crate::pages::Fence;
use crate::units::Stream;

impl Ring {
    /// Sets the source of a unit, from its next acquire on: `vmmgraph_ring_set_source`.
    pub fn set_source(&self, unit: usize, runs: &[HostRun]) -> Result<()> {
        let bytes = self.units.get(unit).ok_or_else(|| no_unit(unit))?.bytes;
        let mut given = Runs::with_capacity(runs.len());
        for HostRun { source, from, to, bytes } in runs {
            let wrong = |what, value: u64, expected| {
                Err(Error::InvalidArgument { what, value: value.into(), expected })
            };
            if !Arc::ptr_eq(source.device(), &self.device) {
                let ordinal = source.device().driver().info().ordinal;
                return wrong("the device of a run's source", ordinal as u64, "the ring's own");
            }
            if from.checked_add(*bytes).is_none_or(|end| end > source.bytes()) {
                return wrong("a run's place in its source", *from, "with its bytes within the source");
            }
            given.push(Run { source: Arc::clone(source), from: *from, to: *to, bytes: *bytes });
        }
        let runs = merge(given, bytes)?;
        let old = {
            let mut state = self.state.lock();
            let place = state.sources.get_mut(unit).ok_or_else(|| no_unit(unit))?;
            place.replace(Source { runs, set: next_change() })
        };
        // Not under the lock: host memory may be freed.
        drop(old);
        Ok(())
    }

    /// Makes later work of a stream find a unit's contents at its addresses, until
    /// [`release`](Self::release): `vmmgraph_ring_acquire`.
    pub fn acquire(&self, unit: usize, stream: Stream) -> Result<()> {
        let number = self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
        let events = self.device.pool().events();
        if !events.ready(stream)? {
            return self.acquire_captured(unit, stream);
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        state.between_launches()?;
        if let Some(user) = state.place(number)?.user {
            return Err(Error::wrong_state(if user.unit == unit {
                "cannot acquire the unit: it is acquired already; release it first"
            } else {
                "cannot acquire the unit: another unit of its slot is acquired; release that one first"
            }));
        }
        let late = self.fill(state, unit)?;
        if let Some(position) = self.schedule.position_of(unit) {
            self.fill_ahead(state, position + 1..position + self.schedule.slots());
        }
        state.graphs.before(events, stream)?;
        let place = state.place(number)?;
        place.ready.before(events, stream)?;
        place.user = Some(User { unit, stream: events.keep(stream) });
        state.counts.acquires += 1;
        state.counts.filled_late += u64::from(late);
        Ok(())
    }

    /// Ends reading a unit: `vmmgraph_ring_release`.
    pub fn release(&self, unit: usize, stream: Stream) -> Result<()> {
        let number = self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
        let events = self.device.pool().events();
        if !events.ready(stream)? {
            return self.release_captured(unit, stream);
        }
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let place = state.place(number)?;
        if place.user.is_none_or(|user| user.unit != unit) {
            return Err(Error::wrong_state("cannot release the unit: it is not acquired; acquire it first"));
        }
        let mark = events.record(stream)?;
        place.readers.add_mark(mark);
        place.user = None;
        if let Some(position) = self.schedule.position_of(unit) {
            self.fill_ahead(state, position + 1..position + 1 + self.schedule.slots());
        }
        Ok(())
    }

    /// Fills resident units and the first streaming units whose places have other contents, and
    /// returns their number: `vmmgraph_ring_prime`.
    pub fn prime(&self) -> Result<u64> {
        let mut state = self.state.lock();
        state.between_launches()?;
        let first = self.schedule.streamed().iter().take(self.schedule.slots());
        let mut units: Vec<usize> = self.schedule.residents().iter().chain(first).copied().collect();
        units.sort_unstable();
        let mut filled = 0;
        for unit in units {
            let number = self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
            if state.place(number)?.user.is_none() && self.fill(&mut state, unit)? {
                state.counts.filled_ahead += 1;
                filled += 1;
            }
        }
        Ok(filled)
    }

    /// Aborts a step: `vmmgraph_ring_abort`.
    pub fn abort(&self) {
        let mut state = self.state.lock();
        state.forget(self.device.pool().events());
        state.counts.aborts += 1;
    }

    /// Fills a place which has no reader, unless it holds the unit already. Returns whether copies
    /// were submitted.
    pub(super) fn fill(&self, state: &mut RingState, unit: usize) -> Result<bool> {
        let number = self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
        let (source, stamp) = state.source(unit)?;
        let copies_none = source.runs.is_empty();
        let now = Some(Held { unit, stamp });
        if state.place(number)?.held == now {
            return Ok(false);
        }
        let events = self.device.pool().events();
        let copies = self.device.host_pool().stream_in()?;
        state.graphs.before(events, copies)?;
        let place = state.place(number)?;
        place.readers.before(events, copies)?;
        // From the first copy on, the contents are undefined.
        place.held = None;
        let mut ready = std::mem::take(&mut place.ready);
        let result = self.copy(state, unit, &mut ready);
        let place = state.place(number)?;
        place.ready = ready;
        result?;
        // The copies run after the readers; without a copy the readers remain.
        if !copies_none {
            place.readers = Fence::default();
        }
        place.held = now;
        Ok(true)
    }

    /// Whether the place holds the unit at its stamp.
    pub(super) fn holds(&self, state: &RingState, unit: usize, stamps: &[u64]) -> bool {
        let held = self.schedule.place_of(unit).and_then(|place| state.places.get(place)?.held);
        held.is_some_and(|held| held.unit == unit && stamps.get(unit) == Some(&held.stamp))
    }

    fn copy(&self, state: &mut RingState, unit: usize, ready: &mut Fence) -> Result<()> {
        let range = self.range.as_ref().ok_or_else(gone)?.id();
        let offset = self.offsets.get(unit).copied().ok_or_else(|| no_unit(unit))?;
        let RingState { sources, counts, .. } = state;
        let source = sources.get(unit).and_then(Option::as_ref);
        for run in source.map_or(&[][..], |source| &source.runs) {
            run.source.load((range, offset + run.to), (run.from, run.bytes), ready)?;
            counts.copies += 1;
            counts.copied_bytes += run.bytes;
        }
        Ok(())
    }

    /// Fills units up to the first slot in use. The acquire repeats failed copies.
    fn fill_ahead(&self, state: &mut RingState, positions: Range<usize>) {
        let last = if self.across_steps { usize::MAX } else { self.schedule.streamed().len() };
        for position in positions.start.min(last)..positions.end.min(last) {
            let Some(unit) = self.schedule.unit_at(position) else { return };
            let free = state.place(position % self.schedule.slots()).is_ok_and(|place| place.user.is_none());
            if !free || state.source(unit).is_err() {
                return;
            }
            match self.fill(state, unit) {
                Ok(filled) => state.counts.filled_ahead += u64::from(filled),
                Err(error) => {
                    tracing::debug!(ring = self.id, unit, %error, "a unit was not filled ahead");
                    state.counts.ahead_failed += 1;
                    return;
                }
            }
        }
    }
}

//! State of a ring, under the mutex `state`: contents and readers of each place, and sources. A
//! place holds, and is read as, one of its own units.

use std::sync::Arc;

use super::HostBuffer;
use super::capture::StepCapture;
use super::runs::Runs;
use super::schedule::{Held, Schedule};
use crate::error::{Error, Result};
use crate::pages::{Branch, Events, Fence, NamedStream};

#[derive(Clone, Copy, Debug)]
pub(super) struct User {
    pub(super) unit: usize,
    pub(super) stream: NamedStream,
}

/// A slot, or the place of a resident unit.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// After all submitted copies. `None`: undefined.
    pub(super) held: Option<Held>,
    pub(super) ready: Fence,
    pub(super) readers: Fence,
    pub(super) user: Option<User>,
}

#[derive(Debug)]
pub(super) struct Source {
    pub(super) runs: Runs<Arc<HostBuffer>>,
    /// The change that set this source.
    pub(super) set: u64,
}

impl Source {
    /// The last change of the source or its buffers.
    pub(super) fn stamp(&self) -> u64 {
        self.runs.iter().map(|run| run.source.last_change()).fold(self.set, u64::max)
    }
}

#[derive(Debug, Default)]
pub(super) struct Stores {
    pub(super) fence: Fence,
    /// Units often share buffers.
    known: Vec<Arc<HostBuffer>>,
}

impl Source {
    /// The stamp; also adds running stores to the buffers.
    pub(super) fn stamp_and_stores(&self, stores: &mut Stores) -> Result<u64> {
        let mut stamp = self.set;
        for run in &self.runs {
            let mut pending = Fence::default();
            stamp = stamp.max(run.source.last_change_and_stores(&mut pending)?);
            if !pending.is_empty() && !stores.known.contains(&run.source) {
                stores.fence.join(pending);
                stores.known.push(Arc::clone(&run.source));
            }
        }
        Ok(stamp)
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    pub(super) copies: u64,
    pub(super) copied_bytes: u64,
    pub(super) acquires: u64,
    pub(super) filled_ahead: u64,
    pub(super) filled_late: u64,
    pub(super) ahead_failed: u64,
    pub(super) aborts: u64,
    pub(super) launches: u64,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Launching {
    pub(super) stamps: Arc<[u64]>,
    pub(super) copies: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct RingState {
    pub(super) places: Vec<Place>,
    pub(super) sources: Vec<Option<Source>>,
    pub(super) counts: Counts,
    pub(super) capturing: Option<StepCapture>,
    /// Reused once the capture ended.
    pub(super) branches: Vec<Branch>,
    /// Source of copy nodes without a run.
    pub(super) nothing: Option<Arc<HostBuffer>>,
    pub(super) launching: Option<Launching>,
    /// The last launch, which used every place.
    pub(super) graphs: Fence,
}

pub(super) fn no_source() -> Error {
    Error::wrong_state("cannot fill the unit: it has no source; call set_source first")
}

impl RingState {
    pub(super) fn new(schedule: &Schedule) -> Self {
        Self {
            places: (0..schedule.places()).map(|_| Place::default()).collect(),
            sources: (0..schedule.units()).map(|_| None).collect(),
            counts: Counts::default(),
            capturing: None,
            branches: Vec::new(),
            nothing: None,
            launching: None,
            graphs: Fence::default(),
        }
    }

    pub(super) fn place(&mut self, place: usize) -> Result<&mut Place> {
        let none = || Error::Internal { what: "a ring lacks a place".to_owned() };
        self.places.get_mut(place).ok_or_else(none)
    }

    pub(super) fn source(&self, unit: usize) -> Result<(&Source, u64)> {
        let source = self.sources.get(unit).and_then(Option::as_ref).ok_or_else(no_source)?;
        Ok((source, source.stamp()))
    }

    pub(super) fn between_launches(&self) -> Result<()> {
        if self.launching.is_none() {
            return Ok(());
        }
        Err(Error::wrong_state(
            "cannot use the ring: a captured step of it is being launched; wait until that launch is left",
        ))
    }

    pub(super) fn acquired(&self) -> u64 {
        self.places.iter().filter(|place| place.user.is_some()).count() as u64
    }

    /// Ends all reads after the work submitted to their streams; all contents become undefined.
    pub(super) fn forget(&mut self, events: &Arc<Events>) {
        for place in &mut self.places {
            place.held = None;
            if let Some(user) = place.user.take() {
                place.readers.add_user(events, user.stream);
            }
        }
    }

    pub(super) fn leave(&mut self, events: &Arc<Events>, fence: &mut Fence) {
        self.forget(events);
        fence.join(std::mem::take(&mut self.graphs));
        for place in &mut self.places {
            fence.join(std::mem::take(&mut place.ready));
            fence.join(std::mem::take(&mut place.readers));
        }
    }

    pub(super) fn audit(&self, schedule: &Schedule) -> Result<(), String> {
        for (number, place) in self.places.iter().enumerate() {
            let held = place.held.map(|held| held.unit);
            let user = place.user.map(|user| user.unit);
            for unit in [held, user].into_iter().flatten() {
                if schedule.place_of(unit) != Some(number) {
                    return Err(format!("place {number} holds unit {unit}, whose it is not"));
                }
            }
            if user.is_some() && held.is_some() && user != held {
                return Err(format!("place {number} is read as unit {user:?} and holds {held:?}"));
            }
        }
        Ok(())
    }
}

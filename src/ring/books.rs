//! What a ring knows of its places: what each holds, who reads it, what its units are copied from.

use std::sync::Arc;

use super::HostBuffer;
use super::capture::StepCapture;
use super::runs::Runs;
use super::schedule::{Held, Schedule};
use crate::error::{Error, Result};
use crate::pages::{Branch, Events, Fence, NamedStream};

/// Who reads a place now.
#[derive(Clone, Copy, Debug)]
pub(super) struct User {
    pub(super) unit: usize,
    pub(super) stream: NamedStream,
}

/// A slot, or the place of a resident unit.
#[derive(Debug, Default)]
pub(super) struct Place {
    /// What it holds once the copies that were given are over; `None`: nobody knows.
    pub(super) held: Option<Held>,
    /// Behind those copies.
    pub(super) ready: Fence,
    /// Behind those who read it since.
    pub(super) readers: Fence,
    /// Who is reading it.
    pub(super) user: Option<User>,
}

/// What a unit is copied from.
#[derive(Debug)]
pub(super) struct Source {
    pub(super) runs: Runs<Arc<HostBuffer>>,
    /// Which change it was that set it.
    pub(super) set: u64,
}

impl Source {
    /// The last change of it, or of what it is made of.
    pub(super) fn stamp(&self) -> u64 {
        self.runs.iter().map(|run| run.source.last_change()).fold(self.set, u64::max)
    }
}

/// What is behind the copies to several sources.
#[derive(Debug, Default)]
pub(super) struct Stores {
    pub(super) fence: Fence,
    /// Those that it is behind of: units often have parts of one.
    known: Vec<Arc<HostBuffer>>,
}

impl Source {
    /// [`stamp`](Self::stamp), and what is behind the copies to what it is made of.
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

/// Counts since the ring was made.
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

/// A launch that is being given: what it copies.
#[derive(Clone, Debug, Default)]
pub(super) struct Launching {
    /// By unit: the stamp of its source.
    pub(super) stamps: Arc<[u64]>,
    pub(super) copies: u64,
    pub(super) bytes: u64,
}

#[derive(Debug)]
pub(super) struct Books {
    pub(super) places: Vec<Place>,
    /// By unit.
    pub(super) sources: Vec<Option<Source>>,
    pub(super) counts: Counts,
    /// A step that is being captured.
    pub(super) capturing: Option<StepCapture>,
    /// The branches of captures that have ended, or will have before they are used again.
    pub(super) branches: Vec<Branch>,
    /// What nodes of captured steps copy that have nothing to copy.
    pub(super) nothing: Option<Arc<HostBuffer>>,
    /// A captured step that is being launched.
    pub(super) launching: Option<Launching>,
    /// Behind the last one that was launched, which used every place.
    pub(super) graphs: Fence,
}

/// A unit that was not told what it is copied from.
pub(super) fn no_source() -> Error {
    Error::wrong_state("cannot fill the unit: it has no source; call set_source first")
}

impl Books {
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

    /// What a unit is copied from, and its stamp.
    pub(super) fn source(&self, unit: usize) -> Result<(&Source, u64)> {
        let source = self.sources.get(unit).and_then(Option::as_ref).ok_or_else(no_source)?;
        Ok((source, source.stamp()))
    }

    /// That no captured step is being launched.
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

    /// Everybody who reads has done so behind what his stream was given, and nobody knows what the places hold.
    pub(super) fn forget(&mut self, events: &Arc<Events>) {
        for place in &mut self.places {
            place.held = None;
            if let Some(user) = place.user.take() {
                place.readers.add_user(events, user.stream);
            }
        }
    }

    /// What is behind every copy and every reader there is.
    pub(super) fn leave(&mut self, events: &Arc<Events>, fence: &mut Fence) {
        self.forget(events);
        fence.join(std::mem::take(&mut self.graphs));
        for place in &mut self.places {
            fence.join(std::mem::take(&mut place.ready));
            fence.join(std::mem::take(&mut place.readers));
        }
    }

    /// Whether what places hold and who reads them is theirs; what is not.
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

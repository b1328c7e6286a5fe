//! State and last use of every graph of a dispatcher, in atomics only.
//!
//! ```text
//!   a slot:   absent ──a step claims it──> capturing ──finish──> ready ──evict──> absent
//!              ^  ^ └──────begin─────────> warming ───┘ │ │
//!              │  └──────────────── finish ─────────────┘ │
//!              └─────────────── forgive ── failed <───────┘
//! ```

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use super::counters::Reason;
use crate::error::{Error, Result};

/// Number of a graph: one per bucket and mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Absent = 0,
    /// Being captured for a step.
    Capturing = 1,
    /// Being captured ahead of traffic.
    Warming = 2,
    Ready = 3,
    Failed = 4,
}

impl State {
    fn of(state: u8) -> Self {
        match state {
            1 => Self::Capturing,
            2 => Self::Warming,
            3 => Self::Ready,
            4 => Self::Failed,
            _ => Self::Absent,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::Capturing | Self::Warming => "being captured",
            Self::Ready => "ready",
            Self::Failed => "failed",
        }
    }
}

#[derive(Debug, Default)]
struct Place {
    state: AtomicU8,
    replays: AtomicU64,
    /// On the clock of all slots.
    used: AtomicU64,
    /// Weight of the step for which the graph is being captured.
    asked: AtomicU64,
}

#[derive(Debug)]
pub(super) struct Slots {
    places: Box<[Place]>,
    /// Slots ready or being captured.
    graphs: AtomicU32,
    most_graphs: u32,
    clock: AtomicU64,
}

impl Slots {
    pub(super) fn new(count: usize, most_graphs: u32) -> Self {
        let places = (0..count).map(|_| Place::default()).collect();
        Self { places, graphs: AtomicU32::new(0), most_graphs, clock: AtomicU64::new(0) }
    }

    /// State of a slot; absent for an invalid one.
    pub(super) fn state(&self, slot: Slot) -> State {
        // Acquire: the graph was stored before its capture was reported.
        self.places
            .get(slot.0 as usize)
            .map_or(State::Absent, |place| State::of(place.state.load(Ordering::Acquire)))
    }

    pub(super) fn graphs(&self) -> u32 {
        self.graphs.load(Ordering::Relaxed)
    }

    pub(super) fn replays(&self, slot: Slot) -> u64 {
        self.places.get(slot.0 as usize).map_or(0, |place| place.replays.load(Ordering::Relaxed))
    }

    pub(super) fn use_now(&self, slot: Slot) {
        if let Some(place) = self.places.get(slot.0 as usize) {
            place.replays.fetch_add(1, Ordering::Relaxed);
            self.touch(place);
        }
    }

    /// Counts a step run by the decision of another rank. A missing graph is captured by the
    /// caller.
    pub(super) fn impose(&self, slot: Slot) -> Result<()> {
        self.place(slot)?;
        if self.state(slot) == State::Ready {
            self.use_now(slot);
        }
        Ok(())
    }

    fn touch(&self, place: &Place) {
        place.used.store(self.clock.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    pub(super) fn ask(&self, slot: Slot, weight: u64) {
        if let Some(place) = self.places.get(slot.0 as usize) {
            place.asked.store(weight, Ordering::Relaxed);
        }
    }

    /// Reserves a slot within the graph limit.
    pub(super) fn claim(&self, slot: Slot, to: State) -> std::result::Result<(), Reason> {
        let more = |graphs: u32| (graphs < self.most_graphs).then_some(graphs + 1);
        self.graphs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| Reason::Budget)?;
        self.change(slot, State::Absent, to, "absent").map_err(|_| {
            self.graphs.fetch_sub(1, Ordering::Relaxed);
            Reason::BeingCaptured
        })
    }

    /// Reserves a slot for a capture ahead of traffic.
    pub(super) fn begin(&self, slot: Slot) -> Result<()> {
        self.place(slot)?;
        let found = self.state(slot);
        if found == State::Absent && self.claim(slot, State::Warming).is_ok() {
            return Ok(());
        }
        Err(Error::wrong_state(if found == State::Absent {
            "cannot begin a capture: as many graphs exist as the options allow; evict one first".to_owned()
        } else {
            format!("cannot begin a capture: its slot is {}; only an absent one is captured", found.name())
        }))
    }

    /// Returns the weight of its step; `None` for a capture ahead of traffic.
    pub(super) fn finish(&self, slot: Slot, to: State) -> Result<Option<u64>> {
        let place = self.place(slot)?;
        if to == State::Ready {
            // Before the slot is ready: otherwise the new graph could be chosen as least recently
            // used.
            self.touch(place);
        }
        let asked = place.asked.load(Ordering::Relaxed);
        let step = match self.change(slot, State::Warming, to, "being captured") {
            Ok(()) => None,
            Err(_) => self.change(slot, State::Capturing, to, "being captured").map(|()| Some(asked))?,
        };
        if to != State::Ready {
            self.graphs.fetch_sub(1, Ordering::Relaxed);
        } else if step.is_some() {
            place.replays.fetch_add(1, Ordering::Relaxed);
        }
        Ok(step)
    }

    pub(super) fn evict(&self, slot: Slot) -> Result<()> {
        self.change(slot, State::Ready, State::Absent, "ready")?;
        self.graphs.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn forgive(&self, slot: Slot) -> Result<()> {
        self.change(slot, State::Failed, State::Absent, "failed")
    }

    pub(super) fn least_recently_used(&self, kept: Option<Slot>) -> Option<Slot> {
        let ready = (0..self.places.len())
            .map(|number| Slot(number as u32))
            .filter(|slot| kept != Some(*slot) && self.state(*slot) == State::Ready);
        ready.min_by_key(|slot| self.places[slot.0 as usize].used.load(Ordering::Relaxed))
    }

    fn place(&self, slot: Slot) -> Result<&Place> {
        let expected = "below the number of slots";
        let value = i128::from(slot.0);
        self.places.get(slot.0 as usize).ok_or(Error::InvalidArgument { what: "a slot", value, expected })
    }

    fn change(&self, slot: Slot, from: State, to: State, expected: &'static str) -> Result<()> {
        let state = &self.place(slot)?.state;
        // Release: stores of the caller are visible to readers which find the slot ready.
        let changed = state.compare_exchange(from as u8, to as u8, Ordering::AcqRel, Ordering::Acquire);
        let wrong = |found| {
            let found = State::of(found).name();
            Error::wrong_state(format!("cannot change the slot: it is {found}; it must be {expected}"))
        };
        changed.map(drop).map_err(wrong)
    }
}

//! Which graph runs a step, or why none does.
//!
//! ```text
//!   a slot:   absent ──dispatch says capture──> capturing ──captured──> ready ──evicted──> absent
//!                ^                                 │
//!                └──────────── forgive ── failed <─┘ capture_failed
//! ```
//!
//! Every slot is one atomic byte and a decision is a search and a few additions: no lock, no allocation, any thread.

use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};

use crate::error::{Error, Result};

use super::bucket::BucketSet;
use super::counters::{Counters, Reason};
use super::key::{Axis, Key};

/// How a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GraphMode {
    /// No graph.
    Eager = 0,
    /// Graphs between the attention calls.
    Piecewise = 1,
    /// One graph.
    Full = 2,
}

impl GraphMode {
    /// All modes, in the order of their numbers.
    pub(crate) const ALL: [Self; 3] = [Self::Eager, Self::Piecewise, Self::Full];

    /// The mode as metrics name it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Piecewise => "piecewise",
            Self::Full => "full",
        }
    }

    pub(super) fn can_be(self, reason: Reason) -> bool {
        (self == Self::Eager) != matches!(reason, Reason::Hit | Reason::Padded | Reason::Captured)
    }
}

/// What the sequences of a step are doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// All of them decode.
    Decode,
    /// All of them prefill.
    Prefill,
    /// Some of each.
    Mixed,
}

/// Which modes each phase tries, in order; [`GraphMode::Eager`] ends a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Modes {
    /// For [`Phase::Decode`].
    pub decode: [GraphMode; 2],
    /// For [`Phase::Prefill`].
    pub prefill: [GraphMode; 2],
    /// For [`Phase::Mixed`].
    pub mixed: [GraphMode; 2],
}

impl Default for Modes {
    /// Full graphs for decode, else piecewise; piecewise for everything with a prefill in it.
    fn default() -> Self {
        let piecewise = [GraphMode::Piecewise, GraphMode::Eager];
        Self { decode: [GraphMode::Full, GraphMode::Piecewise], prefill: piecewise, mixed: piecewise }
    }
}

/// How a dispatcher decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatcherOptions {
    /// The modes of each phase.
    pub modes: Modes,
    /// Steps of more tokens than this run eagerly.
    pub most_tokens: u32,
    /// Whether a graph that is not there is captured at the first step that needs it.
    pub lazy: bool,
    /// Most graphs that are there or being captured at once.
    pub most_graphs: u32,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        Self { modes: Modes::default(), most_tokens: u32::MAX, lazy: true, most_graphs: u32::MAX }
    }
}

/// A step to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Its shape.
    pub key: Key,
    /// What its sequences do.
    pub phase: Phase,
    /// Whether the engine could put it into a graph at all (sequence lengths, features, sampling).
    pub capturable: bool,
}

/// A graph's place: one for each bucket of each mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(pub u32);

/// What to do with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run it without a graph.
    Eager,
    /// Pad it to this bucket and replay the graph.
    Replay(Slot, Key),
    /// Pad it to this bucket and capture. The slot is the caller's until it reports [`Dispatcher::captured`] or
    /// [`Dispatcher::capture_failed`]; others run eagerly meanwhile.
    Capture(Slot, Key),
}

/// What to do with a step, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// How it runs.
    pub mode: GraphMode,
    /// With which graph.
    pub action: Action,
    /// Why.
    pub reason: Reason,
}

const ABSENT: u8 = 0;
const CAPTURING: u8 = 1;
const READY: u8 = 2;
const FAILED: u8 = 3;

/// Decides for every step which graph runs it. All calls are thread-safe.
#[derive(Debug)]
pub struct Dispatcher {
    full: BucketSet,
    piecewise: BucketSet,
    options: DispatcherOptions,
    /// Full graphs' states, then piecewise ones'.
    states: Box<[AtomicU8]>,
    /// Steps that each slot ran.
    replays: Box<[AtomicU64]>,
    /// Slots that are ready or being captured.
    graphs: AtomicU32,
    counters: Counters,
}

impl Dispatcher {
    /// A dispatcher without any graph. Full and piecewise graphs have buckets of their own; either set may be empty.
    #[must_use]
    pub fn new(full: BucketSet, piecewise: BucketSet, options: DispatcherOptions) -> Self {
        let slots = full.len() + piecewise.len();
        Self {
            full,
            piecewise,
            options,
            states: (0..slots).map(|_| AtomicU8::new(ABSENT)).collect(),
            replays: (0..slots).map(|_| AtomicU64::new(0)).collect(),
            graphs: AtomicU32::new(0),
            counters: Counters::default(),
        }
    }

    /// Decides for one step and counts the decision.
    pub fn dispatch(&self, step: &Step) -> Decision {
        let decision = self.decide(step).unwrap_or_else(|reason| Decision {
            mode: GraphMode::Eager,
            action: Action::Eager,
            reason,
        });
        let (requested, padding) = match decision.action {
            Action::Eager => (0, 0),
            Action::Replay(slot, bucket) | Action::Capture(slot, bucket) => {
                self.replays[slot.0 as usize].fetch_add(1, Ordering::Relaxed);
                let (set, _) = self.set(decision.mode);
                let requested = set.weights().of(&set.relevant(&step.key));
                (requested, set.weights().of(&bucket) - requested)
            }
        };
        self.counters.count(decision.mode, decision.reason, requested, padding);
        decision
    }

    fn decide(&self, step: &Step) -> std::result::Result<Decision, Reason> {
        let modes = match step.phase {
            Phase::Decode => self.options.modes.decode,
            Phase::Prefill => self.options.modes.prefill,
            Phase::Mixed => self.options.modes.mixed,
        };
        if modes[0] == GraphMode::Eager {
            return Err(Reason::ModeEager);
        }
        if !step.capturable {
            return Err(Reason::NotCapturable);
        }
        if step.key.extent(Axis::Tokens) > self.options.most_tokens {
            return Err(Reason::AboveThreshold);
        }
        let first = self.try_mode(modes[0], step);
        if first.is_ok() || modes[1] == GraphMode::Eager || modes[1] == modes[0] {
            return first;
        }
        // If the second mode cannot either, the first one's reason is the one to look into.
        self.try_mode(modes[1], step).or(first)
    }

    fn try_mode(&self, mode: GraphMode, step: &Step) -> std::result::Result<Decision, Reason> {
        let (set, start) = self.set(mode);
        let (number, bucket) = set
            .nearest(&step.key)
            .and_then(|number| Some((number, set.get(number)?)))
            .ok_or(Reason::TooLarge)?;
        let slot = start + number;
        let place = Slot(slot as u32);
        // Acquire: whoever made the graph stored it before it reported the capture.
        match self.states[slot].load(Ordering::Acquire) {
            READY => {
                let exact = bucket.extents == set.relevant(&step.key).extents;
                let reason = if exact { Reason::Hit } else { Reason::Padded };
                Ok(Decision { mode, action: Action::Replay(place, bucket), reason })
            }
            FAILED => Err(Reason::CaptureFailed),
            CAPTURING => Err(Reason::BeingCaptured),
            _ if !self.options.lazy => Err(Reason::NotCaptured),
            _ => {
                self.claim(slot)?;
                Ok(Decision { mode, action: Action::Capture(place, bucket), reason: Reason::Captured })
            }
        }
    }

    /// Takes an absent slot and room for its graph.
    fn claim(&self, slot: usize) -> std::result::Result<(), Reason> {
        let more = |graphs: u32| (graphs < self.options.most_graphs).then_some(graphs + 1);
        self.graphs.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| Reason::Budget)?;
        let claimed =
            self.states[slot].compare_exchange(ABSENT, CAPTURING, Ordering::Acquire, Ordering::Relaxed);
        claimed.map(drop).map_err(|_| {
            self.graphs.fetch_sub(1, Ordering::Relaxed);
            Reason::BeingCaptured
        })
    }

    fn set(&self, mode: GraphMode) -> (&BucketSet, usize) {
        match mode {
            GraphMode::Piecewise => (&self.piecewise, self.full.len()),
            GraphMode::Eager | GraphMode::Full => (&self.full, 0),
        }
    }

    /// Takes a slot for a capture ahead of traffic; report as after [`Action::Capture`].
    ///
    /// # Errors
    /// [`Error::WrongState`] if its graph is there, being captured or failed before, or no graph more is allowed;
    /// [`Error::InvalidArgument`] for no slot.
    pub fn begin_capture(&self, slot: Slot) -> Result<()> {
        let found = self.state(slot)?.load(Ordering::Relaxed);
        if found == ABSENT && self.claim(slot.0 as usize).is_ok() {
            return Ok(());
        }
        let found = if found == ABSENT { "absent, with no graph more allowed" } else { state_name(found) };
        Err(Error::WrongState { what: "the slot", expected: "absent", found })
    }

    /// The graph of a slot that was to be captured is there.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the slot is not being captured; [`Error::InvalidArgument`] for no slot. So for the calls below.
    pub fn captured(&self, slot: Slot) -> Result<()> {
        self.change(slot, CAPTURING, READY, "being captured")
    }

    /// The capture failed: the bucket runs eagerly until [`forgive`](Self::forgive).
    ///
    /// # Errors
    /// As [`captured`](Self::captured).
    pub fn capture_failed(&self, slot: Slot) -> Result<()> {
        self.change(slot, CAPTURING, FAILED, "being captured")?;
        self.graphs.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// The graph was dropped; it may be captured again.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the slot has no graph.
    pub fn evicted(&self, slot: Slot) -> Result<()> {
        self.change(slot, READY, ABSENT, "ready")?;
        self.graphs.fetch_sub(1, Ordering::Relaxed);
        Ok(())
    }

    /// Lets a bucket whose capture failed be tried again.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it did not fail.
    pub fn forgive(&self, slot: Slot) -> Result<()> {
        self.change(slot, FAILED, ABSENT, "failed")
    }

    fn state(&self, slot: Slot) -> Result<&AtomicU8> {
        let expected = "below the number of slots";
        let value = i128::from(slot.0);
        self.states.get(slot.0 as usize).ok_or(Error::InvalidArgument { what: "a slot", value, expected })
    }

    fn change(&self, slot: Slot, from: u8, to: u8, expected: &'static str) -> Result<()> {
        // Release: what the caller stored before is there for who finds the slot ready.
        let changed = self.state(slot)?.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
        let wrong = |found| Error::WrongState { what: "the slot", expected, found: state_name(found) };
        changed.map(drop).map_err(wrong)
    }

    /// Every slot with its mode and bucket, largest weight first in each mode: the order in which captures need the least memory
    /// from an allocator that cannot split what smaller graphs left.
    pub fn slots(&self) -> impl Iterator<Item = (Slot, GraphMode, Key)> + '_ {
        [GraphMode::Full, GraphMode::Piecewise].into_iter().flat_map(|mode| {
            let (set, start) = self.set(mode);
            let mut numbers: Vec<usize> = (0..set.len()).collect();
            let weight = |number: &usize| set.get(*number).map(|bucket| set.weights().of(&bucket));
            numbers.sort_by_key(|number| std::cmp::Reverse(weight(number)));
            numbers
                .into_iter()
                .filter_map(move |number| Some((Slot((start + number) as u32), mode, set.get(number)?)))
        })
    }

    /// Steps that a slot's graphs ran or were captured for; 0 for no slot.
    #[must_use]
    pub fn replays(&self, slot: Slot) -> u64 {
        self.replays.get(slot.0 as usize).map_or(0, |replays| replays.load(Ordering::Relaxed))
    }

    /// Graphs that are there or being captured.
    #[must_use]
    pub fn graphs(&self) -> u32 {
        self.graphs.load(Ordering::Relaxed)
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }
}

fn state_name(state: u8) -> &'static str {
    match state {
        CAPTURING => "being captured",
        READY => "ready",
        FAILED => "failed",
        _ => "absent",
    }
}

#[cfg(test)]
mod tests;

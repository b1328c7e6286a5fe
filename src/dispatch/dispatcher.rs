//! Dispatcher: selects the graph of each step, or eager execution with a reason. If a step's own
//! graph is missing and cannot be captured, a larger existing graph stands in:
//!
//! ```text
//!   step of 13 ──> 16 failed, absent ... ──> 24 ready, weighs at most twice 16 ──> replay 24
//!                                     └────> 40 ready, weighs more ──> eager, for the reason of 16
//! ```
//!
//! A decision is a search and a few atomic additions: no lock, no allocation, any thread.

use crate::error::Result;

use super::bucket::BucketSet;
use super::counters::{Counters, Event, Reason};
use super::key::{Axis, Key};
use super::slots::{Slots, State};

pub use super::slots::Slot;

/// Execution mode of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum GraphMode {
    /// No graph.
    Eager = 0,
    /// One graph per piece between attention calls.
    Piecewise = 1,
    /// One graph for the whole step.
    Full = 2,
}

impl GraphMode {
    pub(crate) const ALL: [Self; 3] = [Self::Eager, Self::Piecewise, Self::Full];

    /// Returns the name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Piecewise => "piecewise",
            Self::Full => "full",
        }
    }

    pub(super) fn can_be(self, reason: Reason) -> bool {
        (self == Self::Eager)
            != matches!(reason, Reason::Hit | Reason::Padded | Reason::StandIn | Reason::Captured)
    }
}

/// Phase of a step's sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// All sequences decode.
    Decode,
    /// All sequences prefill.
    Prefill,
    /// Sequences of both kinds.
    Mixed,
}

/// Modes tried for each phase, in order; [`GraphMode::Eager`] ends a list.
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
    /// Decode: full graphs, then piecewise. With a prefill: piecewise graphs.
    fn default() -> Self {
        let piecewise = [GraphMode::Piecewise, GraphMode::Eager];
        Self { decode: [GraphMode::Full, GraphMode::Piecewise], prefill: piecewise, mixed: piecewise }
    }
}

/// Options of a dispatcher.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DispatcherOptions {
    /// The modes of each phase.
    pub modes: Modes,
    /// Steps with more tokens run eagerly.
    pub most_tokens: u32,
    /// A missing graph is captured by the first step which needs it.
    pub lazy: bool,
    /// Maximum number of graphs, captures in progress included.
    pub most_graphs: u32,
    /// Maximum weight of a replacement graph, as a multiple of the missing graph's. 1: no heavier
    /// graph.
    pub stand_in: u32,
}

impl Default for DispatcherOptions {
    fn default() -> Self {
        let modes = Modes::default();
        Self { modes, most_tokens: u32::MAX, lazy: true, most_graphs: u32::MAX, stand_in: 2 }
    }
}

/// A step to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Shape of the step.
    pub key: Key,
    /// Phase of its sequences.
    pub phase: Phase,
    /// Whether the step can run in a graph at all.
    pub capturable: bool,
}

/// Action for a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run without a graph.
    Eager,
    /// Pad to this bucket and replay.
    Replay(Slot, Key),
    /// Pad to this bucket and capture. The caller owns the slot until [`Dispatcher::captured`],
    /// [`Dispatcher::capture_failed`] or [`Dispatcher::abandoned`].
    Capture(Slot, Key),
}

/// Decision for a step, and its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Decision {
    /// Execution mode.
    pub mode: GraphMode,
    /// Action, with the graph.
    pub action: Action,
    /// Reason.
    pub reason: Reason,
}

/// Selects the graph of every step. Thread-safe.
#[derive(Debug)]
pub struct Dispatcher {
    full: BucketSet,
    piecewise: BucketSet,
    options: DispatcherOptions,
    /// Full graphs, then piecewise ones.
    slots: Slots,
    counters: Counters,
}

impl Dispatcher {
    /// Creates a dispatcher without graphs; either set of buckets may be empty.
    #[must_use]
    pub fn new(full: BucketSet, piecewise: BucketSet, options: DispatcherOptions) -> Self {
        let slots = Slots::new(full.len() + piecewise.len(), options.most_graphs);
        Self { full, piecewise, options, slots, counters: Counters::default() }
    }

    /// Decides one step and counts the decision; a capture is counted when its result is reported.
    pub fn dispatch(&self, step: &Step) -> Decision {
        let decision = self.decide(step).unwrap_or_else(|reason| Decision {
            mode: GraphMode::Eager,
            action: Action::Eager,
            reason,
        });
        let (set, _) = self.set(decision.mode);
        match decision.action {
            Action::Eager => self.counters.count(decision.mode, decision.reason, 0, 0),
            Action::Replay(slot, bucket) => {
                let requested = set.weights().of(&set.relevant(&step.key));
                let padding = set.weights().of(&bucket) - requested;
                self.counters.count(decision.mode, decision.reason, requested, padding);
                self.slots.use_now(slot);
            }
            Action::Capture(slot, _) => self.slots.ask(slot, set.weights().of(&set.relevant(&step.key))),
        }
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
        // The first mode's reason is the useful one.
        self.try_mode(modes[1], step).or(first)
    }

    fn try_mode(&self, mode: GraphMode, step: &Step) -> std::result::Result<Decision, Reason> {
        let (set, start) = self.set(mode);
        let mut missing: Option<(Reason, u64)> = None;
        for number in set.covering(&step.key) {
            let Some(bucket) = set.get(number) else { break };
            let (slot, weight) = (Slot((start + number) as u32), set.weights().of(&bucket));
            let most = missing.map_or(u64::MAX, |(_, own)| own.saturating_mul(self.options.stand_in.into()));
            if weight > most {
                break;
            }
            let reason = match self.slots.state(slot) {
                State::Ready => {
                    let reason = if missing.is_some() {
                        Reason::StandIn
                    } else if bucket.extents == set.relevant(&step.key).extents {
                        Reason::Hit
                    } else {
                        Reason::Padded
                    };
                    return Ok(Decision { mode, action: Action::Replay(slot, bucket), reason });
                }
                _ if missing.is_some() => continue,
                State::Failed => Reason::CaptureFailed,
                State::Capturing | State::Warming => Reason::BeingCaptured,
                State::Absent if !self.options.lazy => Reason::NotCaptured,
                State::Absent => match self.slots.claim(slot, State::Capturing) {
                    Ok(()) => {
                        let action = Action::Capture(slot, bucket);
                        return Ok(Decision { mode, action, reason: Reason::Captured });
                    }
                    Err(reason) => reason,
                },
            };
            missing = Some((reason, weight));
        }
        Err(missing.map_or(Reason::TooLarge, |(reason, _)| reason))
    }

    fn set(&self, mode: GraphMode) -> (&BucketSet, usize) {
        match mode {
            GraphMode::Piecewise => (&self.piecewise, self.full.len()),
            GraphMode::Eager | GraphMode::Full => (&self.full, 0),
        }
    }

    /// Records a step run by the decision of another rank: `VMMGRAPH_GRAPH_IMPOSED`.
    pub fn imposed(&self, slot: Option<Slot>) -> Result<()> {
        let mode = match slot {
            Some(slot) => {
                self.slots.impose(slot)?;
                self.kind(slot).0
            }
            None => GraphMode::Eager,
        };
        self.counters.impose(mode);
        Ok(())
    }

    /// Reserves a slot for a capture ahead of traffic: `VMMGRAPH_GRAPH_BEGIN`. Also fails if the
    /// maximum number of graphs is reached.
    pub fn begin_capture(&self, slot: Slot) -> Result<()> {
        self.slots.begin(slot)
    }

    /// Reports a successful capture; the graph runs the step of the capture. Fails, as the
    /// functions below, if the slot is unknown or in another state.
    pub fn captured(&self, slot: Slot) -> Result<()> {
        if let Some(requested) = self.slots.finish(slot, State::Ready)? {
            let (mode, weight) = self.kind(slot);
            self.counters.count(mode, Reason::Captured, requested, weight - requested);
        }
        self.counters.happened(Event::Captured);
        Ok(())
    }

    /// Reports a failed capture: its step runs eagerly, and the bucket has no graph until
    /// [`forgive`](Self::forgive).
    pub fn capture_failed(&self, slot: Slot) -> Result<()> {
        if self.slots.finish(slot, State::Failed)?.is_some() {
            self.counters.count(GraphMode::Eager, Reason::CaptureFailed, 0, 0);
        }
        self.counters.happened(Event::Failed);
        Ok(())
    }

    /// Cancels a capture: the slot returns to its previous state, and the step is counted when
    /// dispatched again.
    pub fn abandoned(&self, slot: Slot) -> Result<()> {
        self.slots.finish(slot, State::Absent).map(drop)
    }

    /// Reports the destruction of a graph, which may be captured again.
    pub fn evicted(&self, slot: Slot) -> Result<()> {
        self.slots.evict(slot)?;
        self.counters.happened(Event::Evicted);
        Ok(())
    }

    /// Permits a new capture of a bucket after a failure.
    pub fn forgive(&self, slot: Slot) -> Result<()> {
        self.slots.forgive(slot)
    }

    /// Returns the graph to evict first: the least recently used, except `kept`.
    #[must_use]
    pub fn least_recently_used(&self, kept: Option<Slot>) -> Option<Slot> {
        self.slots.least_recently_used(kept)
    }

    fn kind(&self, slot: Slot) -> (GraphMode, u64) {
        let number = slot.0 as usize;
        let full = number < self.full.len();
        let mode = if full { GraphMode::Full } else { GraphMode::Piecewise };
        let (set, start) = self.set(mode);
        (mode, set.get(number - start).map_or(0, |bucket| set.weights().of(&bucket)))
    }

    /// Returns every slot with its mode and bucket, largest weight first in each mode: the order in
    /// which captures need the least memory.
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

    /// Returns the steps run by a slot's graphs.
    #[must_use]
    pub fn replays(&self, slot: Slot) -> u64 {
        self.slots.replays(slot)
    }

    /// Returns the number of graphs, captures in progress included.
    #[must_use]
    pub fn graphs(&self) -> u32 {
        self.slots.graphs()
    }

    /// Returns the counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// See [`Counters::prometheus`].
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        self.counters.prometheus(labels, self.graphs())
    }
}

#[cfg(test)]
mod tests;

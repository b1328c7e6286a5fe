//! Which graph runs a step, or why none does.
//!
//! Where a step's own graph is not there and may not be captured, a larger one that is there stands in for it:
//!
//! ```text
//!   step of 13 ──> 16 failed, absent ... ──> 24 ready, weighs at most twice 16 ──> replay of 24 (reason: stand-in)
//!                                     └────> 40 ready, weighs more             ──> eager, for the reason that 16 has
//! ```
//!
//! A decision is a search and a few atomic additions: no lock, no allocation, any thread.

use crate::error::Result;

use super::bucket::BucketSet;
use super::counters::{Counters, Event, Reason};
use super::key::{Axis, Key};
use super::slots::{Slots, State};

pub use super::slots::Slot;

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
        (self == Self::Eager)
            != matches!(reason, Reason::Hit | Reason::Padded | Reason::StandIn | Reason::Captured)
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
    /// A graph that is not there may be stood in for by one that weighs at most so many times as much; 1: by none that is heavier.
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
    /// Its shape.
    pub key: Key,
    /// What its sequences do.
    pub phase: Phase,
    /// Whether the engine could put it into a graph at all (sequence lengths, features, sampling).
    pub capturable: bool,
}

/// What to do with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Run it without a graph.
    Eager,
    /// Pad it to this bucket and replay the graph.
    Replay(Slot, Key),
    /// Pad it to this bucket and capture. The slot is the caller's until it reports [`Dispatcher::captured`],
    /// [`Dispatcher::capture_failed`] or [`Dispatcher::abandoned`]; others do without this graph meanwhile.
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

/// Decides for every step which graph runs it. All calls are thread-safe.
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
    /// A dispatcher without any graph. Full and piecewise graphs have buckets of their own; either set may be empty.
    #[must_use]
    pub fn new(full: BucketSet, piecewise: BucketSet, options: DispatcherOptions) -> Self {
        let slots = Slots::new(full.len() + piecewise.len(), options.most_graphs);
        Self { full, piecewise, options, slots, counters: Counters::default() }
    }

    /// Decides for one step and counts the decision. One to capture is counted when what became of it is reported.
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
        // If the second mode cannot either, the first one's reason is the one to look into.
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

    /// A step runs as others decided, ranks that have to run it the same way, and not as was decided here: by the graph of this slot,
    /// or eagerly. Counted beside what was decided for it, if anything was; the graph counts as used.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no slot.
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

    /// Takes a slot for a capture ahead of traffic; report as after [`Action::Capture`]. It is no step and counted as none.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if its graph is there, being captured or failed before, or no graph more is allowed;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no slot.
    pub fn begin_capture(&self, slot: Slot) -> Result<()> {
        self.slots.begin(slot)
    }

    /// The graph of a slot that was to be captured is there, and runs the step it was captured for.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if the slot is not being captured;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no slot. So for the calls below.
    pub fn captured(&self, slot: Slot) -> Result<()> {
        if let Some(requested) = self.slots.finish(slot, State::Ready)? {
            let (mode, weight) = self.kind(slot);
            self.counters.count(mode, Reason::Captured, requested, weight - requested);
        }
        self.counters.happened(Event::Captured);
        Ok(())
    }

    /// The capture failed: the step it was for runs eagerly, and the bucket has no graph until [`forgive`](Self::forgive).
    ///
    /// # Errors
    /// As [`captured`](Self::captured).
    pub fn capture_failed(&self, slot: Slot) -> Result<()> {
        if self.slots.finish(slot, State::Failed)?.is_some() {
            self.counters.count(GraphMode::Eager, Reason::CaptureFailed, 0, 0);
        }
        self.counters.happened(Event::Failed);
        Ok(())
    }

    /// The capture did not come about: the slot is as it was before, and the step is counted when it comes again.
    ///
    /// # Errors
    /// As [`captured`](Self::captured).
    pub fn abandoned(&self, slot: Slot) -> Result<()> {
        self.slots.finish(slot, State::Absent).map(drop)
    }

    /// The graph was dropped; it may be captured again.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if the slot has no graph.
    pub fn evicted(&self, slot: Slot) -> Result<()> {
        self.slots.evict(slot)?;
        self.counters.happened(Event::Evicted);
        Ok(())
    }

    /// Lets a bucket whose capture failed be tried again.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if it did not fail.
    pub fn forgive(&self, slot: Slot) -> Result<()> {
        self.slots.forgive(slot)
    }

    /// The graph to drop first when room is needed: of those that are there, the one whose last use is the longest ago. Never
    /// `kept`. A search over all slots.
    #[must_use]
    pub fn least_recently_used(&self, kept: Option<Slot>) -> Option<Slot> {
        self.slots.least_recently_used(kept)
    }

    /// A slot's mode and the weight of its bucket.
    fn kind(&self, slot: Slot) -> (GraphMode, u64) {
        let number = slot.0 as usize;
        let full = number < self.full.len();
        let mode = if full { GraphMode::Full } else { GraphMode::Piecewise };
        let (set, start) = self.set(mode);
        (mode, set.get(number - start).map_or(0, |bucket| set.weights().of(&bucket)))
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

    /// Steps that a slot's graphs ran; 0 for no slot.
    #[must_use]
    pub fn replays(&self, slot: Slot) -> u64 {
        self.slots.replays(slot)
    }

    /// Graphs that are there or being captured.
    #[must_use]
    pub fn graphs(&self) -> u32 {
        self.slots.graphs()
    }

    /// The counters.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// The counters and the number of graphs in Prometheus's text format; see [`Counters::prometheus`].
    #[must_use]
    pub fn prometheus(&self, labels: &[(&str, &str)]) -> String {
        self.counters.prometheus(labels, self.graphs())
    }
}

#[cfg(test)]
mod tests;

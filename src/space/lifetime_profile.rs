//! Lifetime profile: predicts persistent blocks from earlier traced captures of the arena (spaces
//! with `predict_retained`). An undeclared live-out block costs its space a small page, however
//! short. A *trace point* is the sequence of allocations and frees before, without sizes, so
//! captures of one model for other batch sizes match.

use std::collections::HashMap;

use super::{Core, State};
use crate::sync::Mutex;
use crate::units::Address;

/// Limit per arena; beyond, the table restarts empty.
const MOST: usize = 1 << 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    LiveOut,
    /// A block was freed while graphs captured since could read it. Its pages are
    /// [reused](super::replaced), bytes of the persistent heap are not.
    Passed,
    /// A block was freed before the seal, or before its first launch and the next capture:
    /// persistent bytes would be wasted.
    Excluded,
}

/// Under a leaf lock.
#[derive(Debug, Default)]
pub(crate) struct LifetimeProfile(Mutex<HashMap<u64, Fate>>);

#[derive(Debug, Default)]
pub(super) struct LifetimeTrace {
    point: u64,
    blocks: HashMap<Address, u64>,
    kept: u64,
}

impl LifetimeTrace {
    fn go(&mut self, step: u64) -> u64 {
        // In the style of SplitMix64.
        let mixed = (self.point ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.point = (mixed ^ (mixed >> 29)).wrapping_add(1);
        self.point
    }

    fn freed(&mut self, address: Address) -> Option<u64> {
        let point = self.blocks.remove(&address)?;
        self.go(point);
        Some(point)
    }
}

impl LifetimeProfile {
    fn add(&self, points: impl Iterator<Item = u64>) {
        let mut all = self.0.lock();
        if all.len() > MOST {
            all.clear();
        }
        for point in points {
            all.entry(point).or_insert(Fate::LiveOut);
        }
    }

    /// Excludes a point. If the block was not alive at the seal, only a known one.
    fn exclude(&self, point: u64, was_alive: bool) {
        let mut all = self.0.lock();
        if was_alive || all.contains_key(&point) {
            all.insert(point, Fate::Excluded);
        }
    }

    fn pass(&self, point: u64) {
        if let Some(fate) = self.0.lock().get_mut(&point)
            && *fate == Fate::LiveOut
        {
            *fate = Fate::Passed;
        }
    }

    /// Returns the longest block predicted persistent: a longer one needs a page anyway. Of
    /// passed blocks, only those too short to be worth the maps are predicted.
    fn longest(&self, point: u64, small: u64) -> u64 {
        match self.0.lock().get(&point) {
            Some(Fate::LiveOut) => small / 2,
            Some(Fate::Passed) => small / 32,
            Some(Fate::Excluded) | None => 0,
        }
    }
}

impl Core {
    /// See [`VmmTorchAllocator::predict_retained`](crate::VmmTorchAllocator::predict_retained).
    pub(crate) fn predict_retained(&self) {
        self.state.lock().lifetime_trace = Some(LifetimeTrace::default());
    }

    /// Returns the trace point of a new block, and whether it is predicted persistent.
    pub(super) fn predicts_retained(&self, state: &mut State, bytes: u64) -> Option<(u64, bool)> {
        let lifetime_trace = state.lifetime_trace.as_mut()?;
        let point = lifetime_trace.go(0);
        let small = self.common.shared.geometry().small();
        // More than a page in total fills pages anyway.
        let kept = lifetime_trace.kept + bytes;
        let keeps = kept <= small && bytes <= self.common.lifetime_profile.longest(point, small);
        if keeps {
            lifetime_trace.kept = kept;
        }
        Some((point, keeps))
    }

    /// Records a free; before the first launch and the next capture, it excludes the point for
    /// good.
    pub(super) fn note_traced_free(&self, state: &mut State, address: Address) {
        let Some(lifetime_trace) = &mut state.lifetime_trace else { return };
        let over = state.stage.phase() != super::Phase::Open;
        let point = if over { lifetime_trace.blocks.remove(&address) } else { lifetime_trace.freed(address) };
        let Some(point) = point else { return };
        if over && !self.is_alone(state) {
            self.common.lifetime_profile.pass(point);
        } else if !(over && self.launched.load(std::sync::atomic::Ordering::Acquire)) {
            self.common.lifetime_profile.exclude(point, over);
        }
    }

    pub(super) fn end_lifetime_trace(&self, state: &State) {
        if let Some(lifetime_trace) = &state.lifetime_trace {
            self.common.lifetime_profile.add(lifetime_trace.blocks.values().copied());
        }
    }
}

impl State {
    pub(super) fn note_trace_point(&mut self, address: Address, point: u64) {
        if let Some(lifetime_trace) = &mut self.lifetime_trace {
            lifetime_trace.blocks.insert(address, point);
        }
    }
}

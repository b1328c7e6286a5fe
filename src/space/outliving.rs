//! Small blocks that are kept ones because blocks at the same point of earlier captures outlived theirs.
//!
//! A retained block costs its space a small page, however short it is, unless somebody says beforehand that it will be retained. Programs that capture one
//! model for many batches do the same each time, in other sizes: what lives at the end of the first capture will at the end of the others. A point
//! is known by all that came and went before it, without sizes, so that a capture that goes another way is expected nothing of.

use std::collections::HashMap;

use super::{Core, State};
use crate::sync::Mutex;
use crate::units::Address;

/// So many points that an arena knows of; then it begins anew.
const MOST: usize = 1 << 16;

/// What became of the blocks at a point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// All outlived their captures.
    Outlived,
    /// One was freed when graphs captured since could read it, as what a forward pass saves: the pages of
    /// such blocks are [shared](super::exchanged), and bytes of the kept heap are not.
    Passed,
    /// One did not outlive its capture, or went before its first launch and the next capture: a program
    /// looks at each and lets go of it, and what was kept would be lost to its graph.
    Excluded,
}

/// The points of an arena's captures at which there came blocks that outlived them.
#[derive(Debug, Default)]
pub(crate) struct Outliving(Mutex<HashMap<u64, Fate>>);

/// How far one capture has come, and the points at which its live blocks came.
#[derive(Debug, Default)]
pub(super) struct Course {
    point: u64,
    blocks: HashMap<Address, u64>,
    /// Bytes of the blocks that were kept because of their points.
    kept: u64,
}

impl Course {
    fn go(&mut self, step: u64) -> u64 {
        // Of the form of SplitMix64.
        let mixed = (self.point ^ step).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.point = (mixed ^ (mixed >> 29)).wrapping_add(1);
        self.point
    }

    /// A block of an open space is gone.
    fn freed(&mut self, address: Address) -> Option<u64> {
        let point = self.blocks.remove(&address)?;
        self.go(point);
        Some(point)
    }
}

impl Outliving {
    /// At these points blocks outlived their capture.
    fn add(&self, points: impl Iterator<Item = u64>) {
        let mut all = self.0.lock();
        if all.len() > MOST {
            all.clear();
        }
        for point in points {
            all.entry(point).or_insert(Fate::Outlived);
        }
    }

    /// At this point one did not, though it was alive at the end of its capture or others had outlived theirs.
    fn exclude(&self, point: u64, was_alive: bool) {
        let mut all = self.0.lock();
        if was_alive || all.contains_key(&point) {
            all.insert(point, Fate::Excluded);
        }
    }

    /// At this point a block was freed when other graphs could read it.
    fn pass(&self, point: u64) {
        if let Some(fate) = self.0.lock().get_mut(&point)
            && *fate == Fate::Outlived
        {
            *fate = Fate::Passed;
        }
    }

    /// The longest block that is kept at a point, with small pages of so many bytes. A longer one takes a
    /// page anyway; of passed ones only those are kept that are not worth the maps.
    fn longest(&self, point: u64, small: u64) -> u64 {
        match self.0.lock().get(&point) {
            Some(Fate::Outlived) => small / 2,
            Some(Fate::Passed) => small / 32,
            Some(Fate::Excluded) | None => 0,
        }
    }
}

impl Core {
    /// See [`VmmTorchAllocator::keep_as_before`](crate::VmmTorchAllocator::keep_as_before).
    pub(crate) fn keep_as_before(&self) {
        self.state.lock().course = Some(Course::default());
    }

    /// One more block of an open space: where its capture is now, and whether it is to be a kept one.
    pub(super) fn keeps_as_before(&self, state: &mut State, bytes: u64) -> Option<(u64, bool)> {
        let course = state.course.as_mut()?;
        let point = course.go(0);
        let small = self.common.shared.geometry().small();
        // A capture that leaves more than a page of short blocks fills pages with them anyway.
        let kept = course.kept + bytes;
        let keeps = kept <= small && bytes <= self.common.outliving.longest(point, small);
        if keeps {
            course.kept = kept;
        }
        Some((point, keeps))
    }

    /// A block goes: if that is before its space's first launch and the next capture, those at this point are expected nothing of from then on.
    pub(super) fn forget_course(&self, state: &mut State, address: Address) {
        let Some(course) = &mut state.course else { return };
        let over = state.phase != super::Phase::Open;
        let point = if over { course.blocks.remove(&address) } else { course.freed(address) };
        let Some(point) = point else { return };
        if over && !self.is_alone(state) {
            self.common.outliving.pass(point);
        } else if !(over && self.launched.load(std::sync::atomic::Ordering::Acquire)) {
            self.common.outliving.exclude(point, over);
        }
    }

    /// The capture is over: what lives has outlived it.
    pub(super) fn end_course(&self, state: &State) {
        if let Some(course) = &state.course {
            self.common.outliving.add(course.blocks.values().copied());
        }
    }
}

impl State {
    /// Where the block at a point is.
    pub(super) fn note_course(&mut self, address: Address, point: u64) {
        if let Some(course) = &mut self.course {
            course.blocks.insert(address, point);
        }
    }
}

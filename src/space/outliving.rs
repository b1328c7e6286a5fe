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

/// The points of an arena's captures at which there came blocks that outlived them, and whether all did: where one did not, or went before its first
/// launch and the next capture, a program looks at each and lets go of it, and what was kept would be lost to its graph.
#[derive(Debug, Default)]
pub(crate) struct Outliving(Mutex<HashMap<u64, bool>>);

/// How far one capture has come, and the points at which its live blocks came.
#[derive(Debug, Default)]
pub(super) struct Course {
    point: u64,
    blocks: HashMap<Address, u64>,
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
            all.entry(point).or_insert(true);
        }
    }

    /// At this point one did not, though it was alive at the end of its capture or others had outlived theirs.
    fn exclude(&self, point: u64, was_alive: bool) {
        let mut all = self.0.lock();
        if was_alive || all.contains_key(&point) {
            all.insert(point, false);
        }
    }

    fn has(&self, point: u64) -> bool {
        self.0.lock().get(&point).is_some_and(|all| *all)
    }
}

impl Core {
    /// See [`VmmTorchAllocator::keep_as_before`](crate::VmmTorchAllocator::keep_as_before).
    pub(crate) fn keep_as_before(&self) {
        self.state.lock().course = Some(Course::default());
    }

    /// One more block of an open space: where its capture is now, and whether it is to be a kept one.
    pub(super) fn keeps_as_before(&self, state: &mut State, bytes: u64) -> Option<(u64, bool)> {
        let point = state.course.as_mut()?.go(0);
        // A longer one takes a page anyway.
        let short = bytes <= self.common.shared.geometry().small() / 2;
        Some((point, short && self.common.outliving.has(point)))
    }

    /// A block goes: if that is before its space's first launch and the next capture, those at this point are expected nothing of from then on.
    pub(super) fn forget_course(&self, state: &mut State, address: Address) {
        let Some(course) = &mut state.course else { return };
        let over = state.phase != super::Phase::Open;
        let point = if over { course.blocks.remove(&address) } else { course.freed(address) };
        if let Some(point) = point
            && !(over && (self.launched.load(std::sync::atomic::Ordering::Acquire) || !self.is_alone(state)))
        {
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

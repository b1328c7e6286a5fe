//! Placement of a space's blocks: stitched or bump, and a table after the seal.

use super::bump::Bump;
use super::layout::{Layout, Live, NotLive, Place, Usage};
use super::sealed::Sealed;
use crate::units::Stream;

#[derive(Debug)]
pub(crate) enum Placement {
    /// On any free pages: see [`layout`](super::layout). `None` before the first block, so an
    /// unused space stays small.
    Stitched(Option<Box<Layout>>),
    /// Appended: see [`bump`](super::bump).
    Bump(Bump),
    /// No further blocks.
    Sealed(Sealed),
}

impl Placement {
    pub(crate) fn layout(&self) -> Option<&Layout> {
        if let Self::Stitched(layout) = self { layout.as_deref() } else { None }
    }

    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Usage::default, Layout::usage),
            Self::Bump(bump) => bump.usage(),
            Self::Sealed(sealed) => sealed.usage(),
        }
    }

    /// Returns how many small and large (or tape) page numbers the space used.
    pub(crate) fn pages(&self) -> (usize, usize) {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or((0, 0), Layout::pages),
            Self::Bump(bump) => (0, bump.pages()),
            Self::Sealed(sealed) => sealed.pages(),
        }
    }

    pub(crate) fn blocks(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Vec::new, Layout::blocks),
            Self::Bump(bump) => bump.blocks(),
            Self::Sealed(sealed) => sealed.blocks(),
        }
    }

    /// Returns the blocks live at the peak; in a bump space, all blocks ever allocated.
    pub(crate) fn at_peak(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Vec::new, Layout::at_peak),
            Self::Bump(bump) => bump.all(),
            Self::Sealed(sealed) => sealed.at_peak(),
        }
    }

    /// Frees the block at a place. Returns the bytes freed at once.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.free(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.free(place),
            Self::Sealed(sealed) => sealed.free(place),
        }
    }

    /// Checks for a live block beginning at a place.
    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.check(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.check(place),
            Self::Sealed(sealed) => sealed.check(place),
        }
    }

    /// Records a use of a block on `stream`. In a stitched space before the seal, returns the
    /// block's own stream if different.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<Option<Stream>, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.record_stream(place, stream),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.check(place).map(|()| None),
            Self::Sealed(sealed) => sealed.check(place).map(|()| None),
        }
    }

    /// See [`Layout::free_parked`]. The seal frees all parked blocks.
    pub(crate) fn free_parked(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.free_parked(place),
            _ => Err(NotLive::FreedBefore),
        }
    }

    /// Returns whether a live block covers any byte in `from..to` of a range; always true before
    /// the seal.
    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.covered(range, from, to),
            _ => true,
        }
    }

    /// Returns whether any block ever lay in a small-page unit of a range; always true before the
    /// seal.
    pub(crate) fn was_used(&self, range: usize, unit: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.was_used(range, unit),
            _ => true,
        }
    }

    /// Ends the capture: reduces the placement to a table.
    pub(crate) fn seal(&mut self) {
        let nothing = || Sealed::new(Vec::new(), Usage::default(), (0, 0));
        *self = Self::Sealed(match std::mem::replace(self, Self::Stitched(None)) {
            Self::Stitched(layout) => layout.map_or_else(nothing, |layout| layout.seal()),
            Self::Bump(bump) => {
                Sealed::new(bump.blocks(), bump.usage(), (0, bump.pages())).with_peak(bump.all())
            }
            Self::Sealed(sealed) => sealed,
        });
    }
}

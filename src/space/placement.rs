//! The two ways a space places blocks, and what is left of either when its capture has ended.

use super::bump::Bump;
use super::layout::{Layout, Live, NotLive, Place, Usage};
use super::sealed::Sealed;
use crate::units::Stream;

/// How a space places its blocks.
#[derive(Debug)]
pub(crate) enum Placement {
    /// On whatever pages are free: see [`layout`](super::layout). None before the first block: what is opened, sealed and kept for long is small.
    Stitched(Option<Box<Layout>>),
    /// Behind one another: see [`bump`](super::bump).
    Bump(Bump),
    /// Not any more.
    Sealed(Sealed),
}

impl Placement {
    /// A stitched space's layout, if it has any blocks.
    pub(crate) fn layout(&self) -> Option<&Layout> {
        if let Self::Stitched(layout) = self { layout.as_deref() } else { None }
    }

    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Usage::default, Layout::usage),
            Self::Bump(bump) => bump.usage(),
            Self::Sealed(sealed) => sealed.usage(),
        }
    }

    /// Small and other pages this space shows.
    pub(crate) fn pages(&self) -> (usize, usize) {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or((0, 0), Layout::pages),
            Self::Bump(bump) => (0, bump.pages()),
            Self::Sealed(sealed) => sealed.pages(),
        }
    }

    /// The live blocks.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Vec::new, Layout::blocks),
            Self::Bump(bump) => bump.blocks(),
            Self::Sealed(sealed) => sealed.blocks(),
        }
    }

    /// The blocks that were live when the most bytes were; in a bump space, all that were handed out.
    pub(crate) fn at_peak(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Vec::new, Layout::at_peak),
            Self::Bump(bump) => bump.all(),
            Self::Sealed(sealed) => sealed.at_peak(),
        }
    }

    /// Frees the block at a place; how many of its bytes are free at once.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.free(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.free(place),
            Self::Sealed(sealed) => sealed.free(place),
        }
    }

    /// Whether a live block begins at a place.
    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.check(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.check(place),
            Self::Sealed(sealed) => sealed.check(place),
        }
    }

    /// Notes that a stream uses the block at a place; before the seal of a stitched space, returns the
    /// block's own stream if that is another one.
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

    /// Whether a live block covers a byte of a part of a range. Nothing is known of that before the seal.
    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.covered(range, from, to),
            _ => true,
        }
    }

    /// Whether any block ever lay on a small page's worth of addresses of a range. True before the seal.
    pub(crate) fn was_used(&self, range: usize, unit: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.was_used(range, unit),
            _ => true,
        }
    }

    /// The capture has ended.
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

use super::bump::Bump;
use super::layout::{Layout, Live, NotLive, Place, Usage};
use super::sealed::Sealed;
use crate::units::Stream;

#[derive(Debug)]
pub(crate) enum Placement {
    /// [`Layout`]; `None` before the first block, so an unused space stays small.
    Stitched(Option<Box<Layout>>),
    Bump(Bump),
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

    /// Counts of small and large (or tape) page numbers used.
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

    /// Blocks of the peak; in a bump space, all ever allocated.
    pub(crate) fn at_peak(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.as_deref().map_or_else(Vec::new, Layout::at_peak),
            Self::Bump(bump) => bump.all(),
            Self::Sealed(sealed) => sealed.at_peak(),
        }
    }

    /// Returns the bytes freed at once.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.free(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.free(place),
            Self::Sealed(sealed) => sealed.free(place),
        }
    }

    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.check(place),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.check(place),
            Self::Sealed(sealed) => sealed.check(place),
        }
    }

    /// Records a use. In a stitched space before the seal, returns the block's own stream if
    /// different.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<Option<Stream>, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.record_stream(place, stream),
            Self::Stitched(None) => Err(NotLive::Foreign),
            Self::Bump(bump) => bump.check(place).map(|()| None),
            Self::Sealed(sealed) => sealed.check(place).map(|()| None),
        }
    }

    pub(crate) fn free_parked(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(Some(layout)) => layout.free_parked(place),
            _ => Err(NotLive::FreedBefore),
        }
    }

    /// Whether a live block covers any byte; always true before the seal.
    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.covered(range, from, to),
            _ => true,
        }
    }

    /// Whether a block ever lay in a small-page unit; always true before the seal.
    pub(crate) fn was_used(&self, range: usize, unit: u64) -> bool {
        match self {
            Self::Sealed(sealed) => sealed.was_used(range, unit),
            _ => true,
        }
    }

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

//! The two ways a space places blocks, behind what both can do.

use super::bump::Bump;
use super::layout::{Layout, Live, NotLive, Place, Usage};
use crate::units::Stream;

/// How a space places its blocks.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "one for each space, and most are stitched")]
pub(crate) enum Placement {
    /// On whatever pages are free: see [`layout`](super::layout).
    Stitched(Layout),
    /// Behind one another: see [`bump`](super::bump).
    Bump(Bump),
}

impl Placement {
    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        match self {
            Self::Stitched(layout) => layout.usage(),
            Self::Bump(bump) => bump.usage(),
        }
    }

    /// Small and other pages this space shows.
    pub(crate) fn pages(&self) -> (usize, usize) {
        match self {
            Self::Stitched(layout) => layout.pages(),
            Self::Bump(bump) => (0, bump.pages()),
        }
    }

    /// The live blocks.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        match self {
            Self::Stitched(layout) => layout.blocks(),
            Self::Bump(bump) => bump.blocks(),
        }
    }

    /// Frees the block at a place; how many of its bytes are free at once.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        match self {
            Self::Stitched(layout) => layout.free(place),
            Self::Bump(bump) => bump.free(place),
        }
    }

    /// Notes that a second stream uses the block at a place.
    pub(crate) fn record_stream(&mut self, place: Place, stream: Stream) -> Result<(), NotLive> {
        match self {
            Self::Stitched(layout) => layout.record_stream(place, stream),
            Self::Bump(bump) => bump.check(place),
        }
    }

    /// The capture has ended.
    pub(crate) fn seal(&mut self) {
        if let Self::Stitched(layout) = self {
            layout.seal();
        }
    }
}

//! Lane: separates blocks of one space by page.

use crate::units::Stream;

/// Before the seal, blocks of two lanes never lie on one page of their space.
///
/// Branches of a capture are unordered, so each stream has a lane. Peers know the pages of
/// peer-visible (remote) blocks, which have separate lanes, so a seal need not replace these pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    /// For blocks also used by peers.
    pub(crate) remote: bool,
}

impl Lane {
    pub(crate) const fn local(stream: Stream) -> Self {
        Self { stream, remote: false }
    }

    pub(crate) const fn remote(stream: Stream) -> Self {
        Self { stream, remote: true }
    }
}

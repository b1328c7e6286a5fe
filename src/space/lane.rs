//! Lane: separates blocks of one space by page.

use crate::units::Stream;

/// Before the seal, blocks of two lanes never share a page of their space. Branches of a capture
/// are unordered, so each stream has a lane. Peer-visible (remote) blocks have their own, so a seal
/// need not replace pages known to peers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
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

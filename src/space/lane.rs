//! What keeps blocks of one space on pages apart.

use crate::units::Stream;

/// Blocks of two lanes never lie on one page of their space, before its seal.
///
/// Nothing orders the branches of a capture, so each stream has a lane of its own. And peers know pages that remote blocks lie on: beside nothing else a
/// seal has no reason to exchange them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Lane {
    pub(crate) stream: Stream,
    /// For blocks that peers use.
    pub(crate) remote: bool,
}

impl Lane {
    /// Of blocks that only this device uses.
    pub(crate) const fn local(stream: Stream) -> Self {
        Self { stream, remote: false }
    }

    /// Of blocks that peers use too.
    pub(crate) const fn remote(stream: Stream) -> Self {
        Self { stream, remote: true }
    }
}

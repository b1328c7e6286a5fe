//! Replay order of an arena, as seen by cooperating ranks.

use super::SharedVmmAllocator;
use crate::error::Result;
use crate::order::{Agreement, DIGEST_BYTES};

impl SharedVmmAllocator {
    /// Returns the bytes gathered from each rank by [`compare_order`](Self::compare_order). (A
    /// function, as cbindgen would export a constant to C.)
    #[must_use]
    pub const fn digest_bytes() -> usize {
        DIGEST_BYTES
    }

    /// Returns the number of launched replays, eager scopes included: equal on ranks with equal
    /// launches. Inside a launch, the number of the current replay.
    #[must_use]
    pub fn replay_seq(&self) -> u64 {
        self.common.order.replays()
    }

    /// Unbinds a [serial](super::Options::serial) arena: its next replay binds stream and thread
    /// again. For the end of a warm-up, or a new launching thread. Waits for a replay or scope of a
    /// different thread. Later replays are ordered after earlier ones, as in any arena. No effect
    /// if not serial.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) inside a launch or scope of this arena.
    pub fn lift_serial(&self) -> Result<()> {
        self.usable()?;
        self.common.order.lift_serial()
    }

    /// Compares the launches so far with all other ranks
    /// ([`Options::check_order`](super::Options::check_order)): the keys of all replays
    /// ([`Space::set_order_key`](crate::Space::set_order_key); eager scopes have their own key), in
    /// order. May be called at any time, on any thread. All ranks call with their own number below
    /// `ranks`. `gather` is the engine's all-gather of [`digest_bytes`](Self::digest_bytes), over
    /// any process group. It receives this rank's bytes, and writes the bytes of all ranks in
    /// order. No lock is held meanwhile, so `gather` may call anything. The engine ends a hang in
    /// `gather` by a deadline of its process group.
    ///
    /// A rank merely behind is no difference: ranks need not be at the same point. Returns how far
    /// the ranks agree. The last 256 replays are known by key, so ranks that compare at least as
    /// often learn the first different replay.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`](crate::Error::RanksDiffer) names the first different replay, the same
    /// one on every rank. Later replays and eager scopes are then refused with this error instead
    /// of a hang, until [`restart_order`](Self::restart_order).
    /// [`Error::WrongState`](crate::Error::WrongState) if the check is off;
    /// [`Error::InvalidArgument`](crate::Error::InvalidArgument) for impossible rank numbers, or if
    /// `gather` wrote something else; errors of `gather`.
    pub fn compare_order(
        &self,
        rank: u32,
        ranks: u32,
        gather: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<Agreement> {
        self.usable()?;
        self.common.order.compare((rank, ranks), None, gather)
    }

    /// As [`compare_order`](Self::compare_order), before a launch or any other step equal on all
    /// ranks. Also `next` must be equal, and no rank may be behind. `next` is any number: the key
    /// of the next space, a hash of a step's mode and bucket, or the
    /// [`layout_hash`](crate::SealReport::layout_hash) of a capture. `next` is not recorded; the
    /// replay is.
    ///
    /// # Errors
    /// As [`compare_order`](Self::compare_order). If only `next` differs, nothing was launched:
    /// later replays are not refused, and the ranks may decide again.
    pub fn agree_on(
        &self,
        next: u64,
        rank: u32,
        ranks: u32,
        gather: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<Agreement> {
        self.usable()?;
        self.common.order.compare((rank, ranks), Some(next), gather)
    }

    /// Forgets all launches and differences: the check counts from 1 again. For all ranks at the
    /// same point.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if the check is off.
    pub fn restart_order(&self) -> Result<()> {
        self.usable()?;
        self.common.order.restart()
    }
}

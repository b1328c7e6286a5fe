//! The order of an arena's replays, as ranks that work together see it.

use super::SharedVmmAllocator;
use crate::error::Result;
use crate::order::{Agreement, DIGEST_BYTES};

impl SharedVmmAllocator {
    /// Bytes that [`compare_order`](Self::compare_order) gathers from each rank. (No constant: cbindgen would take it for one of C's.)
    #[must_use]
    pub const fn digest_bytes() -> usize {
        DIGEST_BYTES
    }

    /// How many replays of the arena were launched, eager scopes among them: the same on ranks that replay alike. Inside a launch it is the
    /// number of that replay.
    #[must_use]
    pub fn replay_seq(&self) -> u64 {
        self.common.order.replays()
    }

    /// Lets the next replay of a [serial](super::Options::serial) arena say anew where all later ones have to be: when a warm-up is over, or
    /// the thread that launches hands over to another. Waits for the end of a replay or scope that another thread is at. The replays of the
    /// new place wait for those before, as in any arena. Without effect in one that is not serial.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) inside a launch or a scope of this arena.
    pub fn lift_serial(&self) -> Result<()> {
        self.usable()?;
        self.common.order.lift_serial()
    }

    /// Compares with the other ranks what was launched so far ([`Options::check_order`](super::Options::check_order)): each replay's key
    /// ([`Space::set_order_key`](crate::Space::set_order_key); eager scopes have one of their own), in order. Any time, on any thread; all ranks call it, each with its own number
    /// below `ranks`. `gather` is the engine's all-gather of [`digest_bytes`](Self::digest_bytes), by any process group: it is given
    /// this rank's bytes, and writes those of all ranks in the order of their numbers. No lock is held meanwhile, so it may call
    /// anything; what hangs in there is the engine's to end, by a deadline of its process group.
    ///
    /// A rank that is merely behind is no difference: the ranks need not be at one point of their programs. How far they agree is what it
    /// returns. The last 256 replays are known by key; ranks that compare no less often learn which replay was the first that differs.
    ///
    /// # Errors
    /// [`Error::RanksDiffer`](crate::Error::RanksDiffer) names the first replay that is not the same, on every rank the same one. From then on replays and eager scopes
    /// of the arena are refused with it, rather than launched to wait for each other for ever, until [`restart_order`](Self::restart_order).
    /// [`Error::WrongState`](crate::Error::WrongState) if the check is off; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for numbers of ranks that cannot be, and where `gather` wrote
    /// something else; what `gather` says.
    pub fn compare_order(
        &self,
        rank: u32,
        ranks: u32,
        gather: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<Agreement> {
        self.usable()?;
        self.common.order.compare((rank, ranks), None, gather)
    }

    /// As [`compare_order`](Self::compare_order), before a launch, or before anything else that all ranks must do alike: also `next` must
    /// be the same, and no rank may be behind. It may be any number: the key of the space that is to be replayed, a hash of a step's mode and
    /// bucket, the [`layout_hash`](crate::SealReport::layout_hash) of what was just captured. It is not noted: the replay is.
    ///
    /// # Errors
    /// As [`compare_order`](Self::compare_order). Where nobody has launched what differs yet, nothing is refused afterwards: the ranks may decide anew.
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

    /// Forgets what was launched and what differed: the check counts from 1 again. For all ranks at one point of their programs.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) if the check is off.
    pub fn restart_order(&self) -> Result<()> {
        self.usable()?;
        self.common.order.restart()
    }
}

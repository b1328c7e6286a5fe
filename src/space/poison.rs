//! Poison: the shared pages of a space are filled before a replay, so that a graph which relies on what is left there shows at once.
//!
//! Every byte of a shared page is undefined when a replay begins, since any graph of the arena may have run in between. A graph that
//! is right writes before it reads; one that is not gives what the last graph left, which is right often enough to stay hidden.

use std::collections::HashSet;
use std::time::Duration;

use serde::Serialize;

use super::Space;
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

/// What shared pages are filled with: as floating-point numbers of any width a NaN, as an index far outside.
pub const POISON: u32 = 0xffff_ffff;
/// What [`Space::verify`] fills them with the second time: small numbers of either sign.
const ANTIDOTE: u32 = 0x2a2a_a2a2;

/// An output that depends on what was on the shared pages before the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The number of the space whose graph it is.
    pub space: u64,
    /// Which of the outputs.
    pub output: usize,
    /// The first byte that differs, from the output's beginning.
    pub offset: u64,
}

impl Space {
    /// Replays twice over shared pages filled with one pattern and then another, and compares the outputs: `None` if they are the
    /// same to the bit. Outputs are device memory of the caller, in this space (retained) or elsewhere: address and bytes.
    ///
    /// `launch` must give the same work to `stream` both times, over inputs that it leaves as they were, without random numbers. Waits
    /// for the device.
    ///
    /// # Errors
    /// Those of [`replay`](Self::replay), and what the driver says of filling or reading.
    ///
    /// # Safety
    /// The outputs are memory of the device, mapped until this returns.
    pub unsafe fn verify(
        &self,
        stream: Stream,
        outputs: &[(Address, u64)],
        mut launch: impl FnMut(),
    ) -> Result<Option<Difference>> {
        let common = &self.core().common;
        common.usable()?;
        self.core().require_sealed()?;
        let pool = common.pool();
        let mut seen: Vec<Vec<u8>> = Vec::new();
        for pattern in [POISON, ANTIDOTE] {
            self.replay_over(pattern, stream, &mut launch)?;
            common.order.fence().block(pool.events(), Duration::MAX)?;
            for (output, (address, bytes)) in outputs.iter().enumerate() {
                let mut now = Vec::new();
                let limit = isize::MAX as u64;
                let refused = |_| Error::InvalidSize { what: "an output", bytes: *bytes, limit };
                now.try_reserve_exact(usize::try_from(*bytes).unwrap_or(usize::MAX)).map_err(refused)?;
                now.resize(*bytes as usize, 0);
                // SAFETY: the caller's contract.
                unsafe { common.device.host_pool().fetch(*address, &mut now) }?;
                if pattern == POISON {
                    seen.push(now);
                } else if let Some(offset) = seen[output].iter().zip(&now).position(|(then, now)| then != now)
                {
                    let found = Difference { space: self.id(), output, offset: offset as u64 };
                    tracing::error!(?found, "a graph relies on what others left on the shared pages");
                    return Ok(Some(found));
                }
            }
        }
        Ok(None)
    }

    /// Replays with the shared pages of this space filled just before, in order on the stream.
    pub(super) fn replay_over<T>(
        &self,
        pattern: u32,
        stream: Stream,
        launch: impl FnOnce() -> T,
    ) -> Result<T> {
        let _entered = self.core().enter(stream)?;
        self.fill_shared(pattern, stream)?;
        Ok(launch())
    }

    /// Fills the shared pages of this space, in order on the stream; within a turn of the order.
    pub(super) fn fill_shared(&self, pattern: u32, stream: Stream) -> Result<()> {
        let shared = self.shared_pages();
        let state = self.core().state.lock();
        shared.iter().try_for_each(|(range, offset, bytes)| {
            state.ranges[*range].fill(*offset, *bytes, pattern, stream)
        })
    }

    /// Where each shared page of this space shows, once: range, offset and bytes.
    fn shared_pages(&self) -> Vec<(usize, u64, u64)> {
        let state = self.core().state.lock();
        let common = &self.core().common;
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for (number, range) in state.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                let shared = common.pool().holder(mapped.page) == Some(common.shared.holder());
                if shared && seen.insert(mapped.page) {
                    found.push((number, mapped.offset, mapped.bytes));
                }
            }
        }
        found
    }
}

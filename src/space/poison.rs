//! Poison: fills the shared pages of a space before a replay, to expose graphs which read bytes
//! left by other graphs.

use std::collections::HashSet;
use std::time::Duration;

use serde::Serialize;

use super::Space;
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

/// Fill pattern: a NaN in all floating-point formats, far out of range as an index.
pub const POISON: u32 = 0xffff_ffff;
/// Second pattern of [`Space::verify`]: small positive and negative numbers.
const ANTIDOTE: u32 = 0x2a2a_a2a2;

/// An output which depends on the contents of shared pages before the replay.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Number of the graph's space.
    pub space: u64,
    /// Index of the output.
    pub output: usize,
    /// First different byte in the output.
    pub offset: u64,
}

impl Space {
    /// Replays twice over shared pages with different fill patterns, and compares the outputs
    /// (address, bytes) bitwise: `vmmgraph_space_verify`. `None` if all are equal.
    ///
    /// # Safety
    /// The outputs are memory of the device, mapped until this call returns.
    pub unsafe fn verify(
        &self,
        stream: Stream,
        outputs: &[(Address, u64)],
        mut launch: impl FnMut(),
    ) -> Result<Option<Difference>> {
        let common = &self.core().common;
        common.require_usable()?;
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

    /// Fills shared pages in stream order. The caller holds the replay slot.
    pub(super) fn fill_shared(&self, pattern: u32, stream: Stream) -> Result<()> {
        let shared = self.shared_pages();
        let state = self.core().state.lock();
        shared.iter().try_for_each(|(range, offset, bytes)| {
            state.ranges[*range].fill(*offset, *bytes, pattern, stream)
        })
    }

    /// One mapping of each shared page: range, offset and bytes.
    fn shared_pages(&self) -> Vec<(usize, u64, u64)> {
        let state = self.core().state.lock();
        let common = &self.core().common;
        let mut seen = HashSet::new();
        let mut found = Vec::new();
        for (number, range) in state.ranges.iter().enumerate() {
            for mapped in range.mapped() {
                let shared = common.pool().owner(mapped.page) == Some(common.shared.owner());
                if shared && seen.insert(mapped.page) {
                    found.push((number, mapped.offset, mapped.bytes));
                }
            }
        }
        found
    }
}

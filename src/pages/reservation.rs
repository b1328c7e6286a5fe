//! A range of addresses, and who has it.

use std::fmt;
use std::sync::Arc;

use slotmap::Key;

use super::mappings::Mapping;
use super::{PagePool, RangeId, Remains};
use crate::error::Result;
use crate::units::{Address, Stream};

/// A range of addresses. Made by a [`Change`](super::Change). Dropping it unmaps everything and gives the addresses back; whoever
/// drops it has made sure that the device no longer uses them, or [leaves](Self::leave) it to a fence.
pub struct Reservation {
    pool: Arc<PagePool>,
    id: RangeId,
    base: Address,
    bytes: u64,
}

impl Reservation {
    pub(super) fn new(pool: &Arc<PagePool>, id: RangeId, base: Address, bytes: u64) -> Self {
        Self { pool: Arc::clone(pool), id, base, bytes }
    }

    /// Its key in the pool.
    #[must_use]
    pub fn id(&self) -> RangeId {
        self.id
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.base
    }

    /// Bytes of addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How far into the range an address lies, if it does.
    #[must_use]
    pub fn offset_of(&self, address: Address) -> Option<u64> {
        address.0.checked_sub(self.base.0).filter(|offset| *offset < self.bytes)
    }

    /// The pages mapped here, in address order.
    #[must_use]
    pub fn mapped(&self) -> Vec<Mapping> {
        self.pool.mapped(self.id)
    }

    /// The mappings that a part of it lies on, by offset.
    #[must_use]
    pub fn mapped_under(&self, offset: u64, bytes: u64) -> Vec<Mapping> {
        self.pool.mapped_under(self.id, offset, bytes)
    }

    /// The first part of `[from, to)` that nothing is mapped at.
    #[must_use]
    pub fn gap(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        self.pool.gap(self.id, from, to)
    }

    /// Fills mapped bytes with a repeated 32-bit value, in the stream's order.
    ///
    /// # Errors
    /// What the driver says, or [`Error::Internal`](crate::Error::Internal) if something there is not mapped.
    pub fn fill(&self, offset: u64, bytes: u64, value: u32, stream: Stream) -> Result<()> {
        self.pool.fill(self.id, offset, bytes, value, stream)
    }

    /// What is left of it when its user goes, to be torn down behind a fence by [`PagePool::finish`].
    #[must_use]
    pub fn leave(mut self) -> Remains {
        Remains::range(std::mem::take(&mut self.id))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.id.is_null() {
            // What is refused is kept for another try.
            let _ = self.pool.close(self.id);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({:?} + {:#x})", self.base, self.bytes)
    }
}

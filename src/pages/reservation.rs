use std::fmt;
use std::sync::Arc;

use slotmap::Key;

use super::mappings::Mapping;
use super::{PagePool, PendingUnmap, RangeId};
use crate::error::Result;
use crate::units::{Address, Stream};

/// Reserved addresses, made by a [`Transaction`](super::Transaction). Drop unmaps all pages and
/// frees the addresses, which the device must not use any more; [`leave`](Self::leave) defers this
/// to a fence.
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

    /// Returns the key in the pool.
    #[must_use]
    pub fn id(&self) -> RangeId {
        self.id
    }

    /// Returns the first address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.base
    }

    /// Returns the bytes of addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the offset of an address in the range, if inside.
    #[must_use]
    pub fn offset_of(&self, address: Address) -> Option<u64> {
        address.0.checked_sub(self.base.0).filter(|offset| *offset < self.bytes)
    }

    /// Returns the mapped pages, by address.
    #[must_use]
    pub fn mapped(&self) -> Vec<Mapping> {
        self.pool.mapped(self.id)
    }

    /// Returns the mappings that overlap a part of the range, by offset.
    #[must_use]
    pub fn mapped_under(&self, offset: u64, bytes: u64) -> Vec<Mapping> {
        self.pool.mapped_under(self.id, offset, bytes)
    }

    /// Returns start and end of the first unmapped part between two offsets.
    #[must_use]
    pub fn gap(&self, from: u64, to: u64) -> Option<(u64, u64)> {
        self.pool.gap(self.id, from, to)
    }

    /// Fills mapped bytes with a repeated 32-bit value, in stream order.
    ///
    /// # Errors
    /// Driver errors; [`Error::Internal`](crate::Error::Internal) if a byte is unmapped.
    pub fn fill(&self, offset: u64, bytes: u64, value: u32, stream: Stream) -> Result<()> {
        self.pool.fill(self.id, offset, bytes, value, stream)
    }

    /// Converts into a pending unmap for [`PagePool::unmap_after`].
    #[must_use]
    pub fn leave(mut self) -> PendingUnmap {
        PendingUnmap::range(std::mem::take(&mut self.id))
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.id.is_null() {
            // The pool retries a refused range.
            let _ = self.pool.close(self.id);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reservation({:?} + {:#x})", self.base, self.bytes)
    }
}

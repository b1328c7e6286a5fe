//! Private (exclusive) blocks of an arena.

use super::SharedVmmAllocator;
use crate::error::Result;
use crate::pages::Extent;
use crate::units::Address;

impl SharedVmmAllocator {
    /// Allocates a private block: one page at its own addresses, until freed, or until the arena
    /// and all its spaces are dropped. No graph shares the page, no other block is on the page, and
    /// poison does not fill the page. Seals, leases and eager work do not move the page, and a
    /// pause leaves its memory.
    ///
    /// For memory written by peers without a wait for this device, and for contents preserved
    /// across replays: workspaces, signal pads, Lamport buffers, windows registered by a library.
    /// The block is zero for any stream and any peer at the return, which waits for one fill.
    ///
    /// Address and size are multiples of `granularity`, a power of two and a multiple of the
    /// device's (multicast needs up to 512 MiB). 0: the small page size. The block counts toward
    /// the arena's budget.
    ///
    /// Allocate before a capture: platforms that forbid waits during a capture refuse the call.
    ///
    /// # Errors
    /// Nothing changed: [`Error::InvalidSize`](crate::Error::InvalidSize);
    /// [`Error::InvalidPageSize`](crate::Error::InvalidPageSize) for an invalid granularity; out of
    /// memory, budget or addresses, after reclaimers were asked; driver errors.
    pub fn allocate_exclusive(&self, bytes: u64, granularity: u64) -> Result<Address> {
        let allocated = self.common.allocate_exclusive(bytes, granularity);
        self.common.pool().check();
        allocated
    }

    /// Frees a private block. Its memory is freed after the arena's replays so far. Other work with
    /// the block must be done, and peers must have closed the block: otherwise the page stays
    /// exported ([`PagePin`](crate::PagePin)).
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer) for an address without a private
    /// block of this arena.
    pub fn free_exclusive(&self, address: Address) -> Result<()> {
        let freed = self.common.free_exclusive(address);
        self.common.pool().check();
        freed
    }

    /// Returns the page of a private block or a part of one, as
    /// [`Space::export`](crate::Space::export) for blocks of a space. The page is the same for the
    /// block's life, and [exportable](crate::Device::export_page) at any time.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer) for a range outside one private
    /// block; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for zero bytes.
    pub fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.common.export_exclusive(base, bytes)
    }
}

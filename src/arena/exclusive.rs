//! Memory of an arena that nothing else shares.

use super::SharedVmmAllocator;
use crate::error::Result;
use crate::pages::Extent;
use crate::units::Address;

impl SharedVmmAllocator {
    /// Allocates an exclusive block: one page of its own, mapped at addresses of its own until it is freed or the arena and all its spaces are gone.
    /// No graph shares it, nothing else lies on it, poison does not fill it, and no seal, lending or eager work moves it; a pause leaves it where it is,
    /// with its memory. For what peers write without waiting for this device, and for what keeps its contents from replay to replay: workspaces, signal
    /// pads, Lamport buffers, windows that a library registers. It is zero when this returns, for any stream and any peer: waits for one fill.
    ///
    /// `granularity`, a power of two and a multiple of the device's, is what its address and its bytes, rounded up, are multiples of (multicast asks
    /// for up to 512 MiB); 0: a small page's bytes. It counts toward the arena's budget.
    ///
    /// Before a capture, rather than in one: on platforms where nobody may wait while something is captured, it is refused then.
    ///
    /// # Errors
    /// [`Error::InvalidSize`](crate::Error::InvalidSize); [`Error::InvalidPageSize`](crate::Error::InvalidPageSize) for a granularity that cannot be; out of memory, budget or addresses, after everybody
    /// was asked to give some back; what the driver says. Nothing has changed then.
    pub fn allocate_exclusive(&self, bytes: u64, granularity: u64) -> Result<Address> {
        let allocated = self.common.allocate_exclusive(bytes, granularity);
        self.common.pool().check();
        allocated
    }

    /// Frees an exclusive block. Its memory goes behind the arena's replays so far; other work that uses it is over by now, and peers have closed it, or
    /// it stays theirs ([`PagePin`](crate::PagePin)).
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer) for what is no exclusive block of the arena, or no more.
    pub fn free_exclusive(&self, address: Address) -> Result<()> {
        let freed = self.common.free_exclusive(address);
        self.common.pool().check();
        freed
    }

    /// The page behind an exclusive block or a part of it, as [`Space::export`](crate::Space::export) says it of a space's blocks. It is the same for as
    /// long as the block lives, and [can be exported](crate::Device::export_page) at any time.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer) for what does not lie in one such block; [`Error::InvalidArgument`](crate::Error::InvalidArgument) for no bytes.
    pub fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.common.export_exclusive(base, bytes)
    }
}

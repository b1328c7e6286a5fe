use super::SharedVmmAllocator;
use crate::error::Result;
use crate::pages::Extent;
use crate::units::Address;

impl SharedVmmAllocator {
    /// Allocates a zeroed private (exclusive) block: `vmmgraph_arena_allocate_exclusive`. Multicast
    /// needs a granularity of up to 512 MiB.
    pub fn allocate_exclusive(&self, bytes: u64, granularity: u64) -> Result<Address> {
        let allocated = self.common.allocate_exclusive(bytes, granularity);
        self.common.pool().check();
        allocated
    }

    /// Frees a private block after the arena's replays so far: `vmmgraph_arena_free_exclusive`.
    pub fn free_exclusive(&self, address: Address) -> Result<()> {
        let freed = self.common.free_exclusive(address);
        self.common.pool().check();
        freed
    }

    /// Returns the page of a part of a private block: `vmmgraph_arena_export`.
    pub fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.common.export_exclusive(base, bytes)
    }
}

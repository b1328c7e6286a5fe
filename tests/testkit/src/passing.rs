//! The macro `passes_memory_on`, for drivers of the tests.

/// Implements `Memory` by the driver in the field `inner`.
macro_rules! passes_memory_on {
    ($driver:ty) => {
        // SAFETY: the inner driver does the work under the callers' contracts.
        unsafe impl vmmgraph::driver::Memory for $driver {
            fn free_bytes(&self) -> vmmgraph::Result<u64> {
                self.inner.free_bytes()
            }

            fn reserve(&self, len: u64) -> vmmgraph::Result<vmmgraph::Address> {
                self.inner.reserve(len)
            }

            unsafe fn free_addresses(&self, base: vmmgraph::Address, len: u64) -> vmmgraph::Result<()> {
                // SAFETY: the caller's contract.
                unsafe { self.inner.free_addresses(base, len) }
            }

            fn create(&self, len: u64) -> vmmgraph::Result<vmmgraph::driver::PageHandle> {
                self.inner.create(len)
            }

            unsafe fn release(&self, page: vmmgraph::driver::PageHandle) -> vmmgraph::Result<()> {
                // SAFETY: the caller's contract.
                unsafe { self.inner.release(page) }
            }

            unsafe fn map(
                &self,
                at: vmmgraph::Address,
                pages: &[vmmgraph::driver::Whole],
                peers: vmmgraph::Peers,
            ) -> vmmgraph::Result<(), vmmgraph::driver::NotMapped> {
                // SAFETY: the caller's contract.
                unsafe { self.inner.map(at, pages, peers) }
            }

            unsafe fn grant(
                &self,
                at: vmmgraph::Address,
                len: u64,
                peers: vmmgraph::Peers,
            ) -> vmmgraph::Result<()> {
                // SAFETY: the caller's contract.
                unsafe { self.inner.grant(at, len, peers) }
            }

            unsafe fn unmap(&self, at: vmmgraph::Address, len: u64) -> vmmgraph::Result<()> {
                // SAFETY: the caller's contract.
                unsafe { self.inner.unmap(at, len) }
            }
        }
    };
}

pub(crate) use passes_memory_on;

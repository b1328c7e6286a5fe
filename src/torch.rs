//! What torch's allocator calls come down to: blocks of one space.

use std::sync::Arc;

use crate::error::Result;
use crate::space::Space;
use crate::units::{Address, Stream};

/// The memory of one capture, as torch asks for it: tensor by tensor (blocks route) or segment by segment (MemPool route).
///
/// Keeps its space alive, so that a tensor or a pool that outlives the graph can still give back what it has: torch frees from any
/// thread, at any later time. No call but [`allocate`](Self::allocate) reaches the driver.
#[derive(Clone, Debug)]
pub struct VmmTorchAllocator {
    space: Arc<Space>,
}

impl VmmTorchAllocator {
    /// For the space of one capture.
    #[must_use]
    pub fn new(space: Arc<Space>) -> Self {
        Self { space }
    }

    /// See [`Space::allocate`].
    ///
    /// # Errors
    /// Those of [`Space::allocate`]; out of memory is to become a null pointer, of which torch makes its own error.
    pub fn allocate(&self, bytes: u64, stream: Stream) -> Result<Address> {
        self.space.allocate(bytes, stream)
    }

    /// Closes the arena after a bug was caught: every later call but destruction fails.
    #[cfg(feature = "bridge")]
    pub(crate) fn close_arena(&self) {
        self.space.close_arena();
    }

    /// See [`Space::free`].
    ///
    /// # Errors
    /// Those of [`Space::free`].
    pub fn free(&self, address: Address) -> Result<()> {
        self.space.free(address)
    }

    /// See [`Space::record_stream`].
    ///
    /// # Errors
    /// Those of [`Space::record_stream`].
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.space.record_stream(address, stream)
    }
}

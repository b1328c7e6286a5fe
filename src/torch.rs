//! What torch's allocator calls come down to: blocks of one space.

use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::space::{Carry, Core, Kind, RetainPolicy, Space};
use crate::units::{Address, Stream};
use crate::workspace::Workspace;

/// The memory of one capture, as torch asks for it: tensor by tensor (blocks route) or segment by segment (MemPool route).
///
/// Holds the blocks of its space and not the graph: a tensor or a pool that outlives the graph keeps what is under it and nothing
/// else, and can still give it back, from any thread, at any later time. No call but [`allocate`](Self::allocate) waits for anything.
#[derive(Clone)]
pub struct VmmTorchAllocator {
    core: Arc<Core>,
}

impl VmmTorchAllocator {
    /// For the space of one capture.
    #[must_use]
    pub fn new(space: &Space) -> Self {
        Self { core: Arc::clone(space.core()) }
    }

    /// See [`Space::allocate`], and [`Space::allocate_kept`] if `kept`.
    ///
    /// # Errors
    /// Those of [`Space::allocate`]; out of memory is to become a null pointer, of which torch makes its own error.
    pub fn allocate(&self, bytes: u64, stream: Stream, kept: bool) -> Result<Address> {
        self.core.allocate(bytes, stream, if kept { Kind::Kept } else { Kind::Local })
    }

    /// See [`Space::allocate_remote`].
    ///
    /// # Errors
    /// Those of [`Space::allocate_remote`].
    pub fn allocate_remote(&self, bytes: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(bytes, stream, Kind::Remote)
    }

    /// Whether other processes can be given the pages under its blocks: a library that meets them in a capture may do so by itself.
    #[must_use]
    pub fn is_shareable(&self) -> bool {
        self.core.is_shareable()
    }

    /// Closes the arena after a bug was caught: every later call but destruction fails.
    #[cfg(feature = "bridge")]
    pub(crate) fn close_arena(&self) {
        self.core.close_arena();
    }

    /// See [`Space::free`]. If the capture is over, the block's bytes are nobody else's, and mapped, until the streams in `readers` have
    /// passed, beside those that were noted for it: a program may drop a tensor right after work that reads it.
    ///
    /// # Errors
    /// Those of [`Space::free`].
    pub fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.core.free(address, readers)
    }

    /// With `only`, promises that what is captured into the space is launched by [`Space::replay`] and [`Space::enter`] only, and by nobody before this
    /// is said. Until the first launch, and until the device's next capture begins, whose graph may read it, a retained block that goes then leaves everything as if
    /// it had gone before the seal: behind the streams noted for it, the pages that were there come back. Without `only` that ends: anybody may launch it from now on.
    pub fn launch_by_replay_only(&self, only: bool) {
        self.core.launch_by_replay_only(only);
    }

    /// Makes short blocks kept ones, from the beginning of the space on, where blocks at the same point of the arena's earlier captures outlived those: all
    /// that came and went before was the same there, whatever the sizes. So outputs of a model that is captured for many batches lie packed. What an
    /// arena holds, and the [layout hash](crate::SealReport::layout_hash), then depend on the order of captures. Where one goes before its first
    /// launch and the next capture none is kept from then on.
    pub fn keep_as_before(&self) {
        self.core.keep_as_before();
    }

    /// Says of a stream that was captured into the space, and that lasts as long as its blocks, that a program may use those there without
    /// [noting](Self::record_stream) it: nothing [comes back](Self::launch_by_replay_only) before what it was given until a block went is done.
    pub fn captured_on(&self, stream: Stream) {
        self.core.captured_on(stream);
    }

    /// Before a seal by a policy, around which the caller carries over what was written since the capture: until what this returns is dropped, also
    /// a block that any thread frees stays where it is.
    ///
    /// # Errors
    /// [`Error::WrongState`](crate::Error::WrongState) while another one is there.
    pub fn carry(&self, policy: RetainPolicy) -> Result<Carry> {
        Carry::begin(&self.core, policy)
    }

    /// A workspace on the arena's device, for what is captured into the space.
    ///
    /// # Errors
    /// Those of [`Workspace::new`].
    pub fn workspace(&self, bytes: u64) -> Result<Workspace> {
        Workspace::new(self.core.device(), bytes)
    }

    /// Before a replay of a space that was captured with the workspace and nothing else was, within its [turn](Space::enter): see
    /// [`Workspace::use_on`].
    ///
    /// # Errors
    /// Those of [`Workspace::use_on`].
    pub fn use_workspace(&self, workspace: &Workspace, stream: Option<Stream>) -> Result<bool> {
        workspace.use_on(stream, || self.core.replays())
    }

    /// The workspace goes behind the arena's replays so far, at the earliest.
    pub fn leave_workspace(&self, workspace: &Workspace) {
        workspace.leave(self.core.replays());
    }

    /// See [`Space::contains`].
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        self.core.contains(address)
    }

    /// See [`Space::record_stream`]. Returns the stream that the block was allocated for if the block
    /// stays busy until the seal once it is freed, or until [`free_parked`](Self::free_parked).
    ///
    /// # Errors
    /// Those of [`Space::record_stream`].
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<Option<Stream>> {
        self.core.record_stream(address, stream)
    }

    /// Frees the bytes of a block that was [freed](Self::free) while another stream of the capture used
    /// it. The caller has seen in the captured graph that all work captured on the block's own stream
    /// from now on depends on every use of the block. No effect after the seal.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer); [`Error::DoubleFree`](crate::Error::DoubleFree)
    /// for a block that is not waiting.
    pub fn free_parked(&self, address: Address) -> Result<()> {
        self.core.free_parked(address)
    }
}

impl fmt::Debug for VmmTorchAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmmTorchAllocator").finish_non_exhaustive()
    }
}

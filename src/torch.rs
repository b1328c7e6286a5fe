use std::fmt;
use std::sync::Arc;

use crate::error::Result;
use crate::space::{Core, Kind, PreservedBlocks, RetainPolicy, Space};
use crate::units::{Address, Stream};
use crate::workspace::Workspace;

/// Memory of one capture for torch, by tensor (blocks route) or by segment (MemPool route). Holds
/// the blocks of its space, not the graph: a tensor or pool which outlives the graph keeps only its
/// own memory, and frees it on any thread. Only [`allocate`](Self::allocate) may wait.
#[derive(Clone)]
pub struct VmmTorchAllocator {
    core: Arc<Core>,
}

impl VmmTorchAllocator {
    /// Creates the allocator of the space of one capture.
    #[must_use]
    pub fn new(space: &Space) -> Self {
        Self { core: Arc::clone(space.core()) }
    }

    /// See [`Space::allocate`], and [`Space::allocate_kept`] if `kept`. Out of memory, the caller
    /// returns a null pointer to torch.
    pub fn allocate(&self, bytes: u64, stream: Stream, kept: bool) -> Result<Address> {
        self.core.allocate(bytes, stream, if kept { Kind::Kept } else { Kind::Local })
    }

    /// See [`Space::allocate_remote`].
    pub fn allocate_remote(&self, bytes: u64, stream: Stream) -> Result<Address> {
        self.core.allocate(bytes, stream, Kind::Remote)
    }

    /// Whether the pages of its blocks can be exported: libraries which see the blocks in a capture
    /// may then do so.
    #[must_use]
    pub fn is_shareable(&self) -> bool {
        self.core.is_shareable()
    }

    /// Closes the arena after an internal error: later calls fail, except destruction.
    #[doc(hidden)]
    pub fn close_arena(&self) {
        self.core.close_arena();
    }

    /// See [`Space::free`]. After the capture, the block's bytes stay mapped and unused until the
    /// streams in `readers` and all recorded streams are done.
    pub fn free(&self, address: Address, readers: &[Stream]) -> Result<()> {
        self.core.free(address, readers)
    }

    /// With `only`, declares that the space's graphs are launched only through [`Space::replay`]
    /// and [`Space::enter`], and never before this call. A live-out (retained) block may then be
    /// freed as if before the seal, until the first launch or the device's next capture.
    pub fn launch_by_replay_only(&self, only: bool) {
        self.core.launch_by_replay_only(only);
    }

    /// Makes short blocks persistent (kept) where blocks at the same trace point of the arena's
    /// earlier captures were live-out: all earlier allocations and frees match, whatever the sizes.
    /// The outputs of a model captured for many batch sizes are then packed. Arena size and [layout
    /// hash](crate::SealReport::layout_hash) then depend on the order of captures. A point is
    /// excluded for good if its block is freed before the first launch and the next capture.
    pub fn predict_retained(&self) {
        self.core.predict_retained();
    }

    /// Declares a stream of the capture which outlives the blocks and may use them without
    /// [`record_stream`](Self::record_stream). [Restores](Self::launch_by_replay_only) of a freed
    /// block wait for its work submitted before the free.
    pub fn captured_on(&self, stream: Stream) {
        self.core.captured_on(stream);
    }

    /// Prepares a seal around which the caller preserves contents written since the capture: until
    /// the result is dropped, freed blocks stay in place.
    /// [`Error::WrongState`](crate::Error::WrongState) while another one exists.
    pub fn preserve(&self, policy: RetainPolicy) -> Result<PreservedBlocks> {
        PreservedBlocks::begin(&self.core, policy)
    }

    /// Creates a workspace on the arena's device, like [`Workspace::new`].
    pub fn workspace(&self, bytes: u64) -> Result<Workspace> {
        Workspace::new(self.core.device(), bytes)
    }

    /// Prepares a workspace for a replay of the only space captured with it, within the replay's
    /// [exclusive section](Space::enter), like [`Workspace::use_on`].
    pub fn use_workspace(&self, workspace: &Workspace, stream: Option<Stream>) -> Result<bool> {
        workspace.use_on(stream, || self.core.replays())
    }

    /// Delays the end of the workspace until after the arena's replays so far.
    pub fn leave_workspace(&self, workspace: &Workspace) {
        workspace.leave(self.core.replays());
    }

    /// See [`Space::contains`].
    #[must_use]
    pub fn contains(&self, address: Address) -> bool {
        self.core.contains(address)
    }

    /// See [`Space::record_stream`]. Returns the block's allocation stream if the block, once
    /// freed, stays parked until the seal or [`free_parked`](Self::free_parked).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<Option<Stream>> {
        self.core.record_stream(address, stream)
    }

    /// Frees the bytes of a parked block: [freed](Self::free) while another stream of the capture
    /// used it. The caller must have verified in the captured graph that later work on the block's
    /// own stream depends on every use. No effect after the seal.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`](crate::Error::ForeignPointer);
    /// [`Error::DoubleFree`](crate::Error::DoubleFree) for a block which is not parked.
    pub fn free_parked(&self, address: Address) -> Result<()> {
        self.core.free_parked(address)
    }
}

impl fmt::Debug for VmmTorchAllocator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("VmmTorchAllocator").finish_non_exhaustive()
    }
}

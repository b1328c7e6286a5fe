//! Blocks of a capture for torch's allocator, with workspaces and preserved contents.

use vmmgraph::capi::{GuardedDrop, guarded, retain_of, space_of, stream_of, vmmgraph_space_t};
use vmmgraph::{Address, Result, Stream};

use super::different;

#[allow(unreachable_pub, reason = "cxx makes the structs public")]
#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        type VmmTorchAllocator;
        /// Keeps the space's blocks alive, not its graph.
        fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>>;
        /// Sets the address in `block`. All functions here return a status.
        fn allocate(
            allocator: &VmmTorchAllocator,
            bytes: usize,
            stream: usize,
            kind: BlockKind,
            block: &mut usize,
        ) -> i32;
        /// Can the pages of its blocks be exported to other processes?
        fn is_shareable(allocator: &VmmTorchAllocator) -> bool;
        /// Frees a block, which the default stream and `stream` may still read.
        fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32;
        /// Declares how graphs are launched, from the first launch on.
        fn launch_by_replay_only(allocator: &VmmTorchAllocator, only: bool) -> i32;
        /// Makes short blocks persistent where blocks of earlier captures were live-out.
        fn predict_retained(allocator: &VmmTorchAllocator) -> i32;
        /// Declares a permanent stream of the capture, on which blocks may be used.
        fn captured_on(allocator: &VmmTorchAllocator, stream: usize) -> i32;

        type Workspace;
        fn no_workspace() -> Box<Workspace>;
        fn make_workspace(workspace: &mut Workspace, allocator: &VmmTorchAllocator, bytes: usize) -> i32;
        fn workspace_address(workspace: &Workspace) -> usize;
        /// Call before a replay on `stream`, which must be permanent, of the only space captured
        /// with the workspace; with `anywhere`, on any stream. Sets `anywhere` if later replays on
        /// any stream need no call.
        fn use_workspace(
            workspace: &Workspace,
            allocator: &VmmTorchAllocator,
            stream: usize,
            anywhere: &mut bool,
        ) -> i32;
        /// May any space of the arena use the workspace on any stream from now on?
        fn keep_workspace(workspace: &Workspace) -> bool;
        /// Ends the workspace after the arena's replays so far.
        fn leave_workspace(workspace: &Workspace, allocator: &VmmTorchAllocator) -> i32;

        type PreservedBlocks;
        fn no_preserved_blocks() -> Box<PreservedBlocks>;
        /// Call before a seal with this policy: until `preserved` is dropped no block is freed.
        fn begin_preserving(
            preserved: &mut PreservedBlocks,
            allocator: &VmmTorchAllocator,
            retain: i32,
        ) -> i32;
        /// Blocks whose pages the seal may replace.
        fn preserved_blocks(preserved: &PreservedBlocks) -> Vec<PreservedBlock>;
        fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool;
        /// Sets `own` to the block's allocation stream if the block will be parked when freed, else
        /// to 0.
        fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize, own: &mut usize) -> i32;
        /// Frees a parked block, once later work of its own stream depends on all uses.
        fn free_parked(allocator: &VmmTorchAllocator, block: usize) -> i32;
    }

    enum BlockKind {
        /// Transient, or live-out at the seal.
        Local,
        Kept,
        Remote,
    }

    struct PreservedBlock {
        address: usize,
        bytes: usize,
    }
}

/// Dropping the last tensor may free the space, so the drop is guarded like a call.
struct VmmTorchAllocator(GuardedDrop<vmmgraph::VmmTorchAllocator>);

impl VmmTorchAllocator {
    /// Calls the allocator and returns a status. A panic closes the arena.
    fn call(&self, call: impl FnOnce(&vmmgraph::VmmTorchAllocator) -> Result<()>) -> i32 {
        guarded(|| self.0.close_arena(), || call(&self.0))
    }

    /// As [`call`](Self::call), for a question: false after a panic.
    fn ask(&self, question: impl FnOnce(&vmmgraph::VmmTorchAllocator) -> bool) -> bool {
        let mut answer = false;
        self.call(|allocator| {
            answer = question(allocator);
            Ok(())
        });
        answer
    }
}

fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>> {
    let allocator = vmmgraph::VmmTorchAllocator::new(&*space_of(space as vmmgraph_space_t)?);
    Ok(Box::new(VmmTorchAllocator(GuardedDrop::new(allocator))))
}

fn allocate(
    allocator: &VmmTorchAllocator,
    bytes: usize,
    stream: usize,
    kind: ffi::BlockKind,
    block: &mut usize,
) -> i32 {
    allocator.call(|allocator| {
        let (bytes, stream) = (bytes as u64, stream_of(stream as *mut _));
        let at = match kind {
            ffi::BlockKind::Remote => allocator.allocate_remote(bytes, stream),
            _ => allocator.allocate(bytes, stream, kind == ffi::BlockKind::Kept),
        }?;
        *block = at.0 as usize;
        Ok(())
    })
}

fn is_shareable(allocator: &VmmTorchAllocator) -> bool {
    allocator.ask(vmmgraph::VmmTorchAllocator::is_shareable)
}

fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32 {
    allocator.call(|allocator| {
        let readers = [Stream::LEGACY, stream_of(stream as *mut _)];
        let freed = allocator.free(Address(block as u64), different(&readers));
        // Torch frees in destructors, which ignore a status.
        freed.inspect_err(
            |error| tracing::warn!(%error, "torch freed an address without a block of this library"),
        )
    })
}

fn launch_by_replay_only(allocator: &VmmTorchAllocator, only: bool) -> i32 {
    allocator.call(|allocator| {
        allocator.launch_by_replay_only(only);
        Ok(())
    })
}

fn predict_retained(allocator: &VmmTorchAllocator) -> i32 {
    allocator.call(|allocator| {
        allocator.predict_retained();
        Ok(())
    })
}

fn captured_on(allocator: &VmmTorchAllocator, stream: usize) -> i32 {
    allocator.call(|allocator| {
        allocator.captured_on(stream_of(stream as *mut _));
        Ok(())
    })
}

fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool {
    allocator.ask(|allocator| allocator.contains(Address(address as u64)))
}

fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize, own: &mut usize) -> i32 {
    allocator.call(|allocator| {
        let noted = allocator.record_stream(Address(block as u64), stream_of(stream as *mut _))?;
        *own = noted.map_or(0, |own| own.raw() as usize);
        Ok(())
    })
}

fn free_parked(allocator: &VmmTorchAllocator, block: usize) -> i32 {
    allocator.call(|allocator| allocator.free_parked(Address(block as u64)))
}

/// The last owner may be an entry of torch's table, so the drop is guarded like a call.
struct Workspace(Option<GuardedDrop<vmmgraph::Workspace>>);

fn no_workspace() -> Box<Workspace> {
    Box::new(Workspace(None))
}

fn make_workspace(workspace: &mut Workspace, allocator: &VmmTorchAllocator, bytes: usize) -> i32 {
    allocator.call(|allocator| {
        workspace.0 = Some(GuardedDrop::new(allocator.workspace(bytes as u64)?));
        Ok(())
    })
}

fn workspace_address(workspace: &Workspace) -> usize {
    workspace.0.as_ref().map_or(0, |workspace| workspace.address().0 as usize)
}

fn use_workspace(
    workspace: &Workspace,
    allocator: &VmmTorchAllocator,
    stream: usize,
    anywhere: &mut bool,
) -> i32 {
    allocator.call(|allocator| {
        let Some(workspace) = &workspace.0 else { return Ok(()) };
        let stream = (!*anywhere).then(|| stream_of(stream as *mut _));
        *anywhere = allocator.use_workspace(workspace, stream)?;
        Ok(())
    })
}

fn keep_workspace(workspace: &Workspace) -> bool {
    workspace.0.as_ref().is_some_and(|workspace| workspace.keep())
}

fn leave_workspace(workspace: &Workspace, allocator: &VmmTorchAllocator) -> i32 {
    allocator.call(|allocator| {
        workspace.0.iter().for_each(|workspace| allocator.leave_workspace(workspace));
        Ok(())
    })
}

/// Dropping frees the blocks freed in the meantime.
struct PreservedBlocks(Option<GuardedDrop<vmmgraph::PreservedBlocks>>);

fn no_preserved_blocks() -> Box<PreservedBlocks> {
    Box::new(PreservedBlocks(None))
}

fn begin_preserving(preserved: &mut PreservedBlocks, allocator: &VmmTorchAllocator, retain: i32) -> i32 {
    allocator.call(|allocator| {
        let policy = retain_of(retain)?.unwrap_or_default();
        preserved.0 = Some(GuardedDrop::new(allocator.preserve(policy)?));
        Ok(())
    })
}

fn preserved_blocks(preserved: &PreservedBlocks) -> Vec<ffi::PreservedBlock> {
    let blocks = preserved.0.iter().flat_map(|preserved| preserved.blocks());
    blocks.map(|(at, bytes)| ffi::PreservedBlock { address: at.0 as usize, bytes: *bytes as usize }).collect()
}

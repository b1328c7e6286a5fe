//! A capture's blocks as torch's allocator calls for them, and what lies beside these: workspaces, and contents that are carried over a seal.

use super::different;
use crate::capi::{GuardedDrop, guarded, retain_of, space_of, stream_of, vmmgraph_space_t};
use crate::error::Result;
use crate::units::{Address, Stream};
use crate::{space, torch, workspace};

#[allow(unreachable_pub, reason = "cxx makes the structs public")]
#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// What `src/torch.rs` says, as C++ holds it.
        type VmmTorchAllocator;
        /// The allocator of the space behind a C handle, whose blocks this keeps alive, and nothing else of it.
        fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>>;
        /// Allocates for a stream; the status, and the address in `block` if that is 0.
        fn allocate(
            allocator: &VmmTorchAllocator,
            bytes: usize,
            stream: usize,
            kind: BlockKind,
            block: &mut usize,
        ) -> i32;
        /// Whether other processes can be given the pages under its blocks.
        fn is_shareable(allocator: &VmmTorchAllocator) -> bool;
        /// Frees a block that the default stream and another one may still read; the status.
        fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32;
        /// Whether its graphs are launched by replays only, from the beginning on; the status.
        fn launch_by_replay_only(allocator: &VmmTorchAllocator, only: bool) -> i32;
        /// Its short blocks are kept ones where those of earlier captures outlived them; the status.
        fn keep_as_before(allocator: &VmmTorchAllocator) -> i32;
        /// A stream that lasts was captured, on which blocks may be used; the status.
        fn captured_on(allocator: &VmmTorchAllocator, stream: usize) -> i32;

        /// A workspace, or none.
        type Workspace;
        /// None.
        fn no_workspace() -> Box<Workspace>;
        /// Makes one of so many bytes at least on the device of a space; the status.
        fn make_workspace(workspace: &mut Workspace, allocator: &VmmTorchAllocator, bytes: usize) -> i32;
        /// Its first address.
        fn workspace_address(workspace: &Workspace) -> usize;
        /// Before a replay of the only space that was captured with it, on a stream that lasts or, with `anywhere`, on any from now on, which it says then:
        /// it need not be asked again. The status.
        fn use_workspace(
            workspace: &Workspace,
            allocator: &VmmTorchAllocator,
            stream: usize,
            anywhere: &mut bool,
        ) -> i32;
        /// Whether it can be used by any space of its arena, on any stream, from now on.
        fn keep_workspace(workspace: &Workspace) -> bool;
        /// It goes behind the arena's replays so far; the status.
        fn leave_workspace(workspace: &Workspace, allocator: &VmmTorchAllocator) -> i32;

        /// Blocks whose contents are carried over a seal, or none.
        type Carry;
        /// No blocks.
        fn no_carry() -> Box<Carry>;
        /// Before a seal by a policy of `VMMGRAPH_RETAIN_*`: until the end of `carry` every block stays where it is; the status.
        fn begin_carry(carry: &mut Carry, allocator: &VmmTorchAllocator, retain: i32) -> i32;
        /// Those under which the seal may exchange pages.
        fn carried(carry: &Carry) -> Vec<CarriedBlock>;
        /// Whether the address lies in the space, in a live block or not.
        fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool;
        /// Notes that a second stream uses a block; the status. `own` is the stream it was allocated
        /// for if it is parked when it is freed, else 0.
        fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize, own: &mut usize) -> i32;
        /// Frees a parked block, on whose uses its own stream's next work depends; the status.
        fn free_parked(allocator: &VmmTorchAllocator, block: usize) -> i32;
    }

    /// What a block of a capture is for.
    enum BlockKind {
        /// For what passes, or is retained by the seal.
        Local,
        /// For what stays.
        Kept,
        /// For what peers use too.
        Remote,
    }

    /// A block whose contents are carried over a seal.
    struct CarriedBlock {
        address: usize,
        bytes: usize,
    }
}

/// The last tensor takes what is left of its space along, so its end is a call too.
struct VmmTorchAllocator(GuardedDrop<torch::VmmTorchAllocator>);

fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>> {
    let allocator = torch::VmmTorchAllocator::new(&*space_of(space as vmmgraph_space_t)?);
    Ok(Box::new(VmmTorchAllocator(GuardedDrop::new(allocator))))
}

fn allocate(
    allocator: &VmmTorchAllocator,
    bytes: usize,
    stream: usize,
    kind: ffi::BlockKind,
    block: &mut usize,
) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            let (bytes, stream) = (bytes as u64, stream_of(stream as *mut _));
            let at = match kind {
                ffi::BlockKind::Remote => allocator.0.allocate_remote(bytes, stream),
                _ => allocator.0.allocate(bytes, stream, kind == ffi::BlockKind::Kept),
            }?;
            *block = at.0 as usize;
            Ok(())
        },
    )
}

fn is_shareable(allocator: &VmmTorchAllocator) -> bool {
    let mut shareable = false;
    guarded(
        || allocator.0.close_arena(),
        || {
            shareable = allocator.0.is_shareable();
            Ok(())
        },
    );
    shareable
}

fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            let readers = [Stream::LEGACY, stream_of(stream as *mut _)];
            let freed = allocator.0.free(Address(block as u64), different(&readers));
            // Torch frees in destructors, where nobody looks at a status.
            freed.inspect_err(|error| tracing::warn!(%error, "torch freed something that is not ours"))
        },
    )
}

fn launch_by_replay_only(allocator: &VmmTorchAllocator, only: bool) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            allocator.0.launch_by_replay_only(only);
            Ok(())
        },
    )
}

fn keep_as_before(allocator: &VmmTorchAllocator) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            allocator.0.keep_as_before();
            Ok(())
        },
    )
}

fn captured_on(allocator: &VmmTorchAllocator, stream: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            allocator.0.captured_on(stream_of(stream as *mut _));
            Ok(())
        },
    )
}

fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool {
    let mut contains = false;
    guarded(
        || allocator.0.close_arena(),
        || {
            contains = allocator.0.contains(Address(address as u64));
            Ok(())
        },
    );
    contains
}

fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize, own: &mut usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            let noted = allocator.0.record_stream(Address(block as u64), stream_of(stream as *mut _))?;
            *own = noted.map_or(0, |own| own.raw() as usize);
            Ok(())
        },
    )
}

fn free_parked(allocator: &VmmTorchAllocator, block: usize) -> i32 {
    guarded(|| allocator.0.close_arena(), || allocator.0.free_parked(Address(block as u64)))
}

/// Its last owner may be an entry of torch's table, so its end is a call too.
struct Workspace(Option<GuardedDrop<workspace::Workspace>>);

fn no_workspace() -> Box<Workspace> {
    Box::new(Workspace(None))
}

fn make_workspace(workspace: &mut Workspace, allocator: &VmmTorchAllocator, bytes: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            workspace.0 = Some(GuardedDrop::new(allocator.0.workspace(bytes as u64)?));
            Ok(())
        },
    )
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
    guarded(
        || allocator.0.close_arena(),
        || {
            let Some(workspace) = &workspace.0 else { return Ok(()) };
            *anywhere =
                allocator.0.use_workspace(workspace, (!*anywhere).then(|| stream_of(stream as *mut _)))?;
            Ok(())
        },
    )
}

fn keep_workspace(workspace: &Workspace) -> bool {
    workspace.0.as_ref().is_some_and(|workspace| workspace.keep())
}

fn leave_workspace(workspace: &Workspace, allocator: &VmmTorchAllocator) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            workspace.0.iter().for_each(|workspace| allocator.0.leave_workspace(workspace));
            Ok(())
        },
    )
}

/// What was freed meanwhile goes at its end.
struct Carry(Option<GuardedDrop<space::Carry>>);

fn no_carry() -> Box<Carry> {
    Box::new(Carry(None))
}

fn begin_carry(carry: &mut Carry, allocator: &VmmTorchAllocator, retain: i32) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            let policy = retain_of(retain)?.unwrap_or_default();
            carry.0 = Some(GuardedDrop::new(allocator.0.carry(policy)?));
            Ok(())
        },
    )
}

fn carried(carry: &Carry) -> Vec<ffi::CarriedBlock> {
    let blocks = carry.0.iter().flat_map(|carry| carry.blocks());
    blocks.map(|(at, bytes)| ffi::CarriedBlock { address: at.0 as usize, bytes: *bytes as usize }).collect()
}

//! The seam between the libtorch component (`cpp/torch`) and the core, by cxx. Private to the library that holds both: no `rust::`
//! type appears in an installed header, and none of these symbols is exported.
//!
//! What torch's allocators call crosses as a status, not as cxx's `Result`, which would lose the number; the details of a failure are
//! where C finds them (`vmmgraph_last_error`). A panic in there is a status too and closes the arena, as in the C functions: in
//! cxx it would end the process. Only looking a handle up is a `Result`, since it can fail in one way.

use std::sync::Arc;
use std::time::Duration;

use crate::capi::{
    GuardedDrop, arena_of, guarded, policy_of, region_of, retain_of, space_of, stream_of, vmmgraph_arena_t,
    vmmgraph_region_t, vmmgraph_space_t,
};
use crate::device::Device;
use crate::driver::{DriverChoice, Executable, Graph};
use crate::error::{Error, Result};
use crate::executables::{self, Limits};
use crate::region::Region;
use crate::space::{self, EagerBlocks, EagerEnd};
use crate::torch;
use crate::units::{Address, Peers, Stream};
use crate::workspace;

#[allow(unreachable_pub, reason = "cxx makes the structs public")]
#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// What `src/torch.rs` says, as C++ holds it.
        type VmmTorchAllocator;

        /// The CUDA number of the device of the arena behind a C handle; -1 if another driver opened it.
        fn cuda_device(arena: usize) -> Result<i32>;
        /// Bytes of the free pages of a CUDA device, if it is open.
        fn idle_bytes(device: i32) -> u64;
        /// Rings of a CUDA device, if it is open, that have units which stream; below 0: of the process's host device, which tests without a GPU have.
        fn streaming_rings(device: i32) -> u64;
        /// Gives back what nobody uses of a CUDA device, if it is open; bytes. Waits for nothing.
        fn give_back(device: i32) -> u64;
        /// Gives back what nobody uses of a CUDA device, if it is open, and asks reclaimers for what is missing of so many bytes; whether it is worth
        /// trying again. Waits for the device no longer than so many milliseconds, and as long for what they gave.
        fn make_room(device: i32, bytes: u64, milliseconds: u64) -> bool;
        /// Marks behind the last replays on a stream of a CUDA device, if it is open, before that is captured.
        fn mark_on(device: i32, stream: usize);
        /// A capture of torch's own begins on a CUDA device, if that is open.
        fn note_capture(device: i32);
        /// Lets a second CUDA device use all pages of one, also of arenas to come; the status.
        fn admit(device: i32, peer: i32) -> i32;
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
        /// Notes that a second stream uses a block; the status.
        fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32;

        /// A region, as C++ holds it for the tensors in it.
        type TorchRegion;

        /// The region behind a C handle, which this keeps alive.
        fn torch_region(region: usize) -> Result<Box<TorchRegion>>;
        /// The CUDA number of its device; -1 if another driver opened it.
        fn cuda_device_of(region: &TorchRegion) -> i32;
        /// Allocates for a stream, by a policy of `VMMGRAPH_POLICY_*`; the status, and the address in `block` if that is 0.
        fn allocate_in_region(
            region: &TorchRegion,
            bytes: usize,
            policy: i32,
            stream: usize,
            block: &mut usize,
        ) -> i32;
        /// Frees a block that the default stream and another one may still read; the status.
        fn release_to_region(region: &TorchRegion, block: usize, stream: usize) -> i32;
        /// Notes that a stream uses a block; the status.
        fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32;

        /// The blocks of an arena's eager work, as C++ holds them for the tensors in them.
        type EagerMemory;
        /// A scope of eager work, or none.
        type EagerTurn;

        /// The eager memory of the arena behind a C handle, whose blocks this keeps alive, and nothing else of it.
        fn eager_memory(arena: usize) -> Result<Box<EagerMemory>>;
        /// No scope.
        fn no_turn() -> Box<EagerTurn>;
        /// Begins eager work on a stream, of at most so many bytes if it is `limited`; the status.
        fn begin_eager(turn: &mut EagerTurn, arena: usize, stream: usize, limited: bool, bytes: u64) -> i32;
        /// Ends it, if it began and has not ended, on any thread; the status.
        fn end_eager(turn: &EagerTurn) -> i32;
        /// Allocates in the scope under way on a stream, as a kept block or not; the status, and the address in `block` if that is 0.
        fn allocate_eager(
            memory: &EagerMemory,
            bytes: usize,
            stream: usize,
            kept: bool,
            block: &mut usize,
        ) -> i32;
        /// Frees a block that the default stream and another one may still read, if its scope is over; the status.
        fn release_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32;
        /// Notes that a stream uses a block; the status.
        fn record_stream_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32;

        /// A pool of executables, as C++ holds it.
        type ExecutablePool;
        /// The graphs of one capture in it; empty before `add_graphs`.
        type GraphTemplate;

        /// A pool of the device of the arena behind a C handle. Limits of 0 are none.
        fn executable_pool(arena: usize, most: usize, most_bytes: u64) -> Result<Box<ExecutablePool>>;
        /// Changes its limits.
        fn set_executable_limits(pool: &ExecutablePool, most: usize, most_bytes: u64);
        /// Its limits and counts.
        fn executable_stats(pool: &ExecutablePool) -> ExecutableStats;
        /// What each class of it has, that which takes most first.
        fn executable_classes(pool: &ExecutablePool) -> Vec<ExecutableClass>;
        /// Bytes that so many executables of so many nodes in all would take on the device, by what others took.
        fn expected_executable_bytes(pool: &ExecutablePool, executables: u64, nodes: u64) -> u64;
        /// All of it in Prometheus's text format; labels are names and values in turn.
        fn executable_prometheus(pool: &ExecutablePool, labels: &[&str]) -> String;
        /// No graphs yet.
        fn no_template() -> Box<GraphTemplate>;
        /// Takes graphs (each a cudaGraph_t) into the pool; the status. They outlive the template.
        fn add_graphs(
            captured: &mut GraphTemplate,
            pool: &ExecutablePool,
            graphs: &[usize],
            own: bool,
        ) -> i32;
        /// The executables (each a cudaGraphExec_t) to launch, until `leave`; the status.
        fn enter(captured: &GraphTemplate, executables: &mut [usize]) -> i32;
        /// They were launched.
        fn leave(captured: &GraphTemplate);
        /// Makes or updates executables ahead of a replay, if there is one to spare; the status.
        fn wake(captured: &GraphTemplate, awake: &mut bool) -> i32;
        /// Its executables are never another's from now on.
        fn keep_executables(captured: &GraphTemplate);
        /// Notes that it may be launched soon; whether it has executables.
        fn expect(captured: &GraphTemplate) -> bool;
        /// Whether it has executables.
        fn is_awake(captured: &GraphTemplate) -> bool;
        /// Bytes that its executables take on the device, by what others took.
        fn executable_bytes(captured: &GraphTemplate) -> u64;
        /// Nodes of its graphs.
        fn template_nodes(captured: &GraphTemplate) -> u64;
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

    /// Graphs whose executables can be updated to one another.
    struct ExecutableClass {
        id: u64,
        graphs: u64,
        awake: u64,
        executables: u64,
        nodes: u64,
        bytes: u64,
    }

    /// Of a pool of executables: limits, where 0 is none, and counts.
    struct ExecutableStats {
        most: usize,
        most_bytes: u64,
        graphs: u64,
        awake: u64,
        executables: u64,
        nodes: u64,
        template_nodes: u64,
        bytes: u64,
        made: u64,
        updated: u64,
        refused: u64,
        dropped: u64,
        woken: u64,
        ready: u64,
        late: u64,
    }
}

/// The last tensor takes what is left of its space along, so its end is a call too.
struct VmmTorchAllocator(GuardedDrop<torch::VmmTorchAllocator>);

fn cuda_device(arena: usize) -> Result<i32> {
    Ok(cuda_number(arena_of(arena as vmmgraph_arena_t)?.device()))
}

/// The CUDA number of a device; -1 if another driver opened it.
fn cuda_number(device: &Device) -> i32 {
    let info = device.driver().info();
    if DriverChoice::Named(info.platform) == DriverChoice::CUDA { info.ordinal } else { -1 }
}

fn idle_bytes(device: i32) -> u64 {
    of_device(DriverChoice::CUDA, device, |device| device.stats().free_bytes)
}

fn streaming_rings(device: i32) -> u64 {
    let choice = if device < 0 { DriverChoice::HOST } else { DriverChoice::CUDA };
    of_device(choice, device.max(0), Device::streaming_rings)
}

fn give_back(device: i32) -> u64 {
    of_device(DriverChoice::CUDA, device, |device| device.give_back(Duration::ZERO))
}

fn make_room(device: i32, bytes: u64, milliseconds: u64) -> bool {
    let limit = Duration::from_millis(milliseconds);
    of_device(DriverChoice::CUDA, device, |device| device.make_room(bytes, limit))
}

fn mark_on(device: i32, stream: usize) {
    // Whoever replays there next is told what stands in the way.
    of_device(DriverChoice::CUDA, device, |device| drop(device.mark(stream_of(stream as *mut _))));
}

fn note_capture(device: i32) {
    of_device(DriverChoice::CUDA, device, Device::note_capture);
}

fn admit(device: i32, peer: i32) -> i32 {
    let DriverChoice::Named(platform) = DriverChoice::CUDA else { return 0 };
    guarded(|| (), || Device::admit_to(platform, device, Peers::one(peer)))
}

/// What a platform's device answers; 0 or no if it is not open.
fn of_device<T: Default>(choice: DriverChoice<'static>, device: i32, ask: impl FnOnce(&Device) -> T) -> T {
    let mut found = T::default();
    let DriverChoice::Named(platform) = choice else { return found };
    guarded(
        || (),
        || {
            found = Device::opened(platform, device).map_or_else(T::default, |device| ask(&device));
            Ok(())
        },
    );
    found
}

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

/// Two streams, or the one that both are.
fn different(streams: &[Stream; 2]) -> &[Stream] {
    if streams[0] == streams[1] { &streams[..1] } else { streams }
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

fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || allocator.0.record_stream(Address(block as u64), stream_of(stream as *mut _)),
    )
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

/// The last tensor takes a region along whose handle is gone, so its end is a call too.
struct TorchRegion(GuardedDrop<Arc<Region>>);

fn torch_region(region: usize) -> Result<Box<TorchRegion>> {
    Ok(Box::new(TorchRegion(GuardedDrop::new(region_of(region as vmmgraph_region_t)?))))
}

fn cuda_device_of(region: &TorchRegion) -> i32 {
    cuda_number(region.0.device())
}

fn allocate_in_region(
    region: &TorchRegion,
    bytes: usize,
    policy: i32,
    stream: usize,
    block: &mut usize,
) -> i32 {
    guarded(
        || (),
        || {
            let (bytes, stream) = (bytes as u64, stream_of(stream as *mut _));
            let at = match policy_of(policy)? {
                Some(policy) => region.0.allocate_as(bytes, policy, stream),
                None => region.0.allocate(bytes, stream),
            }?;
            *block = at.0 as usize;
            Ok(())
        },
    )
}

fn release_to_region(region: &TorchRegion, block: usize, stream: usize) -> i32 {
    guarded(
        || (),
        || {
            let (at, readers) = (Address(block as u64), [Stream::LEGACY, stream_of(stream as *mut _)]);
            // A program may drop a tensor right after work that reads it: torch's own memory stays mapped, and so must this.
            let noted = different(&readers).iter().try_for_each(|reader| region.0.record_stream(at, *reader));
            let freed = noted.and_then(|()| region.0.free(at));
            freed.inspect_err(|error| tracing::warn!(%error, "torch freed something that is not ours"))
        },
    )
}

fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32 {
    guarded(|| (), || region.0.record_stream(Address(block as u64), stream_of(stream as *mut _)))
}

/// The last tensor takes what is left of it along, so its end is a call too.
struct EagerMemory(GuardedDrop<EagerBlocks>);

/// An eager scope that has begun, and may have ended.
struct EagerTurn(Option<GuardedDrop<EagerEnd>>);

fn eager_memory(arena: usize) -> Result<Box<EagerMemory>> {
    let blocks = arena_of(arena as vmmgraph_arena_t)?.eager_blocks();
    Ok(Box::new(EagerMemory(GuardedDrop::new(blocks))))
}

fn no_turn() -> Box<EagerTurn> {
    Box::new(EagerTurn(None))
}

fn begin_eager(turn: &mut EagerTurn, arena: usize, stream: usize, limited: bool, bytes: u64) -> i32 {
    guarded(
        || {
            if let Ok(arena) = arena_of(arena as vmmgraph_arena_t) {
                arena.close();
            }
        },
        || {
            let arena = arena_of(arena as vmmgraph_arena_t)?;
            let stream = stream_of(stream as *mut _);
            let scope = if limited { arena.eager_scope_of(stream, bytes) } else { arena.eager_scope(stream) };
            turn.0 = Some(GuardedDrop::new(scope?.into_end()));
            Ok(())
        },
    )
}

fn end_eager(turn: &EagerTurn) -> i32 {
    guarded(|| (), || turn.0.as_ref().map_or(Ok(()), |scope| scope.end()))
}

fn allocate_eager(memory: &EagerMemory, bytes: usize, stream: usize, kept: bool, block: &mut usize) -> i32 {
    guarded(
        || memory.0.close_arena(),
        || {
            *block = memory.0.allocate(bytes as u64, stream_of(stream as *mut _), kept)?.0 as usize;
            Ok(())
        },
    )
}

fn release_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32 {
    guarded(
        || memory.0.close_arena(),
        || {
            let readers = [Stream::LEGACY, stream_of(stream as *mut _)];
            let freed = memory.0.free(Address(block as u64), different(&readers));
            freed.inspect_err(|error| tracing::warn!(%error, "torch freed something that is not ours"))
        },
    )
}

fn record_stream_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32 {
    guarded(
        || memory.0.close_arena(),
        || memory.0.record_stream(Address(block as u64), stream_of(stream as *mut _)),
    )
}

/// Its end destroys executables, which is a call too.
struct ExecutablePool(GuardedDrop<Arc<executables::ExecutablePool>>);

/// What closes a template's pool after a panic, and the template.
struct GraphTemplate(Option<GuardedDrop<executables::GraphTemplate>>);

fn limits(most: usize, most_bytes: u64) -> Limits {
    Limits { most: (most > 0).then_some(most), most_bytes: (most_bytes > 0).then_some(most_bytes) }
}

fn executable_pool(arena: usize, most: usize, most_bytes: u64) -> Result<Box<ExecutablePool>> {
    let arena = arena_of(arena as vmmgraph_arena_t)?;
    let driver = Arc::clone(arena.device().driver());
    let pool = executables::ExecutablePool::new(driver, limits(most, most_bytes))?;
    Ok(Box::new(ExecutablePool(GuardedDrop::new(pool))))
}

fn set_executable_limits(pool: &ExecutablePool, most: usize, most_bytes: u64) {
    guarded(
        || pool.0.close(),
        || {
            pool.0.set_limits(limits(most, most_bytes));
            Ok(())
        },
    );
}

fn executable_stats(pool: &ExecutablePool) -> ffi::ExecutableStats {
    let (mut stats, mut limits) = (executables::ExecutableStats::default(), Limits::default());
    guarded(
        || pool.0.close(),
        || {
            (stats, limits) = (pool.0.stats(), pool.0.limits());
            Ok(())
        },
    );
    let executables::ExecutableStats { graphs, awake, now, template_nodes, bytes, counts } = stats;
    ffi::ExecutableStats {
        most: limits.most.unwrap_or(0),
        most_bytes: limits.most_bytes.unwrap_or(0),
        graphs,
        awake,
        executables: now.executables,
        nodes: now.nodes,
        template_nodes,
        bytes,
        made: counts.made,
        updated: counts.updated,
        refused: counts.refused,
        dropped: counts.dropped,
        woken: counts.woken,
        ready: counts.ready,
        late: counts.late,
    }
}

fn executable_classes(pool: &ExecutablePool) -> Vec<ffi::ExecutableClass> {
    let mut classes = Vec::new();
    guarded(
        || pool.0.close(),
        || {
            classes = pool.0.classes();
            Ok(())
        },
    );
    let class = |class: executables::ExecutableClass| {
        let executables::ExecutableClass { id, graphs, awake, now, bytes } = class;
        ffi::ExecutableClass { id, graphs, awake, executables: now.executables, nodes: now.nodes, bytes }
    };
    classes.into_iter().map(class).collect()
}

fn expected_executable_bytes(pool: &ExecutablePool, executables: u64, nodes: u64) -> u64 {
    let mut bytes = 0;
    guarded(
        || pool.0.close(),
        || {
            bytes = pool.0.expected_bytes(executables::Size { executables, nodes });
            Ok(())
        },
    );
    bytes
}

fn executable_prometheus(pool: &ExecutablePool, labels: &[&str]) -> String {
    let mut text = String::new();
    let pairs: Vec<_> = labels.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect();
    guarded(
        || pool.0.close(),
        || {
            text = pool.0.prometheus(&pairs);
            Ok(())
        },
    );
    text
}

fn no_template() -> Box<GraphTemplate> {
    Box::new(GraphTemplate(None))
}

fn add_graphs(captured: &mut GraphTemplate, pool: &ExecutablePool, graphs: &[usize], own: bool) -> i32 {
    guarded(
        || pool.0.close(),
        || {
            // SAFETY: cpp/torch gives the graphs of captures that have ended, which it keeps longer than the template.
            let graphs: Vec<Graph> =
                graphs.iter().map(|graph| unsafe { Graph::from_raw(*graph as u64) }).collect();
            // SAFETY: as above.
            captured.0 = Some(GuardedDrop::new(unsafe { pool.0.add(&graphs, own) }?));
            Ok(())
        },
    )
}

/// A call with what is behind a template, if there is something.
fn with_template<T>(
    captured: &GraphTemplate,
    call: impl FnOnce(&executables::GraphTemplate) -> Result<T>,
) -> (i32, Option<T>) {
    let mut result = None;
    let close = || {
        if let Some(template) = &captured.0 {
            template.pool().close()
        }
    };
    let status = guarded(close, || {
        let state = |found| Error::WrongState { what: "the template", expected: "one with graphs", found };
        let template = captured.0.as_ref().ok_or_else(|| state("empty"))?;
        result = Some(call(template)?);
        Ok(())
    });
    (status, result)
}

fn enter(captured: &GraphTemplate, executables: &mut [usize]) -> i32 {
    with_template(captured, |template| {
        template.enter(|place, executable: Executable| {
            if let Some(to) = executables.get_mut(place) {
                *to = executable.raw() as usize;
            }
        })
    })
    .0
}

fn leave(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.leave();
        Ok(())
    });
}

fn wake(captured: &GraphTemplate, awake: &mut bool) -> i32 {
    let (status, woken) = with_template(captured, |template| template.wake());
    *awake = woken.unwrap_or(false);
    status
}

fn keep_executables(captured: &GraphTemplate) {
    with_template(captured, |template| {
        template.keep();
        Ok(())
    });
}

fn expect(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.expect())).1.unwrap_or(false)
}

fn is_awake(captured: &GraphTemplate) -> bool {
    with_template(captured, |template| Ok(template.is_awake())).1.unwrap_or(false)
}

fn executable_bytes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.bytes())).1.unwrap_or(0)
}

fn template_nodes(captured: &GraphTemplate) -> u64 {
    with_template(captured, |template| Ok(template.size().nodes)).1.unwrap_or(0)
}

//! Blocks of an arena's eager work for torch's allocator. Functions return a status.

use vmmgraph::capi::{GuardedDrop, arena_of, guarded, stream_of, vmmgraph_arena_t};
use vmmgraph::{Address, EagerBlocks, EagerEnd, Result, Stream};

use super::different;

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        type EagerMemory;

        type EagerScopeHandle;
        /// Keeps its blocks alive, not the arena.
        fn eager_memory(arena: usize) -> Result<Box<EagerMemory>>;
        fn no_eager_scope() -> Box<EagerScopeHandle>;
        /// Begins eager work, of at most `bytes` bytes if `limited`.
        fn begin_eager(
            handle: &mut EagerScopeHandle,
            arena: usize,
            stream: usize,
            limited: bool,
            bytes: u64,
        ) -> i32;
        /// Ends the scope, on any thread.
        fn end_eager(handle: &EagerScopeHandle) -> i32;
        /// Allocates in the active scope of the stream.
        fn allocate_eager(
            memory: &EagerMemory,
            bytes: usize,
            stream: usize,
            kept: bool,
            block: &mut usize,
        ) -> i32;
        /// Frees a block, which the default stream and `stream` may still read after its scope.
        fn release_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32;
        fn record_stream_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32;
    }
}

/// Dropping the last tensor may free memory, so the drop is guarded like a call.
struct EagerMemory(GuardedDrop<EagerBlocks>);

struct EagerScopeHandle(Option<GuardedDrop<EagerEnd>>);

fn eager_memory(arena: usize) -> Result<Box<EagerMemory>> {
    let blocks = arena_of(arena as vmmgraph_arena_t)?.eager_blocks();
    Ok(Box::new(EagerMemory(GuardedDrop::new(blocks))))
}

fn no_eager_scope() -> Box<EagerScopeHandle> {
    Box::new(EagerScopeHandle(None))
}

fn begin_eager(handle: &mut EagerScopeHandle, arena: usize, stream: usize, limited: bool, bytes: u64) -> i32 {
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
            handle.0 = Some(GuardedDrop::new(scope?.into_end()));
            Ok(())
        },
    )
}

fn end_eager(handle: &EagerScopeHandle) -> i32 {
    guarded(|| (), || handle.0.as_ref().map_or(Ok(()), |scope| scope.end()))
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
            freed.inspect_err(
                |error| tracing::warn!(%error, "torch freed an address without a block of this library"),
            )
        },
    )
}

fn record_stream_eager(memory: &EagerMemory, block: usize, stream: usize) -> i32 {
    guarded(
        || memory.0.close_arena(),
        || memory.0.record_stream(Address(block as u64), stream_of(stream as *mut _)),
    )
}

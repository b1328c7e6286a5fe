//! Blocks of an arena's eager work, as torch's allocator calls for them.

use super::different;
use crate::capi::{GuardedDrop, arena_of, guarded, stream_of, vmmgraph_arena_t};
use crate::error::Result;
use crate::space::{EagerBlocks, EagerEnd};
use crate::units::{Address, Stream};

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
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
    }
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

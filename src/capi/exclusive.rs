//! Memory of an arena that nothing else shares.

use std::ffi::c_void;

use super::arena::{vmmgraph_arena_t, with};
use super::guard::out;
use super::share::{copy_extents, vmmgraph_page_extent_t};
use super::status::vmmgraph_status_t;
use crate::Address;

/// Allocates an exclusive block: one page of its own, mapped at addresses of its own until it is freed or the arena and all its spaces are gone. No graph
/// shares it, nothing else lies on it, poison does not fill it, and no seal, lending or eager work moves it; a pause of the arena leaves it where it is,
/// with its memory. For what peers write without waiting for this device, and for what keeps its contents from replay to replay: workspaces, signal pads,
/// windows that a library registers. It is zero when this returns, for any stream and any peer: waits for one fill. Before a capture, rather than in one:
/// on platforms where nobody may wait while something is captured it is VMMGRAPH_ERROR_STREAM_CAPTURING then.
///
/// granularity, a power of two and a multiple of the device's, is what its address and its bytes, rounded up, are multiples of; 0: a small page's
/// bytes; what cannot be one is VMMGRAPH_ERROR_INVALID_SIZE. It counts toward the arena's budget.
///
/// # Safety
/// `block` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_allocate_exclusive(
    arena: vmmgraph_arena_t,
    bytes: u64,
    granularity: u64,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let block = unsafe { out(block, "block") }?;
        *block = arena.allocate_exclusive(bytes, granularity)?.0 as *mut c_void;
        Ok(())
    })
}

/// Frees an exclusive block. Its memory goes behind the arena's replays so far; other work that uses it is over by now, and peers have closed it, or it stays
/// theirs (vmmgraph_device_page_exported). VMMGRAPH_ERROR_FOREIGN_POINTER for what is none, or none any more.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_free_exclusive(
    arena: vmmgraph_arena_t,
    block: *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.free_exclusive(Address(block as u64))?))
}

/// The page behind an exclusive block or a part of it, as vmmgraph_space_export says it of a space's blocks: one extent. It is the same for as long as the block
/// lives, and can be exported at any time.
///
/// # Safety
/// `extents` points to `capacity` writable items, or `capacity` is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_export(
    arena: vmmgraph_arena_t,
    base: *mut c_void,
    bytes: u64,
    extents: *mut vmmgraph_page_extent_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        let found = arena.export(Address(base as u64), bytes)?;
        // SAFETY: the caller's contract.
        unsafe { copy_extents(&found, extents, capacity, count) }
    })
}

use std::ffi::c_void;

use super::arena::{vmmgraph_arena_t, with};
use super::guard::out;
use super::share::{copy_extents, vmmgraph_page_extent_t};
use super::status::vmmgraph_status_t;
use crate::Address;

/// Allocates a private (exclusive) block on its own page, until the block is freed or the arena and
/// its spaces are destroyed. No graph shares the page, poison does not fill it, and no seal,
/// lending, eager work or pause moves or releases it. For memory written by peers without waiting
/// for this device, and for contents kept between replays: workspaces, signal pads, registered
/// windows. Waits until the block is zero for every stream and peer. Allocate before a capture:
/// platforms which forbid waits then return VMMGRAPH_ERROR_STREAM_CAPTURING. `granularity`, a power
/// of two and a multiple of the device's, divides the address and the rounded length; 0: a small
/// page; else VMMGRAPH_ERROR_INVALID_SIZE. The block counts toward the arena's budget.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_allocate_exclusive(
    arena: vmmgraph_arena_t,
    bytes: u64,
    granularity: u64,
    block: *mut *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
        let block = unsafe { out(block, "block") }?;
        *block = arena.allocate_exclusive(bytes, granularity)?.0 as *mut c_void;
        Ok(())
    })
}

/// Frees a private (exclusive) block after the arena's replays so far. Other work on the block must
/// be complete. Peers must have closed its page, or the page stays pinned
/// (vmmgraph_device_page_exported).
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_free_exclusive(
    arena: vmmgraph_arena_t,
    block: *mut c_void,
) -> vmmgraph_status_t {
    with(arena, |arena| Ok(arena.free_exclusive(Address(block as u64))?))
}

/// As vmmgraph_space_export, for a private (exclusive) block or a part of it. The page is the same
/// for the block's life.
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
        // SAFETY: contract.
        unsafe { copy_extents(&found, extents, capacity, count) }
    })
}

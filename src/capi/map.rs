//! Page map in C: the pages of each space as JSON, web page, table and timeline.

use std::ffi::c_char;

use super::arena::{vmmgraph_arena_t, with};
use super::guard::{Failure, guard};
use super::sized::options;
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::ArenaMap;

/// Options of vmmgraph_arena_map_json: facts unknown to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_map_options_t {
    /// sizeof(vmmgraph_map_options_t).
    pub struct_size: usize,
    /// Bytes of device memory used by graph executables, outside every pool; 0: unknown.
    pub executables_bytes: u64,
    /// Title for people, such as engine and rank; may be null.
    pub title: *const c_char,
}

/// Copies the page map as one JSON object: pages mapped by each space, bytes covered by blocks at
/// its peak, bytes freed by destroying it, and other users of device memory. The keys ("format": 1)
/// are documented in docs/map.md and at vmmgraph::map::ArenaMap in the Rust documentation.
/// `options` may be null. Queries every space and walks the device's pages, and stops no work: the
/// arena may change between two calls.
///
/// # Safety
/// `options` is null or points to a struct with struct_size set and a null or zero-terminated
/// title; `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_map_json(
    arena: vmmgraph_arena_t,
    options: *const vmmgraph_map_options_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let given = unsafe { self::options(options) }?;
        let mut map = arena.map();
        if let Some(given) = given {
            map.executables_bytes = (given.executables_bytes > 0).then_some(given.executables_bytes);
            if !given.title.is_null() {
                // SAFETY: the caller's contract.
                map.title = unsafe { text(given.title, "title") }?;
            }
        }
        // SAFETY: the caller's contract.
        unsafe { copy_text(&map.to_json(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Enables (`on` is not 0) or disables event tracing: spaces opened from now on record every
/// allocation and free of a block, for the map's view of one capture. Also enabled by
/// VMMGRAPH_TRACE_EVENTS=1 in the environment. Costs host memory for each block while the space
/// exists.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_trace_events(arena: vmmgraph_arena_t, on: i32) -> vmmgraph_status_t {
    with(arena, |arena| {
        arena.trace_events(on != 0);
        Ok(())
    })
}

/// Renders the JSON text of a map.
///
/// # Safety
/// As vmmgraph_map_html.
unsafe fn rendered(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
    render: impl FnOnce(&ArenaMap) -> String,
) -> Result<(), Failure> {
    // SAFETY: the caller's contract.
    let map = ArenaMap::from_json(&unsafe { text(map, "map") }?)?;
    // SAFETY: the caller's contract.
    unsafe { copy_text(&render(&map), buffer, capacity, needed) };
    Ok(())
}

/// Renders a map, the JSON text of vmmgraph_arena_map_json, as one self-contained web page. Needs
/// no device. VMMGRAPH_ERROR_INVALID_ARGUMENT if the text is no map, or a map of another format.
///
/// # Safety
/// `map` is null or a zero-terminated string; `buffer` is null or points to `capacity` writable
/// bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_html(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::to_html) })
}

/// As vmmgraph_map_html, as a plain text table for logs: three lines of summary, and a line for
/// each of the 40 largest graph shapes.
///
/// # Safety
/// As vmmgraph_map_html.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_report(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::report) })
}

/// As vmmgraph_map_html, as a timeline of the captures in the trace event format, for Perfetto: a
/// slice per capture, and counters.
///
/// # Safety
/// As vmmgraph_map_html.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_perfetto(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::to_perfetto) })
}

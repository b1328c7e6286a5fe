use std::ffi::c_char;

use super::arena::{vmmgraph_arena_t, with};
use super::guard::{Failure, guard};
use super::sized::options;
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::ArenaMap;

/// Facts unknown to the library.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_map_options_t {
    pub struct_size: usize,
    /// Device memory of graph executables, outside every pool; 0: unknown.
    pub executables_bytes: u64,
    /// Title for people, such as engine and rank; may be null.
    pub title: *const c_char,
}

/// Copies the page map as JSON: pages mapped by each space, bytes covered by blocks at its peak,
/// bytes freed by destroying it, other users of device memory. docs/map.md documents the keys
/// ("format": 1). `options` may be null. Stops no work: the arena may change between two calls.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_map_json(
    arena: vmmgraph_arena_t,
    options: *const vmmgraph_map_options_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
        let given = unsafe { self::options(options) }?;
        let mut map = arena.map();
        if let Some(given) = given {
            map.executables_bytes = (given.executables_bytes > 0).then_some(given.executables_bytes);
            if !given.title.is_null() {
                // SAFETY: contract.
                map.title = unsafe { text(given.title, "title") }?;
            }
        }
        // SAFETY: contract.
        unsafe { copy_text(&map.to_json(), buffer, capacity, needed) };
        Ok(())
    })
}

/// Enables or disables event tracing: later spaces record every allocation and free, for the map's
/// view of one capture. Also VMMGRAPH_TRACE_EVENTS=1 in the environment. Costs host memory for each
/// block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_trace_events(arena: vmmgraph_arena_t, on: i32) -> vmmgraph_status_t {
    with(arena, |arena| {
        arena.trace_events(on != 0);
        Ok(())
    })
}

unsafe fn rendered(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
    render: impl FnOnce(&ArenaMap) -> String,
) -> Result<(), Failure> {
    // SAFETY: contract.
    let map = ArenaMap::from_json(&unsafe { text(map, "map") }?)?;
    // SAFETY: contract.
    unsafe { copy_text(&render(&map), buffer, capacity, needed) };
    Ok(())
}

/// Renders a map, the JSON text of vmmgraph_arena_map_json, as one self-contained web page. Needs
/// no device. VMMGRAPH_ERROR_INVALID_ARGUMENT for any other text or format.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_html(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::to_html) })
}

/// As vmmgraph_map_html, as a text table for logs: a summary of three lines, and the 40 largest
/// graph shapes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_report(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::report) })
}

/// As vmmgraph_map_html, as a timeline in the trace event format, for Perfetto.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_map_perfetto(
    map: *const c_char,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { rendered(map, buffer, capacity, needed, ArenaMap::to_perfetto) })
}

//! The page map: which graph shows which page, as JSON, as a web page, as text.

use std::ffi::c_char;

use super::arena::{vmmgraph_arena_t, with};
use super::guard::{Failure, guard};
use super::sized::options;
use super::status::vmmgraph_status_t;
use super::text::{copy_text, text};
use crate::ArenaMap;

/// What a map says that the library does not know. Zero everything, then set struct_size and what is known.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_map_options_t {
    /// sizeof(vmmgraph_map_options_t).
    pub struct_size: usize,
    /// What the graphs' executables took of the device, which is outside every pool; 0: not known.
    pub executables_bytes: u64,
    /// A line for people: which engine, which rank. Copied; may be null.
    pub title: *const c_char,
}

/// Which space shows which page of the arena, what blocks covered at each one's peak, what dropping one gives back, and who else has
/// memory of the device, as one JSON object ("format": 1; its keys: vmmgraph::map::ArenaMap in the Rust documentation, docs/map.md).
/// `options` may be null. Asks every space and walks the device's pages; nothing is stopped for it. Copies as
/// vmmgraph_last_error_message does; the arena may have changed between two calls.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set, and its title is null or a zero-terminated string; `buffer` is
/// null or points to `capacity` writable bytes; `needed` is null or writable.
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

/// Spaces that are opened from now on note every block that comes and goes (`on` is not 0), or do not, for the map's view of one
/// capture; also on with VMMGRAPH_TRACE_EVENTS=1 in the environment. Costs host memory for every block, as long as the space is there.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_trace_events(arena: vmmgraph_arena_t, on: i32) -> vmmgraph_status_t {
    with(arena, |arena| {
        arena.trace_events(on != 0);
        Ok(())
    })
}

/// What becomes of a map's JSON text.
///
/// # Safety
/// As [`vmmgraph_map_html`].
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

/// A web page of a map, given as the JSON text of vmmgraph_arena_map_json: one file that fetches nothing. Needs no device.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT for what is no map, or one of another format. Copies as vmmgraph_last_error_message does.
///
/// # Safety
/// `map` is null or a zero-terminated string; `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
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

/// A map as a table of plain text that fits a log: three lines that say the most, and a line for each of the 40 hungriest shapes. As
/// vmmgraph_map_html beyond that.
///
/// # Safety
/// As [`vmmgraph_map_html`].
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

/// The captures of a map as a timeline in the trace event format, which Perfetto opens: a slice for each, and counters. As
/// vmmgraph_map_html beyond that.
///
/// # Safety
/// As [`vmmgraph_map_html`].
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

//! Arenas that are paused, as regions are, and whose pages are made to fit.

use std::time::Duration;

use super::arena::{vmmgraph_arena_t, with};
use super::pause::{
    fence_of, vmmgraph_fence_t, vmmgraph_pause_report_t, vmmgraph_resume_report_t, wanted, write_pause,
    write_resume,
};
use super::status::vmmgraph_status_t;

/// Gives all of the arena's memory back to the driver; addresses stay, and graphs over them stay instantiated. Bytes of retained and kept
/// blocks go to the host and come back with vmmgraph_arena_resume; what lies on shared pages is lost, as it is between replays. Waits for
/// the fence (null: nothing), the arena's replays and what was given to the streams noted for blocks.
///
/// While it is paused, replays and new spaces are VMMGRAPH_ERROR_WRONG_STATE; blocks may be freed, spaces and the arena destroyed. Goes on
/// past failures as vmmgraph_device_pause does, and so for arenas with a tag or no tags asked for. While a space is open, or inside a launch
/// of the arena, it is VMMGRAPH_ERROR_WRONG_STATE; while a stream it waits for is being captured, VMMGRAPH_ERROR_STREAM_CAPTURING; nothing has
/// changed then. `report` may be null.
///
/// # Safety
/// `fence` and `report` as in vmmgraph_device_pause.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_pause(
    arena: vmmgraph_arena_t,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let (fence, to) = unsafe { (fence_of(arena.device(), fence)?, wanted(report)?) };
        let report = arena.pause(fence)?;
        write_pause(to.as_ref(), &report);
        Ok(report.complete()?)
    })
}

/// Brings the arena's memory back, to the same addresses, and returns when the contents are there. While there is no memory it asks again
/// until the deadline, in microseconds from now; 0: as an allocation does. On failure the arena is paused as before, the host has the
/// contents, and the call can be repeated. `report` may be null.
///
/// # Safety
/// `report` as in vmmgraph_device_pause.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_resume(
    arena: vmmgraph_arena_t,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let to = unsafe { wanted(report) }?;
        write_resume(to.as_ref(), &arena.resume(Duration::from_micros(deadline_micros))?);
        Ok(())
    })
}

/// Replaces large pages of which the arena's graphs use little by small ones, where that saves a thirty-second of their shared pages at least. For
/// arenas whose page size nobody chose (expected_bytes): call it once when all captures are made. Addresses stay, and graphs over them stay
/// instantiated; what shared pages hold is lost, as it is between replays. Waits as vmmgraph_arena_pause does, and replays and new spaces
/// are VMMGRAPH_ERROR_WRONG_STATE meanwhile. The large pages are the device's then: vmmgraph_arena_trim gives them to the driver. `saved`
/// (may be null) receives how many bytes fewer the arena holds.
///
/// It needs memory for the small pages before the large ones are free: VMMGRAPH_ERROR_OUT_OF_MEMORY or VMMGRAPH_ERROR_OVER_BUDGET without; some
/// spaces show small pages then, and the call can be repeated. While the arena is paused or has pages on lease, and as vmmgraph_arena_pause says,
/// it is refused, and nothing has changed.
///
/// # Safety
/// `fence` as in vmmgraph_device_pause; `saved` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_shrink_to_fit(
    arena: vmmgraph_arena_t,
    fence: *const vmmgraph_fence_t,
    saved: *mut u64,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: the caller's contract.
        let fence = unsafe { fence_of(arena.device(), fence)? };
        let bytes = arena.shrink_to_fit(fence)?;
        if !saved.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *saved = bytes };
        }
        Ok(())
    })
}

use super::arena::{vmmgraph_arena_t, with};
use super::pause::{
    fence_of, pause_with, resume_with, vmmgraph_fence_t, vmmgraph_pause_report_t, vmmgraph_resume_report_t,
};
use super::status::vmmgraph_status_t;

/// Pauses an arena: releases its memory, except private (exclusive) blocks. Addresses stay
/// reserved, and graphs instantiated. Contents of live-out and persistent (kept) blocks are copied
/// to the host; contents of shared pages are lost, as between replays. Waits for the fence, the
/// arena's replays, and the streams recorded for blocks. Until vmmgraph_arena_resume, replays and
/// new spaces are VMMGRAPH_ERROR_WRONG_STATE; blocks may be freed, and spaces and the arena
/// destroyed. Continues after a failure as vmmgraph_device_pause. Refused, with state unchanged:
/// VMMGRAPH_ERROR_WRONG_STATE while a space is open, inside a launch of the arena, and while pages
/// are on lease or pinned; VMMGRAPH_ERROR_STREAM_CAPTURING while a stream to wait for is under
/// capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_pause(
    arena: vmmgraph_arena_t,
    fence: *const vmmgraph_fence_t,
    report: *mut vmmgraph_pause_report_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    with(arena, |arena| unsafe { pause_with(arena.device(), fence, report, |fence| arena.pause(fence)) })
}

/// Resumes an arena at the same addresses, with its contents. Deadline and failures as for
/// vmmgraph_device_resume.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_resume(
    arena: vmmgraph_arena_t,
    deadline_micros: u64,
    report: *mut vmmgraph_resume_report_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    with(arena, |arena| unsafe { resume_with(deadline_micros, report, |deadline| arena.resume(deadline)) })
}

/// Replaces sparsely used large pages by small ones, if at least 1/32 of the shared pages is saved.
/// For arenas without a chosen page size: call once after all captures. Addresses and graphs stay;
/// contents of shared pages are lost. Waits, and is refused, as vmmgraph_arena_pause, also while
/// paused; meanwhile replays and new spaces are VMMGRAPH_ERROR_WRONG_STATE. The large pages become
/// free pages of the device (vmmgraph_arena_trim). `saved` receives the bytes saved. The small
/// pages are allocated before the large ones are free. After VMMGRAPH_ERROR_OUT_OF_MEMORY or
/// VMMGRAPH_ERROR_OVER_BUDGET, some spaces use small pages; the call can be repeated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_shrink_to_fit(
    arena: vmmgraph_arena_t,
    fence: *const vmmgraph_fence_t,
    saved: *mut u64,
) -> vmmgraph_status_t {
    with(arena, |arena| {
        // SAFETY: contract.
        let fence = unsafe { fence_of(arena.device(), fence)? };
        let bytes = arena.shrink_to_fit(fence)?;
        if !saved.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *saved = bytes };
        }
        Ok(())
    })
}

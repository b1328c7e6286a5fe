//! The order of replays across ranks in C.

use super::arena::{self, vmmgraph_arena_t};
use super::guard::out;
use super::status::vmmgraph_status_t;

/// How many replays of an arena were launched, eager scopes among them: the same on ranks that replay alike. Inside a launch it is the number of
/// that replay.
///
/// # Safety
/// `replays` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_replay_seq(
    arena: vmmgraph_arena_t,
    replays: *mut u64,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: the caller's contract.
        let replays = unsafe { out(replays, "replays") }?;
        *replays = arena.replay_seq();
        Ok(())
    })
}

/// Lets the next replay of an arena with VMMGRAPH_ARENA_SERIAL say anew on which stream and thread all later ones have to be. Waits for the
/// end of a replay or scope that another thread is at; inside one of this thread it is VMMGRAPH_ERROR_WRONG_STATE. The replays of the new
/// place wait for those before, as in any arena. Without effect in an arena that is not serial.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_lift_serial(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    arena::with(arena, |arena| Ok(arena.lift_serial()?))
}

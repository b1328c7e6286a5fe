use super::arena::{self, vmmgraph_arena_t};
use super::guard::out;
use super::status::vmmgraph_status_t;

/// Writes the number of replays launched in an arena, eager scopes included; equal on ranks with
/// equal replays. Inside a launch: the current replay's number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_replay_seq(
    arena: vmmgraph_arena_t,
    replays: *mut u64,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: contract.
        let replays = unsafe { out(replays, "replays") }?;
        *replays = arena.replay_seq();
        Ok(())
    })
}

/// Unbinds an arena with VMMGRAPH_ARENA_SERIAL from its stream and thread; the next replay binds it
/// again, and still waits for earlier ones. Waits for a replay or eager scope in progress on
/// another thread. VMMGRAPH_ERROR_WRONG_STATE inside a replay of this thread.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_lift_serial(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    arena::with(arena, |arena| Ok(arena.lift_serial()?))
}

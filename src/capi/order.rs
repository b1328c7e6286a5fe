//! Order of replays across ranks in C.

use std::ffi::c_void;

use super::arena::{self, vmmgraph_arena_t};
use super::guard::{Failure, null, out};
use super::sized::OutStruct;
use super::space::{self, vmmgraph_space_t};
use super::status::vmmgraph_status_t;
use crate::error::{Error, Result};
use crate::{Agreement, SharedVmmAllocator};

/// Bytes per rank in the all-gather of vmmgraph_arena_compare_order and vmmgraph_arena_agree_on.
pub const VMMGRAPH_ORDER_DIGEST_BYTES: usize = 2080;
const _: () = assert!(VMMGRAPH_ORDER_DIGEST_BYTES == SharedVmmAllocator::digest_bytes());

/// All-gather of the engine: writes the `bytes` bytes of each rank to `all`, in the order of the
/// rank numbers; `mine` is this rank's part. Returns 0 on success. No library lock is held: the
/// callback may call every function. The engine must bound its duration, for example by a timeout
/// of its process group. Must not throw.
pub type vmmgraph_gather_fn = Option<
    unsafe extern "C" fn(mine: *const c_void, bytes: usize, all: *mut c_void, user: *mut c_void) -> i32,
>;

/// Result of comparing the replays of several ranks; equal on all ranks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_order_report_t {
    /// Set to sizeof(vmmgraph_order_report_t) before the call.
    pub struct_size: usize,
    /// Without a difference: number of the last replay up to which all ranks agree. 0: none yet, or
    /// one rank is so far behind that the keys of its last replays are no longer stored on the
    /// other ranks.
    pub same: u64,
    /// Without a difference: replays of the most advanced rank.
    pub most: u64,
    /// Number of the first differing replay, from 1; 0: no difference.
    pub replay: u64,
    /// 1: `replay` is exact; 0: the difference is at `replay` or earlier, beyond the stored keys.
    pub exact: i32,
    /// 1: a rank launched the differing replay, and the arena refuses launches until
    /// vmmgraph_arena_restart_order; 0: no rank launched it.
    pub launched: i32,
    /// Lowest rank outside the majority.
    pub rank: u32,
    /// Lowest rank of the majority. Of groups of equal size, the group with the lowest rank counts
    /// as the majority.
    pub other: u32,
    /// 1 if `rank` has the replay and its key is stored, else 0.
    pub has: i32,
    /// 1 if `other` has the replay and its key is stored, else 0.
    pub other_has: i32,
    /// Number of ranks outside the majority.
    pub ranks: u64,
    /// Key of the replay on `rank`; 0 if unknown.
    pub had: u64,
    /// Key of the replay on `other`; 0 if unknown.
    pub other_had: u64,
}

/// Writes the number of replays launched in an arena, eager scopes included; equal on ranks with
/// equal replays. Inside a launch: the number of the current replay.
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

/// Unbinds an arena with VMMGRAPH_ARENA_SERIAL from its stream and thread; the next replay binds
/// the arena again. Waits for a replay or eager scope in progress on another thread.
/// VMMGRAPH_ERROR_WRONG_STATE inside a replay of this thread. Later replays still wait for earlier
/// ones. No effect without VMMGRAPH_ARENA_SERIAL.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_lift_serial(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    arena::with(arena, |arena| Ok(arena.lift_serial()?))
}

/// Compares the launches of an arena with VMMGRAPH_ARENA_CHECK_ORDER across ranks: the key of each
/// replay (vmmgraph_space_set_order_key; eager scopes share one fixed key), in order. All ranks
/// must call, at any time and on any thread, each with its number `rank` below `ranks` (at most
/// 4096). A rank merely behind is no difference. The last 256 replays are stored by key: ranks
/// which compare at least as often learn the exact first difference.
///
/// `report` (may be null) is written on agreement and on VMMGRAPH_ERROR_RANKS_DIFFER, equally on
/// every rank. After a difference in launched replays, replays and eager scopes of the arena fail
/// with VMMGRAPH_ERROR_RANKS_DIFFER until vmmgraph_arena_restart_order, instead of a hang.
/// VMMGRAPH_ERROR_WRONG_STATE if the check is off or `gather` failed.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT for invalid rank numbers or an invalid result of `gather`.
///
/// # Safety
/// `gather` is null or may be called with `user`; `report` is null or points to a struct with
/// struct_size set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_compare_order(
    arena: vmmgraph_arena_t,
    rank: u32,
    ranks: u32,
    gather: vmmgraph_gather_fn,
    user: *mut c_void,
    report: *mut vmmgraph_order_report_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: the caller's contract.
        unsafe {
            reported(gather, user, report, |gather| {
                arena.compare_order(rank, ranks, |mine, all| gather(mine, all))
            })
        }
    })
}

/// Like vmmgraph_arena_compare_order, before a launch or any other step common to all ranks: `next`
/// must also be equal, and no rank may be behind. `next` is any number: the key of the space about
/// to be replayed, a hash of the step's mode and bucket, or the layout_hash of a new capture.
/// `next` is not recorded; the replay is. If no rank launched the difference (`launched` is 0),
/// later replays are not refused, and the ranks may decide again.
///
/// # Safety
/// As vmmgraph_arena_compare_order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_agree_on(
    arena: vmmgraph_arena_t,
    next: u64,
    rank: u32,
    ranks: u32,
    gather: vmmgraph_gather_fn,
    user: *mut c_void,
    report: *mut vmmgraph_order_report_t,
) -> vmmgraph_status_t {
    arena::with(arena, |arena| {
        // SAFETY: the caller's contract.
        unsafe {
            reported(gather, user, report, |gather| {
                arena.agree_on(next, rank, ranks, |mine, all| gather(mine, all))
            })
        }
    })
}

/// Clears the history and the recorded difference: the check counts from 1 again. Call on all ranks
/// at the same point of the program. VMMGRAPH_ERROR_WRONG_STATE if the check is off.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_restart_order(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    arena::with(arena, |arena| Ok(arena.restart_order()?))
}

/// Sets the key of a space's replays for VMMGRAPH_ARENA_CHECK_ORDER; 0, the default: the space's
/// layout_hash. For ranks with different blocks but equal work, for bump spaces, and for several
/// graphs over one space (set the key before each replay).
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_set_order_key(space: vmmgraph_space_t, key: u64) -> vmmgraph_status_t {
    space::with(space, |space| {
        space.set_order_key(key);
        Ok(())
    })
}

/// Compares through a C callback and fills the report.
///
/// # Safety
/// As [`vmmgraph_arena_compare_order`].
unsafe fn reported(
    gather: vmmgraph_gather_fn,
    user: *mut c_void,
    report: *mut vmmgraph_order_report_t,
    compare: impl FnOnce(&dyn Fn(&[u8], &mut [u8]) -> Result<()>) -> Result<Agreement>,
) -> std::result::Result<(), Failure> {
    let gather = gather.ok_or_else(|| null("gather"))?;
    // SAFETY: the caller's contract.
    let report = if report.is_null() { None } else { Some(unsafe { OutStruct::new(report, "report") }?) };
    let compared = compare(&|mine, all| {
        // SAFETY: the caller's contract; `all` has room for one `mine` per rank.
        if unsafe { gather(mine.as_ptr().cast(), mine.len(), all.as_mut_ptr().cast(), user) } == 0 {
            return Ok(());
        }
        Err(Error::wrong_state(
            "cannot compare the order of ranks: the gather callback gave up; compare again when all ranks take part",
        ))
    });
    let mut said = vmmgraph_order_report_t {
        struct_size: size_of::<vmmgraph_order_report_t>(),
        same: 0,
        most: 0,
        replay: 0,
        exact: 0,
        launched: 0,
        rank: 0,
        other: 0,
        ranks: 0,
        has: 0,
        other_has: 0,
        had: 0,
        other_had: 0,
    };
    match &compared {
        Ok(Agreement { same, most }) => (said.same, said.most) = (*same, *most),
        Err(Error::RanksDiffer { replay, exact, rank, had, other, other_had, ranks, launched }) => {
            (said.replay, said.exact, said.launched) = (*replay, i32::from(*exact), i32::from(*launched));
            (said.rank, said.other, said.ranks) = (*rank, *other, u64::from(*ranks));
            (said.has, said.other_has) = (i32::from(had.is_some()), i32::from(other_had.is_some()));
            (said.had, said.other_had) = (had.unwrap_or(0), other_had.unwrap_or(0));
        }
        Err(_) => return Ok(compared.map(drop)?),
    }
    if let Some(report) = report {
        report.write(vmmgraph_order_report_t { struct_size: report.struct_size, ..said });
    }
    Ok(compared.map(drop)?)
}

//! The order of replays across ranks in C.

use std::ffi::c_void;

use super::arena::{self, vmmgraph_arena_t};
use super::guard::{Failure, null, out};
use super::sized::OutStruct;
use super::space::{self, vmmgraph_space_t};
use super::status::vmmgraph_status_t;
use crate::error::{Error, Result};
use crate::{Agreement, SharedVmmAllocator};

/// Bytes that vmmgraph_arena_compare_order and vmmgraph_arena_agree_on have gathered from each rank.
pub const VMMGRAPH_ORDER_DIGEST_BYTES: usize = 2080;
const _: () = assert!(VMMGRAPH_ORDER_DIGEST_BYTES == SharedVmmAllocator::digest_bytes());

/// An all-gather of the engine's: writes the `bytes` bytes of each rank to `all`, in the order of the ranks' numbers, of which `mine` are this
/// rank's, and returns 0; anything else: it failed. Called with no lock of the library's held: it may call any function. What hangs in it
/// is the engine's to end, by a deadline of its process group. Must not throw.
pub type vmmgraph_gather_fn = Option<
    unsafe extern "C" fn(mine: *const c_void, bytes: usize, all: *mut c_void, user: *mut c_void) -> i32,
>;

/// What came of comparing the replays of several ranks: the same on all of them.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_order_report_t {
    /// Set to sizeof(vmmgraph_order_report_t) before the call.
    pub struct_size: usize,
    /// Where no difference was found, the number of the last replay up to which all ranks had the same; 0: none yet, or some rank is so far
    /// behind that the others do not remember what it launched last.
    pub same: u64,
    /// Where no difference was found, the replays of the rank that is furthest.
    pub most: u64,
    /// The number of the first replay that is not the same on all ranks, from 1; 0: no difference was found.
    pub replay: u64,
    /// 1: it is that replay; 0: that one or one before, which are forgotten.
    pub exact: i32,
    /// 1: some rank has launched it, and the arena launches nothing more until vmmgraph_arena_restart_order; 0: nobody has.
    pub launched: i32,
    /// The lowest rank that is otherwise than most.
    pub rank: u32,
    /// The lowest rank of most; of groups of one size, the one of the lowest rank is most.
    pub other: u32,
    /// 1 if `rank` has that replay and its key is known, else 0.
    pub has: i32,
    /// 1 if `other` has that replay and its key is known, else 0.
    pub other_has: i32,
    /// Ranks that are otherwise than most.
    pub ranks: u64,
    /// The key of that replay on `rank`; 0 if it is not known.
    pub had: u64,
    /// The key of that replay on `other`; 0 if it is not known.
    pub other_had: u64,
}

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

/// Compares with the other ranks what was launched so far in an arena with VMMGRAPH_ARENA_CHECK_ORDER: each replay's key
/// (vmmgraph_space_set_order_key; eager scopes have one of their own), in order. Any time, on any thread; all ranks call it, each with its
/// own number below `ranks` (4096 at most). A rank that is merely behind is no difference. The last 256 replays are known by key: ranks
/// that compare no less often learn which replay was the first that differs. `report` (may be null) is written where they agree and where
/// they do not: VMMGRAPH_ERROR_RANKS_DIFFER, on every rank the same one. From then on replays and eager scopes of the arena are refused
/// with that status, rather than launched to wait for each other for ever, until vmmgraph_arena_restart_order. VMMGRAPH_ERROR_WRONG_STATE
/// if the check is off, and if `gather` failed; VMMGRAPH_ERROR_INVALID_ARGUMENT for numbers of ranks that cannot be, and where it wrote
/// something else.
///
/// # Safety
/// `gather` is null or may be called with `user`; `report` is null or points to a struct whose struct_size is set.
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

/// As vmmgraph_arena_compare_order, before a launch, or before anything else that all ranks must do alike: also `next` must be the same, and
/// no rank may be behind. It may be any number: the key of the space that is to be replayed, a hash of a step's mode and bucket, the
/// layout_hash of what was just captured. It is not noted: the replay is. Where nobody has launched what differs (launched is 0 in the
/// report), nothing is refused afterwards: the ranks may decide anew.
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

/// Forgets what was launched and what differed: the check counts from 1 again. For all ranks at one point of their programs.
/// VMMGRAPH_ERROR_WRONG_STATE if the check is off.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_restart_order(arena: vmmgraph_arena_t) -> vmmgraph_status_t {
    arena::with(arena, |arena| Ok(arena.restart_order()?))
}

/// What ranks know a space's replays by, in an arena with VMMGRAPH_ARENA_CHECK_ORDER; 0, as at first: its layout_hash. For spaces whose
/// ranks differ in their blocks and not in what they run, for bump spaces, and for several graphs over one space, each with a key of its
/// own set before it is replayed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_space_set_order_key(space: vmmgraph_space_t, key: u64) -> vmmgraph_status_t {
    space::with(space, |space| {
        space.set_order_key(key);
        Ok(())
    })
}

/// Compares by a callback of C, and says what came of it.
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
        // SAFETY: the caller's contract; `all` has room for as many times `mine` as there are ranks.
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

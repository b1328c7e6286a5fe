//! When to commit, and what stays: decisions without memory, a clock or a thread.

use super::guard::{guard, out};
use super::locked::{create, destroy, with};
use super::memory::write_number;
use super::status::vmmgraph_status_t;
use crate::policy::{Ahead, PreCommit, Standing, Watermarks};

/// Never defined: a vmmgraph_pre_commit_t is a key, not an address.
pub struct vmmgraph_pre_commit {
    _private: (),
}

/// When to commit ahead of need, and when to give back. It has no clock and no thread. Calls with it are thread-safe.
pub type vmmgraph_pre_commit_t = *mut vmmgraph_pre_commit;

/// Nothing is to be done.
pub const VMMGRAPH_AHEAD_NOTHING: i32 = 0;
/// So many more blocks are to be committed.
pub const VMMGRAPH_AHEAD_COMMIT: i32 = 1;
/// The memory of so many free blocks is to be given back.
pub const VMMGRAPH_AHEAD_GIVE_BACK: i32 = 2;

/// Never defined: a vmmgraph_standing_t is a key, not an address.
pub struct vmmgraph_standing {
    _private: (),
}

/// How much of what steps used stays mapped between them. Calls with it are thread-safe.
pub type vmmgraph_standing_t = *mut vmmgraph_standing;

/// Makes a policy: with fewer than `low` free blocks, as many are committed as make `high`; what is beyond that is given back once there was
/// too much for `residence` steps. Demand that was seen lately is added to both marks for `lead` steps, which is how long a commit may take.
///
/// # Safety
/// `policy` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pre_commit_create(
    low: u64,
    high: u64,
    lead: u64,
    residence: u64,
    policy: *mut vmmgraph_pre_commit_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(policy, || PreCommit::new(Watermarks { low, high }, lead, residence)) }
}

/// Ends a handle, and with it the policy.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pre_commit_destroy(policy: vmmgraph_pre_commit_t) -> vmmgraph_status_t {
    destroy::<PreCommit, _>(policy)
}

/// What to do before step number `step`, which never falls: `free` blocks are backed and unused, `coming` are being committed, and `granted`
/// were handed out since the last call. `action` is one of VMMGRAPH_AHEAD_*, for `blocks` blocks.
///
/// # Safety
/// `action` and `blocks` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pre_commit_step(
    policy: vmmgraph_pre_commit_t,
    step: u64,
    free: u64,
    coming: u64,
    granted: u64,
    action: *mut i32,
    blocks: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (action, blocks) = unsafe { (out(action, "action")?, out(blocks, "blocks")?) };
        let ahead = with(policy, |policy: &mut PreCommit| policy.step(step, free, coming, granted))?;
        (*action, *blocks) = match ahead {
            Ahead::Nothing => (VMMGRAPH_AHEAD_NOTHING, 0),
            Ahead::Commit(count) => (VMMGRAPH_AHEAD_COMMIT, count),
            Ahead::GiveBack(count) => (VMMGRAPH_AHEAD_GIVE_BACK, count),
        };
        Ok(())
    })
}

/// Makes a policy for memory that comes and goes with steps: what one of the last `residence` steps used stays, and so does less than one in
/// `gap` parts too much. VMMGRAPH_ERROR_INVALID_ARGUMENT for a gap of 0.
///
/// # Safety
/// `standing` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_standing_create(
    residence: u64,
    gap: u64,
    standing: *mut vmmgraph_standing_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(standing, || Standing::new(residence, gap)) }
}

/// Ends a handle, and with it the policy.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_standing_destroy(standing: vmmgraph_standing_t) -> vmmgraph_status_t {
    destroy::<Standing, _>(standing)
}

/// Step number `step`, which never falls, uses so much, in any unit.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_standing_used(
    standing: vmmgraph_standing_t,
    step: u64,
    amount: u64,
) -> vmmgraph_status_t {
    guard(|| with(standing, |standing: &mut Standing| standing.used(step, amount)))
}

/// At a step that holds so much: how much is to stay, and how much may be given back (0: nothing). Either pointer may be null.
///
/// # Safety
/// `wanted` and `spare` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_standing_at(
    standing: vmmgraph_standing_t,
    step: u64,
    held: u64,
    wanted: *mut u64,
    spare: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let (stays, too_much) = with(standing, |standing: &mut Standing| {
            (standing.wanted(step), standing.too_much(step, held).unwrap_or(0))
        })?;
        // SAFETY: the caller's contract.
        unsafe {
            write_number(wanted, stays)?;
            write_number(spare, too_much)
        }
    })
}

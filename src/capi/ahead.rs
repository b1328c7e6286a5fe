use super::guard::{guard, out};
use super::locked::{create, destroy, with};
use super::memory::write_number;
use super::status::vmmgraph_status_t;
use crate::policy::{Ahead, PreCommit, Standing, Watermarks};

pub struct vmmgraph_pre_commit {
    _private: (),
}

/// Pre-commit policy: when to commit ahead of need, and when to release.
pub type vmmgraph_pre_commit_t = *mut vmmgraph_pre_commit;

/// Do nothing.
pub const VMMGRAPH_AHEAD_NOTHING: i32 = 0;
/// Commit more blocks.
pub const VMMGRAPH_AHEAD_COMMIT: i32 = 1;
pub const VMMGRAPH_AHEAD_GIVE_BACK: i32 = 2;

pub struct vmmgraph_standing {
    _private: (),
}

/// Residency policy: how much of the memory used by steps stays mapped between steps.
pub type vmmgraph_standing_t = *mut vmmgraph_standing;

/// Creates a pre-commit policy: below `low` free blocks, commits up to `high`; releases blocks
/// beyond `high` after an excess of `residence` steps. Both marks rise by the recent demand of
/// `lead` steps, the duration of a commit. VMMGRAPH_ERROR_INVALID_ARGUMENT if `low` is above
/// `high`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pre_commit_create(
    low: u64,
    high: u64,
    lead: u64,
    residence: u64,
    policy: *mut vmmgraph_pre_commit_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(policy, || PreCommit::new(Watermarks { low, high }, lead, residence)) }
}

/// Destroys the policy.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pre_commit_destroy(policy: vmmgraph_pre_commit_t) -> vmmgraph_status_t {
    destroy::<PreCommit, _>(policy)
}

/// Returns the action (VMMGRAPH_AHEAD_*, and blocks) before step `step`, which never decreases:
/// `free` blocks are backed and unused, `coming` being committed, `granted` handed out since the
/// last call.
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
        // SAFETY: contract.
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

/// Creates a residency policy: keeps mapped the largest use of the last `residence` steps, and an
/// excess below 1/`gap` of the held amount. VMMGRAPH_ERROR_INVALID_ARGUMENT for a gap of 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_standing_create(
    residence: u64,
    gap: u64,
    standing: *mut vmmgraph_standing_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(standing, || Standing::new(residence, gap)) }
}

/// Destroys the policy.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_standing_destroy(standing: vmmgraph_standing_t) -> vmmgraph_status_t {
    destroy::<Standing, _>(standing)
}

/// Records the amount, in any unit, used by step `step`, which never decreases.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_standing_used(
    standing: vmmgraph_standing_t,
    step: u64,
    amount: u64,
) -> vmmgraph_status_t {
    guard(|| with(standing, |standing: &mut Standing| standing.used(step, amount)))
}

/// Returns the amounts to keep (`wanted`) and release (`spare`) at a step which holds `held`.
/// Either may be null.
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
        // SAFETY: contract.
        unsafe {
            write_number(wanted, stays)?;
            write_number(spare, too_much)
        }
    })
}

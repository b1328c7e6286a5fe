//! Who may begin: decisions without memory, a clock or a thread.

use super::guard::{copy_items, guard, items, out};
use super::locked::{create, destroy, with};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::policy::{Admission, Answer, Due, Grants, Growing, Lengths, Need, in_turn};

/// Never defined: a vmmgraph_grants_t is a key, not an address.
pub struct vmmgraph_grants {
    _private: (),
}

/// One number of pages for the KV memory and the activations of all steps under way. Calls with it are thread-safe.
pub type vmmgraph_grants_t = *mut vmmgraph_grants;

/// Both are the step's now.
pub const VMMGRAPH_GRANT_GRANTED: i32 = 0;
/// Neither; it keeps its place, and is to ask again when something came back.
pub const VMMGRAPH_GRANT_NOT_NOW: i32 = 1;
/// There are not so many pages, and it waits no more.
pub const VMMGRAPH_GRANT_NEVER: i32 = 2;

/// What was granted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_grants_stats_t {
    /// Set to sizeof(vmmgraph_grants_stats_t) before the call.
    pub struct_size: usize,
    /// Pages in all.
    pub pages: u64,
    /// Pages that nobody was granted.
    pub free: u64,
    /// Pages granted for KV memory.
    pub kv: u64,
    /// Pages granted for activations.
    pub activations: u64,
    /// Steps that wait.
    pub waiting: u64,
}

/// A sequence that grows by a token a step. Never grows itself, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_growing_t {
    /// Tokens that it holds memory for.
    pub tokens: u64,
    /// Tokens that are still to come, known or predicted: then it ends and holds none.
    pub left: u64,
}

/// What waits for its turn. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_due_t {
    /// When it is to be over, in any unit.
    pub by: u64,
    /// How long it takes.
    pub takes: u64,
    /// When it is first, in time or not: nothing waits for ever.
    pub patience: u64,
}

/// Never defined: a vmmgraph_lengths_t is a key, not an address.
pub struct vmmgraph_lengths {
    _private: (),
}

/// How long sequences become, by those that ended. Calls with it are thread-safe.
pub type vmmgraph_lengths_t = *mut vmmgraph_lengths;

/// Makes grants of so many pages; a step that waits is overtaken by at most `overtakes` others that leave it too little.
///
/// # Safety
/// `grants` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_create(
    pages: u64,
    overtakes: u64,
    grants: *mut vmmgraph_grants_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(grants, || Ok(Grants::new(pages, overtakes))) }
}

/// Ends a handle, and with it the grants.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_destroy(grants: vmmgraph_grants_t) -> vmmgraph_status_t {
    destroy::<Grants, _>(grants)
}

/// So many pages in all from now on. What was granted beyond them stays granted until it is given back.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_set_pages(grants: vmmgraph_grants_t, pages: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.set_pages(pages)))
}

/// Step `who`, a number of the caller's, asks for pages of KV memory, which it keeps until its sequences end, and of activations, which it
/// keeps until it ends itself. It gets both or neither, so that steps never hold what each other wait for. `answer` is one of
/// VMMGRAPH_GRANT_*. One that waits may ask for something else than before.
///
/// # Safety
/// `answer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_ask(
    grants: vmmgraph_grants_t,
    who: u64,
    kv: u64,
    activations: u64,
    answer: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let answer = unsafe { out(answer, "answer") }?;
        *answer = match with(grants, |grants: &mut Grants| grants.ask(who, Need { kv, activations }))? {
            Answer::Granted => VMMGRAPH_GRANT_GRANTED,
            Answer::NotNow => VMMGRAPH_GRANT_NOT_NOW,
            Answer::Never => VMMGRAPH_GRANT_NEVER,
        };
        Ok(())
    })
}

/// Takes so many KV pages for a step under way that cannot go on without, past everybody who waits. `there` is 1, or 0 if there are
/// fewer: then none are taken.
///
/// # Safety
/// `there` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_extend(
    grants: vmmgraph_grants_t,
    kv: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let there = unsafe { out(there, "there") }?;
        *there = i32::from(with(grants, |grants: &mut Grants| grants.extend(kv))?);
        Ok(())
    })
}

/// Step `who` waits no more.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_forget(grants: vmmgraph_grants_t, who: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.forget(who)))
}

/// Pages came back: the KV memory of sequences that ended, the activations of a step that did; at most what was granted.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_give(
    grants: vmmgraph_grants_t,
    kv: u64,
    activations: u64,
) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.give(Need { kv, activations })))
}

/// What is granted now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_stats(
    grants: vmmgraph_grants_t,
    stats: *mut vmmgraph_grants_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = with(grants, |grants: &mut Grants| vmmgraph_grants_stats_t {
            struct_size: stats.struct_size,
            pages: grants.pages(),
            free: grants.free(),
            kv: grants.kv(),
            activations: grants.activations(),
            waiting: grants.waiting() as u64,
        })?;
        stats.write(now);
        Ok(())
    })
}

/// The most blocks of `block_tokens` tokens that these sequences will ever hold together if each grows by a token a step until it ends, at
/// most one too many for each: one more may begin if, among these, they stay within what there is. So those that run are not preempted
/// for those that came later. VMMGRAPH_ERROR_INVALID_ARGUMENT for blocks of no tokens.
///
/// # Safety
/// `sequences` points to `count` items, or that is 0; `blocks` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_admission_peak(
    block_tokens: u64,
    sequences: *const vmmgraph_growing_t,
    count: usize,
    blocks: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (sequences, blocks) = unsafe { (items(sequences, count, "sequences")?, out(blocks, "blocks")?) };
        let growing = |one: &vmmgraph_growing_t| Growing { tokens: one.tokens, left: one.left };
        let all: Vec<Growing> = sequences.iter().map(growing).collect();
        *blocks = Admission::new(block_tokens)?.peak(&all);
        Ok(())
    })
}

/// The order in which most of `all` are over in time if they are served one after the other from `now` on, as positions in it, and how many
/// of them, the first, those are: what has run out of patience, oldest first; then what will be in time, by when it is due; then
/// the rest, by patience. Where not all can be in time, the longest are left for later. `timely` may be null.
///
/// # Safety
/// `all` points to `count` items and `order` to as many writable numbers, or that is 0; `timely` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_in_turn(
    now: u64,
    all: *const vmmgraph_due_t,
    count: usize,
    order: *mut usize,
    timely: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let all = unsafe { items(all, count, "all") }?;
        let due = |one: &vmmgraph_due_t| Due { by: one.by, takes: one.takes, patience: one.patience };
        let (turns, first) = in_turn(now, &all.iter().map(due).collect::<Vec<_>>());
        // SAFETY: the caller's contract; there are `count` turns.
        unsafe {
            copy_items(&turns, order, count)?;
            if let Some(timely) = timely.as_mut() {
                *timely = first;
            }
        }
        Ok(())
    })
}

/// Makes a policy that predicts lengths: it remembers the last `window` sequences that ended, says what `per_mille` of 1000 do not exceed,
/// and `first` more tokens where none was as long. VMMGRAPH_ERROR_INVALID_ARGUMENT for an empty window, and above 1000.
///
/// # Safety
/// `lengths` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lengths_create(
    window: usize,
    per_mille: u64,
    first: u64,
    lengths: *mut vmmgraph_lengths_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { create(lengths, || Lengths::new(window, per_mille, first)) }
}

/// Ends a handle, and with it the policy.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_destroy(lengths: vmmgraph_lengths_t) -> vmmgraph_status_t {
    destroy::<Lengths, _>(lengths)
}

/// A sequence ended with so many tokens generated.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_ended(lengths: vmmgraph_lengths_t, tokens: u64) -> vmmgraph_status_t {
    guard(|| with(lengths, |lengths: &mut Lengths| lengths.ended(tokens)))
}

/// How many tokens one that has generated so many will have in the end, by those that became longer than it is.
///
/// # Safety
/// `total` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lengths_total(
    lengths: vmmgraph_lengths_t,
    generated: u64,
    total: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let total = unsafe { out(total, "total") }?;
        *total = with(lengths, |lengths: &mut Lengths| lengths.total(generated))?;
        Ok(())
    })
}

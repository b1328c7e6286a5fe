use super::guard::{copy_items, guard, items, out};
use super::locked::{create, destroy, with};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::policy::{Admission, Answer, Due, Grants, Growing, Lengths, Need, deadline_order};

pub struct vmmgraph_grants {
    _private: (),
}

/// Page budget shared by the KV memory and the activations of all running steps.
pub type vmmgraph_grants_t = *mut vmmgraph_grants;

pub const VMMGRAPH_GRANT_GRANTED: i32 = 0;
/// Nothing is granted. The step keeps its place in the queue; ask again after pages were given
/// back.
pub const VMMGRAPH_GRANT_NOT_NOW: i32 = 1;
/// The budget is too small for the request. The step left the queue.
pub const VMMGRAPH_GRANT_NEVER: i32 = 2;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_grants_stats_t {
    pub struct_size: usize,
    pub pages: u64,
    pub free: u64,
    pub kv: u64,
    pub activations: u64,
    pub waiting: u64,
}

/// A sequence which grows by one token per step.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_growing_t {
    /// Tokens with KV memory.
    pub tokens: u64,
    /// Tokens until its end, known or predicted.
    pub left: u64,
}

/// A request with a deadline.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_due_t {
    /// Deadline, in any unit of time.
    pub by: u64,
    /// Duration of the service.
    pub takes: u64,
    /// Time after which the request goes first.
    pub patience: u64,
}

pub struct vmmgraph_lengths {
    _private: (),
}

/// Predictor of sequence lengths, from the sequences which ended.
pub type vmmgraph_lengths_t = *mut vmmgraph_lengths;

/// Creates a budget of `pages` pages. At most `overtakes` grants may leave too few pages for a
/// waiting step.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_create(
    pages: u64,
    overtakes: u64,
    grants: *mut vmmgraph_grants_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(grants, || Ok(Grants::new(pages, overtakes))) }
}

/// Destroys the budget.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_destroy(grants: vmmgraph_grants_t) -> vmmgraph_status_t {
    destroy::<Grants, _>(grants)
}

/// Sets the number of pages. Granted pages stay granted.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_set_pages(grants: vmmgraph_grants_t, pages: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.set_pages(pages)))
}

/// Requests `kv` pages of KV memory until the step's sequences end, and `activations` pages until
/// the step ends: both or neither, so that steps cannot deadlock. `who` is the caller's number of
/// the step; a waiting step may change its request. `answer` receives VMMGRAPH_GRANT_*.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_ask(
    grants: vmmgraph_grants_t,
    who: u64,
    kv: u64,
    activations: u64,
    answer: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let answer = unsafe { out(answer, "answer") }?;
        *answer = match with(grants, |grants: &mut Grants| grants.ask(who, Need { kv, activations }))? {
            Answer::Granted => VMMGRAPH_GRANT_GRANTED,
            Answer::NotNow => VMMGRAPH_GRANT_NOT_NOW,
            Answer::Never => VMMGRAPH_GRANT_NEVER,
        };
        Ok(())
    })
}

/// Takes `kv` more KV pages for a running step, ahead of waiting steps. `there` is 0 if fewer pages
/// are free.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_extend(
    grants: vmmgraph_grants_t,
    kv: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let there = unsafe { out(there, "there") }?;
        *there = i32::from(with(grants, |grants: &mut Grants| grants.extend(kv))?);
        Ok(())
    })
}

/// Removes step `who` from the queue.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_forget(grants: vmmgraph_grants_t, who: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.forget(who)))
}

/// Gives back KV pages of ended sequences and activation pages of an ended step.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_give(
    grants: vmmgraph_grants_t,
    kv: u64,
    activations: u64,
) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.give(Need { kv, activations })))
}

/// Writes the statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_grants_stats(
    grants: vmmgraph_grants_t,
    stats: *mut vmmgraph_grants_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
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

/// Computes the peak of blocks, of `block_tokens` tokens each, held by `sequences` which grow by
/// one token per step until their end; at most one block per sequence too high. If sequences are
/// admitted only while the peak fits, none is preempted. VMMGRAPH_ERROR_INVALID_ARGUMENT if
/// `block_tokens` is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_admission_peak(
    block_tokens: u64,
    sequences: *const vmmgraph_growing_t,
    count: usize,
    blocks: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let (sequences, blocks) = unsafe { (items(sequences, count, "sequences")?, out(blocks, "blocks")?) };
        let growing = |one: &vmmgraph_growing_t| Growing { tokens: one.tokens, left: one.left };
        let all: Vec<Growing> = sequences.iter().map(growing).collect();
        *blocks = Admission::new(block_tokens)?.peak(&all);
        Ok(())
    })
}

/// Computes the deadline order: the serial order from time `now` in which most requests meet their
/// deadline. `order` receives indices of `all`: requests out of patience, oldest first; then
/// requests on time, by deadline; then the rest, by patience. `timely` receives the number in the
/// first two groups.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_in_turn(
    now: u64,
    all: *const vmmgraph_due_t,
    count: usize,
    order: *mut usize,
    timely: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let all = unsafe { items(all, count, "all") }?;
        let due = |one: &vmmgraph_due_t| Due { by: one.by, takes: one.takes, patience: one.patience };
        let (served, first) = deadline_order(now, &all.iter().map(due).collect::<Vec<_>>());
        // SAFETY: the caller's contract; `served` has `count` entries.
        unsafe {
            copy_items(&served, order, count)?;
            if let Some(timely) = timely.as_mut() {
                *timely = first;
            }
        }
        Ok(())
    })
}

/// Creates a predictor of sequence lengths: the quantile at `per_mille` of 1000 of the last
/// `window` ended sequences; `first` more tokens if none of these was longer.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT if `window` is 0 or `per_mille` exceeds 1000.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lengths_create(
    window: usize,
    per_mille: u64,
    first: u64,
    lengths: *mut vmmgraph_lengths_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { create(lengths, || Lengths::new(window, per_mille, first)) }
}

/// Destroys the predictor.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_destroy(lengths: vmmgraph_lengths_t) -> vmmgraph_status_t {
    destroy::<Lengths, _>(lengths)
}

/// Records the generated tokens of an ended sequence.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_ended(lengths: vmmgraph_lengths_t, tokens: u64) -> vmmgraph_status_t {
    guard(|| with(lengths, |lengths: &mut Lengths| lengths.ended(tokens)))
}

/// Predicts the final tokens of a sequence with `generated` tokens so far.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lengths_total(
    lengths: vmmgraph_lengths_t,
    generated: u64,
    total: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let total = unsafe { out(total, "total") }?;
        *total = with(lengths, |lengths: &mut Lengths| lengths.total(generated))?;
        Ok(())
    })
}

//! Admission policies: decisions without memory, clock or thread.

use super::guard::{copy_items, guard, items, out};
use super::locked::{create, destroy, with};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::policy::{Admission, Answer, Due, Grants, Growing, Lengths, Need, deadline_order};

/// Never defined: a vmmgraph_grants_t is a key, not an address.
pub struct vmmgraph_grants {
    _private: (),
}

/// Page budget shared by the KV memory and the activations of all running steps. Thread-safe.
pub type vmmgraph_grants_t = *mut vmmgraph_grants;

/// The KV pages and the activation pages are granted.
pub const VMMGRAPH_GRANT_GRANTED: i32 = 0;
/// Nothing is granted. The step keeps its place in the queue; ask again after pages were given
/// back.
pub const VMMGRAPH_GRANT_NOT_NOW: i32 = 1;
/// The budget is too small for the request. The step left the queue.
pub const VMMGRAPH_GRANT_NEVER: i32 = 2;

/// Statistics of a vmmgraph_grants_t.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_grants_stats_t {
    /// Set to sizeof(vmmgraph_grants_stats_t) before the call.
    pub struct_size: usize,
    /// Pages in total.
    pub pages: u64,
    /// Pages not granted.
    pub free: u64,
    /// Pages granted for KV memory.
    pub kv: u64,
    /// Pages granted for activations.
    pub activations: u64,
    /// Steps in the queue.
    pub waiting: u64,
}

/// A sequence which grows by one token per step. The struct never grows, so without struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_growing_t {
    /// Tokens with KV memory.
    pub tokens: u64,
    /// Tokens still to come, known or predicted. Then the sequence ends and frees its memory.
    pub left: u64,
}

/// A request with a deadline. Never grows, so without struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_due_t {
    /// Deadline, in any unit of time.
    pub by: u64,
    /// Duration of the service.
    pub takes: u64,
    /// Time after which the request goes first, whether on time or not.
    pub patience: u64,
}

/// Never defined: a vmmgraph_lengths_t is a key, not an address.
pub struct vmmgraph_lengths {
    _private: (),
}

/// Predictor of sequence lengths, from the sequences which ended. Thread-safe.
pub type vmmgraph_lengths_t = *mut vmmgraph_lengths;

/// Creates a budget of `pages` pages. At most `overtakes` grants may overtake a waiting step and
/// leave too few pages for the waiting step.
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

/// Destroys the budget.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_destroy(grants: vmmgraph_grants_t) -> vmmgraph_status_t {
    destroy::<Grants, _>(grants)
}

/// Sets the total number of pages. Pages already granted stay granted until given back.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_set_pages(grants: vmmgraph_grants_t, pages: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.set_pages(pages)))
}

/// Requests `kv` pages of KV memory, kept until the step's sequences end, and `activations` pages,
/// kept until the step ends. Both are granted or neither, so that steps cannot deadlock. `who` is
/// the caller's number of the step. `answer` receives one of VMMGRAPH_GRANT_*. A waiting step may
/// change its request.
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

/// Takes `kv` more KV pages for a running step, ahead of all waiting steps. `there` receives 1 if
/// granted. If fewer pages are free, `there` receives 0 and none are taken.
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

/// Removes step `who` from the queue.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_forget(grants: vmmgraph_grants_t, who: u64) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.forget(who)))
}

/// Gives pages back: KV pages of ended sequences and activation pages of an ended step, at most the
/// pages granted.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_grants_give(
    grants: vmmgraph_grants_t,
    kv: u64,
    activations: u64,
) -> vmmgraph_status_t {
    guard(|| with(grants, |grants: &mut Grants| grants.give(Need { kv, activations })))
}

/// Writes the current statistics.
///
/// # Safety
/// `stats` is null or points to a struct with struct_size set.
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

/// Computes the peak number of blocks, of `block_tokens` tokens each, held together by `sequences`
/// if each grows by one token per step until its end. May exceed the exact peak by one block per
/// sequence. Admit a sequence if the peak including it fits: running sequences are then never
/// preempted for later ones. VMMGRAPH_ERROR_INVALID_ARGUMENT if `block_tokens` is 0.
///
/// # Safety
/// `sequences` points to `count` items, or `count` is 0; `blocks` is null or writable.
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

/// Computes the deadline order: the serial service order from time `now` in which most requests of
/// `all` meet their deadline. `order` receives indices of `all`: first the requests out of
/// patience, oldest first; then the requests which will be on time, by deadline; then the rest, by
/// patience. If not all can be on time, the longest are postponed. `timely` (may be null) receives
/// the number of requests in the first two groups.
///
/// # Safety
/// `all` points to `count` items and `order` to `count` writable numbers, or `count` is 0. `timely`
/// is null or writable.
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

/// Creates a predictor of sequence lengths from the last `window` ended sequences: the quantile at
/// `per_mille` of 1000. Predicts `first` more tokens if no remembered sequence was longer.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT if `window` is 0 or `per_mille` exceeds 1000.
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

/// Destroys the predictor.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_destroy(lengths: vmmgraph_lengths_t) -> vmmgraph_status_t {
    destroy::<Lengths, _>(lengths)
}

/// Records the number of generated tokens of an ended sequence.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lengths_ended(lengths: vmmgraph_lengths_t, tokens: u64) -> vmmgraph_status_t {
    guard(|| with(lengths, |lengths: &mut Lengths| lengths.ended(tokens)))
}

/// Predicts the final number of tokens of a sequence with `generated` tokens so far, from the
/// remembered sequences longer than `generated`.
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

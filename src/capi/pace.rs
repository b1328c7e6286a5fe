//! Whether prompts wait for those that decode: decisions without memory, a clock or a thread.

use super::guard::{guard, items, out};
use super::status::vmmgraph_status_t;
use crate::policy::{Decoding, Due, Prompt, prefill_waits};

/// A prompt that waits to begin. Times in one unit, whichever. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_prompt_t {
    /// When it came.
    pub since: u64,
    /// When its first token is due.
    pub by: u64,
    /// How long that takes.
    pub takes: u64,
    /// When it begins, whoever is late by that: nothing waits for ever.
    pub patience: u64,
}

/// A sequence that decodes. Never grows, so it has no struct_size.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_decoding_t {
    /// When it had its first token.
    pub since: u64,
    /// Tokens that it has.
    pub tokens: u64,
    /// How long each may take on average.
    pub each: u64,
}

impl vmmgraph_prompt_t {
    fn prompt(self) -> Prompt {
        let Self { since, by, takes, patience } = self;
        Prompt { since, due: Due { by, takes, patience } }
    }
}

/// Whether a prompt's KV memory is rather to go to the host than to be waited for (1 or 0): half of the time is over for which it may wait and
/// still be in time. One that goes there at once has its first token early, and its others late.
///
/// # Safety
/// `prompt` is null or readable, `to_host` null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_prompt_to_host(
    now: u64,
    prompt: *const vmmgraph_prompt_t,
    to_host: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (one, to_host) = unsafe { (items(prompt, 1, "prompt")?, out(to_host, "to_host")?) };
        *to_host = i32::from(one.iter().any(|one| one.prompt().to_host(now)));
        Ok(())
    })
}

/// Whether a prefill of these prompts that `takes` so long is to wait for another step of the sequences that decode (1 or 0): behind it more than
/// three in ten of those would be late, and none of the prompts presses, as one does that has no more patience, or of whose time to wait a tenth is
/// left. One that is late already does not.
///
/// # Safety
/// `prompts` points to `prompt_count` items and `decoding` to `decoding_count`, or that is 0; `waits` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_prefill_waits(
    now: u64,
    takes: u64,
    prompts: *const vmmgraph_prompt_t,
    prompt_count: usize,
    decoding: *const vmmgraph_decoding_t,
    decoding_count: usize,
    waits: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let (prompts, decoding) = unsafe {
            (items(prompts, prompt_count, "prompts")?, items(decoding, decoding_count, "decoding")?)
        };
        // SAFETY: as above.
        let waits = unsafe { out(waits, "waits") }?;
        let prompts: Vec<Prompt> = prompts.iter().map(|one| one.prompt()).collect();
        let sequence =
            |one: &vmmgraph_decoding_t| Decoding { since: one.since, tokens: one.tokens, each: one.each };
        let decoding: Vec<Decoding> = decoding.iter().map(sequence).collect();
        *waits = i32::from(prefill_waits(now, takes, &prompts, &decoding));
        Ok(())
    })
}

use super::guard::{guard, items, out};
use super::status::vmmgraph_status_t;
use crate::policy::{Decoding, Due, Prompt, prefill_waits};

/// Prompt waiting for its prefill. Times are in any one unit.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_prompt_t {
    pub since: u64,
    /// Time at which the first token is due.
    pub by: u64,
    /// Duration from the start of the prefill to the first token.
    pub takes: u64,
    /// Time at which the prefill starts even if sequences become late.
    pub patience: u64,
}

/// Sequence being decoded.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct vmmgraph_decoding_t {
    /// Time of the first token.
    pub since: u64,
    /// Tokens generated so far.
    pub tokens: u64,
    /// Average time allowed per token.
    pub each: u64,
}

impl vmmgraph_prompt_t {
    fn prompt(self) -> Prompt {
        let Self { since, by, takes, patience } = self;
        Prompt { since, due: Due { by, takes, patience } }
    }
}

/// Sets `to_host` to 1 if a prompt's KV memory should go to the host, else 0: once half of the time
/// which the prompt can wait without being late has passed. A prompt sent at once has an early
/// first token and late later tokens.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_prompt_to_host(
    now: u64,
    prompt: *const vmmgraph_prompt_t,
    to_host: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let (one, to_host) = unsafe { (items(prompt, 1, "prompt")?, out(to_host, "to_host")?) };
        *to_host = i32::from(one.iter().any(|one| one.prompt().to_host(now)));
        Ok(())
    })
}

/// Sets `waits` to 1 if a prefill of these prompts, of duration `takes`, should wait for another
/// decode step: it makes more than 3 in 10 sequences late and no prompt is urgent. A prompt is
/// urgent from its `patience` time on; if not yet late, also with at most a tenth of its waiting
/// time left.
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
        // SAFETY: contract.
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

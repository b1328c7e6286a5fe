//! The memory of a simulated engine, with the distribution of pages and its costs.

mod counted;
mod lent;
mod paged;

pub use counted::Counted;
pub use lent::Lent;
pub use paged::{Paged, Settings, Way};
use vmmgraph::Result;

use crate::model::Ns;

/// Expected needs of the coming steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// End of the running step.
    pub until: Ns,
    /// Bytes of activations of the next prefill that could run; 0 if none.
    pub activations: u64,
    /// Blocks of the next prefill.
    pub blocks: u64,
}

/// Counters of a memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Pages mapped.
    pub maps: u64,
    /// Pages unmapped.
    pub unmaps: u64,
    /// Pages given up and mapped again within a few steps by KV or by activations.
    pub twice: u64,
    /// Peak mapped bytes.
    pub peak_bytes: u64,
}

/// Memory for a step's activations and for blocks of KV.
pub trait Memory {
    /// Grants activations and blocks for a step at `now`, or neither. Returns the time spent
    /// mapping.
    fn grant(&mut self, now: Ns, who: u64, activations: u64, blocks: u64) -> Option<Ns>;

    /// Grants blocks to running sequences, which cannot continue without.
    fn extend(&mut self, now: Ns, blocks: u64) -> Option<Ns>;

    /// Returns granted blocks.
    fn allocate(&mut self, blocks: u64) -> Vec<u64>;

    /// Frees blocks.
    fn free(&mut self, now: Ns, blocks: &[u64]);

    /// Frees the step's activations.
    fn step_over(&mut self, now: Ns);

    /// Does background work: called when a step starts, or while the engine is idle.
    fn ahead(&mut self, now: Ns, hint: &Hint);

    /// Blocks available besides this many bytes of activations.
    fn room(&self, activations: u64) -> u64;

    /// Maximum number of blocks, without activations.
    fn capacity(&self) -> u64;

    /// Whether these activations and blocks could ever fit together.
    fn possible(&self, activations: u64, blocks: u64) -> bool;

    /// Maximum bytes of activations.
    fn longest(&self) -> u64;

    /// Cancels the waiting grant of `who`.
    fn forget(&mut self, who: u64);

    /// Counters.
    fn moves(&self) -> Moves;

    /// Checks all invariants, with these blocks in use.
    ///
    /// # Errors
    /// [`Error::Internal`](vmmgraph::Error::Internal) names the first violated invariant.
    fn check(&self, used: &mut dyn Iterator<Item = u64>) -> Result<()>;
}

//! The memory of a simulated engine: who gives pages to whom, and what that costs.

mod counted;
mod lent;
mod paged;

pub use counted::Counted;
pub use lent::Lent;
pub use paged::{Paged, Settings, Way};
use vmmgraph::Result;

use crate::model::Ns;

/// What is known of the steps to come, while one runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hint {
    /// When the step that runs ends.
    pub until: Ns,
    /// The next prefill's activations in bytes, if there is one that could run, and the blocks that it needs.
    pub activations: u64,
    /// See there.
    pub blocks: u64,
}

/// What memory did since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Pages mapped.
    pub maps: u64,
    /// Pages unmapped.
    pub unmaps: u64,
    /// Pages that one of the two, KV or activations, gave up and had again within a few steps.
    pub twice: u64,
    /// The most bytes mapped at a time.
    pub peak_bytes: u64,
}

/// Memory for a step's activations and for blocks of KV.
pub trait Memory {
    /// What a step needs that begins at `now`, for `who`: both or neither. What mapping keeps the step from beginning, or `None`: not now.
    fn grant(&mut self, now: Ns, who: u64, activations: u64, blocks: u64) -> Option<Ns>;

    /// Blocks for sequences that run already and cannot go on without.
    fn extend(&mut self, now: Ns, blocks: u64) -> Option<Ns>;

    /// Hands out blocks that were granted.
    fn allocate(&mut self, blocks: u64) -> Vec<u64>;

    /// Blocks are not used any more.
    fn free(&mut self, now: Ns, blocks: &[u64]);

    /// The step's activations are not used any more.
    fn step_over(&mut self, now: Ns);

    /// A step begins, or the engine is idle: what can be done beside it.
    fn ahead(&mut self, now: Ns, hint: &Hint);

    /// Blocks that could be had beside so many bytes of activations.
    fn room(&self, activations: u64) -> u64;

    /// Blocks that there can be at most, with no activations.
    fn capacity(&self) -> u64;

    /// Whether so many bytes of activations and so many blocks could ever be had together.
    fn possible(&self, activations: u64, blocks: u64) -> bool;

    /// The longest activations that there can be.
    fn longest(&self) -> u64;

    /// Who waited for a grant does not wait any more.
    fn forget(&mut self, who: u64);

    /// What was done.
    fn moves(&self) -> Moves;

    /// Whether all that must hold does, with these blocks in use.
    ///
    /// # Errors
    /// [`Error::Internal`](vmmgraph::Error::Internal) names the first thing that does not.
    fn check(&self, used: &mut dyn Iterator<Item = u64>) -> Result<()>;
}

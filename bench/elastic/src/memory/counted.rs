//! Memory without costs, for the oracle.

use std::collections::BTreeSet;

use vmmgraph::{Error, Result};

use super::{Hint, Memory, Moves};
use crate::model::Ns;

/// Counts bytes only: no pages, so no fragmentation, and no driver calls.
#[derive(Clone, Debug)]
pub struct Counted {
    budget: u64,
    block: u64,
    used: BTreeSet<u64>,
    free: Vec<u64>,
    activations: u64,
    peak: u64,
}

impl Counted {
    /// `budget` bytes in total, for blocks of `block` bytes.
    #[must_use]
    pub fn new(budget: u64, block: u64) -> Self {
        let free = (0..budget / block).rev().collect();
        Self { budget, block, used: BTreeSet::new(), free, activations: 0, peak: 0 }
    }

    fn held(&self) -> u64 {
        self.used.len() as u64 * self.block + self.activations
    }
}

impl Memory for Counted {
    fn grant(&mut self, _: Ns, _: u64, activations: u64, blocks: u64) -> Option<Ns> {
        let there = self.held() + activations + blocks * self.block <= self.budget;
        there.then(|| {
            self.activations += activations;
            0
        })
    }

    fn extend(&mut self, _: Ns, blocks: u64) -> Option<Ns> {
        (self.held() + blocks * self.block <= self.budget).then_some(0)
    }

    fn allocate(&mut self, blocks: u64) -> Vec<u64> {
        let taken = self.free.split_off(self.free.len().saturating_sub(blocks as usize));
        self.used.extend(&taken);
        self.peak = self.peak.max(self.held());
        taken
    }

    fn free(&mut self, _: Ns, blocks: &[u64]) {
        self.free.extend(blocks.iter().filter(|block| self.used.remove(block)));
    }

    fn step_over(&mut self, _: Ns) {
        self.activations = 0;
    }

    fn ahead(&mut self, _: Ns, _: &Hint) {}

    fn room(&self, activations: u64) -> u64 {
        self.budget.saturating_sub(self.held() + activations) / self.block
    }

    fn capacity(&self) -> u64 {
        self.budget / self.block
    }

    fn possible(&self, activations: u64, blocks: u64) -> bool {
        activations + blocks * self.block <= self.budget
    }

    fn longest(&self) -> u64 {
        self.budget
    }

    fn forget(&mut self, _: u64) {}

    fn moves(&self) -> Moves {
        Moves { peak_bytes: self.peak, ..Moves::default() }
    }

    fn check(&self, mut used: &mut dyn Iterator<Item = u64>) -> Result<()> {
        let mut seen = vec![false; self.capacity() as usize];
        let mut count = 0;
        let once = |block: u64| {
            count += 1;
            seen.get_mut(block as usize).is_some_and(|seen| !std::mem::replace(seen, true))
        };
        let distinct = (&mut used).all(once);
        if !distinct || count != self.used.len() || self.held() > self.budget {
            return Err(Error::Internal {
                what: format!("{} bytes counted of {}", self.held(), self.budget),
            });
        }
        Ok(())
    }
}

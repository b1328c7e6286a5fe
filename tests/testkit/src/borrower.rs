//! Whoever borrows pages and never needs them.

use vmmgraph::pages::Fence;
use vmmgraph::{Borrower, Result, Vacate};

/// Gives back whatever it is asked for, behind nothing.
#[derive(Debug)]
pub struct IdleBorrower;

impl Borrower for IdleBorrower {
    fn vacate(&self, _: &Vacate) -> Result<Fence> {
        Ok(Fence::default())
    }
}

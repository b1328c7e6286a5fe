//! A page of the pool: its memory, owner and mappings.

use std::collections::BTreeSet;

use super::{AccountId, Owner, RangeId};
use crate::driver::PageHandle;

#[derive(Debug)]
pub(super) struct Page {
    /// `None`: the page is non-resident, see `non_resident.rs`. Owner, account and mappings stay.
    pub(super) handle: Option<PageHandle>,
    pub(super) bytes: u64,
    pub(super) owner: Owner,
    /// Account charged for the page. `None` for free pages and pages refused by the driver.
    pub(super) account: Option<AccountId>,
    /// All mappings: range and offset.
    pub(super) mappings: BTreeSet<(RangeId, u64)>,
    /// Subset of `mappings` unknown to the driver: all of a non-resident page, some of a page whose
    /// pause or resume is incomplete.
    pub(super) unmapped: BTreeSet<(RangeId, u64)>,
    /// Number of running transactions that need the page.
    pub(super) pins: u32,
    /// Number of export pins: other processes map the page.
    pub(super) exported: u32,
}

impl Page {
    pub(super) fn new(
        handle: PageHandle,
        bytes: u64,
        owner: Owner,
        account: Option<AccountId>,
        pins: u32,
    ) -> Self {
        let (mappings, unmapped) = (BTreeSet::new(), BTreeSet::new());
        Self { handle: Some(handle), bytes, owner, account, mappings, unmapped, pins, exported: 0 }
    }

    /// Returns the page's share of the totals: pages, bytes, and mappings known to the driver.
    pub(super) fn weight(&self) -> (i64, i64, i64) {
        let mappings = (self.mappings.len() - self.unmapped.len()) as i64;
        if self.handle.is_some() { (1, self.bytes as i64, mappings) } else { (0, 0, mappings) }
    }
}

use std::collections::BTreeSet;

use super::{AccountId, Owner, RangeId};
use crate::driver::PageHandle;

#[derive(Debug)]
pub(super) struct Page {
    /// `None`: the page is non-resident, see `non_resident.rs`.
    pub(super) handle: Option<PageHandle>,
    pub(super) bytes: u64,
    pub(super) owner: Owner,
    /// `None` for free pages and pages refused by the driver.
    pub(super) account: Option<AccountId>,
    /// Range and offset.
    pub(super) mappings: BTreeSet<(RangeId, u64)>,
    /// Subset of `mappings` unknown to the driver, after a pause or an incomplete resume.
    pub(super) unmapped: BTreeSet<(RangeId, u64)>,
    /// Running transactions that need the page.
    pub(super) pins: u32,
    /// Other processes map the page.
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

    /// Pages, bytes, and mappings known to the driver.
    pub(super) fn weight(&self) -> (i64, i64, i64) {
        let mappings = (self.mappings.len() - self.unmapped.len()) as i64;
        if self.handle.is_some() { (1, self.bytes as i64, mappings) } else { (0, 0, mappings) }
    }
}

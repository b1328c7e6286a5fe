//! What a region is made like, and what it says of itself.

use crate::pages::AccountStats;

/// What becomes of memory when it steps aside.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// The contents are lost: what comes back holds anything.
    #[default]
    Discard,
    /// What comes back is zero.
    Zero,
    /// The contents go to host memory and come back.
    Backup,
    /// The memory stays.
    Keep,
}

impl Policy {
    pub(super) const ALL: [Self; 4] = [Self::Discard, Self::Zero, Self::Backup, Self::Keep];
    pub(super) const COUNT: usize = Self::ALL.len();

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// What a region is made like.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// What becomes of its blocks, but for those that say otherwise.
    pub policy: Policy,
    /// The most bytes of physical memory it may hold; `None`: no limit but those above.
    pub budget_bytes: Option<u64>,
    /// Bytes of every page, a multiple of the device's granularity, for regions whose pages others shall borrow; 0: as fits, up to
    /// 1 GiB.
    pub page_bytes: u64,
    /// Its blocks are written once, before the first pause: the host keeps what it copied then, and later pauses copy nothing. What is
    /// written later all the same is to be said by [`Region::mark_written`](crate::Region::mark_written).
    pub read_only: bool,
    /// For finding bugs: a pause copies all the same, and compares with what the host has. Costs the copy.
    pub verify_clean: bool,
}

/// What a region holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStats {
    /// The region's number, unique in the process.
    pub id: u64,
    /// Whether it is paused.
    pub paused: bool,
    /// Counts its mappings, from 1 on.
    pub generation: u64,
    /// Bytes of pages that are there.
    pub resident_bytes: u64,
    /// Bytes of pages that stepped aside.
    pub paused_bytes: u64,
    /// Bytes of contents on the host.
    pub host_bytes: u64,
    /// Pages, there or not.
    pub pages: u64,
    /// Live blocks, and their bytes.
    pub blocks: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Bytes of places that no block has.
    pub free_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// What counts toward its budget.
    pub account: AccountStats,
}

use crate::pages::AccountStats;

/// Handling of contents at a pause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Policy {
    /// Contents are lost; undefined after a resume.
    #[default]
    Discard,
    /// Zeros after a resume.
    Zero,
    /// Contents are copied to the host and restored.
    Backup,
    /// Memory is not paused.
    Keep,
}

impl Policy {
    pub(super) const ALL: [Self; 4] = [Self::Discard, Self::Zero, Self::Backup, Self::Keep];
    pub(super) const COUNT: usize = Self::ALL.len();

    pub(super) fn index(self) -> usize {
        self as usize
    }
}

/// Options of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionOptions {
    /// Default policy of its blocks.
    pub policy: Policy,
    /// Limit of physical bytes. `None`: only the limits of the ancestors.
    pub budget_bytes: Option<u64>,
    /// Bytes of every page, a multiple of the device's granularity, so that other owners can reuse
    /// free pages. 0: automatic, up to 1 GiB.
    pub page_bytes: u64,
    /// Blocks are written once, before the first pause: the host keeps the first copy. Report later
    /// writes by [`Region::mark_written`](crate::Region::mark_written).
    pub read_only: bool,
    /// Debugging: pauses copy anyway and compare.
    pub verify_clean: bool,
}

/// Current state of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionStats {
    /// Number in the process.
    pub id: u64,
    /// Whether the region is paused.
    pub paused: bool,
    /// Counts the mappings, from 1.
    pub generation: u64,
    /// Bytes of resident pages.
    pub resident_bytes: u64,
    /// Bytes of paused pages.
    pub paused_bytes: u64,
    /// Bytes of contents on the host.
    pub host_bytes: u64,
    /// Pages, resident or not.
    pub pages: u64,
    /// Live blocks.
    pub blocks: u64,
    /// Bytes of live blocks.
    pub live_bytes: u64,
    /// Free bytes.
    pub free_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Account of the region.
    pub account: AccountStats,
}

use serde::Serialize;

/// Counts of pages and driver calls of one device since its opening.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PoolStats {
    /// Bytes of pages held now.
    pub physical_bytes: u64,
    /// Peak of `physical_bytes`.
    pub peak_physical_bytes: u64,
    /// Bytes of pages for live-out, persistent and private blocks.
    pub retained_bytes: u64,
    /// Bytes of free pages.
    pub free_bytes: u64,
    /// Budget in bytes, if any.
    pub budget_bytes: Option<u64>,
    /// Bytes of non-resident pages.
    pub absent_bytes: u64,
    /// Bytes of pages exported to other processes
    /// ([`Device::export_page`](crate::Device::export_page)).
    pub exported_bytes: u64,
    /// Pages held now.
    pub pages: u64,
    /// Pages created.
    pub pages_created: u64,
    /// Pages released.
    pub pages_released: u64,
    /// Allocations served by a free page.
    pub pages_reused: u64,
    /// Current mappings.
    pub mappings: u64,
    /// Mappings made.
    pub maps: u64,
    /// Mappings removed.
    pub unmaps: u64,
    /// Reserved bytes of addresses.
    pub reserved_bytes: u64,
    /// Current reservations.
    pub reservations: u64,
    /// Pending unmaps and refused releases, retried by `trim`.
    pub pending: u64,
}

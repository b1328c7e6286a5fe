use std::sync::atomic::{AtomicU64, Ordering};

/// Running totals of an arena, so reading costs the same for any number of spaces.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    reserved: AtomicU64,
    mapped: AtomicU64,
    high_water: AtomicU64,
    refreshed: AtomicU64,
}

impl Totals {
    /// Bytes of addresses reserved.
    pub(crate) fn reserved(&self) -> u64 {
        self.reserved.load(Ordering::Relaxed)
    }

    /// Bytes of mapped addresses.
    pub(crate) fn mapped(&self) -> u64 {
        self.mapped.load(Ordering::Relaxed)
    }

    /// Peak bytes of any one space.
    pub(crate) fn high_water(&self) -> u64 {
        self.high_water.load(Ordering::Relaxed)
    }

    /// Mappings replaced because their page left the shared set.
    pub(super) fn refreshed(&self) -> u64 {
        self.refreshed.load(Ordering::Relaxed)
    }

    pub(super) fn note_reserved(&self, before: u64, after: u64) {
        self.reserved.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    pub(super) fn note_mapped(&self, before: u64, after: u64) {
        self.mapped.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }

    pub(super) fn raise_high_water(&self, bytes: u64) {
        if self.high_water() < bytes {
            self.high_water.fetch_max(bytes, Ordering::Relaxed);
        }
    }

    pub(super) fn add_refreshed(&self, mappings: u64) {
        self.refreshed.fetch_add(mappings, Ordering::Relaxed);
    }
}

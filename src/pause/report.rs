use crate::error::{Error, Result};
use crate::pages::CopyPath;

const GIB: f64 = (1_u64 << 30) as f64;

/// Result of a pause.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct PauseReport {
    /// Regions and arenas paused by this call.
    pub regions: u64,
    /// Pages released.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied to the host.
    pub copied_bytes: u64,
    /// Bytes already on the host from an earlier pause.
    pub clean_bytes: u64,
    /// Bytes kept by policy `keep`, and as private blocks of an arena.
    pub kept_bytes: u64,
    /// Bytes kept because of a failure.
    pub left_bytes: u64,
    /// Pages declared unwritten, but found written, and copied.
    pub stale_pages: u64,
    /// Driver calls.
    pub calls: u64,
    /// Duration in microseconds.
    pub micros: u64,
    /// From the first copy to the end of the last, in microseconds.
    pub copy_micros: u64,
    /// Slowest copy path used.
    pub path: CopyPath,
    /// All failures, in order; the next pause retries.
    pub failures: Vec<Error>,
}

/// Result of a resume.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResumeReport {
    /// Regions and arenas resumed by this call.
    pub regions: u64,
    /// Pages made resident.
    pub pages: u64,
    /// Bytes of these pages.
    pub bytes: u64,
    /// Bytes copied from the host.
    pub copied_bytes: u64,
    /// Bytes set to zero.
    pub zeroed_bytes: u64,
    /// Driver calls.
    pub calls: u64,
    /// Duration in microseconds.
    pub micros: u64,
    /// Part of `micros` spent waiting for memory.
    pub waited_micros: u64,
    /// From the first copy to the end of the last; 0 if the call does not wait.
    pub copy_micros: u64,
    /// Slowest copy path used.
    pub path: CopyPath,
}

fn rate(bytes: u64, micros: u64) -> f64 {
    if micros == 0 { 0.0 } else { bytes as f64 / GIB / (micros as f64 / 1e6) }
}

impl PauseReport {
    /// Returns the copy speed in GiB/s, or 0 without copies.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }

    /// Returns the first failure, if any.
    pub fn complete(&self) -> Result<()> {
        self.failures.first().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Adds a second report.
    pub fn join(&mut self, other: Self) {
        self.regions += other.regions;
        self.pages += other.pages;
        self.bytes += other.bytes;
        self.copied_bytes += other.copied_bytes;
        self.clean_bytes += other.clean_bytes;
        self.kept_bytes += other.kept_bytes;
        self.left_bytes += other.left_bytes;
        self.stale_pages += other.stale_pages;
        self.calls += other.calls;
        self.micros += other.micros;
        self.copy_micros += other.copy_micros;
        self.path = self.path.max(other.path);
        self.failures.extend(other.failures);
    }
}

impl ResumeReport {
    /// Returns the copy speed in GiB/s, or 0 without copies or without a wait.
    #[must_use]
    pub fn copy_gib_per_second(&self) -> f64 {
        rate(self.copied_bytes, self.copy_micros)
    }
}

use std::time::Duration;

use crate::pages::Calls;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Work {
    maps: u64,
    mapped_bytes: u64,
    /// Without failed and undone attempts.
    calls: u64,
    time: Duration,
}

impl Work {
    pub(super) fn add(&mut self, calls: &Calls) {
        self.calls += calls.all;
        self.maps += calls.maps;
    }

    pub(super) fn add_time(&mut self, time: Duration) {
        self.time += time;
    }

    pub(super) fn note_mapped(&mut self, before: u64, after: u64) {
        self.mapped_bytes = self.mapped_bytes - before + after;
    }

    pub(super) fn maps(&self) -> u64 {
        self.maps
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.mapped_bytes
    }

    pub(super) fn calls(&self) -> u64 {
        self.calls
    }

    pub(super) fn time(&self) -> Duration {
        self.time
    }
}

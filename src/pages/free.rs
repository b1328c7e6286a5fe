//! Free pages of a pool, and memory on its way between pool and driver.

use std::collections::BTreeMap;

use super::PageId;

/// Pages without mappings and pins, by size.
#[derive(Debug, Default)]
pub(super) struct FreePages(BTreeMap<u64, Vec<PageId>>);

impl FreePages {
    pub(super) fn add(&mut self, bytes: u64, page: PageId) {
        self.0.entry(bytes).or_default().push(page);
    }

    pub(super) fn has(&self, bytes: u64) -> bool {
        self.0.contains_key(&bytes)
    }

    pub(super) fn take(&mut self, bytes: u64) -> Option<PageId> {
        let list = self.0.get_mut(&bytes)?;
        let page = list.pop();
        if list.is_empty() {
            self.0.remove(&bytes);
        }
        page
    }

    pub(super) fn take_largest(&mut self) -> Option<PageId> {
        let bytes = *self.0.keys().next_back()?;
        self.take(bytes)
    }

    pub(super) fn lists(&self) -> impl Iterator<Item = (u64, &[PageId])> {
        self.0.iter().map(|(bytes, pages)| (*bytes, pages.as_slice()))
    }

    #[cfg(test)]
    pub(super) fn clear(&mut self) {
        self.0.clear();
    }
}

/// Driver calls that create or release pages, counted before a release: after it, other threads may
/// create pages from the memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RunningCalls {
    creating: u64,
    /// Pages in release, and their bytes.
    releasing: (u64, u64),
}

impl RunningCalls {
    pub(super) fn begin_create(&mut self, bytes: u64) {
        self.creating += bytes;
    }

    pub(super) fn end_create(&mut self, bytes: u64) {
        self.creating -= bytes;
    }

    pub(super) fn begin_release(&mut self, bytes: u64) {
        self.releasing = (self.releasing.0 + 1, self.releasing.1 + bytes);
    }

    pub(super) fn end_release(&mut self, bytes: u64) {
        self.releasing = (self.releasing.0 - 1, self.releasing.1 - bytes);
    }

    pub(super) fn creating(&self) -> u64 {
        self.creating
    }

    pub(super) fn releasing(&self) -> (u64, u64) {
        self.releasing
    }

    pub(super) fn any(&self) -> bool {
        self.releasing.0 > 0 || self.creating > 0
    }
}

use std::collections::HashMap;

use super::super::{Owner, PageId};

/// Pages of freed blocks that graphs captured before the free may still read. For each, the writing
/// owner and the first space that may use the page for other blocks. Eager work does not use these
/// pages.
#[derive(Default)]
pub(super) struct Passed(HashMap<PageId, Vec<(u64, Owner)>>);

impl Passed {
    pub(super) fn contains(&self, page: PageId) -> bool {
        self.0.contains_key(&page)
    }

    pub(super) fn is_for(&self, page: PageId, space: u64) -> bool {
        self.0.get(&page).is_none_or(|writers| writers.iter().all(|(from, _)| space >= *from))
    }

    /// Spaces from `from` on may use the page.
    pub(super) fn add(&mut self, page: PageId, from: u64, writer: Owner) {
        self.0.insert(page, vec![(from, writer)]);
    }

    pub(super) fn take(
        &mut self,
        count: usize,
        space: u64,
        unseen: impl Fn(PageId) -> bool,
        writer: (u64, Owner),
    ) -> Vec<PageId> {
        let fits = |page: &PageId| self.is_for(*page, space) && unseen(*page);
        let mut taken: Vec<PageId> = self.0.keys().copied().filter(fits).collect();
        taken.sort_unstable();
        taken.truncate(count);
        for page in &taken {
            self.0.entry(*page).or_default().push(writer);
        }
        taken
    }

    /// Removes a writer whose graph ended. Returns whether it had pages.
    pub(super) fn end(&mut self, writer: Owner) -> bool {
        let mut changed = false;
        self.0.retain(|_, writers| {
            let before = writers.len();
            writers.retain(|(_, of)| *of != writer);
            changed |= writers.len() < before;
            !writers.is_empty()
        });
        changed
    }

    pub(super) fn retain(&mut self, there: impl Fn(PageId) -> bool) {
        self.0.retain(|page, _| there(*page));
    }
}

//! Work that may still access mapped pages.

use std::collections::BTreeSet;

use super::planes::Place;
use crate::pages::{Fence, Poll};

#[derive(Debug)]
pub(super) struct Batch {
    pub(super) fence: Fence,
    pub(super) pages: BTreeSet<Place>,
}

impl Batch {
    /// A fence whose query fails is not over.
    pub(super) fn is_over(&mut self, poll: &mut Poll<'_>) -> bool {
        self.fence.done_at(poll).unwrap_or(false)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// User of a page before its last commit: new users and the unmap wait.
    Previous,
    /// User of released blocks, on a page with other blocks: the unmap waits, and new users once a
    /// block is backed there again.
    Neighbour,
    /// A lender's own work, at other addresses: new users wait; the unmap does not.
    Lender,
}

#[derive(Debug, Default)]
pub(super) struct Users(Vec<(Kind, Batch)>);

impl Users {
    pub(super) fn add(&mut self, kind: Kind, pages: impl IntoIterator<Item = Place>, fence: Fence) {
        if fence.is_empty() {
            return;
        }
        let pages: BTreeSet<Place> = pages.into_iter().collect();
        if !pages.is_empty() {
            self.0.push((kind, Batch { fence, pages }));
        }
    }

    /// Returns their parts on these pages.
    pub(super) fn take(&mut self, kinds: &[Kind], pages: &BTreeSet<Place>) -> Vec<Batch> {
        let mut parts = Vec::new();
        self.0.retain_mut(|(kind, batch)| {
            if kinds.contains(kind) {
                let shared: BTreeSet<Place> = batch.pages.intersection(pages).copied().collect();
                if !shared.is_empty() {
                    batch.pages.retain(|place| !shared.contains(place));
                    parts.push(Batch { fence: batch.fence.clone(), pages: shared });
                }
            }
            !batch.pages.is_empty()
        });
        parts
    }

    pub(super) fn drop_done(&mut self, poll: &mut Poll<'_>) {
        self.0.retain_mut(|(_, batch)| !batch.is_over(poll));
    }

    pub(super) fn fence(&self, kinds: &[Kind]) -> Fence {
        let mut fence = Fence::default();
        let found = self.0.iter().filter(|(kind, _)| kinds.contains(kind));
        found.for_each(|(_, batch)| fence.join(batch.fence.clone()));
        fence
    }
}

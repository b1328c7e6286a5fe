//! Tape of the shared set: the pages of all bump spaces in a row.

use std::collections::{BTreeMap, HashSet};

use super::super::{PageId, Transaction};
use super::SharedSet;
use crate::error::Result;

/// Byte of the tape to page and bytes.
#[derive(Default)]
pub(super) struct Tape(BTreeMap<u64, (PageId, u64)>);

impl Tape {
    pub(super) fn pages(&self) -> impl Iterator<Item = (PageId, u64)> {
        self.0.iter().map(|(at, (page, _))| (*page, *at))
    }

    pub(super) fn retain(&mut self, there: impl Fn(PageId) -> bool) {
        self.0.retain(|_, (page, _)| there(*page));
    }
}

impl SharedSet {
    /// Returns the pages of the tape in `[from, to)`, pinned: start and bytes of each. A new page
    /// at the end extends to `to`, by at least a sixteenth of the tape or half a large page,
    /// whichever is less, so slightly larger spaces do not fragment the tape.
    pub fn tape(&self, transaction: &mut Transaction, from: u64, to: u64) -> Result<Vec<(u64, PageId, u64)>> {
        let numbers = &mut *self.numbers.lock();
        let mut found = Vec::new();
        let mut at = from;
        while at < to {
            let there = numbers.tape.0.get(&at).copied();
            let page = match there.filter(|(page, _)| transaction.pin_owned(*page, self.owner()).is_some()) {
                Some(page) => page,
                None => {
                    // The page at `at` is gone; later pages of the arena stay at their bytes.
                    numbers.tape.0.retain(|start, (page, _)| {
                        *start < at || *start > at && self.pool.owner(*page) == Some(self.owner())
                    });
                    let next = numbers.tape.0.range(at..).next().map(|(start, _)| *start);
                    let least = (at / 16).min(self.geometry.large() / 2);
                    let bytes = (to - at).max(least).next_multiple_of(self.geometry.small());
                    let bytes = next.map_or(bytes, |next| bytes.min(next - at));
                    let page = (self.spare_or_new(transaction, numbers, bytes, &HashSet::new(), 0)?, bytes);
                    numbers.tape.0.insert(at, page);
                    page
                }
            };
            found.push((at, page.0, page.1));
            at += page.1;
        }
        Ok(found)
    }

    /// Returns the start of the page at a byte of the tape, or the byte at the tape's end.
    #[must_use]
    pub fn tape_start(&self, at: u64) -> u64 {
        let numbers = self.numbers.lock();
        let found = numbers.tape.0.range(..=at).next_back();
        found.filter(|(start, (_, bytes))| at < *start + bytes).map_or(at, |(start, _)| *start)
    }
}

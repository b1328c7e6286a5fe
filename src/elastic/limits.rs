use std::collections::BTreeMap;

/// Result of setting an external limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitChange {
    /// The limit holds, and no block beyond has memory.
    Applied,
    /// The limit holds for grants; blocks beyond keep their memory until their release.
    Deferred,
    /// Ignored: a later revision is known.
    Stale,
    /// Ignored: this revision had a different limit.
    Conflict,
}

#[derive(Debug)]
pub(super) struct Limits {
    /// Blocks below are usable, if backed.
    usable: u64,
    limit: u64,
    revision: Option<u64>,
    /// Requests ahead of need, and the smallest size of the cache since each.
    ahead: BTreeMap<u64, u64>,
    next: u64,
}

impl Limits {
    pub(super) fn new(most: u64) -> Self {
        Self { usable: 0, limit: most, revision: None, ahead: BTreeMap::new(), next: 0 }
    }

    pub(super) fn usable(&self) -> u64 {
        self.usable
    }

    pub(super) fn limit(&self) -> u64 {
        self.limit
    }

    pub(super) fn revision(&self) -> Option<u64> {
        self.revision
    }

    /// Registers a request until [`end_ahead`](Self::end_ahead). Returns its number.
    pub(super) fn begin_ahead(&mut self) -> u64 {
        self.next += 1;
        self.ahead.insert(self.next, u64::MAX);
        self.next
    }

    pub(super) fn end_ahead(&mut self, number: u64) {
        self.ahead.remove(&number);
    }

    /// Largest size for a request: a later shrink is final.
    pub(super) fn cap(&self, ahead: Option<u64>) -> u64 {
        ahead.and_then(|number| self.ahead.get(&number).copied()).unwrap_or(u64::MAX)
    }

    /// Makes the blocks below `end` usable, up to the limit and the cap of the request, which is
    /// returned.
    pub(super) fn raise(&mut self, end: u64, ahead: Option<u64>) -> u64 {
        let most = self.limit.min(self.cap(ahead));
        self.usable = self.usable.max(end.min(most));
        most
    }

    pub(super) fn shrink(&mut self, blocks: u64) {
        self.usable = self.usable.min(blocks);
        self.ahead.values_mut().for_each(|cap| *cap = (*cap).min(blocks));
    }

    pub(super) fn set(&mut self, blocks: u64, revision: u64) -> LimitChange {
        match self.revision {
            Some(known) if revision < known => return LimitChange::Stale,
            Some(known) if revision == known && blocks != self.limit => return LimitChange::Conflict,
            _ => {}
        }
        (self.limit, self.revision) = (blocks, Some(revision));
        self.usable = self.usable.min(blocks);
        LimitChange::Applied
    }
}

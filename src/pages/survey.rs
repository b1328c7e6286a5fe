//! Snapshot of all pages of a device: the pages of one arena with their addresses, and totals of
//! all other owners.

use std::collections::{BTreeMap, HashMap, HashSet};

use super::lent::Lent;
use super::owner::Tally;
use super::{Owner, PageId, PageNo, PagePool, RangeId};
use crate::units::Address;

#[derive(Clone, Debug)]
pub(crate) struct SurveyedPage {
    pub(crate) id: PageId,
    pub(crate) bytes: u64,
    pub(crate) owner: Owner,
    /// The arena is paused.
    pub(crate) non_resident: bool,
    pub(crate) lease: Option<u64>,
    /// Mapped ranges and addresses, without pending unmaps.
    pub(crate) shown: Vec<(RangeId, Address)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Other {
    pub(crate) owner: Owner,
    /// Of its account; empty without one.
    pub(crate) name: String,
    pub(crate) pages: u64,
    pub(crate) bytes: u64,
}

#[derive(Clone, Debug)]
pub(crate) struct Survey {
    pub(crate) pages: Vec<SurveyedPage>,
    pub(crate) others: Vec<Other>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PageName {
    Number(PageNo),
    /// First byte on the tape.
    Tape(u64),
}

impl PagePool {
    /// Walks all pages once, under the pool's lock, and the mappings of the arena's pages.
    pub(crate) fn survey(&self, arena: u64) -> Survey {
        let state = self.lock();
        let going: HashSet<RangeId> = state.pending.ranges().collect();
        let mut parts: HashMap<RangeId, Vec<(u64, u64)>> = HashMap::new();
        for (range, from, bytes) in state.pending.parts() {
            parts.entry(range).or_default().push((from, from.saturating_add(bytes)));
        }
        let (mut pages, mut others) = (Vec::new(), BTreeMap::<_, Tally>::new());
        for (id, page) in &state.pages {
            if page.owner.arena() != Some(arena) {
                if page.handle.is_none() {
                    continue;
                }
                let other = others.entry((page.owner, page.account)).or_default();
                other.pages += 1;
                other.bytes += page.bytes;
                continue;
            }
            let there = page.mappings.iter().filter(|(range, at)| {
                let leaves = |(from, to): &(u64, u64)| (*from..*to).contains(at);
                !going.contains(range) && !parts.get(range).is_some_and(|parts| parts.iter().any(leaves))
            });
            let shown = there.filter_map(|(range, at)| {
                state.ranges.get(*range).map(|found| (*range, found.base.plus(*at)))
            });
            let (bytes, owner, non_resident) = (page.bytes, page.owner, page.handle.is_none());
            let lease = state.lent.get(&id).map(Lent::lease);
            pages.push(SurveyedPage { id, bytes, owner, non_resident, lease, shown: shown.collect() });
        }
        let others = others.into_iter().map(|((owner, account), tally)| {
            let name = account.and_then(|account| state.accounts.label(account)).unwrap_or_default();
            Other { owner, name: name.to_owned(), pages: tally.pages, bytes: tally.bytes }
        });
        let others = others.collect();
        Survey { pages, others }
    }
}

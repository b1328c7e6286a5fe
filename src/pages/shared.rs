//! The numbered pages that all spaces of one arena may map, and the tape of its bump spaces.
//!
//! The tables may be out of date: a page that no space maps any more is the device's, under another name, and one that a seal made a
//! space's own has another holder. So what stands here counts only if the pool says that this arena has it still.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::sync::Arc;

use super::survey::PageName;
use super::{Account, Change, Class, Fence, Holder, PageId, PageNo, PagePool};
use crate::error::Result;
use crate::sync::Mutex;
use crate::units::{Geometry, Peers};

/// Pages shared by graphs that never run at the same time.
pub struct SharedSet {
    pool: Arc<PagePool>,
    arena: u64,
    account: Account,
    geometry: Geometry,
    peers: Peers,
    numbers: Mutex<Numbers>,
}

#[derive(Default)]
struct Numbers {
    pages: HashMap<PageNo, PageId>,
    /// What the arena's bump spaces show, from its beginning on: byte of the tape to the page there and its bytes.
    tape: BTreeMap<u64, (PageId, u64)>,
    /// Pages without a number, by size: once retained, since freed, still mapped where they were.
    spare: BTreeMap<u64, Vec<PageId>>,
    /// Retained pages whose blocks were freed, while other streams may still use those.
    returning: Vec<(Fence, PageId, Holder)>,
}

impl SharedSet {
    /// An empty set for arena number `arena`, whose pages count toward an account.
    #[must_use]
    pub fn new(pool: &Arc<PagePool>, arena: u64, account: Account, geometry: Geometry, peers: Peers) -> Self {
        Self { pool: Arc::clone(pool), arena, account, geometry, peers, numbers: Mutex::default() }
    }

    /// Who may use the arena's pages besides its device.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.peers
    }

    /// The device's pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// The number of the arena whose set this is.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.arena
    }

    /// The account of its pages, and of those of its spaces.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// The page sizes.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Who has the shared pages.
    #[must_use]
    pub fn holder(&self) -> Holder {
        Holder::Shared { arena: self.arena }
    }

    /// The page with this number, which the change relies on; a spare, a free or a new one if the number has none.
    ///
    /// The lock is held across the driver's call: two spaces that need the same number must get one page.
    ///
    /// # Errors
    /// Those of [`Change::take`].
    pub fn page(&self, change: &mut Change, no: PageNo) -> Result<PageId> {
        let numbers = &mut *self.numbers.lock();
        if let Some(page) = numbers.pages.get(&no)
            && change.rely_on(*page, self.holder()).is_some()
        {
            return Ok(*page);
        }
        let bytes = match no.class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        };
        let page = self.spare_or_new(change, numbers, bytes)?;
        numbers.pages.insert(no, page);
        Ok(page)
    }

    /// The pages of the tape behind `[from, to)`, which the change relies on: where each begins, and its bytes. Where the tape ends, a
    /// new one reaches to `to` and is no shorter than a sixteenth of the tape or half a large page, whichever is less: spaces that each
    /// need a little more than the last would cut it into crumbs.
    ///
    /// # Errors
    /// As [`page`](Self::page).
    pub fn tape(&self, change: &mut Change, from: u64, to: u64) -> Result<Vec<(u64, PageId, u64)>> {
        let numbers = &mut *self.numbers.lock();
        let mut found = Vec::new();
        let mut at = from;
        while at < to {
            let there = numbers.tape.get(&at).copied();
            let page = match there.filter(|(page, _)| change.rely_on(*page, self.holder()).is_some()) {
                Some(page) => page,
                None => {
                    // What the arena has behind this stays where it is; what it had here is gone.
                    numbers.tape.retain(|start, (page, _)| {
                        *start < at || *start > at && self.pool.holder(*page) == Some(self.holder())
                    });
                    let next = numbers.tape.range(at..).next().map(|(start, _)| *start);
                    let least = (at / 16).min(self.geometry.large() / 2);
                    let bytes = (to - at).max(least).next_multiple_of(self.geometry.small());
                    let bytes = next.map_or(bytes, |next| bytes.min(next - at));
                    let page = (self.spare_or_new(change, numbers, bytes)?, bytes);
                    numbers.tape.insert(at, page);
                    page
                }
            };
            found.push((at, page.0, page.1));
            at += page.1;
        }
        Ok(found)
    }

    /// Where the page begins that holds a byte of the tape; the byte itself if the tape ends there.
    #[must_use]
    pub fn tape_start(&self, at: u64) -> u64 {
        let numbers = self.numbers.lock();
        let found = numbers.tape.range(..=at).next_back();
        found.filter(|(start, (_, bytes))| at < *start + bytes).map_or(at, |(start, _)| *start)
    }

    fn spare_or_new(&self, change: &mut Change, numbers: &mut Numbers, bytes: u64) -> Result<PageId> {
        self.settle(numbers);
        while let Some(page) = numbers.spare.get_mut(&bytes).and_then(Vec::pop) {
            if change.rely_on(page, self.holder()).is_some() {
                return Ok(page);
            }
        }
        change.take(bytes, self.holder(), self.account.id())
    }

    /// The way back of a retained page whose blocks were freed: once a fence is done, every space may map it again, under whatever
    /// number needs a cell of its size. It stays mapped where it is.
    pub fn give(&self, page: PageId, from: Holder, fence: Fence) {
        let mut numbers = self.numbers.lock();
        numbers.returning.push((fence, page, from));
        self.settle(&mut numbers);
    }

    /// Makes spares of the pages that came back, as far as their fences are done.
    pub fn settle_returning(&self) {
        self.settle(&mut self.numbers.lock());
    }

    /// Makes spares of the pages that came back. The number that one had before it was retained may still list it: it has none now, or
    /// a space would meet it under two.
    fn settle(&self, numbers: &mut Numbers) {
        let Numbers { pages, spare, returning, .. } = numbers;
        returning.retain_mut(|(fence, page, from)| {
            if !fence.done(self.pool.events()).unwrap_or(false) {
                return true;
            }
            if let Some(bytes) = self.pool.hand_over(*page, *from, self.holder(), false) {
                pages.retain(|_, listed| listed != page);
                spare.entry(bytes).or_default().push(*page);
            }
            false
        });
    }

    /// What the arena calls its shared pages. A name may be out of date: it counts if the pool says that the arena has the page still.
    pub(crate) fn names(&self) -> HashMap<PageId, PageName> {
        let numbers = self.numbers.lock();
        let numbered = numbers.pages.iter().map(|(no, page)| (*page, PageName::Number(*no)));
        numbered.chain(numbers.tape.iter().map(|(at, (page, _))| (*page, PageName::Tape(*at)))).collect()
    }

    /// Forgets what this arena does not have any more, so that the tables are no longer than what they say.
    pub fn forget(&self) {
        let mut numbers = self.numbers.lock();
        let holder = Some(self.holder());
        let there = |id: PageId| self.pool.holder(id) == holder;
        let Numbers { pages, tape, spare, .. } = &mut *numbers;
        pages.retain(|_, id| there(*id));
        tape.retain(|_, (id, _)| there(*id));
        spare.retain(|_, list| {
            list.retain(|id| there(*id));
            !list.is_empty()
        });
    }
}

impl fmt::Debug for SharedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSet").field("arena", &self.arena).finish_non_exhaustive()
    }
}

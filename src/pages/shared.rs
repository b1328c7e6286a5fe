//! Shared set of an arena: the numbered pages that all its spaces may map, and the tape of its bump
//! spaces.
//!
//! A number gets a page when a space first needs it, and loses the page when a seal or eager work
//! gives it to a new owner, or when no space maps it. Spaces with the same number map the same
//! page.
//!
//! * **Spare page**: without a number, still mapped by graphs. Serves the next number without a
//!   page.
//! * **Tape**: the pages of all bump spaces in a row, mapped from its start.
//! * **Version**: changes when spaces must check their pages before the next launch.
//!
//! An entry is valid only if the pool names this arena as the owner
//! ([`is_ours`](SharedSet::is_ours)). One mutex guards the tables ([`Numbers`]), also across the
//! creation of a page, so two spaces with the same number get one page.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::survey::PageName;
use super::{Account, Class, Fence, Mark, Owner, PageId, PageNo, PagePool, Poll, Transaction};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::{Geometry, Peers};

mod lend;
mod passed;
mod tape;

use passed::Passed;
use tape::Tape;

/// Devices with access to an arena's pages, besides its own device.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetPeers {
    /// All pages.
    pub all: Peers,
    /// Pages of peer-visible (remote) and private blocks; includes `all`.
    pub remote: Peers,
}

/// Pages shared by graphs that never run at the same time.
pub struct SharedSet {
    pool: Arc<PagePool>,
    arena: u64,
    account: Account,
    geometry: Geometry,
    peers: SetPeers,
    numbers: Mutex<Numbers>,
    /// See [`version`](Self::version).
    version: AtomicU64,
}

const MARKS: usize = 8;

#[derive(Default)]
struct Numbers {
    pages: HashMap<PageNo, PageId>,
    tape: Tape,
    /// Pages without a number, by size: formerly live-out, still mapped.
    spare: BTreeMap<u64, Vec<PageId>>,
    /// Live-out pages with only freed blocks: fence, page, previous owner, first space that may use
    /// the page.
    returning: Vec<(Fence, PageId, Owner, u64)>,
    /// Recent versions, each with a mark after all replays before.
    marks: VecDeque<(u64, Mark)>,
    /// Pages which stay at their numbers and addresses.
    pinned: HashSet<PageId>,
    passed: Passed,
    /// Eager scopes active or waiting: pages may leave their numbers when one ends.
    eager: u32,
}

impl SharedSet {
    /// Creates an empty set; its pages are charged to `account`.
    #[must_use]
    pub fn new(
        pool: &Arc<PagePool>,
        arena: u64,
        account: Account,
        geometry: Geometry,
        peers: SetPeers,
    ) -> Self {
        let (pool, numbers, version) = (Arc::clone(pool), Mutex::default(), AtomicU64::new(0));
        Self { pool, arena, account, geometry, peers, numbers, version }
    }

    /// Returns the devices with access to the arena's pages.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.peers.all
    }

    /// Returns the devices with access to peer-visible and private blocks.
    #[must_use]
    pub fn remote_peers(&self) -> Peers {
        self.peers.remote
    }

    /// Returns the device's pool.
    #[must_use]
    pub fn pool(&self) -> &Arc<PagePool> {
        &self.pool
    }

    /// Returns the arena's number.
    #[must_use]
    pub fn arena(&self) -> u64 {
        self.arena
    }

    /// Returns the account of the arena and its spaces.
    #[must_use]
    pub fn account(&self) -> &Account {
        &self.account
    }

    /// Returns the page sizes.
    #[must_use]
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }

    /// Returns the bytes of a page of this class.
    #[must_use]
    pub fn page_bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    /// Returns the owner of the shared pages.
    #[must_use]
    pub fn owner(&self) -> Owner {
        Owner::Shared { arena: self.arena }
    }

    /// Returns the page of a number, pinned by the transaction: its own, a spare, a free or a new
    /// one. `space` is the calling space; 0: eager work, for a number whose page [may be
    /// replaced](Self::is_pinned).
    ///
    /// # Errors
    /// As [`Transaction::take`]; [`Error::Lent`].
    pub fn page(&self, transaction: &mut Transaction, no: PageNo, space: u64) -> Result<PageId> {
        self.page_apart(transaction, no, &HashSet::new(), space)
    }

    /// Like [`page`](Self::page), but skips numbers with a page in `shown`, already mapped by the
    /// caller.
    pub fn page_apart(
        &self,
        transaction: &mut Transaction,
        from: PageNo,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        let numbers = &mut *self.numbers.lock();
        let mut no = from;
        let passed_over = |page: &PageId| {
            shown.contains(page) || !numbers.passed.is_for(*page, space) && self.is_ours(*page)
        };
        while numbers.pages.get(&no).is_some_and(passed_over) {
            no.index += 1;
        }
        self.numbered(numbers, transaction, no, shown, space)
    }

    fn numbered(
        &self,
        numbers: &mut Numbers,
        transaction: &mut Transaction,
        no: PageNo,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        if let Some(page) = numbers.pages.get(&no).copied()
            && transaction.pin_owned(page, self.owner()).is_some()
        {
            let leases = self.pool.leases([page].iter());
            return if leases.is_empty() { Ok(page) } else { Err(Error::Lent { leases }) };
        }
        let page = self.spare_or_new(transaction, numbers, self.page_bytes(no.class), shown, space)?;
        numbers.pages.insert(no, page);
        if numbers.passed.contains(page) {
            // Older spaces skip this number, as they may already map the next one's page.
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        Ok(page)
    }

    /// Returns the version. It changes when a page leaves its number, is lent or pinned, or when
    /// its set of allowed spaces changes. A space with an older version [checks](Self::is_ours) its
    /// pages before the device uses them.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Whether the page is a shared page of this arena.
    #[must_use]
    pub fn is_ours(&self, page: PageId) -> bool {
        self.pool.owner(page) == Some(self.owner())
    }

    /// Returns the current page of a number.
    #[must_use]
    pub fn listed(&self, no: PageNo) -> Option<PageId> {
        let page = self.numbers.lock().pages.get(&no).copied();
        page.filter(|page| self.is_ours(*page))
    }

    /// Counts eager work about to begin.
    pub fn begin_eager(&self) {
        self.numbers.lock().eager += 1;
    }

    /// Ends eager work.
    pub fn end_eager(&self) {
        self.numbers.lock().eager -= 1;
    }

    /// Gives pages, which stay mapped, to a new owner and frees their numbers. Returns how many
    /// changed owner. `before`: a mark after all replays before the work that wrote to these pages.
    pub fn leave(&self, pages: &[(PageNo, PageId)], to: Owner, before: Mark) -> u64 {
        let numbers = &mut *self.numbers.lock();
        let mut left = 0;
        for (no, page) in pages {
            if self.pool.hand_over(*page, self.owner(), to, false).is_some() {
                if numbers.pages.get(no) == Some(page) {
                    numbers.pages.remove(no);
                }
                left += 1;
            }
        }
        if left > 0 {
            let version = self.version.fetch_add(1, Ordering::SeqCst) + 1;
            numbers.marks.push_back((version, before));
            if numbers.marks.len() > MARKS {
                numbers.marks.pop_front();
            }
        }
        left
    }

    /// Returns a mark after every replay launched at `version`, if known.
    #[must_use]
    pub fn behind(&self, version: u64) -> Option<Mark> {
        let numbers = self.numbers.lock();
        numbers.marks.iter().find(|(began, _)| *began > version).map(|(_, mark)| mark.clone())
    }

    /// Takes back a page given away by [`leave`](Self::leave), used in replay order only. It gets
    /// `no` if free (returns true), else becomes a spare page.
    pub fn return_page(&self, page: PageId, from: Owner, no: PageNo) -> bool {
        let numbers = &mut *self.numbers.lock();
        let Some(bytes) = self.pool.hand_over(page, from, self.owner(), false) else { return false };
        if numbers.pages.get(&no).is_some_and(|listed| self.is_ours(*listed)) {
            numbers.spare.entry(bytes).or_default().push(page);
            return false;
        }
        numbers.pages.insert(no, page);
        true
    }

    /// Pins pages for the rest of their life: they never leave their numbers.
    ///
    /// # Errors
    /// [`Error::WrongState`] if a page is not shared any more, or eager work is active.
    pub fn pin_pages(&self, pages: &HashSet<PageId>) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let numbers = &mut *self.numbers.lock();
        if numbers.eager > 0 || pages.iter().any(|page| !self.is_ours(*page)) {
            return Err(Error::wrong_state(
                "cannot pin pages of the arena: eager work uses them; end the eager scope first",
            ));
        }
        numbers.pinned.extend(pages);
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Called after the export pin of a page. Fails while eager work is active
    /// ([`Error::WrongState`]), since a page could leave its number.
    pub fn note_export(&self) -> Result<()> {
        let numbers = self.numbers.lock();
        if numbers.eager > 0 {
            return Err(Error::wrong_state(
                "cannot pin a page of the arena: an eager scope is active; end it first",
            ));
        }
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Whether the page of this number is pinned, exported, or reserved for older graphs.
    #[must_use]
    pub fn is_pinned(&self, no: PageNo) -> bool {
        let numbers = self.numbers.lock();
        numbers.pages.get(&no).is_some_and(|page| self.keeps_number(&numbers, *page))
    }

    fn keeps_number(&self, numbers: &Numbers, page: PageId) -> bool {
        numbers.pinned.contains(&page) || numbers.passed.contains(page) || self.pool.is_exported(page)
    }

    fn spare_or_new(
        &self,
        transaction: &mut Transaction,
        numbers: &mut Numbers,
        bytes: u64,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        self.reap(numbers);
        // Eager work must not get a page reserved for older graphs.
        let space = if numbers.eager > 0 { 0 } else { space };
        let Numbers { spare, passed, .. } = numbers;
        if let Some(spare) = spare.get_mut(&bytes) {
            let fits = |page: &PageId| !shown.contains(page) && passed.is_for(*page, space);
            while let Some(at) = spare.iter().rposition(fits) {
                let page = spare.remove(at);
                if transaction.pin_owned(page, self.owner()).is_some() {
                    return Ok(page);
                }
            }
        }
        transaction.take(bytes, self.owner(), self.account.id())
    }

    /// Returns a live-out page with only freed blocks. After the fence, the page becomes spare, for
    /// spaces from number `since` on. It stays mapped at its addresses.
    pub fn give(&self, page: PageId, from: Owner, fence: Fence, since: u64) {
        let mut numbers = self.numbers.lock();
        numbers.returning.push((fence, page, from, since));
        self.reap(&mut numbers);
    }

    /// Whether the space may map the shared page.
    #[must_use]
    pub fn is_for(&self, page: PageId, space: u64) -> bool {
        self.numbers.lock().passed.is_for(page, space)
    }

    /// Takes up to `count` pages of `bytes` for blocks written by one space and read only by graphs
    /// captured since: pages with such blocks of earlier graphs, mapped by no space from `space`
    /// on. In capture order no other graph writes them between the space's graph and the last
    /// reader. `writer` owns the space; spaces from `until` on may use the pages for other blocks.
    pub fn take_passed(
        &self,
        (bytes, count): (u64, usize),
        (space, writer): (u64, Owner),
        until: u64,
    ) -> Vec<PageId> {
        let numbers = &mut *self.numbers.lock();
        self.reap(numbers);
        let Numbers { passed, pinned, .. } = numbers;
        let unseen =
            |page: PageId| !pinned.contains(&page) && self.pool.is_unseen(page, (self.owner(), bytes), space);
        passed.take(count, space, unseen, (until, writer))
    }

    /// Called at the end of a graph: no graph reads the blocks this owner wrote.
    pub fn gone(&self, from: Owner) {
        let numbers = &mut *self.numbers.lock();
        let returning = numbers.returning.iter_mut().filter(|(_, _, of, _)| *of == from);
        returning.for_each(|(.., since)| *since = 0);
        if numbers.passed.end(from) {
            self.version.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Makes returned pages with finished fences spare.
    pub fn reap_returning(&self) {
        self.reap(&mut self.numbers.lock());
    }

    /// Removes an earlier number of such a page: otherwise a space could find one page under two
    /// numbers.
    fn reap(&self, numbers: &mut Numbers) {
        let Numbers { pages, spare, returning, passed, .. } = numbers;
        let mut poll = Poll::new(self.pool.events());
        returning.retain_mut(|(fence, page, from, space)| {
            if !fence.done_at(&mut poll).unwrap_or(false) || self.pool.is_exported(*page) {
                return true;
            }
            if let Some(bytes) = self.pool.hand_over(*page, *from, self.owner(), false) {
                pages.retain(|_, listed| listed != page);
                spare.entry(bytes).or_default().push(*page);
                if *space > 0 {
                    passed.add(*page, *space, *from);
                }
            }
            false
        });
    }

    /// A name is valid only if the pool names this arena as the owner.
    pub(crate) fn names(&self) -> HashMap<PageId, PageName> {
        let numbers = self.numbers.lock();
        let numbered = numbers.pages.iter().map(|(no, page)| (*page, PageName::Number(*no)));
        numbered.chain(numbers.tape.pages().map(|(page, at)| (page, PageName::Tape(at)))).collect()
    }

    /// Removes stale entries.
    pub fn forget(&self) {
        let mut numbers = self.numbers.lock();
        let owner = Some(self.owner());
        let there = |id: PageId| self.pool.owner(id) == owner;
        let Numbers { pages, tape, spare, pinned, passed, .. } = &mut *numbers;
        pinned.retain(|id| there(*id));
        passed.retain(there);
        pages.retain(|_, id| there(*id));
        tape.retain(there);
        spare.retain(|_, list| {
            list.retain(|id| there(*id));
            !list.is_empty()
        });
    }
}

impl Drop for SharedSet {
    fn drop(&mut self) {
        self.pool.forget_candidates(&self.account);
    }
}

impl fmt::Debug for SharedSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedSet").field("arena", &self.arena).finish_non_exhaustive()
    }
}

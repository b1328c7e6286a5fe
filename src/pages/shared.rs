//! Shared set of an arena: the numbered pages that all its spaces may map, and the tape of its bump
//! spaces.
//!
//! Page numbers are stable, pages are not. A number gets a page when a space first needs the
//! number. The number loses the page when a seal or eager work gives the page to a new owner, or
//! when no space maps the page. Spaces with the same number map the same page.
//!
//! * **Spare page**: a shared page without a number, still mapped by graphs. Serves the next number
//!   without a page.
//! * **Tape**: the pages of all bump spaces in a row. Every bump space maps the tape from its
//!   start.
//! * **Version**: changes when spaces must check their pages before the next launch.
//!
//! The tables may be stale: a page freed by its last space has a new key, and a page sealed into a
//! space has a new owner. So an entry is valid only if the pool names this arena as the owner
//! ([`is_ours`](SharedSet::is_ours)).
//!
//! One mutex guards the tables ([`Numbers`]). The mutex is held across calls into the pool,
//! including the creation of a page, so two spaces with the same number get one page.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::survey::PageName;
use super::{Account, Class, Fence, Mark, Owner, PageId, PageNo, PagePool, Poll, Transaction};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::{Geometry, Peers};

/// Devices with access to an arena's pages, besides its own device.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetPeers {
    /// Access to all pages.
    pub all: Peers,
    /// Access to pages of peer-visible (remote) and private blocks. Includes `all`.
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
    /// Changes when a space must check its pages again: see [`version`](Self::version).
    version: AtomicU64,
}

/// Returns the leases on pages, each once, ascending.
fn leases_of<'a>(pages: impl Iterator<Item = &'a (u32, PageId, Option<u64>)>) -> Vec<u64> {
    pages.filter_map(|(.., lease)| *lease).collect::<BTreeSet<_>>().into_iter().collect()
}

/// Number of newest marks kept.
const MARKS: usize = 8;

#[derive(Default)]
struct Numbers {
    pages: HashMap<PageNo, PageId>,
    /// Pages of the bump spaces' tape: byte of the tape to page and bytes.
    tape: BTreeMap<u64, (PageId, u64)>,
    /// Pages without a number, by size. Formerly live-out, freed since, still mapped at their
    /// addresses.
    spare: BTreeMap<u64, Vec<PageId>>,
    /// Live-out pages with only freed blocks, possibly still in use by a stream: fence, page,
    /// previous owner, and first space that may use the page.
    returning: Vec<(Fence, PageId, Owner, u64)>,
    /// For recent versions: the version, and a mark after all replays before the version.
    marks: VecDeque<(u64, Mark)>,
    /// Pinned pages: they stay at their numbers and addresses.
    pinned: HashSet<PageId>,
    /// Pages of freed blocks that graphs captured before the free may still read. Each entry names
    /// the writing space and the first space that may use the page for other blocks. Eager work
    /// does not use these pages.
    since: HashMap<PageId, Vec<(u64, Owner)>>,
    /// Number of eager scopes active or waiting for the replay slot. Pages may leave their numbers
    /// at the end of a scope.
    eager: u32,
}

/// Returns true if the space may map the page.
fn is_for(since: &HashMap<PageId, Vec<(u64, Owner)>>, page: PageId, space: u64) -> bool {
    since.get(&page).is_none_or(|writers| writers.iter().all(|(from, _)| space >= *from))
}

impl SharedSet {
    /// Creates an empty set for an arena. Its pages are charged to `account`.
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

    /// Returns the account of the arena's pages, including those of its spaces.
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

    /// Returns the page of a number, pinned by the transaction. A number without a page gets a
    /// spare, a free or a new page. `space`: number of the calling space. 0: eager work, for a
    /// number whose page [may be replaced](Self::is_pinned).
    ///
    /// The lock is held across the driver call: two spaces with the same number must get one page.
    ///
    /// # Errors
    /// As [`Transaction::take`]; [`Error::Lent`] for a page on lease.
    pub fn page(&self, transaction: &mut Transaction, no: PageNo, space: u64) -> Result<PageId> {
        self.page_apart(transaction, no, &HashSet::new(), space)
    }

    /// As [`page`](Self::page), but skips numbers with a page in `shown`, the pages already mapped
    /// by the caller.
    ///
    /// # Errors
    /// As [`page`](Self::page).
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
            shown.contains(page) || !is_for(&numbers.since, *page, space) && self.is_ours(*page)
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
        if numbers.since.contains_key(&page) {
            // Older spaces skip this number and use the page of the next one, which they may
            // already map.
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        Ok(page)
    }

    /// Returns the version. The version changes when a page leaves its number, is lent or pinned,
    /// or when its set of allowed spaces changes. A space with an older version
    /// [checks](Self::is_ours) each of its pages before the device uses the pages.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Returns true if the page is a shared page of this arena.
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

    /// Gives pages to a new owner and frees their numbers. The pages stay mapped at all addresses.
    /// Returns how many pages changed owner. `before`: a mark after all replays before the work
    /// that wrote to these pages.
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

    /// Returns a mark after every replay launched at `version`. `None`: no mark of a later version
    /// is known.
    #[must_use]
    pub fn behind(&self, version: u64) -> Option<Mark> {
        let numbers = self.numbers.lock();
        numbers.marks.iter().find(|(began, _)| *began > version).map(|(_, mark)| mark.clone())
    }

    /// Takes back a page given away by [`leave`](Self::leave), used in replay order only. The page
    /// gets `no` if the number has no page, else becomes a spare page. Returns true if the page got
    /// the number.
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

    /// Returns the number of large pages with a number, not on lease and not [bound to the
    /// number](Self::is_pinned).
    #[must_use]
    pub fn lendable(&self) -> u64 {
        self.free_large_ones().len() as u64
    }

    /// Returns these pages, those mapped by the fewest spaces first.
    #[must_use]
    pub(crate) fn free_large_pages(&self) -> Vec<PageId> {
        let free = self.free_large_ones().into_iter();
        let mut ranked: Vec<_> =
            free.map(|(number, page)| (self.pool.shown_by(page), u32::MAX - number, page)).collect();
        ranked.sort_unstable();
        ranked.into_iter().map(|(.., page)| page).collect()
    }

    fn free_large_ones(&self) -> Vec<(u32, PageId)> {
        let numbers = self.numbers.lock();
        let free =
            |page: PageId| !self.keeps_number(&numbers, page) && self.pool.leases([page].iter()).is_empty();
        self.large_ones(&numbers).filter(|(_, page)| free(*page)).collect()
    }

    /// Iterates over large pages with their numbers.
    fn large_ones(&self, numbers: &Numbers) -> impl Iterator<Item = (u32, PageId)> {
        let large = numbers.pages.iter().filter(|(no, _)| no.class == Class::Large);
        large.filter(|(_, page)| self.is_ours(**page)).map(|(no, page)| (no.index, *page))
    }

    /// Takes large pages to lend, pinned by the transaction: pages with a number, not on lease and
    /// not bound to the number, those mapped by the fewest spaces first. Returns `wanted` pages or
    /// all available ones.
    ///
    /// Pages are ranked again only if pages of an arena changed since the last lease, other than by
    /// leases.
    pub(crate) fn to_lend(&self, transaction: &mut Transaction<'_>, wanted: usize) -> Vec<PageId> {
        let (numbers, pool) = (self.numbers.lock(), &self.pool);
        if !pool.is_ranked(&self.account) {
            pool.rank_candidates(&self.account, &self.large_ones(&numbers).collect::<Vec<_>>());
        }
        let (mut taken, mut after) = (Vec::new(), None);
        while taken.len() < wanted {
            after = pool.next_candidate(&self.account, after);
            let Some((.., page)) = after else { break };
            // A trim or seal on a different thread may have taken the page since the ranking.
            let may_leave = self.is_ours(page) && !self.keeps_number(&numbers, page);
            if may_leave && transaction.pin_owned(page, self.owner()) == Some(self.geometry.large()) {
                taken.push(page);
            }
        }
        taken
    }

    /// Returns the numbers of large pages on lease.
    #[must_use]
    pub fn on_lease(&self) -> BTreeSet<u32> {
        if !self.pool.any_lent() {
            return BTreeSet::new();
        }
        self.large().into_iter().filter(|(_, _, lease)| lease.is_some()).map(|(index, ..)| index).collect()
    }

    /// Returns the numbers of large pages on lease, for work that needs `bytes` of other large
    /// pages. A number without a page counts as available, since graphs need a new page for the
    /// number anyway.
    ///
    /// # Errors
    /// [`Error::Lent`] if too few pages are available: names the leases on the lowest numbers,
    /// enough to cover the difference.
    pub fn beside_leases(&self, bytes: u64) -> Result<BTreeSet<u32>> {
        if !self.pool.any_lent() {
            return Ok(BTreeSet::new());
        }
        let (all, page) = (self.large(), self.geometry.large());
        let lent = || all.iter().filter(|(_, _, lease)| lease.is_some());
        let numbers = self.numbers.lock();
        let stay = all
            .iter()
            .filter(|(_, page, lease)| lease.is_none() && self.keeps_number(&numbers, *page))
            .count();
        drop(numbers);
        let most = all.last().map_or(0, |(index, ..)| u64::from(*index) + 1);
        let there = most - (lent().count() + stay) as u64;
        let short = bytes.div_ceil(page).saturating_sub(there);
        if short > 0 && lent().next().is_some() {
            return Err(Error::Lent {
                leases: leases_of(lent().take(usize::try_from(short).unwrap_or(usize::MAX))),
            });
        }
        Ok(lent().map(|(index, ..)| *index).collect())
    }

    /// Returns true if a large page has a number above `index`.
    #[must_use]
    pub fn listed_above(&self, index: u32) -> bool {
        self.large().last().is_some_and(|(last, ..)| *last > index)
    }

    /// Returns the leases on the first `pages` lent large pages, by number.
    #[must_use]
    pub fn leases(&self, pages: usize) -> Vec<u64> {
        leases_of(self.large().iter().filter(|(_, _, lease)| lease.is_some()).take(pages))
    }

    /// Returns all large pages with a number, by number, with their lease.
    fn large(&self) -> Vec<(u32, PageId, Option<u64>)> {
        let numbers = self.numbers.lock();
        let lease = |page: PageId| self.pool.leases([page].iter()).first().copied();
        let mut all: Vec<_> =
            self.large_ones(&numbers).map(|(index, page)| (index, page, lease(page))).collect();
        all.sort_unstable();
        all
    }

    /// Called after a lease: spaces with a lent page must check before the device uses the page.
    pub fn lent(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
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
        // Eager work with such a page must check.
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Called after the export pin of a page: the page keeps its addresses while pinned.
    ///
    /// # Errors
    /// [`Error::WrongState`] while eager work is active, since a page could leave its number.
    pub fn note_export(&self) -> Result<()> {
        let numbers = self.numbers.lock();
        if numbers.eager > 0 {
            return Err(Error::wrong_state(
                "cannot pin a page of the arena: an eager scope is active; end it first",
            ));
        }
        // Eager work with the page must check.
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Returns true if the page of this number is pinned, exported, or reserved for older graphs.
    #[must_use]
    pub fn is_pinned(&self, no: PageNo) -> bool {
        let numbers = self.numbers.lock();
        numbers.pages.get(&no).is_some_and(|page| self.keeps_number(&numbers, *page))
    }

    fn keeps_number(&self, numbers: &Numbers, page: PageId) -> bool {
        numbers.pinned.contains(&page) || numbers.since.contains_key(&page) || self.pool.is_exported(page)
    }

    /// Returns the pages of the tape in `[from, to)`, pinned by the transaction: start and bytes of
    /// each. At the end of the tape, a new page extends to `to`. Its size is at least a sixteenth
    /// of the tape or half a large page, whichever is less. Otherwise a series of slightly larger
    /// spaces would fragment the tape.
    ///
    /// # Errors
    /// As [`page`](Self::page).
    pub fn tape(&self, transaction: &mut Transaction, from: u64, to: u64) -> Result<Vec<(u64, PageId, u64)>> {
        let numbers = &mut *self.numbers.lock();
        let mut found = Vec::new();
        let mut at = from;
        while at < to {
            let there = numbers.tape.get(&at).copied();
            let page = match there.filter(|(page, _)| transaction.pin_owned(*page, self.owner()).is_some()) {
                Some(page) => page,
                None => {
                    // Later pages still owned by the arena stay at their bytes. The page at `at` is
                    // gone.
                    numbers.tape.retain(|start, (page, _)| {
                        *start < at || *start > at && self.pool.owner(*page) == Some(self.owner())
                    });
                    let next = numbers.tape.range(at..).next().map(|(start, _)| *start);
                    let least = (at / 16).min(self.geometry.large() / 2);
                    let bytes = (to - at).max(least).next_multiple_of(self.geometry.small());
                    let bytes = next.map_or(bytes, |next| bytes.min(next - at));
                    let page = (self.spare_or_new(transaction, numbers, bytes, &HashSet::new(), 0)?, bytes);
                    numbers.tape.insert(at, page);
                    page
                }
            };
            found.push((at, page.0, page.1));
            at += page.1;
        }
        Ok(found)
    }

    /// Returns the start of the page at a byte of the tape, or the byte itself at the end of the
    /// tape.
    #[must_use]
    pub fn tape_start(&self, at: u64) -> u64 {
        let numbers = self.numbers.lock();
        let found = numbers.tape.range(..=at).next_back();
        found.filter(|(start, (_, bytes))| at < *start + bytes).map_or(at, |(start, _)| *start)
    }

    fn spare_or_new(
        &self,
        transaction: &mut Transaction,
        numbers: &mut Numbers,
        bytes: u64,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        self.settle(numbers);
        // A number chosen by eager work must not get a page reserved for older graphs.
        let space = if numbers.eager > 0 { 0 } else { space };
        let Numbers { spare, since, .. } = numbers;
        if let Some(spare) = spare.get_mut(&bytes) {
            let fits = |page: &PageId| !shown.contains(page) && is_for(since, *page, space);
            while let Some(at) = spare.iter().rposition(fits) {
                let page = spare.remove(at);
                if transaction.pin_owned(page, self.owner()).is_some() {
                    return Ok(page);
                }
            }
        }
        transaction.take(bytes, self.owner(), self.account.id())
    }

    /// Returns a live-out page with only freed blocks. After the fence, the page becomes spare:
    /// spaces from number `since` on may map the page, under any number of its size. The page stays
    /// mapped at its addresses.
    pub fn give(&self, page: PageId, from: Owner, fence: Fence, since: u64) {
        let mut numbers = self.numbers.lock();
        numbers.returning.push((fence, page, from, since));
        self.settle(&mut numbers);
    }

    /// Returns true if the space may map the shared page.
    #[must_use]
    pub fn is_for(&self, page: PageId, space: u64) -> bool {
        is_for(&self.numbers.lock().since, page, space)
    }

    /// Takes up to `count` pages of `bytes` for blocks written by one space and read only by graphs
    /// captured since. The pages already have such blocks of earlier graphs, and are mapped by no
    /// space from `space` on. `writer`: owner of the space. `until`: first space that may use the
    /// pages for other blocks.
    ///
    /// In capture order no other graph writes these pages between the space's graph and the last
    /// reader.
    pub fn take_passed(
        &self,
        (bytes, count): (u64, usize),
        (space, writer): (u64, Owner),
        until: u64,
    ) -> Vec<PageId> {
        let numbers = &mut *self.numbers.lock();
        self.settle(numbers);
        let Numbers { since, pinned, .. } = numbers;
        let fits = |page: PageId, writers: &[(u64, Owner)]| {
            writers.iter().all(|(from, _)| space >= *from)
                && !pinned.contains(&page)
                && self.pool.is_unseen(page, (self.owner(), bytes), space)
        };
        let mut taken: Vec<PageId> =
            since.iter().filter(|(page, writers)| fits(**page, writers)).map(|(page, _)| *page).collect();
        taken.sort_unstable();
        taken.truncate(count);
        for page in &taken {
            since.entry(*page).or_default().push((until, writer));
        }
        taken
    }

    /// Called at the end of a graph: no graph reads the blocks this owner wrote.
    pub fn gone(&self, from: Owner) {
        let numbers = &mut *self.numbers.lock();
        let returning = numbers.returning.iter_mut().filter(|(_, _, of, _)| *of == from);
        returning.for_each(|(.., since)| *since = 0);
        let mut changed = false;
        numbers.since.retain(|_, writers| {
            let before = writers.len();
            writers.retain(|(_, of)| *of != from);
            changed |= writers.len() < before;
            !writers.is_empty()
        });
        if changed {
            // Eager work with substitute pages must check.
            self.version.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Makes returned pages spare, if their fences are done.
    pub fn settle_returning(&self) {
        self.settle(&mut self.numbers.lock());
    }

    /// Makes returned pages spare, if their fences are done. An earlier number of such a page is
    /// removed: otherwise a space could find one page under two numbers.
    fn settle(&self, numbers: &mut Numbers) {
        let Numbers { pages, spare, returning, since, .. } = numbers;
        let mut poll = Poll::new(self.pool.events());
        returning.retain_mut(|(fence, page, from, space)| {
            // Exported pages are not reused by other graphs.
            if !fence.done_at(&mut poll).unwrap_or(false) || self.pool.is_exported(*page) {
                return true;
            }
            if let Some(bytes) = self.pool.hand_over(*page, *from, self.owner(), false) {
                pages.retain(|_, listed| listed != page);
                spare.entry(bytes).or_default().push(*page);
                if *space > 0 {
                    since.insert(*page, vec![(*space, *from)]);
                }
            }
            false
        });
    }

    /// Returns the names of the shared pages. A name is valid only if the pool names this arena as
    /// the owner.
    pub(crate) fn names(&self) -> HashMap<PageId, PageName> {
        let numbers = self.numbers.lock();
        let numbered = numbers.pages.iter().map(|(no, page)| (*page, PageName::Number(*no)));
        numbered.chain(numbers.tape.iter().map(|(at, (page, _))| (*page, PageName::Tape(*at)))).collect()
    }

    /// Removes stale entries from all tables.
    pub fn forget(&self) {
        let mut numbers = self.numbers.lock();
        let owner = Some(self.owner());
        let there = |id: PageId| self.pool.owner(id) == owner;
        let Numbers { pages, tape, spare, pinned, since, .. } = &mut *numbers;
        pinned.retain(|id| there(*id));
        since.retain(|id, _| there(*id));
        pages.retain(|_, id| there(*id));
        tape.retain(|_, (id, _)| there(*id));
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

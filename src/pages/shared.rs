//! The numbered pages that all spaces of one arena may map, and the tape of its bump spaces.
//!
//! The tables may be out of date: a page that no space maps any more is the device's, under another name, and one that a seal made a
//! space's own has another holder. So what stands here counts only if the pool says that this arena has it still.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;

use super::survey::PageName;
use super::{Account, Change, Class, Fence, Holder, Look, Mark, PageId, PageNo, PagePool};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::units::{Geometry, Peers};

/// Who may use an arena's pages besides its device.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetPeers {
    /// All of them.
    pub all: Peers,
    /// Those of remote and exclusive blocks, and so those above too.
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
    /// Counts how often pages left their numbers.
    version: AtomicU64,
}

/// The leases on pages, each once, ascending.
fn leases_of<'a>(pages: impl Iterator<Item = &'a (u32, PageId, Option<u64>)>) -> Vec<u64> {
    pages.filter_map(|(.., lease)| *lease).collect::<BTreeSet<_>>().into_iter().collect()
}

/// How many of the newest marks are kept.
const MARKS: usize = 8;

#[derive(Default)]
struct Numbers {
    pages: HashMap<PageNo, PageId>,
    /// What the arena's bump spaces show, from its beginning on: byte of the tape to the page there and its bytes.
    tape: BTreeMap<u64, (PageId, u64)>,
    /// Pages without a number, by size: once retained, since freed, still mapped where they were.
    spare: BTreeMap<u64, Vec<PageId>>,
    /// Retained pages whose blocks were freed, while other streams may still use those; whose they were, and from which space on they are for others.
    returning: Vec<(Fence, PageId, Holder, u64)>,
    /// Which version began, and what was replayed before the scope that made it is before this.
    marks: VecDeque<(u64, Mark)>,
    /// Pages that stay where they show: somebody else has taken hold of them.
    fixed: HashSet<PageId>,
    /// Pages of freed blocks that graphs captured before the free may read. Each entry names the space
    /// that writes them and the lowest number of a space that may use the page for something else. While
    /// an entry is there, eager work does not use the page.
    since: HashMap<PageId, Vec<(u64, Holder)>>,
    /// How many pieces of eager work, at whose end pages may leave their numbers, are under way or wait for their turn.
    eager: u32,
}

/// Whether a space may show a page.
fn is_for(since: &HashMap<PageId, Vec<(u64, Holder)>>, page: PageId, space: u64) -> bool {
    since.get(&page).is_none_or(|writers| writers.iter().all(|(from, _)| space >= *from))
}

impl SharedSet {
    /// An empty set for arena number `arena`, whose pages count toward an account.
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

    /// Who may use the arena's pages besides its device.
    #[must_use]
    pub fn peers(&self) -> Peers {
        self.peers.all
    }

    /// Who may use the pages of remote and exclusive blocks.
    #[must_use]
    pub fn remote_peers(&self) -> Peers {
        self.peers.remote
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

    /// Bytes of a page of a class.
    #[must_use]
    pub fn page_bytes(&self, class: Class) -> u64 {
        match class {
            Class::Small => self.geometry.small(),
            Class::Large => self.geometry.large(),
        }
    }

    /// Who has the shared pages.
    #[must_use]
    pub fn holder(&self) -> Holder {
        Holder::Shared { arena: self.arena }
    }

    /// The page with this number, which the change relies on; a spare, a free or a new one if the number has none. `space` is the number of
    /// the space that asks; 0: eager work does, for a number whose page [may leave it](Self::is_fixed).
    ///
    /// The lock is held across the driver's call: two spaces that need the same number must get one page.
    ///
    /// # Errors
    /// Those of [`Change::take`].
    pub fn page(&self, change: &mut Change, no: PageNo, space: u64) -> Result<PageId> {
        self.page_apart(change, no, &HashSet::new(), space)
    }

    /// As [`page`](Self::page), of a number from this one on whose page is not among those that are shown already.
    ///
    /// # Errors
    /// As [`page`](Self::page).
    pub fn page_apart(
        &self,
        change: &mut Change,
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
        self.numbered(numbers, change, no, shown, space)
    }

    fn numbered(
        &self,
        numbers: &mut Numbers,
        change: &mut Change,
        no: PageNo,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        if let Some(page) = numbers.pages.get(&no).copied()
            && change.rely_on(page, self.holder()).is_some()
        {
            let leases = self.pool.leases([page].iter());
            return if leases.is_empty() { Ok(page) } else { Err(Error::Lent { leases }) };
        }
        let page = self.spare_or_new(change, numbers, self.page_bytes(no.class), shown, space)?;
        numbers.pages.insert(no, page);
        if numbers.since.contains_key(&page) {
            // Older spaces do not find it under this number, but the next one's page, which they may show already.
            self.version.fetch_add(1, Ordering::SeqCst);
        }
        Ok(page)
    }

    /// Changes whenever a page leaves its number while others show it, and where a number gets one that not every space may show, or that
    /// all may show again. Who shows pages and finds another version than at the last look is to [look](Self::is_ours) at each of them before the device uses it.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.version.load(Ordering::SeqCst)
    }

    /// Whether a page is one of the shared ones.
    #[must_use]
    pub fn is_ours(&self, page: PageId) -> bool {
        self.pool.holder(page) == Some(self.holder())
    }

    /// The page that a number has now.
    #[must_use]
    pub fn listed(&self, no: PageNo) -> Option<PageId> {
        let page = self.numbers.lock().pages.get(&no).copied();
        page.filter(|page| self.is_ours(*page))
    }

    /// Eager work is about to begin.
    pub fn begin_eager(&self) {
        self.numbers.lock().eager += 1;
    }

    /// Eager work is over.
    pub fn end_eager(&self) {
        self.numbers.lock().eager -= 1;
    }

    /// Pages leave their numbers for another holder, and stay mapped wherever they show; how many. `before` is behind everything replayed
    /// before the work that wrote to them.
    pub fn leave(&self, pages: &[(PageNo, PageId)], to: Holder, before: Mark) -> u64 {
        let numbers = &mut *self.numbers.lock();
        let mut left = 0;
        for (no, page) in pages {
            if self.pool.hand_over(*page, self.holder(), to, false).is_some() {
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

    /// What is behind every replay that was launched at a version which is not the newest.
    #[must_use]
    pub fn behind(&self, version: u64) -> Option<Mark> {
        let numbers = self.numbers.lock();
        numbers.marks.iter().find(|(began, _)| *began > version).map(|(_, mark)| mark.clone())
    }

    /// A page that left comes back, which nothing uses but in the order of replays: as that of a number, if this has none, else as a
    /// spare one; whether it has the number.
    pub fn come_back(&self, page: PageId, from: Holder, no: PageNo) -> bool {
        let numbers = &mut *self.numbers.lock();
        let Some(bytes) = self.pool.hand_over(page, from, self.holder(), false) else { return false };
        if numbers.pages.get(&no).is_some_and(|listed| self.is_ours(*listed)) {
            numbers.spare.entry(bytes).or_default().push(page);
            return false;
        }
        numbers.pages.insert(no, page);
        true
    }

    /// How many large pages have a number, are not on lease and may leave.
    #[must_use]
    pub fn lendable(&self) -> u64 {
        self.free_large_ones().len() as u64
    }

    /// Those pages, the ones that the fewest spaces show first.
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
        let free = |page: PageId| !self.stays(&numbers, page) && self.pool.leases([page].iter()).is_empty();
        self.large_ones(&numbers).filter(|(_, page)| free(*page)).collect()
    }

    /// Large pages that have a number, and their numbers.
    fn large_ones(&self, numbers: &Numbers) -> impl Iterator<Item = (u32, PageId)> {
        let large = numbers.pages.iter().filter(|(no, _)| no.class == Class::Large);
        large.filter(|(_, page)| self.is_ours(**page)).map(|(no, page)| (no.index, *page))
    }

    /// Large pages to lend, on which the change relies: those with a number that are not on lease and may
    /// leave, those that the fewest spaces show first; `wanted` of them, or as many as there are.
    ///
    /// The pages are ranked again only if some of an arena came, went or changed their places since the
    /// last lease, and not for what leases do.
    pub(crate) fn to_lend(&self, change: &mut Change<'_>, wanted: usize) -> Vec<PageId> {
        let (numbers, pool) = (self.numbers.lock(), &self.pool);
        if !pool.is_ranked(&self.account) {
            pool.rank_candidates(&self.account, &self.large_ones(&numbers).collect::<Vec<_>>());
        }
        let (mut taken, mut after) = (Vec::new(), None);
        while taken.len() < wanted {
            after = pool.next_candidate(&self.account, after);
            let Some((.., page)) = after else { break };
            // A trim or a seal on another thread may have it by now.
            let may_leave = self.is_ours(page) && !self.stays(&numbers, page);
            if may_leave && change.rely_on(page, self.holder()) == Some(self.geometry.large()) {
                taken.push(page);
            }
        }
        taken
    }

    /// The numbers of large pages that are on lease.
    #[must_use]
    pub fn on_lease(&self) -> BTreeSet<u32> {
        if !self.pool.any_lent() {
            return BTreeSet::new();
        }
        self.large().into_iter().filter(|(_, _, lease)| lease.is_some()).map(|(index, ..)| index).collect()
    }

    /// The numbers of large pages that are on lease, for work that needs so many bytes of those that are not. A number whose page left
    /// is one of these, since graphs need another there anyway.
    ///
    /// # Errors
    /// [`Error::Lent`] with leases to recall if there are fewer: those with the lowest numbers, as many as hold the difference.
    pub fn beside_leases(&self, bytes: u64) -> Result<BTreeSet<u32>> {
        if !self.pool.any_lent() {
            return Ok(BTreeSet::new());
        }
        let (all, page) = (self.large(), self.geometry.large());
        let lent = || all.iter().filter(|(_, _, lease)| lease.is_some());
        let numbers = self.numbers.lock();
        let stay =
            all.iter().filter(|(_, page, lease)| lease.is_none() && self.stays(&numbers, *page)).count();
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

    /// Whether a large page has a number above this one.
    #[must_use]
    pub fn listed_above(&self, index: u32) -> bool {
        self.large().last().is_some_and(|(last, ..)| *last > index)
    }

    /// The leases on so many of the large pages with a number, the lowest first.
    #[must_use]
    pub fn leases(&self, pages: usize) -> Vec<u64> {
        leases_of(self.large().iter().filter(|(_, _, lease)| lease.is_some()).take(pages))
    }

    /// Every large page with a number, and its lease; by number.
    fn large(&self) -> Vec<(u32, PageId, Option<u64>)> {
        let numbers = self.numbers.lock();
        let lease = |page: PageId| self.pool.leases([page].iter()).first().copied();
        let mut all: Vec<_> =
            self.large_ones(&numbers).map(|(index, page)| (index, page, lease(page))).collect();
        all.sort_unstable();
        all
    }

    /// Some pages are on lease: whoever shows one is to look before the device uses it.
    pub fn lent(&self) {
        self.version.fetch_add(1, Ordering::SeqCst);
    }

    /// From now on these pages stay where they show; they never leave their numbers.
    ///
    /// # Errors
    /// [`Error::WrongState`] if one is not shared any more, or could be about to leave.
    pub fn fix(&self, pages: &HashSet<PageId>) -> Result<()> {
        if pages.is_empty() {
            return Ok(());
        }
        let numbers = &mut *self.numbers.lock();
        if numbers.eager > 0 || pages.iter().any(|page| !self.is_ours(*page)) {
            return Err(Error::wrong_state(
                "cannot pin pages of the arena: eager work uses them; end the eager scope first",
            ));
        }
        numbers.fixed.extend(pages);
        // Eager work that shows one is to look.
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// A page that is pinned for others stays where it shows, as long as it is.
    ///
    /// # Errors
    /// [`Error::WrongState`] while one could be about to leave.
    pub fn stay(&self) -> Result<()> {
        let numbers = self.numbers.lock();
        if numbers.eager > 0 {
            return Err(Error::wrong_state(
                "cannot pin a page of the arena: an eager scope is active; end it first",
            ));
        }
        // Eager work that shows it is to look.
        self.version.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    /// Whether a number's page has to stay where it shows.
    #[must_use]
    pub fn is_fixed(&self, no: PageNo) -> bool {
        let numbers = self.numbers.lock();
        numbers.pages.get(&no).is_some_and(|page| self.stays(&numbers, *page))
    }

    fn stays(&self, numbers: &Numbers, page: PageId) -> bool {
        numbers.fixed.contains(&page) || numbers.since.contains_key(&page) || self.pool.is_exported(page)
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
                    let page = (self.spare_or_new(change, numbers, bytes, &HashSet::new(), 0)?, bytes);
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

    fn spare_or_new(
        &self,
        change: &mut Change,
        numbers: &mut Numbers,
        bytes: u64,
        shown: &HashSet<PageId>,
        space: u64,
    ) -> Result<PageId> {
        self.settle(numbers);
        // A number that eager work has chosen is not to get a page that stays.
        let space = if numbers.eager > 0 { 0 } else { space };
        let Numbers { spare, since, .. } = numbers;
        if let Some(spare) = spare.get_mut(&bytes) {
            let fits = |page: &PageId| !shown.contains(page) && is_for(since, *page, space);
            while let Some(at) = spare.iter().rposition(fits) {
                let page = spare.remove(at);
                if change.rely_on(page, self.holder()).is_some() {
                    return Ok(page);
                }
            }
        }
        change.take(bytes, self.holder(), self.account.id())
    }

    /// The way back of a retained page whose blocks were freed: once a fence is done, every space from this number on may map it again, under
    /// whatever number needs a cell of its size. It stays mapped where it is.
    pub fn give(&self, page: PageId, from: Holder, fence: Fence, since: u64) {
        let mut numbers = self.numbers.lock();
        numbers.returning.push((fence, page, from, since));
        self.settle(&mut numbers);
    }

    /// Whether a space may show a shared page.
    #[must_use]
    pub fn is_for(&self, page: PageId, space: u64) -> bool {
        is_for(&self.numbers.lock().since, page, space)
    }

    /// Takes up to `count` pages of `bytes` bytes for what a space writes and only graphs read that were
    /// captured since: pages that hold such contents of earlier graphs already, and that no space shows
    /// from this one on. `writer` is the space's holder, `until` the lowest number of a space that may
    /// use them for something else.
    ///
    /// In the order of capture nobody else writes there between the space's graph and the last reader.
    pub fn take_passed(
        &self,
        (bytes, count): (u64, usize),
        (space, writer): (u64, Holder),
        until: u64,
    ) -> Vec<PageId> {
        let numbers = &mut *self.numbers.lock();
        self.settle(numbers);
        let Numbers { since, fixed, .. } = numbers;
        let fits = |page: PageId, writers: &[(u64, Holder)]| {
            writers.iter().all(|(from, _)| space >= *from)
                && !fixed.contains(&page)
                && self.pool.is_unseen(page, (self.holder(), bytes), space)
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

    /// A graph is gone, whose pages these were: nobody reads any more what it wrote there.
    pub fn gone(&self, from: Holder) {
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
            // Eager work that shows others instead is to look.
            self.version.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Makes spares of the pages that came back, as far as their fences are done.
    pub fn settle_returning(&self) {
        self.settle(&mut self.numbers.lock());
    }

    /// Makes spares of the pages that came back. The number that one had before it was retained may still list it: it has none now, or
    /// a space would meet it under two.
    fn settle(&self, numbers: &mut Numbers) {
        let Numbers { pages, spare, returning, since, .. } = numbers;
        let mut look = Look::new(self.pool.events());
        returning.retain_mut(|(fence, page, from, space)| {
            // What others have is not for other graphs.
            if !fence.done_at(&mut look).unwrap_or(false) || self.pool.is_exported(*page) {
                return true;
            }
            if let Some(bytes) = self.pool.hand_over(*page, *from, self.holder(), false) {
                pages.retain(|_, listed| listed != page);
                spare.entry(bytes).or_default().push(*page);
                if *space > 0 {
                    since.insert(*page, vec![(*space, *from)]);
                }
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
        let Numbers { pages, tape, spare, fixed, since, .. } = &mut *numbers;
        fixed.retain(|id| there(*id));
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

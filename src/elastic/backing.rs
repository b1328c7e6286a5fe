//! Backing: address ranges and their pages. Makes all driver calls of elastic memory.
//!
//! The monitor `states` guards the page states. No lock is held during maps, unmaps, observers and
//! waits for fences.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::observer::{Observers, Shown};
use super::page_states::{PageStates, Place, Plan, Run, Tally};
use super::worker::{Worker, refuse_waiting};
use super::{Committed, ElasticObserver, ElasticOptions, ElasticStats, Pending};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{
    Account, AccountId, Fence, Limits, Owner, PendingUnmap, Reclaimer, Reservation, Transaction,
};
use crate::sync::Monitor;
use crate::units::{Address, Peers, Stream, checked_size};

mod borrowed;
mod moving;

pub(crate) use borrowed::Lender;
use moving::{Marks, UnmapGuard};

/// Maximum wait of one reclaim for fences of decommitted pages.
const PATIENCE: Duration = Duration::from_secs(2);
/// Largest automatic page size: the default large page of an arena.
const LONGEST: u64 = 16 << 20;
/// Minimum number of pages in the longest range at the automatic page size.
const PAGES: u64 = 64;
/// Failure of a commit. The commit is undone.
pub(super) struct Refused {
    pub(super) error: Error,
    /// Whether freed memory may help, if memory was short.
    helps: bool,
}

impl From<Error> for Refused {
    fn from(error: Error) -> Self {
        Self { error, helps: false }
    }
}

/// Address ranges, partly backed by pages. Thread-safe.
///
/// Dropping unmaps all pages after the fences of the decommits and of earlier users.
pub(super) struct Backing {
    id: u64,
    name: String,
    page: u64,
    ranges: Vec<Reservation>,
    account: Account,
    states: Monitor<PageStates>,
    observers: Observers,
    worker: Worker,
    device: Arc<Device>,
}

impl Backing {
    /// Reserves one range for each length in bytes, rounded up to pages. Maps nothing.
    pub(super) fn new(
        device: &Arc<Device>,
        lengths: &[u64],
        options: &ElasticOptions<'_>,
    ) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let page = page_bytes(device, lengths, options.page_bytes)?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = options.name.to_owned();
        let limits = Limits { most: options.budget_bytes, least: options.least_bytes };
        let account = device.account(&format!("elastic buffer {id} {name:?}"), options.account, limits)?;
        let mut transaction = Transaction::on(device.pool());
        for bytes in lengths {
            let bytes = checked_size("an elastic buffer", *bytes)?;
            transaction.reserve(bytes.next_multiple_of(page), id, Peers::NONE)?;
        }
        let (_, ranges) = transaction.commit();
        let (states, observers, worker) = (Monitor::default(), Observers::default(), Worker::default());
        let device = Arc::clone(device);
        let backing = Arc::new(Self { id, name, page, ranges, account, states, observers, worker, device });
        let reclaimer: Arc<dyn Reclaimer> = backing.clone();
        backing.device.add_reclaimer(&reclaimer);
        tracing::info!(
            buffer = id,
            name = backing.name,
            page,
            ranges = lengths.len(),
            "elastic memory reserved"
        );
        Ok(backing)
    }

    pub(super) fn device(&self) -> &Arc<Device> {
        &self.device
    }

    pub(super) fn account(&self) -> &Account {
        &self.account
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn page(&self) -> u64 {
        self.page
    }

    pub(super) fn base(&self, range: usize) -> Option<Address> {
        self.ranges.get(range).map(Reservation::base)
    }

    pub(super) fn worker(&self) -> &Worker {
        &self.worker
    }

    pub(super) fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.observers.add(observer);
    }

    /// Commits all pages or none. Waits for pages being moved by other threads.
    pub(super) fn try_commit(&self, runs: &[Run]) -> Result<Committed, Refused> {
        self.carry_out(self.mark(runs)?)
    }

    /// Repeats `work` while reclaimers, called without a lock or commit section, free memory.
    pub(super) fn patiently<R>(&self, mut work: impl FnMut() -> Result<R, Refused>) -> Result<R> {
        let mut memory_retry = self.device.pool().memory_retry();
        loop {
            match work() {
                Err(Refused { error, helps: true }) if memory_retry.helps(&error) => {}
                result => return result.map_err(|refused| refused.error),
            }
        }
    }

    /// Commits on the worker thread, without reclaimers.
    pub(super) fn commit_async(self: &Arc<Self>, runs: Vec<Run>) -> Pending {
        let (there, marked) = (Arc::clone(self), runs.clone());
        let hopeless = self.refuse_hopeless(&runs).is_err();
        let mark = || {
            let free =
                |states: &PageStates| !hopeless && !states.moving(&marked) && !states.is_recalled(&marked);
            self.states.change(|states| free(states).then(|| states.begin(&marked)))
        };
        self.worker.push(mark, move |plan| {
            let plan = plan.map_or_else(|| there.mark(&runs), Ok)?;
            there.carry_out(plan).map_err(|refused| refused.error)
        })
    }

    fn refuse_hopeless(&self, runs: &[Run]) -> Result<()> {
        let pages = runs.iter().fold(0_u64, |pages, run| pages.saturating_add(run.pages()));
        self.device.pool().refuse_hopeless(pages.saturating_mul(self.page))
    }

    /// Marks pages as coming, once no other thread moves them. Fails while recalled pages are
    /// mapped.
    fn mark(&self, runs: &[Run]) -> Result<Plan> {
        self.refuse_hopeless(runs)?;
        let begin = |states: &mut PageStates| (!states.is_recalled(runs)).then(|| states.begin(runs));
        if let Some(plan) = self.when_at_rest(runs, begin)? {
            return Ok(plan);
        }
        self.settle();
        self.when_at_rest(runs, begin)?.ok_or_else(|| {
            Error::wrong_state(
                "cannot commit that part of elastic memory: pages lent there are being recalled; try again when the recall is over",
            )
        })
    }

    fn when_at_rest<R>(&self, runs: &[Run], mut then: impl FnMut(&mut PageStates) -> R) -> Result<R> {
        let now = self.states.wait_for(|states| Some((!states.moving(runs)).then(|| then(states))));
        if let Some(result) = now {
            return Ok(result);
        }
        refuse_waiting()?;
        Ok(self.states.wait_for(|states| (!states.moving(runs)).then(|| then(states))))
    }

    fn carry_out(&self, plan: Plan) -> Result<Committed, Refused> {
        let marked = Marks { backing: self, plan: Some(plan) };
        let Some(plan) = &marked.plan else { return Ok(Committed::default()) };
        // After the marks, so pages committed again are not unmapped.
        self.settle();
        let mut done = Committed { revived: plan.revived_pages(), ..Committed::default() };
        let mut transaction = Transaction::on(self.device.pool());
        transaction.expect_bytes(plan.absent_pages() * self.page);
        for run in &plan.absent {
            self.map(&mut transaction, *run).map_err(|error| Refused { error, helps: true })?;
        }
        let calls = transaction.commit().0;
        (done.pages, done.bytes) = (calls.maps, calls.mapped_bytes);
        // A mapped page costs two calls, and a created page one more.
        done.created = calls.all - 2 * calls.maps;
        self.notify(&plan.absent, false);
        marked.finish(&done);
        self.device.pool().check();
        Ok(done)
    }

    fn map(&self, transaction: &mut Transaction<'_>, run: Run) -> Result<()> {
        let Some(range) = self.ranges.get(run.range) else {
            return Err(Error::Internal { what: "an elastic buffer lacks a range".to_owned() });
        };
        let owner = Owner::Elastic { buffer: self.id };
        let mut pages = Vec::new();
        for _ in run.first..run.end {
            pages.push(transaction.take(self.page, owner, self.account.id())?);
        }
        transaction.map(range.id(), run.first * self.page, &pages)
    }

    /// Decommits present pages after a fence and returns their bytes. Waits for pages being moved,
    /// but not for the fence.
    pub(super) fn decommit(&self, runs: &[Run], fence: &Fence) -> Result<u64> {
        let pages = self.when_at_rest(runs, |states| states.decommit(runs, fence.clone()))?;
        self.settle();
        Ok(pages * self.page)
    }

    /// Unmaps decommitted pages with finished fences and returns the bytes.
    pub(super) fn settle(&self) -> u64 {
        let events = self.device.pool().events();
        let going = self.read(|states| states.take_done(events));
        if going.is_empty() {
            return 0;
        }
        let unmapping = UnmapGuard { backing: self, runs: going };
        self.notify(&unmapping.runs, true);
        for run in &unmapping.runs {
            if let Some(range) = self.ranges.get(run.range) {
                let mut pending = PendingUnmap::default();
                pending.add_part(range.id(), run.first * self.page, run.pages() * self.page);
                // Not as a pending unmap: a page that stays may be committed again before the
                // retry.
                self.device.pool().unmap_now(pending);
            }
        }
        unmapping.end() * self.page
    }

    fn is_mapped(&self, (range, page): (usize, u64)) -> bool {
        let found = self.ranges.get(range);
        found.is_some_and(|range| range.gap(page * self.page, (page + 1) * self.page).is_none())
    }

    fn notify(&self, runs: &[Run], gone: bool) {
        let at = |run: &Run| {
            let base = self.base(run.range)?;
            Some((base.plus(run.first * self.page), run.pages() * self.page))
        };
        let ranges: Vec<_> = runs.iter().filter_map(at).collect();
        self.observers.notify(&Shown { name: &self.name, buffer: self.id, ranges: &ranges }, gone);
    }

    pub(super) fn before(&self, stream: Stream) -> Result<()> {
        let mut earlier = self.read(|states| states.earlier());
        earlier.before(self.device.pool().events(), stream)
    }

    pub(super) fn previous_users(&self, places: impl IntoIterator<Item = Place>, fence: Fence) {
        self.read(|states| states.previous_users(places, fence));
    }

    pub(super) fn committed(&self, runs: &[Run]) -> Vec<Run> {
        self.read(|states| states.committed(runs))
    }

    fn read<R>(&self, read: impl FnOnce(&mut PageStates) -> R) -> R {
        let mut read = Some(read);
        self.states.wait_for(|states| read.take().map(|read| read(states)))
    }

    pub(super) fn stats(&self) -> ElasticStats {
        let (Tally { committed, committing, decommitted }, counts) =
            self.read(|states| (states.tally(), states.counts));
        ElasticStats {
            id: self.id,
            page_bytes: self.page,
            reserved_bytes: self.ranges.iter().map(Reservation::bytes).sum(),
            committed_bytes: committed * self.page,
            peak_committed_bytes: counts.most_committed * self.page,
            coming_bytes: committing * self.page,
            leaving_bytes: decommitted * self.page,
            commits: counts.commits,
            refused: counts.refused,
            decommits: counts.decommits,
            pages_mapped: counts.mapped,
            pages_created: counts.created,
            pages_revived: counts.revived,
            pages_unmapped: counts.unmapped,
            account: self.account.stats(),
        }
    }

    /// Checks that the page states, the pool and the account agree. No other call may run.
    pub(super) fn audit(&self) -> Result<()> {
        self.device.pool().audit()?;
        let stats = self.stats();
        let (held, _) = self.device.pool().held(Owner::Elastic { buffer: self.id });
        let known = stats.committed_bytes + stats.leaving_bytes;
        let (charged, held) = (held, held + self.borrowed());
        let equal = [
            ("bytes held", held, "bytes known of", known),
            ("bytes charged", stats.account.charged_bytes, "bytes of its own", charged),
            (
                "pages mapped",
                stats.pages_mapped * self.page,
                "there and unmapped",
                held + stats.pages_unmapped * self.page,
            ),
        ];
        for (left, one, right, other) in equal {
            if one != other || stats.coming_bytes != 0 {
                let what = format!("elastic buffer {}: {one} {left}, {other} {right}", self.id);
                return Err(Error::Internal { what });
            }
        }
        let unmapped = |run: &Run| run.places().find(|place| !self.is_mapped(*place));
        match self.read(|states| states.all()).iter().find_map(unmapped) {
            None => Ok(()),
            Some(place) => Err(Error::Internal {
                what: format!("elastic buffer {}: page {place:?} is not mapped", self.id),
            }),
        }
    }
}

fn page_bytes(device: &Device, lengths: &[u64], asked: u64) -> Result<u64> {
    let capabilities = device.driver().capabilities();
    let granularity = capabilities.granularity;
    if !asked.is_multiple_of(granularity) || asked > capabilities.largest_page {
        return Err(Error::InvalidPageSize { what: "elastic page", bytes: asked, granularity });
    }
    if asked > 0 {
        return Ok(asked);
    }
    let longest = lengths.iter().copied().max().unwrap_or(0);
    let mut page = granularity;
    while page * 2 <= LONGEST.min(capabilities.largest_page) && page * 2 * PAGES <= longest {
        page *= 2;
    }
    Ok(page)
}

impl Reclaimer for Backing {
    /// Unmaps decommitted pages, and waits for their fences if necessary. Keeps committed pages.
    fn reclaim(&self, bytes: u64) -> u64 {
        let mut given = self.settle();
        if given < bytes {
            let start = Instant::now();
            for mut fence in self.read(|states| states.fences()) {
                // After a failed wait, the pages stay.
                let _ = fence.block(self.device.pool().events(), PATIENCE.saturating_sub(start.elapsed()));
            }
            given += self.settle();
        }
        given
    }

    fn account(&self) -> Option<AccountId> {
        Some(self.account.id())
    }

    fn cost(&self) -> u64 {
        0
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        self.worker.end();
        let all = self.read(|states| states.all());
        self.notify(&all, true);
        let (mut fence, mut pending) = (self.read(|states| states.earlier()), PendingUnmap::default());
        self.read(|states| states.fences()).into_iter().for_each(|waiting| fence.join(waiting));
        self.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        let pool = self.device.pool();
        pool.unmap_after(fence, pending);
        pool.check();
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

//! Backing: address ranges, their pages, and the monitor `table` of both. Makes all driver calls of
//! elastic memory, without a lock.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::observer::{Observers, Shown};
use super::planes::{Place, Run, Shape};
use super::table::Table;
use super::worker::{Worker, refuse_waiting};
use super::{ElasticObserver, ElasticOptions, ElasticStats};
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{Account, Limits, Owner, PendingUnmap, Reclaimer, Reservation, Transaction};
use crate::sync::Monitor;
use crate::units::{Address, Peers};

mod commit;
mod decommit;

pub(crate) use commit::Lender;

/// The default large page of an arena.
const LONGEST: u64 = 16 << 20;
/// Pages in the longest range at the automatic page size.
const PAGES: u64 = 64;

/// Dropping unmaps all pages after the fences of decommits and earlier users.
pub(super) struct Backing {
    id: u64,
    name: String,
    shape: Shape,
    ranges: Vec<Reservation>,
    account: Account,
    table: Monitor<Table>,
    observers: Observers,
    worker: Worker,
    device: Arc<Device>,
}

impl Backing {
    /// Lengths are rounded up to pages. Maps nothing.
    pub(super) fn new(device: &Arc<Device>, shape: Shape, options: &ElasticOptions<'_>) -> Result<Arc<Self>> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let page = shape.page();
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = options.name.to_owned();
        let limits = Limits { most: options.budget_bytes, least: options.least_bytes };
        let account = device.account(&format!("elastic buffer {id} {name:?}"), options.account, limits)?;
        let mut transaction = Transaction::on(device.pool());
        for bytes in shape.lengths() {
            transaction.reserve(bytes.next_multiple_of(page), id, Peers::NONE)?;
        }
        let (_, ranges) = transaction.commit();
        let table = Monitor::new(Table::new(shape.clone()));
        let (observers, worker, device) = (Observers::default(), Worker::default(), Arc::clone(device));
        let backing = Arc::new(Self { id, name, shape, ranges, account, table, observers, worker, device });
        let reclaimer: Arc<dyn Reclaimer> = backing.clone();
        backing.device.add_reclaimer(&reclaimer);
        tracing::info!(
            buffer = id,
            name = backing.name,
            page,
            ranges = backing.ranges.len(),
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

    pub(super) fn shape(&self) -> &Shape {
        &self.shape
    }

    pub(super) fn page(&self) -> u64 {
        self.shape.page()
    }

    pub(super) fn base(&self, range: usize) -> Option<Address> {
        self.ranges.get(range).map(Reservation::base)
    }

    pub(super) fn observe(&self, observer: &Arc<dyn ElasticObserver>) {
        self.observers.add(observer);
    }

    fn when_not<R>(
        &self,
        blocked: impl Fn(&Table) -> bool,
        mut then: impl FnMut(&mut Table) -> R,
    ) -> Result<R> {
        let mut ready = |table: &mut Table| (!blocked(table)).then(|| then(table));
        if let Some(result) = self.read(&mut ready) {
            return Ok(result);
        }
        refuse_waiting()?;
        Ok(self.table.wait_for(ready))
    }

    pub(super) fn read<R>(&self, read: impl FnOnce(&mut Table) -> R) -> R {
        let mut read = Some(read);
        self.table.wait_for(|table| read.take().map(|read| read(table)))
    }

    fn owner(&self) -> Owner {
        Owner::Elastic { buffer: self.id }
    }

    fn range(&self, range: usize) -> Result<&Reservation> {
        let lacks = || Error::Internal { what: "an elastic buffer lacks a range".to_owned() };
        self.ranges.get(range).ok_or_else(lacks)
    }

    fn is_mapped(&self, (range, page): Place) -> bool {
        let found = self.ranges.get(range);
        found.is_some_and(|range| range.gap(page * self.page(), (page + 1) * self.page()).is_none())
    }

    fn notify(&self, runs: &[Run], gone: bool) {
        let at = |run: &Run| {
            let base = self.base(run.range)?;
            Some((base.plus(run.first * self.page()), run.pages() * self.page()))
        };
        let ranges: Vec<_> = runs.iter().filter_map(at).collect();
        self.observers.notify(&Shown { name: &self.name, buffer: self.id, ranges: &ranges }, gone);
    }

    pub(super) fn stats(&self) -> ElasticStats {
        let reserved = self.ranges.iter().map(Reservation::bytes).sum();
        let account = self.account.stats();
        self.read(|table| table.stats(self.id, reserved, account))
    }

    /// Mapped pages with other owners.
    fn borrowed(&self) -> u64 {
        let pool = self.device.pool();
        let mapped = self.ranges.iter().flat_map(|range| range.mapped());
        mapped.filter(|at| pool.owner(at.page) != Some(self.owner())).map(|at| at.bytes).sum()
    }

    /// Checks that the table, the pool and the account agree. No other call may run.
    pub(super) fn audit(&self) -> Result<()> {
        self.device.pool().audit()?;
        let stats = self.stats();
        let (held, _) = self.device.pool().held(self.owner());
        let (committed, mapped) = self.read(|table| table.mapped());
        let known = stats.committed_bytes + stats.pending_unmap_bytes;
        let (charged, held) = (held, held + self.borrowed());
        let equal = [
            ("bytes committed", stats.committed_bytes, "on pages of backed blocks", committed * self.page()),
            ("bytes held", held, "bytes known of", known),
            ("bytes charged", stats.account.charged_bytes, "bytes of its own", charged),
            (
                "pages mapped",
                stats.pages_mapped * self.page(),
                "there and unmapped",
                held + stats.pages_unmapped * self.page(),
            ),
        ];
        for (left, one, right, other) in equal {
            if one != other || stats.coming_bytes != 0 {
                let what = format!("elastic buffer {}: {one} {left}, {other} {right}", self.id);
                return Err(Error::Internal { what });
            }
        }
        let unmapped = |run: &Run| run.places().find(|place| !self.is_mapped(*place));
        match mapped.iter().find_map(unmapped) {
            None => Ok(()),
            Some(place) => Err(Error::Internal {
                what: format!("elastic buffer {}: page {place:?} is not mapped", self.id),
            }),
        }
    }
}

pub(super) fn page_bytes(device: &Device, lengths: &[u64], asked: u64) -> Result<u64> {
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

impl Drop for Backing {
    fn drop(&mut self) {
        self.worker.end();
        let ((_, all), users) = self.read(|table| (table.mapped(), table.users()));
        self.notify(&all, true);
        let mut pending = PendingUnmap::default();
        self.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        let pool = self.device.pool();
        pool.unmap_after(users, pending);
        pool.check();
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing").field("id", &self.id).field("name", &self.name).finish_non_exhaustive()
    }
}

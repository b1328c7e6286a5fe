//! Model test: random operations on the pool, compared with a plain list of pages.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use proptest::prelude::*;

use super::{Account, Limits, Owner, PageId, PagePool, RangeId, Reservation, Transaction};
use crate::driver::{
    Capabilities, DeviceInfo, Driver, Event, HostDriver, HostOptions, Memory, NotMapped, PageHandle,
    StreamState, Timeline, Transfer, Whole,
};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, Peers, Stream};

mod falsified;

const UNIT: u64 = 4096;
const RANGE: u64 = 16 * UNIT;
const OWNERS: [Owner; 4] = [
    Owner::Shared { arena: 1 },
    Owner::Shared { arena: 2 },
    Owner::Retained { arena: 1, space: 7 },
    Owner::Kept { arena: 1 },
];

/// Host driver with planted failures in calls that change state.
struct Faulty {
    host: HostDriver,
    /// 0: no failure.
    fail_in: Mutex<u64>,
}

impl Faulty {
    fn new() -> Arc<Self> {
        let options = HostOptions { granularity: UNIT, ..HostOptions::default() };
        Arc::new(Self { host: HostDriver::new(0, options).unwrap(), fail_in: Mutex::new(0) })
    }

    fn fail_in(&self, calls: u64) {
        *self.fail_in.lock() = calls;
    }

    fn called(&self, call: &'static str) -> Result<()> {
        let mut left = self.fail_in.lock();
        *left = left.saturating_sub(1);
        if *left == 1 {
            *left = 0;
            return Err(Error::Driver { call, code: 999, name: "planted".to_owned() });
        }
        Ok(())
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Faulty").finish_non_exhaustive()
    }
}

impl Driver for Faulty {
    fn info(&self) -> &DeviceInfo {
        self.host.info()
    }
    fn capabilities(&self) -> &Capabilities {
        self.host.capabilities()
    }
}

// SAFETY: the host driver does the work, under the callers' contracts.
unsafe impl Memory for Faulty {
    fn free_bytes(&self) -> Result<u64> {
        self.host.free_bytes()
    }
    fn reserve(&self, len: u64) -> Result<Address> {
        self.called("reserve")?;
        self.host.reserve(len)
    }
    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        self.called("free_addresses")?;
        // SAFETY: the caller's promise.
        unsafe { self.host.free_addresses(base, len) }
    }
    fn create(&self, len: u64) -> Result<PageHandle> {
        self.called("create")?;
        self.host.create(len)
    }
    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        self.called("release")?;
        // SAFETY: the caller's promise.
        unsafe { self.host.release(page) }
    }
    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        self.called("map").map_err(|error| NotMapped { error, mapped: 0 })?;
        // SAFETY: the caller's promise.
        unsafe { self.host.map(at, pages, peers) }
    }
    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        self.called("grant")?;
        // SAFETY: the caller's promise.
        unsafe { self.host.grant(at, len, peers) }
    }
    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        self.called("unmap")?;
        // SAFETY: the caller's promise.
        unsafe { self.host.unmap(at, len) }
    }
}

// SAFETY: as above.
unsafe impl Timeline for Faulty {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        // SAFETY: the caller's promise.
        unsafe { self.host.stream_state(stream) }
    }
    fn other_context(&self) -> Option<u64> {
        self.host.other_context()
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.host.in_primary(work)
    }

    fn event_create(&self) -> Result<Event> {
        self.host.event_create()
    }
    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.event_destroy(event) }
    }
    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.event_record(event, stream) }
    }
    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.event_wait(event, stream) }
    }
    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: the caller's promise.
        unsafe { self.host.event_query(event) }
    }
    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.event_synchronize(event) }
    }
    fn stream_create(&self) -> Result<Stream> {
        self.host.stream_create()
    }
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.stream_destroy(stream) }
    }
}

// SAFETY: as above.
unsafe impl Transfer for Faulty {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.fill(at, len, value, stream) }
    }
    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.read(at, into) }
    }
    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.write(at, from) }
    }
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.host_register(at, len) }
    }
    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.host_unregister(at) }
    }
    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.copy_to_host(from, to, len, stream) }
    }
    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.host.copy_from_host(to, from, len, stream) }
    }
}

#[derive(Clone, Debug)]
struct Page {
    id: PageId,
    bytes: u64,
    owner: Owner,
    account: usize,
    at: BTreeSet<(RangeId, u64)>,
    pins: u32,
}

/// Expected state of the pool. Account 0 is the device's; parents are in [`PARENTS`].
#[derive(Clone, Debug, Default)]
struct Twin {
    pages: Vec<Page>,
    free: Vec<u64>,
    ranges: Vec<RangeId>,
    limits: [Limits; 5],
}

const PARENTS: [Option<usize>; 5] = [None, Some(0), Some(1), Some(1), Some(0)];

impl Twin {
    fn used(&self, account: usize) -> u64 {
        let own = self.pages.iter().filter(|page| page.account == account).map(|page| page.bytes);
        let below = (0..5).filter(|below| PARENTS[*below] == Some(account));
        own.sum::<u64>() + below.map(|below| self.used(below).max(self.limits[below].least)).sum::<u64>()
    }

    fn free_bytes(&self) -> u64 {
        self.free.iter().sum()
    }

    fn room(&self, bytes: u64, account: usize) -> bool {
        let mut with = self.clone();
        let id = PageId::default();
        let (owner, at) = (OWNERS[0], BTreeSet::new());
        with.pages.push(Page { id, bytes, owner, account, at, pins: 1 });
        let reused = self.free.contains(&bytes);
        let mut next = Some(account);
        while let Some(account) = next {
            let held = self.used(account);
            let more = with.used(account) - held;
            let free = if account == 0 { self.free_bytes() - if reused { bytes } else { 0 } } else { 0 };
            if let Some(most) = self.limits[account].most
                && more > most.saturating_sub(held + free)
            {
                return false;
            }
            next = PARENTS[account];
        }
        true
    }

    /// Releases free pages, largest first. Returns their sizes.
    fn release(&mut self, bytes: u64) -> Vec<u64> {
        self.free.sort_unstable();
        let mut released = Vec::new();
        while released.iter().sum::<u64>() < bytes
            && let Some(longest) = self.free.pop()
        {
            released.push(longest);
        }
        released
    }

    fn page(&mut self, id: PageId) -> &mut Page {
        self.pages.iter_mut().find(|page| page.id == id).unwrap()
    }

    fn shown(&self, range: RangeId) -> BTreeMap<u64, (PageId, u64)> {
        let of = |page: &Page| {
            let (id, bytes) = (page.id, page.bytes);
            let at: Vec<_> = page.at.iter().filter(|(at, _)| *at == range).map(|(_, at)| *at).collect();
            at.into_iter().map(move |at| (at, (id, bytes)))
        };
        self.pages.iter().flat_map(of).collect()
    }

    fn free_unused(&mut self) {
        self.pages.iter_mut().for_each(|page| page.pins = 0);
        let idle = self.pages.extract_if(.., |page| page.at.is_empty());
        let sizes: Vec<u64> = idle.map(|page| page.bytes).collect();
        self.free.extend(sizes);
    }

    fn close(&mut self, range: RangeId) {
        self.ranges.retain(|known| *known != range);
        self.pages.iter_mut().for_each(|page| page.at.retain(|(at, _)| *at != range));
        self.free_unused();
    }

    fn agrees(&self, pool: &PagePool, accounts: &[Account]) {
        assert_eq!(pool.audit(), Ok(()));
        let stats = pool.stats();
        let held: u64 = self.pages.iter().map(|page| page.bytes).sum();
        let mappings: usize = self.pages.iter().map(|page| page.at.len()).sum();
        assert_eq!((stats.physical_bytes, stats.free_bytes), (held + self.free_bytes(), self.free_bytes()));
        let pages = (self.pages.len() + self.free.len()) as u64;
        assert_eq!((stats.pages, stats.mappings, stats.pending), (pages, mappings as u64, 0));
        assert_eq!((stats.reservations, stats.budget_bytes), (self.ranges.len() as u64, self.limits[0].most));
        for owner in OWNERS {
            let theirs: Vec<u64> =
                self.pages.iter().filter(|page| page.owner == owner).map(|page| page.bytes).collect();
            assert_eq!(pool.held(owner), (theirs.iter().sum(), theirs.len() as u64), "{owner:?}");
        }
        for (number, account) in accounts.iter().enumerate() {
            assert_eq!(account.stats().charged_bytes, self.used(number + 1), "account {}", number + 1);
        }
        let mut free = self.free.clone();
        free.sort_unstable();
        let listed =
            pool.lock().free.lists().flat_map(|(bytes, ids)| vec![bytes; ids.len()]).collect::<Vec<_>>();
        assert_eq!(listed, free);
        for range in &self.ranges {
            let shown: BTreeMap<_, _> =
                pool.mapped(*range).into_iter().map(|at| (at.offset, (at.page, at.bytes))).collect();
            assert_eq!(shown, self.shown(*range));
        }
    }
}

struct Numbers(std::vec::IntoIter<u8>);

impl Numbers {
    fn below(&mut self, n: usize) -> usize {
        usize::from(self.0.next().unwrap_or(0)) % n.max(1)
    }
    fn pick<T: Copy>(&mut self, from: &[T]) -> Option<T> {
        let index = self.below(from.len());
        from.get(index).copied()
    }
    fn bytes(&mut self) -> u64 {
        [1, 1, 2, 4][self.below(4)] * UNIT
    }
}

struct World {
    driver: Arc<Faulty>,
    pool: Arc<PagePool>,
    accounts: Vec<Account>,
    twin: Twin,
    ranges: Vec<Reservation>,
}

impl World {
    fn new() -> Self {
        let driver = Faulty::new();
        let pool = PagePool::new(driver.clone());
        let account = |parent| Account::new(&pool, parent, String::new(), Limits::default()).unwrap();
        let tenant = account(None);
        let (left, right, other) = (account(Some(&tenant)), account(Some(&tenant)), account(None));
        let accounts = vec![tenant, left, right, other];
        Self { driver, pool, accounts, twin: Twin::default(), ranges: Vec::new() }
    }

    fn agrees(&self) {
        self.twin.agrees(&self.pool, &self.accounts);
    }

    fn outside(&mut self, input: &mut Numbers) {
        match input.below(4) {
            0 => {
                let account = input.below(5);
                let most = [None, Some(0), Some(6 * UNIT), Some(20 * UNIT)][input.below(4)];
                let least = if account == 0 { 0 } else { [0, 0, 3 * UNIT][input.below(3)] };
                self.twin.limits[account] = Limits { most, least };
                match account {
                    0 => self.pool.set_budget(most),
                    _ => self.accounts[account - 1].set_limits(Limits { most, least }),
                }
            }
            1 if !self.ranges.is_empty() => {
                let range = self.ranges.swap_remove(input.below(self.ranges.len()));
                self.twin.close(range.id());
            }
            2 => {
                let bytes = input.bytes();
                let expected: u64 = self.twin.release(bytes).iter().sum();
                assert_eq!(self.pool.release_free(bytes), expected);
            }
            _ => {}
        }
    }

    /// Compares with the model. Returns false if the state is unknown after a failed undo.
    fn change(&mut self, input: &mut Numbers) -> bool {
        let Self { driver, pool, accounts, twin, ranges } = self;
        let mut before = twin.clone();
        let mut transaction = Transaction::on(pool);
        driver.fail_in([0, 0, 0, 3, 5, 7][input.below(6)]);
        let mut failed = false;
        for _ in 0..1 + input.below(6) {
            let planted = |error: &Error| matches!(error, Error::Driver { code: 999, .. });
            let pages: Vec<PageId> = twin.pages.iter().map(|page| page.id).collect();
            match input.below(8) {
                0 => match transaction.reserve(RANGE, 5, Peers::NONE) {
                    Ok(range) => twin.ranges.push(range),
                    Err(error) => failed = planted(&error),
                },
                1 | 2 => {
                    let bytes = input.bytes();
                    let (Some(owner), account) = (input.pick(&OWNERS), 1 + input.below(4)) else {
                        continue;
                    };
                    // Released first, whatever the result.
                    let mut room = twin.room(bytes, account);
                    let mut after = twin.clone();
                    let mut released = Vec::new();
                    while !room && !after.free.is_empty() {
                        released.extend(after.release(bytes));
                        room = after.room(bytes, account);
                    }
                    // Not an error; a different page is released.
                    let refusing = *driver.fail_in.lock() > 0 && !released.is_empty();
                    if refusing {
                        driver.fail_in(0);
                    }
                    let taken = transaction.take(bytes, owner, accounts[account - 1].id());
                    *twin = after;
                    for bytes in released {
                        let at = before.free.iter().position(|free| *free == bytes).unwrap();
                        before.free.swap_remove(at);
                    }
                    match taken {
                        Ok(id) => {
                            assert!(room);
                            if let Some(at) = twin.free.iter().position(|free| *free == bytes) {
                                twin.free.swap_remove(at);
                            }
                            twin.pages.push(Page { id, bytes, owner, account, at: BTreeSet::new(), pins: 1 });
                        }
                        Err(error) if planted(&error) => failed = true,
                        Err(error) => assert!(!room && matches!(error, Error::OverBudget { .. }), "{error}"),
                    }
                }
                3 => {
                    let (Some(id), Some(owner)) = (input.pick(&pages), input.pick(&OWNERS)) else {
                        continue;
                    };
                    let page = twin.page(id);
                    let expected = (page.owner == owner).then_some(page.bytes);
                    page.pins += u32::from(expected.is_some());
                    assert_eq!(transaction.pin_owned(id, owner), expected);
                }
                4 | 5 => {
                    let pinned: Vec<PageId> =
                        twin.pages.iter().filter(|page| page.pins > 0).map(|page| page.id).collect();
                    let Some(range) = input.pick(&twin.ranges) else { continue };
                    let some =
                        (0..1 + input.below(2)).filter_map(|_| input.pick(&pinned)).collect::<Vec<_>>();
                    if some.is_empty() {
                        continue;
                    }
                    let offset = input.below(16) as u64 * UNIT;
                    let places = some.iter().scan(offset, |end, id| {
                        let at = *end;
                        *end += twin.pages.iter().find(|page| page.id == *id).unwrap().bytes;
                        Some((*id, at, *end))
                    });
                    let places: Vec<_> = places.collect();
                    let end = places.last().unwrap().2;
                    let taken =
                        twin.shown(range).iter().any(|(at, (_, bytes))| *at < end && at + bytes > offset);
                    match transaction.map(range, offset, &some) {
                        Ok(()) => {
                            assert!(!taken && end <= RANGE);
                            for (id, at, _) in places {
                                twin.page(id).at.insert((range, at));
                            }
                        }
                        Err(error) if planted(&error) => failed = true,
                        Err(error) => {
                            assert!(taken || end > RANGE, "{error}");
                            assert!(matches!(error, Error::Internal { .. }), "{error}");
                        }
                    }
                }
                6 => {
                    let Some(range) = input.pick(&twin.ranges) else { continue };
                    let (offset, bytes) = (input.below(16) as u64 * UNIT, input.bytes() * 2);
                    let gone: Vec<_> = twin
                        .shown(range)
                        .range(offset..offset + bytes)
                        .map(|(at, (id, _))| (*at, *id))
                        .collect();
                    match transaction.unmap(range, offset, bytes) {
                        Ok(()) => {
                            for (at, id) in gone {
                                let page = twin.page(id);
                                page.at.remove(&(range, at));
                                page.pins += 1;
                            }
                        }
                        Err(error) => failed = planted(&error),
                    }
                }
                _ => {
                    let (Some(id), Some(from), Some(to)) =
                        (input.pick(&pages), input.pick(&OWNERS), input.pick(&OWNERS))
                    else {
                        continue;
                    };
                    let sole = input.below(2) == 0;
                    let page = twin.page(id);
                    let may = page.owner == from && (!sole || (page.at.len(), page.pins) == (1, 0));
                    if may {
                        page.owner = to;
                    }
                    assert_eq!(transaction.hand_over(id, from, to, sole), may);
                }
            }
            if failed {
                break;
            }
            twin.agrees(pool, accounts);
        }
        if !failed && input.below(3) > 0 {
            driver.fail_in(0);
            let (_, reserved) = transaction.commit();
            ranges.extend(reserved);
            twin.free_unused();
            return true;
        }
        let again = input.below(12) == 0;
        driver.fail_in(if again { 2 + input.below(3) as u64 } else { 0 });
        let restored = transaction.undo();
        let met = again && *driver.fail_in.lock() == 0;
        driver.fail_in(0);
        *twin = before;
        assert!(restored || met, "nothing failed and it is not as before");
        !met
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    /// The pool equals the model after each step of commits, undos, faults, limit changes and ends
    /// of ranges. An undone transaction changes nothing except released free pages.
    #[test]
    fn the_books_are_those_of_a_list_of_pages(bytes in proptest::collection::vec(any::<u8>(), 0..1500)) {
        let mut input = Numbers(bytes.into_iter());
        let mut world = World::new();
        let mut known = true;
        while known && input.0.len() > 0 {
            if input.below(4) == 0 { world.outside(&mut input) } else { known = world.change(&mut input) };
            prop_assert_eq!(world.pool.audit_idle(), Ok(()));
            if known {
                world.agrees();
            }
        }
        world.ranges.clear();
        prop_assert!(world.pool.trim().is_ok());
        let stats = world.pool.stats();
        prop_assert_eq!((stats.physical_bytes, stats.mappings, stats.reservations, stats.pending), (0, 0, 0, 0));
        prop_assert_eq!(world.pool.audit_idle(), Ok(()));
        prop_assert_eq!(world.driver.host.leftovers()[..3].to_vec(), vec![0; 3]);
    }
}

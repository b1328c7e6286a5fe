//! Workspaces: transient memory of kernels in captured graphs, such as cuBLAS's partial sums. Each
//! capture gets its own addresses; workspaces used in order on one stream share one page. A
//! workspace which changes streams moves to another page, then gets a private one. So no work ever
//! waits for unrelated work.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::device::Device;
use crate::driver::Alias;
use crate::error::{Error, Result};
use crate::pages::{Account, Fence, Limits, Owner, PageId, PagePool, RangeId, Reservation, Transaction};
use crate::sync::{Mutex, ProcessMutex};
use crate::units::{Address, MAX_BYTES, Peers, Stream};

struct Group {
    id: u64,
    pool: Weak<PagePool>,
    bytes: u64,
    page: PageId,
    _account: Account,
    /// Orders all work on the page; `None`: not used yet.
    stream: Mutex<Option<Stream>>,
    /// A used workspace left: its work may not be complete.
    left: AtomicBool,
}

struct Open {
    pool: Weak<PagePool>,
    bytes: u64,
    group: Weak<Group>,
}

/// Oldest first.
static OPEN: ProcessMutex<Vec<Open>> = ProcessMutex::new(Vec::new());

/// Moves to groups of other streams, each with a wait and a map, before a private page.
const MOST_MOVES: u32 = 3;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    Never,
    On(Stream),
    /// The page is private.
    Alone,
}

struct Place {
    group: Option<Arc<Group>>,
    used: Use,
    moves: u32,
    /// No page is mapped, after a failed undo.
    hole: bool,
    /// Before the addresses are freed.
    behind: Fence,
}

/// Addresses for transient memory; contents are undefined between uses. Thread-safe. Dropping does
/// not block: see [`leave`](Self::leave).
pub struct Workspace {
    device: Arc<Device>,
    /// `None` while being dropped.
    range: Option<Reservation>,
    bytes: u64,
    place: Mutex<Place>,
}

impl Workspace {
    /// Creates a workspace of at least `bytes` bytes, on the page of other workspaces of the same
    /// size or a new page, charged to the device's budget.
    ///
    /// # Errors
    /// [`Error::InvalidSize`]; [`Error::InvalidArgument`] on a platform without aliased mappings;
    /// [`Error::OutOfMemory`], [`Error::OverBudget`] or [`Error::OutOfAddresses`], with nothing
    /// changed; driver errors.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<Self> {
        let capabilities = device.driver().capabilities();
        if capabilities.alias == Alias::None {
            let expected = "on a platform that maps a page at several addresses";
            return Err(Error::InvalidArgument { what: "a workspace", value: 0, expected });
        }
        let limit = capabilities.largest_page.min(MAX_BYTES);
        if bytes == 0 || bytes > limit {
            return Err(Error::InvalidSize { what: "workspace", bytes, limit });
        }
        let bytes = bytes.next_multiple_of(capabilities.granularity);
        let mut memory_retry = device.pool().memory_retry();
        loop {
            match Self::make(device, bytes) {
                Err(error) if memory_retry.helps(&error) => {}
                result => return result,
            }
        }
    }

    fn make(device: &Arc<Device>, bytes: u64) -> Result<Self> {
        let mut transaction = Transaction::on(device.pool());
        let range = transaction.reserve(bytes, 0, Peers::NONE)?;
        let group = show(device, &mut transaction, range, bytes, |_| true)?;
        let reserved = transaction.commit().1.pop();
        let range =
            reserved.ok_or_else(|| Error::Internal { what: "a workspace lacks its addresses".into() })?;
        open(&group);
        let place =
            Place { group: Some(group), used: Use::Never, moves: 0, hole: false, behind: Fence::default() };
        Ok(Self { device: Arc::clone(device), range: Some(range), bytes, place: Mutex::new(place) })
    }

    /// Returns the first address.
    #[must_use]
    pub fn address(&self) -> Address {
        self.range.as_ref().map_or(Address(0), Reservation::base)
    }

    /// Returns the bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Call before submitting work which uses the workspace to `stream`, which must exist as long
    /// as the process. `None`, like a default stream of a thread or of a non-primary context: any
    /// stream, from now on. The caller orders earlier work of the workspace before this work;
    /// `used` returns a fence after it, awaited if the page changes. No work with the workspace may
    /// be submitted or captured during the call. Returns whether further calls are unnecessary on
    /// any stream. After an error do not submit the work.
    pub fn use_on(&self, stream: Option<Stream>, used: impl FnOnce() -> Fence) -> Result<bool> {
        // Handles of other streams may be reused for new streams.
        let stream = stream.filter(|stream| self.device.pool().events().name(*stream).is_everywhere());
        let mut place = self.place.lock();
        let stays = match (place.used, stream) {
            _ if place.hole => false,
            (Use::Alone, _) => true,
            (Use::On(on), Some(stream)) if on == stream => true,
            (Use::Never, Some(stream)) => place.group.as_ref().is_some_and(|group| group.is_used_on(stream)),
            _ => place.group.as_ref().is_some_and(Group::is_only),
        };
        if stays {
            place.used = match (place.used, stream) {
                (Use::Never, Some(stream)) => Use::On(stream),
                (Use::On(on), Some(stream)) if on == stream => Use::On(on),
                _ => Use::Alone,
            };
        } else {
            if place.used != Use::Never {
                used().block(self.device.pool().events(), Duration::MAX)?;
            }
            let on = stream.filter(|_| place.used != Use::Alone && place.moves < MOST_MOVES);
            self.change_page(&mut place, on)?;
            place.moves += 1;
        }
        Ok(place.used == Use::Alone)
    }

    /// Moves to the page of a group used on the stream, or a new page.
    fn change_page(&self, place: &mut Place, on: Option<Stream>) -> Result<()> {
        let Some(range) = &self.range else { return Ok(()) };
        let mut transaction = Transaction::on(self.device.pool());
        let shown = (|| {
            if !place.hole {
                transaction.unmap(range.id(), 0, self.bytes)?;
            }
            show(&self.device, &mut transaction, range.id(), self.bytes, |group| {
                on.is_some_and(|on| group.is_used_on(on))
            })
        })();
        let group = match shown {
            Ok(group) => group,
            Err(error) => {
                if !transaction.undo() {
                    place.hole = range.gap(0, self.bytes).is_some();
                }
                return Err(error);
            }
        };
        transaction.commit();
        if let Some(on) = on {
            *group.stream.lock() = Some(on);
            open(&group);
        }
        place.hole = false;
        // Uses of the previous page are complete.
        place.group = Some(group);
        place.used = on.map_or(Use::Alone, Use::On);
        Ok(())
    }

    /// Makes the page private and permanent, if no other workspace has used it. Returns whether it
    /// is private; false while another thread waits for the last use. Does not wait.
    pub fn keep(&self) -> bool {
        let Some(mut place) = self.place.try_lock() else { return false };
        if !place.hole && place.group.as_ref().is_some_and(Group::is_only) {
            place.used = Use::Alone;
        }
        place.used == Use::Alone
    }

    /// Delays the freeing of the addresses, and the reuse of the page, until after `behind` and all
    /// earlier fences.
    pub fn leave(&self, behind: Fence) {
        let mut place = self.place.lock();
        place.behind.join(behind);
        // Completed parts need not be stored.
        drop(place.behind.done(self.device.pool().events()));
    }
}

impl Group {
    /// Binds an unused group to the stream.
    fn is_used_on(&self, stream: Stream) -> bool {
        *self.stream.lock().get_or_insert(stream) == stream
    }

    /// Whether only one workspace ever used the page. Closes the group to others.
    fn is_only(group: &Arc<Self>) -> bool {
        let mut open = OPEN.lock();
        let only = Arc::strong_count(group) == 1 && !group.left.load(Ordering::SeqCst);
        if only {
            open.retain(|known| known.group.as_ptr() != Arc::as_ptr(group));
        }
        only
    }

    fn owner(&self) -> Owner {
        Owner::Workspace { group: self.id }
    }
}

fn open(group: &Arc<Group>) {
    let mut open = OPEN.lock();
    open.retain(|known| known.group.strong_count() > 0);
    if !open.iter().any(|known| known.group.as_ptr() == Arc::as_ptr(group)) {
        open.push(Open { pool: Weak::clone(&group.pool), bytes: group.bytes, group: Arc::downgrade(group) });
    }
}

/// Maps the page of the first suitable open group, or a new page.
fn show(
    device: &Arc<Device>,
    transaction: &mut Transaction<'_>,
    range: RangeId,
    bytes: u64,
    suits: impl Fn(&Group) -> bool,
) -> Result<Arc<Group>> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let pool = Arc::downgrade(device.pool());
    // Upgrading adds a reference, which `is_only` counts: only groups of this device.
    let known: Vec<Arc<Group>> = OPEN
        .lock()
        .iter()
        .filter(|known| known.bytes == bytes && known.pool.ptr_eq(&pool))
        .filter_map(|known| known.group.upgrade())
        .collect();
    for group in known {
        // A group whose last workspace is being dropped has no page.
        if suits(&group) && transaction.pin_owned(group.page, group.owner()).is_some() {
            transaction.map(range, 0, &[group.page])?;
            return Ok(group);
        }
    }
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let account = device.account(&format!("workspaces {id}"), None, Limits::default())?;
    let page = transaction.take(bytes, Owner::Workspace { group: id }, account.id())?;
    transaction.map(range, 0, &[page])?;
    let (stream, left) = (Mutex::default(), AtomicBool::new(false));
    Ok(Arc::new(Group { id, pool, bytes, page, _account: account, stream, left }))
}

impl Drop for Workspace {
    fn drop(&mut self) {
        let (pool, place) = (self.device.pool(), self.place.get_mut());
        if let Some(group) = place.group.take()
            && place.used != Use::Never
        {
            group.left.store(true, Ordering::SeqCst);
        }
        if let Some(range) = self.range.take() {
            pool.unmap_after(std::mem::take(&mut place.behind), range.leave());
        }
        pool.check();
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (address, bytes) = (self.address(), self.bytes);
        f.debug_struct("Workspace").field("address", &address).field("bytes", &bytes).finish_non_exhaustive()
    }
}

//! Workspaces: what kernels of captured graphs use in passing, such as cuBLAS's partial sums. A graph has its address baked in, so whoever captures
//! gets addresses of his own; which page is behind them is a matter of who runs at the same time.
//!
//! Those whose users one stream has in order show one page, as graphs that are captured without any common pool mostly are: N of them cost one. A
//! workspace is used on the stream that its page's other users are on, or gets another page before; one that goes from stream to stream gets a page
//! of its own. So nobody ever waits for another's work.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::device::Device;
use crate::driver::Alias;
use crate::error::{Error, Result};
use crate::pages::{Account, Change, Fence, Holder, Limits, PageId, PagePool, RangeId, Reservation};
use crate::sync::{Mutex, ProcessMutex};
use crate::units::{Address, MAX_BYTES, Peers, Stream};

/// A page and those who show it.
struct Group {
    id: u64,
    pool: Weak<PagePool>,
    bytes: u64,
    page: PageId,
    /// What its page counts toward.
    _account: Account,
    /// The stream that has all their work in order; `None`: none of them has been used.
    stream: Mutex<Option<Stream>>,
    /// Whether one that was used has left: its work may not be over.
    left: AtomicBool,
}

/// One that takes one more.
struct Open {
    pool: Weak<PagePool>,
    bytes: u64,
    group: Weak<Group>,
}

/// All of them, in the order of age.
static OPEN: ProcessMutex<Vec<Open>> = ProcessMutex::new(Vec::new());

/// How often a workspace joins those of another stream, which is to wait for its last use and to map a page, before it has one of its own.
const MOST_MOVES: u32 = 3;

/// How a workspace is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Use {
    /// Not yet.
    Never,
    /// On one stream only.
    On(Stream),
    /// On whatever stream: its page is its own.
    Alone,
}

struct Place {
    group: Option<Arc<Group>>,
    used: Use,
    moves: u32,
    /// A change could not be undone: nothing is mapped.
    hole: bool,
    /// Behind what it may go.
    behind: Fence,
}

/// Addresses for what kernels use in passing; contents are nobody's from one use to the next. Thread-safe.
///
/// Dropping it blocks nobody: see [`leave`](Self::leave).
pub struct Workspace {
    device: Arc<Device>,
    /// `None`: it is going.
    range: Option<Reservation>,
    bytes: u64,
    place: Mutex<Place>,
}

impl Workspace {
    /// A workspace of so many bytes at least, on the page of others of that size or a new one, which counts toward the device's budget.
    ///
    /// # Errors
    /// [`Error::InvalidSize`]; [`Error::InvalidArgument`] on a platform where a page shows once; [`Error::OutOfMemory`], [`Error::OverBudget`] or
    /// [`Error::OutOfAddresses`], with nothing changed; what the driver says.
    pub fn new(device: &Arc<Device>, bytes: u64) -> Result<Self> {
        let capabilities = device.driver().capabilities();
        if capabilities.alias == Alias::None {
            let expected = "on a platform where a page shows at several addresses";
            return Err(Error::InvalidArgument { what: "a workspace", value: 0, expected });
        }
        let limit = capabilities.largest_page.min(MAX_BYTES);
        if bytes == 0 || bytes > limit {
            return Err(Error::InvalidSize { what: "workspace", bytes, limit });
        }
        let bytes = bytes.next_multiple_of(capabilities.granularity);
        let mut relief = device.pool().relief();
        loop {
            match Self::make(device, bytes) {
                Err(error) if relief.helps(&error) => {}
                result => return result,
            }
        }
    }

    fn make(device: &Arc<Device>, bytes: u64) -> Result<Self> {
        let mut change = Change::on(device.pool());
        let range = change.reserve(bytes, 0, Peers::NONE)?;
        let group = show(device, &mut change, range, bytes, |_| true)?;
        let reserved = change.commit().1.pop();
        let range =
            reserved.ok_or_else(|| Error::Internal { what: "a workspace lacks its addresses".into() })?;
        open(&group);
        let place =
            Place { group: Some(group), used: Use::Never, moves: 0, hole: false, behind: Fence::default() };
        Ok(Self { device: Arc::clone(device), range: Some(range), bytes, place: Mutex::new(place) })
    }

    /// The first address, which never changes.
    #[must_use]
    pub fn address(&self) -> Address {
        self.range.as_ref().map_or(Address(0), Reservation::base)
    }

    /// Bytes, in whole pages of the driver's smallest size.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Before work that uses it is given to a stream, which is there as long as the process lives; `None`: any stream, by whomever, from now on, which a
    /// default stream of a thread or of another context than the primary one counts as. Work that it was used for before is ordered before that work,
    /// and `used` is behind all of it: that is waited for where the page changes. The caller sees to it that nothing is given or captured with it
    /// meanwhile. Asks nobody for memory. Whether it need not be asked again on any stream.
    ///
    /// # Errors
    /// As [`new`](Self::new), and those of [`Fence::block`]. Then the work must not be given, and it can be tried again.
    pub fn use_on(&self, stream: Option<Stream>, used: impl FnOnce() -> Fence) -> Result<bool> {
        // Others' handles may come back for other streams.
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

    /// Another page: that of a group which is used on the stream, or a new one.
    fn change_page(&self, place: &mut Place, on: Option<Stream>) -> Result<()> {
        let Some(range) = &self.range else { return Ok(()) };
        let mut change = Change::on(self.device.pool());
        let shown = (|| {
            if !place.hole {
                change.unmap(range.id(), 0, self.bytes)?;
            }
            show(&self.device, &mut change, range.id(), self.bytes, |group| {
                on.is_some_and(|on| group.is_used_on(on))
            })
        })();
        let group = match shown {
            Ok(group) => group,
            Err(error) => {
                if !change.undo() {
                    place.hole = range.gap(0, self.bytes).is_some();
                }
                return Err(error);
            }
        };
        change.commit();
        if let Some(on) = on {
            *group.stream.lock() = Some(on);
            open(&group);
        }
        place.hole = false;
        // What it was used for on the other one is over.
        place.group = Some(group);
        place.used = on.map_or(Use::Alone, Use::On);
        Ok(())
    }

    /// Makes it one whose page never changes, for users of any number and streams that something else has in order, if nobody else has shown its page.
    /// Whether it is; not while another thread waits for its last use. Waits for nothing.
    pub fn keep(&self) -> bool {
        let Some(mut place) = self.place.try_lock() else { return false };
        if !place.hole && place.group.as_ref().is_some_and(Group::is_only) {
            place.used = Use::Alone;
        }
        place.used == Use::Alone
    }

    /// Its addresses go, and others get its page, behind this and what was said before.
    pub fn leave(&self, behind: Fence) {
        let mut place = self.place.lock();
        place.behind.join(behind);
        // What is over need not be remembered.
        drop(place.behind.done(self.device.pool().events()));
    }
}

impl Group {
    /// Whether its users are on this stream, from now on if there are none yet.
    fn is_used_on(&self, stream: Stream) -> bool {
        *self.stream.lock().get_or_insert(stream) == stream
    }

    /// Whether one alone has ever used its page and shows it; then no other will.
    fn is_only(group: &Arc<Self>) -> bool {
        let mut open = OPEN.lock();
        let only = Arc::strong_count(group) == 1 && !group.left.load(Ordering::SeqCst);
        if only {
            open.retain(|known| known.group.as_ptr() != Arc::as_ptr(group));
        }
        only
    }

    fn holder(&self) -> Holder {
        Holder::Workspace { group: self.id }
    }
}

/// Others may join.
fn open(group: &Arc<Group>) {
    let mut open = OPEN.lock();
    open.retain(|known| known.group.strong_count() > 0);
    if !open.iter().any(|known| known.group.as_ptr() == Arc::as_ptr(group)) {
        open.push(Open { pool: Weak::clone(&group.pool), bytes: group.bytes, group: Arc::downgrade(group) });
    }
}

/// Maps the page of the first open group that suits, or a new one, at the beginning of a range.
fn show(
    device: &Arc<Device>,
    change: &mut Change<'_>,
    range: RangeId,
    bytes: u64,
    suits: impl Fn(&Group) -> bool,
) -> Result<Arc<Group>> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let pool = Arc::downgrade(device.pool());
    // Whoever is looked at has one user more meanwhile: none of another device, where somebody may ask whether he is alone.
    let known: Vec<Arc<Group>> = OPEN
        .lock()
        .iter()
        .filter(|known| known.bytes == bytes && known.pool.ptr_eq(&pool))
        .filter_map(|known| known.group.upgrade())
        .collect();
    for group in known {
        // One whose last user is going has lost its page.
        if suits(&group) && change.rely_on(group.page, group.holder()).is_some() {
            change.map(range, 0, &[group.page])?;
            return Ok(group);
        }
    }
    let id = NEXT.fetch_add(1, Ordering::Relaxed);
    let account = device.account(&format!("workspaces {id}"), None, Limits::default())?;
    let page = change.take(bytes, Holder::Workspace { group: id }, account.id())?;
    change.map(range, 0, &[page])?;
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
            pool.finish(std::mem::take(&mut place.behind), range.leave());
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

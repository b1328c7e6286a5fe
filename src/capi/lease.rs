//! Pages of an arena on lease to elastic memory.

use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use super::arena::{stream_of, vmmgraph_arena_t};
use super::elastic::vmmgraph_elastic_buffer_t;
use super::guard::{Failure, guard, null, out};
use super::handle::{get, register, remove};
use super::kv::{vmmgraph_block_range_t, vmmgraph_kv_cache_t};
use super::memory::{copy_counted, fence_of, write_number};
use super::pause::vmmgraph_fence_t;
use super::sized::range;
use super::space::vmmgraph_space_t;
use super::status::vmmgraph_status_t;
use crate::error::{self, Error};
use crate::pages::Fence;
use crate::sync::Mutex;
use crate::{
    BlockBorrower, Borrower, Device, ElasticBuffer, KvCache, Lease, SharedVmmAllocator, Space, Vacate,
    VacateBlocks, Vacated,
};

/// Never defined: a vmmgraph_lease_t is a key, not an address.
pub struct vmmgraph_lease {
    _private: (),
}

/// Pages of an arena that show in elastic memory as well. Calls with it are thread-safe.
pub type vmmgraph_lease_t = *mut vmmgraph_lease;

/// Never defined: a vmmgraph_vacating_t is a key, not an address.
pub struct vmmgraph_vacating {
    _private: (),
}

/// A recall under way, while its borrower is asked.
pub type vmmgraph_vacating_t = *mut vmmgraph_vacating;

/// What the user of pages on lease is asked for: which of these, so many bytes, by then.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_vacate_t {
    /// sizeof(vmmgraph_vacate_t) of the library.
    pub struct_size: usize,
    /// The lease's number.
    pub lease: u64,
    /// Of a buffer: bytes from its base, one range, all of which are to go. Of a cache: the blocks with memory that lie on the lease's pages.
    pub ranges: *const vmmgraph_block_range_t,
    /// How many.
    pub range_count: usize,
    /// What else has memory there and is not on lease: bytes, or blocks.
    pub instead: *const vmmgraph_block_range_t,
    /// How many.
    pub instead_count: usize,
    /// Bytes of pages that are wanted.
    pub bytes: u64,
    /// How much time is left, in microseconds.
    pub micros: u64,
}

/// Stops using what it is asked for, says which blocks it gave up by vmmgraph_vacating_add (of a buffer: all of the range, without saying so)
/// and behind what by vmmgraph_vacating_behind, and returns 0; anything else: it needs them all, and the recall fails. `asked` and
/// `vacating` are valid during the call, which comes on the thread that recalls, with no lock of the library's held. It may commit other
/// parts, and not wait for this lease. Must not throw.
pub type vmmgraph_vacate_fn = Option<
    unsafe extern "C" fn(
        asked: *const vmmgraph_vacate_t,
        vacating: vmmgraph_vacating_t,
        user: *mut c_void,
    ) -> i32,
>;

/// What a borrower has said so far.
pub(super) struct Vacating {
    device: Arc<Device>,
    said: Mutex<Vacated>,
}

/// A function of C that is asked.
struct Asked {
    vacate: unsafe extern "C" fn(*const vmmgraph_vacate_t, vmmgraph_vacating_t, *mut c_void) -> i32,
    user: *mut c_void,
    device: Arc<Device>,
}

// SAFETY: the caller of a lend function promises that it may be called with `user` from any thread.
unsafe impl Send for Asked {}
// SAFETY: as above.
unsafe impl Sync for Asked {}

impl Asked {
    fn new(
        vacate: vmmgraph_vacate_fn,
        user: *mut c_void,
        device: &Arc<Device>,
    ) -> Result<Arc<Self>, Failure> {
        let vacate = vacate.ok_or_else(|| null("vacate"))?;
        Ok(Arc::new(Self { vacate, user, device: Arc::clone(device) }))
    }

    fn ask(
        &self,
        (lease, bytes, deadline): (u64, u64, Duration),
        ranges: &[Range<u64>],
        instead: &[Range<u64>],
    ) -> error::Result<Vacated> {
        let to_c = |ranges: &[Range<u64>]| ranges.iter().map(vmmgraph_block_range_t::of).collect::<Vec<_>>();
        let (ranges, instead) = (to_c(ranges), to_c(instead));
        let asked = vmmgraph_vacate_t {
            struct_size: size_of::<vmmgraph_vacate_t>(),
            lease,
            ranges: ranges.as_ptr(),
            range_count: ranges.len(),
            instead: instead.as_ptr(),
            instead_count: instead.len(),
            bytes,
            micros: u64::try_from(deadline.as_micros()).unwrap_or(u64::MAX),
        };
        let vacating = Arc::new(Vacating { device: Arc::clone(&self.device), said: Mutex::default() });
        let handle: vmmgraph_vacating_t = register(Arc::clone(&vacating));
        // SAFETY: the caller of a lend function promised that it may be called so.
        let refused = unsafe { (self.vacate)(&raw const asked, handle, self.user) } != 0;
        // C may not have ended it: it has no function for that.
        drop(remove::<Vacating, _>(handle));
        if refused {
            return Err(Error::wrong_state(
                "cannot recall the lease: its borrower refused; try again when the borrower needs the pages no more",
            ));
        }
        let said = std::mem::take(&mut *vacating.said.lock());
        Ok(said)
    }
}

impl Borrower for Asked {
    fn vacate(&self, asked: &Vacate) -> error::Result<Fence> {
        let bytes = asked.range.end - asked.range.start;
        let what = (asked.lease, bytes, asked.deadline);
        Ok(self.ask(what, std::slice::from_ref(&asked.range), &asked.instead)?.fence)
    }
}

impl BlockBorrower for Asked {
    fn vacate(&self, asked: &VacateBlocks) -> error::Result<Vacated> {
        self.ask((asked.lease, asked.bytes, asked.deadline), &asked.blocks, &asked.instead)
    }
}

/// Lends large pages of an arena to `bytes` bytes of a buffer from `offset` on, whole pages where nothing is committed: they show there too and
/// are usable, with undefined contents, and stay mapped for the graphs. Those that show one are not replayed until a recall
/// (VMMGRAPH_ERROR_WRONG_STATE), nor do captures and eager work get them; vmmgraph_arena_set_recall makes them wait. Of the pages that are
/// not on lease those go that the fewest graphs show. They count for the arena; what its account, and those above it, are sure to get
/// is not lent. First work on them waits for vmmgraph_lease_before. Waits for the end of a replay that another thread is launching. Another
/// thread may have them recalled before this returns: whoever keeps account of what he has notes them before, and looks again afterwards. What
/// fails changes nothing.
///
/// # Safety
/// `vacate` may be called with `user` from any thread that recalls, until the lease is over and the recalls that were under way then have
/// returned; `lease` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_lend(
    arena: vmmgraph_arena_t,
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    vacate: vmmgraph_vacate_fn,
    user: *mut c_void,
    lease: *mut vmmgraph_lease_t,
) -> vmmgraph_status_t {
    guard(|| {
        let (arena, buffer) = (get::<SharedVmmAllocator, _>(arena)?, get::<ElasticBuffer, _>(buffer)?);
        // SAFETY: the caller's contract.
        let lease = unsafe { out(lease, "lease") }?;
        let borrower: Arc<dyn Borrower> = Asked::new(vacate, user, arena.device())?;
        *lease = register(Arc::new(arena.lend(&buffer, range(offset, bytes), &borrower)?));
        Ok(())
    })
}

/// As vmmgraph_arena_lend, for blocks of a KV cache from `first` to below `end`, of which none has memory: they are backed in all planes, or
/// nothing has changed. Wherever a page of theirs is missing, one is lent; VMMGRAPH_ERROR_OVER_BUDGET beyond the cache's limit.
///
/// # Safety
/// As vmmgraph_arena_lend.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_lend_blocks(
    arena: vmmgraph_arena_t,
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    vacate: vmmgraph_vacate_fn,
    user: *mut c_void,
    lease: *mut vmmgraph_lease_t,
) -> vmmgraph_status_t {
    guard(|| {
        let (arena, cache) = (get::<SharedVmmAllocator, _>(arena)?, get::<KvCache, _>(cache)?);
        // SAFETY: the caller's contract.
        let lease = unsafe { out(lease, "lease") }?;
        let borrower: Arc<dyn BlockBorrower> = Asked::new(vacate, user, arena.device())?;
        *lease = register(Arc::new(arena.lend_blocks(&cache, first..end, &borrower)?));
        Ok(())
    })
}

/// What becomes of replays, eager work and captures of the arena that need pages on lease, from now on: with microseconds, they recall those
/// leases themselves and wait so long at most; 0, as at first: they are refused. Nothing runs over such pages either way.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_set_recall(arena: vmmgraph_arena_t, micros: u64) -> vmmgraph_status_t {
    guard(|| {
        let wait = (micros > 0).then(|| Duration::from_micros(micros));
        get::<SharedVmmAllocator, _>(arena)?.set_recall(wait);
        Ok(())
    })
}

/// Recalls every lease in the way of a space's replay, or every lease of the arena if `space` is null, within so many microseconds. All are
/// tried; the status is the first failure's.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_recall(
    arena: vmmgraph_arena_t,
    space: vmmgraph_space_t,
    micros: u64,
) -> vmmgraph_status_t {
    guard(|| {
        let (arena, deadline) = (get::<SharedVmmAllocator, _>(arena)?, Duration::from_micros(micros));
        if space.is_null() {
            return Ok(arena.recall_all(deadline)?);
        }
        let space = get::<Space, _>(space)?;
        Ok(arena.recall_for(&space, deadline)?)
    })
}

/// How many bytes could be lent now to somebody who shares none of the arena's accounts, and how many are lent. Either may be null.
///
/// # Safety
/// `lendable` and `lent` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_lendable(
    arena: vmmgraph_arena_t,
    lendable: *mut u64,
    lent: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let arena = get::<SharedVmmAllocator, _>(arena)?;
        // SAFETY: the caller's contract.
        unsafe { write_number(lendable, arena.lendable_bytes()) }?;
        // SAFETY: the caller's contract.
        unsafe { write_number(lent, arena.lent_bytes()) }
    })
}

/// The numbers of the leases on pages that a space shows: as long as there are any, it is not replayed. Writes at most `capacity`, and how
/// many there are.
///
/// # Safety
/// `leases` points to `capacity` writable numbers, or `capacity` is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_leases(
    space: vmmgraph_space_t,
    leases: *mut u64,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { copy_counted(&get::<Space, _>(space)?.leases(), leases, capacity, count) })
}

/// A lease's number, and its bytes that are still on lease; 0: it is over. Either may be null.
///
/// # Safety
/// `number` and `bytes` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lease_bytes(
    lease: vmmgraph_lease_t,
    number: *mut u64,
    bytes: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let lease = get::<Lease, _>(lease)?;
        // SAFETY: the caller's contract.
        unsafe { write_number(number, lease.id()) }?;
        // SAFETY: the caller's contract.
        unsafe { write_number(bytes, lease.bytes()) }
    })
}

/// Makes later work of a stream, the borrower's first on these pages, wait for the graphs that used them before. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lease_before(lease: vmmgraph_lease_t, stream: *mut c_void) -> vmmgraph_status_t {
    guard(|| Ok(get::<Lease, _>(lease)?.before(stream_of(stream))?))
}

/// Has `bytes` bytes of pages given back, or all of them if 0: asks the borrower, waits for its fence, and unmaps them from its memory; over
/// already: nothing. One thread recalls at a time. VMMGRAPH_ERROR_WRONG_STATE if the borrower refused or gave up too little, or if its fence
/// is not over within so many microseconds: then the pages are no longer the borrower's, and come back when somebody looks again.
/// Until they are back, nothing is committed in their places.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lease_recall(
    lease: vmmgraph_lease_t,
    bytes: u64,
    micros: u64,
) -> vmmgraph_status_t {
    guard(|| {
        let bytes = if bytes == 0 { u64::MAX } else { bytes };
        Ok(get::<Lease, _>(lease)?.recall_bytes(bytes, Duration::from_micros(micros))?)
    })
}

/// Ends a handle; the lease goes on until the borrower has its pages no more.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lease_destroy(lease: vmmgraph_lease_t) -> vmmgraph_status_t {
    guard(|| remove::<Lease, _>(lease).map(drop))
}

/// The borrower gave up the blocks from `first` to below `end`. While it is asked only.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_vacating_add(
    vacating: vmmgraph_vacating_t,
    first: u64,
    end: u64,
) -> vmmgraph_status_t {
    guard(|| {
        let vacating = get::<Vacating, _>(vacating)?;
        if first > end {
            let (value, expected) = (i128::from(first), "at most its end");
            return Err(Error::InvalidArgument {
                what: "the beginning of a range of blocks",
                value,
                expected,
            }
            .into());
        }
        vacating.said.lock().blocks.push(first..end);
        Ok(())
    })
}

/// What the borrower gave up is in use until this fence is over (null: nothing). While it is asked only; several fences add up, and their
/// events need to be there during this call only.
///
/// # Safety
/// `fence` is null or points to a struct whose struct_size is set, with as many streams and recorded events as it says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_vacating_behind(
    vacating: vmmgraph_vacating_t,
    fence: *const vmmgraph_fence_t,
) -> vmmgraph_status_t {
    guard(|| {
        let vacating = get::<Vacating, _>(vacating)?;
        // SAFETY: the caller's contract.
        let fence = unsafe { fence_of(&vacating.device, fence) }?;
        vacating.said.lock().fence.join(fence);
        Ok(())
    })
}

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

pub struct vmmgraph_lease {
    _private: (),
}

/// Pages of an arena, also mapped in elastic memory.
pub type vmmgraph_lease_t = *mut vmmgraph_lease;

pub struct vmmgraph_vacating {
    _private: (),
}

/// A recall in progress, valid during vmmgraph_vacate_fn.
pub type vmmgraph_vacating_t = *mut vmmgraph_vacating;

/// Request of a recall to the borrower.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_vacate_t {
    pub struct_size: usize,
    pub lease: u64,
    /// Buffer: one range of bytes from the buffer's base, to be vacated completely. Cache: the
    /// blocks with memory on the lease's pages.
    pub ranges: *const vmmgraph_block_range_t,
    pub range_count: usize,
    /// Alternatives: committed memory of the buffer (bytes) or cache (blocks) which is not on
    /// lease.
    pub instead: *const vmmgraph_block_range_t,
    pub instead_count: usize,
    pub bytes: u64,
    /// Time left, in microseconds.
    pub micros: u64,
}

/// Borrower callback: stops using the requested memory. A cache's borrower reports vacated blocks
/// by vmmgraph_vacating_add; a buffer's vacates the whole range. Report work in progress by
/// vmmgraph_vacating_behind. Returns 0; any other value refuses, and the recall fails. `asked` and
/// `vacating` are valid during the call, on the recalling thread. May commit other memory, but must
/// not wait for this lease.
pub type vmmgraph_vacate_fn = Option<
    unsafe extern "C" fn(
        asked: *const vmmgraph_vacate_t,
        vacating: vmmgraph_vacating_t,
        user: *mut c_void,
    ) -> i32,
>;

pub(super) struct Vacating {
    device: Arc<Device>,
    said: Mutex<Vacated>,
}

struct Asked {
    vacate: unsafe extern "C" fn(*const vmmgraph_vacate_t, vmmgraph_vacating_t, *mut c_void) -> i32,
    user: *mut c_void,
    device: Arc<Device>,
}

// SAFETY: the caller of a lend function permits calls with `user` from any thread.
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
        // SAFETY: the caller of a lend function guarantees this call.
        let refused = unsafe { (self.vacate)(&raw const asked, handle, self.user) } != 0;
        // C has no function to destroy this handle.
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

/// Lends large pages of an arena to `bytes` bytes of a buffer at `offset`: whole pages, uncommitted
/// so far, of the same page size. The pages are also mapped in the buffer, with undefined contents,
/// and stay mapped for the graphs. Until a recall, replays of graphs mapping a lent page are
/// VMMGRAPH_ERROR_WRONG_STATE (or recall: vmmgraph_arena_set_recall), and captures and eager work
/// get no lent pages. Pages mapped by the fewest graphs go first; memory guaranteed to the arena's
/// account or its parents is not lent. First call vmmgraph_lease_before on the stream of the first
/// work. Waits for a replay in progress on another thread. Another thread may recall the pages
/// before this call returns: update your bookkeeping before the call and check again afterwards. A
/// failed call changes nothing.
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
        // SAFETY: contract.
        let lease = unsafe { out(lease, "lease") }?;
        let borrower: Arc<dyn Borrower> = Asked::new(vacate, user, arena.device())?;
        *lease = register(Arc::new(arena.lend(&buffer, range(offset, bytes), &borrower)?));
        Ok(())
    })
}

/// As vmmgraph_arena_lend, for the blocks `first` to `end` - 1 of a KV cache, all without memory.
/// Backs them in all planes, and lends a page only where one is missing. VMMGRAPH_ERROR_OVER_BUDGET
/// beyond the cache's limit.
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
        // SAFETY: contract.
        let lease = unsafe { out(lease, "lease") }?;
        let borrower: Arc<dyn BlockBorrower> = Asked::new(vacate, user, arena.device())?;
        *lease = register(Arc::new(arena.lend_blocks(&cache, first..end, &borrower)?));
        Ok(())
    })
}

/// Sets how replays, eager work and captures treat lent pages they need: recall and wait up to
/// `micros` microseconds; 0, the default: fail. No work runs on lent pages.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_arena_set_recall(arena: vmmgraph_arena_t, micros: u64) -> vmmgraph_status_t {
    guard(|| {
        let wait = (micros > 0).then(|| Duration::from_micros(micros));
        get::<SharedVmmAllocator, _>(arena)?.set_recall(wait);
        Ok(())
    })
}

/// Recalls all leases which block a replay of `space`, or all of the arena if null, within `micros`
/// microseconds in total. Tries all; returns the first failure.
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

/// Writes the bytes lendable to a borrower without a common account, and the bytes on lease. Either
/// may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_arena_lendable(
    arena: vmmgraph_arena_t,
    lendable: *mut u64,
    lent: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let arena = get::<SharedVmmAllocator, _>(arena)?;
        // SAFETY: contract.
        unsafe { write_number(lendable, arena.lendable_bytes()) }?;
        // SAFETY: contract.
        unsafe { write_number(lent, arena.lent_bytes()) }
    })
}

/// Writes the numbers of the leases which block a space's replay.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_leases(
    space: vmmgraph_space_t,
    leases: *mut u64,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { copy_counted(&get::<Space, _>(space)?.leases(), leases, capacity, count) })
}

/// Writes a lease's number and its bytes still on lease; 0: the lease is over. Either may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_lease_bytes(
    lease: vmmgraph_lease_t,
    number: *mut u64,
    bytes: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let lease = get::<Lease, _>(lease)?;
        // SAFETY: contract.
        unsafe { write_number(number, lease.id()) }?;
        // SAFETY: contract.
        unsafe { write_number(bytes, lease.bytes()) }
    })
}

/// Makes later work of `stream`, the borrower's first on the pages, wait for earlier graphs on
/// them. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lease_before(lease: vmmgraph_lease_t, stream: *mut c_void) -> vmmgraph_status_t {
    guard(|| Ok(get::<Lease, _>(lease)?.before(stream_of(stream))?))
}

/// Recalls `bytes` bytes of the lease, or all if 0: asks the borrower, waits for its fence, and
/// unmaps the pages from its memory. No effect on a finished lease. One thread recalls at a time.
/// VMMGRAPH_ERROR_WRONG_STATE if the borrower refuses or vacates too little, or its fence is not
/// complete within `micros` microseconds. After such a timeout the pages no longer belong to the
/// borrower and return at a later poll; until then, commits in their place are
/// VMMGRAPH_ERROR_WRONG_STATE.
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

/// Destroys the handle. The lease continues while the borrower has pages.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_lease_destroy(lease: vmmgraph_lease_t) -> vmmgraph_status_t {
    guard(|| remove::<Lease, _>(lease).map(drop))
}

/// Reports the blocks `first` to `end` - 1 as vacated, inside vmmgraph_vacate_fn.
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

/// Adds a fence until which the device may use the vacated memory. Several fences add up. Valid
/// only inside vmmgraph_vacate_fn.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_vacating_behind(
    vacating: vmmgraph_vacating_t,
    fence: *const vmmgraph_fence_t,
) -> vmmgraph_status_t {
    guard(|| {
        let vacating = get::<Vacating, _>(vacating)?;
        // SAFETY: contract.
        let fence = unsafe { fence_of(&vacating.device, fence) }?;
        vacating.said.lock().fence.join(fence);
        Ok(())
    })
}

use std::ffi::c_void;
use std::ops::Range;

use super::guard::{Failure, guard, items, items_mut, null, out};
use super::kv::vmmgraph_block_range_t;
use super::locked;
use super::memory::{read_ranges, write_number, write_ranges};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::{BlockPool, Candidate};

pub struct vmmgraph_block_pool {
    _private: (),
}

/// Block pool: chooses the blocks of a cache to use, without memory.
pub type vmmgraph_block_pool_t = *mut vmmgraph_block_pool;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_block_pool_stats_t {
    pub struct_size: usize,
    /// Backed or not.
    pub blocks: u64,
    /// Only lower blocks are handed out.
    pub limit_blocks: u64,
    pub in_use: u64,
    /// Backed, unused, below the limit and not reserved.
    pub available: u64,
    pub reserved: u64,
    /// Bytes of backed pages without used blocks.
    pub empty_bytes: u64,
}

/// Page which becomes empty after freeing its used blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_candidate_t {
    pub page: u64,
    pub blocks: *const u64,
    pub block_count: usize,
}

/// Request to an engine to vacate pages.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ask_t {
    pub struct_size: usize,
    /// Pages to vacate, cheapest first.
    pub pages: *const vmmgraph_candidate_t,
    pub page_count: usize,
    /// Bytes requested.
    pub bytes: u64,
    /// Empty bytes after these pages are vacated.
    pub there: u64,
    /// Deadline, in the caller's units.
    pub by: u64,
}

/// Returns not 0 if the engine can evict a used block.
pub type vmmgraph_evictable_fn = Option<unsafe extern "C" fn(block: u64, user: *mut c_void) -> i32>;

/// Frees as many blocks of the pages as possible by vmmgraph_block_pool_free, during the call or
/// soon after. `ask` is valid during the call.
pub type vmmgraph_evict_fn = Option<unsafe extern "C" fn(ask: *const vmmgraph_ask_t, user: *mut c_void)>;

fn with<R>(pool: vmmgraph_block_pool_t, act: impl FnOnce(&mut BlockPool) -> R) -> Result<R, Failure> {
    locked::with(pool, act)
}

/// Creates a pool of unbacked blocks. `blocks_a_page` consecutive blocks share pages; `block_bytes`
/// covers all planes: see vmmgraph_kv_cache_stats.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_create(
    blocks: u64,
    blocks_a_page: u64,
    block_bytes: u64,
    pool: *mut vmmgraph_block_pool_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { locked::create(pool, || BlockPool::new(blocks, blocks_a_page, block_bytes)) }
}

/// Destroys the pool.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_destroy(pool: vmmgraph_block_pool_t) -> vmmgraph_status_t {
    locked::destroy::<BlockPool, _>(pool)
}

/// Marks the pages fully covered by blocks `first` to `end` - 1 as backed.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_back(
    pool: vmmgraph_block_pool_t,
    first: u64,
    end: u64,
) -> vmmgraph_status_t {
    guard(|| with(pool, |pool| pool.back(&(first..end))))
}

/// Reverts vmmgraph_block_pool_back, except for pages with used blocks. Call before the memory is
/// released. `lost` receives the number of reserved blocks lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_unback(
    pool: vmmgraph_block_pool_t,
    first: u64,
    end: u64,
    lost: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let cost = with(pool, |pool| pool.unback(&(first..end)))?;
        // SAFETY: contract.
        unsafe { write_number(lost, cost) }
    })
}

/// Writes the blocks handed out, and whether the pool had enough.
unsafe fn hand_out(
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
    take: impl FnOnce() -> Result<Option<Vec<u64>>, Failure>,
) -> Result<(), Failure> {
    let room = usize::try_from(count).unwrap_or(usize::MAX);
    // SAFETY: contract.
    let (place, there) = unsafe { (items_mut(blocks, room, "blocks")?, out(there, "there")?) };
    let taken = take()?;
    if let Some(taken) = &taken {
        place.iter_mut().zip(taken).for_each(|(place, block)| *place = *block);
    }
    *there = i32::from(taken.is_some());
    Ok(())
}

/// Hands out `count` blocks (`there` is 1), or none (`there` is 0; no error). Prefers the page with
/// the fewest free blocks which fits, so that other pages become empty.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_allocate(
    pool: vmmgraph_block_pool_t,
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { hand_out(count, blocks, there, || with(pool, |pool| pool.allocate(count))) })
}

/// Reserves `count` blocks for vmmgraph_block_pool_allocate_reserved, or none (`there` is 0).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_reserve(
    pool: vmmgraph_block_pool_t,
    count: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let there = unsafe { out(there, "there") }?;
        *there = i32::from(with(pool, |pool| pool.reserve(count))?);
        Ok(())
    })
}

/// Cancels at most `count` reservations.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_unreserve(
    pool: vmmgraph_block_pool_t,
    count: u64,
) -> vmmgraph_status_t {
    guard(|| with(pool, |pool| pool.unreserve(count)))
}

/// As vmmgraph_block_pool_allocate, from the reserved blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_allocate_reserved(
    pool: vmmgraph_block_pool_t,
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { hand_out(count, blocks, there, || with(pool, |pool| pool.allocate_reserved(count))) })
}

/// Frees blocks. `emptied` receives the number of pages which became empty; see
/// vmmgraph_block_pool_surplus. VMMGRAPH_ERROR_INVALID_ARGUMENT, with nothing changed, if a block
/// is not in use or is listed twice.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_free(
    pool: vmmgraph_block_pool_t,
    blocks: *const u64,
    count: usize,
    emptied: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let blocks = unsafe { items(blocks, count, "blocks") }?;
        let pages = with(pool, |pool| pool.free(blocks))??;
        // SAFETY: contract.
        unsafe { write_number(emptied, pages.len() as u64) }
    })
}

/// Hands out only blocks below `blocks` from now on. Used blocks stay used. `lost` receives the
/// number of reserved blocks lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_set_limit(
    pool: vmmgraph_block_pool_t,
    blocks: u64,
    lost: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let cost = with(pool, |pool| pool.set_limit(blocks))?;
        // SAFETY: contract.
        unsafe { write_number(lost, cost) }
    })
}

/// Returns the used blocks from `first` to `end` - 1 as ranges in order, as for
/// vmmgraph_kv_cache_shrink_to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_used(
    pool: vmmgraph_block_pool_t,
    first: u64,
    end: u64,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    range_count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        let found = with(pool, |pool| pool.used(&(first..end)))?;
        // SAFETY: contract.
        unsafe { write_ranges(&found, ranges, capacity, range_count) }
    })
}

/// Returns the blocks to back so that `count` blocks become available: ranges of whole pages,
/// lowest first. `there` is 0, without ranges, if the limit leaves too few blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_shortfall(
    pool: vmmgraph_block_pool_t,
    count: u64,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    range_count: *mut usize,
    there: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let there = unsafe { out(there, "there") }?;
        let found = with(pool, |pool| pool.shortfall(count))?;
        // SAFETY: contract.
        unsafe { write_ranges(found.as_deref().unwrap_or_default(), ranges, capacity, range_count) }?;
        *there = i32::from(found.is_some());
        Ok(())
    })
}

/// Returns backed pages without used blocks, as block ranges: pages beyond the limit, and the
/// highest other pages, leaving `keep` and the reserved blocks free. For
/// vmmgraph_block_pool_unback, then vmmgraph_kv_cache_release.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_surplus(
    pool: vmmgraph_block_pool_t,
    keep: u64,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    range_count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        let found = with(pool, |pool| pool.surplus(keep))?;
        // SAFETY: contract.
        unsafe { write_ranges(&found, ranges, capacity, range_count) }
    })
}

/// Asks the engine to vacate pages until `bytes` bytes are empty: pages on which `evictable`
/// accepts every used block (null: all pages), first beyond the limit, then with the fewest used
/// blocks. Calls `evict` once on this thread, unless no page is needed or available. `empty_bytes`
/// (may be null) receives the empty bytes afterwards. Other threads may use blocks meanwhile: the
/// engine checks which are in use.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_ask(
    pool: vmmgraph_block_pool_t,
    bytes: u64,
    by: u64,
    evictable: vmmgraph_evictable_fn,
    evict: vmmgraph_evict_fn,
    user: *mut c_void,
    empty_bytes: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe {
        ask(pool, None, (bytes, by), (evictable, evict, user))?;
        write_number(empty_bytes, with(pool, |pool| pool.empty_bytes())?)
    })
}

/// As vmmgraph_block_pool_ask, for the pages of the blocks in `ranges`, as for a recall; then see
/// vmmgraph_block_pool_unused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_ask_of(
    pool: vmmgraph_block_pool_t,
    ranges: *const vmmgraph_block_range_t,
    range_count: usize,
    bytes: u64,
    evictable: vmmgraph_evictable_fn,
    evict: vmmgraph_evict_fn,
    user: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let among = unsafe { read_ranges(ranges, range_count) }?;
        // SAFETY: contract.
        unsafe { ask(pool, Some(&among), (bytes, 0), (evictable, evict, user)) }
    })
}

/// Returns the releasable pages among those of the blocks in `among`: block ranges without used
/// blocks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_unused(
    pool: vmmgraph_block_pool_t,
    among: *const vmmgraph_block_range_t,
    among_count: usize,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let among = unsafe { read_ranges(among, among_count) }?;
        let found = with(pool, |pool| pool.unused_of(&among))?;
        // SAFETY: contract.
        unsafe { write_ranges(&found, ranges, capacity, count) }
    })
}

unsafe fn ask(
    pool: vmmgraph_block_pool_t,
    among: Option<&[Range<u64>]>,
    (bytes, by): (u64, u64),
    (evictable, evict, user): (vmmgraph_evictable_fn, vmmgraph_evict_fn, *mut c_void),
) -> Result<(), Failure> {
    let evict = evict.ok_or_else(|| null("evict"))?;
    // A snapshot: the engine is called without the lock.
    let seen = with(pool, |pool| pool.clone())?;
    // SAFETY: contract.
    let may = |block| evictable.is_none_or(|may| unsafe { may(block, user) } != 0);
    let ask = match among {
        Some(among) => seen.ask_of(among, bytes, by, may),
        None => seen.ask(bytes, by, may),
    };
    let candidate = |page: &Candidate| vmmgraph_candidate_t {
        page: page.page,
        blocks: page.blocks.as_ptr(),
        block_count: page.blocks.len(),
    };
    let pages: Vec<_> = ask.pages.iter().map(candidate).collect();
    let told = vmmgraph_ask_t {
        struct_size: size_of::<vmmgraph_ask_t>(),
        pages: pages.as_ptr(),
        page_count: pages.len(),
        bytes: ask.bytes,
        there: ask.there,
        by: ask.by,
    };
    if !pages.is_empty() {
        // SAFETY: contract.
        unsafe { evict(&raw const told, user) };
    }
    Ok(())
}

/// Writes the pool's statistics.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_stats(
    pool: vmmgraph_block_pool_t,
    stats: *mut vmmgraph_block_pool_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = with(pool, |pool| vmmgraph_block_pool_stats_t {
            struct_size: stats.struct_size,
            blocks: pool.blocks(),
            limit_blocks: pool.limit(),
            in_use: pool.in_use(),
            available: pool.available(),
            reserved: pool.reserved(),
            empty_bytes: pool.empty_bytes(),
        })?;
        stats.write(now);
        Ok(())
    })
}

//! Which blocks of a cache to use: bookkeeping without memory.

use std::ffi::c_void;
use std::ops::Range;

use super::guard::{Failure, guard, items, items_mut, null, out};
use super::kv::vmmgraph_block_range_t;
use super::locked;
use super::memory::{read_ranges, write_number, write_ranges};
use super::sized::OutStruct;
use super::status::vmmgraph_status_t;
use crate::{BlockPool, Candidate};

/// Never defined: a vmmgraph_block_pool_t is a key, not an address.
pub struct vmmgraph_block_pool {
    _private: (),
}

/// Which blocks of a cache are used, and which to use next. It holds no memory. Calls with it are thread-safe.
pub type vmmgraph_block_pool_t = *mut vmmgraph_block_pool;

/// What a block pool has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_block_pool_stats_t {
    /// Set to sizeof(vmmgraph_block_pool_stats_t) before the call.
    pub struct_size: usize,
    /// Blocks there are, backed or not.
    pub blocks: u64,
    /// Blocks below this are handed out.
    pub limit_blocks: u64,
    /// Blocks in use.
    pub in_use: u64,
    /// Blocks that could be handed out now: backed, unused, below the limit and not reserved.
    pub available: u64,
    /// Blocks set aside.
    pub reserved: u64,
    /// Bytes of backed pages on which nothing is used.
    pub empty_bytes: u64,
}

/// A page that would come free, and the blocks in use on it. It never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_candidate_t {
    /// Its number.
    pub page: u64,
    /// The blocks in use on it.
    pub blocks: *const u64,
    /// How many.
    pub block_count: usize,
}

/// What an engine is asked to vacate.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ask_t {
    /// sizeof(vmmgraph_ask_t) of the library.
    pub struct_size: usize,
    /// Pages, those that cost it least first, as many as are needed.
    pub pages: *const vmmgraph_candidate_t,
    /// How many.
    pub page_count: usize,
    /// Bytes that are wanted.
    pub bytes: u64,
    /// Bytes that there would be, those of pages that are empty already included.
    pub there: u64,
    /// Until when, in the caller's own units.
    pub by: u64,
}

/// Whether the engine could give a block in use up: 0 or not. Must not throw. No lock of the library's is held.
pub type vmmgraph_evictable_fn = Option<unsafe extern "C" fn(block: u64, user: *mut c_void) -> i32>;

/// Asks the engine to vacate pages: it frees what it can of their blocks by vmmgraph_block_pool_free, there or soon. `ask` is valid during
/// the call. Must not throw. No lock of the library's is held.
pub type vmmgraph_evict_fn = Option<unsafe extern "C" fn(ask: *const vmmgraph_ask_t, user: *mut c_void)>;

fn with<R>(pool: vmmgraph_block_pool_t, act: impl FnOnce(&mut BlockPool) -> R) -> Result<R, Failure> {
    locked::with(pool, act)
}

/// Makes a pool of so many blocks, none backed, of which `blocks_a_page` behind one another share pages; `block_bytes` is a block's of all
/// planes: numbers that vmmgraph_kv_cache_stats has.
///
/// # Safety
/// `pool` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_create(
    blocks: u64,
    blocks_a_page: u64,
    block_bytes: u64,
    pool: *mut vmmgraph_block_pool_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { locked::create(pool, || BlockPool::new(blocks, blocks_a_page, block_bytes)) }
}

/// Ends a handle, and with it the pool.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_destroy(pool: vmmgraph_block_pool_t) -> vmmgraph_status_t {
    locked::destroy::<BlockPool, _>(pool)
}

/// The pages that these blocks cover have memory now.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_back(
    pool: vmmgraph_block_pool_t,
    first: u64,
    end: u64,
) -> vmmgraph_status_t {
    guard(|| with(pool, |pool| pool.back(&(first..end))))
}

/// The pages that these blocks cover, and on which none is used, have no memory any more. To be said before the memory goes. `lost`, which
/// may be null, is how many reserved blocks that costs.
///
/// # Safety
/// `lost` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_unback(
    pool: vmmgraph_block_pool_t,
    first: u64,
    end: u64,
    lost: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let cost = with(pool, |pool| pool.unback(&(first..end)))?;
        // SAFETY: the caller's contract.
        unsafe { write_number(lost, cost) }
    })
}

/// Writes blocks that were handed out, and whether there were.
///
/// # Safety
/// `blocks` is good for writes of `count` numbers, or `count` is 0; `there` is null or writable.
unsafe fn hand_out(
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
    take: impl FnOnce() -> Result<Option<Vec<u64>>, Failure>,
) -> Result<(), Failure> {
    let room = usize::try_from(count).unwrap_or(usize::MAX);
    // SAFETY: the caller's contract.
    let (place, there) = unsafe { (items_mut(blocks, room, "blocks")?, out(there, "there")?) };
    let taken = take()?;
    if let Some(taken) = &taken {
        place.iter_mut().zip(taken).for_each(|(place, block)| *place = *block);
    }
    *there = i32::from(taken.is_some());
    Ok(())
}

/// Hands out `count` blocks (`there` is 1), or none (0): a miss is no error. New blocks go to the page with the least room that has
/// enough, so that other pages run empty.
///
/// # Safety
/// `blocks` points to `count` writable numbers; `there` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_allocate(
    pool: vmmgraph_block_pool_t,
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { hand_out(count, blocks, there, || with(pool, |pool| pool.allocate(count))) })
}

/// Sets `count` blocks aside for vmmgraph_block_pool_allocate_reserved; `there` is 1 if there were, else 0.
///
/// # Safety
/// `there` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_reserve(
    pool: vmmgraph_block_pool_t,
    count: u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let there = unsafe { out(there, "there") }?;
        *there = i32::from(with(pool, |pool| pool.reserve(count))?);
        Ok(())
    })
}

/// Gives up so many reserved blocks, or as many as there are.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_block_pool_unreserve(
    pool: vmmgraph_block_pool_t,
    count: u64,
) -> vmmgraph_status_t {
    guard(|| with(pool, |pool| pool.unreserve(count)))
}

/// As vmmgraph_block_pool_allocate, of the reserved blocks.
///
/// # Safety
/// As vmmgraph_block_pool_allocate.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_allocate_reserved(
    pool: vmmgraph_block_pool_t,
    count: u64,
    blocks: *mut u64,
    there: *mut i32,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { hand_out(count, blocks, there, || with(pool, |pool| pool.allocate_reserved(count))) })
}

/// Blocks are not used any more. `emptied`, which may be null, is how many pages came empty by that: vmmgraph_block_pool_surplus says which
/// memory may be given back. A block that is not in use, or is named twice, is VMMGRAPH_ERROR_INVALID_ARGUMENT, with nothing changed.
///
/// # Safety
/// `blocks` points to `count` numbers; `emptied` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_free(
    pool: vmmgraph_block_pool_t,
    blocks: *const u64,
    count: usize,
    emptied: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
        let blocks = unsafe { items(blocks, count, "blocks") }?;
        let pages = with(pool, |pool| pool.free(blocks))??;
        // SAFETY: the caller's contract.
        unsafe { write_number(emptied, pages.len() as u64) }
    })
}

/// Only blocks below `blocks` are handed out from now on. Used ones stay used. `lost`, which may be null, is how many reserved ones that
/// costs.
///
/// # Safety
/// `lost` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_set_limit(
    pool: vmmgraph_block_pool_t,
    blocks: u64,
    lost: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let cost = with(pool, |pool| pool.set_limit(blocks))?;
        // SAFETY: the caller's contract.
        unsafe { write_number(lost, cost) }
    })
}

/// The blocks from `first` to below `end` that are in use, in order: those beyond a new limit are what vmmgraph_kv_cache_shrink_to is to
/// leave. Writes at most `capacity` ranges, and how many there are.
///
/// # Safety
/// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `range_count` is null or writable.
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
        // SAFETY: the caller's contract.
        unsafe { write_ranges(&found, ranges, capacity, range_count) }
    })
}

/// What is to be backed so that `count` blocks are available: ranges in whole pages, the lowest first. `there` is 1, or 0 if the limit
/// leaves too few: then there are no ranges. Writes at most `capacity` ranges, and how many there are.
///
/// # Safety
/// As vmmgraph_block_pool_used; `there` is null or writable.
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
        // SAFETY: the caller's contract.
        let there = unsafe { out(there, "there") }?;
        let found = with(pool, |pool| pool.shortfall(count))?;
        // SAFETY: the caller's contract.
        unsafe { write_ranges(found.as_deref().unwrap_or_default(), ranges, capacity, range_count) }?;
        *there = i32::from(found.is_some());
        Ok(())
    })
}

/// Backed pages on which nothing is used: those beyond the limit, and the highest others as long as `keep` blocks and the reserved ones
/// are free without them. Ranges in whole pages, in order: for vmmgraph_block_pool_unback, then vmmgraph_kv_cache_release. Writes at most
/// `capacity` ranges, and how many there are.
///
/// # Safety
/// As vmmgraph_block_pool_used.
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
        // SAFETY: the caller's contract.
        unsafe { write_ranges(&found, ranges, capacity, range_count) }
    })
}

/// Asks the engine to vacate pages so that `bytes` bytes can be given back until `by`, in units of its own: pages all of whose used blocks
/// it calls `evictable` (null: all are), those beyond the limit first, then those with the fewest used blocks. `evict` is called once, unless
/// no page is to be had or needed, and frees what it can. `empty_bytes`, which may be null, is what is empty afterwards. Blocks may come
/// and go on other threads meanwhile, so the engine looks at what it still has of those that it is asked for.
///
/// # Safety
/// The functions may be called so, with `user`, on this thread; `empty_bytes` is null or writable.
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
    // SAFETY: the caller's contract.
    guard(|| unsafe {
        ask(pool, None, (bytes, by), (evictable, evict, user))?;
        write_number(empty_bytes, with(pool, |pool| pool.empty_bytes())?)
    })
}

/// As vmmgraph_block_pool_ask, of the pages only that the blocks in `ranges` lie on: what a recall of a lease wants back. What
/// can be given back afterwards says vmmgraph_block_pool_unused.
///
/// # Safety
/// As vmmgraph_block_pool_ask; `ranges` points to `range_count` ranges, or that is 0.
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
        // SAFETY: the caller's contract.
        let among = unsafe { read_ranges(ranges, range_count) }?;
        // SAFETY: the caller's contract.
        unsafe { ask(pool, Some(&among), (bytes, 0), (evictable, evict, user)) }
    })
}

/// The pages on which no block is used, of those that the blocks in `among` lie on: what can be given back now, as ranges of blocks. Writes at
/// most `capacity` ranges, and how many there are.
///
/// # Safety
/// `among` points to `among_count` ranges, or that is 0; `ranges` to `capacity` writable ranges, or that is 0; `count` is null or writable.
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
        // SAFETY: the caller's contract.
        let among = unsafe { read_ranges(among, among_count) }?;
        let found = with(pool, |pool| pool.unused_of(&among))?;
        // SAFETY: the caller's contract.
        unsafe { write_ranges(&found, ranges, capacity, count) }
    })
}

/// Asks, of all pages or of those that some blocks lie on.
///
/// # Safety
/// As vmmgraph_block_pool_ask.
unsafe fn ask(
    pool: vmmgraph_block_pool_t,
    among: Option<&[Range<u64>]>,
    (bytes, by): (u64, u64),
    (evictable, evict, user): (vmmgraph_evictable_fn, vmmgraph_evict_fn, *mut c_void),
) -> Result<(), Failure> {
    let evict = evict.ok_or_else(|| null("evict"))?;
    // As it is now: the engine is asked without the lock.
    let seen = with(pool, |pool| pool.clone())?;
    // SAFETY: the caller's contract.
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
        // SAFETY: the caller's contract.
        unsafe { evict(&raw const told, user) };
    }
    Ok(())
}

/// What the pool has now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_block_pool_stats(
    pool: vmmgraph_block_pool_t,
    stats: *mut vmmgraph_block_pool_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: the caller's contract.
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

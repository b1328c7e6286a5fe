//! KV caches: planes of blocks that grow and shrink together.

use std::ffi::c_void;
use std::ops::Range;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::elastic::{
    vmmgraph_committed_t, vmmgraph_elastic_observer_t, vmmgraph_elastic_options_t, vmmgraph_elastic_stats_t,
    vmmgraph_pending_t, vmmgraph_shown_fn,
};
use super::guard::{Failure, guard, items, null, out, pick};
use super::handle::{get, register, remove};
use super::memory::{
    committed, fence_of, hand_over, observed, read_ranges, set_budget, with_options, write_number,
    write_ranges, write_stats,
};
use super::pause::vmmgraph_fence_t;
use super::sized::{OutStruct, options};
use super::status::vmmgraph_status_t;
use crate::error::Error;
use crate::{Device, ElasticOptions, KvCache, KvLayout, KvOptions, LimitChange};

/// Never defined: a vmmgraph_kv_cache_t is a key, not an address.
pub struct vmmgraph_kv_cache {
    _private: (),
}

/// A KV cache: planes of blocks over elastic memory. Calls with it are thread-safe.
pub type vmmgraph_kv_cache_t = *mut vmmgraph_kv_cache;

/// Each plane has addresses of its own, its blocks behind one another.
pub const VMMGRAPH_KV_BY_PLANE: i32 = 0;
/// One range of addresses, block after block, in each the planes behind one another: a range of blocks takes the fewest mappings.
pub const VMMGRAPH_KV_BY_BLOCK: i32 = 1;

/// The limit holds, and no block beyond it has memory.
pub const VMMGRAPH_LIMIT_APPLIED: i32 = 0;
/// It holds for all that is granted from now on; blocks beyond it have memory until they are released.
pub const VMMGRAPH_LIMIT_DEFERRED: i32 = 1;
/// A later revision is known: ignored.
pub const VMMGRAPH_LIMIT_STALE: i32 = 2;
/// This revision said something else before: ignored.
pub const VMMGRAPH_LIMIT_CONFLICT: i32 = 3;

/// How to make a KV cache. Zero everything, then set struct_size, the planes and blocks_most, and what differs from the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_options_t {
    /// sizeof(vmmgraph_kv_options_t).
    pub struct_size: usize,
    /// Bytes of a block in each plane: a layer's keys, a layer's values. Any number of planes, each of any bytes.
    pub planes: *const u64,
    /// How many planes.
    pub plane_count: usize,
    /// The most blocks it may ever have: addresses for them are reserved.
    pub blocks_most: u64,
    /// Name, pages, budget; null: the default.
    pub memory: *const vmmgraph_elastic_options_t,
    /// VMMGRAPH_KV_BY_PLANE or _BY_BLOCK.
    pub layout: i32,
    /// 0.
    pub reserved: i32,
}

/// Where a plane lies.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_plane_t {
    /// Set to sizeof(vmmgraph_kv_plane_t) before the call.
    pub struct_size: usize,
    /// Where its block 0 lies, backed or not.
    pub address: u64,
    /// Bytes from one block to the next.
    pub stride_bytes: u64,
    /// Bytes of a block.
    pub block_bytes: u64,
}

/// Blocks from one number to below another. It never grows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_block_range_t {
    /// The first.
    pub first: u64,
    /// Behind the last.
    pub end: u64,
}

impl vmmgraph_block_range_t {
    pub(super) fn of(range: &Range<u64>) -> Self {
        Self { first: range.start, end: range.end }
    }
}

/// What a KV cache has. Its memory's statistics are those of vmmgraph_kv_cache_memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_stats_t {
    /// Set to sizeof(vmmgraph_kv_stats_t) before the call.
    pub struct_size: usize,
    /// Planes.
    pub planes: u64,
    /// Blocks that it may be used with now: numbers below this, where they are backed.
    pub blocks: u64,
    /// The most that was set from outside, or that there are addresses for.
    pub limit_blocks: u64,
    /// The revision of that.
    pub revision: u64,
    /// 1 if any was set, else 0.
    pub limited: u64,
    /// The most there are addresses for.
    pub most_blocks: u64,
    /// Blocks that have memory.
    pub backed_blocks: u64,
    /// Of these, beyond `blocks`: they go as they are released.
    pub beyond_blocks: u64,
    /// Bytes of a block of all planes.
    pub block_bytes: u64,
    /// How many blocks behind one another share pages, the first of them a multiple of this: what a block pool is to know.
    pub blocks_a_page: u64,
}

const LAYOUTS: [KvLayout; 2] = [KvLayout::ByPlane, KvLayout::ByBlock];

fn change_number(change: LimitChange) -> i32 {
    match change {
        LimitChange::Applied => VMMGRAPH_LIMIT_APPLIED,
        LimitChange::Deferred => VMMGRAPH_LIMIT_DEFERRED,
        LimitChange::Stale => VMMGRAPH_LIMIT_STALE,
        LimitChange::Conflict => VMMGRAPH_LIMIT_CONFLICT,
    }
}

/// Reserves addresses for the most blocks of all planes, without memory yet. The cache keeps the device open.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set, with as many planes as it says, and whose memory is null or points to
/// such a struct; `cache` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_create(
    device: vmmgraph_device_t,
    options: *const vmmgraph_kv_options_t,
    cache: *mut vmmgraph_kv_cache_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (cache, given) = unsafe { (out(cache, "cache")?, self::options(options)?) };
        let given = given.ok_or_else(|| null("options"))?;
        // SAFETY: the caller's contract.
        let planes = unsafe { items(given.planes, given.plane_count, "planes") }?;
        let layout = pick("layout", given.layout, &LAYOUTS)?;
        let blocks_most = given.blocks_most;
        let make = |memory: &ElasticOptions<'_>| {
            Ok::<_, Failure>(device.kv_cache(&KvOptions { planes, blocks_most, layout, memory: *memory })?)
        };
        // SAFETY: the caller's contract.
        *cache = register(unsafe { with_options(given.memory, make) }?);
        Ok(())
    })
}

/// Ends a handle, and with it the cache, once commits under way on the library's thread are over. Before that, everything is released
/// behind a fence, or the device is done with it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_destroy(cache: vmmgraph_kv_cache_t) -> vmmgraph_status_t {
    guard(|| remove::<KvCache, _>(cache).map(drop))
}

/// Where a plane lies. It never changes, so graphs captured over it stay valid however the cache grows and shrinks; what is not backed has
/// no memory, and a device that uses it faults.
///
/// # Safety
/// `place` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_plane(
    cache: vmmgraph_kv_cache_t,
    plane: usize,
    place: *mut vmmgraph_kv_plane_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        let place = unsafe { OutStruct::new(place, "place") }?;
        let found = cache.address(plane, 0).zip(cache.stride(plane)).zip(cache.block_bytes(plane));
        let Some(((address, stride_bytes), block_bytes)) = found else {
            let (value, expected) = (plane as i128, "below the number of the cache's planes");
            return Err(Error::InvalidArgument { what: "a plane", value, expected }.into());
        };
        let struct_size = place.struct_size;
        place.write(vmmgraph_kv_plane_t { struct_size, address: address.0, stride_bytes, block_bytes });
        Ok(())
    })
}

/// Backs the blocks below `blocks` in all planes, or in none, and lets the cache be used with so many. What is backed stays as it is.
/// Fewer than it has: nothing is taken away. Otherwise as vmmgraph_kv_cache_commit.
///
/// # Safety
/// `done` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_grow_to(
    cache: vmmgraph_kv_cache_t,
    blocks: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    unsafe { vmmgraph_kv_cache_commit(cache, 0, blocks, done) }
}

/// Backs the blocks from `first` to below `end` in all planes, or in none; if it ends beyond what the cache could be used with, it now can
/// be with those. Contents of what comes are anything; blocks that were released and had not gone yet keep theirs, and work on other
/// streams than those of their fence is to wait for vmmgraph_kv_cache_before. Before there is no memory, others are asked to give some
/// back. Out of memory, or VMMGRAPH_ERROR_OVER_BUDGET beyond the limit, leaves everything as it was. `done` may be null.
///
/// # Safety
/// `done` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_commit(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        unsafe { committed(done, || cache.commit(first..end)) }
    })
}

/// As vmmgraph_kv_cache_commit, on a thread of the library. Nobody is asked to give memory up for it. Its order with other calls is that of
/// its beginning there; but what a shrink took away meanwhile it does not bring back. What becomes of it is said by
/// vmmgraph_pending_wait; `pending` is to be destroyed, and may be null: then nobody is told.
///
/// # Safety
/// `pending` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_commit_async(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    pending: *mut vmmgraph_pending_t,
) -> vmmgraph_status_t {
    guard(|| {
        let made = get::<KvCache, _>(cache)?.commit_async(first..end)?;
        // SAFETY: the caller's contract.
        unsafe { hand_over(made, pending) };
        Ok(())
    })
}

/// Lets the cache be used with so many blocks at most, from now on. Blocks beyond that which are in none of the `busy` ranges go behind
/// `fence` (null: at once); the busy ones keep their memory until vmmgraph_kv_cache_release. `left`, which may be null, is how many those
/// are. Nobody waits for the device. The fence's events need to be there during the call only.
///
/// # Safety
/// `busy` points to `busy_count` ranges, or that is 0; `fence` is null or points to a struct whose struct_size is set, with as many
/// streams and recorded events as it says; `left` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_shrink_to(
    cache: vmmgraph_kv_cache_t,
    blocks: u64,
    busy: *const vmmgraph_block_range_t,
    busy_count: usize,
    fence: *const vmmgraph_fence_t,
    left: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        let busy = unsafe { read_ranges(busy, busy_count) }?;
        // SAFETY: the caller's contract.
        let fence = unsafe { fence_of(cache.device(), fence) }?;
        let stay = cache.shrink_to(blocks, &busy, &fence)?;
        // SAFETY: the caller's contract.
        unsafe { write_number(left, stay) }
    })
}

/// Blocks are not used any more, wherever they are: their pages go behind `fence` (null: at once) once no other block on them is backed.
/// Does not wait; while another thread grows the cache, they go when it is done. Blocks that have no memory are left out.
///
/// # Safety
/// `fence` as in vmmgraph_kv_cache_shrink_to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_release(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    fence: *const vmmgraph_fence_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        let fence = unsafe { fence_of(cache.device(), fence) }?;
        Ok(cache.release(first..end, &fence)?)
    })
}

/// Sets the most blocks from outside: nothing beyond is granted from now on. Revisions grow; one that is not the latest is ignored. More
/// than there are addresses for is as many as there are. `change`, which may be null, is one of VMMGRAPH_LIMIT_APPLIED, _DEFERRED,
/// _STALE, _CONFLICT.
///
/// # Safety
/// `change` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_set_limit(
    cache: vmmgraph_kv_cache_t,
    blocks: u64,
    revision: u64,
    change: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let became = get::<KvCache, _>(cache)?.set_limit(blocks, revision);
        // SAFETY: the caller's contract.
        if let Some(change) = unsafe { change.as_mut() } {
            *change = change_number(became);
        }
        Ok(())
    })
}

/// Blocks that have memory, in order. Writes at most `capacity` ranges, and how many there are.
///
/// # Safety
/// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_backed(
    cache: vmmgraph_kv_cache_t,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_ranges(&get::<KvCache, _>(cache)?.backed(), ranges, capacity, count) })
}

/// Blocks that have memory beyond what the cache may be used with: they are to be released. As vmmgraph_kv_cache_backed.
///
/// # Safety
/// As vmmgraph_kv_cache_backed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_beyond(
    cache: vmmgraph_kv_cache_t,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_ranges(&get::<KvCache, _>(cache)?.beyond(), ranges, capacity, count) })
}

/// Unmaps what was released and is no longer in use. Does not wait. `gone`, which may be null, is the bytes.
///
/// # Safety
/// `gone` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_settle(
    cache: vmmgraph_kv_cache_t,
    gone: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_number(gone, get::<KvCache, _>(cache)?.settle()) })
}

/// Makes later work of a stream wait for what may still use blocks that were backed again before they went. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_before(
    cache: vmmgraph_kv_cache_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<KvCache, _>(cache)?.before(stream_of(stream))?))
}

/// Limits the bytes of physical memory that the cache may hold; 0: no limit but the device's. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_set_budget(cache: vmmgraph_kv_cache_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| set_budget(get::<KvCache, _>(cache)?.account(), bytes))
}

/// What the cache has now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_stats(
    cache: vmmgraph_kv_cache_t,
    stats: *mut vmmgraph_kv_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = cache.stats();
        stats.write(vmmgraph_kv_stats_t {
            struct_size: stats.struct_size,
            planes: cache.planes() as u64,
            blocks: now.blocks,
            limit_blocks: now.limit_blocks,
            revision: now.revision.unwrap_or(0),
            limited: u64::from(now.revision.is_some()),
            most_blocks: now.most_blocks,
            backed_blocks: now.backed_blocks,
            beyond_blocks: now.beyond_blocks,
            block_bytes: now.block_bytes,
            blocks_a_page: cache.blocks_a_page(),
        });
        Ok(())
    })
}

/// What the cache's memory holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_memory(
    cache: vmmgraph_kv_cache_t,
    stats: *mut vmmgraph_elastic_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        unsafe { write_stats(stats, || cache.stats().memory) }
    })
}

/// As vmmgraph_elastic_buffer_observe, of a cache's memory.
///
/// # Safety
/// As vmmgraph_elastic_buffer_observe.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_observe(
    cache: vmmgraph_kv_cache_t,
    after_map: vmmgraph_shown_fn,
    before_unmap: vmmgraph_shown_fn,
    user: *mut c_void,
    observer: *mut vmmgraph_elastic_observer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: the caller's contract.
        unsafe { observed((after_map, before_unmap, user), observer, |told| cache.observe(told)) }
    })
}

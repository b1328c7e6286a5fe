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

pub struct vmmgraph_kv_cache {
    _private: (),
}

/// KV cache: planes of blocks over elastic memory.
pub type vmmgraph_kv_cache_t = *mut vmmgraph_kv_cache;

/// One address range per plane, with contiguous blocks.
pub const VMMGRAPH_KV_BY_PLANE: i32 = 0;
/// One address range of contiguous blocks, each with its planes: the fewest mappings per range of
/// blocks.
pub const VMMGRAPH_KV_BY_BLOCK: i32 = 1;

/// The limit is set, and no block beyond it has memory.
pub const VMMGRAPH_LIMIT_APPLIED: i32 = 0;
/// The limit is set for later commits; some blocks beyond still have memory until released.
pub const VMMGRAPH_LIMIT_DEFERRED: i32 = 1;
/// Ignored: a later revision is already set.
pub const VMMGRAPH_LIMIT_STALE: i32 = 2;
/// Ignored: the same revision was set with another limit.
pub const VMMGRAPH_LIMIT_CONFLICT: i32 = 3;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_options_t {
    pub struct_size: usize,
    /// Bytes of a block in each plane, such as a layer's keys or values. Any number of planes of
    /// any size.
    pub planes: *const u64,
    pub plane_count: usize,
    /// Maximum number of blocks; addresses are reserved for all.
    pub blocks_most: u64,
    /// Null: default.
    pub memory: *const vmmgraph_elastic_options_t,
    /// One of VMMGRAPH_KV_*.
    pub layout: i32,
    /// Must be 0.
    pub reserved: i32,
}

/// Location of a plane.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_plane_t {
    pub struct_size: usize,
    /// Address of block 0, backed or not.
    pub address: u64,
    /// Distance of consecutive blocks.
    pub stride_bytes: u64,
    /// Bytes of a block in this plane.
    pub block_bytes: u64,
}

/// A range of blocks.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_block_range_t {
    pub first: u64,
    /// Last block plus one.
    pub end: u64,
}

impl vmmgraph_block_range_t {
    pub(super) fn of(range: &Range<u64>) -> Self {
        Self { first: range.start, end: range.end }
    }
}

/// Statistics of a KV cache; for its memory see vmmgraph_kv_cache_memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_kv_stats_t {
    pub struct_size: usize,
    pub planes: u64,
    /// Usable blocks: numbers below this, if backed.
    pub blocks: u64,
    /// Limit set by vmmgraph_kv_cache_set_limit, else most_blocks.
    pub limit_blocks: u64,
    pub revision: u64,
    /// 1 if a limit was set, else 0.
    pub limited: u64,
    /// Blocks with reserved addresses.
    pub most_blocks: u64,
    /// Blocks with memory.
    pub backed_blocks: u64,
    /// Backed blocks at or beyond `blocks`, freed when released.
    pub beyond_blocks: u64,
    /// Bytes of a block over all planes.
    pub block_bytes: u64,
    /// Consecutive blocks which share pages, starting at a multiple of this number; for
    /// vmmgraph_block_pool_t.
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

/// Reserves addresses for all blocks of all planes, without memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_create(
    device: vmmgraph_device_t,
    options: *const vmmgraph_kv_options_t,
    cache: *mut vmmgraph_kv_cache_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (cache, given) = unsafe { (out(cache, "cache")?, self::options(options)?) };
        let given = given.ok_or_else(|| null("options"))?;
        // SAFETY: contract.
        let planes = unsafe { items(given.planes, given.plane_count, "planes") }?;
        let layout = pick("layout", given.layout, &LAYOUTS)?;
        let blocks_most = given.blocks_most;
        let make = |memory: &ElasticOptions<'_>| {
            Ok::<_, Failure>(device.kv_cache(&KvOptions { planes, blocks_most, layout, memory: *memory })?)
        };
        // SAFETY: contract.
        *cache = register(unsafe { with_options(given.memory, make) }?);
        Ok(())
    })
}

/// Destroys the cache, after asynchronous commits end. Before, release all blocks with a fence, or
/// complete all work on the cache.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_destroy(cache: vmmgraph_kv_cache_t) -> vmmgraph_status_t {
    guard(|| remove::<KvCache, _>(cache).map(drop))
}

/// Writes the location of plane number `plane`, which never changes. Device accesses to blocks
/// without memory fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_plane(
    cache: vmmgraph_kv_cache_t,
    plane: usize,
    place: *mut vmmgraph_kv_plane_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: contract.
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

/// As vmmgraph_kv_cache_commit, for all blocks below `blocks`. Never shrinks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_grow_to(
    cache: vmmgraph_kv_cache_t,
    blocks: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    unsafe { vmmgraph_kv_cache_commit(cache, 0, blocks, done) }
}

/// Backs the blocks `first` to `end` - 1, in all planes or none, and makes the numbers below `end`
/// usable. Memory and failures as for vmmgraph_elastic_buffer_commit; for released blocks still
/// mapped, call vmmgraph_kv_cache_before. VMMGRAPH_ERROR_OVER_BUDGET also beyond the limit. `done`
/// may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_commit(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: contract.
        unsafe { committed(done, || cache.commit(first..end)) }
    })
}

/// As vmmgraph_elastic_buffer_commit_async. Ordered among other calls by its start on the thread;
/// blocks removed by a shrink meanwhile stay removed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_commit_async(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    pending: *mut vmmgraph_pending_t,
) -> vmmgraph_status_t {
    guard(|| {
        let made = get::<KvCache, _>(cache)?.commit_async(first..end)?;
        // SAFETY: contract.
        unsafe { hand_over(made, pending) };
        Ok(())
    })
}

/// Lowers the number of usable blocks to `blocks`. Later blocks outside the `busy` ranges are
/// unmapped after `fence`; busy blocks keep their memory until vmmgraph_kv_cache_release. `left`
/// receives the number of busy blocks beyond `blocks`. Never waits for the device.
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
        // SAFETY: contract.
        let busy = unsafe { read_ranges(busy, busy_count) }?;
        // SAFETY: contract.
        let fence = unsafe { fence_of(cache.device(), fence) }?;
        let stay = cache.shrink_to(blocks, &busy, &fence)?;
        // SAFETY: contract.
        unsafe { write_number(left, stay) }
    })
}

/// Releases the blocks `first` to `end` - 1: later work must not use them. Pages are unmapped after
/// `fence` once no other backed block shares them. Does not wait: a thread growing the cache unmaps
/// the pages. Blocks without memory are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_release(
    cache: vmmgraph_kv_cache_t,
    first: u64,
    end: u64,
    fence: *const vmmgraph_fence_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: contract.
        let fence = unsafe { fence_of(cache.device(), fence) }?;
        Ok(cache.release(first..end, &fence)?)
    })
}

/// Sets the block limit for later commits, at most most_blocks. An older `revision` is ignored.
/// `change` (may be null) receives VMMGRAPH_LIMIT_*.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_set_limit(
    cache: vmmgraph_kv_cache_t,
    blocks: u64,
    revision: u64,
    change: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let became = get::<KvCache, _>(cache)?.set_limit(blocks, revision);
        // SAFETY: contract.
        if let Some(change) = unsafe { change.as_mut() } {
            *change = change_number(became);
        }
        Ok(())
    })
}

/// Writes the blocks with memory, in order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_backed(
    cache: vmmgraph_kv_cache_t,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_ranges(&get::<KvCache, _>(cache)?.backed(), ranges, capacity, count) })
}

/// Writes the blocks with memory beyond the usable ones.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_beyond(
    cache: vmmgraph_kv_cache_t,
    ranges: *mut vmmgraph_block_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_ranges(&get::<KvCache, _>(cache)?.beyond(), ranges, capacity, count) })
}

/// As vmmgraph_elastic_buffer_reap.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_reap(
    cache: vmmgraph_kv_cache_t,
    gone: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_number(gone, get::<KvCache, _>(cache)?.reap()) })
}

/// As vmmgraph_elastic_buffer_before, for blocks released and backed again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_before(
    cache: vmmgraph_kv_cache_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<KvCache, _>(cache)?.before(stream_of(stream))?))
}

#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_kv_cache_set_budget(cache: vmmgraph_kv_cache_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| set_budget(get::<KvCache, _>(cache)?.account(), bytes))
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_stats(
    cache: vmmgraph_kv_cache_t,
    stats: *mut vmmgraph_kv_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: contract.
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_kv_cache_memory(
    cache: vmmgraph_kv_cache_t,
    stats: *mut vmmgraph_elastic_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let cache = get::<KvCache, _>(cache)?;
        // SAFETY: contract.
        unsafe { write_stats(stats, || cache.stats().memory) }
    })
}

/// Like vmmgraph_elastic_buffer_observe, for a cache's memory.
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
        // SAFETY: contract.
        unsafe { observed((after_map, before_unmap, user), observer, |told| cache.observe(told)) }
    })
}

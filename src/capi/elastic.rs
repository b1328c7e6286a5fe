use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::sync::Arc;

use super::account::vmmgraph_account_t;
use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{guard, out};
use super::handle::{get, register, remove};
use super::memory::{
    Observer, committed, copy_counted, fence_of, hand_over, observed, set_budget, with_options, write_number,
    write_stats,
};
use super::pause::vmmgraph_fence_t;
use super::pause_hooks::vmmgraph_range_t;
use super::sized::range;
use super::status::vmmgraph_status_t;
use crate::{Device, ElasticBuffer, Pending};

pub struct vmmgraph_elastic_buffer {
    _private: (),
}

/// Elastic buffer: addresses for the maximum size, pages only for committed parts.
pub type vmmgraph_elastic_buffer_t = *mut vmmgraph_elastic_buffer;

pub struct vmmgraph_pending {
    _private: (),
}

/// An asynchronous commit.
pub type vmmgraph_pending_t = *mut vmmgraph_pending;

pub struct vmmgraph_elastic_observer {
    _private: (),
}

/// Callbacks for mapping and unmapping of elastic memory, active until destroyed.
pub type vmmgraph_elastic_observer_t = *mut vmmgraph_elastic_observer;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_elastic_options_t {
    pub struct_size: usize,
    /// Name for messages, zero-terminated; null: none.
    pub name: *const c_char,
    /// Bytes of every page, a multiple of the device's granularity. 0: about 1/64 of the longest
    /// address range, at most 16 MiB. Driver calls cost time per page.
    pub page_bytes: u64,
    /// Limit of physical bytes.
    pub budget_bytes: u64,
    /// Guarantee, reserved in the device's budget.
    pub least_bytes: u64,
    /// Parent account on the same device; null: the device's.
    pub account: vmmgraph_account_t,
}

/// Result of a commit, without pages already committed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_committed_t {
    pub struct_size: usize,
    pub bytes: u64,
    pub pages: u64,
    /// Pages created by the driver, part of `pages`.
    pub created: u64,
    /// Decommitted pages reused while still mapped; earlier work may still access them.
    pub revived: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_elastic_stats_t {
    pub struct_size: usize,
    pub id: u64,
    pub page_bytes: u64,
    pub reserved_bytes: u64,
    pub committed_bytes: u64,
    pub peak_committed_bytes: u64,
    /// Bytes being mapped.
    pub coming_bytes: u64,
    /// Decommitted bytes still mapped: their fence is not complete or was not polled.
    pub pending_unmap_bytes: u64,
    /// Commits, including those without effect.
    pub commits: u64,
    /// Failed and undone commits.
    pub refused: u64,
    pub decommits: u64,
    pub pages_mapped: u64,
    /// Mapped pages created by the driver.
    pub pages_created: u64,
    /// Decommitted pages committed again while still mapped.
    pub pages_revived: u64,
    pub pages_unmapped: u64,
    /// Bytes charged to the budget.
    pub charged_bytes: u64,
    pub budget_bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_shown_t {
    pub struct_size: usize,
    /// Name of the buffer or cache.
    pub name: *const c_char,
    /// Number of the buffer or cache, as in its statistics.
    pub buffer: u64,
    pub ranges: *const vmmgraph_range_t,
    pub range_count: usize,
}

/// Callback for elastic memory; `shown` is valid during the call. Waiting for pages moved by
/// another thread is VMMGRAPH_ERROR_WRONG_STATE inside.
pub type vmmgraph_shown_fn = Option<unsafe extern "C" fn(shown: *const vmmgraph_shown_t, user: *mut c_void)>;

/// Reserves `bytes` bytes of addresses, without memory. `options` may be null. Fails with
/// VMMGRAPH_ERROR_INVALID_SIZE, VMMGRAPH_ERROR_OUT_OF_ADDRESSES, or VMMGRAPH_ERROR_OVER_BUDGET if
/// least_bytes do not fit.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_create(
    device: vmmgraph_device_t,
    bytes: u64,
    options: *const vmmgraph_elastic_options_t,
    buffer: *mut vmmgraph_elastic_buffer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let buffer = unsafe { out(buffer, "buffer") }?;
        // SAFETY: contract.
        let made = unsafe { with_options(options, |options| Ok(device.elastic_buffer(bytes, options)?)) }?;
        *buffer = register(Arc::new(made));
        Ok(())
    })
}

/// Destroys the buffer. Before, decommit all memory with a fence, or complete all device work on
/// the buffer.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_destroy(buffer: vmmgraph_elastic_buffer_t) -> vmmgraph_status_t {
    guard(|| remove::<ElasticBuffer, _>(buffer).map(drop))
}

/// Writes the base address, which never changes. Device accesses to uncommitted parts fault.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_base(
    buffer: vmmgraph_elastic_buffer_t,
    base: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: contract.
        *unsafe { out(base, "base") }? = buffer.base().0 as *mut c_void;
        Ok(())
    })
}

/// Commits `bytes` bytes at `offset`, rounded outward to pages: maps all missing pages, or none.
/// Uses free pages first; if memory is short, asks reclaimers. New pages have undefined contents.
/// Decommitted pages still mapped keep their contents: work on streams other than those of their
/// fence must first call vmmgraph_elastic_buffer_before. A failed call changes nothing. `done` may
/// be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_commit(
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: contract.
        unsafe { committed(done, || buffer.commit(range(offset, bytes))) }
    })
}

/// As vmmgraph_elastic_buffer_commit, on a thread of the library and without reclaimers. Returns at
/// once; vmmgraph_pending_wait returns the result. `pending` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_commit_async(
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    pending: *mut vmmgraph_pending_t,
) -> vmmgraph_status_t {
    guard(|| {
        let made = get::<ElasticBuffer, _>(buffer)?.commit_async(range(offset, bytes))?;
        // SAFETY: contract.
        unsafe { hand_over(made, pending) };
        Ok(())
    })
}

/// Decommits `bytes` bytes at `offset`, rounded inward to pages: later work must not use the
/// memory. Unmaps the pages after `fence`; they count toward the budget until then. Never waits for
/// the device. `gone` receives the decommitted bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_decommit(
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    fence: *const vmmgraph_fence_t,
    gone: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: contract.
        let fence = unsafe { fence_of(buffer.device(), fence) }?;
        let bytes = buffer.decommit(range(offset, bytes), &fence)?;
        // SAFETY: contract.
        unsafe { write_number(gone, bytes) }
    })
}

/// Unmaps decommitted pages whose fence is complete, without waiting. `gone` receives the bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_reap(
    buffer: vmmgraph_elastic_buffer_t,
    gone: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_number(gone, get::<ElasticBuffer, _>(buffer)?.reap()) })
}

/// Makes later work of `stream` wait for earlier users of pages decommitted and committed again
/// while mapped. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_before(
    buffer: vmmgraph_elastic_buffer_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<ElasticBuffer, _>(buffer)?.before(stream_of(stream))?))
}

#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_set_budget(
    buffer: vmmgraph_elastic_buffer_t,
    bytes: u64,
) -> vmmgraph_status_t {
    guard(|| set_budget(get::<ElasticBuffer, _>(buffer)?.account(), bytes))
}

/// Writes the committed parts in order.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_committed(
    buffer: vmmgraph_elastic_buffer_t,
    ranges: *mut vmmgraph_range_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        let base = buffer.base();
        let at = |part: Range<u64>| vmmgraph_range_t {
            address: base.0 + part.start,
            bytes: part.end - part.start,
        };
        let parts: Vec<_> = buffer.committed().into_iter().map(at).collect();
        // SAFETY: contract.
        unsafe { copy_counted(&parts, ranges, capacity, count) }
    })
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_stats(
    buffer: vmmgraph_elastic_buffer_t,
    stats: *mut vmmgraph_elastic_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: contract.
        unsafe { write_stats(stats, || buffer.stats()) }
    })
}

/// Registers callbacks, as for RDMA: `after_map` for memory just mapped, before the commit returns,
/// and `before_unmap` for unused memory about to be unmapped. Either may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_observe(
    buffer: vmmgraph_elastic_buffer_t,
    after_map: vmmgraph_shown_fn,
    before_unmap: vmmgraph_shown_fn,
    user: *mut c_void,
    observer: *mut vmmgraph_elastic_observer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: contract.
        unsafe { observed((after_map, before_unmap, user), observer, |told| buffer.observe(told)) }
    })
}

/// Removes the callbacks. Calls in progress still complete.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_observer_destroy(
    observer: vmmgraph_elastic_observer_t,
) -> vmmgraph_status_t {
    guard(|| remove::<Observer, _>(observer).map(drop))
}

/// Sets `over` to 1 if the commit is finished, else 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pending_done(
    pending: vmmgraph_pending_t,
    over: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let pending = get::<Pending, _>(pending)?;
        // SAFETY: contract.
        *unsafe { out(over, "over") }? = i32::from(pending.done());
        Ok(())
    })
}

/// Blocks until the commit is finished, without waiting for the device, and returns its status. May
/// be called again. `done` may be null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pending_wait(
    pending: vmmgraph_pending_t,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let pending = get::<Pending, _>(pending)?;
        // SAFETY: contract.
        unsafe { committed(done, || pending.wait()) }
    })
}

/// Destroys the handle; the commit continues.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pending_destroy(pending: vmmgraph_pending_t) -> vmmgraph_status_t {
    guard(|| remove::<Pending, _>(pending).map(drop))
}

//! Elastic buffers: addresses for the most, pages for what is used.

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
use super::pause::{vmmgraph_fence_t, vmmgraph_range_t};
use super::sized::range;
use super::status::vmmgraph_status_t;
use crate::{Device, ElasticBuffer, Pending};

/// Never defined: a vmmgraph_elastic_buffer_t is a key, not an address.
pub struct vmmgraph_elastic_buffer {
    _private: (),
}

/// Addresses for the most that something may ever be, and pages for what is used of it. Calls with it are thread-safe.
pub type vmmgraph_elastic_buffer_t = *mut vmmgraph_elastic_buffer;

/// Never defined: a vmmgraph_pending_t is a key, not an address.
pub struct vmmgraph_pending {
    _private: (),
}

/// A commit under way on a thread of the library. Calls with it are thread-safe.
pub type vmmgraph_pending_t = *mut vmmgraph_pending;

/// Never defined: a vmmgraph_elastic_observer_t is a key, not an address.
pub struct vmmgraph_elastic_observer {
    _private: (),
}

/// Functions that are told when elastic memory comes and goes, until it is destroyed.
pub type vmmgraph_elastic_observer_t = *mut vmmgraph_elastic_observer;

/// How to make elastic memory. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_elastic_options_t {
    /// sizeof(vmmgraph_elastic_options_t).
    pub struct_size: usize,
    /// Its name in messages, zero-terminated; null: none.
    pub name: *const c_char,
    /// Bytes of every page, a multiple of the device's granularity; 0: about a sixty-fourth of the longest range of addresses, 16 MiB
    /// at most. Calls cost per page and not per byte, and memory comes and goes by the page.
    pub page_bytes: u64,
    /// The most bytes of physical memory it may hold; 0: no limit but the device's.
    pub budget_bytes: u64,
    /// Bytes that it is sure to get, out of the device's budget.
    pub least_bytes: u64,
    /// The account that its own is below, of the same device: a tenant's, a model's; null: the device's. It need not stay.
    pub account: vmmgraph_account_t,
}

/// What a commit did. Pages that were there already are not counted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_committed_t {
    /// Set to sizeof(vmmgraph_committed_t) before the call.
    pub struct_size: usize,
    /// Bytes that were mapped.
    pub bytes: u64,
    /// Pages that were mapped.
    pub pages: u64,
    /// Of these, created by the driver. The others were free ones of the device.
    pub created: u64,
    /// Pages that were decommitted before and had not gone yet: they stay, without a call, and earlier work may still use them.
    pub revived: u64,
}

/// What elastic memory holds, and what it did since it was made.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_elastic_stats_t {
    /// Set to sizeof(vmmgraph_elastic_stats_t) before the call.
    pub struct_size: usize,
    /// Its number, unique in the process.
    pub id: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Bytes of addresses.
    pub reserved_bytes: u64,
    /// Bytes that are there to be used.
    pub committed_bytes: u64,
    /// The most there ever were.
    pub peak_committed_bytes: u64,
    /// Bytes that commits under way are mapping.
    pub coming_bytes: u64,
    /// Bytes that were decommitted and are still mapped: their fence is not over, or nobody has looked since.
    pub leaving_bytes: u64,
    /// Commits that succeeded, also those with nothing to do.
    pub commits: u64,
    /// Attempts of commits that failed and were undone.
    pub refused: u64,
    /// Decommits of anything that was there.
    pub decommits: u64,
    /// Pages mapped.
    pub pages_mapped: u64,
    /// Of these, created by the driver.
    pub pages_created: u64,
    /// Pages that were committed again before they went.
    pub pages_revived: u64,
    /// Pages unmapped.
    pub pages_unmapped: u64,
    /// Bytes that count toward its budget.
    pub charged_bytes: u64,
    /// Its byte budget; 0: none.
    pub budget_bytes: u64,
}

/// Elastic memory that has come or goes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_shown_t {
    /// sizeof(vmmgraph_shown_t) of the library.
    pub struct_size: usize,
    /// The name of the buffer or cache, zero-terminated.
    pub name: *const c_char,
    /// Its number, as in its statistics.
    pub buffer: u64,
    /// The addresses, in order.
    pub ranges: *const vmmgraph_range_t,
    /// How many.
    pub range_count: usize,
}

/// Told that elastic memory has come or goes; `shown` is valid during the call. Must not throw. No lock of the library's is held; what
/// would wait there for pages that another thread moves is VMMGRAPH_ERROR_WRONG_STATE.
pub type vmmgraph_shown_fn = Option<unsafe extern "C" fn(shown: *const vmmgraph_shown_t, user: *mut c_void)>;

/// Reserves `bytes` of addresses, without memory yet. `options` may be null. The buffer keeps the device open.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set; `buffer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_create(
    device: vmmgraph_device_t,
    bytes: u64,
    options: *const vmmgraph_elastic_options_t,
    buffer: *mut vmmgraph_elastic_buffer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let buffer = unsafe { out(buffer, "buffer") }?;
        // SAFETY: the caller's contract.
        let made = unsafe { with_options(options, |options| Ok(device.elastic_buffer(bytes, options)?)) }?;
        *buffer = register(Arc::new(made));
        Ok(())
    })
}

/// Ends a handle, and with it the buffer. Before that, everything is decommitted behind a fence, or the device is done with it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_destroy(buffer: vmmgraph_elastic_buffer_t) -> vmmgraph_status_t {
    guard(|| remove::<ElasticBuffer, _>(buffer).map(drop))
}

/// The first address, which never changes. What is not committed has no memory: a device that uses it faults.
///
/// # Safety
/// `base` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_base(
    buffer: vmmgraph_elastic_buffer_t,
    base: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        *unsafe { out(base, "base") }? = buffer.base().0 as *mut c_void;
        Ok(())
    })
}

/// Makes every byte from `offset` on usable: maps those of its pages, rounded outward, that are not there. All of them or none. Free
/// pages of the device are taken first; before there is no memory, others are asked to give some back. Contents of pages that come are
/// anything. Pages that a decommit has not let go yet stay: work on other streams than those of its fence is to wait for
/// vmmgraph_elastic_buffer_before. Out of memory leaves everything as it was. `done` may be null.
///
/// # Safety
/// `done` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_commit(
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        unsafe { committed(done, || buffer.commit(range(offset, bytes))) }
    })
}

/// As vmmgraph_elastic_buffer_commit, on a thread of the library. Nobody is asked to give memory up for it. What becomes of it is said by
/// vmmgraph_pending_wait; `pending` is to be destroyed, and may be null: then nobody is told.
///
/// # Safety
/// `pending` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_commit_async(
    buffer: vmmgraph_elastic_buffer_t,
    offset: u64,
    bytes: u64,
    pending: *mut vmmgraph_pending_t,
) -> vmmgraph_status_t {
    guard(|| {
        let made = get::<ElasticBuffer, _>(buffer)?.commit_async(range(offset, bytes))?;
        // SAFETY: the caller's contract.
        unsafe { hand_over(made, pending) };
        Ok(())
    })
}

/// Gives back the pages of `bytes` bytes from `offset` on, rounded inward. They are not to be used from now on, and go behind `fence`
/// (null: at once); nobody waits for the device. Until they went they count toward the budget. Its events need to be there during the call
/// only. `gone`, which may be null, is the bytes of what was there.
///
/// # Safety
/// `fence` is null or points to a struct whose struct_size is set, with as many streams and recorded events as it says; `gone` is null
/// or writable.
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
        // SAFETY: the caller's contract.
        let fence = unsafe { fence_of(buffer.device(), fence) }?;
        let bytes = buffer.decommit(range(offset, bytes), &fence)?;
        // SAFETY: the caller's contract.
        unsafe { write_number(gone, bytes) }
    })
}

/// Unmaps what was decommitted and is no longer in use. Does not wait. `gone`, which may be null, is the bytes.
///
/// # Safety
/// `gone` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_settle(
    buffer: vmmgraph_elastic_buffer_t,
    gone: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_number(gone, get::<ElasticBuffer, _>(buffer)?.settle()) })
}

/// Makes later work of a stream wait for what may still use pages that were committed again before they went. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_before(
    buffer: vmmgraph_elastic_buffer_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<ElasticBuffer, _>(buffer)?.before(stream_of(stream))?))
}

/// Limits the bytes of physical memory that the buffer may hold; 0: no limit but the device's. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_buffer_set_budget(
    buffer: vmmgraph_elastic_buffer_t,
    bytes: u64,
) -> vmmgraph_status_t {
    guard(|| set_budget(get::<ElasticBuffer, _>(buffer)?.account(), bytes))
}

/// The parts that are committed, in order, in whole pages. Writes at most `capacity` of them, and how many there are.
///
/// # Safety
/// `ranges` points to `capacity` writable ranges, or `capacity` is 0; `count` is null or writable.
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
        // SAFETY: the caller's contract.
        unsafe { copy_counted(&parts, ranges, capacity, count) }
    })
}

/// What the buffer holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_elastic_buffer_stats(
    buffer: vmmgraph_elastic_buffer_t,
    stats: *mut vmmgraph_elastic_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<ElasticBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        unsafe { write_stats(stats, || buffer.stats()) }
    })
}

/// Calls `after_map` when memory of the buffer is there, before the commit returns, and `before_unmap` when it is not used any more and is
/// unmapped next. Either may be null. For registrations that hold pages: RDMA's, for one.
///
/// # Safety
/// The functions may be called with `user` from any thread until vmmgraph_elastic_observer_destroy and the calls that were under way then
/// have returned; `observer` is null or writable.
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
        // SAFETY: the caller's contract.
        unsafe { observed((after_map, before_unmap, user), observer, |told| buffer.observe(told)) }
    })
}

/// The functions are called no more, but by calls that are under way.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_elastic_observer_destroy(
    observer: vmmgraph_elastic_observer_t,
) -> vmmgraph_status_t {
    guard(|| remove::<Observer, _>(observer).map(drop))
}

/// Whether a commit is over: 1, else 0.
///
/// # Safety
/// `over` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pending_done(
    pending: vmmgraph_pending_t,
    over: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let pending = get::<Pending, _>(pending)?;
        // SAFETY: the caller's contract.
        *unsafe { out(over, "over") }? = i32::from(pending.done());
        Ok(())
    })
}

/// Blocks until a commit is over; its status is the commit's. Waits for the driver's calls only, never for work of the device. May be
/// called again. `done` may be null.
///
/// # Safety
/// `done` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_pending_wait(
    pending: vmmgraph_pending_t,
    done: *mut vmmgraph_committed_t,
) -> vmmgraph_status_t {
    guard(|| {
        let pending = get::<Pending, _>(pending)?;
        // SAFETY: the caller's contract.
        unsafe { committed(done, || pending.wait()) }
    })
}

/// Ends a handle; the commit goes on.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_pending_destroy(pending: vmmgraph_pending_t) -> vmmgraph_status_t {
    guard(|| remove::<Pending, _>(pending).map(drop))
}

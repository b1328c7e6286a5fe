//! The host memory that contents wait in while their pages are gone.

use super::device::vmmgraph_device_t;
use super::guard::guard;
use super::handle::get;
use super::sized::OutStruct;
use super::sized::limit;
use super::status::vmmgraph_status_t;
use crate::Device;

/// What the host pool of a device holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_stats_t {
    /// Set to sizeof(vmmgraph_host_stats_t) before the call.
    pub struct_size: usize,
    /// Bytes held from the operating system.
    pub held_bytes: u64,
    /// Those of them that are registered with the device.
    pub registered_bytes: u64,
    /// Bytes that no contents are in.
    pub free_bytes: u64,
    /// The most it may hold; 0: no limit.
    pub limit_bytes: u64,
}

/// Makes sure that the device's host pool holds `bytes` at least, in use or not: mapped, faulted in, and registered where that is
/// granted, so that a pause need not do it. VMMGRAPH_ERROR_INVALID_SIZE beyond 2^46 bytes;
/// VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY beyond the pool's limit and beyond the memory that the machine, or
/// the control group of the process, has available. A call that fails holds no more than before.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_prepare_backup(device: vmmgraph_device_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.host_pool().prepare(bytes)?))
}

/// Limits the bytes that the device's host pool may hold; 0: no limit. Nothing is taken away.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_set_host_budget(
    device: vmmgraph_device_t,
    bytes: u64,
) -> vmmgraph_status_t {
    guard(|| {
        get::<Device, _>(device)?.host_pool().set_limit(limit(bytes));
        Ok(())
    })
}

/// Gives back to the operating system what no contents are in. `released` (may be null) receives the bytes.
///
/// # Safety
/// `released` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_trim_host(
    device: vmmgraph_device_t,
    released: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        let bytes = get::<Device, _>(device)?.host_pool().trim()?;
        if !released.is_null() {
            // SAFETY: writable by the caller's contract.
            unsafe { *released = bytes };
        }
        Ok(())
    })
}

/// What the device's host pool holds now.
///
/// # Safety
/// `stats` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_host_stats(
    device: vmmgraph_device_t,
    stats: *mut vmmgraph_host_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let stats = unsafe { OutStruct::new(stats, "stats") }?;
        let now = device.host_pool().stats();
        stats.write(vmmgraph_host_stats_t {
            struct_size: stats.struct_size,
            held_bytes: now.held_bytes,
            registered_bytes: now.registered_bytes,
            free_bytes: now.free_bytes,
            limit_bytes: now.limit_bytes.unwrap_or(0),
        });
        Ok(())
    })
}

use super::device::vmmgraph_device_t;
use super::guard::guard;
use super::handle::get;
use super::sized::OutStruct;
use super::sized::limit;
use super::status::vmmgraph_status_t;
use crate::Device;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_host_stats_t {
    pub struct_size: usize,
    /// Bytes obtained from the operating system.
    pub held_bytes: u64,
    /// Bytes registered with the device (pinned).
    pub registered_bytes: u64,
    /// Bytes without contents.
    pub free_bytes: u64,
    /// Limit of held_bytes.
    pub limit_bytes: u64,
}

/// Grows the device's host pool to at least `bytes`, mapped, faulted in and, where possible,
/// registered with the device, so that a later pause need not. VMMGRAPH_ERROR_INVALID_SIZE beyond
/// 2^46 bytes; VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY beyond the pool's limit or the memory of the
/// machine or control group. A failed call changes nothing.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_prepare_backup(device: vmmgraph_device_t, bytes: u64) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.host_pool().prepare(bytes)?))
}

/// Limits the bytes of the device's host pool. Memory already held stays.
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

/// Returns unused memory of the host pool to the operating system. `released` receives the bytes.
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

#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_host_stats(
    device: vmmgraph_device_t,
    stats: *mut vmmgraph_host_stats_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
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

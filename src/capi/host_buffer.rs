//! Host memory that a ring's units are copied from.

use std::ffi::c_void;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{guard, items, items_mut, not_null, out, pick};
use super::handle::{get, register, remove};
use super::memory::write_number;
use super::status::vmmgraph_status_t;
use crate::{Address, Device, HostBuffer, Pinning};

/// Never defined: a vmmgraph_host_buffer_t is a key, not an address.
pub struct vmmgraph_host_buffer {
    _private: (),
}

/// Host memory that units are copied from, in one piece at one address. Calls with it are thread-safe.
pub type vmmgraph_host_buffer_t = *mut vmmgraph_host_buffer;

/// Host memory that cannot be registered with the device is VMMGRAPH_ERROR_HOST_NOT_REGISTERED. Never falls back silently.
pub const VMMGRAPH_PINNING_REQUIRED: i32 = 0;
/// It will do: copies go over the host pool's ring of small registered buffers then, and the caller of an acquire waits for each.
pub const VMMGRAPH_PINNING_PREFERRED: i32 = 1;

/// Takes `bytes` bytes of host memory, at most 1 GiB, from the device's host pool, for the sources of a ring's units. Their contents are
/// anything. `pinning` is one of VMMGRAPH_PINNING_*. The buffer keeps the device open.
///
/// # Safety
/// `buffer` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_create(
    device: vmmgraph_device_t,
    bytes: u64,
    pinning: i32,
    buffer: *mut vmmgraph_host_buffer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let buffer = unsafe { out(buffer, "buffer") }?;
        let pinning = pick("pinning", pinning, &[Pinning::Required, Pinning::Preferred])?;
        *buffer = register(device.host_buffer(bytes, pinning)?);
        Ok(())
    })
}

/// Ends a handle. The memory stays for as long as a ring has it as a source, and goes back to the host pool behind the copies from it. Blocks
/// nobody.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_destroy(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| remove::<HostBuffer, _>(buffer).map(drop))
}

/// Where the memory begins in this process, its bytes, and whether it is registered with the device (1, else 0). Any may be null. Who writes
/// there waits for the copies from it first (vmmgraph_host_buffer_wait), lets no ring copy meanwhile, and says so afterwards
/// (vmmgraph_host_buffer_changed). The address is good while the handle is, or a ring has the buffer as a source.
///
/// # Safety
/// `base`, `bytes` and `registered` are null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_info(
    buffer: vmmgraph_host_buffer_t,
    base: *mut *mut c_void,
    bytes: *mut u64,
    registered: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        let (base, registered) = unsafe { (base.as_mut(), registered.as_mut()) };
        if let Some(base) = base {
            *base = buffer.as_ptr().cast();
        }
        if let Some(registered) = registered {
            *registered = i32::from(buffer.registered());
        }
        // SAFETY: the caller's contract.
        unsafe { write_number(bytes, buffer.bytes()) }
    })
}

/// Writes `bytes` bytes of `from` to the buffer, from `at` on. Blocks until the copies from it and to it that were given are over. What rings hold of it is out
/// of date then: the next use copies it again. VMMGRAPH_ERROR_INVALID_SIZE beyond the end; nothing is written on failure.
///
/// # Safety
/// `from` points to `bytes` readable bytes that are not the buffer's own, or that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_write(
    buffer: vmmgraph_host_buffer_t,
    at: u64,
    from: *const c_void,
    bytes: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        let from = unsafe { items(from.cast::<u8>(), bytes, "from") }?;
        Ok(buffer.write(at, from)?)
    })
}

/// Copies `bytes` bytes of the device to the buffer, from `at` on: behind what `stream` was given so far, behind the copies from the buffer and the launches of captured steps
/// that read it, and beside whatever comes later, by the engine of the other direction. Does not block. What rings hold of it is out of date then: the next use
/// copies it again, behind this. Who writes those bytes of the device again does so on a stream that waits (vmmgraph_host_buffer_before).
/// VMMGRAPH_ERROR_INVALID_SIZE beyond the end, VMMGRAPH_ERROR_HOST_NOT_REGISTERED, VMMGRAPH_ERROR_STREAM_CAPTURING, and VMMGRAPH_ERROR_WRONG_STATE while a captured
/// step that reads it is being launched.
///
/// # Safety
/// `from` is an address of `bytes` mapped bytes of the device, until the copy is over.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_store(
    buffer: vmmgraph_host_buffer_t,
    at: u64,
    from: *const c_void,
    bytes: u64,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        if bytes > 0 {
            not_null(from, "from")?;
        }
        // SAFETY: the caller's contract.
        unsafe { buffer.store(at, Address(from as u64), bytes, stream_of(stream)) }?;
        Ok(())
    })
}

/// Makes later work of a stream wait for the stores that the buffer was given, so that what they copy may be written again. Does not block.
/// VMMGRAPH_ERROR_STREAM_CAPTURING for a stream under capture.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_before(
    buffer: vmmgraph_host_buffer_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<HostBuffer, _>(buffer)?.before(stream_of(stream))?))
}

/// Reads `bytes` bytes of the buffer, from `at` on, to `into`, when the copies to it are over. VMMGRAPH_ERROR_INVALID_SIZE beyond the end.
///
/// # Safety
/// `into` points to `bytes` writable bytes that are not the buffer's own, or that is 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_read(
    buffer: vmmgraph_host_buffer_t,
    at: u64,
    into: *mut c_void,
    bytes: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: the caller's contract.
        let into = unsafe { items_mut(into.cast::<u8>(), bytes, "into") }?;
        Ok(buffer.read(at, into)?)
    })
}

/// Says that the contents were changed otherwise than by vmmgraph_host_buffer_write: the next use of what rings hold of it copies it again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_changed(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| {
        get::<HostBuffer, _>(buffer)?.changed();
        Ok(())
    })
}

/// Blocks the caller until the copies from it and to it that were given are over. VMMGRAPH_ERROR_STREAM_CAPTURING where a platform allows no wait while
/// something is captured.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_wait(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| Ok(get::<HostBuffer, _>(buffer)?.wait()?))
}

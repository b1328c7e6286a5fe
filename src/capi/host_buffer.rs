use std::ffi::c_void;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{guard, items, items_mut, not_null, out, pick};
use super::handle::{get, register, remove};
use super::memory::write_number;
use super::status::vmmgraph_status_t;
use crate::{Address, Device, HostBuffer, Pinning};

pub struct vmmgraph_host_buffer {
    _private: (),
}

/// Contiguous host memory, the source of a ring's units.
pub type vmmgraph_host_buffer_t = *mut vmmgraph_host_buffer;

/// Memory must be registered with the device (pinned), else VMMGRAPH_ERROR_HOST_NOT_REGISTERED.
pub const VMMGRAPH_PINNING_REQUIRED: i32 = 0;
/// Unregistered memory is accepted: copies go through small registered buffers, and the thread
/// which acquires a unit waits for each copy.
pub const VMMGRAPH_PINNING_PREFERRED: i32 = 1;

/// Allocates `bytes` bytes, at most 1 GiB, from the device's host pool, with undefined contents.
/// `pinning` is one of VMMGRAPH_PINNING_*. Fails with VMMGRAPH_ERROR_INVALID_SIZE,
/// VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY or VMMGRAPH_ERROR_HOST_NOT_REGISTERED.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_create(
    device: vmmgraph_device_t,
    bytes: u64,
    pinning: i32,
    buffer: *mut vmmgraph_host_buffer_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let buffer = unsafe { out(buffer, "buffer") }?;
        let pinning = pick("pinning", pinning, &[Pinning::Required, Pinning::Preferred])?;
        *buffer = register(device.host_buffer(bytes, pinning)?);
        Ok(())
    })
}

/// Destroys the handle. The memory returns to the host pool when no ring uses it and all copies are
/// complete. Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_destroy(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| remove::<HostBuffer, _>(buffer).map(drop))
}

/// Returns the memory's address in this process, its bytes, and 1 if it is registered with the
/// device, else 0. Each pointer may be null. To write through the address: stop every ring from
/// copying, call vmmgraph_host_buffer_wait, write, then call vmmgraph_host_buffer_changed. Valid
/// while the handle exists or a ring uses the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_info(
    buffer: vmmgraph_host_buffer_t,
    base: *mut *mut c_void,
    bytes: *mut u64,
    registered: *mut i32,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: contract.
        let (base, registered) = unsafe { (base.as_mut(), registered.as_mut()) };
        if let Some(base) = base {
            *base = buffer.as_ptr().cast();
        }
        if let Some(registered) = registered {
            *registered = i32::from(buffer.registered());
        }
        // SAFETY: contract.
        unsafe { write_number(bytes, buffer.bytes()) }
    })
}

/// Writes `bytes` bytes from `from` to the buffer at offset `at`, after a wait as in
/// vmmgraph_host_buffer_wait. The next use of a ring slot copies again. VMMGRAPH_ERROR_INVALID_SIZE
/// beyond the end. A failed call writes nothing.
///
/// # Safety
/// `from` lies outside the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_write(
    buffer: vmmgraph_host_buffer_t,
    at: u64,
    from: *const c_void,
    bytes: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: contract.
        let from = unsafe { items(from.cast::<u8>(), bytes, "from") }?;
        Ok(buffer.write(at, from)?)
    })
}

/// Copies `bytes` bytes of device memory at `from` to the buffer at offset `at`, after the work
/// submitted to `stream` so far and all readers of the buffer. Does not block; overlaps later work.
/// The next use of a ring slot copies again, after this copy. Before the device memory is written
/// again, call vmmgraph_host_buffer_before on the writing stream. VMMGRAPH_ERROR_INVALID_SIZE
/// beyond the end; VMMGRAPH_ERROR_HOST_NOT_REGISTERED; VMMGRAPH_ERROR_STREAM_CAPTURING;
/// VMMGRAPH_ERROR_WRONG_STATE while a captured step reading the buffer is being launched.
///
/// # Safety
/// `from` is mapped until the copy is complete.
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
        // SAFETY: contract.
        unsafe { buffer.store(at, Address(from as u64), bytes, stream_of(stream)) }?;
        Ok(())
    })
}

/// Makes later work of `stream` wait for all submitted vmmgraph_host_buffer_store copies. Does not
/// block. VMMGRAPH_ERROR_STREAM_CAPTURING if the stream is under capture.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_before(
    buffer: vmmgraph_host_buffer_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<HostBuffer, _>(buffer)?.before(stream_of(stream))?))
}

/// Reads `bytes` bytes from the buffer at offset `at`, after all submitted copies to the buffer.
/// VMMGRAPH_ERROR_INVALID_SIZE beyond the end.
///
/// # Safety
/// `into` lies outside the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_host_buffer_read(
    buffer: vmmgraph_host_buffer_t,
    at: u64,
    into: *mut c_void,
    bytes: usize,
) -> vmmgraph_status_t {
    guard(|| {
        let buffer = get::<HostBuffer, _>(buffer)?;
        // SAFETY: contract.
        let into = unsafe { items_mut(into.cast::<u8>(), bytes, "into") }?;
        Ok(buffer.read(at, into)?)
    })
}

/// Reports a write through vmmgraph_host_buffer_info's address: the next use of a ring slot copies
/// again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_changed(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| {
        get::<HostBuffer, _>(buffer)?.changed();
        Ok(())
    })
}

/// Blocks until all submitted copies to and from the buffer, and all launches of captured steps
/// reading it, are complete. VMMGRAPH_ERROR_WRONG_STATE while such a step is being launched.
/// VMMGRAPH_ERROR_STREAM_CAPTURING during a capture on platforms which forbid waits then.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_host_buffer_wait(buffer: vmmgraph_host_buffer_t) -> vmmgraph_status_t {
    guard(|| Ok(get::<HostBuffer, _>(buffer)?.wait()?))
}

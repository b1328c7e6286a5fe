use std::ffi::{c_int, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

use super::arena::stream_of;
use super::device::vmmgraph_device_t;
use super::guard::{Failure, check_items, guard, items, items_mut, out};
use super::handle::{get, register, remove};
use super::memory::write_number;
use super::status::vmmgraph_status_t;
use crate::error::Error;
use crate::{Device, PeerExtent, PeerMap, PeerPage, receive_descriptors, send_descriptors};

pub struct vmmgraph_peer_page {
    _private: (),
}

pub type vmmgraph_peer_page_t = *mut vmmgraph_peer_page;

pub struct vmmgraph_peer_map {
    _private: (),
}

/// Range of another process, mapped in this process.
pub type vmmgraph_peer_map_t = *mut vmmgraph_peer_map;

/// Part of an imported page, as in the owner's vmmgraph_page_extent_t.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_peer_extent_t {
    pub page: vmmgraph_peer_page_t,
    /// In the page.
    pub offset: u64,
    pub bytes: u64,
}

/// Fabric handle of an exported page (CUmemFabricHandle), sent unchanged.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_fabric_handle_t {
    pub data: [u8; 64],
}

/// # Safety
/// The descriptor is open while the result is used, or negative.
unsafe fn descriptor<'a>(what: &'static str, fd: c_int) -> Result<BorrowedFd<'a>, Failure> {
    if fd < 0 {
        let expected = "an open file descriptor";
        return Err(Error::InvalidArgument { what, value: fd.into(), expected }.into());
    }
    // SAFETY: not negative, so open by the caller's contract.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Imports a page exported by another process. `bytes` is page_bytes in the owner's
/// vmmgraph_page_extent_t. The memory lives as long as the import or a mapping, whatever the owner
/// does. The caller keeps `fd`, not needed after the call. VMMGRAPH_ERROR_WRONG_STATE unless the
/// device was opened with VMMGRAPH_SHARING_FD.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_import(
    device: vmmgraph_device_t,
    fd: c_int,
    bytes: u64,
    page: *mut vmmgraph_peer_page_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (page, fd) = unsafe { (out(page, "page")?, descriptor("fd", fd)?) };
        *page = register(Arc::new(device.import(fd, bytes)?));
        Ok(())
    })
}

/// As vmmgraph_device_import, from a handle of vmmgraph_device_export_fabric on this or another
/// host. VMMGRAPH_ERROR_WRONG_STATE unless the device granted VMMGRAPH_SHARING_FABRIC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_import_fabric(
    device: vmmgraph_device_t,
    handle: *const vmmgraph_fabric_handle_t,
    bytes: u64,
    page: *mut vmmgraph_peer_page_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (page, handle) = unsafe { (out(page, "page")?, items(handle, 1, "handle")?) };
        let imported = device.import_fabric(&handle[0].data, bytes)?;
        *page = register(Arc::new(imported));
        Ok(())
    })
}

/// Closes an imported page. Mapped memory stays mapped.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_peer_page_close(page: vmmgraph_peer_page_t) -> vmmgraph_status_t {
    guard(|| remove::<PeerPage, _>(page).map(drop))
}

/// Maps the parts of another process's range contiguously; `address` receives the first address.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT unless the parts after the first begin at the start of their
/// page, and those before the last end at its end.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_peer_map_create(
    device: vmmgraph_device_t,
    extents: *const vmmgraph_peer_extent_t,
    count: usize,
    map: *mut vmmgraph_peer_map_t,
    address: *mut *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let (map, address, given) =
            unsafe { (out(map, "map")?, out(address, "address")?, items(extents, count, "extents")?) };
        let pages = given.iter().map(|extent| get::<PeerPage, _>(extent.page));
        let pages = pages.collect::<Result<Vec<_>, _>>()?;
        let mut parts = Vec::with_capacity(pages.len());
        for (page, given) in pages.iter().zip(given) {
            parts.push(PeerExtent { page, offset: given.offset, bytes: given.bytes });
        }
        let made = device.map_peer(&parts)?;
        *address = made.address().0 as *mut c_void;
        *map = register(Arc::new(made));
        Ok(())
    })
}

/// Records use of the range on a stream: the unmap waits for the work submitted by then. The stream
/// must exist until then.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_peer_map_used_by(
    map: vmmgraph_peer_map_t,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        get::<PeerMap, _>(map)?.used_by(stream_of(stream));
        Ok(())
    })
}

/// Unmaps the range after the work submitted to the recorded streams; other work must be complete.
/// Does not block.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_peer_map_destroy(map: vmmgraph_peer_map_t) -> vmmgraph_status_t {
    guard(|| remove::<PeerMap, _>(map).map(drop))
}

/// Sends at most 253 file descriptors, and at least one byte, as one message over a connected unix
/// socket (SCM_RIGHTS). No process needs access to another process, which containers forbid. The
/// caller keeps its descriptors, sent with the first byte. `sent` receives the number of bytes
/// sent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_send_descriptors(
    socket: c_int,
    fds: *const c_int,
    count: usize,
    bytes: *const c_void,
    length: usize,
    sent: *mut u64,
) -> vmmgraph_status_t {
    guard(|| {
        // SAFETY: contract.
        let (socket, given, bytes) = unsafe {
            (
                descriptor("socket", socket)?,
                items(fds, count, "fds")?,
                items(bytes.cast::<u8>(), length, "bytes")?,
            )
        };
        // SAFETY: as above.
        let given = given.iter().map(|fd| unsafe { descriptor("fd", *fd) });
        let gone = send_descriptors(socket, &given.collect::<Result<Vec<_>, _>>()?, bytes)?;
        // SAFETY: contract.
        unsafe { write_number(sent, gone as u64) }
    })
}

/// Receives one message of vmmgraph_send_descriptors: at most `length` bytes, and `capacity`
/// descriptors, owned by the caller. Further descriptors are closed. `received` is 0 if the other
/// side closed the socket.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_receive_descriptors(
    socket: c_int,
    bytes: *mut c_void,
    length: usize,
    received: *mut u64,
    fds: *mut c_int,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        if capacity > 0 {
            check_items(fds, capacity, size_of::<c_int>(), "fds")?;
        }
        // SAFETY: contract.
        let (socket, bytes) =
            unsafe { (descriptor("socket", socket)?, items_mut(bytes.cast::<u8>(), length, "bytes")?) };
        // SAFETY: as above.
        let (received, count) = unsafe { (out(received, "received")?, out(count, "count")?) };
        let (came, descriptors) = receive_descriptors(socket, bytes)?;
        (*received, *count) = (came as u64, descriptors.len().min(capacity));
        for (place, fd) in descriptors.into_iter().take(capacity).enumerate() {
            // SAFETY: `fds` has room for `capacity` items by the caller's contract.
            unsafe { fds.add(place).write(fd.into_raw_fd()) };
        }
        Ok(())
    })
}

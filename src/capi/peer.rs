//! Pages of other processes, and descriptors over a socket.

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

/// Never defined: a vmmgraph_peer_page_t is a key, not an address.
pub struct vmmgraph_peer_page {
    _private: (),
}

/// A page of another process, imported once. Calls with it are thread-safe.
pub type vmmgraph_peer_page_t = *mut vmmgraph_peer_page;

/// Never defined: a vmmgraph_peer_map_t is a key, not an address.
pub struct vmmgraph_peer_map {
    _private: (),
}

/// A range of another process at addresses of this one's. Calls with it are thread-safe.
pub type vmmgraph_peer_map_t = *mut vmmgraph_peer_map;

/// A part of another process's page, as its owner's vmmgraph_page_extent_t says it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_peer_extent_t {
    /// The page.
    pub page: vmmgraph_peer_page_t,
    /// Where in the page the part begins, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// By what another process imports a page over the fabric (CUmemFabricHandle). Plain bytes: copied and sent as they are.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_fabric_handle_t {
    /// The driver's.
    pub data: [u8; 64],
}

/// # Safety
/// The descriptor is open while the result is used, or negative.
unsafe fn descriptor<'a>(what: &'static str, fd: c_int) -> Result<BorrowedFd<'a>, Failure> {
    if fd < 0 {
        let expected = "an open file descriptor";
        return Err(Error::InvalidArgument { what, value: fd.into(), expected }.into());
    }
    // SAFETY: not -1, and then open by the caller's contract.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) })
}

/// Imports a page of `bytes` that another process exported (vmmgraph_page_extent_t's page_bytes); its memory stays as long as this does, whatever
/// its owner does. The device was opened with VMMGRAPH_SHARING_FD. The descriptor stays the caller's and is not needed afterwards.
///
/// # Safety
/// `fd` is open or negative; `page` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_import(
    device: vmmgraph_device_t,
    fd: c_int,
    bytes: u64,
    page: *mut vmmgraph_peer_page_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (page, fd) = unsafe { (out(page, "page")?, descriptor("fd", fd)?) };
        *page = register(Arc::new(device.import(fd, bytes)?));
        Ok(())
    })
}

/// As vmmgraph_device_import, by what vmmgraph_device_export_fabric gave on this host or another. The device was granted VMMGRAPH_SHARING_FABRIC.
///
/// # Safety
/// `handle` is null or points to one; `page` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_import_fabric(
    device: vmmgraph_device_t,
    handle: *const vmmgraph_fabric_handle_t,
    bytes: u64,
    page: *mut vmmgraph_peer_page_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let (page, handle) = unsafe { (out(page, "page")?, items(handle, 1, "handle")?) };
        let imported = device.import_fabric(&handle[0].data, bytes)?;
        *page = register(Arc::new(imported));
        Ok(())
    })
}

/// Closes another process's page. Its memory stays where it is mapped.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_peer_page_close(page: vmmgraph_peer_page_t) -> vmmgraph_status_t {
    guard(|| remove::<PeerPage, _>(page).map(drop))
}

/// Maps the parts of another process's range, one behind the other, at addresses of this one's; `address` receives where it begins. All parts but the
/// first begin where their page does, and all but the last end there.
///
/// # Safety
/// `extents` points to `count` items; `map` and `address` are null or writable.
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
        // SAFETY: the caller's contract.
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

/// Notes that work of a stream uses the range: at its end its pages go behind what the stream was given by then. The stream exists until then.
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

/// Unmaps the range, once what was given to the noted streams is done; does not block. Work on streams that were not noted is done already.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_peer_map_destroy(map: vmmgraph_peer_map_t) -> vmmgraph_status_t {
    guard(|| remove::<PeerMap, _>(map).map(drop))
}

/// Sends descriptors, at most 253, and some bytes, at least one, as one message over a connected unix socket (SCM_RIGHTS): so no process need look into
/// another one, which containers forbid. Those given here stay the caller's. `sent` (may be null) receives how many of the bytes went; the
/// descriptors went with the first.
///
/// # Safety
/// `socket` and the `count` items of `fds` are open or negative; `bytes` points to `length` bytes; `sent` is null or writable.
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
        // SAFETY: the caller's contract.
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
        // SAFETY: the caller's contract.
        unsafe { write_number(sent, gone as u64) }
    })
}

/// Receives what vmmgraph_send_descriptors sent, in one message: as many of the bytes as there is room for, and the descriptors, which are the caller's;
/// those for which there is no room are closed again. `received` is 0 if the other side has closed.
///
/// # Safety
/// `socket` is open or negative; `bytes` points to `length` writable bytes and `fds` to `capacity` writable items, or these are 0; `received` and
/// `count` are null or writable.
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
        // SAFETY: the caller's contract.
        let (socket, bytes) =
            unsafe { (descriptor("socket", socket)?, items_mut(bytes.cast::<u8>(), length, "bytes")?) };
        // SAFETY: as above.
        let (received, count) = unsafe { (out(received, "received")?, out(count, "count")?) };
        let (came, descriptors) = receive_descriptors(socket, bytes)?;
        (*received, *count) = (came as u64, descriptors.len().min(capacity));
        for (place, fd) in descriptors.into_iter().take(capacity).enumerate() {
            // SAFETY: room for so many by the caller's contract.
            unsafe { fds.add(place).write(fd.into_raw_fd()) };
        }
        Ok(())
    })
}

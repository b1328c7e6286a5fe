//! Pages for other processes.

use std::ffi::{c_int, c_void};
use std::os::fd::IntoRawFd;

use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard, out};
use super::handle::get;
use super::memory::copy_counted;
use super::peer::vmmgraph_fabric_handle_t;
use super::space::vmmgraph_space_t;
use super::status::vmmgraph_status_t;
use crate::pages::{Extent, PageId};
use crate::{Address, Device, Space};

/// A part of a page, and where it shows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_page_extent_t {
    /// The page: a number that no other page of the device has or had.
    pub page: u64,
    /// Where in the page the part begins, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Where it shows.
    pub address: *mut c_void,
    /// Bytes of the page, which whoever imports it has to know.
    pub page_bytes: u64,
}

/// The pages behind a range of the space's addresses, such as a block's, in order: as many as there is room for, and how many there are. Asks nothing
/// of the driver and pins nothing. A seal may exchange pages under retained blocks: ask again after it.
///
/// # Safety
/// `extents` points to `capacity` writable items, or `capacity` is 0; `count` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_export(
    space: vmmgraph_space_t,
    base: *mut c_void,
    bytes: u64,
    extents: *mut vmmgraph_page_extent_t,
    capacity: usize,
    count: *mut usize,
) -> vmmgraph_status_t {
    guard(|| {
        let found = get::<Space, _>(space)?.export(Address(base as u64), bytes)?;
        // SAFETY: the caller's contract.
        unsafe { copy_extents(&found, extents, capacity, count) }
    })
}

/// # Safety
/// As [`vmmgraph_space_export`].
pub(super) unsafe fn copy_extents(
    found: &[Extent],
    extents: *mut vmmgraph_page_extent_t,
    capacity: usize,
    count: *mut usize,
) -> Result<(), Failure> {
    let to_c = |extent: &Extent| vmmgraph_page_extent_t {
        page: extent.page.number(),
        offset: extent.offset,
        bytes: extent.bytes,
        address: extent.address.0 as *mut c_void,
        page_bytes: extent.page_bytes,
    };
    let found: Vec<_> = found.iter().map(to_c).collect();
    // SAFETY: the caller's contract.
    unsafe { copy_counted(&found, extents, capacity, count) }
}

/// A page of an arena for other processes: a file descriptor, the caller's to send and to close, by which they import it; once a page, however many
/// graphs show it. The page is pinned once more (vmmgraph_device_page_exported): until that is taken away it is not given back, lent, paused or
/// exchanged. The device was opened with VMMGRAPH_SHARING_FD.
///
/// # Safety
/// `fd` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_export_page(
    device: vmmgraph_device_t,
    page: u64,
    fd: *mut c_int,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let fd = unsafe { out(fd, "fd") }?;
        *fd = device.export_page_unguarded(PageId::of_number(page))?.into_raw_fd();
        Ok(())
    })
}

/// As vmmgraph_device_export_page, for processes of other hosts too, by a handle of the fabric: 64 bytes to be sent as they are, good as long as the page is
/// pinned. VMMGRAPH_ERROR_WRONG_STATE unless the device was granted VMMGRAPH_SHARING_FABRIC.
///
/// # Safety
/// `handle` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_export_fabric(
    device: vmmgraph_device_t,
    page: u64,
    handle: *mut vmmgraph_fabric_handle_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: the caller's contract.
        let handle = unsafe { out(handle, "handle") }?;
        handle.data = device.export_fabric_unguarded(PageId::of_number(page))?;
        Ok(())
    })
}

/// Says that so many processes more have a page, or, with a negative number, fewer: pins that vmmgraph_device_export_page made go so, when the
/// processes have closed the page or are gone. With more, the page need not be exported by this library. Pins that are left when the device closes
/// go with it.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_page_exported(
    device: vmmgraph_device_t,
    page: u64,
    delta: i32,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.page_exported(PageId::of_number(page), delta)?))
}

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

/// Part of a page, mapped at one address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_page_extent_t {
    /// Page number, never reused by the device.
    pub page: u64,
    /// In the page.
    pub offset: u64,
    pub bytes: u64,
    pub address: *mut c_void,
    /// Needed to import the page.
    pub page_bytes: u64,
}

/// Returns the pages under a range of the space's addresses, in order. Makes no driver call and
/// pins nothing. A seal may replace pages under live-out (retained) blocks: call again afterwards.
/// VMMGRAPH_ERROR_WRONG_STATE while the arena is paused.
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
        // SAFETY: contract.
        unsafe { copy_extents(&found, extents, capacity, count) }
    })
}

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
    // SAFETY: contract.
    unsafe { copy_counted(&found, extents, capacity, count) }
}

/// Exports a page of an arena to other processes as a file descriptor, which the caller sends and
/// closes. Export each page once, however many graphs map it. Adds a pin
/// (vmmgraph_device_page_exported): a pinned page is not released, lent, paused or replaced.
/// VMMGRAPH_ERROR_WRONG_STATE unless the device was opened with VMMGRAPH_SHARING_FD, and while the
/// arena is paused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_export_page(
    device: vmmgraph_device_t,
    page: u64,
    fd: *mut c_int,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let fd = unsafe { out(fd, "fd") }?;
        *fd = device.export_page_unguarded(PageId::of_number(page))?.into_raw_fd();
        Ok(())
    })
}

/// As vmmgraph_device_export_page, also for processes of other hosts: a fabric handle, valid while
/// the page is pinned. VMMGRAPH_ERROR_WRONG_STATE unless the device granted
/// VMMGRAPH_SHARING_FABRIC.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_device_export_fabric(
    device: vmmgraph_device_t,
    page: u64,
    handle: *mut vmmgraph_fabric_handle_t,
) -> vmmgraph_status_t {
    guard(|| {
        let device = get::<Device, _>(device)?;
        // SAFETY: contract.
        let handle = unsafe { out(handle, "handle") }?;
        handle.data = device.export_fabric_unguarded(PageId::of_number(page))?;
        Ok(())
    })
}

/// Adds `delta` pins to a page, or removes pins if negative. Remove the pins of
/// vmmgraph_device_export_page after the importing processes have closed the page or ended. Pins
/// may be added without an export. Closing the device removes all pins.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_page_exported(
    device: vmmgraph_device_t,
    page: u64,
    delta: i32,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<Device, _>(device)?.page_exported(PageId::of_number(page), delta)?))
}

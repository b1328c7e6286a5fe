//! Virtual memory: reservations, pages, mappings. The rules themselves are those of the host driver's memory.rs.

use std::collections::HashSet;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::{Mutex, PoisonError};

use standin::state::{device, device_at, handle as handle_of, page};
use standin::{Answer, Why, give, refused};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::graph::on_the_way;
use crate::state::current;

/// `CUmemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// `CUmemLocationType`; 1 is a device.
    pub kind: c_int,
    /// The device's ordinal.
    pub id: c_int,
}

/// `CUmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `CUmemAllocationType`; 1 is pinned.
    pub kind: c_uint,
    /// `CUmemAllocationHandleType`; 0 is none, 1 a file descriptor.
    pub requested_handle_types: c_uint,
    /// Where the memory is.
    pub location: Location,
    /// Unused.
    pub win32_handle_meta_data: *mut c_void,
    /// Compression, RDMA, usage and reserved bytes.
    pub alloc_flags: [u8; 8],
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Who gets access.
    pub location: Location,
    /// `CUmemAccess_flags`; 3 is read and write.
    pub flags: c_uint,
}

const LOCATION_DEVICE: c_int = 1;
const TYPE_PINNED: c_uint = 1;
const ACCESS_READ_WRITE: c_uint = 3;
const FILE_DESCRIPTOR: c_uint = 1;

/// Pages that were created to be exported.
static EXPORTABLE: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

fn at_device(location: Location) -> Answer<c_int> {
    if location.kind == LOCATION_DEVICE { Ok(location.id) } else { Err(Why::Invalid) }
}

/// The device that plain device memory is asked of.
///
/// # Safety
/// `prop` is null or may be read.
unsafe fn asked_device(prop: *const AllocationProp) -> Answer<c_int> {
    // SAFETY: null or readable by the caller's contract.
    let prop = unsafe { prop.as_ref() }.ok_or(Why::Invalid)?;
    if prop.kind != TYPE_PINNED {
        return Err(Why::Invalid);
    }
    if prop.requested_handle_types > FILE_DESCRIPTOR || prop.alloc_flags != [0; 8] {
        return Err(Why::NotSupported);
    }
    at_device(prop.location)
}

/// Reserves addresses, for pages of the current context's device. The address hint is not followed, as CUDA need not either.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemAddressReserve(
    out: *mut u64,
    size: usize,
    alignment: usize,
    _hint: u64,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::cuMemAddressReserve)?;
        let memory = &current()?.1.memory;
        if out.is_null() || flags != 0 || (alignment != 0 && !alignment.is_power_of_two()) {
            return Err(Why::Invalid);
        }
        if alignment as u64 > memory.granularity() {
            return Err(Why::NotSupported);
        }
        let base = memory.reserve(size as u64).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, base) }
    })
}

/// Gives a whole reservation back.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemAddressFree(base: u64, size: usize) -> Code {
    answer(|| {
        counted(Call::cuMemAddressFree)?;
        device_at(base)?.1.memory.free_addresses(base, size as u64).map_err(refused)
    })
}

/// Creates a page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemCreate(
    out: *mut u64,
    size: usize,
    prop: *const AllocationProp,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::cuMemCreate)?;
        // SAFETY: the caller's contract.
        let (index, device) = device(unsafe { asked_device(prop) }?)?;
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        let page = handle_of(index, device.memory.create(size as u64).map_err(refused)?);
        // SAFETY: not null, and then readable by the caller's contract, as it was above.
        if unsafe { (*prop).requested_handle_types } == FILE_DESCRIPTOR {
            EXPORTABLE.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(page);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, page) }
    })
}

/// Gives a page's handle back; its memory stays while it is mapped.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Code {
    answer(|| {
        counted(Call::cuMemRelease)?;
        let (_, device, page) = page(handle)?;
        device.memory.release(page).map_err(refused)
    })
}

/// A descriptor of a page that was created for that.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: u64,
    kind: c_int,
    flags: u64,
) -> Code {
    answer(|| {
        let exportable = EXPORTABLE
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .as_ref()
            .is_some_and(|pages| pages.contains(&handle));
        if out.is_null() || flags != 0 || kind != FILE_DESCRIPTOR as c_int || !exportable {
            return Err(Why::Invalid);
        }
        let (_, device, page) = page(handle)?;
        let fd = device.memory.export(page).map_err(refused)?;
        // SAFETY: not null, and then room for a descriptor by the caller's contract.
        unsafe { give(out.cast::<c_int>(), fd.into_raw_fd()) }
    })
}

/// A handle of the current device for a page that was exported.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    out: *mut u64,
    handle: *mut c_void,
    kind: c_int,
) -> Code {
    answer(|| {
        let fd = c_int::try_from(handle as usize).map_err(|_| Why::Invalid)?;
        if out.is_null() || kind != FILE_DESCRIPTOR as c_int || fd < 0 {
            return Err(Why::Invalid);
        }
        let (index, device) = current()?;
        // SAFETY: only asked about; one that is none is refused.
        let page = device.memory.import(unsafe { BorrowedFd::borrow_raw(fd) }, None).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, handle_of(index, page)) }
    })
}

/// Maps a whole page at reserved addresses.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemMap(at: u64, size: usize, offset: usize, handle: u64, flags: u64) -> Code {
    answer(|| {
        counted(Call::cuMemMap)?;
        let (_, device, page) = page(handle)?;
        if flags != 0 {
            return Err(Why::Invalid);
        }
        device.memory.map(at, size as u64, offset as u64, page).map_err(refused)
    })
}

/// Unmaps whole mappings.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemUnmap(at: u64, size: usize) -> Code {
    answer(|| {
        counted(Call::cuMemUnmap)?;
        if on_the_way(at, size as u64) {
            return Err(Why::LaunchFailed);
        }
        device_at(at)?.1.memory.unmap(at, size as u64).map_err(refused)
    })
}

/// Makes whole mappings readable and writable by their own device, by others, or both. Kernels of others are not modelled; who has
/// access is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(at: u64, size: usize, desc: *const AccessDesc, count: usize) -> Code {
    answer(|| {
        counted(Call::cuMemSetAccess)?;
        let (index, owner) = device_at(at)?;
        if desc.is_null() || count == 0 || count > 64 {
            return Err(Why::Invalid);
        }
        // SAFETY: not null, and then `count` descriptions by the caller's contract.
        let descriptions = unsafe { std::slice::from_raw_parts(desc, count) };
        let (mut own, mut peers) = (false, 0);
        for AccessDesc { location, flags } in descriptions {
            let asked = device(at_device(*location)?)?.0;
            if *flags != ACCESS_READ_WRITE {
                return Err(Why::NotSupported);
            }
            own |= asked == index;
            peers |= u64::from(asked != index) << asked;
        }
        owner.memory.grant(at, size as u64, peers).map_err(refused)?;
        if own { owner.memory.set_access(at, size as u64).map_err(refused) } else { Ok(()) }
    })
}

/// The access that a device has to a mapped address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAccess(flags: *mut u64, location: *const Location, at: u64) -> Code {
    answer(|| {
        // SAFETY: null or readable by the caller's contract.
        let location = unsafe { location.as_ref() }.ok_or(Why::Invalid)?;
        let asked = device(at_device(*location)?).map_err(|_| Why::InvalidDevice)?.0;
        let (index, owner) = device_at(at)?;
        // Holding the page for a moment tells a mapping without access from no mapping.
        let page = owner.memory.retain_at(at).map_err(refused)?;
        let granted = owner.memory.granted(at) >> asked & 1 == 1;
        let accessible = if index == asked { owner.memory.accessible(at, 1) } else { granted };
        owner.memory.release(page).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(flags, if accessible { u64::from(ACCESS_READ_WRITE) } else { 0 }) }
    })
}

/// What mapped lengths and addresses are multiples of; the recommended value is the minimum, as on an H200.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    prop: *const AllocationProp,
    option: c_int,
) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        let (_, device) = device(unsafe { asked_device(prop) }?)?;
        if !(0..=1).contains(&option) {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(granularity, device.memory.granularity() as usize) }
    })
}

/// Another reference to the page mapped at an address, under the page's own handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(out: *mut u64, at: *mut c_void) -> Code {
    answer(|| {
        let (index, device) = device_at(at as u64)?;
        if out.is_null() {
            return Err(Why::Invalid);
        }
        let page = device.memory.retain_at(at as u64).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, handle_of(index, page)) }
    })
}

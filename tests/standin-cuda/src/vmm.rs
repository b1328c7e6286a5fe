//! Virtual memory: reservations, pages, mappings. Rules of the host driver's memory.rs apply.

use std::collections::HashMap;
use std::ffi::{c_int, c_uint, c_void};
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
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
    /// Location of the memory.
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
    /// Device that gets access.
    pub location: Location,
    /// `CUmemAccess_flags`; 3 is read and write.
    pub flags: c_uint,
}

const LOCATION_DEVICE: c_int = 1;
const TYPE_PINNED: c_uint = 1;
const ACCESS_READ_WRITE: c_uint = 3;
const FILE_DESCRIPTOR: c_uint = 1;
const FABRIC: c_uint = 8;

/// Handle types of exportable pages.
static EXPORTABLE: Mutex<Option<HashMap<u64, c_uint>>> = Mutex::new(None);

/// True if the process may use the fabric. If not, creating a page for the fabric fails, as on an
/// H200.
static FABRIC_ALLOWED: AtomicBool = AtomicBool::new(false);

/// Allows or forbids the fabric.
#[unsafe(no_mangle)]
pub extern "C" fn standin_allow_fabric(allowed: bool) {
    FABRIC_ALLOWED.store(allowed, Ordering::SeqCst);
}

/// Refuses handle types that the page was not created for.
fn exportable(handle: u64, kind: c_int) -> Answer<()> {
    let pages = EXPORTABLE.lock().unwrap_or_else(PoisonError::into_inner);
    let kinds = pages.as_ref().and_then(|pages| pages.get(&handle)).copied().unwrap_or(0);
    let one = kind == FILE_DESCRIPTOR as c_int || kind == FABRIC as c_int;
    if one && kinds & kind as c_uint != 0 { Ok(()) } else { Err(Why::Invalid) }
}

fn at_device(location: Location) -> Answer<c_int> {
    if location.kind == LOCATION_DEVICE { Ok(location.id) } else { Err(Why::Invalid) }
}

/// Returns the device of a request for plain device memory.
///
/// # Safety
/// `prop` is null or readable.
unsafe fn asked_device(prop: *const AllocationProp) -> Answer<c_int> {
    // SAFETY: null or readable by the caller's contract.
    let prop = unsafe { prop.as_ref() }.ok_or(Why::Invalid)?;
    if prop.kind != TYPE_PINNED {
        return Err(Why::Invalid);
    }
    // The second flag is gpuDirectRDMACapable.
    let [compression, rdma, rest @ ..] = prop.alloc_flags;
    if prop.requested_handle_types & !(FILE_DESCRIPTOR | FABRIC) != 0
        || compression != 0
        || rdma > 1
        || rest != [0; 6]
    {
        return Err(Why::NotSupported);
    }
    at_device(prop.location)
}

/// Reserves addresses for pages of the current context's device. The address hint is ignored, which
/// CUDA permits.
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

/// Frees a whole reservation.
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
        // SAFETY: not null and readable, as above.
        let kinds = unsafe { (*prop).requested_handle_types };
        if kinds & FABRIC != 0 && !FABRIC_ALLOWED.load(Ordering::SeqCst) {
            return Err(Why::NotPermitted);
        }
        let page = handle_of(index, device.memory.create(size as u64).map_err(refused)?);
        if kinds != 0 {
            EXPORTABLE
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .get_or_insert_default()
                .insert(page, kinds);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, page) }
    })
}

/// Releases a page's handle; mappings keep the memory alive.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemRelease(handle: u64) -> Code {
    answer(|| {
        counted(Call::cuMemRelease)?;
        let (_, device, page) = page(handle)?;
        device.memory.release(page).map_err(refused)
    })
}

/// Exports a page as a descriptor or fabric handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    out: *mut c_void,
    handle: u64,
    kind: c_int,
    flags: u64,
) -> Code {
    answer(|| {
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        exportable(handle, kind)?;
        let (_, device, page) = page(handle)?;
        if kind == FABRIC as c_int {
            // Valid in this process only: the page's own handle suffices.
            let mut name = [0_u8; 64];
            name[..8].copy_from_slice(&handle.to_le_bytes());
            // SAFETY: not null; room for a fabric handle by the caller's contract.
            return unsafe { give(out.cast::<[u8; 64]>(), name) };
        }
        let fd = device.memory.export(page).map_err(refused)?;
        // SAFETY: not null; room for a descriptor by the caller's contract.
        unsafe { give(out.cast::<c_int>(), fd.into_raw_fd()) }
    })
}

/// Imports an exported page to the current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    out: *mut u64,
    handle: *mut c_void,
    kind: c_int,
) -> Code {
    answer(|| {
        let (index, device) = current()?;
        if out.is_null() {
            return Err(Why::Invalid);
        }
        let page = if kind == FABRIC as c_int && !handle.is_null() {
            // SAFETY: a fabric handle by the caller's contract.
            let name = unsafe { handle.cast::<[u8; 64]>().read_unaligned() };
            let mut of = [0; 8];
            of.copy_from_slice(&name[..8]);
            let of = u64::from_le_bytes(of);
            exportable(of, kind)?;
            let (_, owner, page) = page(of)?;
            let fd = owner.memory.export(page).map_err(refused)?;
            device.memory.import(fd.as_fd(), None).map_err(refused)?
        } else {
            let fd = c_int::try_from(handle as usize).map_err(|_| Why::Invalid)?;
            if kind != FILE_DESCRIPTOR as c_int || fd < 0 {
                return Err(Why::Invalid);
            }
            // SAFETY: only queried; an invalid descriptor is refused.
            device.memory.import(unsafe { BorrowedFd::borrow_raw(fd) }, None).map_err(refused)?
        };
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

/// Grants read and write access to whole mappings, for their own device, for peers, or for both.
/// Access of peers is recorded; kernels of peers are not modelled.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemSetAccess(at: u64, size: usize, desc: *const AccessDesc, count: usize) -> Code {
    answer(|| {
        counted(Call::cuMemSetAccess)?;
        let (index, owner) = device_at(at)?;
        if desc.is_null() || count == 0 || count > 64 {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; `count` descriptions by the caller's contract.
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

/// Returns the access of a device to a mapped address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetAccess(flags: *mut u64, location: *const Location, at: u64) -> Code {
    answer(|| {
        // SAFETY: null or readable by the caller's contract.
        let location = unsafe { location.as_ref() }.ok_or(Why::Invalid)?;
        let asked = device(at_device(*location)?).map_err(|_| Why::InvalidDevice)?.0;
        let (index, owner) = device_at(at)?;
        // The retain distinguishes a mapping without access from no mapping.
        let page = owner.memory.retain_at(at).map_err(refused)?;
        let granted = owner.memory.granted(at) >> asked & 1 == 1;
        let accessible = if index == asked { owner.memory.accessible(at, 1) } else { granted };
        owner.memory.release(page).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(flags, if accessible { u64::from(ACCESS_READ_WRITE) } else { 0 }) }
    })
}

/// Returns the granularity; the recommended value is the minimum, as on an H200.
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

/// Returns a reference to the page mapped at an address, with the page's own handle.
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

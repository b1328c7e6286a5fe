//! Virtual memory: reservations, pages, mappings.

use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;

use standin::state::{device, device_at, handle as handle_of, page};
use standin::{Answer, Why, give, refused};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, notes, started};

/// `aclrtMemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// The device's number.
    pub id: c_uint,
    /// `aclrtMemLocationType`; 1 is a device.
    pub kind: c_uint,
}

/// `aclrtPhysicalMemProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PhysicalMemProp {
    /// `aclrtMemHandleType`; 0 is none.
    pub handle_type: c_uint,
    /// `aclrtMemAllocationType`; 0 is pinned.
    pub allocation_type: c_uint,
    /// `aclrtMemAttr`; 4 is memory of the device in pages of 2 MiB.
    pub attribute: c_uint,
    /// Location of the memory.
    pub location: Location,
    /// 0.
    pub reserve: u64,
}

const LOCATION_DEVICE: c_uint = 1;
const HBM_HUGE: c_uint = 4;

/// Returns the device of a request for plain device memory. Any thread must have set the device
/// before.
///
/// # Safety
/// `prop` is null or readable.
unsafe fn asked_device(prop: *const PhysicalMemProp) -> Answer<c_int> {
    started()?;
    // SAFETY: null or readable by the caller's contract.
    let prop = unsafe { prop.as_ref() }.ok_or(Why::Invalid)?;
    let plain = prop.handle_type == 0 && prop.allocation_type == 0 && prop.reserve == 0;
    if !plain || prop.attribute != HBM_HUGE || prop.location.kind != LOCATION_DEVICE {
        return Err(Why::Invalid);
    }
    let ordinal = c_int::try_from(prop.location.id).map_err(|_| Why::InvalidDevice)?;
    let (_, found) = device(ordinal)?;
    if found.retained.load(Relaxed) == 0 {
        return Err(Why::Unknown);
    }
    Ok(ordinal)
}

/// Reserves addresses for pages of the current context's device. In the real runtime, the first map
/// decides the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtReserveMemAddress(
    out: *mut *mut c_void,
    size: usize,
    alignment: usize,
    expected: *mut c_void,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::aclrtReserveMemAddress)?;
        let memory = &current()?.1.memory;
        if out.is_null() || size == 0 || alignment != 0 || !expected.is_null() || flags > 1 {
            return Err(Why::Invalid);
        }
        let base = memory.reserve(size as u64).map_err(refused)?;
        notes().reservations.insert(base, size as u64);
        // SAFETY: the caller's contract.
        unsafe { give(out, base as *mut c_void) }
    })
}

/// Frees a reservation without mappings.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtReleaseMemAddress(base: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtReleaseMemAddress)?;
        let base = base as u64;
        // Forget the base before freeing: a concurrent thread may get the same addresses at once.
        let size = notes().reservations.remove(&base).ok_or(Why::Invalid)?;
        let freed = device_at(base).and_then(|(_, of)| of.memory.free_addresses(base, size).map_err(refused));
        if freed.is_err() {
            notes().reservations.insert(base, size);
        }
        freed
    })
}

/// Creates a page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocPhysical(
    out: *mut *mut c_void,
    size: usize,
    prop: *const PhysicalMemProp,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::aclrtMallocPhysical)?;
        // SAFETY: the caller's contract.
        let (index, device) = device(unsafe { asked_device(prop) }?)?;
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        let page = device.memory.create(size as u64).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, handle_of(index, page) as *mut c_void) }
    })
}

/// Frees a page; mappings keep the memory alive.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtFreePhysical(handle: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtFreePhysical)?;
        let (_, device, page) = page(handle as u64)?;
        device.memory.release(page).map_err(refused)
    })
}

/// Maps a whole page at reserved addresses, accessible at once.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtMapMem(
    at: *mut c_void,
    size: usize,
    offset: usize,
    handle: *mut c_void,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::aclrtMapMem)?;
        let (_, device, page) = page(handle as u64)?;
        if flags != 0 || offset != 0 {
            return Err(Why::Invalid);
        }
        let (at, size) = (at as u64, size as u64);
        device.memory.map(at, size, 0, page).map_err(refused)?;
        if let Err(refusal) = device.memory.set_access(at, size) {
            let _ = device.memory.unmap(at, size);
            return Err(refused(refusal));
        }
        notes().maps.insert(at, size);
        Ok(())
    })
}

/// Removes one mapping, by its first address.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtUnmapMem(head: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtUnmapMem)?;
        let head = head as u64;
        let size = notes().maps.get(&head).copied().ok_or(Why::Invalid)?;
        device_at(head)?.1.memory.unmap(head, size).map_err(refused)?;
        notes().maps.remove(&head);
        Ok(())
    })
}

/// Returns the granularity; the recommended value is the minimum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemGetAllocationGranularity(
    prop: *mut PhysicalMemProp,
    option: c_uint,
    granularity: *mut usize,
) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        let (_, device) = device(unsafe { asked_device(prop) }?)?;
        if option > 1 {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(granularity, device.memory.granularity() as usize) }
    })
}

//! Virtual memory: reservations, pages, mappings.

use std::ffi::{c_int, c_uint};

use standin::state::{device, device_at, handle as handle_of, page};
use standin::{Answer, Why, give, refused};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, notes, unsafe_in_captures};

/// `CNmemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// `CNmemLocationType`; 1 is a device.
    pub kind: c_uint,
    /// The device's number.
    pub id: c_uint,
}

/// `CNmemAllocationProp`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `CNmemAllocationType`; 1 is the default.
    pub kind: c_uint,
    /// `CNmemAllocationHandleType`; 0 is none.
    pub handle_types: c_uint,
    /// Location of the memory.
    pub location: Location,
    /// 0: not compressed.
    pub compression: u8,
    /// 0: not secured.
    pub security: u8,
}

/// `CNmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Device that gets access.
    pub location: Location,
    /// `CNMemoryAccessFlags`; 0 is read and write.
    pub access: c_uint,
    /// `CNMemoryCachingType`.
    pub cache: c_uint,
    /// `CNMemoryCachePinnedType`.
    pub pinned: c_uint,
}

fn at_device(location: Location) -> Answer<c_int> {
    if location.kind != 1 {
        return Err(Why::Invalid);
    }
    c_int::try_from(location.id).map_err(|_| Why::InvalidDevice)
}

/// Returns the device of a request for plain device memory.
///
/// # Safety
/// `prop` is null or readable.
unsafe fn asked_device(prop: *const AllocationProp) -> Answer<c_int> {
    // SAFETY: null or readable by the caller's contract.
    let prop = unsafe { prop.as_ref() }.ok_or(Why::Invalid)?;
    if prop.kind != 1 || prop.handle_types != 0 || prop.compression != 0 || prop.security != 0 {
        return Err(Why::Invalid);
    }
    at_device(prop.location)
}

/// Reserves addresses for pages of the current context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemAddressReserve(
    out: *mut u64,
    size: u64,
    alignment: u64,
    start: u64,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::cnMemAddressReserve)?;
        unsafe_in_captures()?;
        let memory = &current()?.1.memory;
        if out.is_null() || alignment != 0 || start != 0 || flags != 0 {
            return Err(Why::Invalid);
        }
        let base = memory.reserve(size).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, base) }
    })
}

/// Frees a whole reservation without mappings.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemAddressFree(base: u64, size: u64) -> Code {
    answer(|| {
        counted(Call::cnMemAddressFree)?;
        unsafe_in_captures()?;
        device_at(base)?.1.memory.free_addresses(base, size).map_err(refused)
    })
}

/// Creates a page.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemCreate(
    out: *mut u64,
    size: u64,
    prop: *mut AllocationProp,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::cnMemCreate)?;
        unsafe_in_captures()?;
        // SAFETY: the caller's contract.
        let (index, device) = device(unsafe { asked_device(prop) }?)?;
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        let page = device.memory.create(size).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, handle_of(index, page)) }
    })
}

/// Releases a page; mappings keep the memory alive.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemRelease(handle: u64) -> Code {
    answer(|| {
        counted(Call::cnMemRelease)?;
        unsafe_in_captures()?;
        let (_, device, page) = page(handle)?;
        device.memory.release(page).map_err(refused)
    })
}

/// Maps a whole page at reserved addresses.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemMap(at: u64, size: u64, offset: u64, handle: u64, flags: u64) -> Code {
    answer(|| {
        counted(Call::cnMemMap)?;
        unsafe_in_captures()?;
        let (_, device, page) = page(handle)?;
        if flags != 0 || offset != 0 {
            return Err(Why::Invalid);
        }
        device.memory.map(at, size, 0, page).map_err(refused)?;
        notes().maps.insert(at, size);
        Ok(())
    })
}

/// Checks that the range is one mapping, as created.
fn one_map(at: u64, size: u64) -> Answer {
    if notes().maps.get(&at) == Some(&size) { Ok(()) } else { Err(Why::Invalid) }
}

/// Grants read and write access to one mapping, for the page's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemSetAccess(at: u64, size: u64, desc: *mut AccessDesc, count: u64) -> Code {
    answer(|| {
        counted(Call::cnMemSetAccess)?;
        unsafe_in_captures()?;
        // SAFETY: null or readable by the caller's contract.
        let desc = unsafe { desc.as_ref() }.ok_or(Why::Invalid)?;
        let (index, owner) = device_at(at)?;
        one_map(at, size)?;
        let of_the_owner = at_device(desc.location).and_then(device)?.0 == index;
        if count != 1 || !of_the_owner || desc.access != 0 || desc.cache > 3 || desc.pinned > 1 {
            return Err(Why::Invalid);
        }
        owner.memory.set_access(at, size).map_err(refused)
    })
}

/// Removes one mapping.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemUnmap(at: u64, size: u64) -> Code {
    answer(|| {
        counted(Call::cnMemUnmap)?;
        unsafe_in_captures()?;
        one_map(at, size)?;
        device_at(at)?.1.memory.unmap(at, size).map_err(refused)?;
        notes().maps.remove(&at);
        Ok(())
    })
}

/// Returns the granularity; the recommended value is the minimum.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemGetAllocationGranularity(
    granularity: *mut u64,
    prop: *mut AllocationProp,
    option: c_uint,
) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        let (_, device) = device(unsafe { asked_device(prop) }?)?;
        if option > 1 {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(granularity, device.memory.granularity()) }
    })
}

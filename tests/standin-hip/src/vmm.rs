//! Virtual memory with ROCm's rules.

use std::ffi::{c_int, c_void};

use standin::state::{device, device_at, handle as handle_of, page};
use standin::{Answer, Why, give, refused};

use crate::code::Code;
use crate::faults::{Call, counted};
use crate::stream::device_is_idle;
use crate::{answer, current};

/// `hipMemLocation`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Location {
    /// `hipMemLocationType`; 1 is a device.
    pub kind: c_int,
    /// The device's ordinal.
    pub id: c_int,
}

/// `hipMemAllocationProp` of HIP 6.2 and newer.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AllocationProp {
    /// `hipMemAllocationType`; 1 is pinned.
    pub kind: c_int,
    /// `hipMemAllocationHandleType`; 0 is none.
    pub requested_handle_type: c_int,
    /// Location of the memory.
    pub location: Location,
    /// Unused.
    pub win32_handle_meta_data: *mut c_void,
    /// Compression, RDMA, usage.
    pub alloc_flags: [u8; 8],
}

/// `hipMemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct AccessDesc {
    /// Device that gets access.
    pub location: Location,
    /// `hipMemAccessFlags`; 3 is read and write.
    pub flags: c_int,
}

fn at_device(location: Location) -> Answer<c_int> {
    if location.kind == 1 { Ok(location.id) } else { Err(Why::Invalid) }
}

/// Checks a request for memory. Memory comes from the current device; any other device is refused.
///
/// # Safety
/// `prop` is null or readable.
unsafe fn check(prop: *const AllocationProp) -> Answer {
    // SAFETY: null or readable by the caller's contract.
    let prop = unsafe { prop.as_ref() }.ok_or(Why::Invalid)?;
    if prop.kind != 1 || prop.requested_handle_type != 0 || prop.alloc_flags != [0; 8] {
        return Err(Why::Invalid);
    }
    if device(at_device(prop.location)?)?.0 == current()?.0 { Ok(()) } else { Err(Why::Invalid) }
}

/// Reserves addresses for pages of the current device. The hint is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemAddressReserve(
    out: *mut *mut c_void,
    size: usize,
    alignment: usize,
    _hint: *mut c_void,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::hipMemAddressReserve)?;
        let memory = &current()?.1.memory;
        if out.is_null() || flags != 0 || alignment != 0 {
            return Err(Why::Invalid);
        }
        let base = memory.reserve(size as u64).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, base as *mut c_void) }
    })
}

/// Frees a whole reservation.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemAddressFree(base: *mut c_void, size: usize) -> Code {
    answer(|| {
        counted(Call::hipMemAddressFree)?;
        device_at(base as u64)?.1.memory.free_addresses(base as u64, size as u64).map_err(refused)
    })
}

/// Creates a page on the current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemCreate(
    out: *mut *mut c_void,
    size: usize,
    prop: *const AllocationProp,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::hipMemCreate)?;
        // SAFETY: the caller's contract.
        unsafe { check(prop) }?;
        let (index, device) = current()?;
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        let page = device.memory.create(size as u64).map_err(refused)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, handle_of(index, page) as *mut c_void) }
    })
}

/// Releases a page's handle; mappings keep the memory alive.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemRelease(handle: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipMemRelease)?;
        let (_, device, page) = page(handle as u64)?;
        device.memory.release(page).map_err(refused)
    })
}

/// Maps a page at reserved addresses.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemMap(
    at: *mut c_void,
    size: usize,
    offset: usize,
    handle: *mut c_void,
    flags: u64,
) -> Code {
    answer(|| {
        counted(Call::hipMemMap)?;
        let (_, device, page) = page(handle as u64)?;
        if flags != 0 || offset != 0 {
            return Err(Why::Invalid);
        }
        device.memory.map(at as u64, size as u64, 0, page).map_err(refused)
    })
}

/// Unmaps one mapping after all submitted work of the device.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemUnmap(at: *mut c_void, size: usize) -> Code {
    answer(|| {
        counted(Call::hipMemUnmap)?;
        let memory = &device_at(at as u64)?.1.memory;
        if memory.mapping_at(at as u64) != Some((at as u64, size as u64)) {
            return Err(Why::Invalid);
        }
        memory.unmap(at as u64, size as u64).map_err(refused)?;
        device_is_idle();
        Ok(())
    })
}

/// Grants read and write access to whole mappings. The owner must come last among the devices: ROCm
/// spoils the mapping otherwise.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemSetAccess(
    at: *mut c_void,
    size: usize,
    desc: *const AccessDesc,
    count: usize,
) -> Code {
    answer(|| {
        counted(Call::hipMemSetAccess)?;
        let (index, owner) = device_at(at as u64)?;
        if desc.is_null() || count == 0 || count > 64 {
            return Err(Why::Invalid);
        }
        let version = crate::control::version();
        if (70_000_000..71_400_000).contains(&version)
            && owner.memory.first_mapping(at as u64) != Some(at as u64)
        {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; `count` descriptions by the caller's contract.
        let descriptions = unsafe { std::slice::from_raw_parts(desc, count) };
        let mut peers = 0;
        for (place, AccessDesc { location, flags }) in descriptions.iter().enumerate() {
            let asked = device(at_device(*location)?)?.0;
            if *flags != 3 || (asked == index) != (place + 1 == count) {
                return Err(Why::Invalid);
            }
            peers |= u64::from(asked != index) << asked;
        }
        owner.memory.grant(at as u64, size as u64, peers).map_err(refused)?;
        owner.memory.set_access(at as u64, size as u64).map_err(refused)
    })
}

/// Returns the peers with access to an address, a bit for each. (HIP has hipMemGetAccess, for one
/// peer.)
#[unsafe(no_mangle)]
pub extern "C" fn standin_granted(at: u64) -> u64 {
    device_at(at).map_or(0, |(_, device)| device.memory.granted(at))
}

/// Returns the granularity of mappings.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetAllocationGranularity(
    granularity: *mut usize,
    prop: *const AllocationProp,
    option: c_int,
) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { check(prop) }?;
        if !(0..=1).contains(&option) {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(granularity, current()?.1.memory.granularity() as usize) }
    })
}

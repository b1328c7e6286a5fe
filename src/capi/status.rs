use std::cell::RefCell;
use std::ffi::c_char;

use super::guard::guard_anywhere;
use super::sized::OutStruct;
use super::text::copy_text;
use crate::error::Error;

/// VMMGRAPH_OK or one of the VMMGRAPH_ERROR numbers, which are never reused. Treat an unknown
/// number as a failure.
pub type vmmgraph_status_t = i32;

pub const VMMGRAPH_OK: i32 = 0;
pub const VMMGRAPH_ERROR_NULL_ARGUMENT: i32 = 1;
pub const VMMGRAPH_ERROR_INVALID_ARGUMENT: i32 = 2;
/// A size is 0 or beyond 2^46 bytes, or a page size does not fit the device.
pub const VMMGRAPH_ERROR_INVALID_SIZE: i32 = 3;
/// A handle is destroyed, of another type, or was never valid.
pub const VMMGRAPH_ERROR_INVALID_HANDLE: i32 = 4;
/// The driver has no device with this number.
pub const VMMGRAPH_ERROR_INVALID_DEVICE: i32 = 5;
/// A pointer is not the start of a live block.
pub const VMMGRAPH_ERROR_FOREIGN_POINTER: i32 = 6;
/// The block is already freed.
pub const VMMGRAPH_ERROR_DOUBLE_FREE: i32 = 7;
/// A struct_size is impossible, or the struct sets fields unknown to this library.
pub const VMMGRAPH_ERROR_STRUCT_SIZE: i32 = 8;
/// The loaded library and the header have different ABI versions (checked by the C++ API).
pub const VMMGRAPH_ERROR_ABI_MISMATCH: i32 = 9;
/// The object's state does not permit the call.
pub const VMMGRAPH_ERROR_WRONG_STATE: i32 = 100;
/// Closed by an earlier internal error: the object can only be destroyed.
pub const VMMGRAPH_ERROR_CLOSED: i32 = 101;
/// The device is already open with other settings.
pub const VMMGRAPH_ERROR_DEVICE_IN_USE: i32 = 102;
/// A stream of the call is being captured; on platforms which forbid waits during a capture, any
/// stream is.
pub const VMMGRAPH_ERROR_STREAM_CAPTURING: i32 = 103;
/// No device memory is left. State is unchanged.
pub const VMMGRAPH_ERROR_OUT_OF_MEMORY: i32 = 200;
/// The byte budget of the device, an account or an arena is used up; vmmgraph_last_error_message
/// names it. State is unchanged.
pub const VMMGRAPH_ERROR_OVER_BUDGET: i32 = 201;
/// No address range of the length is left. State is unchanged.
pub const VMMGRAPH_ERROR_OUT_OF_ADDRESSES: i32 = 202;
/// The process has no file descriptor left (host driver). State is unchanged.
pub const VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS: i32 = 203;
/// The limit of the host pool is reached, or the machine has no more host memory.
pub const VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY: i32 = 204;
/// A driver call failed: vmmgraph_last_error has the driver's result, vmmgraph_last_error_message
/// the name of the call.
pub const VMMGRAPH_ERROR_DRIVER: i32 = 300;
/// The driver's library cannot be loaded, or VMMGRAPH_DRIVER_AUTO found no platform with a usable
/// device.
pub const VMMGRAPH_ERROR_DRIVER_MISSING: i32 = 301;
pub const VMMGRAPH_ERROR_DRIVER_TOO_OLD: i32 = 302;
/// The device has no virtual memory management, or lacks a feature required by the call.
pub const VMMGRAPH_ERROR_UNSUPPORTED: i32 = 303;
/// Host memory could not be registered with the device (pinned), as the call requires.
pub const VMMGRAPH_ERROR_HOST_NOT_REGISTERED: i32 = 304;
/// A bug in the library. The arena is closed; the process continues.
pub const VMMGRAPH_ERROR_INTERNAL: i32 = 900;

/// Returns the name of a status, such as "out of memory".
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_status_name(status: vmmgraph_status_t) -> *const c_char {
    let name = match status {
        VMMGRAPH_OK => c"ok",
        VMMGRAPH_ERROR_NULL_ARGUMENT => c"null argument",
        VMMGRAPH_ERROR_INVALID_ARGUMENT => c"invalid argument",
        VMMGRAPH_ERROR_INVALID_SIZE => c"invalid size",
        VMMGRAPH_ERROR_INVALID_HANDLE => c"invalid handle",
        VMMGRAPH_ERROR_INVALID_DEVICE => c"invalid device",
        VMMGRAPH_ERROR_FOREIGN_POINTER => c"foreign pointer",
        VMMGRAPH_ERROR_DOUBLE_FREE => c"double free",
        VMMGRAPH_ERROR_STRUCT_SIZE => c"wrong struct size",
        VMMGRAPH_ERROR_ABI_MISMATCH => c"abi mismatch",
        VMMGRAPH_ERROR_WRONG_STATE => c"wrong state",
        VMMGRAPH_ERROR_CLOSED => c"closed",
        VMMGRAPH_ERROR_DEVICE_IN_USE => c"device in use",
        VMMGRAPH_ERROR_STREAM_CAPTURING => c"stream capturing",
        VMMGRAPH_ERROR_OUT_OF_MEMORY => c"out of memory",
        VMMGRAPH_ERROR_OVER_BUDGET => c"over budget",
        VMMGRAPH_ERROR_OUT_OF_ADDRESSES => c"out of addresses",
        VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS => c"out of file descriptors",
        VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY => c"out of host memory",
        VMMGRAPH_ERROR_DRIVER => c"driver error",
        VMMGRAPH_ERROR_DRIVER_MISSING => c"driver missing",
        VMMGRAPH_ERROR_DRIVER_TOO_OLD => c"driver too old",
        VMMGRAPH_ERROR_UNSUPPORTED => c"unsupported device",
        VMMGRAPH_ERROR_HOST_NOT_REGISTERED => c"host memory not registered",
        VMMGRAPH_ERROR_INTERNAL => c"internal error",
        _ => c"unknown status",
    };
    name.as_ptr()
}

/// Details of a failure. Fields without meaning for the failure are 0, `device` -1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_error_info_t {
    pub struct_size: usize,
    pub status: vmmgraph_status_t,
    /// Result of the failed driver call.
    pub driver_result: i32,
    pub device: i32,
    /// Always 0.
    pub reserved: i32,
    /// Bytes requested, or bytes missing when memory was short; else the refused address or
    /// argument.
    pub requested: u64,
    /// Bytes available: free on the device, left in the budget, or the limit of the size.
    pub available: u64,
}

thread_local! {
    static LAST: RefCell<Option<(vmmgraph_status_t, Error)>> = const { RefCell::new(None) };
}

/// Returns its status.
pub(super) fn remember(error: Error) -> vmmgraph_status_t {
    remember_as(status_of(&error), error)
}

pub(super) fn remember_as(status: vmmgraph_status_t, error: Error) -> vmmgraph_status_t {
    // A thread in its thread-local destructors has no storage left.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some((status, error)));
    status
}

/// None on an ending thread.
fn last() -> Option<(vmmgraph_status_t, Error)> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

fn status_of(error: &Error) -> vmmgraph_status_t {
    match error {
        Error::InvalidSize { .. } | Error::InvalidPageSize { .. } => VMMGRAPH_ERROR_INVALID_SIZE,
        Error::InvalidArgument { .. } | Error::InputMismatch { .. } | Error::InvalidMap { .. } | Error::UnknownPlatform { .. } => VMMGRAPH_ERROR_INVALID_ARGUMENT,
        Error::InvalidDevice { .. } => VMMGRAPH_ERROR_INVALID_DEVICE,
        Error::DeviceInUse { .. } => VMMGRAPH_ERROR_DEVICE_IN_USE,
        Error::ForeignPointer { .. } => VMMGRAPH_ERROR_FOREIGN_POINTER,
        Error::DoubleFree { .. } => VMMGRAPH_ERROR_DOUBLE_FREE,
        Error::WrongState { .. } | Error::Lent { .. } | Error::Exported { .. } => VMMGRAPH_ERROR_WRONG_STATE,
        Error::OutOfMemory { .. } => VMMGRAPH_ERROR_OUT_OF_MEMORY,
        Error::OverBudget { .. } => VMMGRAPH_ERROR_OVER_BUDGET,
        Error::OutOfAddresses { .. } => VMMGRAPH_ERROR_OUT_OF_ADDRESSES,
        Error::OutOfDescriptors { .. } => VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS,
        Error::OutOfHostMemory { .. } => VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY,
        Error::HostNotRegistered { .. } => VMMGRAPH_ERROR_HOST_NOT_REGISTERED,
        Error::StreamCapturing { .. } | Error::DeviceCapturing { .. } => VMMGRAPH_ERROR_STREAM_CAPTURING,
        Error::DriverMissing { .. } | Error::NoUsableDevice { .. } => VMMGRAPH_ERROR_DRIVER_MISSING,
        Error::SymbolMissing { .. } | Error::UnfitDriver { .. } => VMMGRAPH_ERROR_DRIVER_TOO_OLD,
        Error::Unsupported { .. } | Error::Incoherent { .. } | Error::NotOffered { .. } => VMMGRAPH_ERROR_UNSUPPORTED,
        Error::Driver { .. } => VMMGRAPH_ERROR_DRIVER,
        Error::Closed { .. } => VMMGRAPH_ERROR_CLOSED,
        Error::Internal { .. } => VMMGRAPH_ERROR_INTERNAL,
    }
}

fn describe(status: vmmgraph_status_t, error: &Error) -> vmmgraph_error_info_t {
    let mut info = vmmgraph_error_info_t {
        struct_size: size_of::<vmmgraph_error_info_t>(),
        status,
        driver_result: 0,
        device: -1,
        reserved: 0,
        requested: 0,
        available: 0,
    };
    match *error {
        Error::InvalidSize { bytes, limit, .. } => (info.requested, info.available) = (bytes, limit),
        Error::InvalidPageSize { bytes, granularity, .. } => {
            (info.requested, info.available) = (bytes, granularity);
        }
        Error::InvalidArgument { value, .. } => info.requested = value as u64,
        Error::InvalidDevice { ordinal, .. }
        | Error::DeviceInUse { ordinal, .. }
        | Error::NoUsableDevice { ordinal, .. } => info.device = ordinal,
        Error::ForeignPointer { address } | Error::DoubleFree { address } => info.requested = address.0,
        Error::OutOfMemory { requested, free, device, .. } => {
            (info.requested, info.available, info.device) = (requested, free, device);
        }
        Error::OverBudget { requested, held, budget, device, .. } => {
            (info.requested, info.available, info.device) = (requested, budget.saturating_sub(held), device);
        }
        Error::OutOfDescriptors { requested, device, .. } => {
            (info.requested, info.device) = (requested, device)
        }
        Error::OutOfAddresses { requested, device } => (info.requested, info.device) = (requested, device),
        Error::OutOfHostMemory { requested, held, limit, available } => {
            let available = available.unwrap_or(limit.saturating_sub(held));
            (info.requested, info.available) = (requested, available);
        }
        Error::HostNotRegistered { requested, registered, .. } => {
            (info.requested, info.available) = (requested, registered);
        }
        Error::StreamCapturing { stream } => info.requested = stream,
        Error::Unsupported { device }
        | Error::DeviceCapturing { device }
        | Error::NotOffered { device, .. }
        | Error::Incoherent { device, .. } => {
            info.device = device;
        }
        Error::Driver { code, .. } => info.driver_result = code,
        Error::WrongState { .. }
        | Error::InputMismatch { .. }
        | Error::InvalidMap { .. }
        | Error::UnknownPlatform { .. }
        | Error::DriverMissing { .. }
        | Error::SymbolMissing { .. }
        | Error::UnfitDriver { .. }
        | Error::Closed { .. }
        | Error::Lent { .. }
        | Error::Exported { .. }
        | Error::Internal { .. } => {}
    }
    info
}

/// Writes the details of the calling thread's last failure; status VMMGRAPH_OK if no call failed.
/// Successful calls keep the last failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_last_error(info: *mut vmmgraph_error_info_t) -> vmmgraph_status_t {
    guard_anywhere(|| {
        // SAFETY: contract.
        let info = unsafe { OutStruct::new(info, "info") }?;
        info.write(match last() {
            Some((status, error)) => describe(status, &error),
            None => describe(VMMGRAPH_OK, &Error::Internal { what: String::new() }),
        });
        Ok(())
    })
}

/// Copies the message of the calling thread's last failure.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_last_error_message(
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    guard_anywhere(|| {
        let text = last().map_or(String::new(), |(_, error)| error.to_string());
        // SAFETY: contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;

    use super::*;

    #[test]
    fn every_number_has_a_name_and_every_other_number_too() {
        // SAFETY: the function returns static strings.
        let name = |status| unsafe { CStr::from_ptr(vmmgraph_status_name(status)) }.to_str().unwrap();
        assert_eq!(name(VMMGRAPH_OK), "ok");
        assert_eq!(name(VMMGRAPH_ERROR_OVER_BUDGET), "over budget");
        for status in [-1, 10, 105, 205, 305, 901, i32::MIN, i32::MAX] {
            assert_eq!(name(status), "unknown status");
        }
    }
}

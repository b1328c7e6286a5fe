//! Statuses, and the details of a thread's last failure.

use std::cell::RefCell;
use std::ffi::c_char;

use super::guard::guard_anywhere;
use super::sized::OutStruct;
use super::text::copy_text;
use crate::error::Error;

/// The result of a call: VMMGRAPH_OK or one of the VMMGRAPH_ERROR numbers. Numbers are never reused; treat an unknown one as a
/// failure.
pub type vmmgraph_status_t = i32;

/// The call did what it says.
pub const VMMGRAPH_OK: i32 = 0;
/// A pointer that must not be null is null.
pub const VMMGRAPH_ERROR_NULL_ARGUMENT: i32 = 1;
/// A number is outside its domain.
pub const VMMGRAPH_ERROR_INVALID_ARGUMENT: i32 = 2;
/// A size is zero or beyond 2^46 bytes, or a page size does not fit the device.
pub const VMMGRAPH_ERROR_INVALID_SIZE: i32 = 3;
/// A handle was destroyed, is of another kind, or never was one.
pub const VMMGRAPH_ERROR_INVALID_HANDLE: i32 = 4;
/// The driver has no device of that number.
pub const VMMGRAPH_ERROR_INVALID_DEVICE: i32 = 5;
/// A pointer is not the start of a live block.
pub const VMMGRAPH_ERROR_FOREIGN_POINTER: i32 = 6;
/// A block was freed before.
pub const VMMGRAPH_ERROR_DOUBLE_FREE: i32 = 7;
/// A struct_size is none that a struct can have, or the struct sets fields that this library does not know.
pub const VMMGRAPH_ERROR_STRUCT_SIZE: i32 = 8;
/// The library that is loaded has another ABI version than the header (the C++ API checks this).
pub const VMMGRAPH_ERROR_ABI_MISMATCH: i32 = 9;
/// The object is in another state than the call needs.
pub const VMMGRAPH_ERROR_WRONG_STATE: i32 = 100;
/// The object was closed by an earlier internal error; it can only be destroyed.
pub const VMMGRAPH_ERROR_CLOSED: i32 = 101;
/// The device is open with other settings.
pub const VMMGRAPH_ERROR_DEVICE_IN_USE: i32 = 102;
/// The stream of the last replay is being captured; or something is, on a platform where nobody may wait for the device then.
pub const VMMGRAPH_ERROR_STREAM_CAPTURING: i32 = 103;
/// Ranks that compare their replays had different ones; vmmgraph_last_error_message names the first.
pub const VMMGRAPH_ERROR_RANKS_DIFFER: i32 = 104;
/// The device's memory is used up. Nothing has changed.
pub const VMMGRAPH_ERROR_OUT_OF_MEMORY: i32 = 200;
/// The byte budget of the device or of the arena is used up; vmmgraph_last_error_message says whose. Nothing has changed.
pub const VMMGRAPH_ERROR_OVER_BUDGET: i32 = 201;
/// No address range of that length is left. Nothing has changed.
pub const VMMGRAPH_ERROR_OUT_OF_ADDRESSES: i32 = 202;
/// The process has no file descriptor left (host driver). Nothing has changed.
pub const VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS: i32 = 203;
/// No host memory is left for contents: the host pool's limit is reached, or the machine has no more.
pub const VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY: i32 = 204;
/// The driver refused a call; vmmgraph_last_error names the call and its result.
pub const VMMGRAPH_ERROR_DRIVER: i32 = 300;
/// The driver's library cannot be loaded.
pub const VMMGRAPH_ERROR_DRIVER_MISSING: i32 = 301;
/// The driver's library is too old, or not one that this library works with.
pub const VMMGRAPH_ERROR_DRIVER_TOO_OLD: i32 = 302;
/// The device has no virtual memory management, or does not offer what the call needs.
pub const VMMGRAPH_ERROR_UNSUPPORTED: i32 = 303;
/// Host memory could not be registered with the device (pinned), and the call takes no other.
pub const VMMGRAPH_ERROR_HOST_NOT_REGISTERED: i32 = 304;
/// A bug in the library; the arena is closed, the process goes on.
pub const VMMGRAPH_ERROR_INTERNAL: i32 = 900;

/// The name of a status, such as "out of memory"; "unknown status" for any other number. Static, zero-terminated.
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
        VMMGRAPH_ERROR_RANKS_DIFFER => c"ranks differ",
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

/// The numbers behind a failure. What does not apply is 0, the device -1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_error_info_t {
    /// Set to sizeof(vmmgraph_error_info_t) before the call.
    pub struct_size: usize,
    /// The status the call returned.
    pub status: vmmgraph_status_t,
    /// The driver's own result.
    pub driver_result: i32,
    /// The device's number.
    pub device: i32,
    /// 0.
    pub reserved: i32,
    /// Bytes asked for, or missing where memory was short; or the address or argument that was refused.
    pub requested: u64,
    /// Bytes there were: free on the device, or left in the budget, or the limit of a size.
    pub available: u64,
}

thread_local! {
    static LAST: RefCell<Option<(vmmgraph_status_t, Error)>> = const { RefCell::new(None) };
}

/// Keeps a failure for the thread; its status.
pub(super) fn remember(error: Error) -> vmmgraph_status_t {
    remember_as(status_of(&error), error)
}

pub(super) fn remember_as(status: vmmgraph_status_t, error: Error) -> vmmgraph_status_t {
    // A thread that is ending has no place for it any more.
    let _ = LAST.try_with(|last| *last.borrow_mut() = Some((status, error)));
    status
}

/// The thread's last failure; none on a thread that is ending.
fn last() -> Option<(vmmgraph_status_t, Error)> {
    LAST.try_with(|last| last.borrow().clone()).ok().flatten()
}

/// Runs what may fail for reasons of its own: the thread's last failure is the same before and after.
pub(super) fn keeping_last(body: impl FnOnce()) {
    let kept = LAST.try_with(|last| last.borrow().clone());
    body();
    if let Ok(kept) = kept {
        let _ = LAST.try_with(|last| *last.borrow_mut() = kept);
    }
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
        Error::RanksDiffer { .. } => VMMGRAPH_ERROR_RANKS_DIFFER,
        Error::OutOfMemory { .. } => VMMGRAPH_ERROR_OUT_OF_MEMORY,
        Error::OverBudget { .. } => VMMGRAPH_ERROR_OVER_BUDGET,
        Error::OutOfAddresses { .. } => VMMGRAPH_ERROR_OUT_OF_ADDRESSES,
        Error::OutOfDescriptors { .. } => VMMGRAPH_ERROR_OUT_OF_DESCRIPTORS,
        Error::OutOfHostMemory { .. } => VMMGRAPH_ERROR_OUT_OF_HOST_MEMORY,
        Error::HostNotRegistered { .. } => VMMGRAPH_ERROR_HOST_NOT_REGISTERED,
        Error::StreamCapturing { .. } | Error::DeviceCapturing { .. } => VMMGRAPH_ERROR_STREAM_CAPTURING,
        Error::DriverMissing { .. } => VMMGRAPH_ERROR_DRIVER_MISSING,
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
        Error::InvalidDevice { ordinal, .. } | Error::DeviceInUse { ordinal, .. } => info.device = ordinal,
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
        | Error::RanksDiffer { .. }
        | Error::Exported { .. }
        | Error::Internal { .. } => {}
    }
    info
}

/// The numbers behind this thread's last failure; status VMMGRAPH_OK if there was none. Successful calls leave it alone.
///
/// # Safety
/// `info` is null or points to a vmmgraph_error_info_t whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_last_error(info: *mut vmmgraph_error_info_t) -> vmmgraph_status_t {
    guard_anywhere(|| {
        // SAFETY: the caller's contract.
        let info = unsafe { OutStruct::new(info, "info") }?;
        info.write(match last() {
            Some((status, error)) => describe(status, &error),
            None => describe(VMMGRAPH_OK, &Error::Internal { what: String::new() }),
        });
        Ok(())
    })
}

/// This thread's last failure in words, for people. Copies at most `capacity` bytes, always zero-terminated if capacity is not 0,
/// and writes the bytes needed (terminator included) to `needed`. Either pointer may be null.
///
/// # Safety
/// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_last_error_message(
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    guard_anywhere(|| {
        let text = last().map_or(String::new(), |(_, error)| error.to_string());
        // SAFETY: the caller's contract.
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

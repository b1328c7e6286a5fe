//! Initialisation, result names, devices and contexts.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;

use standin::state::{device, devices, initialise};
use standin::{Why, give};

use crate::answer;
use crate::code::{Code, describe};
use crate::faults::{Call, counted};
use crate::state::{context_of, current, current_context, make_current};

const NAME: &[u8] = b"Stand-in MLU\0";
/// `CN_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED`
const VIRTUAL_ADDRESSES: c_int = 0x30B;

/// Returns the device with this handle: its number plus one.
fn device_of(handle: u64) -> Result<usize, Why> {
    let index =
        handle.checked_sub(1).and_then(|index| c_int::try_from(index).ok()).ok_or(Why::InvalidDevice)?;
    Ok(device(index)?.0)
}

/// Initialises the driver.
#[unsafe(no_mangle)]
pub extern "C" fn cnInit(flags: c_uint) -> Code {
    answer(|| if flags == 0 { initialise("STANDIN_MLU") } else { Err(Why::Invalid) })
}

/// Returns the version; also before `cnInit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnGetLibVersion(major: *mut c_int, minor: *mut c_int, patch: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe {
        give(major, 2)?;
        give(minor, 15)?;
        give(patch, 5)
    })
}

/// Returns the name of a result code; an unknown code gets a sentence, without an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnGetErrorName(code: Code, text: *mut *const c_char) -> Code {
    const NONE: &std::ffi::CStr = c"This error code is not in the scope of the CNresult enumeration";
    let name = describe(code).map_or(NONE, |(name, _)| name);
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(text, name.as_ptr()) })
}

/// Returns the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(count, devices()?.len() as c_int) })
}

/// Returns the handle of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnDeviceGet(out: *mut u64, ordinal: c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(out, device(ordinal)?.0 as u64 + 1) })
}

/// Returns a device's name; the buffer must hold all of it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnDeviceGetName(out: *mut c_char, room: c_uint, handle: u64) -> Code {
    answer(|| {
        device_of(handle)?;
        if out.is_null() || (room as usize) < NAME.len() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; room for the name by the caller's contract.
        unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), out, NAME.len()) };
        Ok(())
    })
}

/// Returns the bytes of a device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnDeviceTotalMem(out: *mut u64, handle: u64) -> Code {
    answer(|| {
        let memory = &devices()?[device_of(handle)?].memory;
        // SAFETY: the caller's contract.
        unsafe { give(out, memory.total()) }
    })
}

/// Returns an attribute of a device; one attribute is known.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnDeviceGetAttribute(out: *mut c_int, attribute: c_int, handle: u64) -> Code {
    answer(|| {
        device_of(handle)?;
        let word = std::env::var("STANDIN_MLU_VMM").unwrap_or_default();
        if attribute != VIRTUAL_ADDRESSES || word == "unknown" {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, c_int::from(word != "none")) }
    })
}

/// Acquires a device's shared context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnSharedContextAcquire(out: *mut *mut c_void, handle: u64) -> Code {
    answer(|| {
        let index = device_of(handle)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, context_of(index)) }?;
        devices()?[index].retained.fetch_add(1, Relaxed);
        Ok(())
    })
}

/// Releases a device's shared context.
#[unsafe(no_mangle)]
pub extern "C" fn cnSharedContextRelease(handle: u64) -> Code {
    answer(|| {
        let retained = &devices()?[device_of(handle)?].retained;
        let less = retained.fetch_update(Relaxed, Relaxed, |count| count.checked_sub(1));
        less.map(drop).map_err(|_| Why::NoContext)
    })
}

/// Returns the thread's context, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnCtxGetCurrent(out: *mut *mut c_void) -> Code {
    answer(|| {
        devices()?;
        // SAFETY: the caller's contract.
        unsafe { give(out, current_context()) }
    })
}

/// Makes a context current; null removes the current one.
#[unsafe(no_mangle)]
pub extern "C" fn cnCtxSetCurrent(context: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        make_current(context)
    })
}

/// Returns free and total bytes of the current context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemGetInfo(free: *mut u64, total: *mut u64) -> Code {
    answer(|| {
        counted(Call::cnMemGetInfo)?;
        let memory = &current()?.1.memory;
        // SAFETY: the caller's contract.
        unsafe {
            give(free, memory.free())?;
            give(total, memory.total())
        }
    })
}

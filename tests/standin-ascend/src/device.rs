//! Initialisation, error messages, devices and contexts.

use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;
use std::sync::atomic::Ordering::Relaxed;

use standin::state::{device, devices, initialise};
use standin::{Why, give};

use crate::code::{Code, REPEAT_INITIALISE, describe};
use crate::faults::{Call, counted};
use crate::state::{context_of, current, device_of, make_current, start, started};
use crate::{LAST, answer};

/// `ACL_HBM_MEM`
const HBM: c_uint = 1;

/// Initialises the runtime; configurations are refused.
#[unsafe(no_mangle)]
pub extern "C" fn aclInit(config: *const c_char) -> Code {
    answer(|| {
        if !config.is_null() {
            return Err(Why::Invalid);
        }
        if !start() {
            return Err(Why::Injected(REPEAT_INITIALISE));
        }
        match initialise("STANDIN_ASCEND") {
            // A machine without devices initialises, too.
            Ok(()) | Err(Why::NoDevice) => Ok(()),
            Err(why) => Err(why),
        }
    })
}

/// Returns the message of the thread's last failure.
#[unsafe(no_mangle)]
pub extern "C" fn aclGetRecentErrMsg() -> *const c_char {
    describe(LAST.get()).map_or(c"EE9999: injected\n\tby a test".as_ptr(), |(_, sentence)| sentence.as_ptr())
}

/// Returns the device's name.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtGetSocName() -> *const c_char {
    static NAME: OnceLock<CString> = OnceLock::new();
    let name = || std::env::var("STANDIN_ASCEND_SOC").ok().and_then(|name| CString::new(name).ok());
    NAME.get_or_init(|| name().unwrap_or_else(|| c"Stand-in NPU".into())).as_ptr()
}

/// Returns the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDeviceCount(count: *mut c_uint) -> Code {
    answer(|| {
        started()?;
        // SAFETY: the caller's contract.
        unsafe { give(count, devices().map_or(0, <[_]>::len) as c_uint) }
    })
}

/// Sets a device and makes its default context current.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDevice(ordinal: c_int) -> Code {
    answer(|| {
        started()?;
        let (index, device) = device(ordinal)?;
        device.retained.fetch_add(1, Relaxed);
        make_current(index);
        Ok(())
    })
}

/// Returns the device of the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetDevice(ordinal: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(ordinal, current()?.0 as c_int) })
}

/// Returns the thread's context; without one, an error instead of null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetCurrentContext(context: *mut *mut c_void) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(context, context_of(current()?.0)) })
}

/// Makes a context current; null is refused.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetCurrentContext(context: *mut c_void) -> Code {
    answer(|| {
        started()?;
        if context.is_null() {
            return Err(Why::Invalid);
        }
        make_current(device_of(context)?);
        Ok(())
    })
}

/// Returns free and total bytes of the current context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtGetMemInfo(attribute: c_uint, free: *mut usize, total: *mut usize) -> Code {
    answer(|| {
        counted(Call::aclrtGetMemInfo)?;
        let memory = &current()?.1.memory;
        if attribute != HBM {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe {
            give(free, memory.free() as usize)?;
            give(total, memory.total() as usize)
        }
    })
}

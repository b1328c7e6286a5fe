//! Initialisation, error texts and devices.

use std::ffi::{c_char, c_int, c_uint};

use standin::state::{device, devices, initialise};
use standin::{Why, capture, give};

use crate::code::{Code, describe};
use crate::faults::{Call, counted};
use crate::{CURRENT, answer, current};

const NAME: &[u8] = b"Stand-in AMD GPU\0";

/// Initialises the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn hipInit(flags: c_uint) -> Code {
    answer(|| if flags == 0 { initialise("STANDIN_HIP") } else { Err(Why::Invalid) })
}

/// Returns the version, also before `hipInit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(version, crate::control::version()) })
}

/// Returns the name of a result code; unknown codes have one, too.
#[unsafe(no_mangle)]
pub extern "C" fn hipGetErrorName(error: Code) -> *const c_char {
    describe(error).map_or(c"hipErrorUnknown", |(name, _)| name).as_ptr()
}

/// Returns the number of devices. Unlike CUDA's function, it initialises the runtime.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDeviceCount(count: *mut c_int) -> Code {
    answer(|| {
        initialise("STANDIN_HIP")?;
        // SAFETY: the caller's contract.
        unsafe { give(count, devices()?.len() as c_int) }
    })
}

/// Makes a device the thread's current one.
#[unsafe(no_mangle)]
pub extern "C" fn hipSetDevice(ordinal: c_int) -> Code {
    answer(|| {
        device(ordinal)?;
        CURRENT.set(ordinal);
        Ok(())
    })
}

/// Returns the thread's current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGetDevice(ordinal: *mut c_int) -> Code {
    answer(|| {
        devices()?;
        // SAFETY: the caller's contract.
        unsafe { give(ordinal, CURRENT.get()) }
    })
}

/// Returns the device's name, cut to the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetName(name: *mut c_char, len: c_int, dev: c_int) -> Code {
    answer(|| {
        device(dev)?;
        let room = usize::try_from(len).unwrap_or(0);
        if name.is_null() || room == 0 {
            return Err(Why::Invalid);
        }
        let count = room.min(NAME.len()) - 1;
        // SAFETY: the buffer has `room` bytes by the caller's contract, more than `count`.
        unsafe {
            std::ptr::copy_nonoverlapping(NAME.as_ptr().cast(), name, count);
            name.add(count).write(0);
        }
        Ok(())
    })
}

/// Returns an attribute: 89 is virtual memory management.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceGetAttribute(value: *mut c_int, attribute: c_int, dev: c_int) -> Code {
    answer(|| {
        device(dev)?;
        // SAFETY: the caller's contract.
        unsafe { give(value, c_int::from(attribute == 89)) }
    })
}

/// Returns true: all devices can access each other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceCanAccessPeer(can: *mut c_int, dev: c_int, peer: c_int) -> Code {
    answer(|| {
        let (asking, asked) = (device(dev)?.0, device(peer)?.0);
        // SAFETY: the caller's contract.
        unsafe { give(can, c_int::from(asking != asked)) }
    })
}

/// Returns the bytes of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipDeviceTotalMem(bytes: *mut usize, dev: c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(bytes, device(dev)?.1.memory.total() as usize) })
}

/// Waits for the idle device. Invalidates all captures of the process, in any mode.
#[unsafe(no_mangle)]
pub extern "C" fn hipDeviceSynchronize() -> Code {
    answer(|| {
        current()?;
        if capture::table().invalidate_all() { Err(Why::CaptureUnsupported) } else { Ok(()) }
    })
}

/// Returns free and total bytes of the current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemGetInfo(free: *mut usize, total: *mut usize) -> Code {
    answer(|| {
        counted(Call::hipMemGetInfo)?;
        let memory = &current()?.1.memory;
        // SAFETY: the caller's contract.
        unsafe {
            give(free, memory.free() as usize)?;
            give(total, memory.total() as usize)
        }
    })
}

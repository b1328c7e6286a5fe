//! Initialisation, error texts, devices and contexts.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Relaxed;

use standin::state::{device, devices, initialise};
use standin::{Why, capture, give};

use crate::answer;
use crate::code::{Code, code_of, describe};
use crate::faults::{Call, counted};
use crate::state::{Context, context_of, context_with, contexts, current};

/// Version 13.0.
const VERSION: c_int = 13000;
const NAME: &[u8] = b"Stand-in GPU\0";

/// Initialises the driver.
#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> Code {
    answer(|| if flags == 0 { initialise("STANDIN_CUDA") } else { Err(Why::Invalid) })
}

/// Returns the version; as with CUDA, also before `cuInit`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(version, VERSION) })
}

/// Returns the name of a result code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(error: Code, text: *mut *const c_char) -> Code {
    let known = describe(error);
    // SAFETY: the caller's contract. As with CUDA, an unknown code gives null and an error.
    answer(|| unsafe { give(text, known.map_or(std::ptr::null(), |(name, _)| name.as_ptr())) })
        .max(if known.is_some() { 0 } else { code_of(Why::Invalid) })
}

/// Returns a sentence about a result code.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(error: Code, text: *mut *const c_char) -> Code {
    let known = describe(error);
    // SAFETY: as above.
    answer(|| unsafe { give(text, known.map_or(std::ptr::null(), |(_, sentence)| sentence.as_ptr())) })
        .max(if known.is_some() { 0 } else { code_of(Why::Invalid) })
}

/// Returns the number of devices.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(count, devices()?.len() as c_int) })
}

/// Returns the device of an ordinal: the ordinal.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGet(out: *mut c_int, ordinal: c_int) -> Code {
    answer(|| {
        device(ordinal)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, ordinal) }
    })
}

/// Returns the device's name, cut to the buffer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, len: c_int, dev: c_int) -> Code {
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

/// Returns an attribute; 0 for attributes without meaning for a stand-in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, dev: c_int) -> Code {
    answer(|| {
        device(dev)?;
        let number = match attribute {
            // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
            16 => 132,
            // CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, ..._VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
            // ..._HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            41 | 102 | 103 => 1,
            // CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
            // ..._HANDLE_TYPE_FABRIC_SUPPORTED (a process may still lack permission)
            110 | 128 => 1,
            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
            75 => 9,
            1..=255 => 0,
            _ => return Err(Why::Invalid),
        };
        // SAFETY: the caller's contract.
        unsafe { give(value, number) }
    })
}

/// Returns true: all devices can access each other.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceCanAccessPeer(can: *mut c_int, dev: c_int, peer: c_int) -> Code {
    answer(|| {
        let (asking, asked) = (device(dev)?.0, device(peer)?.0);
        // SAFETY: the caller's contract.
        unsafe { give(can, c_int::from(asking != asked)) }
    })
}

/// Returns the bytes of the device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, dev: c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(bytes, device(dev)?.1.memory.total() as usize) })
}

/// Retains the device's primary context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuDevicePrimaryCtxRetain(context: *mut *mut c_void, dev: c_int) -> Code {
    answer(|| {
        let (index, device) = device(dev)?;
        // SAFETY: the caller's contract.
        unsafe { give(context, context_of(Context { device: index, green: 0 })) }?;
        device.retained.fetch_add(1, Relaxed);
        Ok(())
    })
}

/// Releases the device's primary context. The last release destroys its streams, events and
/// captures.
#[unsafe(no_mangle)]
pub extern "C" fn cuDevicePrimaryCtxRelease_v2(dev: c_int) -> Code {
    answer(|| {
        let (index, device) = device(dev)?;
        let before = device.retained.fetch_update(Relaxed, Relaxed, |n| n.checked_sub(1));
        if before.map_err(|_| Why::NoContext)? == 1 {
            capture::table().forget(index);
        }
        Ok(())
    })
}

/// Pushes a context on the thread's stack.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxPushCurrent_v2(context: *mut c_void) -> Code {
    answer(|| {
        let context = context_with(context)?;
        contexts(|stack| {
            stack.push(context);
            Ok(())
        })
    })
}

/// Pops the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxPopCurrent_v2(context: *mut *mut c_void) -> Code {
    answer(|| {
        let popped = contexts(|stack| stack.pop().ok_or(Why::NoContext))?;
        if context.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract. CUDA allows null.
        unsafe { give(context, context_of(popped)) }
    })
}

/// Returns the thread's current context, or null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetCurrent(context: *mut *mut c_void) -> Code {
    answer(|| {
        let top = contexts(|stack| Ok(stack.last().copied()))?;
        // SAFETY: the caller's contract.
        unsafe { give(context, top.map_or(std::ptr::null_mut(), context_of)) }
    })
}

/// Replaces the thread's current context; null removes it.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSetCurrent(context: *mut c_void) -> Code {
    answer(|| {
        let context = if context.is_null() { None } else { Some(context_with(context)?) };
        contexts(|stack| {
            stack.pop();
            stack.extend(context);
            Ok(())
        })
    })
}

/// Returns the device of the current context.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuCtxGetDevice(out: *mut c_int) -> Code {
    // SAFETY: the caller's contract.
    answer(|| unsafe { give(out, current()?.0 as c_int) })
}

/// Waits for the idle device. Refused during a capture on a stream of the context, which is then
/// invalidated.
#[unsafe(no_mangle)]
pub extern "C" fn cuCtxSynchronize() -> Code {
    answer(|| {
        if capture::table().invalidate_device(current()?.0) { Err(Why::CaptureUnsupported) } else { Ok(()) }
    })
}

/// Returns free and total bytes of the current device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> Code {
    answer(|| {
        counted(Call::cuMemGetInfo_v2)?;
        let memory = &current()?.1.memory;
        // SAFETY: the caller's contract.
        unsafe {
            give(free, memory.free() as usize)?;
            give(total, memory.total() as usize)
        }
    })
}

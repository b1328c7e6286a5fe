//! Copies, fills and pinned host memory.

use std::ffi::{c_int, c_uint, c_void};

use standin::capture::{Target, table};
use standin::state::{RELAXED, capture_mode};
use standin::{Answer, Why, graph, host};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, target};

const HOST_TO_DEVICE: c_uint = 1;
const DEVICE_TO_HOST: c_uint = 2;
const DEVICE_TO_DEVICE: c_uint = 3;
/// `ACL_HOST_REG_PINNED`
const PINNED: c_uint = 0x1000_0000;

/// Refuses synchronous work during a capture, and invalidates the capture, unless the thread's mode
/// is relaxed.
fn synchronous() -> Answer {
    let (device, _) = current()?;
    if capture_mode() != RELAXED && table().invalidate_device(device) {
        Err(Why::NotPermitted)
    } else {
        Ok(())
    }
}

/// Copies at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpy(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    len: usize,
    kind: c_uint,
) -> Code {
    answer(|| {
        synchronous()?;
        if room < len {
            return Err(Why::Invalid);
        }
        match kind {
            // SAFETY: the caller's contract.
            HOST_TO_DEVICE => unsafe { graph::write(to as u64, from.cast(), len) },
            // SAFETY: the caller's contract.
            DEVICE_TO_HOST => unsafe { graph::read(to.cast(), from as u64, len) },
            _ => Err(Why::Invalid),
        }
    })
}

/// Copies in stream order; host copies at once, and not into a capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMemcpyAsync(
    to: *mut c_void,
    room: usize,
    from: *const c_void,
    len: usize,
    kind: c_uint,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::aclrtMemcpyAsync)?;
        let target = target(stream)?;
        if room < len {
            return Err(Why::Invalid);
        }
        match kind {
            HOST_TO_DEVICE => {
                of_host(from as usize, len, target)?;
                // SAFETY: the caller's contract.
                unsafe { graph::write(to as u64, from.cast(), len) }
            }
            DEVICE_TO_HOST => {
                of_host(to as usize, len, target)?;
                // SAFETY: the caller's contract.
                unsafe { graph::read(to.cast(), from as u64, len) }
            }
            DEVICE_TO_DEVICE => graph::copy(target, to as u64, from as u64, len as u64),
            _ => Err(Why::Invalid),
        }
    })
}

/// Checks a host copy: pageable memory makes it synchronous.
fn of_host(start: usize, len: usize, target: Target) -> Answer {
    host::check(start, len, target).map_err(|why| match why {
        Why::CaptureUnsupported => Why::Invalid,
        other => other,
    })?;
    synchronous()
}

/// Repeats a byte in stream order.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemsetAsync(
    at: *mut c_void,
    room: usize,
    value: c_int,
    len: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::aclrtMemsetAsync)?;
        let target = target(stream)?;
        let byte = u8::try_from(value).map_err(|_| Why::Invalid)?;
        if room < len || !len.is_multiple_of(4) {
            return Err(Why::Invalid);
        }
        graph::fill(target, at as u64, len as u64 / 4, u32::from_ne_bytes([byte; 4]))
    })
}

/// Repeats 32 bits in stream order. CANN before 9.1 lacks this function.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtMemsetD32Async(
    at: *mut c_void,
    room: usize,
    value: c_uint,
    count: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::aclrtMemsetD32Async)?;
        let target = target(stream)?;
        let refuse = std::env::var_os("STANDIN_ASCEND_D32").is_some_and(|word| word == "refuse");
        if refuse || room / 4 < count {
            return Err(Why::Invalid);
        }
        graph::fill(target, at as u64, count as u64, value)
    })
}

/// Pins host memory. CANN before 8.5 lacks this function.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtHostRegisterV2(at: *mut c_void, len: u64, flag: c_uint) -> Code {
    answer(|| {
        counted(Call::aclrtHostRegisterV2)?;
        current()?;
        let start = at as usize;
        if flag != PINNED || !start.is_multiple_of(4096) {
            return Err(Why::Invalid);
        }
        host::register(start, usize::try_from(len).map_err(|_| Why::Invalid)?)
    })
}

/// Unpins host memory.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtHostUnregister(at: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtHostUnregister)?;
        current()?;
        host::unregister(at as usize)
    })
}

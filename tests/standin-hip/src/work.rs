//! Fills, copies, registered host memory and graphs.

use std::ffi::{c_int, c_uint, c_void};

use standin::capture::table;
use standin::state::devices;
use standin::{Why, capture, give, graph, host};

use crate::code::Code;
use crate::faults::{Call, counted};
use crate::{answer, current, target};

const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const DEVICE_TO_DEVICE: c_int = 3;

/// Repeats a 32-bit value in stream order.
#[unsafe(no_mangle)]
pub extern "C" fn hipMemsetD32Async(
    at: *mut c_void,
    value: c_int,
    count: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::hipMemsetD32Async)?;
        current()?;
        graph::fill(target(stream)?, at as u64, count as u64, value.cast_unsigned())
    })
}

/// Copies at once. Only copies within device memory can be captured here.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpyAsync(
    to: *mut c_void,
    from: *const c_void,
    len: usize,
    kind: c_int,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::hipMemcpyAsync)?;
        current()?;
        let target = target(stream)?;
        match kind {
            HOST_TO_DEVICE => {
                host::check(from as usize, len, target)?;
                // SAFETY: the caller's contract.
                unsafe { graph::write(to as u64, from.cast(), len) }
            }
            DEVICE_TO_HOST => {
                host::check(to as usize, len, target)?;
                // SAFETY: the caller's contract.
                unsafe { graph::read(to.cast(), from as u64, len) }
            }
            DEVICE_TO_DEVICE => graph::copy(target, to as u64, from as u64, len as u64),
            _ => Err(Why::Invalid),
        }
    })
}

/// Copies and waits. Refused during a capture; invalidates all captures of the process, in any
/// mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipMemcpy(to: *mut c_void, from: *const c_void, len: usize, kind: c_int) -> Code {
    answer(|| {
        current()?;
        if capture::table().invalidate_all() {
            return Err(Why::CaptureImplicit);
        }
        match kind {
            // SAFETY: the caller's contract.
            HOST_TO_DEVICE => unsafe { graph::write(to as u64, from.cast(), len) },
            // SAFETY: the caller's contract.
            DEVICE_TO_HOST => unsafe { graph::read(to.cast(), from as u64, len) },
            _ => Err(Why::NotSupported),
        }
    })
}

/// Registers host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostRegister(at: *mut c_void, len: usize, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::hipHostRegister)?;
        current()?;
        if flags > 15 {
            return Err(Why::Invalid);
        }
        host::register(at as usize, len)
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipHostUnregister(at: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipHostUnregister)?;
        current()?;
        host::unregister(at as usize)
    })
}

/// Instantiates a graph.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipGraphInstantiateWithFlags(
    out: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> Code {
    answer(|| {
        current()?;
        if out.is_null() {
            return Err(Why::Invalid);
        }
        let exec = graph::instantiate(graph as u64)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, exec as *mut c_void) }
    })
}

/// Runs a graph on the current mappings.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| graph::launch(exec as u64, target(stream)?))
}

/// Destroys a graph.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphDestroy(graph: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        table().graphs.remove(&(graph as u64)).map(drop).ok_or(Why::InvalidHandle)
    })
}

/// Destroys an executable graph.
#[unsafe(no_mangle)]
pub extern "C" fn hipGraphExecDestroy(exec: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        table().execs.remove(&(exec as u64)).map(drop).ok_or(Why::InvalidHandle)
    })
}

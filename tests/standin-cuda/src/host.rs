//! Host memory: registration and copies in stream order.

use std::ffi::{c_uint, c_void};

use standin::{Why, graph, host};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, target};

/// Registers host memory; flags: portable, device map, I/O and read only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, len: usize, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuMemHostRegister_v2)?;
        current()?;
        if flags > 15 {
            return Err(Why::Invalid);
        }
        host::register(at as usize, len)
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuMemHostUnregister)?;
        current()?;
        host::unregister(at as usize)
    })
}

/// Copies to host memory at once. Not modelled under capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    len: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuMemcpyDtoHAsync_v2)?;
        current()?;
        host::check(to as usize, len, target(stream)?)?;
        // SAFETY: the caller's contract.
        unsafe { graph::read(to.cast(), from, len) }
    })
}

/// Copies from host memory at once, or captures the copy, as [`graph::load`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuMemcpyHtoDAsync_v2)?;
        current()?;
        // SAFETY: the caller's contract.
        unsafe { graph::load(target(stream)?, to, from.cast(), len) }
    })
}

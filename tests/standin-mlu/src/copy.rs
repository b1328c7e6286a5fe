//! Copies and fills.

use std::ffi::{c_uint, c_void};

use standin::{Answer, Why, graph, host};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, target, unsafe_in_captures};

fn bytes(len: u64) -> Answer<usize> {
    usize::try_from(len).map_err(|_| Why::Invalid)
}

/// Copies to host memory at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemcpyDtoH(to: *mut c_void, from: u64, len: u64) -> Code {
    answer(|| {
        current()?;
        unsafe_in_captures()?;
        // SAFETY: the caller's contract.
        unsafe { graph::read(to.cast(), from, bytes(len)?) }
    })
}

/// Copies from host memory at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemcpyHtoD(to: u64, from: *const c_void, len: u64) -> Code {
    answer(|| {
        current()?;
        unsafe_in_captures()?;
        // SAFETY: the caller's contract.
        unsafe { graph::write(to, from.cast(), bytes(len)?) }
    })
}

/// Copies to host memory in queue order; not into a capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemcpyDtoHAsync_V2(
    to: *mut c_void,
    from: u64,
    len: u64,
    queue: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cnMemcpyDtoHAsync_V2)?;
        host::check(to as usize, bytes(len)?, target(queue)?)?;
        // SAFETY: the caller's contract.
        unsafe { graph::read(to.cast(), from, bytes(len)?) }
    })
}

/// Copies from host memory in queue order; not into a capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnMemcpyHtoDAsync_V2(
    to: u64,
    from: *const c_void,
    len: u64,
    queue: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cnMemcpyHtoDAsync_V2)?;
        host::check(from as usize, bytes(len)?, target(queue)?)?;
        // SAFETY: the caller's contract.
        unsafe { graph::write(to, from.cast(), bytes(len)?) }
    })
}

/// Copies within device memory in queue order.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemcpyDtoDAsync(to: u64, from: u64, len: u64, queue: *mut c_void) -> Code {
    answer(|| graph::copy(target(queue)?, to, from, len))
}

/// Repeats 32 bits in queue order.
#[unsafe(no_mangle)]
pub extern "C" fn cnMemsetD32Async(at: u64, value: c_uint, count: u64, queue: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnMemsetD32Async)?;
        graph::fill(target(queue)?, at, count, value)
    })
}

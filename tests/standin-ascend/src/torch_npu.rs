//! Functions that torch_npu calls besides the driver's, so that its own libraries run over this
//! stand-in (scripts/torch_npu.sh): plain memory, and settings without effect.

use std::ffi::{c_char, c_int, c_uint, c_void};

use standin::state::device_at;
use standin::{Why, give, refused};

use crate::answer;
use crate::code::Code;
use crate::state::{current, notes};

/// Allocates memory of the current context's device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMalloc(out: *mut *mut c_void, size: usize, _policy: c_uint) -> Code {
    answer(|| {
        let memory = &current()?.1.memory;
        if size == 0 || out.is_null() {
            return Err(Why::Invalid);
        }
        let whole = (size as u64).next_multiple_of(memory.granularity());
        let base = memory.reserve(whole).map_err(refused)?;
        let page = memory.create(whole).map_err(|why| {
            let _ = memory.free_addresses(base, whole);
            refused(why)
        })?;
        let shown = memory.map(base, whole, 0, page).and_then(|()| memory.set_access(base, whole));
        // The mapping keeps the memory alive.
        memory.release(page).map_err(refused)?;
        shown.map_err(refused)?;
        notes().plain.insert(base, whole);
        // SAFETY: the caller's contract.
        unsafe { give(out, base as *mut c_void) }
    })
}

/// As `aclrtMalloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocAlign32(out: *mut *mut c_void, size: usize, policy: c_uint) -> Code {
    // SAFETY: the caller's contract.
    unsafe { aclrtMalloc(out, size, policy) }
}

/// Frees memory of `aclrtMalloc`.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtFree(base: *mut c_void) -> Code {
    answer(|| {
        let base = base as u64;
        let size = notes().plain.remove(&base).ok_or(Why::Invalid)?;
        let memory = &device_at(base)?.1.memory;
        memory.unmap(base, size).map_err(refused)?;
        memory.free_addresses(base, size).map_err(refused)
    })
}

/// Ignores a log line and its variadic arguments.
#[unsafe(no_mangle)]
pub extern "C" fn aclAppLog(
    _level: c_int,
    _function: *const c_char,
    _file: *const c_char,
    _line: c_uint,
    _format: *const c_char,
) {
}

/// Accepts and ignores the overflow mode.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDeviceSatMode(_mode: c_int) -> Code {
    answer(|| current().map(drop))
}

/// Accepts and ignores the time limit of operators.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetOpExecuteTimeOut(_seconds: c_uint) -> Code {
    answer(|| current().map(drop))
}

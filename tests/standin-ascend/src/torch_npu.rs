//! What torch_npu asks of the runtime besides the driver's calls, so that its own libraries run over this one (scripts/torch_npu.sh): memory without
//! addresses of one's own, and settings, which are taken and make no difference.

use std::ffi::{c_char, c_int, c_uint, c_void};

use standin::state::device_at;
use standin::{Why, give, refused};

use crate::answer;
use crate::code::Code;
use crate::state::{current, notes};

/// Memory of the current context's device.
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
        // The memory stays while it is mapped.
        memory.release(page).map_err(refused)?;
        shown.map_err(refused)?;
        notes().plain.insert(base, whole);
        // SAFETY: the caller's contract.
        unsafe { give(out, base as *mut c_void) }
    })
}

/// The same.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtMallocAlign32(out: *mut *mut c_void, size: usize, policy: c_uint) -> Code {
    // SAFETY: the caller's contract.
    unsafe { aclrtMalloc(out, size, policy) }
}

/// Gives it back.
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

/// Takes a line of the log, whatever follows its format.
#[unsafe(no_mangle)]
pub extern "C" fn aclAppLog(
    _level: c_int,
    _function: *const c_char,
    _file: *const c_char,
    _line: c_uint,
    _format: *const c_char,
) {
}

/// How overflows saturate.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetDeviceSatMode(_mode: c_int) -> Code {
    answer(|| current().map(drop))
}

/// How long an operator may take.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSetOpExecuteTimeOut(_seconds: c_uint) -> Code {
    answer(|| current().map(drop))
}

use std::ffi::{CStr, c_char};
use std::ptr;

use super::guard::{Failure, not_null};

pub(super) unsafe fn copy_text(text: &str, buffer: *mut c_char, capacity: usize, needed: *mut usize) {
    if !buffer.is_null() && capacity > 0 {
        let length = text.len().min(capacity - 1);
        // SAFETY: `length` + 1 <= `capacity` bytes are writable (contract).
        unsafe {
            ptr::copy_nonoverlapping(text.as_ptr().cast(), buffer, length);
            *buffer.add(length) = 0;
        }
    }
    if !needed.is_null() {
        // SAFETY: writable by the caller's contract.
        unsafe { *needed = text.len() + 1 };
    }
}

pub(super) unsafe fn text(pointer: *const c_char, what: &'static str) -> Result<String, Failure> {
    not_null(pointer, what)?;
    // SAFETY: not null, so a string by the caller's contract.
    Ok(unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned())
}

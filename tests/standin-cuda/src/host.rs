//! Host memory: registering it, and copies of it in a stream's order.

use std::collections::BTreeMap;
use std::ffi::{c_uint, c_void};

use parking_lot::Mutex;

use crate::answer;
use crate::capture::{table, target};
use crate::code::{
    ALREADY_REGISTERED, Answer, CAPTURE_UNSUPPORTED, Code, INVALID_VALUE, NOT_REGISTERED, refused,
};
use crate::faults::{Call, counted};
use crate::state::{current, device_at};

/// Registered memory: beginning to length.
static REGISTERED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

/// How many registrations there are.
pub(crate) fn registrations() -> u64 {
    REGISTERED.lock().len() as u64
}

/// Registers host memory; any of the flags portable, device map, I/O and read only.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, len: usize, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuMemHostRegister_v2)?;
        current()?;
        let start = at as usize;
        if at.is_null() || len == 0 || flags > 15 || start.checked_add(len).is_none() {
            return Err(INVALID_VALUE);
        }
        let mut registered = REGISTERED.lock();
        let before = registered.range(..start + len).next_back();
        if before.is_some_and(|(other, bytes)| other + bytes > start) {
            return Err(ALREADY_REGISTERED);
        }
        registered.insert(start, len);
        Ok(())
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemHostUnregister(at: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuMemHostUnregister)?;
        current()?;
        REGISTERED.lock().remove(&(at as usize)).map(drop).ok_or(NOT_REGISTERED)
    })
}

/// What both directions refuse: a stream under capture, which is not modelled, and a copy over the end of a registration.
fn check(host: *const c_void, len: usize, stream: *mut c_void) -> Answer {
    current()?;
    if table().enter(target(stream)?)?.is_some() {
        return Err(CAPTURE_UNSUPPORTED);
    }
    let start = host as usize;
    let end = start.checked_add(len).filter(|_| !host.is_null()).ok_or(INVALID_VALUE)?;
    let registered = REGISTERED.lock();
    let crosses = registered
        .iter()
        .any(|(at, bytes)| *at < end && at + bytes > start && !(*at <= start && end <= at + bytes));
    if crosses || len > isize::MAX as usize { Err(INVALID_VALUE) } else { Ok(()) }
}

/// Copies to host memory, in the stream's order: at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: *mut c_void,
    from: u64,
    len: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuMemcpyDtoHAsync_v2)?;
        check(to, len, stream)?;
        // SAFETY: not null, and then room for `len` bytes by the caller's contract.
        let into = unsafe { std::slice::from_raw_parts_mut(to.cast::<u8>(), len) };
        device_at(from)?.1.memory.read(from, into).map_err(refused)
    })
}

/// Copies from host memory, in the stream's order: at once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuMemcpyHtoDAsync_v2)?;
        check(from, len, stream)?;
        // SAFETY: not null, and then `len` bytes by the caller's contract.
        let bytes = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), len) };
        device_at(to)?.1.memory.write(to, bytes).map_err(refused)
    })
}

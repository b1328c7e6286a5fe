//! Streams, events and stream capture.

use std::ffi::{c_int, c_uint, c_void};

use standin::capture::table;
use standin::faults::{busy, keep_busy};
use standin::state::{devices, exchange_capture_mode};
use standin::{Why, give};

use crate::code::Code;
use crate::faults::{Call, counted};
use crate::{answer, current, may_wait, target};

/// Marks the device as idle, after a wait for the device.
pub(crate) fn device_is_idle() {
    keep_busy(0);
}

/// Creates a stream; flag 1 is non-blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamCreateWithFlags(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::hipStreamCreateWithFlags)?;
        let (device, _) = current()?;
        if out.is_null() || flags > 1 {
            return Err(Why::Invalid);
        }
        let stream = table().add_stream(device, flags == 0);
        // SAFETY: the caller's contract.
        unsafe { give(out, stream as *mut c_void) }
    })
}

/// Destroys a stream.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamDestroy(stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipStreamDestroy)?;
        devices()?;
        table().remove_stream(stream as u64)
    })
}

/// Waits for a stream.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamSynchronize(stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipStreamSynchronize)?;
        current()?;
        may_wait()?;
        let target = target(stream)?;
        table().synchronise(target)
    })
}

/// Returns the capture status of a stream: 0 none, 1 active, 2 invalidated. Allowed in every mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> Code {
    answer(|| {
        counted(Call::hipStreamIsCapturing)?;
        let target = target(stream)?;
        let state = table().status(target)?;
        // SAFETY: the caller's contract.
        unsafe { give(status, state) }
    })
}

/// Makes a stream wait for an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::hipStreamWaitEvent)?;
        current()?;
        if flags != 0 {
            return Err(Why::Invalid);
        }
        let target = target(stream)?;
        table().wait(target, event as u64, false)
    })
}

/// Begins to capture a stream.
#[unsafe(no_mangle)]
pub extern "C" fn hipStreamBeginCapture(stream: *mut c_void, mode: c_int) -> Code {
    answer(|| {
        let target = target(stream)?;
        table().begin(target, mode)
    })
}

/// Ends a capture and writes its graph, or null in case of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipStreamEndCapture(stream: *mut c_void, out: *mut *mut c_void) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { give(out, std::ptr::null_mut()) }?;
        let target = target(stream)?;
        let graph = table().end(target)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, graph as *mut c_void) }
    })
}

/// Exchanges the calling thread's capture mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int) -> Code {
    answer(|| {
        devices()?;
        if mode.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; readable by the caller's contract.
        let before = exchange_capture_mode(unsafe { mode.read() })?;
        // SAFETY: the caller's contract.
        unsafe { give(mode, before) }
    })
}

/// Creates an event without a record.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn hipEventCreateWithFlags(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::hipEventCreateWithFlags)?;
        let (device, _) = current()?;
        if out.is_null() || flags > 3 {
            return Err(Why::Invalid);
        }
        let event = table().add_event(device);
        // SAFETY: the caller's contract.
        unsafe { give(out, event as *mut c_void) }
    })
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventDestroy(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipEventDestroy)?;
        devices()?;
        table().remove_event(event as u64)
    })
}

/// Records an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventRecord(event: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipEventRecord)?;
        current()?;
        let target = target(stream)?;
        table().record(event as u64, target)
    })
}

/// Queries an event.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventQuery(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipEventQuery)?;
        current()?;
        table().happened(event as u64)?;
        if busy() { Err(Why::NotReady) } else { Ok(()) }
    })
}

/// Waits until an event has happened.
#[unsafe(no_mangle)]
pub extern "C" fn hipEventSynchronize(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::hipEventSynchronize)?;
        current()?;
        may_wait()?;
        table().happened(event as u64)
    })
}

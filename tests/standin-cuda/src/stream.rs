//! Streams, events and stream capture.

use std::ffi::{c_int, c_uint, c_void};

use standin::capture::{Target, table};
use standin::faults::busy;
use standin::state::{devices, exchange_capture_mode};
use standin::{Why, give};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::graph::arrived;
use crate::state::{current, target};

/// `CU_EVENT_WAIT_EXTERNAL`
const WAIT_EXTERNAL: c_uint = 1;

/// Creates a stream; flag 1 is non-blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuStreamCreate)?;
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
pub extern "C" fn cuStreamDestroy_v2(stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuStreamDestroy_v2)?;
        devices()?;
        table().remove_stream(stream as u64)
    })
}

/// Waits for a stream and the staged copies.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> Code {
    answer(|| {
        current()?;
        let target = target(stream)?;
        table().permit()?;
        table().synchronise(target)?;
        if matches!(target, Target::Legacy { .. }) {
            arrived();
        }
        Ok(())
    })
}

/// Returns the capture status of a stream: 0 none, 1 active, 2 invalidated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> Code {
    answer(|| {
        counted(Call::cuStreamIsCapturing)?;
        let target = target(stream)?;
        let state = table().status(target)?;
        // SAFETY: the caller's contract.
        unsafe { give(status, state) }
    })
}

/// Makes a stream wait for an event.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamWaitEvent(stream: *mut c_void, event: *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuStreamWaitEvent)?;
        current()?;
        if flags > WAIT_EXTERNAL {
            return Err(Why::Invalid);
        }
        let target = target(stream)?;
        table().wait(target, event as u64, flags == WAIT_EXTERNAL)
    })
}

/// Begins a capture. No mode forbids VMM calls (measured).
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> Code {
    answer(|| {
        let target = target(stream)?;
        table().begin(target, mode)
    })
}

/// Ends a capture and writes its graph, or null in case of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, out: *mut *mut c_void) -> Code {
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
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> Code {
    answer(|| {
        devices()?;
        if mode.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; readable by the caller's contract.
        let wanted = unsafe { mode.read() };
        let before = exchange_capture_mode(wanted)?;
        // SAFETY: the caller's contract.
        unsafe { give(mode, before) }
    })
}

/// Creates an event without a record.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuEventCreate)?;
        let (device, _) = current()?;
        // Blocking sync 1, no timing 2; interprocess events (4) are not offered.
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
pub extern "C" fn cuEventDestroy_v2(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventDestroy_v2)?;
        current()?;
        table().remove_event(event as u64)
    })
}

/// Records an event.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventRecord(event: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventRecord)?;
        current()?;
        let target = target(stream)?;
        table().record(event as u64, target)
    })
}

/// Queries an event: happened, unless captured or the tests keep the device busy.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventQuery)?;
        current()?;
        table().permit()?;
        table().happened(event as u64)?;
        if busy() { Err(Why::NotReady) } else { Ok(()) }
    })
}

/// Waits until an event has happened.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventSynchronize)?;
        current()?;
        table().permit()?;
        table().happened(event as u64)
    })
}

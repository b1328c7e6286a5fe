//! Streams, events and stream capture.

use std::ffi::{c_int, c_uint, c_void};

use crate::capture::{Target, table, target};
use crate::code::{
    CAPTURE_IMPLICIT, CAPTURE_INVALIDATED, CAPTURE_UNJOINED, CAPTURE_UNMATCHED, CAPTURE_UNSUPPORTED,
    CAPTURE_WRONG_THREAD, Code, ILLEGAL_STATE, INVALID_VALUE, NOT_READY,
};
use crate::faults::{Call, busy, counted};
use crate::state::{CAPTURE_MODE, current, devices};
use crate::{answer, give};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`; GLOBAL is 0, THREAD_LOCAL 1.
const RELAXED: c_int = 2;
/// `CU_EVENT_WAIT_EXTERNAL`
const WAIT_EXTERNAL: c_uint = 1;

/// Creates a stream; flag 1 is non-blocking.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamCreate(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuStreamCreate)?;
        let (device, _) = current()?;
        if out.is_null() || flags > 1 {
            return Err(INVALID_VALUE);
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

/// Waits for a stream, whose work is always done.
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamSynchronize(stream: *mut c_void) -> Code {
    answer(|| {
        current()?;
        let target = target(stream)?;
        table().synchronise(target)
    })
}

/// Whether a stream is captured: 0 no, 1 yes, 2 yes but the capture is lost.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamIsCapturing(stream: *mut c_void, status: *mut c_int) -> Code {
    answer(|| {
        counted(Call::cuStreamIsCapturing)?;
        let target = target(stream)?;
        let table = table();
        let state = match target {
            Target::Legacy { device } if table.legacy_blocked(device) => return Err(CAPTURE_IMPLICIT),
            Target::Legacy { .. } => 0,
            Target::Created(id) if !table.has_stream(id) => return Err(crate::code::INVALID_HANDLE),
            Target::Created(id) => table.capture_of(id).map_or(0, |(_, c)| if c.valid { 1 } else { 2 }),
        };
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
            return Err(INVALID_VALUE);
        }
        let target = target(stream)?;
        table().wait(target, event as u64, flags == WAIT_EXTERNAL)
    })
}

/// Begins to capture a stream. The modes differ in what they forbid other calls; VMM calls none of them does (measured).
#[unsafe(no_mangle)]
pub extern "C" fn cuStreamBeginCapture_v2(stream: *mut c_void, mode: c_int) -> Code {
    answer(|| {
        if !(0..=RELAXED).contains(&mode) {
            return Err(INVALID_VALUE);
        }
        let Target::Created(id) = target(stream)? else { return Err(CAPTURE_UNSUPPORTED) };
        let mut table = table();
        if table.capture_of(id).is_some() {
            return Err(ILLEGAL_STATE);
        }
        table.begin(id, std::thread::current().id(), mode)
    })
}

/// Ends a capture and returns its graph, or null and the reason why there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamEndCapture(stream: *mut c_void, out: *mut *mut c_void) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { give(out, std::ptr::null_mut()) }?;
        let Target::Created(id) = target(stream)? else { return Err(ILLEGAL_STATE) };
        let mut table = table();
        let (number, capture) = table.capture_of(id).ok_or(ILLEGAL_STATE)?;
        if capture.origin != id {
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
            return Err(CAPTURE_WRONG_THREAD);
        }
        let capture = table.finish(number).ok_or(ILLEGAL_STATE)?;
        if !capture.valid {
            return Err(CAPTURE_INVALIDATED);
        }
        if !capture.unjoined.is_empty() {
            return Err(CAPTURE_UNJOINED);
        }
        let graph = table.next();
        table.graphs.insert(graph, capture.nodes.into());
        // SAFETY: the caller's contract.
        unsafe { give(out, graph as *mut c_void) }
    })
}

/// Exchanges the calling thread's capture mode with the one pointed to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> Code {
    answer(|| {
        devices()?;
        if mode.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not null, and then readable by the caller's contract.
        let wanted = unsafe { mode.read() };
        if !(0..=RELAXED).contains(&wanted) {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's contract.
        unsafe { give(mode, CAPTURE_MODE.replace(wanted)) }
    })
}

/// Creates an event in which nothing is recorded.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuEventCreate(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cuEventCreate)?;
        let (device, _) = current()?;
        // Blocking sync 1, no timing 2; interprocess events (4) are not offered.
        if out.is_null() || flags > 3 {
            return Err(INVALID_VALUE);
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

/// Whether an event has happened, which it has unless it belongs to a graph or the tests keep the device busy.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventQuery(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventQuery)?;
        current()?;
        table().happened(event as u64)?;
        if busy() { Err(NOT_READY) } else { Ok(()) }
    })
}

/// Waits until an event has happened.
#[unsafe(no_mangle)]
pub extern "C" fn cuEventSynchronize(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuEventSynchronize)?;
        current()?;
        table().happened(event as u64)
    })
}

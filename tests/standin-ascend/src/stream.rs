//! Streams, events, captures and captured models.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr;

use standin::capture::{Target, table};
use standin::faults::busy;
use standin::state::exchange_capture_mode;
use standin::{Answer, Why, give, graph};

use crate::answer;
use crate::code::Code;
use crate::control::streams_busy;
use crate::faults::{Call, counted};
use crate::state::{current, notes, of_current, started, target};

/// `ACL_EVENT_SYNC`, the only supported kind.
const EVENT_SYNC: c_uint = 1;

/// Refuses waits and queries during a capture on the device, in any mode, and invalidates the
/// capture.
fn nothing_is_captured(device: usize) -> Answer {
    if table().invalidate_device(device) { Err(Why::CaptureUnsupported) } else { Ok(()) }
}

/// Creates a stream.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateStream(out: *mut *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtCreateStream)?;
        let (device, _) = current()?;
        if out.is_null() {
            return Err(Why::Invalid);
        }
        let stream = table().add_stream(device, true);
        notes().owners.insert(stream, device);
        // SAFETY: the caller's contract.
        unsafe { give(out, stream as *mut c_void) }
    })
}

/// As `aclrtCreateStream`; priority and flags are ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateStreamWithConfig(
    out: *mut *mut c_void,
    _priority: c_uint,
    _flags: c_uint,
) -> Code {
    // SAFETY: the caller's contract.
    unsafe { aclrtCreateStream(out) }
}

/// Destroys a stream of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyStream(stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtDestroyStream)?;
        of_current(stream)?;
        table().remove_stream(stream as u64)?;
        notes().owners.remove(&(stream as u64));
        Ok(())
    })
}

/// Waits for a stream, which is always idle.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: *mut c_void) -> Code {
    answer(|| {
        let (device, _) = current()?;
        let target = target(stream)?;
        nothing_is_captured(device)?;
        table().synchronise(target)
    })
}

/// Queries a stream: 0 if idle, 1 if work is pending.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtStreamQuery(stream: *mut c_void, status: *mut c_uint) -> Code {
    answer(|| {
        counted(Call::aclrtStreamQuery)?;
        let target = target(stream)?;
        nothing_is_captured(current()?.0)?;
        table().synchronise(target)?;
        // SAFETY: the caller's contract.
        unsafe { give(status, c_uint::from(streams_busy())) }
    })
}

/// Waits for the device, which is always idle.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> Code {
    answer(|| nothing_is_captured(current()?.0))
}

/// Creates a reusable event.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtCreateEventExWithFlag(out: *mut *mut c_void, flag: c_uint) -> Code {
    answer(|| {
        counted(Call::aclrtCreateEventExWithFlag)?;
        let (device, _) = current()?;
        if out.is_null() || flag != EVENT_SYNC {
            return Err(Why::Invalid);
        }
        let event = table().add_event(device);
        notes().owners.insert(event, device);
        // SAFETY: the caller's contract.
        unsafe { give(out, event as *mut c_void) }
    })
}

/// Destroys an event.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtDestroyEvent(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtDestroyEvent)?;
        current()?;
        table().remove_event(event as u64)?;
        notes().owners.remove(&(event as u64));
        Ok(())
    })
}

/// Records an event.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtRecordEvent(event: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtRecordEvent)?;
        of_current(event)?;
        let target = target(stream)?;
        table().record(event as u64, target)
    })
}

/// Makes a stream wait for an event, recorded or not.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: *mut c_void, event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtStreamWaitEvent)?;
        of_current(event)?;
        let target = target(stream)?;
        table().wait(target, event as u64, false)
    })
}

/// Queries an event: 1 if happened, 0 if pending.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclrtQueryEventStatus(event: *mut c_void, status: *mut c_uint) -> Code {
    answer(|| {
        counted(Call::aclrtQueryEventStatus)?;
        nothing_is_captured(of_current(event)?)?;
        table().happened(event as u64)?;
        // SAFETY: the caller's contract.
        unsafe { give(status, c_uint::from(!busy())) }
    })
}

/// Waits until an event has happened.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeEvent(event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtSynchronizeEvent)?;
        nothing_is_captured(of_current(event)?)?;
        table().happened(event as u64)
    })
}

/// Returns the capture status of a stream (0 none, 1 active, 2 invalidated) and its model, null
/// outside a capture. No context is needed; the default stream is refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureGetInfo(
    stream: *mut c_void,
    status: *mut c_int,
    model: *mut *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::aclmdlRICaptureGetInfo)?;
        started()?;
        if stream.is_null() {
            return Err(Why::Invalid);
        }
        let table = table();
        let state = table.status(Target::Created(stream as u64))?;
        if !model.is_null() {
            let capture = table.capture_of(stream as u64).map_or(0, |(number, _)| number);
            // SAFETY: not null; writable by the caller's contract.
            unsafe { model.write(capture as *mut c_void) };
        }
        // SAFETY: the caller's contract.
        unsafe { give(status, state) }
    })
}

/// Exchanges the calling thread's capture mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureThreadExchangeMode(mode: *mut c_int) -> Code {
    answer(|| {
        current()?;
        if mode.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; readable by the caller's contract.
        let before = exchange_capture_mode(unsafe { mode.read() })?;
        // SAFETY: the caller's contract.
        unsafe { give(mode, before) }
    })
}

/// Begins a capture; the default stream is refused.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRICaptureBegin(stream: *mut c_void, mode: c_int) -> Code {
    answer(|| {
        current()?;
        let target = target(stream)?;
        if matches!(target, Target::Legacy { .. }) {
            return Err(Why::CaptureImplicit);
        }
        table().begin(target, mode)
    })
}

/// Ends a capture and writes its executable model, or null in case of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureEnd(stream: *mut c_void, out: *mut *mut c_void) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { give(out, ptr::null_mut()) }?;
        let graph = table().end(target(stream)?)?;
        let model = graph::instantiate(graph);
        let mut table = table();
        table.graphs.remove(&graph);
        // One handle from begin to end: torch_npu identifies a capture's streams by this handle.
        if let Some(made) = table.execs.remove(&model?) {
            table.execs.insert(graph, made);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, graph as *mut c_void) }
    })
}

/// Executes a captured model in stream order.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIExecuteAsync(model: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| graph::launch(model as u64, target(stream)?))
}

/// Destroys a captured model.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIDestroy(model: *mut c_void) -> Code {
    answer(|| table().execs.remove(&(model as u64)).map(drop).ok_or(Why::InvalidHandle))
}

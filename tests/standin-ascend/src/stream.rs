//! Streams, events, capture, and what a capture makes.

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

/// `ACL_EVENT_SYNC`, the only kind that is offered.
const EVENT_SYNC: c_uint = 1;

/// What waits or asks is refused in any mode while anything of the device is captured, and that capture is lost.
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

/// The same, with a priority and flags that make no difference here.
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

/// Waits for a stream, whose work is always done.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeStream(stream: *mut c_void) -> Code {
    answer(|| {
        let (device, _) = current()?;
        let target = target(stream)?;
        nothing_is_captured(device)?;
        table().synchronise(target)
    })
}

/// Whether what a stream was given is done: 0, or 1 if it is still to come.
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

/// Waits for the device, which is never behind.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtSynchronizeDevice() -> Code {
    answer(|| nothing_is_captured(current()?.0))
}

/// Creates an event that can be recorded again and again.
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

/// Makes a stream wait for an event, which need not have been recorded.
#[unsafe(no_mangle)]
pub extern "C" fn aclrtStreamWaitEvent(stream: *mut c_void, event: *mut c_void) -> Code {
    answer(|| {
        counted(Call::aclrtStreamWaitEvent)?;
        of_current(event)?;
        let target = target(stream)?;
        table().wait(target, event as u64, false)
    })
}

/// Whether an event has happened: 1, or 0 if it is still to come.
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

/// Whether a stream is captured: 0 no, 1 yes, 2 yes but the capture is lost; and what it is captured into, null if it is not. With any context or
/// none; the default stream is no answer.
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
            // SAFETY: not null, and then writable by the caller's contract.
            unsafe { model.write(capture as *mut c_void) };
        }
        // SAFETY: the caller's contract.
        unsafe { give(status, state) }
    })
}

/// Exchanges the calling thread's capture mode with the one pointed to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureThreadExchangeMode(mode: *mut c_int) -> Code {
    answer(|| {
        current()?;
        if mode.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null, and then readable by the caller's contract.
        let before = exchange_capture_mode(unsafe { mode.read() })?;
        // SAFETY: the caller's contract.
        unsafe { give(mode, before) }
    })
}

/// Begins to capture a stream, not the default one.
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

/// Ends a capture and returns what can be executed at once, or null and the reason why there is nothing.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn aclmdlRICaptureEnd(stream: *mut c_void, out: *mut *mut c_void) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { give(out, ptr::null_mut()) }?;
        let graph = table().end(target(stream)?)?;
        let model = graph::instantiate(graph);
        let mut table = table();
        table.graphs.remove(&graph);
        // It has one handle from its beginning on: torch_npu tells a capture's streams by that.
        if let Some(made) = table.execs.remove(&model?) {
            table.execs.insert(graph, made);
        }
        // SAFETY: the caller's contract.
        unsafe { give(out, graph as *mut c_void) }
    })
}

/// Executes what a capture made, in a stream's order.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIExecuteAsync(model: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| graph::launch(model as u64, target(stream)?))
}

/// Destroys what a capture made.
#[unsafe(no_mangle)]
pub extern "C" fn aclmdlRIDestroy(model: *mut c_void) -> Code {
    answer(|| table().execs.remove(&(model as u64)).map(drop).ok_or(Why::InvalidHandle))
}

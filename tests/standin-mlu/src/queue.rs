//! Queues, notifiers and captures.

use std::ffi::{c_int, c_uint, c_void};

use standin::capture::{Target, table};
use standin::faults::busy;
use standin::state::{devices, exchange_capture_mode};
use standin::{Answer, Why, give};

use crate::answer;
use crate::code::Code;
use crate::faults::{Call, counted};
use crate::state::{current, notes, of_current, target, unsafe_in_captures};

/// `CN_NOTIFIER_DISABLE_TIMING_ALL`, the only supported kind.
const NO_TIMING: c_uint = 4;

/// Creates a queue.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnCreateQueue(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cnCreateQueue)?;
        let (device, _) = current()?;
        if out.is_null() || flags != 0 {
            return Err(Why::Invalid);
        }
        let queue = table().add_stream(device, true);
        notes().owners.insert(queue, device);
        // SAFETY: the caller's contract.
        unsafe { give(out, queue as *mut c_void) }
    })
}

/// Destroys a queue of the current context; its work still completes.
#[unsafe(no_mangle)]
pub extern "C" fn cnDestroyQueue(queue: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnDestroyQueue)?;
        of_current(queue)?;
        table().remove_stream(queue as u64)?;
        notes().owners.remove(&(queue as u64));
        Ok(())
    })
}

/// Waits for a queue, which is always idle.
#[unsafe(no_mangle)]
pub extern "C" fn cnQueueSync(queue: *mut c_void) -> Code {
    answer(|| {
        unsafe_in_captures()?;
        let target = target(queue)?;
        table().synchronise(target)
    })
}

/// Waits for the idle context. Refused in any mode during a capture, which is invalidated.
#[unsafe(no_mangle)]
pub extern "C" fn cnCtxSync() -> Code {
    answer(|| if table().invalidate_device(current()?.0) { Err(Why::CaptureUnsupported) } else { Ok(()) })
}

/// Creates a notifier.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnCreateNotifier(out: *mut *mut c_void, flags: c_uint) -> Code {
    answer(|| {
        counted(Call::cnCreateNotifier)?;
        let (device, _) = current()?;
        if out.is_null() || flags != NO_TIMING {
            return Err(Why::Invalid);
        }
        let notifier = table().add_event(device);
        notes().owners.insert(notifier, device);
        // SAFETY: the caller's contract.
        unsafe { give(out, notifier as *mut c_void) }
    })
}

/// Destroys a notifier of the current context.
#[unsafe(no_mangle)]
pub extern "C" fn cnDestroyNotifier(notifier: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnDestroyNotifier)?;
        of_current(notifier)?;
        table().remove_event(notifier as u64)?;
        let mut notes = notes();
        notes.owners.remove(&(notifier as u64));
        notes.placed.remove(&(notifier as u64));
        Ok(())
    })
}

/// Places a notifier after the work of a queue.
#[unsafe(no_mangle)]
pub extern "C" fn cnPlaceNotifier(notifier: *mut c_void, queue: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnPlaceNotifier)?;
        of_current(notifier)?;
        let target = target(queue)?;
        table().record(notifier as u64, target)?;
        notes().placed.insert(notifier as u64);
        Ok(())
    })
}

/// Returns a placed notifier of the current context.
fn placed(notifier: *mut c_void) -> Answer<u64> {
    of_current(notifier)?;
    let notifier = notifier as u64;
    if notes().placed.contains(&notifier) { Ok(notifier) } else { Err(Why::CapturedEvent) }
}

/// Makes a queue wait for a notifier.
#[unsafe(no_mangle)]
pub extern "C" fn cnQueueWaitNotifier(queue: *mut c_void, notifier: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnQueueWaitNotifier)?;
        let (notifier, target) = (placed(notifier)?, target(queue)?);
        table().wait(target, notifier, false)
    })
}

/// Queries a notifier.
#[unsafe(no_mangle)]
pub extern "C" fn cnQueryNotifier(notifier: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnQueryNotifier)?;
        let notifier = placed(notifier)?;
        unsafe_in_captures()?;
        table().happened(notifier)?;
        if busy() { Err(Why::NotReady) } else { Ok(()) }
    })
}

/// Waits until a notifier has happened.
#[unsafe(no_mangle)]
pub extern "C" fn cnWaitNotifier(notifier: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cnWaitNotifier)?;
        let notifier = placed(notifier)?;
        unsafe_in_captures()?;
        table().happened(notifier)
    })
}

/// Returns the capture status of a queue: 0 none, 1 active, 2 invalidated. The default queue is
/// refused.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnQueueIsCapturing(queue: *mut c_void, status: *mut c_int) -> Code {
    answer(|| {
        counted(Call::cnQueueIsCapturing)?;
        let state = table().status(Target::Created(queue as u64))?;
        // SAFETY: the caller's contract.
        unsafe { give(status, state) }
    })
}

/// Exchanges the calling thread's capture mode.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnThreadExchangeQueueCaptureMode(mode: *mut c_int) -> Code {
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

/// Begins a capture; the default queue is refused. Capture calls need no context.
#[unsafe(no_mangle)]
pub extern "C" fn cnQueueBeginCapture(queue: *mut c_void, mode: c_int) -> Code {
    answer(|| {
        devices()?;
        table().begin(Target::Created(queue as u64), mode)
    })
}

/// Ends a capture and writes its graph, or null in case of an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cnQueueEndCapture(queue: *mut c_void, out: *mut *mut c_void) -> Code {
    answer(|| {
        // SAFETY: the caller's contract.
        unsafe { give(out, std::ptr::null_mut()) }?;
        let topo = table().end(Target::Created(queue as u64))?;
        // SAFETY: the caller's contract.
        unsafe { give(out, topo as *mut c_void) }
    })
}

//! The thread's contexts.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

use standin::capture::{self, Target};
use standin::state::{Device, devices};
use standin::{Answer, Why};

/// The value of the first device's context handle, and the distance to the next one's.
const CONTEXT: usize = 0xC0_0000;

thread_local! {
    /// The devices whose primary contexts are on the thread's stack.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The handle of a device's primary context.
pub(crate) fn context_of(index: usize) -> *mut c_void {
    (CONTEXT + index * 0x100) as *mut c_void
}

/// The device that a context handle belongs to; the context must be alive.
pub(crate) fn device_of(context: *mut c_void) -> Answer<usize> {
    let index = (0..devices()?.len()).find(|i| context_of(*i) == context).ok_or(Why::NoContext)?;
    alive(index)
}

fn alive(index: usize) -> Answer<usize> {
    match devices()?.get(index) {
        Some(device) if device.retained.load(Relaxed) > 0 => Ok(index),
        _ => Err(Why::ContextGone),
    }
}

/// Works on the thread's context stack. A thread that is ending has none.
pub(crate) fn contexts<T>(work: impl FnOnce(&mut Vec<usize>) -> Answer<T>) -> Answer<T> {
    devices()?;
    CONTEXTS
        .try_with(|stack| stack.try_borrow_mut().map_err(|_| Why::NoContext).and_then(|mut s| work(&mut s)))
        .unwrap_or(Err(Why::NoContext))
}

/// The device of the current context.
pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    let index = contexts(|stack| stack.last().copied().ok_or(Why::NoContext))?;
    Ok((index, &devices()?[alive(index)?]))
}

/// What a stream handle names.
pub(crate) fn target(stream: *mut c_void) -> Answer<Target> {
    capture::target(stream, || Ok(current()?.0))
}

//! The thread's contexts.

use std::cell::RefCell;
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::Mutex;
use standin::capture::{self, Target};
use standin::state::{Device, devices};
use standin::{Answer, Why};

/// The first device's context handle and the distance between handles.
const CONTEXT: usize = 0xC0_0000;
const NEXT_DEVICE: usize = 0x10_0000;
const NEXT_GREEN: usize = 0x10;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Context {
    pub(crate) device: usize,
    /// Index among all green contexts, from 1; 0: the primary context.
    pub(crate) green: usize,
}

impl Context {
    /// Returns a green context's device and default stream; `None` for a primary context.
    pub(crate) fn green_of(self) -> Option<(usize, u64)> {
        self.green.checked_sub(1).and_then(|index| *greens().lock().get(index)?)
    }
}

/// Returns all green contexts ever created: device and default stream, `None` once destroyed.
pub(crate) fn greens() -> &'static Mutex<Vec<Option<(usize, u64)>>> {
    static GREENS: Mutex<Vec<Option<(usize, u64)>>> = Mutex::new(Vec::new());
    &GREENS
}

thread_local! {
    static CONTEXTS: RefCell<Vec<Context>> = const { RefCell::new(Vec::new()) };
}

pub(crate) fn context_of(context: Context) -> *mut c_void {
    (CONTEXT + context.device * NEXT_DEVICE + context.green * NEXT_GREEN) as *mut c_void
}

/// Returns the live context with this handle.
pub(crate) fn context_with(handle: *mut c_void) -> Answer<Context> {
    let offset = (handle as usize).checked_sub(CONTEXT).ok_or(Why::NoContext)?;
    let context = Context { device: offset / NEXT_DEVICE, green: offset % NEXT_DEVICE / NEXT_GREEN };
    if context_of(context) != handle || context.device >= devices()?.len() {
        return Err(Why::NoContext);
    }
    alive(context)
}

fn alive(context: Context) -> Answer<Context> {
    let retained = devices()?.get(context.device).is_some_and(|device| device.retained.load(Relaxed) > 0);
    let there = context.green == 0 || context.green_of().is_some_and(|(device, _)| device == context.device);
    if retained && there { Ok(context) } else { Err(Why::ContextGone) }
}

/// Runs `work` on the thread's context stack. An ending thread has none.
pub(crate) fn contexts<T>(work: impl FnOnce(&mut Vec<Context>) -> Answer<T>) -> Answer<T> {
    devices()?;
    CONTEXTS
        .try_with(|stack| stack.try_borrow_mut().map_err(|_| Why::NoContext).and_then(|mut s| work(&mut s)))
        .unwrap_or(Err(Why::NoContext))
}

pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    let device = current_context()?.device;
    Ok((device, &devices()?[device]))
}

fn current_context() -> Answer<Context> {
    alive(contexts(|stack| stack.last().copied().ok_or(Why::NoContext))?)
}

/// Resolves a stream handle. A green context has its own default stream, and none for each thread
/// (H200, driver 580).
pub(crate) fn target(stream: *mut c_void) -> Answer<Target> {
    let of_a_green = |handle: u64| {
        let (_, own) = current_context().ok()?.green_of()?;
        Some(if handle == 2 { Err(Why::InvalidHandle) } else { Ok(Target::Created(own)) })
    };
    match stream as u64 {
        handle @ 0..=2 => of_a_green(handle),
        _ => None,
    }
    .unwrap_or_else(|| capture::target(stream, || Ok(current()?.0)))
}

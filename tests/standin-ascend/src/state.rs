//! What ACL knows beside the model: the thread's context, how long reservations and maps are, and whose streams are whose.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use standin::capture::Target;
use standin::state::{Device, devices};
use standin::{Answer, Why};

/// The value of the first device's default context, and the distance to the next one's.
const CONTEXT: usize = 0xA0_0000;

thread_local! {
    /// The device whose default context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// `aclInit` was called.
static STARTED: AtomicBool = AtomicBool::new(false);

/// What the runtime notes for itself.
#[derive(Default)]
pub(crate) struct Notes {
    /// Base to bytes.
    pub(crate) reservations: BTreeMap<u64, u64>,
    /// Head to bytes.
    pub(crate) maps: BTreeMap<u64, u64>,
    /// Base of memory that was asked for without addresses of one's own, to bytes.
    pub(crate) plain: BTreeMap<u64, u64>,
    /// Streams and events to their device.
    pub(crate) owners: BTreeMap<u64, usize>,
}

static NOTES: Mutex<Notes> = Mutex::new(Notes {
    reservations: BTreeMap::new(),
    maps: BTreeMap::new(),
    plain: BTreeMap::new(),
    owners: BTreeMap::new(),
});

pub(crate) fn notes() -> MutexGuard<'static, Notes> {
    NOTES.lock()
}

/// `aclInit`; whether it was the first.
pub(crate) fn start() -> bool {
    !STARTED.swap(true, Relaxed)
}

pub(crate) fn started() -> Answer {
    if STARTED.load(Relaxed) { Ok(()) } else { Err(Why::NotInitialised) }
}

/// The handle of a device's default context.
pub(crate) fn context_of(index: usize) -> *mut c_void {
    (CONTEXT + index * 0x100) as *mut c_void
}

/// The device of a context, which exists once that was set.
pub(crate) fn device_of(context: *mut c_void) -> Answer<usize> {
    let all = devices()?;
    let index = (0..all.len()).find(|i| context_of(*i) == context).ok_or(Why::NoContext)?;
    if all[index].retained.load(Relaxed) > 0 { Ok(index) } else { Err(Why::NoContext) }
}

pub(crate) fn make_current(index: usize) {
    CURRENT.set(Some(index));
}

/// The device of the current context.
pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    started()?;
    let index = CURRENT.get().ok_or(Why::NoContext)?;
    Ok((index, &devices()?[index]))
}

/// That something is of the device whose context is current.
pub(crate) fn of_current(handle: *mut c_void) -> Answer<usize> {
    let (index, _) = current()?;
    match notes().owners.get(&(handle as u64)) {
        Some(owner) if *owner == index => Ok(index),
        Some(_) => Err(Why::ContextGone),
        None => Err(Why::InvalidHandle),
    }
}

/// What a stream's handle names: null the context's default stream. The thread has a context, that of the stream.
pub(crate) fn target(stream: *mut c_void) -> Answer<Target> {
    if stream.is_null() {
        return Ok(Target::Legacy { device: current()?.0 });
    }
    of_current(stream).map(|_| Target::Created(stream as u64))
}

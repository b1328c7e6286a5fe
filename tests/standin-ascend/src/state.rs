//! State of ACL besides the model: the thread's context, lengths of reservations and mappings,
//! owners of streams and events.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use parking_lot::{Mutex, MutexGuard};
use standin::capture::Target;
use standin::state::{Device, devices};
use standin::{Answer, Why};

/// The first device's default context; later devices follow at a distance.
const CONTEXT: usize = 0xA0_0000;

thread_local! {
    /// The device whose default context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

/// `aclInit` was called.
static STARTED: AtomicBool = AtomicBool::new(false);

#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) reservations: BTreeMap<u64, u64>,
    pub(crate) maps: BTreeMap<u64, u64>,
    /// Memory of `aclrtMalloc`: base to bytes.
    pub(crate) plain: BTreeMap<u64, u64>,
    /// Device of each stream and event.
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

pub(crate) fn start() -> bool {
    !STARTED.swap(true, Relaxed)
}

pub(crate) fn started() -> Answer {
    if STARTED.load(Relaxed) { Ok(()) } else { Err(Why::NotInitialised) }
}

pub(crate) fn context_of(index: usize) -> *mut c_void {
    (CONTEXT + index * 0x100) as *mut c_void
}

/// Returns the device of a context; the device must have been set.
pub(crate) fn device_of(context: *mut c_void) -> Answer<usize> {
    let all = devices()?;
    let index = (0..all.len()).find(|i| context_of(*i) == context).ok_or(Why::NoContext)?;
    if all[index].retained.load(Relaxed) > 0 { Ok(index) } else { Err(Why::NoContext) }
}

pub(crate) fn make_current(index: usize) {
    CURRENT.set(Some(index));
}

pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    started()?;
    let index = CURRENT.get().ok_or(Why::NoContext)?;
    Ok((index, &devices()?[index]))
}

/// Checks that the object belongs to the current context's device.
pub(crate) fn of_current(handle: *mut c_void) -> Answer<usize> {
    let (index, _) = current()?;
    match notes().owners.get(&(handle as u64)) {
        Some(owner) if *owner == index => Ok(index),
        Some(_) => Err(Why::ContextGone),
        None => Err(Why::InvalidHandle),
    }
}

/// Resolves a stream handle: null is the default stream of the current context. Any other stream
/// must belong to the current context.
pub(crate) fn target(stream: *mut c_void) -> Answer<Target> {
    if stream.is_null() {
        return Ok(Target::Legacy { device: current()?.0 });
    }
    of_current(stream).map(|_| Target::Created(stream as u64))
}

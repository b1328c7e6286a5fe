//! State of CNDrv besides the model: the thread's context, lengths of mappings, owners of queues
//! and notifiers.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_void;
use std::sync::atomic::Ordering::Relaxed;

use parking_lot::{Mutex, MutexGuard};
use standin::capture::{Target, table};
use standin::state::{Device, RELAXED, capture_mode, devices};
use standin::{Answer, Why};

/// The first device's shared context; later devices follow at a distance.
const CONTEXT: usize = 0xB0_0000;

thread_local! {
    /// The device whose shared context is current.
    static CURRENT: Cell<Option<usize>> = const { Cell::new(None) };
}

#[derive(Default)]
pub(crate) struct Notes {
    pub(crate) maps: BTreeMap<u64, u64>,
    /// Device of each queue and notifier.
    pub(crate) owners: BTreeMap<u64, usize>,
    pub(crate) placed: BTreeSet<u64>,
}

static NOTES: Mutex<Notes> =
    Mutex::new(Notes { maps: BTreeMap::new(), owners: BTreeMap::new(), placed: BTreeSet::new() });

pub(crate) fn notes() -> MutexGuard<'static, Notes> {
    NOTES.lock()
}

pub(crate) fn context_of(index: usize) -> *mut c_void {
    (CONTEXT + index * 0x100) as *mut c_void
}

/// Returns the device of a context with references.
fn device_of(context: *mut c_void) -> Answer<usize> {
    let all = devices()?;
    let index = (0..all.len()).find(|i| context_of(*i) == context).ok_or(Why::NoContext)?;
    if all[index].retained.load(Relaxed) > 0 { Ok(index) } else { Err(Why::NoContext) }
}

pub(crate) fn make_current(context: *mut c_void) -> Answer {
    CURRENT.set(if context.is_null() { None } else { Some(device_of(context)?) });
    Ok(())
}

pub(crate) fn current_context() -> *mut c_void {
    CURRENT.get().map_or(std::ptr::null_mut(), context_of)
}

pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    let all = devices()?;
    let index = CURRENT.get().ok_or(Why::NoContext)?;
    device_of(context_of(index))?;
    Ok((index, &all[index]))
}

/// Checks that the object belongs to the current context's device.
pub(crate) fn of_current(handle: *mut c_void) -> Answer<usize> {
    let (index, _) = current()?;
    match notes().owners.get(&(handle as u64)) {
        Some(owner) if *owner == index => Ok(index),
        Some(_) => Err(Why::NoContext),
        None => Err(Why::InvalidHandle),
    }
}

/// Resolves a queue handle: null is the default queue of the context, which is refused during a
/// capture on the device.
pub(crate) fn target(queue: *mut c_void) -> Answer<Target> {
    if queue.is_null() {
        let (device, _) = current()?;
        // All queues are blocking ones.
        if table().legacy_blocked(device) {
            return Err(Why::CaptureUnsupported);
        }
        return Ok(Target::Legacy { device });
    }
    of_current(queue).map(|_| Target::Created(queue as u64))
}

/// Refuses a call during a capture, and invalidates the capture, unless the thread's mode is
/// relaxed.
pub(crate) fn unsafe_in_captures() -> Answer {
    if capture_mode() != RELAXED && table().invalidate_all() { Err(Why::CaptureUnsupported) } else { Ok(()) }
}

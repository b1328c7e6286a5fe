//! The devices and the thread's current context.

use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::code::{
    Answer, CONTEXT_IS_DESTROYED, INVALID_CONTEXT, INVALID_DEVICE, INVALID_VALUE, NO_DEVICE, NOT_INITIALIZED,
};
use crate::memory::{Memory, Refusal};

/// What pages and addresses are multiples of, as on an H200.
const GRANULARITY: u64 = 2 << 20;
const DEFAULT_MEMORY: u64 = 64 << 30;
/// The value of the first device's context handle, and the distance to the next one's.
const CONTEXT: usize = 0xC0_0000;
/// A page's handle holds its device above this bit, which makes handles unique across devices.
const DEVICE_SHIFT: u32 = 48;

/// A pretend GPU.
pub(crate) struct Device {
    pub(crate) memory: Memory,
    /// How often the primary context is held.
    pub(crate) retained: AtomicU32,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

thread_local! {
    /// The devices whose primary contexts are on the thread's stack.
    static CONTEXTS: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
    /// What `cuThreadExchangeStreamCaptureMode` exchanges; GLOBAL at first.
    pub(crate) static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

/// `cuInit`
pub(crate) fn initialise() -> Answer {
    let devices = DEVICES.get_or_init(|| {
        let memory = number("STANDIN_CUDA_MEMORY", DEFAULT_MEMORY);
        let device = |_| Device { memory: Memory::new(GRANULARITY, memory), retained: AtomicU32::new(0) };
        (0..number("STANDIN_CUDA_DEVICES", 2).min(64)).map(device).collect()
    });
    if devices.is_empty() { Err(NO_DEVICE) } else { Ok(()) }
}

/// All devices, once `cuInit` has succeeded.
pub(crate) fn devices() -> Answer<&'static [Device]> {
    match DEVICES.get() {
        Some(devices) if !devices.is_empty() => Ok(devices),
        _ => Err(NOT_INITIALIZED),
    }
}

/// The index of a device that exists, and the device.
pub(crate) fn device(ordinal: c_int) -> Answer<(usize, &'static Device)> {
    let devices = devices()?;
    let index = usize::try_from(ordinal).map_err(|_| INVALID_DEVICE)?;
    Ok((index, devices.get(index).ok_or(INVALID_DEVICE)?))
}

/// The handle of a device's primary context.
pub(crate) fn context_of(index: usize) -> *mut c_void {
    (CONTEXT + index * 0x100) as *mut c_void
}

/// The device that a context handle belongs to; the context must be alive.
pub(crate) fn device_of(context: *mut c_void) -> Answer<usize> {
    let index = (0..devices()?.len()).find(|i| context_of(*i) == context).ok_or(INVALID_CONTEXT)?;
    alive(index)
}

fn alive(index: usize) -> Answer<usize> {
    match devices()?.get(index) {
        Some(device) if device.retained.load(Relaxed) > 0 => Ok(index),
        _ => Err(CONTEXT_IS_DESTROYED),
    }
}

/// Works on the thread's context stack. A thread that is ending has none.
pub(crate) fn contexts<T>(work: impl FnOnce(&mut Vec<usize>) -> Answer<T>) -> Answer<T> {
    devices()?;
    CONTEXTS
        .try_with(|stack| stack.try_borrow_mut().map_err(|_| INVALID_CONTEXT).and_then(|mut s| work(&mut s)))
        .unwrap_or(Err(INVALID_CONTEXT))
}

/// The device of the current context.
pub(crate) fn current() -> Answer<(usize, &'static Device)> {
    let index = contexts(|stack| stack.last().copied().ok_or(INVALID_CONTEXT))?;
    Ok((index, &devices()?[alive(index)?]))
}

/// The device that reserved an address.
pub(crate) fn device_at(at: u64) -> Answer<(usize, &'static Device)> {
    devices()?.iter().enumerate().find(|(_, device)| device.memory.reserved(at, 1)).ok_or(INVALID_VALUE)
}

/// The process-wide handle for a page of a device.
pub(crate) fn handle(device: usize, page: u64) -> u64 {
    (device as u64 + 1) << DEVICE_SHIFT | page
}

/// The device and its own number for a page.
pub(crate) fn page(handle: u64) -> Answer<(usize, &'static Device, u64)> {
    let index =
        (handle >> DEVICE_SHIFT).checked_sub(1).and_then(|i| usize::try_from(i).ok()).ok_or(INVALID_VALUE)?;
    Ok((index, devices()?.get(index).ok_or(INVALID_VALUE)?, handle & ((1 << DEVICE_SHIFT) - 1)))
}

/// Copies between two ranges of device memory; nothing happens unless both are wholly accessible.
pub(crate) fn copy(to: u64, from: u64, len: u64) -> Result<(), Refusal> {
    const STEP: u64 = 1 << 20;
    let invalid = |_| Refusal::Invalid("not device memory");
    let target = &device_at(to).map_err(invalid)?.1.memory;
    let source = &device_at(from).map_err(invalid)?.1.memory;
    if !target.accessible(to, len) || !source.accessible(from, len) {
        return Err(Refusal::Invalid("not accessible"));
    }
    let mut buffer = vec![0; STEP.min(len) as usize];
    let mut done = 0;
    while done < len {
        let part = &mut buffer[..STEP.min(len - done) as usize];
        source.read(from + done, part)?;
        target.write(to + done, part)?;
        done += part.len() as u64;
    }
    Ok(())
}

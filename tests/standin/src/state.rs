//! The devices, with process-wide page handles, and the thread's capture mode.

use std::cell::Cell;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::AtomicU32;

use crate::memory::{Memory, Refusal};
use crate::{Answer, Why};

/// Default granularity of pages and addresses, as on an H200.
const GRANULARITY: u64 = 2 << 20;
const DEFAULT_MEMORY: u64 = 64 << 30;
/// Bits above this one hold the device of a page handle: handles are unique across devices.
const DEVICE_SHIFT: u32 = 48;
/// `RELAXED` of every vendor; THREAD_LOCAL is 1.
pub const RELAXED: c_int = 2;
/// `GLOBAL` of every vendor.
pub const GLOBAL: c_int = 0;

/// A simulated device.
pub struct Device {
    /// Memory of the device.
    pub memory: Memory,
    /// References to the primary context, on platforms with one.
    pub retained: AtomicU32,
}

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

thread_local! {
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

/// Returns a number from the environment, or the default.
#[must_use]
pub fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.trim().parse().ok()).unwrap_or(default)
}

/// Starts the library. The first call reads `<name>_DEVICES` (default 2; 0 is a machine without a
/// device), `<name>_MEMORY` (bytes of each, default 64 GiB) and `<name>_GRANULARITY` (default 2
/// MiB).
///
/// # Errors
/// [`Why::NoDevice`].
pub fn initialise(name: &str) -> Answer {
    let devices = DEVICES.get_or_init(|| {
        let memory = number(&format!("{name}_MEMORY"), DEFAULT_MEMORY);
        let granularity = number(&format!("{name}_GRANULARITY"), GRANULARITY);
        let device = |_| Device { memory: Memory::new(granularity, memory), retained: AtomicU32::new(0) };
        (0..number(&format!("{name}_DEVICES"), 2).min(64)).map(device).collect()
    });
    if devices.is_empty() { Err(Why::NoDevice) } else { Ok(()) }
}

/// Returns all devices after the start of the library.
///
/// # Errors
/// [`Why::NotInitialised`].
pub fn devices() -> Answer<&'static [Device]> {
    match DEVICES.get() {
        Some(devices) if !devices.is_empty() => Ok(devices),
        _ => Err(Why::NotInitialised),
    }
}

/// Returns an existing device and its index.
///
/// # Errors
/// [`Why::InvalidDevice`].
pub fn device(ordinal: c_int) -> Answer<(usize, &'static Device)> {
    let devices = devices()?;
    let index = usize::try_from(ordinal).map_err(|_| Why::InvalidDevice)?;
    Ok((index, devices.get(index).ok_or(Why::InvalidDevice)?))
}

/// Returns the device that reserved an address.
///
/// # Errors
/// [`Why::Invalid`].
pub fn device_at(at: u64) -> Answer<(usize, &'static Device)> {
    devices()?.iter().enumerate().find(|(_, device)| device.memory.reserved(at, 1)).ok_or(Why::Invalid)
}

/// Returns the process-wide handle of a device's page.
#[must_use]
pub fn handle(device: usize, page: u64) -> u64 {
    (device as u64 + 1) << DEVICE_SHIFT | page
}

/// Returns the device and its own number of a page.
///
/// # Errors
/// [`Why::Invalid`].
pub fn page(handle: u64) -> Answer<(usize, &'static Device, u64)> {
    let index =
        (handle >> DEVICE_SHIFT).checked_sub(1).and_then(|i| usize::try_from(i).ok()).ok_or(Why::Invalid)?;
    Ok((index, devices()?.get(index).ok_or(Why::Invalid)?, handle & ((1 << DEVICE_SHIFT) - 1)))
}

/// Returns the calling thread's capture mode.
#[must_use]
pub fn capture_mode() -> c_int {
    CAPTURE_MODE.get()
}

/// Sets the calling thread's capture mode and returns the previous one.
///
/// # Errors
/// [`Why::Invalid`] for an unknown mode.
pub fn exchange_capture_mode(wanted: c_int) -> Answer<c_int> {
    if (0..=RELAXED).contains(&wanted) { Ok(CAPTURE_MODE.replace(wanted)) } else { Err(Why::Invalid) }
}

/// Copies between two ranges of device memory; no bytes change unless both are wholly accessible.
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

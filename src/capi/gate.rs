//! Capture gate of a device in C.

use std::sync::Arc;

use super::device::vmmgraph_device_t;
use super::guard::{Failure, guard};
use super::handle::get;
use super::status::vmmgraph_status_t;
use crate::device::Device;
use crate::error::Result;
use crate::gate::CaptureGate;

fn with(device: vmmgraph_device_t, body: impl FnOnce(&CaptureGate) -> Result<()>) -> vmmgraph_status_t {
    guard(|| {
        let device: Arc<Device> = get(device)?;
        body(device.gate()).map_err(Failure::from)
    })
}

/// Waits until no capture or replay is in the gate, then keeps both out until
/// vmmgraph_device_end_capture on this thread. The library itself never uses the gate: an option
/// for engines without replays during captures. VMMGRAPH_ERROR_WRONG_STATE if this thread is in the
/// gate.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_begin_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::begin_capture)
}

/// Ends this thread's capture and opens the gate. VMMGRAPH_ERROR_WRONG_STATE if this thread has
/// none.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_end_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::end_capture)
}

/// Waits until no capture is active or pending, then keeps captures out until
/// vmmgraph_device_end_replay on this thread. Any number of threads may enter at once, each any
/// number of times. VMMGRAPH_ERROR_WRONG_STATE if this thread is capturing.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_begin_replay(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::begin_replay)
}

/// Ends this thread's last vmmgraph_device_begin_replay. VMMGRAPH_ERROR_WRONG_STATE if this thread
/// has none.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_end_replay(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::end_replay)
}

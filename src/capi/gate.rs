//! The capture gate in C.

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

/// Waits until nobody is between vmmgraph_device_begin_capture or _begin_replay and its end, and keeps everybody else out until
/// vmmgraph_device_end_capture on this thread: for engines that want no replay while they capture. Nothing else looks at this gate.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_begin_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::begin_capture)
}

/// Lets the others in again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_end_capture(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::end_capture)
}

/// Waits until nobody captures or waits to, and keeps captures out until vmmgraph_device_end_replay on this thread. Any number of
/// threads may be in here at once, each any number of times.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_begin_replay(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::begin_replay)
}

/// Ends what this thread's last vmmgraph_device_begin_replay began.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_device_end_replay(device: vmmgraph_device_t) -> vmmgraph_status_t {
    with(device, CaptureGate::end_replay)
}

//! cxx bridge between the libtorch component (`cpp/torch`) and the core. Private to the library
//! with both parts: no `rust::` type appears in an installed header, and no symbol is exported.
//!
//! Functions called by torch's allocators return a C status, not cxx's `Result`, which would lose
//! the error number. Details are in `vmmgraph_last_error`. A panic becomes a status and closes the
//! arena, as in the C functions; cxx alone would end the process. Only handle lookups return
//! `Result`, having a single error.

use vmmgraph::{Device, DriverChoice, Stream};

mod blocks;
mod device;
mod eager;
mod executables;
mod region;

/// Returns the CUDA number of a device; -1 if another driver opened the device.
fn cuda_number(device: &Device) -> i32 {
    let info = device.driver().info();
    if DriverChoice::Named(info.platform) == DriverChoice::CUDA { info.ordinal } else { -1 }
}

/// Returns the distinct streams of a pair.
fn different(streams: &[Stream; 2]) -> &[Stream] {
    if streams[0] == streams[1] { &streams[..1] } else { streams }
}

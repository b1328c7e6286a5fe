//! cxx bridge between the libtorch component (`cpp/torch`) and the core: no `rust::` type appears
//! in an installed header, and no symbol is exported.
//!
//! Functions called by torch's allocators return a C status, with details in `vmmgraph_last_error`;
//! cxx's `Result` would lose the error number. A panic becomes a status and closes the arena; cxx
//! alone would end the process. Only handle lookups, with a single error, return `Result`.

use vmmgraph::{Device, DriverChoice, Stream};

mod blocks;
mod device;
mod eager;
mod executables;
mod region;

/// CUDA number; -1 if another driver opened the device.
fn cuda_number(device: &Device) -> i32 {
    let info = device.driver().info();
    if DriverChoice::Named(info.platform) == DriverChoice::CUDA { info.ordinal } else { -1 }
}

fn different(streams: &[Stream; 2]) -> &[Stream] {
    if streams[0] == streams[1] { &streams[..1] } else { streams }
}

//! The seam between the libtorch component (`cpp/torch`) and the core, by cxx. Private to the library that holds both: no `rust::`
//! type appears in an installed header, and none of these symbols is exported.
//!
//! What torch's allocators call crosses as a status, not as cxx's `Result`, which would lose the number; the details of a failure are
//! where C finds them (`vmmgraph_last_error`). A panic in there is a status too and closes the arena, as in the C functions: in
//! cxx it would end the process. Only looking a handle up is a `Result`, since it can fail in one way.

use crate::device::Device;
use crate::driver::DriverChoice;
use crate::units::Stream;

mod blocks;
mod device;
mod eager;
mod executables;
mod region;

/// The CUDA number of a device; -1 if another driver opened it.
fn cuda_number(device: &Device) -> i32 {
    let info = device.driver().info();
    if DriverChoice::Named(info.platform) == DriverChoice::CUDA { info.ordinal } else { -1 }
}

/// Two streams, or the one that both are.
fn different(streams: &[Stream; 2]) -> &[Stream] {
    if streams[0] == streams[1] { &streams[..1] } else { streams }
}

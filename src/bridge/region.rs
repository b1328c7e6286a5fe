//! A region's blocks, as torch's allocator calls for them.

use std::sync::Arc;

use super::{cuda_number, different};
use crate::capi::{GuardedDrop, guarded, policy_of, region_of, stream_of, vmmgraph_region_t};
use crate::error::Result;
use crate::region::Region;
use crate::units::{Address, Stream};

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// A region, as C++ holds it for the tensors in it.
        type TorchRegion;
        /// The region behind a C handle, which this keeps alive.
        fn torch_region(region: usize) -> Result<Box<TorchRegion>>;
        /// The CUDA number of its device; -1 if another driver opened it.
        fn cuda_device_of(region: &TorchRegion) -> i32;
        /// Allocates for a stream, by a policy of `VMMGRAPH_POLICY_*`; the status, and the address in `block` if that is 0.
        fn allocate_in_region(
            region: &TorchRegion,
            bytes: usize,
            policy: i32,
            stream: usize,
            block: &mut usize,
        ) -> i32;
        /// Frees a block that the default stream and another one may still read; the status.
        fn release_to_region(region: &TorchRegion, block: usize, stream: usize) -> i32;
        /// Notes that a stream uses a block; the status.
        fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32;
    }
}

/// The last tensor takes a region along whose handle is gone, so its end is a call too.
struct TorchRegion(GuardedDrop<Arc<Region>>);

fn torch_region(region: usize) -> Result<Box<TorchRegion>> {
    Ok(Box::new(TorchRegion(GuardedDrop::new(region_of(region as vmmgraph_region_t)?))))
}

fn cuda_device_of(region: &TorchRegion) -> i32 {
    cuda_number(region.0.device())
}

fn allocate_in_region(
    region: &TorchRegion,
    bytes: usize,
    policy: i32,
    stream: usize,
    block: &mut usize,
) -> i32 {
    guarded(
        || (),
        || {
            let (bytes, stream) = (bytes as u64, stream_of(stream as *mut _));
            let at = match policy_of(policy)? {
                Some(policy) => region.0.allocate_as(bytes, policy, stream),
                None => region.0.allocate(bytes, stream),
            }?;
            *block = at.0 as usize;
            Ok(())
        },
    )
}

fn release_to_region(region: &TorchRegion, block: usize, stream: usize) -> i32 {
    guarded(
        || (),
        || {
            let (at, readers) = (Address(block as u64), [Stream::LEGACY, stream_of(stream as *mut _)]);
            // A program may drop a tensor right after work that reads it: torch's own memory stays mapped, and so must this.
            let noted = different(&readers).iter().try_for_each(|reader| region.0.record_stream(at, *reader));
            let freed = noted.and_then(|()| region.0.free(at));
            freed.inspect_err(|error| tracing::warn!(%error, "torch freed something that is not ours"))
        },
    )
}

fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32 {
    guarded(|| (), || region.0.record_stream(Address(block as u64), stream_of(stream as *mut _)))
}

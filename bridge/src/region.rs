//! Blocks of a region for torch's allocator. Functions return a status.

use std::sync::Arc;

use vmmgraph::capi::{GuardedDrop, guarded, policy_of, region_of, stream_of, vmmgraph_region_t};
use vmmgraph::{Address, Region, Result, Stream};

use super::{cuda_number, different};

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        type TorchRegion;
        fn torch_region(region: usize) -> Result<Box<TorchRegion>>;
        /// CUDA number; -1 if another driver opened the device.
        fn cuda_device_of(region: &TorchRegion) -> i32;
        /// Allocates with a policy of `VMMGRAPH_POLICY_*`.
        fn allocate_in_region(
            region: &TorchRegion,
            bytes: usize,
            policy: i32,
            stream: usize,
            block: &mut usize,
        ) -> i32;
        /// Frees a block, which the default stream and `stream` may still read.
        fn release_to_region(region: &TorchRegion, block: usize, stream: usize) -> i32;
        fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32;
    }
}

/// Dropping the last tensor may free the region, so the drop is guarded like a call.
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
            // A program may drop a tensor right after submitting work on it. The memory stays
            // mapped, as torch's own does.
            let noted = different(&readers).iter().try_for_each(|reader| region.0.record_stream(at, *reader));
            let freed = noted.and_then(|()| region.0.free(at));
            freed.inspect_err(
                |error| tracing::warn!(%error, "torch freed an address without a block of this library"),
            )
        },
    )
}

fn record_stream_in_region(region: &TorchRegion, block: usize, stream: usize) -> i32 {
    guarded(|| (), || region.0.record_stream(Address(block as u64), stream_of(stream as *mut _)))
}

//! The seam between the libtorch component (`cpp/torch`) and the core, by cxx. Private to the library that holds both: no `rust::`
//! type appears in an installed header, and none of these symbols is exported.
//!
//! What torch's allocators call crosses as a status, not as cxx's `Result`, which would lose the number; the details of a failure are
//! where C finds them (`vmmgraph_last_error`). A panic in there is a status too and closes the arena, as in the C functions: in
//! cxx it would end the process. Only looking a handle up is a `Result`, since it can fail in one way.

use std::time::Duration;

use crate::capi::{GuardedDrop, arena_of, guarded, space_of, stream_of, vmmgraph_arena_t, vmmgraph_space_t};
use crate::device::Device;
use crate::driver::DriverChoice;
use crate::error::Result;
use crate::torch;
use crate::units::{Address, Stream};

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// What `src/torch.rs` says, as C++ holds it.
        type VmmTorchAllocator;

        /// The CUDA number of the device of the arena behind a C handle; -1 if another driver opened it.
        fn cuda_device(arena: usize) -> Result<i32>;
        /// Bytes of the free pages of a CUDA device, if it is open.
        fn idle_bytes(device: i32) -> u64;
        /// Gives back what nobody uses of a CUDA device, if it is open; bytes. Waits for the device no longer than so many milliseconds.
        fn give_back(device: i32, milliseconds: u64) -> u64;
        /// The allocator of the space behind a C handle, whose blocks this keeps alive, and nothing else of it.
        fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>>;
        /// Allocates for a stream, as a kept block or not; the status, and the address in `block` if that is 0.
        fn allocate(
            allocator: &VmmTorchAllocator,
            bytes: usize,
            stream: usize,
            kept: bool,
            block: &mut usize,
        ) -> i32;
        /// Frees a block that the default stream and another one may still read; the status.
        fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32;
        /// Whether the address lies in the space, in a live block or not.
        fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool;
        /// Notes that a second stream uses a block; the status.
        fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32;
    }
}

/// The last tensor takes what is left of its space along, so its end is a call too.
struct VmmTorchAllocator(GuardedDrop<torch::VmmTorchAllocator>);

fn cuda_device(arena: usize) -> Result<i32> {
    let arena = arena_of(arena as vmmgraph_arena_t)?;
    let info = arena.device().driver().info();
    Ok(if DriverChoice::Named(info.platform) == DriverChoice::CUDA { info.ordinal } else { -1 })
}

fn idle_bytes(device: i32) -> u64 {
    of_device(device, |device| device.stats().free_bytes)
}

fn give_back(device: i32, milliseconds: u64) -> u64 {
    of_device(device, |device| device.give_back(Duration::from_millis(milliseconds)))
}

/// A number of a CUDA device; 0 if it is not open.
fn of_device(device: i32, number: impl FnOnce(&Device) -> u64) -> u64 {
    let DriverChoice::Named(platform) = DriverChoice::CUDA else { return 0 };
    let mut found = 0;
    guarded(
        || (),
        || {
            found = Device::opened(platform, device).map_or(0, |device| number(&device));
            Ok(())
        },
    );
    found
}

fn torch_allocator(space: usize) -> Result<Box<VmmTorchAllocator>> {
    let allocator = torch::VmmTorchAllocator::new(&*space_of(space as vmmgraph_space_t)?);
    Ok(Box::new(VmmTorchAllocator(GuardedDrop::new(allocator))))
}

fn allocate(
    allocator: &VmmTorchAllocator,
    bytes: usize,
    stream: usize,
    kept: bool,
    block: &mut usize,
) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            *block = allocator.0.allocate(bytes as u64, stream_of(stream as *mut _), kept)?.0 as usize;
            Ok(())
        },
    )
}

fn release(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || {
            let current = stream_of(stream as *mut _);
            let readers = [Stream::LEGACY, current];
            let readers = if current == Stream::LEGACY { &readers[..1] } else { &readers };
            let freed = allocator.0.free(Address(block as u64), readers);
            // Torch frees in destructors, where nobody looks at a status.
            freed.inspect_err(|error| tracing::warn!(%error, "torch freed something that is not ours"))
        },
    )
}

fn contains(allocator: &VmmTorchAllocator, address: usize) -> bool {
    let mut contains = false;
    guarded(
        || allocator.0.close_arena(),
        || {
            contains = allocator.0.contains(Address(address as u64));
            Ok(())
        },
    );
    contains
}

fn record_stream(allocator: &VmmTorchAllocator, block: usize, stream: usize) -> i32 {
    guarded(
        || allocator.0.close_arena(),
        || allocator.0.record_stream(Address(block as u64), stream_of(stream as *mut _)),
    )
}

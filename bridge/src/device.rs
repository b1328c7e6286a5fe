//! Requests of `cpp/torch` to a CUDA device, by number. A closed device answers 0 or false.

use std::time::Duration;

use vmmgraph::capi::{arena_of, guarded, stream_of, vmmgraph_arena_t};
use vmmgraph::{Device, DriverChoice, Peers, Result};

use super::cuda_number;

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// CUDA number of the arena's device; -1 if another driver opened it.
        fn cuda_device(arena: usize) -> Result<i32>;
        fn idle_bytes(device: i32) -> u64;
        /// Number of rings with streamed units; below 0: of the process's host device, for tests
        /// without a GPU.
        fn streaming_rings(device: i32) -> u64;
        /// Returns unused memory to the driver without waiting; the bytes.
        fn give_back(device: i32) -> u64;
        /// Like `give_back`, if the free pages exceed `bytes` bytes.
        fn give_back_above(device: i32, bytes: u64) -> u64;
        /// Returns unused memory to the driver and asks reclaimers for the rest. Waits up to
        /// `milliseconds` for the device, and as long for reclaimed memory. Returns whether a retry
        /// may succeed.
        fn make_room(device: i32, bytes: u64, milliseconds: u64) -> bool;
        /// Marks the last replays on a stream before its capture.
        fn mark_on(device: i32, stream: usize);
        /// Reports a capture by torch itself.
        fn note_capture(device: i32);
        /// Grants `peer` access to all pages of `device`, also of later arenas. Returns the status.
        fn admit(device: i32, peer: i32) -> i32;
    }
}

fn cuda_device(arena: usize) -> Result<i32> {
    Ok(cuda_number(arena_of(arena as vmmgraph_arena_t)?.device()))
}

fn idle_bytes(device: i32) -> u64 {
    of_device(DriverChoice::CUDA, device, |device| device.stats().free_bytes)
}

fn streaming_rings(device: i32) -> u64 {
    let choice = if device < 0 { DriverChoice::HOST } else { DriverChoice::CUDA };
    of_device(choice, device.max(0), Device::streaming_rings)
}

fn give_back(device: i32) -> u64 {
    of_device(DriverChoice::CUDA, device, |device| device.give_back(Duration::ZERO))
}

fn give_back_above(device: i32, bytes: u64) -> u64 {
    of_device(DriverChoice::CUDA, device, |device| device.give_back_above(bytes))
}

fn make_room(device: i32, bytes: u64, milliseconds: u64) -> bool {
    let limit = Duration::from_millis(milliseconds);
    of_device(DriverChoice::CUDA, device, |device| device.make_room(bytes, limit))
}

fn mark_on(device: i32, stream: usize) {
    of_device(DriverChoice::CUDA, device, |device| drop(device.mark(stream_of(stream as *mut _))));
}

fn note_capture(device: i32) {
    of_device(DriverChoice::CUDA, device, Device::note_capture);
}

fn admit(device: i32, peer: i32) -> i32 {
    let DriverChoice::Named(platform) = DriverChoice::CUDA else { return 0 };
    guarded(|| (), || Device::admit_to(platform, device, Peers::one(peer)))
}

fn of_device<T: Default>(choice: DriverChoice<'static>, device: i32, ask: impl FnOnce(&Device) -> T) -> T {
    let mut found = T::default();
    let DriverChoice::Named(platform) = choice else { return found };
    guarded(
        || (),
        || {
            found = Device::opened(platform, device).map_or_else(T::default, |device| ask(&device));
            Ok(())
        },
    );
    found
}

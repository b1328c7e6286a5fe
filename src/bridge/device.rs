//! What `cpp/torch` asks of a CUDA device, by its number; of one that is not open the answer is none.

use std::time::Duration;

use super::cuda_number;
use crate::capi::{arena_of, guarded, stream_of, vmmgraph_arena_t};
use crate::device::Device;
use crate::driver::DriverChoice;
use crate::error::Result;
use crate::units::Peers;

#[cxx::bridge(namespace = "vmmgraph::bridge")]
mod ffi {
    extern "Rust" {
        /// The CUDA number of the device of the arena behind a C handle; -1 if another driver opened it.
        fn cuda_device(arena: usize) -> Result<i32>;
        /// Bytes of the free pages of a CUDA device, if it is open.
        fn idle_bytes(device: i32) -> u64;
        /// Rings of a CUDA device, if it is open, that have units which stream; below 0: of the process's host device, which tests without a GPU have.
        fn streaming_rings(device: i32) -> u64;
        /// Gives back what nobody uses of a CUDA device, if it is open; bytes. Waits for nothing.
        fn give_back(device: i32) -> u64;
        /// As `give_back`, if the free pages come to more than so many bytes.
        fn give_back_above(device: i32, bytes: u64) -> u64;
        /// Gives back what nobody uses of a CUDA device, if it is open, and asks reclaimers for what is missing of so many bytes; whether it is worth
        /// trying again. Waits for the device no longer than so many milliseconds, and as long for what they gave.
        fn make_room(device: i32, bytes: u64, milliseconds: u64) -> bool;
        /// Marks behind the last replays on a stream of a CUDA device, if it is open, before that is captured.
        fn mark_on(device: i32, stream: usize);
        /// A capture of torch's own begins on a CUDA device, if that is open.
        fn note_capture(device: i32);
        /// Lets a second CUDA device use all pages of one, also of arenas to come; the status.
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
    // Whoever replays there next is told what stands in the way.
    of_device(DriverChoice::CUDA, device, |device| drop(device.mark(stream_of(stream as *mut _))));
}

fn note_capture(device: i32) {
    of_device(DriverChoice::CUDA, device, Device::note_capture);
}

fn admit(device: i32, peer: i32) -> i32 {
    let DriverChoice::Named(platform) = DriverChoice::CUDA else { return 0 };
    guarded(|| (), || Device::admit_to(platform, device, Peers::one(peer)))
}

/// What a platform's device answers; 0 or no if it is not open.
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

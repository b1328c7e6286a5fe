//! Inspection of a space in C: live blocks, and dependence of a graph on leftover contents.

use std::ffi::{c_char, c_void};

use super::arena::stream_of;
use super::guard::{items, null};
use super::sized::OutStruct;
use super::space::{vmmgraph_launch_fn, vmmgraph_space_t, with};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::Address;
use crate::stats::to_json;

/// Copies the live blocks as a JSON array in address order: address, bytes, and number of the
/// allocation in the space, from 1. With VMMGRAPH_ARENA_TRACE_BLOCKS also the age and the
/// allocating call stack.
///
/// # Safety
/// `buffer` is null or points to `capacity` writable bytes; `needed` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_blocks_json(
    space: vmmgraph_space_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        let text = to_json(&space.blocks());
        // SAFETY: the caller's contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}

/// Output compared by vmmgraph_space_verify: device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_output_t {
    /// First address.
    pub address: *const c_void,
    /// Length in bytes.
    pub bytes: u64,
}

/// Result of vmmgraph_space_verify.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_difference_t {
    /// Set to sizeof(vmmgraph_difference_t) before the call.
    pub struct_size: usize,
    /// 1 if an output depends on leftover contents of shared pages, else 0.
    pub found: u64,
    /// Number of the space.
    pub space: u64,
    /// Index of the output, from 0.
    pub output: u64,
    /// Offset of the first differing byte in the output.
    pub offset: u64,
}

/// Replays twice, over shared pages filled with two different patterns, and compares the outputs
/// bitwise. `launch(user)` must submit the same work to `stream` both times, with unchanged inputs
/// and without random numbers. Waits for the device.
///
/// # Safety
/// As vmmgraph_space_replay; `outputs` points to `count` outputs in device memory of the caller;
/// `difference` is null or points to a struct with struct_size set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_verify(
    space: vmmgraph_space_t,
    stream: *mut c_void,
    outputs: *const vmmgraph_output_t,
    count: usize,
    launch: vmmgraph_launch_fn,
    user: *mut c_void,
    difference: *mut vmmgraph_difference_t,
) -> vmmgraph_status_t {
    with(space, |space| {
        let launch = launch.ok_or_else(|| null("launch"))?;
        // SAFETY: the caller's contract.
        let (outputs, difference) = (unsafe { items(outputs, count, "outputs") }?, unsafe {
            OutStruct::new(difference, "difference")
        }?);
        let outputs: Vec<_> = outputs.iter().map(|o| (Address(o.address as u64), o.bytes)).collect();
        // SAFETY: the caller's contract.
        let found = unsafe { space.verify(stream_of(stream), &outputs, || launch(user)) }?;
        difference.write(vmmgraph_difference_t {
            struct_size: difference.struct_size,
            found: u64::from(found.is_some()),
            space: space.id(),
            output: found.map_or(0, |found| found.output as u64),
            offset: found.map_or(0, |found| found.offset),
        });
        Ok(())
    })
}

use std::ffi::{c_char, c_void};

use super::arena::stream_of;
use super::guard::{items, null};
use super::sized::OutStruct;
use super::space::{vmmgraph_launch_fn, vmmgraph_space_t, with};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::Address;
use crate::stats::to_json;

/// Copies the live blocks as a JSON array by address: address, bytes, number in the space; with
/// VMMGRAPH_ARENA_TRACE_BLOCKS also age and allocating call stack.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_space_blocks_json(
    space: vmmgraph_space_t,
    buffer: *mut c_char,
    capacity: usize,
    needed: *mut usize,
) -> vmmgraph_status_t {
    with(space, |space| {
        let text = to_json(&space.blocks());
        // SAFETY: contract.
        unsafe { copy_text(&text, buffer, capacity, needed) };
        Ok(())
    })
}

/// Device memory compared by vmmgraph_space_verify.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_output_t {
    pub address: *const c_void,
    pub bytes: u64,
}

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_difference_t {
    pub struct_size: usize,
    /// 1 if an output depends on leftover contents of shared pages, else 0.
    pub found: u64,
    pub space: u64,
    pub output: u64,
    /// First differing byte in the output.
    pub offset: u64,
}

/// Replays twice, over shared pages filled with two different patterns, and compares the outputs
/// bitwise. `launch(user)` must submit the same work to `stream` both times, with unchanged inputs
/// and without random numbers. Waits for the device.
///
/// # Safety
/// `outputs` are device memory of the caller.
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
        // SAFETY: contract.
        let (outputs, difference) = (unsafe { items(outputs, count, "outputs") }?, unsafe {
            OutStruct::new(difference, "difference")
        }?);
        let outputs: Vec<_> = outputs.iter().map(|o| (Address(o.address as u64), o.bytes)).collect();
        // SAFETY: contract.
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

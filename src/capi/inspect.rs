//! Looking into a space: what is live in it, and whether its graph relies on what others left.

use std::ffi::{c_char, c_void};

use super::arena::stream_of;
use super::guard::{items, null};
use super::sized::OutStruct;
use super::space::{vmmgraph_launch_fn, vmmgraph_space_t, with};
use super::status::vmmgraph_status_t;
use super::text::copy_text;
use crate::Address;
use crate::stats::to_json;

/// The blocks that are live now as a JSON array, by address: address, bytes, which allocation of the space it was (from 1), and in an
/// arena with VMMGRAPH_ARENA_TRACE_BLOCKS its age and the call stack that allocated it. Copies as vmmgraph_last_error_message does.
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

/// Device memory that vmmgraph_space_verify compares.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_output_t {
    /// Its address.
    pub address: *const c_void,
    /// Its bytes.
    pub bytes: u64,
}

/// What vmmgraph_space_verify found.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_difference_t {
    /// Set to sizeof(vmmgraph_difference_t) before the call.
    pub struct_size: usize,
    /// 1 if an output depends on what was on the shared pages, else 0.
    pub found: u64,
    /// The number of the space.
    pub space: u64,
    /// Which of the outputs, from 0.
    pub output: u64,
    /// The first byte that differs, from the output's beginning.
    pub offset: u64,
}

/// Replays twice over shared pages filled with one pattern and then another, and compares the outputs to the bit. `launch(user)` must
/// give the same work to `stream` both times, over inputs that it leaves as they were, without random numbers. Waits for the device.
///
/// # Safety
/// As vmmgraph_space_replay; `outputs` points to `count` outputs, which are device memory of the caller; `difference` is null or
/// points to a struct whose struct_size is set.
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

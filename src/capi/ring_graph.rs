use std::ffi::c_void;
use std::sync::Arc;

use super::arena::stream_of;
use super::guard::{guard, null, out};
use super::handle::{get, register, remove};
use super::memory::write_number;
use super::ring::vmmgraph_ring_t;
use super::sized::options;
use super::status::vmmgraph_status_t;
use crate::driver::Executable;
use crate::{Ring, RingCaptureOptions, RingGraph};

pub struct vmmgraph_ring_graph {
    _private: (),
}

/// A step of a ring captured into a graph. Must exist as long as the graph may be launched. One
/// launch of a ring at a time.
pub type vmmgraph_ring_graph_t = *mut vmmgraph_ring_graph;

#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_capture_options_t {
    pub struct_size: usize,
    /// Units of the next step copied at the end of this step, at most the slots. 0: one, or none
    /// with VMMGRAPH_RING_WITHIN_STEP. One keeps the link busy between steps; with more, the end of
    /// a step waits for their copies.
    pub tail: usize,
    /// Copy nodes per unit: the most runs a source may later have, at most 4096. Each copying node
    /// costs the host a microsecond per launch. 0: the runs of the current sources, at least one.
    pub most_runs: usize,
}

/// Begins the capture of one step on `stream`, which must be under capture. Until
/// vmmgraph_ring_capture_end, acquires and releases with a capturing stream belong to the step, and
/// no bytes move. Acquire every streamed unit once, in the order of use, and release in the same
/// order. One capture per ring at a time; eager work may continue. `options` may be null.
/// VMMGRAPH_ERROR_WRONG_STATE if a capture is active or the stream is not under capture.
/// VMMGRAPH_ERROR_INVALID_ARGUMENT for more than 4096 runs, or on a platform without graph support.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_capture_begin(
    ring: vmmgraph_ring_t,
    stream: *mut c_void,
    options: *const vmmgraph_ring_capture_options_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        let mut how = RingCaptureOptions::default();
        // SAFETY: contract.
        if let Some(given) = unsafe { self::options(options) }? {
            how = RingCaptureOptions { tail: given.tail, most_runs: given.most_runs };
        }
        Ok(ring.capture_begin(stream_of(stream), &how)?)
    })
}

/// Ends the capture of a step, before the stream's own capture ends. VMMGRAPH_ERROR_WRONG_STATE if
/// no capture is active, a call of the capture failed, or a unit was not acquired or released. A
/// failure abandons the capture.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_capture_end(
    ring: vmmgraph_ring_t,
    stream: *mut c_void,
    graph: *mut vmmgraph_ring_graph_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: contract.
        let graph = unsafe { out(graph, "graph") }?;
        *graph = register(Arc::new(ring.capture_end(stream_of(stream))?));
        Ok(())
    })
}

/// Abandons an active capture, if any, whose graph must not be launched.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_capture_abandon(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Ring, _>(ring)?.capture_abandon();
        Ok(())
    })
}

/// Destroys the handle. The graph must not be launched again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_destroy(graph: vmmgraph_ring_graph_t) -> vmmgraph_status_t {
    guard(|| remove::<RingGraph, _>(graph).map(drop))
}

/// Writes the number of copy nodes in the graph, including nodes without a copy.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_graph_copies(
    graph: vmmgraph_ring_graph_t,
    copies: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: contract.
    guard(|| unsafe { write_number(copies, get::<RingGraph, _>(graph)?.copies() as u64) })
}

/// Forgets the last launched executable, destroyed or updated by other means: the next
/// vmmgraph_ring_graph_enter sets all copy nodes again.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_forget_executable(graph: vmmgraph_ring_graph_t) -> vmmgraph_status_t {
    guard(|| {
        get::<RingGraph, _>(graph)?.forget_executable();
        Ok(())
    })
}

/// Prepares a launch; call before each. Loads the units the graph expects, updates the executable
/// for changed sources, and makes `stream` wait for eager work of the ring. The launch owns the
/// ring until vmmgraph_ring_graph_leave, which must follow. In between, sources set take effect at
/// the next launch, and writes to host buffers read by the graph are VMMGRAPH_ERROR_WRONG_STATE.
///
/// VMMGRAPH_ERROR_WRONG_STATE during another launch, while a unit is acquired, or for a unit
/// without source. VMMGRAPH_ERROR_INVALID_ARGUMENT for a unit with more runs than copy nodes.
/// VMMGRAPH_ERROR_HOST_NOT_REGISTERED; VMMGRAPH_ERROR_STREAM_CAPTURING. After a failure do not call
/// vmmgraph_ring_graph_leave.
///
/// # Safety
/// `executable` is a driver's executable graph (CUgraphExec), instantiated from the existing graph
/// of this capture, used by no other thread until the call returns. Its copy nodes are unchanged
/// since the last call, or vmmgraph_ring_graph_forget_executable was called.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_graph_enter(
    graph: vmmgraph_ring_graph_t,
    executable: *mut c_void,
    stream: *mut c_void,
) -> vmmgraph_status_t {
    guard(|| {
        let graph = get::<RingGraph, _>(graph)?;
        if executable.is_null() {
            return Err(null("executable"));
        }
        // SAFETY: contract.
        Ok(unsafe { graph.enter(Executable::from_raw(executable as u64), stream_of(stream)) }?)
    })
}

/// Ends a launch. `launched` is 1 if the graph was launched on `stream`; 0 if not, or if unknown.
/// VMMGRAPH_ERROR_WRONG_STATE without vmmgraph_ring_graph_enter.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_leave(
    graph: vmmgraph_ring_graph_t,
    stream: *mut c_void,
    launched: i32,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<RingGraph, _>(graph)?.leave(stream_of(stream), launched != 0)?))
}

//! Steps of rings in captured graphs.

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

/// Never defined: a vmmgraph_ring_graph_t is a key, not an address.
pub struct vmmgraph_ring_graph {
    _private: (),
}

/// A step of a ring that was captured into a graph. It keeps the ring. One launch of a ring is given at a time. It stays as long as the graph may
/// be launched.
pub type vmmgraph_ring_graph_t = *mut vmmgraph_ring_graph;

/// How a step is captured. Zero everything, then set struct_size and what differs from the default; 0 is the default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vmmgraph_ring_capture_options_t {
    /// sizeof(vmmgraph_ring_capture_options_t).
    pub struct_size: usize,
    /// Units of the next step that are copied at this one's end, at most as many as there are slots; 0: one, or none with
    /// VMMGRAPH_RING_WITHIN_STEP. One keeps the link busy between two steps; the end of a step waits for more.
    pub tail: usize,
    /// The most runs that the source of a unit will have, each a node of the graph, which costs the host a microsecond a launch while it
    /// copies, at most 4096; 0: as many as the sources have now, and one at least.
    pub most_runs: usize,
}

/// A step is being captured on `stream`, which is under capture, from here on: vmmgraph_ring_acquire and vmmgraph_ring_release with a stream under capture
/// are part of it, and no bytes move. Every unit that streams is acquired once, in the order of use, and released in that order. `options` may be null. One
/// capture at a time; eager work may go on beside it. VMMGRAPH_ERROR_WRONG_STATE if one is under way or the stream is not captured;
/// VMMGRAPH_ERROR_INVALID_ARGUMENT on a platform whose graphs the library does not know.
///
/// # Safety
/// `options` is null or points to a struct whose struct_size is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_capture_begin(
    ring: vmmgraph_ring_t,
    stream: *mut c_void,
    options: *const vmmgraph_ring_capture_options_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        let mut how = RingCaptureOptions::default();
        // SAFETY: the caller's contract.
        if let Some(given) = unsafe { self::options(options) }? {
            how = RingCaptureOptions { tail: given.tail, most_runs: given.most_runs };
        }
        Ok(ring.capture_begin(stream_of(stream), &how)?)
    })
}

/// The end of the step, before that of the stream's capture: nothing of the ring is captured behind it. VMMGRAPH_ERROR_WRONG_STATE unless a capture is
/// under way, if a call of it failed, or if units were not acquired or not released; it is given up then.
///
/// # Safety
/// `graph` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_capture_end(
    ring: vmmgraph_ring_t,
    stream: *mut c_void,
    graph: *mut vmmgraph_ring_graph_t,
) -> vmmgraph_status_t {
    guard(|| {
        let ring = get::<Ring, _>(ring)?;
        // SAFETY: the caller's contract.
        let graph = unsafe { out(graph, "graph") }?;
        *graph = register(Arc::new(ring.capture_end(stream_of(stream))?));
        Ok(())
    })
}

/// Gives a capture up: the graph, if there is one, is not to be launched. Nothing if none is under way.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_capture_abandon(ring: vmmgraph_ring_t) -> vmmgraph_status_t {
    guard(|| {
        get::<Ring, _>(ring)?.capture_abandon();
        Ok(())
    })
}

/// Ends a handle: the graph is launched no more.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_destroy(graph: vmmgraph_ring_graph_t) -> vmmgraph_status_t {
    guard(|| remove::<RingGraph, _>(graph).map(drop))
}

/// How many copies the graph has, those that have nothing to copy included.
///
/// # Safety
/// `copies` is null or writable.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_ring_graph_copies(
    graph: vmmgraph_ring_graph_t,
    copies: *mut u64,
) -> vmmgraph_status_t {
    // SAFETY: the caller's contract.
    guard(|| unsafe { write_number(copies, get::<RingGraph, _>(graph)?.copies() as u64) })
}

/// The executable that was launched last is gone, or was updated otherwise: the next one is told everything, also where it has the same handle.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_forget_executable(graph: vmmgraph_ring_graph_t) -> vmmgraph_status_t {
    guard(|| {
        get::<RingGraph, _>(graph)?.forget_executable();
        Ok(())
    })
}

/// Before each launch: brings resident units, and those that the graph expects to be there; tells the executable what has changed in the sources; and
/// makes `stream` wait for eager work of the ring. Until vmmgraph_ring_graph_leave, which must follow whatever happens, the ring is its. Sources that are set
/// meanwhile count from the next launch on; to write host memory that it reads is VMMGRAPH_ERROR_WRONG_STATE meanwhile.
///
/// VMMGRAPH_ERROR_WRONG_STATE beside another launch, while a unit is acquired, and for a unit without a source; VMMGRAPH_ERROR_INVALID_ARGUMENT for one with
/// more runs than the graph has copies; VMMGRAPH_ERROR_STREAM_CAPTURING. There is nothing to leave then, and the call can be repeated.
///
/// # Safety
/// `executable` is null or the driver's executable graph (CUgraphExec), made of the graph that this was captured into, which is there, and
/// nobody else uses it meanwhile. What it was told before is as it was, unless vmmgraph_ring_graph_forget_executable was called.
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
        // SAFETY: the caller's contract.
        Ok(unsafe { graph.enter(Executable::from_raw(executable as u64), stream_of(stream)) }?)
    })
}

/// Behind vmmgraph_ring_graph_enter: the graph was launched on `stream` (1), or nothing was, or it is not known (0).
/// VMMGRAPH_ERROR_WRONG_STATE if it was not entered.
#[unsafe(no_mangle)]
pub extern "C" fn vmmgraph_ring_graph_leave(
    graph: vmmgraph_ring_graph_t,
    stream: *mut c_void,
    launched: i32,
) -> vmmgraph_status_t {
    guard(|| Ok(get::<RingGraph, _>(graph)?.leave(stream_of(stream), launched != 0)?))
}

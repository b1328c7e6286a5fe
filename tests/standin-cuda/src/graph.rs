//! Graphs and stream work: fills and copies.

use std::cell::RefCell;
use std::ffi::{c_int, c_uchar, c_uint, c_void};
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use standin::capture::{Node, table};
use standin::state::{device_at, devices};
use standin::{Answer, Why, give, graph, refused};

use crate::answer;
use crate::code::{Code, code_of};
use crate::faults::{Call, counted};
use crate::state::{current, target};

/// The legacy stream, used by calls without a stream.
const LEGACY: *mut c_void = std::ptr::null_mut();

/// Calls under way which instantiate or destroy an executable.
static UNDER_WAY: AtomicUsize = AtomicUsize::new(0);
static OVERLAPS: AtomicU64 = AtomicU64::new(0);

/// One call which instantiates or destroys an executable. Counts overlapping calls, which crash the
/// real driver (`bench/cuda/executables_race.cu`).
struct Alone;

impl Alone {
    fn enter() -> Self {
        if UNDER_WAY.fetch_add(1, Ordering::SeqCst) > 0 {
            OVERLAPS.fetch_add(1, Ordering::SeqCst);
        }
        // Gives a second thread time to enter.
        std::thread::yield_now();
        Self
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        UNDER_WAY.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns the number of calls which began while another call instantiated or destroyed an
/// executable.
#[unsafe(no_mangle)]
pub extern "C" fn standin_overlapping_executable_calls() -> u64 {
    OVERLAPS.load(Ordering::SeqCst)
}

/// Instantiates a graph; its memsets must be over mapped addresses by now (measured).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphInstantiateWithFlags(
    out: *mut *mut c_void,
    graph: *mut c_void,
    _flags: u64,
) -> Code {
    answer(|| {
        counted(Call::cuGraphInstantiateWithFlags)?;
        let _alone = Alone::enter();
        current()?;
        table().permit()?;
        if out.is_null() {
            return Err(Why::Invalid);
        }
        let exec = graph::instantiate(graph as u64)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, exec as *mut c_void) }
    })
}

/// Runs a graph on the current mappings, or adds its nodes to the stream's capture.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphLaunch(exec: *mut c_void, stream: *mut c_void) -> Code {
    answer(|| graph::launch(exec as u64, target(stream)?))
}

/// Destroys a graph; its executables live on.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphDestroy(graph: *mut c_void) -> Code {
    answer(|| {
        devices()?;
        table().graphs.remove(&(graph as u64)).map(drop).ok_or(Why::InvalidHandle)
    })
}

/// `CU_GRAPH_NODE_TYPE_MEMCPY` and `..._MEMSET`.
fn kind(node: &Node) -> c_int {
    match node {
        Node::Copy { .. } | Node::Load { .. } => 1,
        Node::Fill { .. } => 2,
    }
}

/// Returns the handle of a graph's node: its place in the graph. No other function takes these
/// handles.
fn node_name(graph: *mut c_void, place: usize) -> *mut c_void {
    ((graph as usize) << NODE_BITS | (place + 1)) as *mut c_void
}

const NODE_BITS: u32 = 20;

/// Returns the graph and the place of a node handle.
fn node_named(node: *mut c_void) -> Answer<(u64, usize)> {
    let place = (node as usize) & ((1 << NODE_BITS) - 1);
    Ok(((node as u64) >> NODE_BITS, place.checked_sub(1).ok_or(Why::InvalidHandle)?))
}

thread_local! {
    /// Predecessors last returned by `cuStreamGetCaptureInfo_v3`.
    static BEHIND: RefCell<Vec<*mut c_void>> = const { RefCell::new(Vec::new()) };
}

/// Writes the graph of a stream's capture and the predecessors of its next work, valid until the
/// thread's next call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamGetCaptureInfo_v3(
    stream: *mut c_void,
    status: *mut c_int,
    id: *mut u64,
    graph: *mut *mut c_void,
    nodes: *mut *const *mut c_void,
    edges: *mut *const [u8; 8],
    count: *mut usize,
) -> Code {
    answer(|| {
        counted(Call::cuStreamGetCaptureInfo_v3)?;
        let target = target(stream)?;
        let info = table().capture_info(target)?;
        if id.is_null() || graph.is_null() || nodes.is_null() || edges.is_null() || count.is_null() {
            return Err(Why::Invalid);
        }
        let active = c_int::from(info.is_some());
        if let Some((captured, places)) = info {
            let captured = captured as *mut c_void;
            BEHIND.with_borrow_mut(|behind| {
                *behind = places.iter().map(|place| node_name(captured, *place)).collect();
                // SAFETY: not null; writable by the caller's contract.
                unsafe {
                    id.write(captured as u64);
                    graph.write(captured);
                    nodes.write(behind.as_ptr());
                    edges.write(std::ptr::null());
                    count.write(behind.len());
                }
            });
        }
        // SAFETY: the caller's contract.
        unsafe { give(status, active) }
    })
}

/// Orders the predecessors of a captured stream's next work (`CU_STREAM_SET_CAPTURE_DEPENDENCIES`).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuStreamUpdateCaptureDependencies_v2(
    stream: *mut c_void,
    nodes: *mut *mut c_void,
    _edges: *const [u8; 8],
    count: usize,
    flags: c_uint,
) -> Code {
    answer(|| {
        counted(Call::cuStreamUpdateCaptureDependencies_v2)?;
        if flags != 1 || nodes.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; `count` nodes by the caller's contract.
        let nodes = unsafe { std::slice::from_raw_parts(nodes, count) };
        let places: Answer<Vec<usize>> =
            nodes.iter().map(|node| node_named(*node).map(|(_, place)| place)).collect();
        table().set_behind(target(stream)?, places?)
    })
}

/// `CUDA_MEMCPY3D`; only fields of a copy in one dimension are named.
#[repr(C)]
pub struct Copy3d {
    from_x: [usize; 4],
    from_kind: c_int,
    from_host: *const u8,
    from_other: [usize; 5],
    to_x: [usize; 4],
    to_kind: c_int,
    to_host: *mut u8,
    to_device: u64,
    to_other: [usize; 4],
    bytes: usize,
    height: usize,
    depth: usize,
}

/// `CU_MEMORYTYPE_HOST` and `..._DEVICE`
const KINDS: (c_int, c_int) = (1, 2);

/// Changes a copy of an executable: one dimension, host to device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecMemcpyNodeSetParams(
    exec: *mut c_void,
    node: *mut c_void,
    params: *const Copy3d,
    context: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuGraphExecMemcpyNodeSetParams)?;
        devices()?;
        if params.is_null() || context.is_null() {
            return Err(Why::Invalid);
        }
        // SAFETY: not null; readable by the caller's contract.
        let params = unsafe { &*params };
        if (params.from_kind, params.to_kind, params.height, params.depth) != (KINDS.0, KINDS.1, 1, 1)
            || params.from_x.iter().chain(&params.to_x).any(|offset| *offset != 0)
        {
            return Err(Why::Invalid);
        }
        // SAFETY: the caller's contract.
        unsafe {
            graph::set_load(exec as u64, node_named(node)?, params.to_device, params.from_host, params.bytes)
        }
    })
}

/// Enables or disables a node in later launches; host copies only.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphNodeSetEnabled(exec: *mut c_void, node: *mut c_void, enabled: c_uint) -> Code {
    answer(|| {
        counted(Call::cuGraphNodeSetEnabled)?;
        devices()?;
        graph::enable(exec as u64, node_named(node)?, enabled != 0)
    })
}

/// Writes as many nodes as fit; without room, their number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphGetNodes(
    graph: *mut c_void,
    out: *mut *mut c_void,
    count: *mut usize,
) -> Code {
    answer(|| {
        let nodes = table().graphs.get(&(graph as u64)).map(Arc::clone).ok_or(Why::InvalidHandle)?;
        if count.is_null() {
            return Err(Why::Invalid);
        }
        if !out.is_null() {
            // SAFETY: not null; readable by the caller's contract.
            let room = unsafe { *count };
            for place in 0..nodes.all.len().min(room) {
                // SAFETY: `room` nodes by the caller's contract.
                unsafe { out.add(place).write(node_name(graph, place)) };
            }
        }
        // SAFETY: not null; writable by the caller's contract.
        unsafe { give(count, nodes.all.len()) }
    })
}

/// Writes the type of a node.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphNodeGetType(node: *mut c_void, out: *mut c_int) -> Code {
    answer(|| {
        let (graph, place) = node_named(node)?;
        let table = table();
        let nodes = table.graphs.get(&graph).ok_or(Why::InvalidHandle)?;
        let node = nodes.all.get(place).ok_or(Why::InvalidHandle)?;
        // SAFETY: the caller's contract.
        unsafe { give(out, kind(node)) }
    })
}

/// Updates an executable, as [`graph::update`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGraphExecUpdate_v2(
    exec: *mut c_void,
    graph: *mut c_void,
    result: *mut c_void,
) -> Code {
    answer(|| {
        counted(Call::cuGraphExecUpdate_v2)?;
        current()?;
        if result.is_null() {
            return Err(Why::Invalid);
        }
        graph::update(exec as u64, graph as u64)
    })
}

/// Refuses: graphs of this stand-in have no kernels.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphKernelNodeGetParams_v2(_node: *mut c_void, _params: *mut c_void) -> Code {
    code_of(Why::Invalid)
}

/// Destroys an executable graph.
#[unsafe(no_mangle)]
pub extern "C" fn cuGraphExecDestroy(exec: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuGraphExecDestroy)?;
        let _alone = Alone::enter();
        devices()?;
        table().execs.remove(&(exec as u64)).map(drop).ok_or(Why::InvalidHandle)
    })
}

/// Repeats a 32-bit value in stream order, as [`graph::fill`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32Async(at: u64, value: c_uint, count: usize, stream: *mut c_void) -> Code {
    answer(|| {
        counted(Call::cuMemsetD32Async)?;
        current()?;
        graph::fill(target(stream)?, at, count as u64, value)
    })
}

/// Copies within device memory in stream order, as [`graph::copy`].
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: *mut c_void) -> Code {
    answer(|| {
        current()?;
        graph::copy(target(stream)?, to, from, len as u64)
    })
}

/// Refuses work on the legacy stream while the stream is blocked.
fn legacy() -> Answer {
    let target = target(LEGACY)?;
    table().enter(target).map(drop)
}

/// Repeats a 32-bit value.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD32_v2(at: u64, value: c_uint, count: usize) -> Code {
    cuMemsetD32Async(at, value, count, LEGACY)
}

/// Repeats a byte.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemsetD8_v2(at: u64, value: c_uchar, count: usize) -> Code {
    answer(|| {
        legacy()?;
        let memory = &device_at(at)?.1.memory;
        if !memory.accessible(at, count as u64) {
            return Err(Why::Invalid);
        }
        const STEP: usize = 1 << 20;
        let bytes = vec![value; STEP.min(count)];
        (0..count).step_by(STEP).try_for_each(|done| {
            memory.write(at + done as u64, &bytes[..STEP.min(count - done)]).map_err(refused)
        })
    })
}

/// Copies to host memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) -> Code {
    answer(|| {
        legacy()?;
        arrived();
        // SAFETY: the caller's contract.
        unsafe { graph::read(to.cast(), from, len) }
    })
}

/// Ranges with bytes of [`cuMemcpyHtoD_v2`] still in transfer.
static STAGED: Mutex<Vec<Range<u64>>> = Mutex::new(Vec::new());

pub(crate) fn arrived() {
    STAGED.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Returns true if bytes are in transfer to the range.
pub(crate) fn on_the_way(at: u64, len: u64) -> bool {
    let staged = STAGED.lock().unwrap_or_else(PoisonError::into_inner);
    staged.iter().any(|staged| staged.start < at.saturating_add(len) && at < staged.end)
}

/// Copies from host memory; returns once the source is read. Bytes of unregistered memory may still
/// be in transfer (CUDA, "API synchronization behavior"; on an H200 unmapping the destination at
/// once ended the context).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) -> Code {
    answer(|| {
        legacy()?;
        // SAFETY: the caller's contract.
        unsafe { graph::write(to, from.cast(), len) }?;
        if !standin::host::registered(from as usize, len)? {
            let mut staged = STAGED.lock().unwrap_or_else(PoisonError::into_inner);
            staged.push(to..to.saturating_add(len as u64));
        }
        Ok(())
    })
}

/// Copies within device memory.
#[unsafe(no_mangle)]
pub extern "C" fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) -> Code {
    cuMemcpyDtoDAsync_v2(to, from, len, LEGACY)
}

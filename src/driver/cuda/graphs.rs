use std::ffi::c_int;
use std::ptr;

use cudarc::driver::sys;

use super::api::{Code, EdgeData, GraphApi};
use super::{CudaDriver, check};
use crate::driver::{CopyNode, Event, Executable, Graph, GraphCopy, GraphNodes, Graphs, Timeline, Transfer};
use crate::error::{Error, Result};
use crate::sync::ProcessMutex;
use crate::units::Stream;

/// As torch 2.11: `CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH` and
/// `CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY`.
const INSTANTIATE_FLAGS: u64 = 1 | 8;
/// `CU_STREAM_SET_CAPTURE_DEPENDENCIES`
const SET_DEPENDENCIES: u32 = 1;
/// `CU_STREAM_CAPTURE_STATUS_ACTIVE`
const CAPTURE_ACTIVE: c_int = 1;
/// Kernels, copies, fills, host functions, empty nodes, event waits and records, semaphore signals
/// and waits, batches of memory operations.
const NEVER_ALLOCATES: [c_int; 10] = [0, 1, 2, 3, 5, 6, 7, 8, 9, 12];

/// Held during `cuGraphInstantiate` and `cuGraphExecDestroy`: concurrent calls crash, even for
/// different graphs (driver 580.159.04, H200, 2026-11-28, `bench/cuda/executables_race.cu`). A leaf
/// lock.
static EXECUTABLES: ProcessMutex<()> = ProcessMutex::new(());

impl CudaDriver {
    fn graph_api() -> Result<&'static GraphApi> {
        GraphApi::get()
    }

    fn graph_call(&self, name: &'static str, call: impl FnOnce(&GraphApi) -> Code) -> Result<()> {
        let graphs = Self::graph_api()?;
        self.call(name, |_| call(graphs))
    }
}

fn template(graph: Graph) -> sys::CUgraph {
    graph.0 as sys::CUgraph
}

fn exec(executable: Executable) -> sys::CUgraphExec {
    executable.0 as sys::CUgraphExec
}

/// The only form accepted for updating a node.
fn one_dimensional(copy: GraphCopy) -> sys::CUDA_MEMCPY3D {
    sys::CUDA_MEMCPY3D {
        srcXInBytes: 0,
        srcY: 0,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_HOST,
        srcHost: copy.from.cast(),
        srcDevice: 0,
        srcArray: ptr::null_mut(),
        reserved0: ptr::null_mut(),
        srcPitch: copy.bytes,
        srcHeight: 1,
        dstXInBytes: 0,
        dstY: 0,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
        dstHost: ptr::null_mut(),
        dstDevice: copy.to.0,
        dstArray: ptr::null_mut(),
        reserved1: ptr::null_mut(),
        dstPitch: copy.bytes,
        dstHeight: 1,
        WidthInBytes: copy.bytes,
        Height: 1,
        Depth: 1,
    }
}

// SAFETY: the driver follows the contract (tests/gpu/conformance.rs, H200).
unsafe impl Graphs for CudaDriver {
    unsafe fn graph_nodes(&self, graph: Graph) -> Result<GraphNodes> {
        let mut count = 0;
        // SAFETY: the graph exists; null requests the count.
        self.graph_call("cuGraphGetNodes", |api| unsafe {
            (api.cuGraphGetNodes)(template(graph), ptr::null_mut(), &raw mut count)
        })?;
        let mut nodes: Vec<sys::CUgraphNode> = vec![ptr::null_mut(); count];
        if count > 0 {
            // SAFETY: as above, with room for `count` nodes.
            self.graph_call("cuGraphGetNodes", |api| unsafe {
                (api.cuGraphGetNodes)(template(graph), nodes.as_mut_ptr(), &raw mut count)
            })?;
            nodes.truncate(count);
        }
        let mut may_allocate = false;
        let graphs = Self::graph_api()?;
        for node in &nodes {
            let mut kind = -1;
            // SAFETY: a node of a live graph; needs no context.
            let code = unsafe { (graphs.cuGraphNodeGetType)(*node, &raw mut kind) };
            check(self.api, "cuGraphNodeGetType", code)?;
            may_allocate |= !NEVER_ALLOCATES.contains(&kind);
        }
        Ok(GraphNodes { count: nodes.len() as u64, may_allocate })
    }

    unsafe fn instantiate(&self, graph: Graph) -> Result<Executable> {
        let mut made = ptr::null_mut();
        // SAFETY: the graph exists, used by no other thread.
        self.graph_call("cuGraphInstantiate", |api| unsafe {
            let _alone = EXECUTABLES.lock();
            (api.cuGraphInstantiateWithFlags)(&raw mut made, template(graph), INSTANTIATE_FLAGS)
        })
        .map_err(|error| self.out_of_memory(0, error))?;
        Ok(Executable(made as u64))
    }

    unsafe fn executable_destroy(&self, executable: Executable) -> Result<()> {
        let graphs = Self::graph_api()?;
        // SAFETY: our executable, destroyed once.
        self.give_back("cuGraphExecDestroy", |_| unsafe {
            let _alone = EXECUTABLES.lock();
            (graphs.cuGraphExecDestroy)(exec(executable))
        })
    }

    unsafe fn capture_copy(&self, copy: GraphCopy, on: Stream) -> Result<CopyNode> {
        // SAFETY: the contract; captured now, run at each launch.
        unsafe { self.copy_from_host(copy.to, copy.from, copy.bytes, on) }?;
        // SAFETY: the stream exists.
        let (status, behind) = unsafe { self.capture_info(on) }?;
        // Only this copy precedes the stream's next node. No further call can invalidate the
        // capture.
        match behind[..] {
            [(node, _)] if status == CAPTURE_ACTIVE => Ok(CopyNode(node as u64)),
            _ => {
                let count = behind.len();
                let what = format!(
                    "a captured copy left its stream behind {count} nodes, in capture status {status}"
                );
                Err(Error::Internal { what })
            }
        }
    }

    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the stream and the event exist.
        let (_, before) = unsafe { self.capture_info(stream) }?;
        // SAFETY: as above.
        unsafe { self.event_wait(event, stream) }?;
        if before.is_empty() {
            return Ok(());
        }
        // SAFETY: as above.
        let (_, mut behind) = unsafe { self.capture_info(stream) }?;
        let more = behind.len().saturating_sub(before.len());
        if more == 0 {
            return Ok(());
        }
        behind.rotate_right(more);
        let (mut nodes, edges): (Vec<_>, Vec<_>) = behind.into_iter().unzip();
        // SAFETY: nodes of the stream's capture with their edge data.
        self.graph_call("cuStreamUpdateCaptureDependencies", |api| unsafe {
            let on = stream.raw() as sys::CUstream;
            (api.cuStreamUpdateCaptureDependencies_v2)(
                on,
                nodes.as_mut_ptr(),
                edges.as_ptr(),
                nodes.len(),
                SET_DEPENDENCIES,
            )
        })
    }

    unsafe fn executable_set_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        copy: GraphCopy,
    ) -> Result<()> {
        let params = one_dimensional(copy);
        // SAFETY: all objects exist; no other thread uses the executable.
        self.graph_call("cuGraphExecMemcpyNodeSetParams", |api| unsafe {
            let node = node.0 as sys::CUgraphNode;
            (api.cuGraphExecMemcpyNodeSetParams)(exec(executable), node, &raw const params, self.context)
        })
    }

    unsafe fn executable_enable_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        enabled: bool,
    ) -> Result<()> {
        // SAFETY: as above.
        self.graph_call("cuGraphNodeSetEnabled", |api| unsafe {
            (api.cuGraphNodeSetEnabled)(exec(executable), node.0 as sys::CUgraphNode, u32::from(enabled))
        })
    }
}

impl CudaDriver {
    /// Status of a capture, and the dependencies of its next node with their edge data.
    ///
    /// # Safety
    /// The stream exists.
    unsafe fn capture_info(&self, stream: Stream) -> Result<(c_int, Vec<(sys::CUgraphNode, EdgeData)>)> {
        let (mut status, mut id, mut graph, mut count) = (0, 0, ptr::null_mut(), 0);
        let (mut nodes, mut edges): (*const sys::CUgraphNode, *const EdgeData) = (ptr::null(), ptr::null());
        // SAFETY: valid out pointers, existing stream.
        self.graph_call("cuStreamGetCaptureInfo", |api| unsafe {
            (api.cuStreamGetCaptureInfo_v3)(
                stream.raw() as sys::CUstream,
                &raw mut status,
                &raw mut id,
                &raw mut graph,
                &raw mut nodes,
                &raw mut edges,
                &raw mut count,
            )
        })?;
        if status != CAPTURE_ACTIVE || nodes.is_null() {
            return Ok((status, Vec::new()));
        }
        let of = |place| {
            // SAFETY: arrays of `count` elements, until the next call with the stream.
            unsafe {
                (*nodes.add(place), if edges.is_null() { EdgeData::default() } else { *edges.add(place) })
            }
        };
        Ok((status, (0..count).map(of).collect()))
    }
}

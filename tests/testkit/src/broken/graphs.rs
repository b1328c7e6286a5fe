//! Its graphs, where the driver below has any.

use vmmgraph::Result;
use vmmgraph::Stream;
use vmmgraph::driver::{CopyNode, Event, Executable, Graph, GraphCopy, GraphShape, Graphs};

use super::{BrokenDriver, Flaw, refused};

impl BrokenDriver {
    fn below(&self) -> Result<&dyn Graphs> {
        self.inner.graphs().ok_or_else(|| refused("graphs", "none"))
    }
}

// SAFETY: as above.
unsafe impl Graphs for BrokenDriver {
    unsafe fn graph_shape(&self, graph: Graph) -> Result<GraphShape> {
        // SAFETY: the caller's promise.
        let shape = unsafe { self.below()?.graph_shape(graph) }?;
        Ok(if self.is(Flaw::GraphUncounted) { GraphShape { nodes: 0, ..shape } } else { shape })
    }

    unsafe fn instantiate(&self, graph: Graph, frees: bool) -> Result<Executable> {
        // SAFETY: the caller's promise.
        unsafe { self.below()?.instantiate(graph, frees) }
    }

    unsafe fn executable_update(&self, executable: Executable, graph: Graph) -> Result<bool> {
        if self.is(Flaw::UpdateDoesNothing) {
            return Ok(true);
        }
        // SAFETY: the caller's promise.
        unsafe { self.below()?.executable_update(executable, graph) }
    }

    unsafe fn executable_destroy(&self, executable: Executable) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.below()?.executable_destroy(executable) }
    }

    unsafe fn capture_copy(&self, copy: GraphCopy, stream: Stream) -> Result<CopyNode> {
        // SAFETY: the caller's promise.
        unsafe { self.below()?.capture_copy(copy, stream) }
    }

    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.below()?.capture_wait(event, stream) }
    }

    unsafe fn executable_set_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        copy: GraphCopy,
    ) -> Result<()> {
        if self.is(Flaw::CopyKept) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.below()?.executable_set_copy(executable, node, copy) }
    }

    unsafe fn executable_enable_copy(
        &self,
        executable: Executable,
        node: CopyNode,
        enabled: bool,
    ) -> Result<()> {
        if self.is(Flaw::CopyAlwaysOn) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.below()?.executable_enable_copy(executable, node, enabled) }
    }
}

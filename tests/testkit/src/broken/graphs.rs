//! Graphs of a [`BrokenDriver`], if the inner driver has graphs.

use vmmgraph::Result;
use vmmgraph::Stream;
use vmmgraph::driver::{CopyNode, Event, Executable, Graph, GraphCopy, GraphNodes, Graphs};

use super::{BrokenDriver, Flaw, refused};

impl BrokenDriver {
    fn below(&self) -> Result<&dyn Graphs> {
        self.inner.graphs().ok_or_else(|| refused("graphs", "none"))
    }
}

// SAFETY: as above.
unsafe impl Graphs for BrokenDriver {
    unsafe fn graph_nodes(&self, graph: Graph) -> Result<GraphNodes> {
        // SAFETY: the caller's contract.
        let nodes = unsafe { self.below()?.graph_nodes(graph) }?;
        Ok(if self.is(Flaw::GraphUncounted) { GraphNodes { count: 0, ..nodes } } else { nodes })
    }

    unsafe fn instantiate(&self, graph: Graph) -> Result<Executable> {
        // SAFETY: the caller's contract.
        unsafe { self.below()?.instantiate(graph) }
    }

    unsafe fn executable_destroy(&self, executable: Executable) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.below()?.executable_destroy(executable) }
    }

    unsafe fn capture_copy(&self, copy: GraphCopy, stream: Stream) -> Result<CopyNode> {
        // SAFETY: the caller's contract.
        unsafe { self.below()?.capture_copy(copy, stream) }
    }

    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
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
        // SAFETY: the caller's contract.
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
        // SAFETY: the caller's contract.
        unsafe { self.below()?.executable_enable_copy(executable, node, enabled) }
    }
}

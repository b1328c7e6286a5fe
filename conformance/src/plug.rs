//! Captures, which are the engine's and not behind the door.

use vmmgraph::Stream;
use vmmgraph::driver::{Executable, Graph};

/// What is launched.
#[derive(Clone, Copy, Debug)]
pub enum Launch {
    /// A graph as the capture left it.
    Graph(Graph),
    /// An executable that the door made of one.
    Executable(Executable),
}

/// How a platform's captures are made. Failures are words.
pub trait Plug: Sync {
    /// Begins to capture a stream, in the mode that allows the thread the least.
    ///
    /// # Errors
    /// What the platform says.
    fn begin(&self, stream: Stream) -> Result<(), String>;

    /// Ends the capture; the graph, if it is intact.
    ///
    /// # Errors
    /// What broke it, as the platform says.
    fn end(&self, stream: Stream) -> Result<Graph, String>;

    /// Destroys a graph.
    fn destroy(&self, graph: Graph);

    /// Launches on a stream that is not captured, and does not wait.
    ///
    /// # Errors
    /// What the platform says.
    fn launch(&self, what: Launch, stream: Stream) -> Result<(), String>;

    /// What the platform keeps for the calling thread: the context or device that is current, and its capture mode.
    ///
    /// # Errors
    /// What the platform says.
    fn thread_state(&self) -> Result<Vec<u64>, String>;
}

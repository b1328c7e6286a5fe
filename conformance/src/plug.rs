//! Captures: made by the engine, not part of the driver interface.

use vmmgraph::Stream;
use vmmgraph::driver::{Executable, Graph};

/// Object to launch.
#[derive(Clone, Copy, Debug)]
pub enum Launch {
    /// A graph as returned by the capture.
    Graph(Graph),
    /// An executable made through the driver interface.
    Executable(Executable),
}

/// Capture functions of a platform. Errors are texts.
pub trait Plug: Sync {
    /// Begins to capture a stream, in the most restrictive mode.
    ///
    /// # Errors
    /// The platform's error.
    fn begin(&self, stream: Stream) -> Result<(), String>;

    /// Ends the capture and returns the graph.
    ///
    /// # Errors
    /// The platform's error if the capture was invalidated.
    fn end(&self, stream: Stream) -> Result<Graph, String>;

    /// Destroys a graph.
    fn destroy(&self, graph: Graph);

    /// Launches on a stream outside captures, without waiting.
    ///
    /// # Errors
    /// The platform's error.
    fn launch(&self, what: Launch, stream: Stream) -> Result<(), String>;

    /// Returns the platform's state of the calling thread: current context or device, and capture
    /// mode.
    ///
    /// # Errors
    /// The platform's error.
    fn thread_state(&self) -> Result<Vec<u64>, String>;
}

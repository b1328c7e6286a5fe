//! Driver with graphs of host copies, for tests of threads changing an executable.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, CopyNode, DeviceInfo, Driver, Event, Executable, Graph, GraphCopy, GraphNodes, Graphs,
    SharedDriver, StreamState, Timeline, Transfer,
};
use vmmgraph::{Address, Error, Result, Stream};

type Copy = (Address, usize, usize);

#[derive(Default)]
struct State {
    captured: BTreeSet<u64>,
    inside: HashSet<Event>,
    nodes: Vec<Copy>,
    /// Copies of the only executable, by node; `None`: disabled.
    told: BTreeMap<u64, Option<Copy>>,
}

/// Adds captures (one at a time) and graphs (one executable) to another driver.
pub struct CopyingDriver {
    inner: SharedDriver,
    state: Mutex<State>,
}

impl CopyingDriver {
    /// Creates the driver over a driver without graphs.
    #[must_use]
    pub fn new(inner: SharedDriver) -> Arc<Self> {
        Arc::new(Self { inner, state: Mutex::default() })
    }

    /// Begins to capture a stream.
    pub fn begin(&self, stream: Stream) {
        self.state.lock().captured.insert(stream.raw());
    }

    /// Ends the capture and returns its executable, with the copies as captured.
    #[must_use]
    pub fn end(&self) -> Executable {
        let mut state = self.state.lock();
        state.captured.clear();
        state.inside.clear();
        state.told = state.nodes.iter().enumerate().map(|(node, copy)| (node as u64, Some(*copy))).collect();
        // SAFETY: the only executable of this driver.
        unsafe { Executable::from_raw(1) }
    }

    /// Returns the number of copies in the graph.
    #[must_use]
    pub fn copies(&self) -> u64 {
        self.state.lock().nodes.len() as u64
    }

    /// Returns the copies of a launch submitted now, in capture order: destination, source, bytes;
    /// `None`: disabled.
    #[must_use]
    pub fn told(&self) -> Vec<Option<(Address, usize, usize)>> {
        self.state.lock().told.values().copied().collect()
    }

    /// Does half of a copy with its current parameters: a real copy takes time.
    ///
    /// # Errors
    /// The errors of the inner driver.
    ///
    /// # Safety
    /// Only during a launch; one launch at a time.
    pub unsafe fn copy_half(&self, node: u64, second: bool) -> Result<()> {
        let copy = self.state.lock().told.get(&node).copied().flatten();
        let Some((to, from, bytes)) = copy else { return Ok(()) };
        // SAFETY: the source exists: contract of `executable_set_copy`.
        let from = unsafe { std::slice::from_raw_parts(from as *const u8, bytes) };
        let (first, rest) = from.split_at(bytes / 2);
        // SAFETY: the destination is mapped: the same contract.
        unsafe {
            if second {
                self.inner.write(to.plus(first.len() as u64), rest)
            } else {
                self.inner.write(to, first)
            }
        }
    }
}

impl fmt::Debug for CopyingDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CopyingDriver").finish_non_exhaustive()
    }
}

impl Driver for CopyingDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn graphs(&self) -> Option<&dyn Graphs> {
        Some(self)
    }
}

crate::passing::passes_memory_on!(CopyingDriver);

// SAFETY: the inner driver does the work under the callers' contracts; captured streams get none.
unsafe impl Timeline for CopyingDriver {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        let captured = self.state.lock().captured.contains(&stream.raw());
        Ok(if captured { StreamState::Capturing } else { StreamState::Ready })
    }
    fn other_context(&self) -> Option<u64> {
        self.inner.other_context()
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        self.inner.in_primary(work)
    }

    fn event_create(&self) -> Result<Event> {
        self.inner.event_create()
    }
    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.event_destroy(event) }
    }
    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        if state.captured.contains(&stream.raw()) {
            state.inside.insert(event);
            return Ok(());
        }
        state.inside.remove(&event);
        drop(state);
        // SAFETY: as above.
        unsafe { self.inner.event_record(event, stream) }
    }
    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        if state.inside.contains(&event) {
            state.captured.insert(stream.raw());
            return Ok(());
        }
        drop(state);
        // SAFETY: as above.
        unsafe { self.inner.event_wait(event, stream) }
    }
    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        // SAFETY: as above.
        unsafe { self.inner.event_query(event) }
    }
    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.event_synchronize(event) }
    }
    fn stream_create(&self) -> Result<Stream> {
        self.inner.stream_create()
    }
    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.stream_destroy(stream) }
    }
}

// SAFETY: the inner driver does the work.
unsafe impl Transfer for CopyingDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.fill(at, len, value, stream) }
    }
    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.read(at, into) }
    }
    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.write(at, from) }
    }
    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.host_register(at, len) }
    }
    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.host_unregister(at) }
    }
    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.copy_to_host(from, to, len, stream) }
    }
    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.inner.copy_from_host(to, from, len, stream) }
    }
}

fn refused() -> Error {
    Error::Driver { call: "a graph", code: 801, name: "NOT_SUPPORTED".into() }
}

// SAFETY: copies are numbers until `copy_half` does one.
unsafe impl Graphs for CopyingDriver {
    unsafe fn graph_nodes(&self, _: Graph) -> Result<GraphNodes> {
        Err(refused())
    }
    unsafe fn instantiate(&self, _: Graph) -> Result<Executable> {
        Err(refused())
    }
    unsafe fn executable_destroy(&self, _: Executable) -> Result<()> {
        Ok(())
    }
    unsafe fn capture_copy(&self, copy: GraphCopy, stream: Stream) -> Result<CopyNode> {
        let mut state = self.state.lock();
        if !state.captured.contains(&stream.raw()) {
            return Err(refused());
        }
        state.nodes.push((copy.to, copy.from as usize, copy.bytes));
        // SAFETY: a node of this driver.
        Ok(unsafe { CopyNode::from_raw(state.nodes.len() as u64 - 1) })
    }
    unsafe fn capture_wait(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.event_wait(event, stream) }
    }
    unsafe fn executable_set_copy(&self, _: Executable, node: CopyNode, copy: GraphCopy) -> Result<()> {
        self.state.lock().told.insert(node.raw(), Some((copy.to, copy.from as usize, copy.bytes)));
        Ok(())
    }
    unsafe fn executable_enable_copy(&self, _: Executable, node: CopyNode, enabled: bool) -> Result<()> {
        if !enabled {
            self.state.lock().told.insert(node.raw(), None);
        }
        Ok(())
    }
}

use std::fmt;

use super::HostPiece;
use crate::driver::{CopyNode, Event, Executable, GraphCopy, Graphs, SharedDriver, StreamState};
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

/// A stream of the library in the caller's capture, for copies from the host as graph nodes, and
/// events for its order. Lives until the capture ends.
pub(crate) struct Branch {
    driver: SharedDriver,
    stream: Stream,
    points: Vec<Event>,
}

/// Part of registered host memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part<'a> {
    pub(crate) piece: &'a HostPiece,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
}

impl Part<'_> {
    fn copy(&self, to: Address) -> Result<GraphCopy> {
        if self.from.checked_add(self.bytes).is_none_or(|end| end > self.piece.bytes()) || self.bytes == 0 {
            let limit = self.piece.bytes().saturating_sub(self.from);
            return Err(Error::InvalidSize { what: "a part of host memory", bytes: self.bytes, limit });
        }
        let from = self.piece.base().wrapping_add(self.from as usize).cast_const();
        Ok(GraphCopy { to, from, bytes: self.bytes as usize })
    }
}

fn graphs(driver: &SharedDriver) -> Result<&dyn Graphs> {
    let (what, expected) = ("a ring's capture", "on a platform whose graphs are behind the driver interface");
    driver.graphs().ok_or(Error::InvalidArgument { what, value: 0, expected })
}

impl Branch {
    /// Creates a stream outside any capture, with `points` events. Fails on a platform without
    /// graphs ([`Error::InvalidArgument`]).
    pub(crate) fn new(driver: &SharedDriver, points: usize) -> Result<Self> {
        graphs(driver)?;
        let stream = driver.stream_create()?;
        let mut branch = Self { driver: SharedDriver::clone(driver), stream, points: Vec::new() };
        for _ in 0..points {
            branch.points.push(branch.driver.event_create()?);
        }
        Ok(branch)
    }

    pub(crate) fn stream(&self) -> Stream {
        self.stream
    }

    pub(crate) fn points(&self) -> usize {
        self.points.len()
    }

    pub(crate) fn free(&self) -> bool {
        // SAFETY: a live stream of this object.
        let state = unsafe { self.driver.stream_state(self.stream) };
        state == Ok(StreamState::Ready)
    }

    fn point(&self, point: usize) -> Result<Event> {
        let none = || Error::Internal { what: "a branch lacks a point".to_owned() };
        self.points.get(point).copied().ok_or_else(none)
    }

    /// Records a point after the work of a captured stream.
    pub(crate) fn mark(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: our event; the stream is ours, or captured by the owner for this purpose.
        unsafe { self.driver.event_record(self.point(point)?, stream) }
    }

    /// Adds the stream to the capture.
    pub(crate) fn wait(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.event_wait(self.point(point)?, stream) }
    }

    /// Waits in a stream already in the capture: the point becomes the first dependency of its next
    /// node.
    pub(crate) fn join(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { graphs(&self.driver)?.capture_wait(self.point(point)?, stream) }
    }

    /// Captures a copy. Before a launch, the destination must be mapped and the source valid, or
    /// the executable have a different copy.
    pub(crate) fn copy(&self, to: Address, part: Part<'_>) -> Result<CopyNode> {
        let copy = part.copy(to)?;
        // SAFETY: our stream, in the capture; a launch is a separate unsafe call.
        unsafe { graphs(&self.driver)?.capture_copy(copy, self.stream) }
    }
}

/// Each update costs the host about as much as one node in a launch, so only changes are sent.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CopyNodeState {
    /// Destination, source and bytes, if known.
    copy: Option<(Address, usize, usize)>,
    enabled: Option<bool>,
}

/// Updates or disables a copy node of an executable.
///
/// # Safety
/// Executable of the node's graph, both live and unshared; `part` as for [`Branch::copy`]. `known`
/// describes this node of this executable, with valid registrations.
pub(crate) unsafe fn update_copy_node(
    driver: &SharedDriver,
    executable: Executable,
    node: CopyNode,
    known: &mut CopyNodeState,
    copy: Option<(Address, Part<'_>)>,
) -> Result<()> {
    let graphs = graphs(driver)?;
    if let Some((to, part)) = copy {
        let copy = part.copy(to)?;
        let now = Some((copy.to, copy.from as usize, copy.bytes));
        if known.copy != now {
            // Unknown after a failure.
            known.copy = None;
            // SAFETY: the caller's promise.
            unsafe { graphs.executable_set_copy(executable, node, copy) }?;
            known.copy = now;
        }
    }
    if known.enabled != Some(copy.is_some()) {
        known.enabled = None;
        // SAFETY: the caller's promise.
        unsafe { graphs.executable_enable_copy(executable, node, copy.is_some()) }?;
        known.enabled = Some(copy.is_some());
    }
    Ok(())
}

impl Drop for Branch {
    fn drop(&mut self) {
        let warn = |result: Result<()>| {
            if let Err(error) = result {
                tracing::warn!(%error, "the driver would not take a branch's stream or event back");
            }
        };
        for event in self.points.drain(..) {
            // SAFETY: our event, destroyed once; captured work already has its dependencies.
            warn(unsafe { self.driver.event_destroy(event) });
        }
        // SAFETY: a stream of this object, destroyed once.
        warn(unsafe { self.driver.stream_destroy(self.stream) });
    }
}

impl fmt::Debug for Branch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Branch")
            .field("stream", &self.stream)
            .field("points", &self.points.len())
            .finish_non_exhaustive()
    }
}

//! A branch of somebody's capture: a stream of the library's own that takes part in it, with copies from the host on it.

use std::fmt;

use super::HostPiece;
use crate::driver::{CopyNode, Event, Executable, GraphCopy, Graphs, SharedDriver, StreamState};
use crate::error::{Error, Result};
use crate::units::{Address, Stream};

/// A stream, and events to order it and the captured stream by. It stays until the capture is over.
pub(crate) struct Branch {
    driver: SharedDriver,
    stream: Stream,
    points: Vec<Event>,
}

/// What a copy of a graph is to copy: a part of registered host memory.
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
    let (what, expected) = ("a ring's capture", "on a platform whose graphs are behind the door");
    driver.graphs().ok_or(Error::InvalidArgument { what, value: 0, expected })
}

impl Branch {
    /// A stream that is in no capture yet, and so many points.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] on a platform without graphs; what the driver says.
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

    /// Whether it is in no capture any more.
    pub(crate) fn free(&self) -> bool {
        // SAFETY: a stream of ours, which is there.
        let state = unsafe { self.driver.stream_state(self.stream) };
        state == Ok(StreamState::Ready)
    }

    fn point(&self, point: usize) -> Result<Event> {
        let none = || Error::Internal { what: "a branch lacks a point".to_owned() };
        self.points.get(point).copied().ok_or_else(none)
    }

    /// Moves a point behind what a stream of the capture was given.
    pub(crate) fn mark(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: an event of ours; the stream is ours or that of a caller who captures it and named it to be added to.
        unsafe { self.driver.event_record(self.point(point)?, stream) }
    }

    /// A stream of the capture goes on behind a point, which brings it into the capture.
    pub(crate) fn wait(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.driver.event_wait(self.point(point)?, stream) }
    }

    /// As [`wait`](Self::wait), of a stream that is in the capture already: the point comes first among what its next node is behind.
    pub(crate) fn join(&self, point: usize, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { graphs(&self.driver)?.capture_wait(self.point(point)?, stream) }
    }

    /// Captures a copy on the branch. Nothing is copied before the graph is launched: whoever does that has seen to it that the destination is
    /// mapped and the part is there, or has told the executable another copy.
    pub(crate) fn copy(&self, to: Address, part: Part<'_>) -> Result<CopyNode> {
        let copy = part.copy(to)?;
        // SAFETY: our own stream, which is in the capture; to launch the graph is another's unsafe act.
        unsafe { graphs(&self.driver)?.capture_copy(copy, self.stream) }
    }
}

/// What an executable was told of one of its copies, so that it is told no more than has changed: each call costs the host about as much as a
/// launch costs it a node.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ToldCopy {
    /// Where to, from which address, and how many bytes; `None`: nobody knows.
    copy: Option<(Address, usize, usize)>,
    enabled: Option<bool>,
}

/// Tells an executable that one of its copies is another one, or none.
///
/// # Safety
/// An executable of the graph that the node is in, both there, which no other thread uses; the part as for [`Branch::copy`]. `told` is what
/// this executable was told of the node, of registrations that are still those.
pub(crate) unsafe fn tell(
    driver: &SharedDriver,
    executable: Executable,
    node: CopyNode,
    told: &mut ToldCopy,
    copy: Option<(Address, Part<'_>)>,
) -> Result<()> {
    let graphs = graphs(driver)?;
    if let Some((to, part)) = copy {
        let copy = part.copy(to)?;
        let now = Some((copy.to, copy.from as usize, copy.bytes));
        if told.copy != now {
            // Unknown if it fails.
            told.copy = None;
            // SAFETY: the caller's promise.
            unsafe { graphs.executable_set_copy(executable, node, copy) }?;
            told.copy = now;
        }
    }
    if told.enabled != Some(copy.is_some()) {
        told.enabled = None;
        // SAFETY: the caller's promise.
        unsafe { graphs.executable_enable_copy(executable, node, copy.is_some()) }?;
        told.enabled = Some(copy.is_some());
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
            // SAFETY: an event of ours, destroyed once. What was captured behind it has its edges.
            warn(unsafe { self.driver.event_destroy(event) });
        }
        // SAFETY: a stream of ours, destroyed once.
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

//! Capture of a step into a graph: copies fork from the captured stream, run in the order of use,
//! and join the stream again.

use std::ops::Range;
use std::sync::Arc;

use super::graph::RingGraph;
use super::state::{Source, no_source};
use super::{HostBuffer, Pinning, Ring, gone, no_unit};
use crate::driver::CopyNode;
use crate::error::{Error, Result};
use crate::pages::Branch;
use crate::units::Stream;

/// Options of a captured step.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingCaptureOptions {
    /// Units of the next step copied at the end of this step: `vmmgraph_ring_capture_options_t`.
    pub tail: usize,
    /// Maximum runs of a unit's source: `vmmgraph_ring_capture_options_t`.
    pub most_runs: usize,
}

#[derive(Debug)]
pub(super) struct StepCapture {
    branch: Branch,
    positions: Range<usize>,
    most_runs: Option<usize>,
    next: usize,
    released: usize,
    /// By position from `positions.start`.
    nodes: Vec<Vec<CopyNode>>,
    /// Source for nodes without a run, which launches disable.
    nothing: Arc<HostBuffer>,
    /// A call failed, so the capture is unusable.
    broken: bool,
}

/// A launch with more than a thousand nodes in all is too slow.
const MOST_RUNS: usize = 4096;

/// One point for fork and join, and two for each slot.
const FORK: usize = 0;
fn copied(slot: usize) -> usize {
    1 + 2 * slot
}
fn released(slot: usize) -> usize {
    2 + 2 * slot
}

impl Ring {
    /// Begins to capture a step on a stream: `vmmgraph_ring_capture_begin`. Launches go through the
    /// [`RingGraph`].
    pub fn capture_begin(&self, stream: Stream, options: &RingCaptureOptions) -> Result<()> {
        if self.device.pool().events().ready(stream)? {
            return Err(Error::wrong_state(
                "cannot begin the capture of a ring: its stream is not being captured; begin the stream's capture first",
            ));
        }
        if options.most_runs > MOST_RUNS {
            let (what, value) = ("the most runs of a unit", options.most_runs as i128);
            return Err(Error::InvalidArgument { what, value, expected: "at most 4096" });
        }
        let mut state = self.state.lock();
        if state.capturing.is_some() {
            return Err(Error::wrong_state(
                "cannot begin the capture of a ring: another one is under way; end or abandon that one first",
            ));
        }
        let nothing = match &state.nothing {
            Some(nothing) => Arc::clone(nothing),
            None => Arc::clone(state.nothing.insert(self.device.host_buffer(1, Pinning::Required)?)),
        };
        let points = 1 + 2 * self.schedule.slots();
        // A branch whose capture ended.
        let idle = state.branches.iter().position(|branch| branch.points() == points && branch.free());
        let branch = match idle {
            Some(idle) => state.branches.swap_remove(idle),
            None => Branch::new(self.device.driver(), points)?,
        };
        let tail = if self.across_steps { options.tail.max(1) } else { 0 };
        let positions = self.schedule.copies(tail);
        let mut capturing = StepCapture {
            branch,
            positions,
            most_runs: (options.most_runs > 0).then_some(options.most_runs),
            next: 0,
            released: 0,
            nodes: Vec::new(),
            nothing,
            broken: false,
        };
        let result = self.begin(&mut capturing, &state.sources, stream);
        if result.is_err() {
            state.branches.push(capturing.branch);
            return result;
        }
        state.capturing = Some(capturing);
        Ok(())
    }

    fn begin(&self, capturing: &mut StepCapture, sources: &Sources, stream: Stream) -> Result<()> {
        if !capturing.positions.is_empty() {
            capturing.branch.mark(FORK, stream)?;
            capturing.branch.wait(FORK, capturing.branch.stream())?;
        }
        self.capture_copies(capturing, sources)
    }

    /// Ends the step: `vmmgraph_ring_capture_end`.
    pub fn capture_end(self: &Arc<Self>, stream: Stream) -> Result<RingGraph> {
        let mut state = self.state.lock();
        let Some(mut capturing) = state.capturing.take() else {
            return Err(Error::wrong_state(
                "cannot end the capture of a ring: none is under way; begin one first",
            ));
        };
        let result = self.end(&mut capturing, &state.sources, stream);
        let StepCapture { branch, nodes, positions, .. } = capturing;
        // Part of the capture until it ends.
        state.branches.push(branch);
        drop(state);
        result?;
        Ok(RingGraph::new(Arc::clone(self), positions.start, nodes))
    }

    fn end(&self, capturing: &mut StepCapture, sources: &Sources, stream: Stream) -> Result<()> {
        let wrong = |reason| {
            Err(Error::wrong_state(format!(
                "cannot end the capture of a ring: {reason}; acquire and release every streamed unit once, in the order of use"
            )))
        };
        if capturing.broken {
            return wrong("a call of it failed");
        }
        let streamed = self.schedule.streamed().len();
        if capturing.next < streamed {
            return wrong("some units were not acquired");
        }
        if capturing.released < streamed {
            return wrong("a unit was not released");
        }
        self.capture_copies(capturing, sources)?;
        if !capturing.positions.is_empty() {
            capturing.branch.mark(FORK, capturing.branch.stream())?;
            capturing.branch.join(FORK, stream)?;
        }
        Ok(())
    }

    /// Abandons a capture, whose graph must not be launched.
    pub fn capture_abandon(&self) {
        let mut state = self.state.lock();
        if let Some(capturing) = state.capturing.take() {
            state.branches.push(capturing.branch);
        }
    }

    pub(super) fn acquire_captured(&self, unit: usize, stream: Stream) -> Result<()> {
        self.captured(stream, |ring, capturing, sources| {
            let Some(position) = ring.schedule.position_of(unit) else { return ring.resident(sources, unit) };
            if position != capturing.next {
                let expected = "the next in the capture's order";
                return Err(Error::InvalidArgument { what: "a ring's unit", value: unit as i128, expected });
            }
            ring.capture_copies(capturing, sources)?;
            if position >= capturing.positions.start {
                let slot = position % ring.schedule.slots();
                if capturing.nodes.len() <= position - capturing.positions.start {
                    return Err(Error::wrong_state(
                        "cannot acquire the unit: another unit of its slot is not released; release that one first",
                    ));
                }
                capturing.branch.join(copied(slot), stream)?;
            }
            capturing.next += 1;
            Ok(())
        })
    }

    pub(super) fn release_captured(&self, unit: usize, stream: Stream) -> Result<()> {
        self.captured(stream, |ring, capturing, sources| {
            let Some(position) = ring.schedule.position_of(unit) else { return ring.resident(sources, unit) };
            if position != capturing.released || position >= capturing.next {
                return Err(Error::wrong_state(
                    "cannot release the unit: it is not the first one that is acquired; release units in the order of use",
                ));
            }
            capturing.branch.mark(released(position % ring.schedule.slots()), stream)?;
            capturing.released += 1;
            ring.capture_copies(capturing, sources)
        })
    }

    /// Adds nothing to the graph.
    fn resident(&self, sources: &Sources, unit: usize) -> Result<()> {
        self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
        source_of(sources, unit).map(drop)
    }

    fn captured(
        &self,
        stream: Stream,
        call: impl FnOnce(&Self, &mut StepCapture, &Sources) -> Result<()>,
    ) -> Result<()> {
        let mut guard = self.state.lock();
        let state = &mut *guard;
        let Some(capturing) = &mut state.capturing else {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        };
        let result = call(self, capturing, &state.sources);
        capturing.broken |= result.is_err();
        result
    }

    /// Captures copies in order, while slots are free.
    fn capture_copies(&self, capturing: &mut StepCapture, sources: &Sources) -> Result<()> {
        let slots = self.schedule.slots();
        loop {
            let position = capturing.positions.start + capturing.nodes.len();
            // The previous step's, or released in this one.
            let reader = position.checked_sub(slots);
            if position >= capturing.positions.end
                || reader.is_some_and(|reader| reader >= capturing.released)
            {
                return Ok(());
            }
            let slot = position % slots;
            if reader.is_some() {
                capturing.branch.wait(released(slot), capturing.branch.stream())?;
            }
            let unit = self.schedule.unit_at(position).ok_or_else(gone)?;
            let nodes = self.capture_unit(capturing, sources, unit)?;
            capturing.nodes.push(nodes);
            capturing.branch.mark(copied(slot), capturing.branch.stream())?;
        }
    }

    fn capture_unit(&self, capturing: &StepCapture, sources: &Sources, unit: usize) -> Result<Vec<CopyNode>> {
        let runs = &source_of(sources, unit)?.runs;
        let base = self.address(unit)?;
        let most = capturing.most_runs.unwrap_or(runs.len().max(1));
        if runs.len() > most {
            let expected = "at most the runs stated for the capture";
            return Err(Error::InvalidArgument {
                what: "a unit's runs",
                value: runs.len() as i128,
                expected,
            });
        }
        let mut nodes = Vec::with_capacity(most);
        for place in 0..most {
            // The graph's `RingGraph` keeps the ring and all buffers read.
            let node = match runs.get(place) {
                Some(run) => capturing.branch.copy(base.plus(run.to), run.source.part(run.from, run.bytes)?),
                None => capturing.branch.copy(base, capturing.nothing.part(0, 1)?),
            };
            nodes.push(node?);
        }
        Ok(nodes)
    }
}

type Sources = [Option<Source>];

fn source_of(sources: &Sources, unit: usize) -> Result<&Source> {
    sources.get(unit).and_then(Option::as_ref).ok_or_else(no_source)
}

//! A step in a captured graph: copies fork from the captured stream, run beside it in the order of use, and come back to it.

use std::ops::Range;
use std::sync::Arc;

use super::books::{Source, no_source};
use super::graph::RingGraph;
use super::{HostBuffer, Pinning, Ring, gone, no_unit};
use crate::driver::CopyNode;
use crate::error::{Error, Result};
use crate::pages::Branch;
use crate::units::Stream;

/// How a step is captured.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingCaptureOptions {
    /// Units of the next step that are copied at this one's end, at most as many as there are slots; 0: one, or none in a ring that copies
    /// nothing ahead of a step ([`within_step`](super::RingOptions::within_step)). One keeps the link busy between two steps; the end of a step waits for more.
    pub tail: usize,
    /// The most runs that the source of a unit will have, each a node of the graph, which costs the host a microsecond a launch while it
    /// copies, at most 4096; 0: as many as the sources have now, and one at least.
    pub most_runs: usize,
}

/// A capture that is under way.
#[derive(Debug)]
pub(super) struct StepCapture {
    branch: Branch,
    /// The turns that the step copies.
    turns: Range<usize>,
    most_runs: Option<usize>,
    /// The turn whose unit is acquired next.
    next: usize,
    /// The turn whose unit is released next.
    released: usize,
    /// Nodes, by turn from `turns.start` on.
    nodes: Vec<Vec<CopyNode>>,
    /// What is copied where a unit has no run: a byte that counts for nothing, as such a node is left out of every launch.
    nothing: Arc<HostBuffer>,
    /// A call failed: what was captured is not a step.
    broken: bool,
}

/// The most runs of a unit that a capture is told of: nodes, of which a launch can hardly do with more than a thousand in all.
const MOST_RUNS: usize = 4096;

/// Points of a branch: one to fork and to join, and two for each slot.
const FORK: usize = 0;
fn copied(slot: usize) -> usize {
    1 + 2 * slot
}
fn released(slot: usize) -> usize {
    2 + 2 * slot
}

impl Ring {
    /// A step is being captured on a stream from here on: an [`acquire`](Self::acquire) and a [`release`](Self::release) with a stream under capture are part
    /// of it, and no bytes move. Every unit that streams is acquired once, in the order of use, and released in that order. What is
    /// launched of it goes through the [`RingGraph`]. One capture at a time; eager work may go on beside it.
    ///
    /// # Errors
    /// [`Error::WrongState`] if one is under way, or the stream is not captured; [`Error::InvalidArgument`] on a platform without graphs, and for more than 4096 runs a unit;
    /// those of [`Device::host_buffer`](crate::Device::host_buffer); what the driver says.
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
        let mut books = self.books.lock();
        if books.capturing.is_some() {
            return Err(Error::wrong_state(
                "cannot begin the capture of a ring: another one is under way; end or abandon that one first",
            ));
        }
        let nothing = match &books.nothing {
            Some(nothing) => Arc::clone(nothing),
            None => Arc::clone(books.nothing.insert(self.device.host_buffer(1, Pinning::Required)?)),
        };
        let points = 1 + 2 * self.schedule.slots();
        // One whose capture is over.
        let idle = books.branches.iter().position(|branch| branch.points() == points && branch.free());
        let branch = match idle {
            Some(idle) => books.branches.swap_remove(idle),
            None => Branch::new(self.device.driver(), points)?,
        };
        let tail = if self.across_steps { options.tail.max(1) } else { 0 };
        let turns = self.schedule.copies(tail);
        let mut capturing = StepCapture {
            branch,
            turns,
            most_runs: (options.most_runs > 0).then_some(options.most_runs),
            next: 0,
            released: 0,
            nodes: Vec::new(),
            nothing,
            broken: false,
        };
        let result = self.begin(&mut capturing, &books.sources, stream);
        if result.is_err() {
            books.branches.push(capturing.branch);
            return result;
        }
        books.capturing = Some(capturing);
        Ok(())
    }

    fn begin(&self, capturing: &mut StepCapture, sources: &Sources, stream: Stream) -> Result<()> {
        if !capturing.turns.is_empty() {
            capturing.branch.mark(FORK, stream)?;
            capturing.branch.wait(FORK, capturing.branch.stream())?;
        }
        self.capture_copies(capturing, sources)
    }

    /// The end of the step: nothing of the ring is captured behind it.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless a capture is under way, if a call of it failed, or if units were not acquired or not released; what the
    /// driver says. The capture is [abandoned](Self::capture_abandon) then.
    pub fn capture_end(self: &Arc<Self>, stream: Stream) -> Result<RingGraph> {
        let mut books = self.books.lock();
        let Some(mut capturing) = books.capturing.take() else {
            return Err(Error::wrong_state(
                "cannot end the capture of a ring: none is under way; begin one first",
            ));
        };
        let result = self.end(&mut capturing, &books.sources, stream);
        let StepCapture { branch, nodes, turns, .. } = capturing;
        // It is in the capture until that ends.
        books.branches.push(branch);
        drop(books);
        result?;
        Ok(RingGraph::new(Arc::clone(self), turns.start, nodes))
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
        if !capturing.turns.is_empty() {
            capturing.branch.mark(FORK, capturing.branch.stream())?;
            capturing.branch.join(FORK, stream)?;
        }
        Ok(())
    }

    /// Gives a capture up: the graph, if there is one, is not to be launched. Nothing if none is under way.
    pub fn capture_abandon(&self) {
        let mut books = self.books.lock();
        if let Some(capturing) = books.capturing.take() {
            books.branches.push(capturing.branch);
        }
    }

    /// [`acquire`](Self::acquire) with a stream under capture.
    pub(super) fn acquire_captured(&self, unit: usize, stream: Stream) -> Result<()> {
        self.captured(stream, |ring, capturing, sources| {
            let Some(turn) = ring.schedule.turn_of(unit) else { return ring.resident(sources, unit) };
            if turn != capturing.next {
                let expected = "in a capture, the one whose turn it is";
                return Err(Error::InvalidArgument { what: "a ring's unit", value: unit as i128, expected });
            }
            ring.capture_copies(capturing, sources)?;
            if turn >= capturing.turns.start {
                let slot = turn % ring.schedule.slots();
                if capturing.nodes.len() <= turn - capturing.turns.start {
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

    /// [`release`](Self::release) with a stream under capture.
    pub(super) fn release_captured(&self, unit: usize, stream: Stream) -> Result<()> {
        self.captured(stream, |ring, capturing, sources| {
            let Some(turn) = ring.schedule.turn_of(unit) else { return ring.resident(sources, unit) };
            if turn != capturing.released || turn >= capturing.next {
                return Err(Error::wrong_state(
                    "cannot release the unit: it is not the first one that is acquired; release units in the order of use",
                ));
            }
            capturing.branch.mark(released(turn % ring.schedule.slots()), stream)?;
            capturing.released += 1;
            ring.capture_copies(capturing, sources)
        })
    }

    /// A resident unit needs nothing of the graph, but is to have a source.
    fn resident(&self, sources: &Sources, unit: usize) -> Result<()> {
        self.schedule.place_of(unit).ok_or_else(|| no_unit(unit))?;
        source_of(sources, unit).map(drop)
    }

    fn captured(
        &self,
        stream: Stream,
        call: impl FnOnce(&Self, &mut StepCapture, &Sources) -> Result<()>,
    ) -> Result<()> {
        let mut guard = self.books.lock();
        let books = &mut *guard;
        let Some(capturing) = &mut books.capturing else {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        };
        let result = call(self, capturing, &books.sources);
        capturing.broken |= result.is_err();
        result
    }

    /// Captures the copies whose slots are free by now, in order.
    fn capture_copies(&self, capturing: &mut StepCapture, sources: &Sources) -> Result<()> {
        let slots = self.schedule.slots();
        loop {
            let turn = capturing.turns.start + capturing.nodes.len();
            // The slot's last reader is in the step before, or was released in this one.
            let reader = turn.checked_sub(slots);
            if turn >= capturing.turns.end || reader.is_some_and(|reader| reader >= capturing.released) {
                return Ok(());
            }
            let slot = turn % slots;
            if reader.is_some() {
                capturing.branch.wait(released(slot), capturing.branch.stream())?;
            }
            let unit = self.schedule.unit_at(turn).ok_or_else(gone)?;
            let nodes = self.capture_unit(capturing, sources, unit)?;
            capturing.nodes.push(nodes);
            capturing.branch.mark(copied(slot), capturing.branch.stream())?;
        }
    }

    /// Captures the copies of a unit.
    fn capture_unit(&self, capturing: &StepCapture, sources: &Sources, unit: usize) -> Result<Vec<CopyNode>> {
        let runs = &source_of(sources, unit)?.runs;
        let base = self.address(unit)?;
        let most = capturing.most_runs.unwrap_or(runs.len().max(1));
        if runs.len() > most {
            let expected = "at most as many as the capture was told";
            return Err(Error::InvalidArgument {
                what: "a unit's runs",
                value: runs.len() as i128,
                expected,
            });
        }
        let mut nodes = Vec::with_capacity(most);
        for place in 0..most {
            // A graph is launched through its `RingGraph`, which keeps the ring and what it has told the executable to read.
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

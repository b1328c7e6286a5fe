//! Captured step: updates the executable before a launch and records the contents after it.
//!
//! Lock order: `RingGraph::node_states`, `Ring::state`, `HostBuffer::used`, `Launches`. No lock is
//! held between `enter` and `leave`: `RingState::launching` reserves the ring.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::host::changes;
use super::schedule::Held;
use super::state::{Launching, RingState, Stores, no_source};
use super::{HostBuffer, Ring, no_unit};
use crate::driver::{CopyNode, Executable};
use crate::error::{Error, Result};
use crate::pages::{CopyNodeState, Fence, Part, update_copy_node};
use crate::sync::Mutex;
use crate::units::Stream;

/// A captured step of a ring, which it keeps alive. Thread-safe. A ring has one launch in progress
/// at a time. Drop only when the graph and its executables are no longer launched.
pub struct RingGraph {
    ring: Arc<Ring>,
    tail: usize,
    copies: usize,
    node_states: Mutex<NodeStates>,
    launches: Arc<Launches>,
}

#[derive(Debug, Default)]
struct NodeStates {
    executable: Option<Executable>,
    /// By position, from the tail on.
    units: Vec<UnitNodes>,
    /// The next change number at the last launch, and its copies. With the same number, the next
    /// launch copies the same: it reads a few words instead of every source.
    last: Option<(u64, Launching)>,
}

#[derive(Debug, Default)]
struct UnitNodes {
    /// Change number of the source; 0: none yet.
    set: u64,
    buffers: SmallVec<[Arc<HostBuffer>; 1]>,
    copies: SmallVec<[(CopyNode, CopyNodeState); 1]>,
}

impl UnitNodes {
    fn forget(&mut self) {
        self.copies.iter_mut().for_each(|(_, copy)| *copy = CopyNodeState::default());
    }
}

impl NodeStates {
    /// Keeps the buffers: the previous executable may still be launched.
    fn forget(&mut self) {
        self.executable = None;
        self.last = None;
        for unit in &mut self.units {
            unit.set = 0;
            unit.forget();
        }
    }
}

/// Launches as seen by the buffers a graph reads.
#[derive(Default)]
pub(super) struct Launches(Mutex<LaunchState>);

#[derive(Default)]
struct LaunchState {
    giving: bool,
    last: Fence,
}

impl Launches {
    /// Fails while a launch is in progress.
    pub(super) fn over(&self) -> Result<Fence> {
        let state = self.0.lock();
        if state.giving { Err(under_way()) } else { Ok(state.last.clone()) }
    }

    /// Fence of the last launch of a graph without a launch in progress.
    pub(super) fn last(&self) -> Fence {
        self.0.lock().last.clone()
    }

    fn given(&self) -> Result<()> {
        let sentence = "cannot leave the launch of a ring's graph: it was not entered; enter it first";
        if self.0.lock().giving { Ok(()) } else { Err(Error::wrong_state(sentence)) }
    }

    fn begin(&self) -> Result<()> {
        let mut state = self.0.lock();
        if std::mem::replace(&mut state.giving, true) { Err(under_way()) } else { Ok(()) }
    }

    fn end(&self, last: Option<Fence>) {
        let mut state = self.0.lock();
        state.giving = false;
        if let Some(last) = last {
            state.last = last;
        }
    }
}

fn under_way() -> Error {
    Error::wrong_state(
        "cannot use host memory or a graph of the ring: a launch that reads it is being made; wait until that launch is left",
    )
}

impl RingGraph {
    pub(super) fn new(ring: Arc<Ring>, tail: usize, nodes: Vec<Vec<CopyNode>>) -> Self {
        let copies = nodes.iter().map(Vec::len).sum();
        let unit = |nodes: Vec<CopyNode>| UnitNodes {
            copies: nodes.into_iter().map(|node| (node, CopyNodeState::default())).collect(),
            ..UnitNodes::default()
        };
        let node_states =
            NodeStates { executable: None, units: nodes.into_iter().map(unit).collect(), last: None };
        Self { ring, tail, copies, node_states: Mutex::new(node_states), launches: Arc::default() }
    }

    /// Returns the ring.
    #[must_use]
    pub fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }

    /// Returns the number of copy nodes, also disabled ones.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Reports that the executable was destroyed, or updated by other code: the next launch updates
    /// every node.
    pub fn forget_executable(&self) {
        self.node_states.lock().forget();
    }

    /// Prepares a launch, until [`leave`](Self::leave): `vmmgraph_ring_graph_enter`.
    ///
    /// # Safety
    /// `executable` is made of the captured graph, which still exists, and is used by no other
    /// thread meanwhile. Its copy nodes are unchanged since the last call, unless
    /// [forgotten](Self::forget_executable).
    pub unsafe fn enter(&self, executable: Executable, stream: Stream) -> Result<()> {
        let events = self.ring.device.pool().events();
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        self.launches.begin()?;
        let mut node_states = self.node_states.lock();
        let mut state = self.ring.state.lock();
        // SAFETY: the caller's promise.
        let result = unsafe { self.prepare(&mut node_states, &mut state, executable, stream) };
        match result {
            Ok(launching) => {
                state.launching = Some(launching);
                Ok(())
            }
            Err(error) => {
                self.launches.end(None);
                Err(error)
            }
        }
    }

    unsafe fn prepare(
        &self,
        node_states: &mut NodeStates,
        state: &mut RingState,
        executable: Executable,
        stream: Stream,
    ) -> Result<Launching> {
        state.between_launches()?;
        if state.acquired() > 0 {
            return Err(Error::wrong_state(
                "cannot launch the ring's graph: eager work holds a unit; release it first",
            ));
        }
        let ring = &self.ring;
        let events = ring.device.pool().events();
        if node_states.executable != Some(executable) {
            node_states.forget();
            node_states.executable = Some(executable);
        }
        // After this launch began and before any source is read.
        let next = changes();
        let same = node_states.last.take().filter(|(at, _)| *at == next).map(|(_, launching)| launching);
        let early = ring.schedule.streamed().iter().take(self.tail);
        for unit in ring.schedule.residents().iter().chain(early) {
            let there = same.as_ref().is_some_and(|same| ring.holds(state, *unit, &same.stamps));
            let filled = !there && ring.fill(state, *unit)?;
            state.counts.filled_ahead += u64::from(filled);
        }
        let (launching, stores) = match same {
            Some(same) => (same, Fence::default()),
            None => {
                for (at, node_states) in node_states.units.iter_mut().enumerate() {
                    let unit = ring.schedule.unit_at(self.tail + at).ok_or_else(|| no_unit(at))?;
                    // SAFETY: the caller's promise.
                    unsafe { self.update_unit(node_states, state, unit, executable) }?;
                }
                self.launching(state)?
            }
        };
        let mut before = std::mem::take(&mut state.graphs);
        before.join(stores);
        for place in &mut state.places {
            before.join(std::mem::take(&mut place.ready));
            before.join(std::mem::take(&mut place.readers));
        }
        let result = before.before(events, stream);
        // Kept until `leave`, in case of an error.
        state.graphs = before;
        result?;
        node_states.last = Some((next, launching.clone()));
        Ok(launching)
    }

    /// The next launch, and the running stores to its sources.
    fn launching(&self, state: &RingState) -> Result<(Launching, Fence)> {
        let (mut launching, mut stores) = (Launching::default(), Stores::default());
        let mut stamps = Vec::with_capacity(state.sources.len());
        for (unit, source) in state.sources.iter().enumerate() {
            let stamp = source.as_ref().map_or(Ok(0), |source| source.stamp_and_stores(&mut stores))?;
            stamps.push(stamp);
            if let Some(source) = source.as_ref().filter(|_| self.ring.schedule.position_of(unit).is_some()) {
                launching.copies += source.runs.len() as u64;
                launching.bytes += source.runs.iter().map(|run| run.bytes).sum::<u64>();
            }
        }
        launching.stamps = stamps.into();
        Ok((launching, stores.fence))
    }

    unsafe fn update_unit(
        &self,
        node_states: &mut UnitNodes,
        state: &RingState,
        unit: usize,
        executable: Executable,
    ) -> Result<()> {
        let source = state.sources.get(unit).and_then(Option::as_ref).ok_or_else(no_source)?;
        if node_states.set == source.set {
            return Ok(());
        }
        if source.runs.len() > node_states.copies.len() {
            let (what, expected) = ("a unit's runs", "at most as many as its graph has copies");
            return Err(Error::InvalidArgument { what, value: source.runs.len() as i128, expected });
        }
        let base = self.ring.address(unit)?;
        let parts =
            source.runs.iter().map(|run| Ok((base.plus(run.to), run.source.part(run.from, run.bytes)?)));
        let parts = parts.collect::<Result<SmallVec<[(_, Part<'_>); 1]>>>()?;
        node_states.set = 0;
        let same = node_states.buffers.iter().eq(source.runs.iter().map(|run| &run.source));
        let mut old = SmallVec::new();
        if !same {
            // Before the executable reads a buffer, and until it no longer does.
            let new: SmallVec<[_; 1]> = source.runs.iter().map(|run| Arc::clone(&run.source)).collect();
            new.iter().for_each(|buffer| buffer.read_by(&self.launches));
            old = std::mem::replace(&mut node_states.buffers, new);
            // Different memory may be registered at the same addresses.
            node_states.forget();
        }
        let driver = self.ring.device.driver();
        let result = node_states.copies.iter_mut().enumerate().try_for_each(|(place, (node, copy))| {
            // SAFETY: the caller's promise; the graph keeps the registered parts.
            unsafe { update_copy_node(driver, executable, *node, copy, parts.get(place).copied()) }
        });
        if result.is_err() {
            // The executable may read old or new buffers.
            node_states.buffers.extend(old);
            return result;
        }
        old.iter().for_each(|buffer| buffer.no_longer_read_by(&self.launches));
        node_states.set = source.set;
        Ok(())
    }

    /// Ends a launch. `launched`: the graph was launched on `stream`; false also if unknown.
    /// [`Error::WrongState`] without [`enter`](Self::enter).
    pub fn leave(&self, stream: Stream, launched: bool) -> Result<()> {
        self.launches.given()?;
        let ring = &self.ring;
        let mut last = Fence::default();
        // Recorded later if the stream cannot be recorded now.
        last.add(ring.device.pool().events(), stream);
        let mut guard = ring.state.lock();
        let state = &mut *guard;
        let launching = state.launching.take().unwrap_or_default();
        state.graphs = last.clone();
        let mut held: Vec<Option<Held>> = state.places.iter().map(|place| place.held).collect();
        if launched {
            ring.schedule.advance(self.tail, &mut held, &launching.stamps);
            state.counts.launches += 1;
            state.counts.copies += launching.copies;
            state.counts.copied_bytes += launching.bytes;
        } else {
            held.iter_mut().take(ring.schedule.slots()).for_each(|held| *held = None);
        }
        for (place, held) in state.places.iter_mut().zip(held) {
            place.held = held;
        }
        drop(guard);
        self.launches.end(Some(last));
        Ok(())
    }

    /// Calls [`enter`](Self::enter), `launch` (which launches on `stream`, without a lock) and
    /// [`leave`](Self::leave). Passes on the result of `launch`.
    ///
    /// # Errors
    /// As [`enter`](Self::enter), without calling `launch`.
    ///
    /// # Safety
    /// As [`enter`](Self::enter).
    pub unsafe fn launch<T, E>(
        &self,
        executable: Executable,
        stream: Stream,
        launch: impl FnOnce() -> Result<T, E>,
    ) -> Result<Result<T, E>> {
        // SAFETY: the caller's promise.
        unsafe { self.enter(executable, stream) }?;
        let result = launch();
        self.leave(stream, result.is_ok())?;
        Ok(result)
    }
}

impl Drop for RingGraph {
    fn drop(&mut self) {
        for unit in std::mem::take(&mut self.node_states.get_mut().units) {
            unit.buffers.iter().for_each(|buffer| buffer.no_longer_read_by(&self.launches));
        }
    }
}

impl fmt::Debug for RingGraph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RingGraph")
            .field("ring", &self.ring.id)
            .field("copies", &self.copies())
            .finish_non_exhaustive()
    }
}

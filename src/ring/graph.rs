//! A captured step: what its executable is told before a launch, and what the ring knows behind it.

use std::fmt;
use std::sync::Arc;

use smallvec::SmallVec;

use super::books::{Books, Launching, Stores, no_source};
use super::host::changes;
use super::schedule::Held;
use super::{HostBuffer, Ring, no_unit};
use crate::driver::{CopyNode, Executable};
use crate::error::{Error, Result};
use crate::pages::{Fence, Part, ToldCopy, tell};
use crate::sync::Mutex;
use crate::units::Stream;

/// A step of a ring that was captured. It keeps the ring.
///
/// Thread-safe; one launch of a ring is given at a time. It goes when its graph and the executables of that have gone, or are launched no more.
pub struct RingGraph {
    ring: Arc<Ring>,
    tail: usize,
    copies: usize,
    told: Mutex<Told>,
    launches: Arc<Launches>,
}

/// What the executable was told.
#[derive(Debug, Default)]
struct Told {
    executable: Option<Executable>,
    /// By turn, from the tail on.
    units: Vec<ToldUnit>,
    /// What its last launch found: which change was next, and what it copied. While that is the next one, it copies the same, and what stores are
    /// behind was waited for. So a launch reads a few words and not every source of the ring, which the caches have lost where a step lasts long.
    last: Option<(u64, Launching)>,
}

#[derive(Debug, Default)]
struct ToldUnit {
    /// The change of the source that it was told of; 0: nothing yet.
    set: u64,
    /// The memory that is read, by run.
    buffers: SmallVec<[Arc<HostBuffer>; 1]>,
    copies: SmallVec<[(CopyNode, ToldCopy); 1]>,
}

impl ToldUnit {
    /// What its copies are nobody knows.
    fn forget(&mut self) {
        self.copies.iter_mut().for_each(|(_, copy)| *copy = ToldCopy::default());
    }
}

impl Told {
    /// Nobody knows what the next executable copies. What the last one reads it may still be launched for.
    fn forget(&mut self) {
        self.executable = None;
        self.last = None;
        for unit in &mut self.units {
            unit.set = 0;
            unit.forget();
        }
    }
}

/// The launches of a graph, for the host memory that they read.
#[derive(Default)]
pub(super) struct Launches(Mutex<LaunchState>);

#[derive(Default)]
struct LaunchState {
    /// One is being given.
    giving: bool,
    /// Behind the last one.
    last: Fence,
}

impl Launches {
    /// Behind the launches that were given.
    ///
    /// # Errors
    /// [`Error::WrongState`] while one is being given.
    pub(super) fn over(&self) -> Result<Fence> {
        let state = self.0.lock();
        if state.giving { Err(under_way()) } else { Ok(state.last.clone()) }
    }

    /// Behind the launches that were given, of a graph that has none under way.
    pub(super) fn last(&self) -> Fence {
        self.0.lock().last.clone()
    }

    /// That one is being given.
    fn given(&self) -> Result<()> {
        let sentence = "cannot leave the launch of a ring's graph: it was not entered; enter it first";
        if self.0.lock().giving { Ok(()) } else { Err(Error::wrong_state(sentence)) }
    }

    fn begin(&self) -> Result<()> {
        let mut state = self.0.lock();
        if std::mem::replace(&mut state.giving, true) { Err(under_way()) } else { Ok(()) }
    }

    /// One was given, or was not.
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
        let unit = |nodes: Vec<CopyNode>| ToldUnit {
            copies: nodes.into_iter().map(|node| (node, ToldCopy::default())).collect(),
            ..ToldUnit::default()
        };
        let told = Told { executable: None, units: nodes.into_iter().map(unit).collect(), last: None };
        Self { ring, tail, copies, told: Mutex::new(told), launches: Arc::default() }
    }

    /// The ring.
    #[must_use]
    pub fn ring(&self) -> &Arc<Ring> {
        &self.ring
    }

    /// How many copies the graph has, those that have nothing to copy included.
    #[must_use]
    pub fn copies(&self) -> usize {
        self.copies
    }

    /// Its executable is gone, or was updated otherwise: the next one is told everything, also where it has the same handle.
    pub fn forget_executable(&self) {
        self.told.lock().forget();
    }

    /// Before a launch: brings resident units, and those that the graph expects to be there; tells the executable what changed in the sources; and
    /// makes `stream` wait for eager work of the ring. Until [`leave`](Self::leave), which must follow whatever happens, the ring is its. Sources that are
    /// set meanwhile count from the next launch on; host memory that it reads is not written meanwhile.
    ///
    /// # Errors
    /// [`Error::WrongState`] beside another launch, while a unit is acquired, and for a unit without a source; [`Error::InvalidArgument`] for one with more
    /// runs than the graph has copies; [`Error::HostNotRegistered`]; [`Error::StreamCapturing`]; what the driver says. There is nothing to leave
    /// then, and the call can be repeated.
    ///
    /// # Safety
    /// An executable made of the graph that this was captured into, used by no other thread meanwhile; the graph itself is there. What it was told here
    /// before is as it was, unless that was [forgotten](Self::forget_executable).
    pub unsafe fn enter(&self, executable: Executable, stream: Stream) -> Result<()> {
        let events = self.ring.device.pool().events();
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        self.launches.begin()?;
        let mut told = self.told.lock();
        let mut books = self.ring.books.lock();
        // SAFETY: the caller's promise.
        let result = unsafe { self.prepare(&mut told, &mut books, executable, stream) };
        match result {
            Ok(launching) => {
                books.launching = Some(launching);
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
        told: &mut Told,
        books: &mut Books,
        executable: Executable,
        stream: Stream,
    ) -> Result<Launching> {
        books.between_launches()?;
        if books.acquired() > 0 {
            return Err(Error::wrong_state(
                "cannot launch the ring's graph: eager work holds a unit; release it first",
            ));
        }
        let ring = &self.ring;
        let events = ring.device.pool().events();
        if told.executable != Some(executable) {
            told.forget();
            told.executable = Some(executable);
        }
        // Behind the beginning of this launch, and before anything is looked at.
        let next = changes();
        let same = told.last.take().filter(|(at, _)| *at == next).map(|(_, launching)| launching);
        let early = ring.schedule.streamed().iter().take(self.tail);
        for unit in ring.schedule.residents().iter().chain(early) {
            let there = same.as_ref().is_some_and(|same| ring.holds(books, *unit, &same.stamps));
            let filled = !there && ring.fill(books, *unit)?;
            books.counts.filled_ahead += u64::from(filled);
        }
        let (launching, stores) = match same {
            Some(same) => (same, Fence::default()),
            None => {
                for (at, told) in told.units.iter_mut().enumerate() {
                    let unit = ring.schedule.unit_at(self.tail + at).ok_or_else(|| no_unit(at))?;
                    // SAFETY: the caller's promise.
                    unsafe { self.tell(told, books, unit, executable) }?;
                }
                self.launching(books)?
            }
        };
        let mut before = std::mem::take(&mut books.graphs);
        before.join(stores);
        for place in &mut books.places {
            before.join(std::mem::take(&mut place.ready));
            before.join(std::mem::take(&mut place.readers));
        }
        let result = before.before(events, stream);
        // What is behind the launch is behind all of it, so this is asked for until then.
        books.graphs = before;
        result?;
        told.last = Some((next, launching.clone()));
        Ok(launching)
    }

    /// What the launch copies, and what is behind the copies to what it reads.
    fn launching(&self, books: &Books) -> Result<(Launching, Fence)> {
        let (mut launching, mut stores) = (Launching::default(), Stores::default());
        let mut stamps = Vec::with_capacity(books.sources.len());
        for (unit, source) in books.sources.iter().enumerate() {
            let stamp = source.as_ref().map_or(Ok(0), |source| source.stamp_and_stores(&mut stores))?;
            stamps.push(stamp);
            if let Some(source) = source.as_ref().filter(|_| self.ring.schedule.turn_of(unit).is_some()) {
                launching.copies += source.runs.len() as u64;
                launching.bytes += source.runs.iter().map(|run| run.bytes).sum::<u64>();
            }
        }
        launching.stamps = stamps.into();
        Ok((launching, stores.fence))
    }

    /// Tells the executable what a unit is copied from, if that has changed.
    unsafe fn tell(
        &self,
        told: &mut ToldUnit,
        books: &Books,
        unit: usize,
        executable: Executable,
    ) -> Result<()> {
        let source = books.sources.get(unit).and_then(Option::as_ref).ok_or_else(no_source)?;
        if told.set == source.set {
            return Ok(());
        }
        if source.runs.len() > told.copies.len() {
            let (what, expected) = ("a unit's runs", "at most as many as its graph has copies");
            return Err(Error::InvalidArgument { what, value: source.runs.len() as i128, expected });
        }
        let base = self.ring.address(unit)?;
        let parts =
            source.runs.iter().map(|run| Ok((base.plus(run.to), run.source.part(run.from, run.bytes)?)));
        let parts = parts.collect::<Result<SmallVec<[(_, Part<'_>); 1]>>>()?;
        told.set = 0;
        // Mostly it is as much more of the same memory.
        let same = told.buffers.iter().eq(source.runs.iter().map(|run| &run.source));
        let mut old = SmallVec::new();
        if !same {
            // Known to be read before an executable reads it, and until it no longer does.
            let new: SmallVec<[_; 1]> = source.runs.iter().map(|run| Arc::clone(&run.source)).collect();
            new.iter().for_each(|buffer| buffer.read_by(&self.launches));
            old = std::mem::replace(&mut told.buffers, new);
            // Other memory may be registered where some was.
            told.forget();
        }
        let driver = self.ring.device.driver();
        let result = told.copies.iter_mut().enumerate().try_for_each(|(place, (node, copy))| {
            // SAFETY: the caller's promise; the parts are registered, and the graph keeps the buffers that they are of.
            unsafe { tell(driver, executable, *node, copy, parts.get(place).copied()) }
        });
        if result.is_err() {
            // Of some of it nobody knows which it reads.
            told.buffers.extend(old);
            return result;
        }
        old.iter().for_each(|buffer| buffer.no_longer_read_by(&self.launches));
        told.set = source.set;
        Ok(())
    }

    /// Behind [`enter`](Self::enter): the graph was launched on `stream`, or nothing was, or it is not known.
    ///
    /// # Errors
    /// [`Error::WrongState`] if it was not entered.
    pub fn leave(&self, stream: Stream, launched: bool) -> Result<()> {
        self.launches.given()?;
        let ring = &self.ring;
        let mut last = Fence::default();
        // A stream that cannot be asked now is asked later.
        last.add(ring.device.pool().events(), stream);
        let mut guard = ring.books.lock();
        let books = &mut *guard;
        let launching = books.launching.take().unwrap_or_default();
        books.graphs = last.clone();
        let mut held: Vec<Option<Held>> = books.places.iter().map(|place| place.held).collect();
        if launched {
            ring.schedule.advance(self.tail, &mut held, &launching.stamps);
            books.counts.launches += 1;
            books.counts.copies += launching.copies;
            books.counts.copied_bytes += launching.bytes;
        } else {
            held.iter_mut().take(ring.schedule.slots()).for_each(|held| *held = None);
        }
        for (place, held) in books.places.iter_mut().zip(held) {
            place.held = held;
        }
        drop(guard);
        self.launches.end(Some(last));
        Ok(())
    }

    /// [`enter`](Self::enter), `launch`, which gives the graph to `stream`, and [`leave`](Self::leave). No lock is held meanwhile.
    ///
    /// # Errors
    /// As [`enter`](Self::enter); `launch` was not called then. What it says itself is passed on.
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
        for unit in std::mem::take(&mut self.told.get_mut().units) {
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

//! Driver with streams that do no work before a wait: a missing or wrong wait reads old bytes.

use std::collections::{HashMap, HashSet, VecDeque};

use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, DeviceInfo, Driver, Event, SharedDriver, StreamState, Timeline, Transfer,
};
use vmmgraph::{Address, Error, Result, Stream};

/// The flaw of a [`LateDriver`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delay {
    /// None: late, and correct.
    Right,
    /// Streams do not wait for events.
    IgnoresWaits,
    /// Streams do their newest work first.
    LastFirst,
    /// A recorded event has already happened.
    QueryHopes,
    /// Waiting for an event does not wait.
    SynchronizeHopes,
    /// An event keeps its first record.
    KeepsFirstRecord,
    /// Destroying a stream discards its pending work.
    DestroyForgets,
    /// Destroying an event releases the streams waiting for the event.
    DestroyReleases,
    /// The default stream drops its work.
    DefaultForgets,
    /// Unmapping claims to wait, wrongly.
    UnmapHopes,
}

#[derive(Clone, Copy, Debug)]
enum Work {
    Fill { at: Address, len: u64, value: u32 },
    ToHost { from: Address, to: usize, len: usize },
    FromHost { to: Address, from: usize, len: usize },
    Record(u64),
    Wait(u64),
}

#[derive(Debug, Default)]
struct State {
    queues: HashMap<u64, VecDeque<Work>>,
    events: HashMap<u64, u64>,
    done: HashSet<u64>,
    asked: HashSet<u64>,
    last: u64,
    failure: Option<Error>,
}

/// Passes memory calls to the inner driver; queues stream work until a wait.
#[derive(Debug)]
pub struct LateDriver {
    inner: SharedDriver,
    delay: Delay,
    capabilities: Capabilities,
    state: Mutex<State>,
}

impl LateDriver {
    /// Creates the driver over `inner`, which works at once.
    #[must_use]
    pub fn new(inner: SharedDriver, delay: Delay) -> Self {
        let mut capabilities = *inner.capabilities();
        capabilities.unmap_waits |= delay == Delay::UnmapHopes;
        Self { inner, delay, capabilities, state: Mutex::default() }
    }

    fn give(&self, stream: Stream, work: Work) -> Result<()> {
        if self.delay == Delay::DefaultForgets && stream == Stream::LEGACY && !matches!(work, Work::Record(_))
        {
            return Ok(());
        }
        let mut state = self.state.lock();
        let queue = state.queues.entry(stream.raw()).or_default();
        if self.delay == Delay::LastFirst && !matches!(work, Work::Record(_) | Work::Wait(_)) {
            queue.push_front(work);
        } else {
            queue.push_back(work);
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    fn run(&self, state: &mut State, ticket: u64) {
        let holds =
            |queue: &VecDeque<Work>| queue.iter().any(|w| matches!(w, Work::Record(t) if *t == ticket));
        let Some(stream) = state.queues.iter().find(|(_, queue)| holds(queue)).map(|(stream, _)| *stream)
        else {
            return;
        };
        while !state.done.contains(&ticket) {
            let Some(work) = state.queues.get_mut(&stream).and_then(VecDeque::pop_front) else { return };
            // SAFETY: the submitter keeps the memory until the work is done.
            let result = unsafe {
                match work {
                    Work::Fill { at, len, value } => self.inner.fill(at, len, value, Stream::LEGACY),
                    Work::ToHost { from, to, len } => {
                        self.inner.copy_to_host(from, to as *mut u8, len, Stream::LEGACY)
                    }
                    Work::FromHost { to, from, len } => {
                        self.inner.copy_from_host(to, from as *const u8, len, Stream::LEGACY)
                    }
                    Work::Record(other) => {
                        state.done.insert(other);
                        Ok(())
                    }
                    Work::Wait(other) => {
                        self.run(state, other);
                        Ok(())
                    }
                }
            };
            if let Err(error) = result {
                state.failure.get_or_insert(error);
            }
        }
    }
}

impl Driver for LateDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn version(&self) -> String {
        self.inner.version()
    }
}

crate::passing::passes_memory_on!(LateDriver);

// SAFETY: the inner driver does the work under the callers' contracts, valid until the stream is
// done.
unsafe impl Timeline for LateDriver {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.stream_state(stream) }
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
        let mut state = self.state.lock();
        let ticket = state.events.remove(&event.raw());
        if self.delay == Delay::DestroyReleases {
            for queue in state.queues.values_mut() {
                queue.retain(|work| !matches!(work, Work::Wait(other) if Some(*other) == ticket));
            }
        }
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_destroy(event) }
    }

    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let ticket = {
            let mut state = self.state.lock();
            state.last += 1;
            let ticket = state.last;
            if self.delay != Delay::KeepsFirstRecord || !state.events.contains_key(&event.raw()) {
                state.events.insert(event.raw(), ticket);
            }
            ticket
        };
        self.give(stream, Work::Record(ticket))
    }

    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        let recorded = self.state.lock().events.get(&event.raw()).copied();
        match (self.delay, recorded) {
            (Delay::IgnoresWaits, _) => Ok(()),
            (_, Some(ticket)) => self.give(stream, Work::Wait(ticket)),
            (_, None) => Ok(()),
        }
    }

    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        let mut state = self.state.lock();
        let Some(ticket) = state.events.get(&event.raw()).copied() else { return Ok(true) };
        if self.delay == Delay::QueryHopes {
            return Ok(true);
        }
        // The first query comes too early; the second finds the work done.
        if !state.asked.insert(ticket) {
            self.run(&mut state, ticket);
        }
        Ok(state.done.contains(&ticket))
    }

    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        let mut state = self.state.lock();
        let recorded = state.events.get(&event.raw()).copied();
        if let Some(ticket) = recorded.filter(|_| self.delay != Delay::SynchronizeHopes) {
            self.run(&mut state, ticket);
        }
        state.failure.clone().map_or(Ok(()), Err)
    }

    fn stream_create(&self) -> Result<Stream> {
        self.inner.stream_create()
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        if self.delay == Delay::DestroyForgets {
            let mut state = self.state.lock();
            if let Some(queue) = state.queues.get_mut(&stream.raw()) {
                queue.retain(|work| matches!(work, Work::Record(_)));
            }
        }
        // SAFETY: the caller's contract. The queue is still processed.
        unsafe { self.inner.stream_destroy(stream) }
    }
}

// SAFETY: as above.
unsafe impl Transfer for LateDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        self.give(stream, Work::Fill { at, len, value })
    }

    unsafe fn read(&self, at: Address, into: &mut [u8]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.read(at, into) }
    }

    unsafe fn write(&self, at: Address, from: &[u8]) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.write(at, from) }
    }

    unsafe fn host_register(&self, at: *mut u8, len: usize) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_register(at, len) }
    }

    unsafe fn host_unregister(&self, at: *mut u8) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.host_unregister(at) }
    }

    unsafe fn copy_to_host(&self, from: Address, to: *mut u8, len: usize, stream: Stream) -> Result<()> {
        self.give(stream, Work::ToHost { from, to: to as usize, len })
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        self.give(stream, Work::FromHost { to, from: from as usize, len })
    }
}

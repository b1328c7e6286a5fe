//! Driver with late streams that work in any order allowed by events. Copies read their source when
//! they happen.

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use vmmgraph::driver::{
    Capabilities, DeviceInfo, Driver, Event, SharedDriver, Sharing, StreamState, Timeline, Transfer,
};
use vmmgraph::{Address, Error, Result, Stream};

type Launch = Box<dyn FnOnce(&SharedDriver) + Send>;

enum Work {
    Launch(Launch),
    /// A record of an event, by its number.
    Record(u64),
    Wait(u64),
    Fill {
        at: Address,
        len: u64,
        value: u32,
    },
    Out {
        from: Address,
        to: usize,
        len: usize,
    },
    In {
        to: Address,
        from: usize,
        len: usize,
    },
}

#[derive(Default)]
struct State {
    random: u64,
    /// One query in `lazy` lets streams work.
    lazy: u64,
    streams: BTreeMap<u64, VecDeque<Work>>,
    events: HashMap<Event, u64>,
    records: u64,
    happened: HashSet<u64>,
    captured: HashSet<u64>,
    failed: Vec<String>,
    done: u64,
    /// Selects the streams with dropped waits.
    losing: Option<Losing>,
    lost: u64,
}

impl State {
    fn next(&mut self) -> u64 {
        // Xorshift.
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    fn next_record(&mut self) -> u64 {
        self.records += 1;
        self.records
    }

    fn push(&mut self, stream: Stream, work: Work) {
        if self.captured.contains(&queue(stream)) {
            self.failed.push(format!("work for {stream:?}, which is being captured"));
        }
        self.streams.entry(queue(stream)).or_default().push_back(work);
    }

    /// Takes the first work of a random stream without a pending wait.
    fn take(&mut self) -> Option<Work> {
        let happened = &self.happened;
        let waits = |work: &Work| matches!(work, Work::Wait(record) if !happened.contains(record));
        let ready = self.streams.iter().filter(|(_, all)| all.front().is_some_and(|work| !waits(work)));
        let ready: Vec<u64> = ready.map(|(stream, _)| *stream).collect();
        let chosen = *ready.get((self.next() % ready.len().max(1) as u64) as usize)?;
        self.done += 1;
        self.streams.get_mut(&chosen)?.pop_front()
    }
}

thread_local! {
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
}

const CONTEXTS: u64 = 1 << 61;
const THREADS: u64 = 1 << 62;

/// Returns the queue of a handle. Each thread has its own default stream.
fn queue(stream: Stream) -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(THREADS);
    thread_local! {
        static OWN: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    match CONTEXT.get() {
        _ if stream == Stream::PER_THREAD => OWN.with(|own| *own),
        context if context > 0 && stream == Stream::LEGACY => CONTEXTS + context,
        _ => stream.raw(),
    }
}

/// Selects the streams with dropped waits.
pub type Losing = fn(Stream) -> bool;

/// Runs a test with twenty seeds and dropped waits; the test must notice. `run` returns the number
/// of wrong results and of [lost](ReorderingDriver::lost) waits.
///
/// # Panics
/// If no wait was dropped or no result was wrong.
pub fn lossy(losing: Losing, run: impl Fn(u64, Option<Losing>) -> (u64, u64)) {
    let found = (0..20).map(|seed| run(seed, Some(losing)));
    let (wrong, lost) = found.fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
    assert!(wrong > 0 && lost > 0, "{wrong} wrong, {lost} waits lost");
}

/// Passes every call to the inner driver; stream work is late.
pub struct ReorderingDriver {
    inner: SharedDriver,
    state: Mutex<State>,
    /// Held during a piece of work: no other thread may do later work of the stream.
    at_work: Mutex<()>,
}

impl ReorderingDriver {
    /// Creates the driver; `seed` decides order and delay.
    #[must_use]
    pub fn new(inner: SharedDriver, seed: u64) -> Arc<Self> {
        let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        Arc::new(Self {
            inner,
            state: Mutex::new(State { random, lazy: 1 + seed % 5 * 4, ..State::default() }),
            at_work: Mutex::default(),
        })
    }

    /// Submits work of the test to a stream.
    pub fn launch(&self, stream: Stream, work: impl FnOnce(&SharedDriver) + Send + 'static) {
        self.state.lock().push(stream, Work::Launch(Box::new(work)));
    }

    /// Does one piece of work; returns false if every stream waits or is empty.
    pub fn step(&self) -> bool {
        let _at_work = self.at_work.lock();
        let Some(work) = self.state.lock().take() else { return false };
        // The submitter keeps the memory until the stream has done the work; unmapped memory is
        // refused.
        let done = match work {
            Work::Launch(launch) => {
                launch(&self.inner);
                Ok(())
            }
            Work::Wait(_) => Ok(()),
            Work::Record(record) => {
                self.state.lock().happened.insert(record);
                Ok(())
            }
            // SAFETY: as above.
            Work::Fill { at, len, value } => unsafe { self.inner.fill(at, len, value, Stream::LEGACY) },
            // SAFETY: as above.
            Work::Out { from, to, len } => unsafe {
                self.inner.copy_to_host(from, to as *mut u8, len, Stream::LEGACY)
            },
            // SAFETY: as above.
            Work::In { to, from, len } => unsafe {
                self.inner.copy_from_host(to, from as *const u8, len, Stream::LEGACY)
            },
        };
        if let Err(error) = done {
            self.state.lock().failed.push(error.to_string());
        }
        true
    }

    /// Does all submitted work.
    ///
    /// # Panics
    /// If work waits for an event without a record.
    pub fn drain(&self) {
        while self.step() {}
        let left: usize = self.state.lock().streams.values().map(VecDeque::len).sum();
        assert_eq!(left, 0, "work that waits for what never happens");
    }

    /// Makes a context with its own default stream current on this thread (0: the primary context).
    /// Returns the previous one.
    pub fn make_current(context: u64) -> u64 {
        CONTEXT.replace(context)
    }

    /// Sets whether a stream is under capture: a captured stream accepts no work.
    pub fn set_captured(&self, stream: Stream, captured: bool) {
        let mut state = self.state.lock();
        if captured {
            state.captured.insert(queue(stream))
        } else {
            state.captured.remove(&queue(stream))
        };
    }

    /// Returns the errors of late work: vanished memory, or work for a captured stream.
    #[must_use]
    pub fn failed(&self) -> Vec<String> {
        self.state.lock().failed.clone()
    }

    /// Pieces of work done.
    #[must_use]
    pub fn done(&self) -> u64 {
        self.state.lock().done
    }

    /// Drops the waits of the selected streams; the test must notice.
    pub fn lose_waits(&self, losing: Losing) {
        self.state.lock().losing = Some(losing);
    }

    /// Dropped waits.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.state.lock().lost
    }

    fn some(&self) {
        let count = {
            let mut state = self.state.lock();
            if state.next().is_multiple_of(state.lazy) { state.next() % 4 } else { 0 }
        };
        for _ in 0..count {
            self.step();
        }
    }

    fn last_record(&self, event: Event) -> u64 {
        self.state.lock().events.get(&event).copied().unwrap_or(0)
    }
}

impl fmt::Debug for ReorderingDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReorderingDriver").field("inner", &self.inner).finish_non_exhaustive()
    }
}

impl Driver for ReorderingDriver {
    fn info(&self) -> &DeviceInfo {
        self.inner.info()
    }

    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }

    fn sharing(&self) -> Option<&dyn Sharing> {
        self.inner.sharing()
    }
}

crate::passing::passes_memory_on!(ReorderingDriver);

// SAFETY: the inner driver does the work under the callers' contracts, valid until the stream is
// done.
unsafe impl Timeline for ReorderingDriver {
    unsafe fn stream_state(&self, stream: Stream) -> Result<StreamState> {
        let captured = self.state.lock().captured.contains(&queue(stream));
        Ok(if captured { StreamState::Capturing } else { StreamState::Ready })
    }

    fn other_context(&self) -> Option<u64> {
        Some(CONTEXT.get()).filter(|context| *context > 0)
    }

    fn in_primary(&self, work: &mut dyn FnMut()) -> Result<()> {
        let before = CONTEXT.replace(0);
        work();
        CONTEXT.set(before);
        Ok(())
    }

    fn event_create(&self) -> Result<Event> {
        self.inner.event_create()
    }

    unsafe fn event_destroy(&self, event: Event) -> Result<()> {
        self.state.lock().events.remove(&event);
        // SAFETY: the caller's contract.
        unsafe { self.inner.event_destroy(event) }
    }

    unsafe fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        let mut state = self.state.lock();
        if stream == Stream::LEGACY {
            // The legacy stream waits for the default streams of all threads, ended threads
            // included.
            let threads: Vec<u64> = state.streams.range(THREADS..).map(|(queue, _)| *queue).collect();
            for queue in threads {
                let record = state.next_record();
                state.streams.entry(queue).or_default().push_back(Work::Record(record));
                state.push(stream, Work::Wait(record));
            }
        }
        let record = state.next_record();
        state.events.insert(event, record);
        state.push(stream, Work::Record(record));
        Ok(())
    }

    unsafe fn event_wait(&self, event: Event, stream: Stream) -> Result<()> {
        let record = self.last_record(event);
        let mut state = self.state.lock();
        if state.losing.as_ref().is_some_and(|losing| losing(stream)) {
            state.lost += 1;
        } else if record > 0 {
            state.push(stream, Work::Wait(record));
        }
        Ok(())
    }

    unsafe fn event_query(&self, event: Event) -> Result<bool> {
        self.some();
        let record = self.last_record(event);
        Ok(record == 0 || self.state.lock().happened.contains(&record))
    }

    unsafe fn event_synchronize(&self, event: Event) -> Result<()> {
        let record = self.last_record(event);
        while record > 0 && !self.state.lock().happened.contains(&record) {
            if !self.step() && !self.state.lock().happened.contains(&record) {
                let name = "an event that never happens".to_owned();
                return Err(Error::Driver { call: "event_synchronize", code: 702, name });
            }
        }
        Ok(())
    }

    fn stream_create(&self) -> Result<Stream> {
        self.inner.stream_create()
    }

    unsafe fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's contract.
        unsafe { self.inner.stream_destroy(stream) }
    }
}

// SAFETY: as above.
unsafe impl Transfer for ReorderingDriver {
    unsafe fn fill(&self, at: Address, len: u64, value: u32, stream: Stream) -> Result<()> {
        self.state.lock().push(stream, Work::Fill { at, len, value });
        Ok(())
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
        self.state.lock().push(stream, Work::Out { from, to: to as usize, len });
        Ok(())
    }

    unsafe fn copy_from_host(&self, to: Address, from: *const u8, len: usize, stream: Stream) -> Result<()> {
        self.state.lock().push(stream, Work::In { to, from: from as usize, len });
        Ok(())
    }
}

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::stream::NamedStream;
use crate::driver::{Event, SharedDriver, StreamState, same_device};
use crate::error::{Error, Result};
use crate::sync::{Mutex, ProcessMutex};
use crate::units::Stream;

/// Unused events above this number are destroyed.
const SPARE: usize = 64;

/// Recycled events of one device. Separate from the page pool, so pending unmaps can have marks.
pub struct Events {
    driver: SharedDriver,
    spare: Mutex<Vec<Event>>,
    marks: AtomicU64,
    /// Last [kept](Self::keep) mark of default streams of threads and contexts; `None` if none
    /// could be recorded. A missing stream has no running work. The owner calls
    /// [`forget_kept`](Self::forget_kept) to break the cycle.
    pub(super) kept: Mutex<HashMap<NamedStream, Option<Mark>>>,
}

impl Events {
    /// Creates an object without events.
    #[must_use]
    pub fn new(driver: &SharedDriver) -> Arc<Self> {
        Arc::new(Self::with_spare(Arc::clone(driver), Mutex::default()))
    }

    fn with_spare(driver: SharedDriver, spare: Mutex<Vec<Event>>) -> Self {
        Self { driver, spare, marks: AtomicU64::new(0), kept: Mutex::default() }
    }

    pub(super) fn driver(&self) -> &SharedDriver {
        &self.driver
    }

    /// Whether an event may be recorded in the stream without breaking a capture.
    pub fn ready(&self, stream: Stream) -> Result<bool> {
        // SAFETY: the stream's creator promised a valid stream.
        unsafe { self.driver.stream_state(stream) }.map(|state| state == StreamState::Ready)
    }

    /// Records a mark after all work submitted to the stream.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], with the stream unchanged; driver errors.
    pub fn record(self: &Arc<Self>, stream: Stream) -> Result<Mark> {
        if !self.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        let spare = self.spare.lock().pop();
        let event = spare.map_or_else(|| self.driver.event_create(), Ok)?;
        let (named, number) = (self.name(stream), self.marks.fetch_add(1, Ordering::Relaxed));
        let mark = Mark(Arc::new(Recorded { events: Arc::clone(self), event, stream: named, number }));
        // SAFETY: our unused event; the stream is valid and not captured, checked above.
        let recorded = unsafe { self.driver.event_record(event, stream) };
        // If a thread began a capture since, the event belongs to it: a query breaks the capture,
        // and a wait joins it (CUDA programming guide, cross-stream dependencies). The event can be
        // recorded again.
        if !self.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        recorded?;
        Ok(mark)
    }

    /// Returns a mark after the caller's event, which may then be destroyed. `None`: the event is
    /// reached.
    ///
    /// # Errors
    /// Driver errors, for example for an event of a capture.
    ///
    /// # Safety
    /// A recorded event of the device, valid during the call.
    pub unsafe fn follow(self: &Arc<Self>, event: Event) -> Result<Option<Mark>> {
        // SAFETY: the caller's contract.
        if unsafe { self.driver.event_query(event) }? {
            return Ok(None);
        }
        let stream = self.driver.stream_create()?;
        // SAFETY: the caller's event; our stream, in no capture.
        let mark = unsafe { self.driver.event_wait(event, stream) }.and_then(|()| self.record(stream));
        // SAFETY: no other user. Submitted work still runs.
        if let Err(error) = unsafe { self.driver.stream_destroy(stream) } {
            tracing::warn!(%error, "the driver would not destroy a stream");
        }
        mark.map(Some)
    }

    /// Destroys unused events, except `keep` ones.
    fn destroy(&self, keep: usize) -> Result<()> {
        let surplus = {
            let mut spare = self.spare.lock();
            let keep = keep.min(spare.len());
            spare.split_off(keep)
        };
        let mut first = Ok(());
        for event in surplus {
            // SAFETY: our event, removed from the list, so without users.
            let destroyed = unsafe { self.driver.event_destroy(event) };
            if let Err(error) = destroyed {
                self.spare.lock().push(event);
                first = first.and(Err(error));
            }
        }
        first
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        if let Err(error) = self.destroy(0) {
            tracing::warn!(%error, "the driver would not destroy an event; tried again when its device is opened");
            let events = std::mem::take(self.spare.get_mut());
            orphans().lock().push((Arc::clone(&self.driver), events));
        }
    }
}

/// Events of closed devices, refused by their driver.
type Orphans = Vec<(SharedDriver, Vec<Event>)>;

fn orphans() -> &'static ProcessMutex<Orphans> {
    static ORPHANS: OnceLock<ProcessMutex<Orphans>> = OnceLock::new();
    ORPHANS.get_or_init(ProcessMutex::default)
}

pub(super) fn retry_events(opened: &SharedDriver) {
    let left: Vec<_> = orphans().lock().extract_if(.., |(driver, _)| same_device(driver, opened)).collect();
    for (driver, spare) in left {
        drop(Events::with_spare(driver, Mutex::new(spare)));
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// A point in a stream's work. Clones are the same point; the event is recycled after the last.
#[derive(Clone, Debug)]
pub struct Mark(Arc<Recorded>);

#[derive(Debug)]
struct Recorded {
    events: Arc<Events>,
    event: Event,
    stream: NamedStream,
    number: u64,
}

impl Drop for Recorded {
    fn drop(&mut self) {
        let full = {
            let mut spare = self.events.spare.lock();
            spare.push(self.event);
            spare.len() > SPARE
        };
        if full {
            let _ = self.events.destroy(SPARE);
        }
    }
}

impl Mark {
    /// Whether the work before the mark is done.
    pub fn done(&self) -> Result<bool> {
        // SAFETY: the event lives as long as its marks.
        unsafe { self.0.events.driver.event_query(self.0.event) }
    }

    /// Makes later work of a stream wait for the mark. Does not block.
    pub fn before(&self, stream: Stream) -> Result<()> {
        // SAFETY: as above; the stream's creator promised a valid stream.
        unsafe { self.0.events.driver.event_wait(self.0.event, stream) }
    }

    /// Blocks the caller until the work before the mark is done.
    pub fn block(&self) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.events.driver.event_synchronize(self.0.event) }
    }
}

/// One poll of many fences: one driver query per running stream, plus one per reached point. After
/// a running mark of a stream, its later marks count as running; so do marks of a new stream with
/// its handle.
#[derive(Debug)]
pub struct Poll<'a> {
    pub(super) events: &'a Arc<Events>,
    under_way: Vec<(NamedStream, u64)>,
}

impl<'a> Poll<'a> {
    /// Begins a poll.
    #[must_use]
    pub fn new(events: &'a Arc<Events>) -> Self {
        Self { events, under_way: Vec::new() }
    }

    pub(super) fn done(&mut self, mark: &Mark) -> Result<bool> {
        let Recorded { stream, number, .. } = *mark.0;
        let known = self.under_way.iter_mut().find(|(of, _)| *of == stream).map(|(_, first)| first);
        if known.as_ref().is_some_and(|first| **first <= number) {
            return Ok(false);
        }
        let done = mark.done()?;
        match known {
            _ if done => {}
            Some(first) => *first = number,
            None => self.under_way.push((stream, number)),
        }
        Ok(done)
    }
}

//! The events of a device, used again and again, and marks in streams' work that are made of them.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::stream::NamedStream;
use crate::driver::{Event, SharedDriver, StreamState, same_device};
use crate::error::{Error, Result};
use crate::sync::{Mutex, ProcessMutex};
use crate::units::Stream;

/// Events beyond this many go back to the driver when they are no longer needed.
const SPARE: usize = 64;

/// The events of one device, used again and again. Apart from the page pool, so that what waits in the pool may hold some.
pub struct Events {
    driver: SharedDriver,
    spare: Mutex<Vec<Event>>,
    /// Marks that were made so far.
    marks: AtomicU64,
    /// Behind what default streams of threads and contexts had been given when somebody [kept](Self::keep) them last; `None`: nobody knows. Which is
    /// not here is done with that. Marks hold this, so whoever made it [forgets](Self::forget_kept) them in the end.
    pub(super) kept: Mutex<HashMap<NamedStream, Option<Mark>>>,
}

impl Events {
    /// No events yet.
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

    /// Whether a stream may be used without breaking a capture.
    ///
    /// # Errors
    /// What the driver says.
    pub fn ready(&self, stream: Stream) -> Result<bool> {
        // SAFETY: whoever made the stream promised that it exists.
        unsafe { self.driver.stream_state(stream) }.map(|state| state == StreamState::Ready)
    }

    /// A mark behind everything given to the stream so far.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], with the stream untouched, or what the driver says.
    pub fn record(self: &Arc<Self>, stream: Stream) -> Result<Mark> {
        if !self.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        let spare = self.spare.lock().pop();
        let event = spare.map_or_else(|| self.driver.event_create(), Ok)?;
        let (named, number) = (self.name(stream), self.marks.fetch_add(1, Ordering::Relaxed));
        let mark = Mark(Arc::new(Recorded { events: Arc::clone(self), event, stream: named, number }));
        // SAFETY: an event of ours that nobody else has; the stream exists and is ready, as was just seen.
        let recorded = unsafe { self.driver.event_record(event, stream) };
        // Another thread may have begun to capture it since. Then the event is one of that capture's: who asks for it breaks the capture, and
        // who waits for it becomes part of it (CUDA programming guide, cross-stream dependencies). To be recorded again it serves.
        if !self.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        recorded?;
        Ok(mark)
    }

    /// A mark behind an event of the caller's, which need not stay; `None`: that is over.
    ///
    /// # Errors
    /// What the driver says, of an event of a capture among others.
    ///
    /// # Safety
    /// An event of the device, recorded before, that is there during the call.
    pub unsafe fn follow(self: &Arc<Self>, event: Event) -> Result<Option<Mark>> {
        // SAFETY: the caller's contract.
        if unsafe { self.driver.event_query(event) }? {
            return Ok(None);
        }
        let stream = self.driver.stream_create()?;
        // SAFETY: the caller's event; a stream of ours, which nobody captures.
        let mark = unsafe { self.driver.event_wait(event, stream) }.and_then(|()| self.record(stream));
        // SAFETY: nobody else has it. What was given to it is still done.
        if let Err(error) = unsafe { self.driver.stream_destroy(stream) } {
            tracing::warn!(%error, "the driver would not destroy a stream");
        }
        mark.map(Some)
    }

    /// Destroys the events that are not in use.
    fn destroy(&self, keep: usize) -> Result<()> {
        let surplus = {
            let mut spare = self.spare.lock();
            let keep = keep.min(spare.len());
            spare.split_off(keep)
        };
        let mut first = Ok(());
        for event in surplus {
            // SAFETY: an event of ours; whoever took it off the list is the only one who has it.
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

/// Events of devices that are closed, which their drivers would not destroy.
type Orphans = Vec<(SharedDriver, Vec<Event>)>;

fn orphans() -> &'static ProcessMutex<Orphans> {
    static ORPHANS: OnceLock<ProcessMutex<Orphans>> = OnceLock::new();
    ORPHANS.get_or_init(ProcessMutex::default)
}

/// Tries again to destroy the events that are left on the device of a driver.
pub(super) fn retry_events(opened: &SharedDriver) {
    let left: Vec<_> = orphans().lock().extract_if(.., |(driver, _)| same_device(driver, opened)).collect();
    for (driver, spare) in left {
        // What is refused again goes back on the list.
        drop(Events::with_spare(driver, Mutex::new(spare)));
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").finish_non_exhaustive()
    }
}

/// A point in a stream's work. Clones are the same point; its event is used again when the last one is gone.
#[derive(Clone, Debug)]
pub struct Mark(Arc<Recorded>);

#[derive(Debug)]
struct Recorded {
    events: Arc<Events>,
    event: Event,
    stream: NamedStream,
    /// Later marks have higher ones.
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
            // What is refused stays on the list.
            let _ = self.events.destroy(SPARE);
        }
    }
}

impl Mark {
    /// Whether the work before it is over.
    ///
    /// # Errors
    /// What the driver says.
    pub fn done(&self) -> Result<bool> {
        // SAFETY: the event lives as long as a mark of it.
        unsafe { self.0.events.driver.event_query(self.0.event) }
    }

    /// Makes later work of a stream wait for it. Does not block.
    ///
    /// # Errors
    /// What the driver says.
    pub fn before(&self, stream: Stream) -> Result<()> {
        // SAFETY: as above; whoever made the stream promised that it exists.
        unsafe { self.0.events.driver.event_wait(self.0.event, stream) }
    }

    /// Blocks the caller until the work before it is over.
    ///
    /// # Errors
    /// What the driver says.
    pub fn block(&self) -> Result<()> {
        // SAFETY: as above.
        unsafe { self.0.events.driver.event_synchronize(self.0.event) }
    }
}

/// One look at many fences: what was seen to be under way is not asked for again, nor what the same stream was given behind it, so that a look costs
/// the driver a question a stream and one for each point that is over.
///
/// A handle may have come back for another stream: what that was given counts as under way as long as what the old one was given is.
#[derive(Debug)]
pub struct Look<'a> {
    pub(super) events: &'a Arc<Events>,
    /// The first mark of each stream that is under way.
    under_way: Vec<(NamedStream, u64)>,
}

impl<'a> Look<'a> {
    /// Nothing seen yet.
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

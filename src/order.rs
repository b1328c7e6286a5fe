//! The order of an arena's replays.
//!
//! Graphs of one arena write to the same pages, so no two of them may run at the same time (CUDA programming guide, "virtual
//! aliasing": writes through one address of a page are coherent with another address only once the writing operation has
//! completed). The arena remembers the stream of its last replay. The same stream again is in order by itself and costs no
//! driver call; another stream is made to wait for an event recorded behind the last replay.
//!
//! Recording and launching happen under one lock, so that two threads cannot both find the arena idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::driver::{Event, SharedDriver};
use crate::error::{Error, Result};
use crate::pages::PagePool;
use crate::sync::{Mutex, MutexGuard, thread_token};
use crate::units::Stream;

/// Keeps the replays of one arena from overlapping.
#[derive(Debug)]
pub struct ReplayOrder {
    pool: Arc<PagePool>,
    last: Mutex<Last>,
    /// The thread that is inside `launch`, by token; 0: none. A thread that finds itself here would wait for itself.
    launching: AtomicUsize,
}

/// Ends a launch, also one that panics.
struct Launching<'a>(&'a AtomicUsize);

impl Drop for Launching<'_> {
    fn drop(&mut self) {
        self.0.store(0, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Last {
    /// Where the last replay was launched; `None` before the first.
    stream: Option<Stream>,
    /// Created at the first need.
    event: Option<Event>,
    /// Whether the event stands behind everything replayed so far, so that the stream itself is not needed to wait for it.
    marked: bool,
}

impl Last {
    /// Puts the event behind everything replayed so far.
    fn mark(&mut self, driver: &SharedDriver) -> Result<Option<Event>> {
        let Some(stream) = self.stream else { return Ok(None) };
        if self.marked {
            return Ok(self.event);
        }
        // In a stream that is being captured, the event would become a node of that graph.
        if driver.is_capturing(stream)? {
            return Err(Error::StreamCapturing { stream: stream.0 });
        }
        let event = match self.event {
            Some(event) => event,
            None => *self.event.insert(driver.event_create()?),
        };
        driver.event_record(event, stream)?;
        self.marked = true;
        Ok(Some(event))
    }
}

impl ReplayOrder {
    /// No replay yet, on the device of this pool.
    #[must_use]
    pub fn new(pool: &Arc<PagePool>) -> Self {
        Self { pool: Arc::clone(pool), last: Mutex::default(), launching: AtomicUsize::new(0) }
    }

    /// The lock, unless this thread holds it already because it is inside `launch`.
    fn lock(&self) -> Result<MutexGuard<'_, Last>> {
        // Relaxed: only this thread's own store can equal its token.
        if self.launching.load(Ordering::Relaxed) == thread_token() {
            let (expected, found) =
                ("returned before the arena's order is used again", "inside launch on this thread");
            return Err(Error::WrongState { what: "a replay", expected, found });
        }
        Ok(self.last.lock())
    }

    /// Calls `launch` with everything replayed so far ordered before what it gives to `stream`.
    ///
    /// `launch` must not replay, mark, trim, or open or drop spaces in the same arena: those answer [`Error::WrongState`] then. If
    /// it fails, the stream counts as used all the same.
    ///
    /// # Errors
    /// What the driver says, and [`Error::StreamCapturing`] if the stream of the last replay is being captured and was not
    /// [marked](Self::mark) before; `launch` has not been called then.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        let mut last = self.lock()?;
        if last.stream != Some(stream) {
            if let Some(event) = last.mark(self.pool.driver())? {
                self.pool.driver().event_wait(event, stream)?;
            }
            last.stream = Some(stream);
        }
        last.marked = false;
        self.launching.store(thread_token(), Ordering::Relaxed);
        let _launching = Launching(&self.launching);
        Ok(launch())
    }

    /// Puts an event behind everything replayed so far, so that the stream of the last replay is not needed any more: call it
    /// before that stream is captured or destroyed. Costs nothing if no replay came since the last mark.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn mark(&self) -> Result<()> {
        self.lock()?.mark(self.pool.driver()).map(drop)
    }

    /// Blocks the caller until everything replayed so far is done.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn wait(&self) -> Result<()> {
        let event = self.lock()?.mark(self.pool.driver())?;
        // Outside the lock: replays go on meanwhile, and the event is destroyed with this object only. A mark that moves it
        // on makes this wait longer, never shorter.
        event.map_or(Ok(()), |event| self.pool.driver().event_synchronize(event))
    }
}

impl Drop for ReplayOrder {
    fn drop(&mut self) {
        if let Some(event) = self.last.get_mut().event.take() {
            self.pool.destroy_event(event);
        }
    }
}

//! Points in streams' work: what has to be over before something is used again.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::stream::NamedStream;
use super::{Events, Look, Mark};
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::units::Stream;

/// How long to sleep between two looks at an event.
const PAUSE: Duration = Duration::from_micros(50);

/// A mark that could not be recorded yet. Whoever records it, keeps it for all: then the stream is not needed any more.
#[derive(Clone, Debug, Default)]
pub struct Promise(Arc<OnceLock<Mark>>);

impl Promise {
    /// Keeps it. The first mark counts; a later one would be good as well.
    pub fn keep(&self, mark: Mark) {
        let _ = self.0.set(mark);
    }

    /// Whether a fence waits for it still.
    pub fn is_open(&self) -> bool {
        Arc::strong_count(&self.0) > 1 && self.0.get().is_none()
    }
}

#[derive(Clone, Debug)]
enum Point {
    At(Mark),
    /// The end of the stream's work as soon as it may be recorded, which was not yet possible: it is being captured, or its handle means
    /// another one where somebody asked.
    Later(NamedStream, Promise),
    /// An event of somebody else's.
    Of(Arc<Events>, Event),
}

/// What has to be over before something may be used again: points in any number of streams. Waits for nothing else, and can be
/// asked by anybody, also when whoever made it is gone.
#[derive(Clone, Debug, Default)]
pub struct Fence {
    points: Vec<Point>,
}

impl Fence {
    /// Behind everything given so far to the stream that the calling thread means. Where that cannot be recorded now, it is as soon as
    /// somebody asks and it can.
    pub fn add(&mut self, events: &Arc<Events>, stream: Stream) {
        self.add_kept(events, events.name(stream));
    }

    /// As [`add`](Self::add), for a stream that was [kept](Events::keep) before, perhaps elsewhere: where it cannot be named, it stands for what it had
    /// been given when it was kept last.
    pub fn add_kept(&mut self, events: &Arc<Events>, stream: NamedStream) {
        let recorded = if events.can_name(stream) {
            events.record_named(stream)
        } else {
            match events.kept.lock().get(&stream).cloned() {
                None => return,
                Some(Some(mark)) => Ok(mark),
                Some(None) => Err(Error::StreamCapturing { stream: stream.stream().raw() }),
            }
        };
        self.points.push(match recorded {
            Ok(mark) => Point::At(mark),
            Err(error) => {
                tracing::debug!(%error, ?stream, "a stream's end is recorded later");
                Point::Later(stream, Promise::default())
            }
        });
    }

    /// As [`add_kept`](Self::add_kept), for a stream that uses what it was given without saying so again: a thread's default one is waited for until
    /// that thread asks, since what it had been given when it was kept is not all.
    pub fn add_user(&mut self, events: &Arc<Events>, stream: NamedStream) {
        if stream.is_never_anothers() && !events.can_name(stream) {
            self.add_promise(stream, &Promise::default());
        } else {
            self.add_kept(events, stream);
        }
    }

    /// Behind a mark.
    pub fn add_mark(&mut self, mark: Mark) {
        self.points.push(Point::At(mark));
    }

    /// Behind an event of the caller's, recorded before. It is asked for until it has happened.
    ///
    /// # Safety
    /// An event of the device that stays until this fence is over.
    pub unsafe fn add_event(&mut self, events: &Arc<Events>, event: Event) {
        self.points.push(Point::Of(Arc::clone(events), event));
    }

    /// Behind what a stream will have been given when it is recorded next, for this promise or here.
    pub fn add_promise(&mut self, stream: NamedStream, promise: &Promise) {
        self.points.push(Point::Later(stream, promise.clone()));
    }

    /// Whether there is nothing to wait for, as far as is known without asking.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Behind what another fence is behind of.
    pub fn join(&mut self, other: Self) {
        self.points.extend(other.points);
    }

    /// Whether all of it is over. Forgets what is.
    ///
    /// # Errors
    /// What the driver says; then it is not over.
    pub fn done(&mut self, events: &Arc<Events>) -> Result<bool> {
        self.done_at(&mut Look::new(events))
    }

    /// As [`done`](Self::done), as one of many.
    ///
    /// # Errors
    /// As [`done`](Self::done).
    pub fn done_at(&mut self, look: &mut Look<'_>) -> Result<bool> {
        let mut first = Ok(());
        self.points.retain_mut(|point| {
            let over = match point {
                // SAFETY: whoever added it promised that it is there.
                Point::Of(events, event) => unsafe { events.driver().event_query(*event) },
                point => match point.record(look.events) {
                    Ok(Some(mark)) => look.done(mark),
                    Ok(None) => Ok(false),
                    Err(error) => Err(error),
                },
            };
            match over {
                Ok(over) => !over,
                Err(error) => {
                    first = first.clone().and(Err(error));
                    true
                }
            }
        });
        first.map(|()| self.points.is_empty())
    }

    /// Makes later work of a stream wait for all of it. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] if a stream's end cannot be recorded yet, or if `stream` is being captured, or what the driver says.
    pub fn before(&mut self, events: &Arc<Events>, stream: Stream) -> Result<()> {
        if self.done(events)? {
            return Ok(());
        }
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        self.points.iter().try_for_each(|point| match point {
            Point::At(mark) => mark.before(stream),
            // SAFETY: whoever added it promised that it is there; whoever made the stream, that it exists.
            Point::Of(events, event) => unsafe { events.driver().event_wait(*event, stream) },
            Point::Later(later, _) => Err(Error::StreamCapturing { stream: later.stream().raw() }),
        })
    }

    /// As [`before`](Self::before); blocks the caller for a stream that is being captured, whose work then finds all of it over.
    ///
    /// # Errors
    /// As [`block`](Self::block).
    pub fn before_or_over(&mut self, events: &Arc<Events>, stream: Stream) -> Result<()> {
        match self.before(events, stream) {
            Err(Error::StreamCapturing { .. }) => self.block(events, Duration::MAX).map(drop),
            result => result,
        }
    }

    /// Blocks the caller until all of it is over, at most for this long; whether it is.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] if a stream's end cannot be recorded yet; [`Error::DeviceCapturing`] where the platform forbids to wait while
    /// something is captured; or what the driver says.
    pub fn block(&mut self, events: &Arc<Events>, limit: Duration) -> Result<bool> {
        let start = Instant::now();
        loop {
            if self.done(events)? {
                return Ok(true);
            }
            if let Some(Point::Later(stream, ..)) =
                self.points.iter().find(|point| matches!(point, Point::Later(..)))
            {
                return Err(Error::StreamCapturing { stream: stream.stream().raw() });
            }
            events.driver().may_wait()?;
            let left = limit.saturating_sub(start.elapsed());
            if left.is_zero() {
                return Ok(false);
            }
            if limit == Duration::MAX {
                for point in &self.points {
                    match point {
                        Point::At(mark) => mark.block()?,
                        // SAFETY: as in `done`.
                        Point::Of(events, event) => unsafe { events.driver().event_synchronize(*event) }?,
                        Point::Later(..) => {}
                    }
                }
            } else {
                std::thread::sleep(PAUSE.min(left));
            }
        }
    }
}

impl Point {
    fn record(&mut self, events: &Arc<Events>) -> Result<Option<&Mark>> {
        if let Self::Later(stream, promise) = self {
            if promise.0.get().is_none() {
                match events.record_named(*stream) {
                    Ok(mark) => promise.keep(mark),
                    Err(Error::StreamCapturing { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
            if let Some(mark) = promise.0.get().cloned() {
                *self = Self::At(mark);
            }
        }
        Ok(match self {
            Self::At(mark) => Some(mark),
            Self::Later(..) | Self::Of(..) => None,
        })
    }
}

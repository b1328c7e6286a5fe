//! Fences: points in stream work after which memory may be reused. Plain data: the owner's mutex
//! guards the points; queries take only the locks of [`Events`].

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::stream::NamedStream;
use super::{Events, Mark, Poll};
use crate::driver::Event;
use crate::error::{Error, Result};
use crate::units::Stream;

/// Sleep between two polls of an event.
const PAUSE: Duration = Duration::from_micros(50);

/// A mark to be recorded later, shared by fences. After the first recording no fence needs the
/// stream.
#[derive(Clone, Debug, Default)]
pub struct DeferredMark(Arc<OnceLock<Mark>>);

impl DeferredMark {
    /// Stores the recorded mark. Only the first is used; a later one would be correct too.
    pub fn set(&self, mark: Mark) {
        let _ = self.0.set(mark);
    }

    /// Whether a fence still needs the mark.
    pub fn is_open(&self) -> bool {
        Arc::strong_count(&self.0) > 1 && self.0.get().is_none()
    }
}

#[derive(Clone, Debug)]
enum Point {
    At(Mark),
    /// End of a stream's work, not recordable: under capture, or not nameable on this thread.
    Later(NamedStream, DeferredMark),
    /// An event of the caller.
    Of(Arc<Events>, Event),
}

/// Points in any number of streams, to be reached before memory is reused. Any thread may query a
/// fence, also after its creator is gone.
#[derive(Clone, Debug, Default)]
pub struct Fence {
    points: Vec<Point>,
}

impl Fence {
    /// Adds all work submitted so far to the calling thread's stream of this handle. A point not
    /// recordable now is recorded by a later query.
    pub fn add(&mut self, events: &Arc<Events>, stream: Stream) {
        self.add_kept(events, events.name(stream));
    }

    /// Like [`add`](Self::add), for a stream [kept](Events::keep) earlier. If the calling thread
    /// cannot name the stream, its last kept mark is used.
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
                Point::Later(stream, DeferredMark::default())
            }
        });
    }

    /// Like [`add_kept`](Self::add_kept), for a stream that may use the memory again without
    /// notice. For a per-thread default stream the kept mark may be too early, so the fence stays
    /// open until that thread queries or ends.
    pub fn add_user(&mut self, events: &Arc<Events>, stream: NamedStream) {
        if stream.is_never_anothers() && !events.can_name(stream) {
            self.add_deferred_mark(stream, &DeferredMark::default());
        } else {
            self.add_kept(events, stream);
        }
    }

    /// Adds a mark.
    pub fn add_mark(&mut self, mark: Mark) {
        self.points.push(Point::At(mark));
    }

    /// Adds a recorded event of the caller.
    ///
    /// # Safety
    /// An event of the device, valid until this fence is done.
    pub unsafe fn add_event(&mut self, events: &Arc<Events>, event: Event) {
        self.points.push(Point::Of(Arc::clone(events), event));
    }

    /// Adds all work submitted to a stream before its next recording, by `deferred_mark` or by this
    /// fence.
    pub fn add_deferred_mark(&mut self, stream: NamedStream, deferred_mark: &DeferredMark) {
        self.points.push(Point::Later(stream, deferred_mark.clone()));
    }

    /// Whether no point is left; no driver call.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.points.is_empty()
    }

    /// Adds the points of `other`.
    pub fn join(&mut self, other: Self) {
        self.points.extend(other.points);
    }

    /// Whether all points are reached. A fence with a driver error is not done.
    pub fn done(&mut self, events: &Arc<Events>) -> Result<bool> {
        self.done_at(&mut Poll::new(events))
    }

    /// Like [`done`](Self::done), in one poll of many fences.
    pub fn done_at(&mut self, poll: &mut Poll<'_>) -> Result<bool> {
        let mut first = Ok(());
        self.points.retain_mut(|point| {
            let over = match point {
                // SAFETY: the caller of `add_event` promised a valid event.
                Point::Of(events, event) => unsafe { events.driver().event_query(*event) },
                point => match point.record(poll.events) {
                    Ok(Some(mark)) => poll.done(mark),
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

    /// Makes later work of a stream wait for all points. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] if a point cannot be recorded yet or `stream` is under capture;
    /// driver errors.
    pub fn before(&mut self, events: &Arc<Events>, stream: Stream) -> Result<()> {
        if self.done(events)? {
            return Ok(());
        }
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        self.points.iter().try_for_each(|point| match point {
            Point::At(mark) => mark.before(stream),
            // SAFETY: `add_event` promised a valid event; the stream's creator, a valid stream.
            Point::Of(events, event) => unsafe { events.driver().event_wait(*event, stream) },
            Point::Later(later, _) => Err(Error::StreamCapturing { stream: later.stream().raw() }),
        })
    }

    /// Like [`before`](Self::before), but [blocks](Self::block) the caller if `stream` is under
    /// capture, so captured work needs no wait.
    pub fn before_or_over(&mut self, events: &Arc<Events>, stream: Stream) -> Result<()> {
        match self.before(events, stream) {
            Err(Error::StreamCapturing { .. }) => self.block(events, Duration::MAX).map(drop),
            result => result,
        }
    }

    /// Blocks the caller until all points are reached, at most for `limit`. Returns whether all are
    /// reached.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`] if a point cannot be recorded yet; [`Error::DeviceCapturing`] if
    /// the platform forbids waits during a capture; driver errors.
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
        if let Self::Later(stream, deferred_mark) = self {
            if deferred_mark.0.get().is_none() {
                match events.record_named(*stream) {
                    Ok(mark) => deferred_mark.set(mark),
                    Err(Error::StreamCapturing { .. }) => return Ok(None),
                    Err(error) => return Err(error),
                }
            }
            if let Some(mark) = deferred_mark.0.get().cloned() {
                *self = Self::At(mark);
            }
        }
        Ok(match self {
            Self::At(mark) => Some(mark),
            Self::Later(..) | Self::Of(..) => None,
        })
    }
}

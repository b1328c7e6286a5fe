//! Streams as somebody named them: the handle of a default stream is another stream's on another thread, or in another context.

use std::sync::Arc;

use super::Events;
use crate::error::{Error, Result};
use crate::pages::Mark;
use crate::sync::{thread_has_ended, thread_token};
use crate::units::Stream;

/// Beyond so many streams that were kept, those that are done are forgotten now and then.
const KEPT: usize = 64;

/// A stream, and where its handle means it. Whoever keeps a stream for later keeps this.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedStream {
    stream: Stream,
    /// The thread whose default stream it is; 0: it is no thread's.
    thread: u64,
    /// The context whose default stream it is, if that is another one than the device's primary one; else 0.
    context: u64,
}

impl NamedStream {
    /// Its handle.
    #[must_use]
    pub fn stream(self) -> Stream {
        self.stream
    }

    /// Whether its handle means it on every thread and in every context.
    #[must_use]
    pub fn is_everywhere(self) -> bool {
        self.thread == 0 && self.context == 0
    }

    /// Whether what has this name is this stream as long as there is anybody to use it. All other names may come back for other streams: handles of
    /// streams that were destroyed, and of contexts.
    #[must_use]
    pub fn is_never_anothers(self) -> bool {
        self.thread != 0 && self.context == 0
    }
}

impl Events {
    /// The stream that the calling thread means by a handle, now.
    #[must_use]
    pub fn name(&self, stream: Stream) -> NamedStream {
        if !stream.is_default() {
            return NamedStream { stream, thread: 0, context: 0 };
        }
        let thread = if stream == Stream::PER_THREAD { thread_token() } else { 0 };
        NamedStream { stream, thread, context: self.driver().other_context().unwrap_or(0) }
    }

    /// As [`name`](Self::name), for who keeps it: a default stream of a thread or of another context cannot be named elsewhere, and nobody may come
    /// there again, so there is a mark behind what it has been given so far.
    #[must_use]
    pub fn keep(self: &Arc<Self>, stream: Stream) -> NamedStream {
        let named = self.name(stream);
        self.keep_named(named);
        named
    }

    /// [Keeps](Self::keep) a stream anew that was named before.
    pub fn keep_named(self: &Arc<Self>, named: NamedStream) {
        if named.is_everywhere() || self.name(named.stream) != named {
            return;
        }
        let mark = self.record(named.stream).ok();
        let mut kept = self.kept.lock();
        kept.insert(named, mark);
        // Threads come and go.
        if kept.len() >= KEPT && kept.len().is_power_of_two() {
            kept.retain(|_, mark| !mark.as_ref().is_some_and(|mark| mark.done().unwrap_or(false)));
        }
    }

    /// Nobody asks any more for what was kept.
    pub(super) fn forget_kept(&self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        drop(kept);
    }

    /// Everybody who may be meant where a caller says who reads something: while another context is current, a default stream's handle stands for
    /// the primary one's too, on which it may have been read before.
    #[must_use]
    pub fn name_readers(&self, streams: &[Stream]) -> Vec<NamedStream> {
        let mut named: Vec<_> = streams.iter().map(|stream| self.name(*stream)).collect();
        let elsewhere: Vec<_> =
            named.iter().filter(|name| name.context != 0).map(|name| in_primary(*name)).collect();
        named.extend(elsewhere);
        named
    }

    /// Whether the calling thread can name a stream that was named before, perhaps elsewhere.
    #[must_use]
    pub fn can_name(&self, named: NamedStream) -> bool {
        let here = self.name(named.stream);
        here == named || in_primary(here) == named
    }

    /// A mark behind everything given so far to a stream that was named before. The default stream of a thread that has ended cannot be named by anybody; the
    /// legacy default stream waits for it, so a mark there is behind what it was given. With CUDA that was seen (`tests/conformance.rs`); HIP's tests say so of a
    /// thread that lives, and nobody has tried one that ended.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], with the stream untouched: also where the calling thread [cannot name](Self::can_name) it. What the driver says.
    pub fn record_named(self: &Arc<Self>, named: NamedStream) -> Result<Mark> {
        let here = self.name(named.stream);
        if here == named {
            return self.record(named.stream);
        }
        let primarily = |stream| {
            let mut mark = Err(Error::StreamCapturing { stream: named.stream.raw() });
            self.driver().in_primary(&mut || mark = self.record(stream))?;
            mark
        };
        if in_primary(here) == named {
            return primarily(named.stream);
        }
        if named.is_never_anothers() && thread_has_ended(named.thread) {
            return primarily(Stream::LEGACY);
        }
        Err(Error::StreamCapturing { stream: named.stream.raw() })
    }
}

/// What the handle would mean with the primary context current.
fn in_primary(here: NamedStream) -> NamedStream {
    NamedStream { context: 0, ..here }
}

//! Named streams. A default stream's handle means different streams on different threads and in
//! different contexts, so a stream is stored with the scope of its handle.

use std::sync::Arc;

use super::Events;
use crate::error::{Error, Result};
use crate::pages::Mark;
use crate::sync::{thread_has_ended, thread_token};
use crate::units::Stream;

/// Above this number of kept streams, finished ones are removed from time to time.
const KEPT: usize = 64;

/// Stream handle with its scope. Streams stored for later use are stored in this form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedStream {
    stream: Stream,
    /// Thread of a per-thread default stream, else 0.
    thread: u64,
    /// Context of a default stream, if not the device's primary context; else 0.
    context: u64,
}

impl NamedStream {
    /// Returns the handle.
    #[must_use]
    pub fn stream(self) -> Stream {
        self.stream
    }

    /// Returns true if the handle means the same stream on every thread and in every context.
    #[must_use]
    pub fn is_everywhere(self) -> bool {
        self.thread == 0 && self.context == 0
    }

    /// Returns true if this name cannot mean a different stream later. All other names can be
    /// reused, after a stream or a context is destroyed.
    #[must_use]
    pub fn is_never_anothers(self) -> bool {
        self.thread != 0 && self.context == 0
    }
}

impl Events {
    /// Returns the stream that the handle means on the calling thread now.
    #[must_use]
    pub fn name(&self, stream: Stream) -> NamedStream {
        if !stream.is_default() {
            return NamedStream { stream, thread: 0, context: 0 };
        }
        let thread = if stream == Stream::PER_THREAD { thread_token() } else { 0 };
        NamedStream { stream, thread, context: self.driver().other_context().unwrap_or(0) }
    }

    /// As [`name`](Self::name), for a stream stored for later use. A default stream of a thread or
    /// of a non-primary context may be unreachable later, so its submitted work is marked now.
    #[must_use]
    pub fn keep(self: &Arc<Self>, stream: Stream) -> NamedStream {
        let named = self.name(stream);
        self.keep_named(named);
        named
    }

    /// [Keeps](Self::keep) a named stream again.
    pub fn keep_named(self: &Arc<Self>, named: NamedStream) {
        if named.is_everywhere() || self.name(named.stream) != named {
            return;
        }
        let mark = self.record(named.stream).ok();
        let mut kept = self.kept.lock();
        kept.insert(named, mark);
        // Drops finished streams: ended threads leave entries behind.
        if kept.len() >= KEPT && kept.len().is_power_of_two() {
            kept.retain(|_, mark| !mark.as_ref().is_some_and(|mark| mark.done().unwrap_or(false)));
        }
    }

    /// Drops all kept marks, at the end of the device.
    pub(super) fn forget_kept(&self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        drop(kept);
    }

    /// Returns all streams that a caller may mean as readers. While a non-primary context is
    /// current, a default stream's handle may also mean the primary context's stream.
    #[must_use]
    pub fn name_readers(&self, streams: &[Stream]) -> Vec<NamedStream> {
        let mut named: Vec<_> = streams.iter().map(|stream| self.name(*stream)).collect();
        let elsewhere: Vec<_> =
            named.iter().filter(|name| name.context != 0).map(|name| in_primary(*name)).collect();
        named.extend(elsewhere);
        named
    }

    /// Returns true if the calling thread can name this stream.
    #[must_use]
    pub fn can_name(&self, named: NamedStream) -> bool {
        let here = self.name(named.stream);
        here == named || in_primary(here) == named
    }

    /// Records a mark after all work submitted to a named stream. For the default stream of an
    /// ended thread, the mark is recorded in the legacy default stream, which waits for that
    /// stream. Observed with CUDA (`tests/gpu/conformance.rs`). HIP's own tests show this for
    /// running threads; ended threads are untested.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], with the stream unchanged: also if the calling thread [cannot
    /// name](Self::can_name) the stream. Driver errors.
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

/// Returns the name in the primary context.
fn in_primary(here: NamedStream) -> NamedStream {
    NamedStream { context: 0, ..here }
}

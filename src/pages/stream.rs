//! Named streams: a default stream's handle means different streams on different threads and in
//! different contexts.

use std::sync::Arc;

use super::Events;
use crate::error::{Error, Result};
use crate::pages::Mark;
use crate::sync::{thread_has_ended, thread_token};
use crate::units::Stream;

/// Above this number, finished streams are removed from time to time.
const KEPT: usize = 64;

/// Stream handle with its scope, for later use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NamedStream {
    stream: Stream,
    /// Thread of a per-thread default stream, else 0.
    thread: u64,
    /// Context of a default stream outside the device's primary context, else 0.
    context: u64,
}

impl NamedStream {
    /// Returns the handle.
    #[must_use]
    pub fn stream(self) -> Stream {
        self.stream
    }

    /// Whether the handle means the same stream on every thread and in every context.
    #[must_use]
    pub fn is_everywhere(self) -> bool {
        self.thread == 0 && self.context == 0
    }

    /// Whether this name cannot mean a different stream later.
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

    /// Like [`name`](Self::name), for later use: a default stream of a thread or of a non-primary
    /// context may be unreachable then, so its work is marked now.
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
        // Ended threads leave entries behind.
        if kept.len() >= KEPT && kept.len().is_power_of_two() {
            kept.retain(|_, mark| !mark.as_ref().is_some_and(|mark| mark.done().unwrap_or(false)));
        }
    }

    pub(super) fn forget_kept(&self) {
        let kept = std::mem::take(&mut *self.kept.lock());
        drop(kept);
    }

    /// Returns all streams that a caller may mean as readers: in a non-primary context, a default
    /// stream's handle may also mean the primary context's stream.
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
    /// ended thread, the legacy default stream records: it waits for that stream with CUDA
    /// (`tests/gpu/conformance.rs`); untested with HIP.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`], also if the calling thread [cannot name](Self::can_name) the
    /// stream; driver errors.
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

fn in_primary(here: NamedStream) -> NamedStream {
    NamedStream { context: 0, ..here }
}

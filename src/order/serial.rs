//! Serial order: binds all replays to one stream and one thread.
//!
//! Both, since either alone lets ranks diverge: two threads by scheduling, two streams by the waits
//! between them. The first launched replay binds; only [`lift`](Serial::lift) unbinds, not the end
//! of the thread.

use crate::error::{Error, Result};
use crate::pages::NamedStream;
use crate::sync::{Mutex, thread_token};

/// Accessed inside the exclusive section only.
#[derive(Debug, Default)]
pub(super) struct Serial(Mutex<Option<(NamedStream, u64)>>);

impl Serial {
    /// Checks the stream and the calling thread of a replay.
    pub(super) fn check(&self, stream: NamedStream) -> Result<()> {
        match *self.0.lock() {
            Some(first) if first != (stream, thread_token()) => Err(Error::wrong_state(
                "cannot replay here: the arena is serial and its first replay was on another stream or thread; replay there, or call \
                     lift_serial first",
            )),
            _ => Ok(()),
        }
    }

    /// Binds to the stream and the calling thread, unless bound.
    pub(super) fn bind(&self, stream: NamedStream) {
        self.0.lock().get_or_insert_with(|| (stream, thread_token()));
    }

    /// Unbinds: the next replay binds again.
    pub(super) fn lift(&self) {
        *self.0.lock() = None;
    }
}

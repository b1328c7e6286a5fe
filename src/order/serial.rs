//! Serial order: binds all replays to one stream and one thread, since either alone lets ranks
//! diverge: two threads by scheduling, two streams by the waits between them. Only
//! [`lift`](Serial::lift) unbinds.

use crate::error::{Error, Result};
use crate::pages::NamedStream;
use crate::sync::{Mutex, thread_token};

/// Accessed inside the exclusive section only.
#[derive(Debug, Default)]
pub(super) struct Serial(Mutex<Option<(NamedStream, u64)>>);

impl Serial {
    pub(super) fn check(&self, stream: NamedStream) -> Result<()> {
        match *self.0.lock() {
            Some(first) if first != (stream, thread_token()) => Err(Error::wrong_state(
                "cannot replay here: the arena is serial and its first replay was on another stream or thread; replay there, or call \
                     lift_serial first",
            )),
            _ => Ok(()),
        }
    }

    pub(super) fn bind(&self, stream: NamedStream) {
        self.0.lock().get_or_insert_with(|| (stream, thread_token()));
    }

    pub(super) fn lift(&self) {
        *self.0.lock() = None;
    }
}

//! Where the replays of a serial order have to be: on one stream, launched by one thread.
//!
//! Both, since either alone lets ranks come to different orders: two threads by who comes first, two streams by the waits that order
//! them. The first replay that is launched says which; nothing but [`lift`](Serial::lift) lets it be said anew, not even the end of
//! that thread.

use crate::error::{Error, Result};
use crate::pages::NamedStream;
use crate::sync::{Mutex, thread_token};

/// Asked and told within a turn only.
#[derive(Debug, Default)]
pub(super) struct Serial(Mutex<Option<(NamedStream, u64)>>);

impl Serial {
    /// That a replay may be here.
    pub(super) fn check(&self, stream: NamedStream) -> Result<()> {
        match *self.0.lock() {
            Some(first) if first != (stream, thread_token()) => Err(Error::wrong_state(
                "cannot replay here: the arena is serial and its first replay was on another stream or thread; replay there, or call \
                     lift_serial first",
            )),
            _ => Ok(()),
        }
    }

    /// A replay is launched here.
    pub(super) fn bind(&self, stream: NamedStream) {
        self.0.lock().get_or_insert_with(|| (stream, thread_token()));
    }

    /// The next replay says anew where the others have to be.
    pub(super) fn lift(&self) {
        *self.0.lock() = None;
    }
}

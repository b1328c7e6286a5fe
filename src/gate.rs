//! A device's capture gate: captures alone, replays together, for engines that want no replay while they capture.
//!
//! Nothing in this crate needs it: captures and replays of different streams go well beside each other. It is for what an engine's
//! own code cannot stand, such as a library that synchronises the device in a capture or allocates in a replay.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::sync::{Monitor, thread_token};

#[derive(Debug, Default)]
struct State {
    /// The thread that captures.
    capturing: Option<u64>,
    /// Captures that wait; replays let them go first, so that a busy engine captures at all.
    waiting: usize,
    /// Threads that replay, and how many times each has entered.
    replaying: HashMap<u64, usize>,
}

/// Keeps captures and replays of a device apart, for whoever asks it to.
#[derive(Debug, Default)]
pub struct CaptureGate {
    state: Monitor<State>,
}

fn wrong(sentence: &'static str) -> Error {
    Error::wrong_state(sentence)
}

const ENTERED: &str =
    "cannot enter the capture gate: this thread captures or replays already; leave it first";

impl CaptureGate {
    /// Waits until nobody captures or replays, and keeps everybody else out until [`end_capture`](Self::end_capture) on this thread.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread is in the gate already, since it would wait for itself.
    pub fn begin_capture(&self) -> Result<()> {
        let me = thread_token();
        let mut queued = false;
        self.state.wait_for(|state| {
            if state.capturing == Some(me) {
                return Some(Err(wrong(ENTERED)));
            }
            if state.replaying.contains_key(&me) {
                return Some(Err(wrong(ENTERED)));
            }
            if state.capturing.is_some() || !state.replaying.is_empty() {
                state.waiting += usize::from(!queued);
                queued = true;
                return None;
            }
            state.waiting -= usize::from(queued);
            state.capturing = Some(me);
            Some(Ok(()))
        })
    }

    /// Lets the others in again.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless this thread captures.
    pub fn end_capture(&self) -> Result<()> {
        self.state.change(|state| match state.capturing {
            Some(thread) if thread == thread_token() => {
                state.capturing = None;
                Ok(())
            }
            _ => Err(wrong(
                "cannot leave the capture gate: this thread does not capture; begin a capture first",
            )),
        })
    }

    /// Waits until nobody captures or waits to, and keeps captures out until [`end_replay`](Self::end_replay) on this thread. May be
    /// nested.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread captures.
    pub fn begin_replay(&self) -> Result<()> {
        let me = thread_token();
        self.state.wait_for(|state| {
            if state.capturing == Some(me) {
                return Some(Err(wrong(ENTERED)));
            }
            let nested = state.replaying.contains_key(&me);
            if !nested && (state.capturing.is_some() || state.waiting > 0) {
                return None;
            }
            *state.replaying.entry(me).or_insert(0) += 1;
            Some(Ok(()))
        })
    }

    /// Ends what this thread's last [`begin_replay`](Self::begin_replay) began.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless this thread replays.
    pub fn end_replay(&self) -> Result<()> {
        self.state.change(|state| {
            let me = thread_token();
            let entered = state.replaying.get_mut(&me).ok_or(wrong(
                "cannot leave the capture gate: this thread does not replay; begin a replay first",
            ))?;
            *entered -= 1;
            if *entered == 0 {
                state.replaying.remove(&me);
            }
            Ok(())
        })
    }
}

#[cfg(all(test, not(feature = "shuttle")))]
mod tests {
    use super::*;

    #[test]
    fn a_thread_that_would_wait_for_itself_or_ends_what_it_did_not_begin_is_refused() {
        let gate = CaptureGate::default();
        let refused =
            |result: Result<()>| assert!(matches!(result, Err(Error::WrongState { .. })), "{result:?}");
        refused(gate.end_capture());
        refused(gate.end_replay());
        gate.begin_capture().unwrap();
        refused(gate.begin_capture());
        refused(gate.begin_replay());
        std::thread::scope(|scope| {
            scope.spawn(|| refused(gate.end_capture()));
        });
        gate.end_capture().unwrap();
        gate.begin_replay().unwrap();
        gate.begin_replay().unwrap();
        refused(gate.begin_capture());
        gate.end_replay().unwrap();
        refused(gate.begin_capture());
        gate.end_replay().unwrap();
        gate.begin_capture().unwrap();
        gate.end_capture().unwrap();
    }
}

//! Capture gate of a device: excludes replays during captures, for engines with this need.
//!
//! Nothing in this crate needs the gate: captures and replays on different streams can run
//! concurrently. The gate serves engines with code which synchronizes the device in a capture or
//! allocates in a replay. The monitor of [`CaptureGate`] guards its state; no call waits for the
//! device.

use std::collections::HashMap;

use crate::error::{Error, Result};
use crate::sync::{Monitor, thread_token};

#[derive(Debug, Default)]
struct State {
    /// Thread inside a capture.
    capturing: Option<u64>,
    /// Waiting captures. New replays wait for these, so that captures are not starved.
    waiting: usize,
    /// Threads inside replays, with their nesting depth.
    replaying: HashMap<u64, usize>,
}

/// Excludes replays during captures of a device. Optional.
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
    /// Waits until no capture or replay is inside, then excludes all others until
    /// [`end_capture`](Self::end_capture) on this thread.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this thread is already inside, because it would wait for itself.
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

    /// Ends the capture.
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

    /// Waits until no capture is inside or waiting, then excludes captures until
    /// [`end_replay`](Self::end_replay) on this thread. May be nested.
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

    /// Ends the last [`begin_replay`](Self::begin_replay) of this thread.
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

//! The order of an arena's replays.
//!
//! Graphs of one arena write to the same pages, so no two of them may run at the same time (CUDA programming guide, "virtual
//! aliasing": writes through one address of a page are coherent with another address only once the writing operation has
//! completed). The order remembers where the last replay was launched:
//!
//! ```text
//!   nowhere ── enter(s) ──> on s ── enter(s): in order by itself, no driver call but the question whether s is captured
//!                            |  ^── enter(t): a mark behind s, t waits for it, on t
//!                            v
//!                          marked ── enter(any): it waits for the mark, since a handle may have come back for another stream
//! ```
//!
//! The default stream of a thread can be marked by that thread only, and one of a green context where that is current: replays there are marked
//! at once.
//!
//! Launches take *turns*: between entering and leaving no other replay of the arena is launched. No lock is held meanwhile, so a
//! launch may call anything of the library, except that a replay which would wait for itself, in however many steps and over
//! however many arenas, regions and threads, is an error ([`ExclusiveSection`]).

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pages::{Events, Fence, Mark, NamedStream, Promise};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{ExclusiveSection, Mutex, thread_token};
use crate::units::Stream;

mod check;
mod compare;
mod history;
mod serial;

use check::OrderCheck;
pub use compare::Agreement;
pub(crate) use history::DIGEST_BYTES;
use serial::Serial;

/// What an eager scope is known by where ranks compare their replays.
pub(crate) const EAGER_KEY: u64 = u64::from_le_bytes(*b"eager   ");

/// What `on` says when everything is marked: no stream has that handle.
const MARKED: u64 = u64::MAX;
/// What `on` says of a stream whose handle means it on some thread or in some context only.
const ELSEWHERE: u64 = u64::MAX - 1;
/// What `on` says while somebody who has `last` records a mark.
const MARKING: u64 = u64::MAX - 2;

/// Keeps the replays of one arena from overlapping.
#[derive(Debug)]
pub struct ReplayOrder {
    events: Arc<Events>,
    turn: ExclusiveSection,
    /// The stream behind whose last replay there is no mark yet, or [`ELSEWHERE`]; [`MARKED`] if there is one, or no replay. Whoever takes a mark sets this
    /// to [`MARKING`] first and records then; whoever leaves a turn sets it back: so a launch during which a mark was taken is not covered by it.
    on: AtomicU64,
    last: Mutex<Last>,
    /// What stands before every replay; written by whoever shut it.
    gate: AtomicU64,
    /// Behind what a resume copies, where the gate says so.
    contents: Mutex<Fence>,
    /// Launches so far; written by whoever has the turn.
    replays: AtomicU64,
    /// What [`on`](Self::on) will say behind the turn that [stayed](Entered::stay), until [`leave`](Self::leave).
    entered: Mutex<Option<u64>>,
    /// In a serial order.
    serial: Option<Serial>,
    /// Where ranks compare what they launched.
    check: Option<OrderCheck>,
}

/// Nothing.
const OPEN: u64 = 0;
/// The first replay waits for contents that are still copied.
const BEHIND: u64 = 1;
/// The arena is paused: none is launched.
const SHUT: u64 = 2;

#[derive(Debug, Default)]
struct Last {
    /// Behind everything replayed before what `on` says.
    mark: Option<Mark>,
    /// Where the last replay was launched.
    stream: NamedStream,
    /// What fences wait for that were asked for when the stream was captured, each for itself: one that a fence kept is not behind what was replayed since.
    promises: Vec<Promise>,
}

/// The turn of one launch; ends with this.
#[derive(Debug)]
pub(crate) struct Entered<'a> {
    order: &'a ReplayOrder,
    /// What [`ReplayOrder::on`] says behind it; [`MARKED`]: it launches nothing.
    on: u64,
}

impl ReplayOrder {
    /// No replay yet, on the device of these events.
    #[must_use]
    pub fn new(events: &Arc<Events>) -> Self {
        let (turn, last) = (ExclusiveSection::default(), Mutex::default());
        let replays = AtomicU64::new(0);
        let (gate, contents) = (AtomicU64::new(OPEN), Mutex::default());
        let (on, entered) = (AtomicU64::new(MARKED), Mutex::default());
        Self {
            events: Arc::clone(events),
            turn,
            on,
            last,
            gate,
            contents,
            replays,
            entered,
            serial: None,
            check: None,
        }
    }

    /// As [`new`](Self::new), but replays on another stream or thread than the first one's are refused, until that is
    /// [lifted](Self::lift_serial).
    #[must_use]
    pub fn serial(events: &Arc<Events>) -> Self {
        Self { serial: Some(Serial::default()), ..Self::new(events) }
    }

    /// Replays are noted from now on, to be [compared](Self::compare) with other ranks'.
    pub(crate) fn checked(self) -> Self {
        Self { check: Some(OrderCheck::new()), ..self }
    }

    fn check(&self) -> Result<&OrderCheck> {
        self.check.as_ref().ok_or_else(|| {
            Error::wrong_state(
                "cannot compare replays: the arena does not note them; make it with check_order or VMMGRAPH_CHECK_ORDER=1",
            )
        })
    }

    /// Compares what was launched with the other ranks; with a key, as if a replay of it was launched now. Says what came of it, on all
    /// ranks the same; a difference in what somebody launched refuses all replays until a [restart](Self::restart).
    pub(crate) fn compare(
        &self,
        seat: (u32, u32),
        next: Option<u64>,
        gather: impl FnOnce(&[u8], &mut [u8]) -> Result<()>,
    ) -> Result<Agreement> {
        self.check()?.compare(seat, next, gather)
    }

    /// What was launched so far is not compared any more.
    pub(crate) fn restart(&self) -> Result<()> {
        self.check().map(OrderCheck::restart)
    }

    /// The next replay of a [serial](Self::serial) order says anew where all others have to be. Waits for a launch of another thread.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this would wait for itself.
    pub fn lift_serial(&self) -> Result<()> {
        self.between(|| {
            if let Some(serial) = &self.serial {
                serial.lift();
            }
        })
    }

    /// How many replays were launched; inside a launch, which one that is.
    #[must_use]
    pub fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Calls `launch` with everything replayed so far ordered before what it gives to `stream`.
    ///
    /// No lock is held while it runs. If it fails, the stream counts as used all the same.
    ///
    /// # Errors
    /// What the driver says; [`Error::StreamCapturing`] if `stream` is being captured, or using it would break a capture, or if that
    /// is so of the stream of the last replay, which was not [marked](Self::mark) before; [`Error::WrongState`] if this would wait for
    /// itself, while the arena is paused, or in a [serial](Self::serial) order for another stream or thread. `launch` has not been called then, and no capture was touched.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        let _entered = self.begin(stream, || 0, || Ok(()))?;
        Ok(launch())
    }

    /// Ends what this thread [began](Self::begin) and that [stayed](Entered::stay): its work has been given to the stream, or failed to be.
    ///
    /// # Errors
    /// [`Error::WrongState`] if nothing of this thread stayed.
    pub(crate) fn leave(&self) -> Result<()> {
        self.leave_of(thread_token())
    }

    /// As [`leave`](Self::leave), for the thread of this token, on any; but for a replay on that thread's default stream.
    ///
    /// # Errors
    /// As [`leave`](Self::leave).
    pub(crate) fn leave_of(&self, thread: u64) -> Result<()> {
        let on =
            if self.turn.is_of(thread) { self.entered.lock().take() } else { None }.ok_or_else(|| {
                Error::wrong_state(
                    "cannot leave a replay: this thread is in none; enter one on this thread first",
                )
            })?;
        drop(Entered { order: self, on });
        Ok(())
    }

    /// As [`replay`](Self::replay), up to the launch, which lasts as long as what this returns. `prepare` is called first, between two
    /// replays; what it refuses is not launched. `key` is what ranks know the replay by, asked for if they compare.
    pub(crate) fn begin(
        &self,
        stream: Stream,
        key: impl FnOnce() -> u64,
        prepare: impl FnOnce() -> Result<()>,
    ) -> Result<Entered<'_>> {
        self.turn.enter().map_err(|_| waits_for_itself())?;
        let mut entered = Entered { order: self, on: MARKED };
        let gate = self.gate.load(Ordering::SeqCst);
        if gate == SHUT {
            return Err(paused());
        }
        let named = self.events.name(stream);
        // Before anything is prepared, waited for or recorded: elsewhere, that would be one more difference between ranks.
        if let Some(serial) = &self.serial {
            serial.check(named)?;
        }
        if let Some(check) = &self.check {
            check.usable()?;
        }
        prepare()?;
        self.order(named)?;
        if gate == BEHIND {
            self.contents.lock().before(&self.events, stream)?;
            // All later ones are in order behind this one, whatever becomes of its launch.
            self.gate.store(OPEN, Ordering::SeqCst);
        }
        if let Some(serial) = &self.serial {
            serial.bind(named);
        }
        if let Some(check) = &self.check {
            check.note(key());
        }
        entered.on = unmarked(named);
        self.replays.store(self.replays() + 1, Ordering::Relaxed);
        Ok(entered)
    }

    /// Does something between two replays.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this would wait for itself.
    pub(crate) fn between<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        self.turn.enter().map_err(|_| waits_for_itself())?;
        let _given_back = Entered { order: self, on: MARKED };
        Ok(work())
    }

    /// From now on every replay is refused. [Between](Self::between) two replays.
    pub(crate) fn shut(&self) {
        self.gate.store(SHUT, Ordering::SeqCst);
    }

    /// Replays are launched again, behind a fence.
    pub(crate) fn reopen(&self, contents: Fence) {
        *self.contents.lock() = contents;
        self.gate.store(BEHIND, Ordering::SeqCst);
    }

    /// Orders everything so far before the end of `stream`. The caller has the turn.
    fn order(&self, stream: NamedStream) -> Result<()> {
        let handle = stream.stream();
        if !self.events.ready(handle)? {
            return Err(Error::StreamCapturing { stream: handle.raw() });
        }
        if stream.is_everywhere() && self.on.load(Ordering::SeqCst) == handle.raw() {
            return Ok(());
        }
        let mut last = self.last.lock();
        if let Some(mark) = self.mark_last(&mut last)? {
            // A thread's own default stream is still that stream; any other name may have come back for another one.
            if !stream.is_never_anothers() || last.stream != stream {
                mark.before(handle)?;
            }
        }
        last.stream = stream;
        self.on.store(unmarked(stream), Ordering::SeqCst);
        Ok(())
    }

    /// Puts a mark behind everything replayed so far, unless there is one.
    fn mark_last(&self, last: &mut Last) -> Result<Option<Mark>> {
        if self.on.load(Ordering::SeqCst) == MARKED {
            return Ok(last.mark.clone());
        }
        let on = self.on.swap(MARKING, Ordering::SeqCst);
        let now = |on| {
            // Unless a turn was left meanwhile.
            let _ = self.on.compare_exchange(MARKING, on, Ordering::SeqCst, Ordering::SeqCst);
        };
        match self.events.record_named(last.stream) {
            Ok(mark) => {
                now(MARKED);
                last.promises.drain(..).for_each(|promise| promise.keep(mark.clone()));
                Ok(Some(last.mark.insert(mark).clone()))
            }
            Err(error) => {
                now(on);
                Err(error)
            }
        }
    }

    /// Puts a mark behind everything replayed so far, so that the stream of the last replay is not needed any more: call it before
    /// that stream is captured or destroyed. Costs nothing if no replay came since the last mark. A replay that another thread is
    /// launching meanwhile may or may not be behind it, and stays in order either way.
    ///
    /// # Errors
    /// As [`replay`](Self::replay).
    pub fn mark(&self) -> Result<()> {
        if self.turn.is_of(thread_token()) {
            return Err(waits_for_itself());
        }
        if self.on.load(Ordering::SeqCst) == MARKED {
            return Ok(());
        }
        self.mark_last(&mut self.last.lock()).map(drop)
    }

    /// As [`mark`](Self::mark), if the last replay was on this stream.
    pub(crate) fn mark_on(&self, stream: Stream) -> Result<()> {
        let mut on = self.on.load(Ordering::SeqCst);
        if on == MARKING {
            // It may be on this stream, and its record is still to come.
            let _recorded = self.last.lock();
            on = self.on.load(Ordering::SeqCst);
        }
        if on == stream.raw() { self.mark() } else { Ok(()) }
    }

    /// What is behind everything replayed so far, and behind the contents that a resume still copies: a fence that this object is not needed
    /// for. Does not block.
    #[must_use]
    pub fn fence(&self) -> Fence {
        let mut fence = Fence::default();
        if self.gate.load(Ordering::SeqCst) == BEHIND {
            fence.join(self.contents.lock().clone());
        }
        let mut last = self.last.lock();
        match self.mark_last(&mut last) {
            Ok(mark) => mark.into_iter().for_each(|mark| fence.add_mark(mark)),
            Err(_) => {
                // The next mark of this order is behind it too, so that the stream may go then.
                let promise = Promise::default();
                fence.add_promise(last.stream, &promise);
                last.promises.retain(Promise::is_open);
                last.promises.push(promise);
            }
        }
        fence
    }
}

impl Entered<'_> {
    /// It lasts until [`ReplayOrder::leave`].
    pub(crate) fn stay(self) {
        *self.order.entered.lock() = Some(self.on);
        std::mem::forget(self);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.on != MARKED {
            // Where a mark was taken meanwhile, which may not be behind the launch.
            if self.order.on.load(Ordering::SeqCst) != self.on {
                self.order.on.store(self.on, Ordering::SeqCst);
            }
            if self.on == ELSEWHERE
                && let Err(error) = self.order.mark_last(&mut self.order.last.lock())
            {
                tracing::warn!(%error, "a replay on a default stream of a thread or context could not be marked; only there it can be");
            }
        }
        self.order.turn.leave();
    }
}

/// What `on` says of a stream without a mark.
fn unmarked(stream: NamedStream) -> u64 {
    if stream.is_everywhere() { stream.stream().raw() } else { ELSEWHERE }
}

#[cold]
fn paused() -> Error {
    Error::wrong_state("cannot launch in the arena: it is paused; resume it first")
}

#[cold]
fn waits_for_itself() -> Error {
    Error::wrong_state(
        "cannot launch, mark or open in the arena here: a launch of it on this thread, or on one that waits for this thread, is under \
         way; do it when that launch has returned",
    )
}

#[cfg(test)]
mod tests;

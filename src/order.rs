//! Replay order of an arena. Graphs of one arena write to the same pages, so no two may run at the
//! same time (CUDA programming guide, "virtual aliasing"). The order tracks the stream of the last
//! replay:
//!
//! ```text
//!   unused ── enter(s) ──> on s ── enter(s): stream order suffices; only the capture check
//!                           |  ^── enter(t): marks s, t waits for the mark, then on t
//!                           v
//!                         marked ── enter(any): waits for the mark, as a handle may be reused
//! ```
//!
//! A thread's default stream can only be marked on its thread, and a green context's only while the
//! context is current: replays on either are marked at once.
//!
//! Launches hold an exclusive section and no lock, so a launch may call any function of the
//! library. A replay which would wait for itself, through any number of arenas, regions and
//! threads, is an error ([`ExclusiveSection`]).

use std::sync::Arc;

use crate::error::{Error, Result};
use crate::pages::{DeferredMark, Events, Fence, Mark, NamedStream};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{ExclusiveSection, Mutex, thread_token};
use crate::units::Stream;

mod serial;

use serial::Serial;

/// `on` when everything is marked; no stream's handle.
const MARKED: u64 = u64::MAX;
/// `on` for a stream whose handle is valid in one thread or context only.
const ELSEWHERE: u64 = u64::MAX - 1;
/// `on` while a thread holding `last` records a mark.
const MARKING: u64 = u64::MAX - 2;

/// Orders the replays of one arena.
#[derive(Debug)]
pub struct ReplayOrder {
    events: Arc<Events>,
    replay_slot: ExclusiveSection,
    /// Stream of the last unmarked replay, or [`ELSEWHERE`]; else [`MARKED`]. A marking thread sets
    /// [`MARKING`] before it records, and a launch sets the stream again when leaving: a mark
    /// recorded during a launch never counts for it.
    on: AtomicU64,
    last: Mutex<Last>,
    /// Written by pause and resume.
    gate: AtomicU64,
    /// Fence of the contents being restored, while the gate is [`BEHIND`].
    contents: Mutex<Fence>,
    /// Written inside the exclusive section.
    replays: AtomicU64,
    /// [`on`](Self::on) after a launch which [stayed](Entered::stay_entered).
    entered: Mutex<Option<u64>>,
    serial: Option<Serial>,
}

/// No condition.
const OPEN: u64 = 0;
/// The first replay waits for pending restores.
const BEHIND: u64 = 1;
/// Paused: launches are refused.
const SHUT: u64 = 2;

#[derive(Debug, Default)]
struct Last {
    /// After all replays before the stream in `on`.
    mark: Option<Mark>,
    /// Stream of the last replay.
    stream: NamedStream,
    /// Deferred events of fences requested while the stream was captured, one per fence: an event
    /// recorded for one is too early for another.
    deferred_marks: Vec<DeferredMark>,
}

#[derive(Debug)]
pub(crate) struct Entered<'a> {
    order: &'a ReplayOrder,
    /// [`ReplayOrder::on`] after the launch; [`MARKED`] if nothing is launched.
    on: u64,
}

impl ReplayOrder {
    /// Creates an order without replays.
    #[must_use]
    pub fn new(events: &Arc<Events>) -> Self {
        let (replay_slot, last) = (ExclusiveSection::default(), Mutex::default());
        let replays = AtomicU64::new(0);
        let (gate, contents) = (AtomicU64::new(OPEN), Mutex::default());
        let (on, entered) = (AtomicU64::new(MARKED), Mutex::default());
        Self {
            events: Arc::clone(events),
            replay_slot,
            on,
            last,
            gate,
            contents,
            replays,
            entered,
            serial: None,
        }
    }

    /// Replays must stay on the stream and thread of the first one, until
    /// [`lift_serial`](Self::lift_serial).
    #[must_use]
    pub fn serial(events: &Arc<Events>) -> Self {
        Self { serial: Some(Serial::default()), ..Self::new(events) }
    }

    /// Unbinds a [serial](Self::serial) order. Waits for a launch of another thread.
    /// [`Error::WrongState`] if the call would wait for itself.
    pub fn lift_serial(&self) -> Result<()> {
        self.between(|| {
            if let Some(serial) = &self.serial {
                serial.lift();
            }
        })
    }

    /// Returns the number of launched replays; inside a launch, of the current one.
    #[must_use]
    pub fn replays(&self) -> u64 {
        self.replays.load(Ordering::Relaxed)
    }

    /// Calls `launch`, without a lock, after ordering its work on `stream` after all replays so
    /// far. If `launch` fails, the stream still counts as used.
    ///
    /// # Errors
    /// Driver errors. [`Error::StreamCapturing`] if `stream` is under capture or its use would
    /// break a capture; the same for the stream of the last replay, unless [marked](Self::mark).
    /// [`Error::WrongState`] if the call would wait for itself or the arena is paused; in a
    /// [serial](Self::serial) order also on another stream or thread. Then `launch` was not called
    /// and no capture was touched.
    pub fn replay<T>(&self, stream: Stream, launch: impl FnOnce() -> T) -> Result<T> {
        let _entered = self.begin(stream, || Ok(()))?;
        Ok(launch())
    }

    /// Ends this thread's replay which [began](Self::begin) and [stayed](Entered::stay_entered).
    pub(crate) fn leave(&self) -> Result<()> {
        self.leave_of(thread_token())
    }

    /// For the thread with this token, callable on any thread, except for a replay on the default
    /// stream of the token's thread.
    pub(crate) fn leave_of(&self, thread: u64) -> Result<()> {
        let on = if self.replay_slot.is_of(thread) { self.entered.lock().take() } else { None }.ok_or_else(
            || {
                Error::wrong_state(
                    "cannot leave a replay: this thread is in none; enter one on this thread first",
                )
            },
        )?;
        drop(Entered { order: self, on });
        Ok(())
    }

    /// Like [`replay`](Self::replay) up to the launch, which lasts as long as the result. `prepare`
    /// runs first, between two replays; its error refuses the launch.
    pub(crate) fn begin(&self, stream: Stream, prepare: impl FnOnce() -> Result<()>) -> Result<Entered<'_>> {
        self.replay_slot.enter().map_err(|_| waits_for_itself())?;
        let mut entered = Entered { order: self, on: MARKED };
        let gate = self.gate.load(Ordering::SeqCst);
        if gate == SHUT {
            return Err(paused());
        }
        let named = self.events.name(stream);
        // Before any preparation, wait or record: each would add a difference between ranks.
        if let Some(serial) = &self.serial {
            serial.check(named)?;
        }
        prepare()?;
        self.order(named)?;
        if gate == BEHIND {
            self.contents.lock().before(&self.events, stream)?;
            // All later replays are ordered after this one, even if its launch fails.
            self.gate.store(OPEN, Ordering::SeqCst);
        }
        if let Some(serial) = &self.serial {
            serial.bind(named);
        }
        entered.on = unmarked(named);
        self.replays.store(self.replays() + 1, Ordering::Relaxed);
        Ok(entered)
    }

    /// Runs `work` between two replays; fails if the call would wait for itself.
    pub(crate) fn between<T>(&self, work: impl FnOnce() -> T) -> Result<T> {
        self.replay_slot.enter().map_err(|_| waits_for_itself())?;
        let _given_back = Entered { order: self, on: MARKED };
        Ok(work())
    }

    /// Call [between](Self::between) two replays.
    pub(crate) fn shut(&self) {
        self.gate.store(SHUT, Ordering::SeqCst);
    }

    /// Permits replays again, after a fence.
    pub(crate) fn reopen(&self, contents: Fence) {
        *self.contents.lock() = contents;
        self.gate.store(BEHIND, Ordering::SeqCst);
    }

    /// The caller holds the exclusive section.
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
            // Any other handle may now denote a new stream.
            if !stream.is_never_anothers() || last.stream != stream {
                mark.before(handle)?;
            }
        }
        last.stream = stream;
        self.on.store(unmarked(stream), Ordering::SeqCst);
        Ok(())
    }

    /// Records a mark, unless one exists.
    fn mark_last(&self, last: &mut Last) -> Result<Option<Mark>> {
        if self.on.load(Ordering::SeqCst) == MARKED {
            return Ok(last.mark.clone());
        }
        let on = self.on.swap(MARKING, Ordering::SeqCst);
        let now = |on| {
            // Unless a launch was left in the meantime.
            let _ = self.on.compare_exchange(MARKING, on, Ordering::SeqCst, Ordering::SeqCst);
        };
        match self.events.record_named(last.stream) {
            Ok(mark) => {
                now(MARKED);
                last.deferred_marks.drain(..).for_each(|deferred_mark| deferred_mark.set(mark.clone()));
                Ok(Some(last.mark.insert(mark).clone()))
            }
            Err(error) => {
                now(on);
                Err(error)
            }
        }
    }

    /// Records a mark after all replays so far: the stream of the last replay may then be captured
    /// or destroyed. Free if no replay followed the last mark. Covers or misses a concurrent
    /// launch, which stays in order either way. Fails like [`replay`](Self::replay).
    pub fn mark(&self) -> Result<()> {
        if self.replay_slot.is_of(thread_token()) {
            return Err(waits_for_itself());
        }
        if self.on.load(Ordering::SeqCst) == MARKED {
            return Ok(());
        }
        self.mark_last(&mut self.last.lock()).map(drop)
    }

    /// Marks the last replay, if it was on this stream.
    pub(crate) fn mark_on(&self, stream: Stream) -> Result<()> {
        let mut on = self.on.load(Ordering::SeqCst);
        if on == MARKING {
            // The stream being marked may be this one.
            let _recorded = self.last.lock();
            on = self.on.load(Ordering::SeqCst);
        }
        if on == stream.raw() { self.mark() } else { Ok(()) }
    }

    /// Returns a fence after all replays so far and after pending restores, independent of this
    /// object. Does not block.
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
                // The next mark also records the deferred event, so the stream may then be
                // destroyed.
                let deferred_mark = DeferredMark::default();
                fence.add_deferred_mark(last.stream, &deferred_mark);
                last.deferred_marks.retain(DeferredMark::is_open);
                last.deferred_marks.push(deferred_mark);
            }
        }
        fence
    }
}

impl Entered<'_> {
    /// Stays in the launch until [`ReplayOrder::leave`].
    pub(crate) fn stay_entered(self) {
        *self.order.entered.lock() = Some(self.on);
        std::mem::forget(self);
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.on != MARKED {
            // A mark recorded in the meantime may not cover the launch.
            if self.order.on.load(Ordering::SeqCst) != self.on {
                self.order.on.store(self.on, Ordering::SeqCst);
            }
            if self.on == ELSEWHERE
                && let Err(error) = self.order.mark_last(&mut self.order.last.lock())
            {
                tracing::warn!(%error, "a replay on a default stream of a thread or context could not be marked; only there it can be");
            }
        }
        self.order.replay_slot.leave();
    }
}

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
        "cannot launch, mark or open in the arena here: a launch on this thread, or on a thread that waits for this \
         one, is under way; return from that launch first",
    )
}

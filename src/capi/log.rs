//! Delivery of log events to a C function. Events occur under locks, so a line waits until the
//! outermost C function of its thread ends; from outside any C function, until the next one of any
//! thread ends.

use std::cell::{Cell, RefCell};
use std::ffi::{c_char, c_void};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Once};

use parking_lot::{Mutex, RwLock};
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry;

use super::fork;
use super::guard::guard;
use super::status::vmmgraph_status_t;

/// No log lines.
pub const VMMGRAPH_LOG_OFF: i32 = 0;
/// Failures whose undo failed.
pub const VMMGRAPH_LOG_ERROR: i32 = 1;
/// Failures which were undone, and memory which could not be returned.
pub const VMMGRAPH_LOG_WARN: i32 = 2;
/// Opening and closing of devices and arenas.
pub const VMMGRAPH_LOG_INFO: i32 = 3;
/// Captures and their memory use.
pub const VMMGRAPH_LOG_DEBUG: i32 = 4;
/// All events.
pub const VMMGRAPH_LOG_TRACE: i32 = 5;

/// Log sink: receives one line, `length` bytes of UTF-8 without terminator, valid during the call.
/// Called from any thread, also concurrently. Must not call VmmGraph functions (their events are
/// not logged, and their failures replace the caller's in vmmgraph_last_error). Lines of a C
/// function arrive in order, on its thread, just before it returns; of functions called by a launch
/// function, just before the replay returns; of the library's threads and Rust code, just before
/// the next C function of any thread returns. Without a sink, lines go to stderr at once.
pub type vmmgraph_log_fn =
    Option<unsafe extern "C" fn(level: i32, text: *const c_char, length: usize, user: *mut c_void)>;

/// Called once with `user` when the sink is no longer in use.
pub type vmmgraph_drop_fn = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// Shared with calls in progress, so a replaced sink stays valid until they end.
struct Sink {
    write: unsafe extern "C" fn(i32, *const c_char, usize, *mut c_void),
    user: *mut c_void,
    drop: vmmgraph_drop_fn,
}

// SAFETY: the caller of vmmgraph_set_log_sink permits calls with `user` from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: the caller's contract; the last use of `user`.
            unsafe { drop(self.user) };
        }
    }
}

static SINK: RwLock<Option<Arc<Sink>>> = RwLock::new(None);
/// Written under SINK's write lock, so a reader of SINK sees a matching level.
static LEVEL: AtomicI32 = AtomicI32::new(VMMGRAPH_LOG_OFF);
/// From VMMGRAPH_LOG.
static STDERR_LEVEL: AtomicI32 = AtomicI32::new(VMMGRAPH_LOG_OFF);

struct Line {
    level: i32,
    text: String,
}

/// State of a thread; without a destructor, so valid until the thread is gone.
struct Here {
    /// Depth of nested C functions.
    calls: Cell<u32>,
    lines: ManuallyDrop<RefCell<Vec<Line>>>,
}

thread_local! {
    static HERE: Here =
        const { Here { calls: Cell::new(0), lines: ManuallyDrop::new(RefCell::new(Vec::new())) } };
}

/// From outside any C function; the excess is dropped.
static ELSEWHERE: Mutex<Vec<Line>> = Mutex::new(Vec::new());
const ELSEWHERE_MOST: usize = 1024;
static ANY_ELSEWHERE: AtomicBool = AtomicBool::new(false);

/// Scope of one C function.
pub(super) struct Call(PhantomData<*const ()>);

impl Call {
    pub(super) fn begin() -> Self {
        HERE.with(|here| here.calls.set(here.calls.get() + 1));
        Self(PhantomData)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        HERE.with(|here| {
            let waiting = !here.lines.borrow().is_empty() || ANY_ELSEWHERE.load(Ordering::Relaxed);
            if here.calls.get() == 1 && waiting {
                deliver(here);
                // Events of the sink, kept because the depth is still 1.
                here.lines.take();
            }
            here.calls.set(here.calls.get() - 1);
        });
    }
}

/// First lines from outside any C function.
fn deliver(here: &Here) {
    // The child of a fork has no sink, and the locks below may stay locked.
    if fork::usable().is_err() {
        return;
    }
    let mut lines = {
        let mut elsewhere = ELSEWHERE.lock();
        ANY_ELSEWHERE.store(false, Ordering::Relaxed);
        std::mem::take(&mut *elsewhere)
    };
    lines.append(&mut here.lines.take());
    for Line { level, text } in lines {
        let (sink, wanted) = {
            let sink = SINK.read();
            // Again: the sink may have changed since `enabled`.
            (sink.clone(), level <= LEVEL.load(Ordering::Relaxed))
        };
        match sink {
            _ if !wanted => {}
            // SAFETY: the contract of vmmgraph_set_log_sink; the text outlives the call.
            Some(sink) => unsafe { (sink.write)(level, text.as_ptr().cast(), text.len(), sink.user) },
            None => to_stderr(&text),
        }
    }
}

fn to_stderr(text: &str) {
    // eprintln! panics if stderr is closed.
    drop(writeln!(std::io::stderr(), "vmmgraph: {text}"));
}

/// Sets the log sink for lines up to level `max_level`. Null: no sink; lines go to stderr if
/// VMMGRAPH_LOG is set. The previous sink is dropped after its last call ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmmgraph_set_log_sink(
    sink: vmmgraph_log_fn,
    user: *mut c_void,
    drop: vmmgraph_drop_fn,
    max_level: i32,
) -> vmmgraph_status_t {
    guard(|| {
        start();
        let new = sink.map(|write| Arc::new(Sink { write, user, drop }));
        let level = match &new {
            Some(_) => max_level.clamp(VMMGRAPH_LOG_OFF, VMMGRAPH_LOG_TRACE),
            None => STDERR_LEVEL.load(Ordering::Relaxed),
        };
        let old = {
            let mut sink = SINK.write();
            LEVEL.store(level, Ordering::Relaxed);
            std::mem::replace(&mut *sink, new)
        };
        // Outside the lock: this may call `drop`.
        std::mem::drop(old);
        Ok(())
    })
}

/// Installs the fork watch and the subscriber, once.
pub(super) fn start() {
    static START: Once = Once::new();
    START.call_once(|| {
        fork::watch();
        let level = std::env::var("VMMGRAPH_LOG").map_or(VMMGRAPH_LOG_OFF, |word| match word.as_str() {
            "error" => VMMGRAPH_LOG_ERROR,
            "warn" => VMMGRAPH_LOG_WARN,
            "info" => VMMGRAPH_LOG_INFO,
            "debug" => VMMGRAPH_LOG_DEBUG,
            "trace" => VMMGRAPH_LOG_TRACE,
            _ => VMMGRAPH_LOG_OFF,
        });
        STDERR_LEVEL.store(level, Ordering::Relaxed);
        LEVEL.store(level, Ordering::Relaxed);
        // A Rust program with its own subscriber keeps it.
        let _ = tracing::subscriber::set_global_default(registry().with(ToSink));
    });
}

fn number(level: &Level) -> i32 {
    match *level {
        Level::ERROR => VMMGRAPH_LOG_ERROR,
        Level::WARN => VMMGRAPH_LOG_WARN,
        Level::INFO => VMMGRAPH_LOG_INFO,
        Level::DEBUG => VMMGRAPH_LOG_DEBUG,
        Level::TRACE => VMMGRAPH_LOG_TRACE,
    }
}

struct ToSink;

impl<S: Subscriber> Layer<S> for ToSink {
    fn register_callsite(&self, _: &'static Metadata<'static>) -> tracing::subscriber::Interest {
        // The level can change at any time.
        tracing::subscriber::Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        number(metadata.level()) <= LEVEL.load(Ordering::Relaxed)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        // In the child of a fork, a lock below may stay locked.
        if fork::usable().is_err() {
            return;
        }
        let mut words = Words::default();
        event.record(&mut words);
        let line = Line { level: number(event.metadata().level()), text: words.message + &words.fields };
        // An immediate line survives a crash.
        if SINK.read().is_none() {
            return to_stderr(&line.text);
        }
        HERE.with(|here| {
            if here.calls.get() > 0 {
                return here.lines.borrow_mut().push(line);
            }
            let mut elsewhere = ELSEWHERE.lock();
            if elsewhere.len() < ELSEWHERE_MOST {
                elsewhere.push(line);
            }
            ANY_ELSEWHERE.store(true, Ordering::Relaxed);
        });
    }
}

/// The message, then the fields.
#[derive(Default)]
struct Words {
    message: String,
    fields: String,
}

impl Visit for Words {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::null_mut;
    use std::thread;

    use super::*;
    use crate::capi::VMMGRAPH_ERROR_INTERNAL;

    static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

    unsafe extern "C" fn keep(_: i32, text: *const c_char, length: usize, _: *mut c_void) {
        // SAFETY: the contract of a sink.
        let text = unsafe { std::slice::from_raw_parts(text.cast::<u8>(), length) };
        let text = String::from_utf8_lossy(text).into_owned();
        // Other tests log too.
        if text.contains("planted") {
            LINES.lock().push(text);
            tracing::warn!("planted by the sink");
        }
    }

    fn lines() -> Vec<String> {
        std::mem::take(&mut *LINES.lock())
    }

    struct Late;

    impl Drop for Late {
        fn drop(&mut self) {
            guard(|| {
                tracing::warn!("planted at the thread's end");
                Ok(())
            });
        }
    }

    thread_local!(static LATE: Late = const { Late });

    #[test]
    fn lines_come_when_the_outermost_call_ends_however_it_ends() {
        // SAFETY: the sink may be called from any thread.
        let status = unsafe { vmmgraph_set_log_sink(Some(keep), null_mut(), None, VMMGRAPH_LOG_WARN) };
        assert_eq!(status, 0);
        guard(|| {
            tracing::warn!(number = 1, "planted");
            guard(|| {
                tracing::warn!(number = 2, "planted");
                Ok(())
            });
            tracing::info!(number = 3, "planted below the level");
            assert!(lines().is_empty());
            Ok(())
        });
        assert_eq!(lines(), ["planted number=1", "planted number=2"]);

        let status = guard(|| {
            tracing::warn!("planted before a panic");
            panic!("planted")
        });
        assert_eq!((status, lines()), (VMMGRAPH_ERROR_INTERNAL, vec!["planted before a panic".to_owned()]));

        // A thread which ends inside a call loses its lines.
        let ended = thread::spawn(|| {
            std::mem::forget(Call::begin());
            tracing::warn!("planted and lost");
        });
        ended.join().unwrap();
        assert!(lines().is_empty());

        // Destructors run in unspecified order: test both orders of first use.
        for first in [true, false] {
            let ending = thread::spawn(move || {
                if first {
                    LATE.with(|_| ());
                }
                guard(|| {
                    tracing::warn!("planted in the thread");
                    Ok(())
                });
                LATE.with(|_| ());
            });
            ending.join().unwrap();
            assert_eq!(lines(), ["planted in the thread", "planted at the thread's end"]);
        }
        // SAFETY: no sink to call.
        assert_eq!(unsafe { vmmgraph_set_log_sink(None, null_mut(), None, VMMGRAPH_LOG_OFF) }, 0);
    }
}

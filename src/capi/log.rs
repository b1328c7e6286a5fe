//! The library's events, handed to a C function.

use std::cell::Cell;
use std::ffi::{c_char, c_void};
use std::fmt::{self, Write as _};
use std::io::Write as _;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Once};

use parking_lot::RwLock;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry;

use super::fork;
use super::guard::guard;
use super::status::vmmgraph_status_t;

/// Nothing is logged.
pub const VMMGRAPH_LOG_OFF: i32 = 0;
/// A failure that could not be undone.
pub const VMMGRAPH_LOG_ERROR: i32 = 1;
/// A failure that was undone, or memory that could not be given back.
pub const VMMGRAPH_LOG_WARN: i32 = 2;
/// Devices and arenas come and go.
pub const VMMGRAPH_LOG_INFO: i32 = 3;
/// Captures, and what they used.
pub const VMMGRAPH_LOG_DEBUG: i32 = 4;
/// Everything.
pub const VMMGRAPH_LOG_TRACE: i32 = 5;

/// Receives one line of text: `length` bytes of UTF-8, not zero-terminated, valid during the call. May be called from any thread,
/// with no lock of the library's held that the caller could need; must not throw.
pub type vmmgraph_log_fn =
    Option<unsafe extern "C" fn(level: i32, text: *const c_char, length: usize, user: *mut c_void)>;

/// Called once with `user` when a sink is no longer in use.
pub type vmmgraph_drop_fn = Option<unsafe extern "C" fn(user: *mut c_void)>;

/// A sink and what belongs to it. Shared with the calls that are under way, so that replacing it frees nothing in use.
struct Sink {
    write: unsafe extern "C" fn(i32, *const c_char, usize, *mut c_void),
    user: *mut c_void,
    drop: vmmgraph_drop_fn,
}

// SAFETY: the caller of vmmgraph_set_log_sink promises that the functions may be called with `user` from any thread.
unsafe impl Send for Sink {}
// SAFETY: as above.
unsafe impl Sync for Sink {}

impl Drop for Sink {
    fn drop(&mut self) {
        if let Some(drop) = self.drop {
            // SAFETY: the caller's contract; this is the last use of `user`.
            unsafe { drop(self.user) };
        }
    }
}

static SINK: RwLock<Option<Arc<Sink>>> = RwLock::new(None);
/// Changes only under SINK's write lock, so that whoever holds it to read sees the two agree.
static LEVEL: AtomicI32 = AtomicI32::new(VMMGRAPH_LOG_OFF);
/// What VMMGRAPH_LOG asks for on stderr.
static STDERR_LEVEL: AtomicI32 = AtomicI32::new(VMMGRAPH_LOG_OFF);

thread_local! {
    /// Set while this thread is inside a sink: what the sink causes is not logged.
    static BUSY: Cell<bool> = const { Cell::new(false) };
}

/// Sends log lines up to `max_level` to `sink` from now on; null: to nobody, or to stderr if VMMGRAPH_LOG says so. The sink
/// before is dropped once nobody is inside it.
///
/// # Safety
/// `sink` and `drop` are null or may be called with `user` from any thread.
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
        // Here, not under the lock: this may call `drop`.
        std::mem::drop(old);
        Ok(())
    })
}

/// Starts to watch for forks and to listen, once. VMMGRAPH_LOG (error, warn, info, debug or trace) writes to stderr as long as no sink is set.
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
        // A Rust program that listens already keeps its own subscriber.
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
        // The level can change at any time, so the answer must not be remembered.
        tracing::subscriber::Interest::sometimes()
    }

    fn enabled(&self, metadata: &Metadata<'_>, _: Context<'_, S>) -> bool {
        number(metadata.level()) <= LEVEL.load(Ordering::Relaxed)
    }

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        if BUSY.try_with(|busy| busy.replace(true)).unwrap_or(true) {
            return;
        }
        let level = number(event.metadata().level());
        let mut line = Line::default();
        event.record(&mut line);
        let text = line.message + &line.fields;
        let (sink, wanted) = {
            let sink = SINK.read();
            // Asked again, since the sink may have changed since `enabled`.
            (sink.clone(), level <= LEVEL.load(Ordering::Relaxed))
        };
        match sink {
            _ if !wanted => {}
            // SAFETY: the promise made to vmmgraph_set_log_sink; the text lives until the call returns.
            Some(sink) => unsafe { (sink.write)(level, text.as_ptr().cast(), text.len(), sink.user) },
            // Not eprintln!, which panics when stderr is closed.
            None => drop(writeln!(std::io::stderr(), "vmmgraph: {text}")),
        }
        let _ = BUSY.try_with(|busy| busy.set(false));
    }
}

/// An event as text: the message, then the fields.
#[derive(Default)]
struct Line {
    message: String,
    fields: String,
}

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a String does not fail.
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {}={value:?}", field.name())
        };
    }
}

//! A process that was forked after a device was opened.
//!
//! The child has one thread; a lock that another thread of the parent held is held for ever there, and CUDA does not work there
//! at all. So every call but those that explain a failure is refused in the child before it takes a lock: it can neither hang in
//! a destructor at its exit nor give back what the parent still uses.

use std::ffi::c_int;
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

static FORKED: AtomicBool = AtomicBool::new(false);

type Handler = Option<unsafe extern "C" fn()>;

unsafe extern "C" {
    fn pthread_atfork(prepare: Handler, parent: Handler, child: Handler) -> c_int;
}

unsafe extern "C" fn in_the_child() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Watches for forks from now on.
pub(super) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to a static, which is allowed after a fork. It fails for lack of memory only, and then
        // forks go unnoticed.
        unsafe { pthread_atfork(None, None, Some(in_the_child)) };
    });
}

/// Whether the library may be used in this process.
pub(super) fn usable() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::wrong_state(
        "cannot use the library in this process: it is a child made by fork of one that opened a device; fork before opening a device",
    ))
}

//! Detection of a process forked after a device was opened.
//!
//! The child has one thread. A lock held by another thread of the parent stays locked forever, and
//! CUDA does not work in the child. Every call is therefore refused before taking a lock, except
//! the calls which explain a failure. The child can neither hang in a destructor at exit nor
//! release resources still used by the parent.

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

/// Registers the fork handler once.
pub(super) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to a static, which is allowed after a fork. Registration
        // fails only without memory; forks then stay undetected.
        unsafe { pthread_atfork(None, None, Some(in_the_child)) };
    });
}

/// Returns an error in a forked child.
pub(super) fn usable() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::wrong_state(
        "cannot use the library in this process: it is a child made by fork of one that opened a device; fork before opening a device",
    ))
}

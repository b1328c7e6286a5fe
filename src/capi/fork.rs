//! Detection of a process forked after a device was opened. In the child, locks held by other
//! threads stay locked forever, and CUDA does not work. So every call is refused before taking a
//! lock, except calls which explain a failure: the child neither hangs at exit nor releases the
//! parent's resources.

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

pub(super) fn watch() {
    static WATCH: Once = Once::new();
    WATCH.call_once(|| {
        // SAFETY: the handler only stores to a static. Without memory, forks stay undetected.
        unsafe { pthread_atfork(None, None, Some(in_the_child)) };
    });
}

pub(super) fn usable() -> Result<()> {
    if !FORKED.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(Error::wrong_state(
        "cannot use the library in this process: it is a child made by fork of one that opened a device; fork before opening a device",
    ))
}

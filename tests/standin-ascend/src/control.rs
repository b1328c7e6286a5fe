//! Controls for tests: `standin_*`, looked up in the loaded library.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

standin::controls!(crate::faults::FAULTS);

static STREAMS_BUSY: AtomicBool = AtomicBool::new(false);

pub(crate) fn streams_busy() -> bool {
    STREAMS_BUSY.load(Relaxed)
}

/// Sets whether streams have pending work.
#[unsafe(no_mangle)]
pub extern "C" fn standin_streams_busy(busy: bool) {
    STREAMS_BUSY.store(busy, Relaxed);
}

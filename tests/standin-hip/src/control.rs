//! Controls for tests: `standin_*`.

use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

standin::controls!(crate::faults::FAULTS);

static VERSION: AtomicI32 = AtomicI32::new(0);

pub(crate) fn version() -> i32 {
    match VERSION.load(Relaxed) {
        0 => standin::state::number("STANDIN_HIP_VERSION", 71_400_000) as i32,
        set => set,
    }
}

/// Sets the version; 0: the version in the environment.
#[unsafe(no_mangle)]
pub extern "C" fn standin_set_version(version: i32) {
    VERSION.store(version, Relaxed);
}

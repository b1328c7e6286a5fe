//! Controls of a stand-in for tests: functions `standin_*`, looked up in the loaded library.

pub use std::ffi::CStr;

use crate::{capture, host, state};

/// Returns the numbers of live pages, reservations, mappings and events.
#[doc(hidden)]
#[must_use]
pub fn leftovers() -> [u64; 4] {
    let mut left = [0; 4];
    for device in state::devices().unwrap_or_default() {
        let memory = device.memory.leftovers();
        left[0] += memory.pages as u64;
        left[1] += memory.reservations as u64;
        left[2] += memory.mappings as u64;
    }
    left[3] = capture::table().events();
    left
}

/// Returns the numbers of live streams (default streams of threads included) and host
/// registrations.
#[doc(hidden)]
#[must_use]
pub fn host_leftovers() -> [u64; 2] {
    [capture::table().streams(), host::registrations()]
}

/// Exports the control functions over the counted calls in a static `FAULTS`. A real driver lacks
/// these symbols, so tests detect a stand-in. Counters and faults are process-wide.
#[macro_export]
macro_rules! controls {
    ($faults:path) => {
        use std::ffi::c_char;

        /// Returns the counted calls since the last reset.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_calls() -> u64 {
            $faults.count(None)
        }

        /// Returns the calls of one counted function since the last reset, by exported name; 0 for
        /// any other name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_count(name: *const c_char) -> u64 {
            if name.is_null() {
                return 0;
            }
            // SAFETY: not null; zero-terminated by the caller's contract.
            unsafe { $crate::CStr::from_ptr(name) }.to_str().map_or(0, |name| $faults.count(Some(name)))
        }

        /// Makes the `nth` counted call from now fail with `code` and without effect. Zero disarms.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_fail(nth: u64, code: i32) {
            $faults.arm(0, nth, code);
        }

        /// Arms a second, independent failure.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_fail_second(nth: u64, code: i32) {
            $faults.arm(1, nth, code);
        }

        /// Answers the next `questions` event queries with "not ready", as a busy device does.
        /// Waits still return at once.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_keep_busy(questions: u64) {
            $crate::faults::keep_busy(questions);
        }

        /// Runs graph nodes in random orders that respect the edges, the first one decided by
        /// `seed`; 0: capture order. Copies read their source when they run.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_shuffle(seed: u64) {
            $crate::faults::shuffle(seed);
        }

        /// Returns the name of the `index`-th counted function, or null after the last. Writes the
        /// number of its injected failures.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_failed(index: usize, times: *mut u64) -> *const c_char {
            let Some((name, failed)) = $faults.failed(index) else { return std::ptr::null() };
            if !times.is_null() {
                // SAFETY: writable by the caller's contract.
                unsafe { *times = failed };
            }
            name.as_ptr().cast()
        }

        /// Writes the numbers of live pages, reservations, mappings and events.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_leftovers(out: *mut u64) {
            if out.is_null() {
                return;
            }
            // SAFETY: not null; room for four numbers by the caller's contract.
            unsafe { out.cast::<[u64; 4]>().write_unaligned($crate::leftovers()) };
        }

        /// Returns the number of live executable graphs.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_executables() -> u64 {
            $crate::capture::table().execs.len() as u64
        }

        /// Writes the numbers of live streams (default streams of threads included) and host
        /// registrations.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_host_leftovers(out: *mut u64) {
            if out.is_null() {
                return;
            }
            // SAFETY: not null; room for two numbers by the caller's contract.
            unsafe { out.cast::<[u64; 2]>().write_unaligned($crate::host_leftovers()) };
        }

        /// Resets the counters. Armed failures stay armed.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_reset_counters() {
            $faults.reset();
        }
    };
}

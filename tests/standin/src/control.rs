//! What the tests steer a stand-in by: `standin_*`, looked up in the loaded library.

pub use std::ffi::CStr;

use crate::{capture, host, state};

/// Pages, reservations, mappings and events that are alive.
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

/// Streams, threads' default ones included, and registrations of host memory that are alive.
#[doc(hidden)]
#[must_use]
pub fn host_leftovers() -> [u64; 2] {
    [capture::table().streams(), host::registrations()]
}

/// The control functions, over the counted calls in a static `FAULTS`. A real driver lacks these symbols, which is how a test knows which one it
/// runs on. Counters and faults are process wide.
#[macro_export]
macro_rules! controls {
    ($faults:path) => {
        use std::ffi::c_char;

        /// Driver calls since the last reset, over the functions that can fail in real life (memory, events, synchronising).
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_calls() -> u64 {
            $faults.count(None)
        }

        /// Calls of one of those functions since the last reset, by its exported name; 0 for any other name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_count(name: *const c_char) -> u64 {
            if name.is_null() {
                return 0;
            }
            // SAFETY: not null, and then a zero-terminated string by the caller's contract.
            unsafe { $crate::CStr::from_ptr(name) }.to_str().map_or(0, |name| $faults.count(Some(name)))
        }

        /// Makes the `nth` of those calls, counted from now, fail with `code` and without any effect. Zero disarms.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_fail(nth: u64, code: i32) {
            $faults.arm(0, nth, code);
        }

        /// A second failure, independent of the first.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_fail_second(nth: u64, code: i32) {
            $faults.arm(1, nth, code);
        }

        /// The next so many questions whether an event has happened are answered with no, as on a device that still works; waiting for
        /// it returns at once all the same.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_keep_busy(questions: u64) {
            $crate::faults::keep_busy(questions);
        }

        /// From now on a graph's nodes run in random orders that its edges allow, beginning with one that `seed` decides; 0: as they were
        /// captured. Copies read their source when they run.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_shuffle(seed: u64) {
            $crate::faults::shuffle(seed);
        }

        /// The name of the `index`-th counted function; null behind the last. Writes how often a call of it was made to fail, ever.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_failed(index: usize, times: *mut u64) -> *const c_char {
            let Some((name, failed)) = $faults.failed(index) else { return std::ptr::null() };
            if !times.is_null() {
                // SAFETY: writable by the caller's contract.
                unsafe { *times = failed };
            }
            name.as_ptr().cast()
        }

        /// Writes how many pages, reservations, mappings and events are alive, in this order.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_leftovers(out: *mut u64) {
            if out.is_null() {
                return;
            }
            // SAFETY: not null, and then room for four numbers by the caller's contract.
            unsafe { out.cast::<[u64; 4]>().write_unaligned($crate::leftovers()) };
        }

        /// How many executable graphs are alive.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_executables() -> u64 {
            $crate::capture::table().execs.len() as u64
        }

        /// Writes how many streams, threads' default ones included, and registrations of host memory are alive, in this order.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn standin_host_leftovers(out: *mut u64) {
            if out.is_null() {
                return;
            }
            // SAFETY: not null, and then room for two numbers by the caller's contract.
            unsafe { out.cast::<[u64; 2]>().write_unaligned($crate::host_leftovers()) };
        }

        /// Starts counting anew. Armed failures stay armed.
        #[unsafe(no_mangle)]
        pub extern "C" fn standin_reset_counters() {
            $faults.reset();
        }
    };
}

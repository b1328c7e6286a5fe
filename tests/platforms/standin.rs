//! Stand-in library of a platform, loaded by the soname under which the driver finds it. Controls,
//! faults and captures are process-wide.

use std::ffi::{CStr, c_char};

use libloading::os::unix::Library;

pub(crate) struct StandIn(Library);

impl StandIn {
    pub(crate) fn load(name: &str) -> Self {
        // SAFETY: the stand-in's initialisers do nothing.
        let opened = unsafe { Library::new(name) };
        Self(opened.expect("the stand-in is not on LD_LIBRARY_PATH: use `cargo test`"))
    }

    pub(crate) fn function<T: Copy>(&self, name: &str) -> T {
        // SAFETY: callers name signatures of the stand-in's crate and of tests/standin.
        unsafe { *self.0.get::<T>(name.as_bytes()).expect("not the stand-in") }
    }

    pub(crate) fn count(&self, name: &CStr) -> u64 {
        let count: unsafe extern "C" fn(*const c_char) -> u64 = self.function("standin_count");
        // SAFETY: as declared.
        unsafe { count(name.as_ptr()) }
    }

    pub(crate) fn fail(&self, nth: u64, code: i32) {
        let fail: unsafe extern "C" fn(u64, i32) = self.function("standin_fail");
        // SAFETY: as declared.
        unsafe { fail(nth, code) };
    }

    pub(crate) fn fail_second(&self, nth: u64, code: i32) {
        let fail: unsafe extern "C" fn(u64, i32) = self.function("standin_fail_second");
        // SAFETY: as declared.
        unsafe { fail(nth, code) };
    }

    pub(crate) fn leftovers(&self) -> [u64; 4] {
        let leftovers: unsafe extern "C" fn(*mut u64) = self.function("standin_leftovers");
        let mut left = [0; 4];
        // SAFETY: room for four numbers.
        unsafe { leftovers(left.as_mut_ptr()) };
        left
    }
}

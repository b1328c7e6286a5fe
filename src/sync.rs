//! The only place that names the lock library, so that shuttle can take its place.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_parking_lot::{Mutex, MutexGuard};

/// A number that no other living thread has; never 0.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn thread_token() -> usize {
    thread_local!(static HERE: u8 = const { 0 });
    HERE.with(|here| std::ptr::from_ref(here) as usize)
}

/// Shuttle's threads share one thread of the system.
#[cfg(feature = "shuttle")]
pub(crate) fn thread_token() -> usize {
    usize::from(shuttle::current::me()) + 1
}

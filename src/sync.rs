//! The only place that names the lock library, so that shuttle can take its place.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_parking_lot::{Mutex, MutexGuard};

/// A value and the means to wait until it is as one wants it.
#[derive(Debug, Default)]
pub(crate) struct Monitor<T> {
    #[cfg(not(feature = "shuttle"))]
    value: Mutex<T>,
    #[cfg(not(feature = "shuttle"))]
    changed: parking_lot::Condvar,
    #[cfg(feature = "shuttle")]
    value: shuttle::sync::Mutex<T>,
    #[cfg(feature = "shuttle")]
    changed: shuttle::sync::Condvar,
}

impl<T> Monitor<T> {
    /// Blocks until `ready` returns something; calls it again after every [`change`](Self::change).
    #[cfg(not(feature = "shuttle"))]
    pub(crate) fn wait_for<R>(&self, mut ready: impl FnMut(&mut T) -> Option<R>) -> R {
        let mut value = self.value.lock();
        loop {
            if let Some(result) = ready(&mut value) {
                return result;
            }
            self.changed.wait(&mut value);
        }
    }

    /// As above, with shuttle's locks, which know poison.
    #[cfg(feature = "shuttle")]
    pub(crate) fn wait_for<R>(&self, mut ready: impl FnMut(&mut T) -> Option<R>) -> R {
        use std::sync::PoisonError;
        let mut value = self.value.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(result) = ready(&mut value) {
                return result;
            }
            value = self.changed.wait(value).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Changes the value and wakes who waits.
    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut change = Some(change);
        let result = self.wait_for(|value| change.take().map(|change| change(value)));
        self.changed.notify_all();
        result
    }
}

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

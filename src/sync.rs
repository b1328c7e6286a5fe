//! Locks and threads, which shuttle can replace.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_parking_lot::{Mutex, MutexGuard};

mod section;

pub(crate) use section::ExclusiveSection;

/// Shared by all shuttle executions: no interleaved operation may run under this lock.
pub(crate) use parking_lot::Mutex as ProcessMutex;

pub(crate) mod atomic {
    #[cfg(feature = "shuttle")]
    pub(crate) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    #[cfg(not(feature = "shuttle"))]
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
}

#[cfg(not(feature = "shuttle"))]
use parking_lot::{Condvar, Mutex as LockedValue};
#[cfg(feature = "shuttle")]
use shuttle::sync::{Condvar, Mutex as LockedValue};

#[derive(Debug, Default)]
pub(crate) struct Monitor<T> {
    value: LockedValue<T>,
    changed: Condvar,
}

impl<T> Monitor<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: LockedValue::new(value), changed: Condvar::default() }
    }

    /// Calls `ready` again after every [`change`](Self::change), until `Some`.
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

    /// Shuttle's locks can be poisoned.
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

    pub(crate) fn change<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let mut change = Some(change);
        let result = self.wait_for(|value| change.take().map(|change| change(value)));
        self.changed.notify_all();
        result
    }
}

pub(crate) fn yield_now() {
    #[cfg(not(feature = "shuttle"))]
    std::thread::yield_now();
    #[cfg(feature = "shuttle")]
    shuttle::thread::yield_now();
}

#[cfg(not(feature = "shuttle"))]
static LIVE: ProcessMutex<std::collections::BTreeSet<u64>> =
    ProcessMutex::new(std::collections::BTreeSet::new());

/// Token of the calling thread, never 0, and unique forever.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn thread_token() -> u64 {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicU64, Ordering};

    struct Ends(u64);
    impl Drop for Ends {
        fn drop(&mut self) {
            LIVE.lock().remove(&self.0);
        }
    }
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        // Separate from `ENDS`, because a thread may call this while it ends.
        static HERE: Cell<u64> = const { Cell::new(0) };
        static ENDS: Cell<Option<Ends>> = const { Cell::new(None) };
    }
    #[cold]
    fn first(here: &Cell<u64>) {
        let token = NEXT.fetch_add(1, Ordering::Relaxed);
        here.set(token);
        LIVE.lock().insert(token);
        // A thread whose first call is during its end counts as ended.
        if ENDS.try_with(|ends| ends.set(Some(Ends(token)))).is_err() {
            LIVE.lock().remove(&token);
        }
    }
    HERE.with(|here| {
        if here.get() == 0 {
            first(here);
        }
        here.get()
    })
}

/// Has ended or is ending.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn thread_has_ended(token: u64) -> bool {
    !LIVE.lock().contains(&token)
}

/// Ends of shuttle's threads are unknown.
#[cfg(feature = "shuttle")]
pub(crate) fn thread_has_ended(_token: u64) -> bool {
    false
}

/// Token of a thread of shuttle: these share one thread of the system.
#[cfg(feature = "shuttle")]
pub(crate) fn thread_token() -> u64 {
    usize::from(shuttle::current::me()) as u64 + 1
}

/// Starts a detached thread; false if the system cannot create one.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).is_ok()
}

#[cfg(feature = "shuttle")]
pub(crate) fn spawn(_name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    drop(shuttle::thread::spawn(work));
    true
}

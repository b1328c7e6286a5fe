//! The only place that names the lock library, so that shuttle can take its place.

#[cfg(not(feature = "shuttle"))]
pub(crate) use parking_lot::{Mutex, MutexGuard};
#[cfg(feature = "shuttle")]
pub(crate) use shuttle_parking_lot::{Mutex, MutexGuard};

mod section;

pub(crate) use section::ExclusiveSection;

/// A lock of the whole process, which shuttle's executions share: nothing that shuttle interleaves may be done under it.
pub(crate) use parking_lot::Mutex as ProcessMutex;

/// Atomics that shuttle interleaves.
pub(crate) mod atomic {
    #[cfg(feature = "shuttle")]
    pub(crate) use shuttle::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
    #[cfg(not(feature = "shuttle"))]
    pub(crate) use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
}

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

/// Lets another thread go on.
pub(crate) fn yield_now() {
    #[cfg(not(feature = "shuttle"))]
    std::thread::yield_now();
    #[cfg(feature = "shuttle")]
    shuttle::thread::yield_now();
}

/// Threads that have a token and have not ended.
#[cfg(not(feature = "shuttle"))]
static LIVE: ProcessMutex<std::collections::BTreeSet<u64>> =
    ProcessMutex::new(std::collections::BTreeSet::new());

/// A number of the calling thread; never 0, and never given to another thread, also after this one has ended.
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
        // Apart from what has an end, since a thread may call while it ends.
        static HERE: Cell<u64> = const { Cell::new(0) };
        static ENDS: Cell<Option<Ends>> = const { Cell::new(None) };
    }
    #[cold]
    fn first(here: &Cell<u64>) {
        let token = NEXT.fetch_add(1, Ordering::Relaxed);
        here.set(token);
        LIVE.lock().insert(token);
        // A thread that calls for the first time while it ends has ended.
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

/// Whether the thread of a token has ended, or is about to.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn thread_has_ended(token: u64) -> bool {
    !LIVE.lock().contains(&token)
}

/// Shuttle's threads are not told apart when they have ended.
#[cfg(feature = "shuttle")]
pub(crate) fn thread_has_ended(_token: u64) -> bool {
    false
}

/// Shuttle's threads share one thread of the system.
#[cfg(feature = "shuttle")]
pub(crate) fn thread_token() -> u64 {
    usize::from(shuttle::current::me()) as u64 + 1
}

/// Starts a thread of the library, which nobody waits for; whether the system gave one.
#[cfg(not(feature = "shuttle"))]
pub(crate) fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    std::thread::Builder::new().name(name.to_owned()).spawn(work).is_ok()
}

/// The same, on a thread that shuttle interleaves.
#[cfg(feature = "shuttle")]
pub(crate) fn spawn(_name: &str, work: impl FnOnce() + Send + 'static) -> bool {
    drop(shuttle::thread::spawn(work));
    true
}

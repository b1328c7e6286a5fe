//! Exclusive sections: one thread at a time, for any duration and across callbacks: an arena's
//! replay from before its launch to its end, or a region or arena while its pages move. The thread
//! about to close a circle of waits, over any sections, gets [`Circle`] instead.

use std::collections::HashMap;
use std::sync::Arc;

use super::atomic::{AtomicU64, AtomicUsize, Ordering};
use super::{Monitor, Mutex, thread_token};

/// Waiting threads enter in no particular order.
#[derive(Debug, Default)]
pub(crate) struct ExclusiveSection {
    /// By token; 0: none.
    thread: Arc<AtomicU64>,
    waiting: AtomicUsize,
    left: Monitor<()>,
}

/// The thread inside is the caller, or waits for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Circle;

/// For each waiting thread: the thread inside the awaited section.
type Waits = Mutex<HashMap<u64, Arc<AtomicU64>>>;

fn waits() -> &'static Waits {
    #[cfg(not(feature = "shuttle"))]
    static WAITS: std::sync::OnceLock<Waits> = std::sync::OnceLock::new();
    #[cfg(not(feature = "shuttle"))]
    return WAITS.get_or_init(Waits::default);
    #[cfg(feature = "shuttle")]
    {
        // One for each shuttle execution.
        shuttle::lazy_static! { static ref WAITS: Waits = Waits::default(); }
        &WAITS
    }
}

impl ExclusiveSection {
    pub(crate) fn is_of(&self, thread: u64) -> bool {
        self.thread.load(Ordering::SeqCst) == thread
    }

    /// Enters until [`leave`](Self::leave).
    pub(crate) fn enter(&self) -> Result<(), Circle> {
        let me = thread_token();
        if self.enter_as(me) { Ok(()) } else { self.wait_and_enter(me) }
    }

    pub(crate) fn try_enter(&self) -> bool {
        self.enter_as(thread_token())
    }

    pub(crate) fn leave(&self) {
        self.thread.store(0, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.left.change(|()| ());
        }
    }

    fn enter_as(&self, me: u64) -> bool {
        self.thread.compare_exchange(0, me, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }

    #[cold]
    fn wait_and_enter(&self, me: u64) -> Result<(), Circle> {
        self.waiting.fetch_add(1, Ordering::SeqCst);
        let entered = self.left.wait_for(|()| {
            if self.enter_as(me) {
                return Some(Ok(()));
            }
            self.wait_in_line(me).err().map(Err)
        });
        self.waiting.fetch_sub(1, Ordering::SeqCst);
        waits().lock().remove(&me);
        entered
    }

    /// The last thread of a circle always finds it: all search under one lock, and a waiting thread
    /// leaves no section.
    fn wait_in_line(&self, me: u64) -> Result<(), Circle> {
        let mut waits = waits().lock();
        let mut inside = self.thread.load(Ordering::SeqCst);
        for _ in 0..=waits.len() {
            if inside == me {
                return Err(Circle);
            }
            let Some(next) = waits.get(&inside) else { break };
            inside = next.load(Ordering::SeqCst);
        }
        waits.insert(me, Arc::clone(&self.thread));
        Ok(())
    }
}

//! The library's thread that commits ahead of need, one for each buffer that asks for it, and what it will say.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Committed;
use crate::error::{Error, Result};
use crate::pages::HookGuard;
use crate::sync::{Monitor, spawn};

/// A commit under way on a thread of the library. Clones are of the same commit; dropping them does not stop it.
#[derive(Clone)]
pub struct Pending(Arc<Monitor<Option<Result<Committed>>>>);

impl Pending {
    /// Whether it is over.
    #[must_use]
    pub fn done(&self) -> bool {
        self.0.wait_for(|result| Some(result.is_some()))
    }

    /// Blocks until it is over; what became of it. Waits for the driver's calls only, never for work of the device.
    ///
    /// # Errors
    /// Those of a commit; [`Error::WrongState`] inside an observer or a hook, which the commit may be waiting for.
    pub fn wait(&self) -> Result<Committed> {
        if let Some(result) = self.0.wait_for(|result| Some(result.clone())) {
            return result;
        }
        refuse_waiting()?;
        self.0.wait_for(|result| result.clone())
    }
}

impl fmt::Debug for Pending {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pending").field("done", &self.done()).finish()
    }
}

/// The end of a [`Pending`] that somebody must keep; dropped without that, it says so.
struct Promised(Pending);

impl Promised {
    fn keep(self, result: Result<Committed>) {
        self.0.0.change(|known| *known = Some(result));
    }
}

impl Drop for Promised {
    fn drop(&mut self) {
        let what = || "a commit ahead of need ended without a result".to_owned();
        self.0.0.change(|known| {
            known.get_or_insert_with(|| Err(Error::Internal { what: what() }));
        });
    }
}

type Job = Box<dyn FnOnce() + Send>;

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    /// Jobs that have still to mark their pages.
    unmarked: u64,
    running: bool,
    ended: bool,
}

/// What waits for the thread. It holds nothing else of the buffer, so that this can end.
#[derive(Clone, Default)]
pub(super) struct Worker(Arc<Monitor<Queue>>);

impl Worker {
    /// Hands something to the thread. `work` drops all it holds before its result is known.
    ///
    /// `mark` is called at once, unless jobs before this one have still to mark their pages: those would wait for pages that only a job
    /// behind them brings. What it returns is `work`'s; a job that gets nothing marks its pages on the thread.
    pub(super) fn push<T: Send + 'static>(
        &self,
        mark: impl FnOnce() -> Option<T>,
        work: impl FnOnce(Option<T>) -> Result<Committed> + Send + 'static,
    ) -> Pending {
        let pending = Pending(Arc::default());
        let promised = Promised(pending.clone());
        let worker = self.clone();
        let start = self.0.change(|queue| {
            let marked = if queue.unmarked == 0 { mark() } else { None };
            queue.unmarked += u64::from(marked.is_none());
            let unmarked = marked.is_none().then(|| Unmarked(worker));
            queue.jobs.push_back(Box::new(move || {
                let result = work(marked);
                drop(unmarked);
                promised.keep(result);
            }));
            !std::mem::replace(&mut queue.running, true)
        });
        if start {
            let there = self.clone();
            if !spawn("vmmgraph-elastic", move || there.run(true)) {
                // The system has no thread: then the caller does it.
                self.run(false);
            }
        }
        pending
    }

    /// Works until the buffer is gone, or until nothing is left to do.
    fn run(&self, stay: bool) {
        while let Some(job) = self.0.wait_for(|queue| match queue.jobs.pop_front() {
            Some(job) => Some(Some(job)),
            None if queue.ended || !stay => {
                queue.running = false;
                Some(None)
            }
            None => None,
        }) {
            // An observer's panic is its job's, which says so by its promise.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    /// The buffer is gone.
    pub(super) fn end(&self) {
        self.0.change(|queue| queue.ended = true);
    }
}

/// A job that had still to mark its pages, until it is over.
struct Unmarked(Worker);

impl Drop for Unmarked {
    fn drop(&mut self) {
        self.0.0.change(|queue| queue.unmarked = queue.unmarked.saturating_sub(1));
    }
}

/// Refuses to wait inside an observer or a hook: whoever is waited for may wait for that.
pub(super) fn refuse_waiting() -> Result<()> {
    HookGuard::refuse("elastic memory").map_err(|_| {
        Error::wrong_state(
            "cannot wait for elastic memory here: this thread is in an observer or a hook that the commit may wait for; call it outside",
        )
    })
}

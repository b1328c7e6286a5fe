//! Thread for commits ahead of need, one for each backing, created at first use.

use std::collections::VecDeque;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::Committed;
use crate::error::{Error, Result};
use crate::pause::HookGuard;
use crate::sync::{Monitor, spawn};

/// Result of a commit on a thread of the library. Clones share the commit; dropping does not
/// cancel.
#[derive(Clone)]
pub struct Pending(Arc<Monitor<Option<Result<Committed>>>>);

impl Pending {
    /// Whether the commit ended.
    #[must_use]
    pub fn done(&self) -> bool {
        self.0.wait_for(|result| Some(result.is_some()))
    }

    /// Blocks until the commit ends and returns its result: `vmmgraph_pending_wait`. Refused inside
    /// an observer or hook, for which the commit may wait.
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

/// Dropping without a result reports an internal error.
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
    /// Jobs whose pages are not marked yet.
    unmarked: u64,
    running: bool,
    ended: bool,
}

/// Owns nothing else of the backing, so the backing can be dropped.
#[derive(Clone, Default)]
pub(super) struct Worker(Arc<Monitor<Queue>>);

impl Worker {
    /// `work` must drop its references to the backing before its result is published. Calls `mark`
    /// at once, unless an earlier job has not marked its pages, which could then wait for this job
    /// (deadlock); `work` then gets `None` and marks on the thread.
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
                // If no thread can be created, the caller runs the job.
                self.run(false);
            }
        }
        pending
    }

    /// Runs jobs until the backing is gone, or, without `stay`, until the queue is empty.
    fn run(&self, stay: bool) {
        while let Some(job) = self.0.wait_for(|queue| match queue.jobs.pop_front() {
            Some(job) => Some(Some(job)),
            None if queue.ended || !stay => {
                queue.running = false;
                Some(None)
            }
            None => None,
        }) {
            // A panic of an observer ends its job only, whose `Promised` reports it.
            let _ = catch_unwind(AssertUnwindSafe(job));
        }
    }

    pub(super) fn end(&self) {
        self.0.change(|queue| queue.ended = true);
    }
}

struct Unmarked(Worker);

impl Drop for Unmarked {
    fn drop(&mut self) {
        self.0.0.change(|queue| queue.unmarked = queue.unmarked.saturating_sub(1));
    }
}

/// Refuses to wait inside an observer or hook, for which the commit may wait.
pub(super) fn refuse_waiting() -> Result<()> {
    HookGuard::refuse("elastic memory").map_err(|_| {
        Error::wrong_state(
            "cannot wait for elastic memory here: this thread is in an observer or a hook that the commit may wait for; call it outside",
        )
    })
}

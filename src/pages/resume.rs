//! Resume of several pausable objects: all or none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reclaim::MemoryRetry;
use super::{Fence, HostPool, PagePool, Pausable, ResumeReport, Resuming, Transaction};
use crate::error::{Error, Result};

/// Sleep between two attempts to get memory.
const PAUSE: Duration = Duration::from_millis(2);
/// Maximum attempts after the deadline, each after a reclaimer freed memory.
const TRIES: u32 = 8;

/// Resumes all objects or none. Returns when the contents are complete.
///
/// # Errors
/// Out of memory at the deadline; driver errors. All objects stay paused.
pub(crate) fn resume(
    pool: &Arc<PagePool>,
    host: &HostPool,
    all: &[&dyn Pausable],
    deadline: Duration,
) -> Result<ResumeReport> {
    resume_into(pool, host, all, deadline, true, &mut Vec::new())
}

/// As [`resume`], with or without a wait for the contents. `behind` receives the fence of each
/// object's contents, by its index in `all`.
pub(crate) fn resume_into(
    pool: &Arc<PagePool>,
    host: &HostPool,
    all: &[&dyn Pausable],
    deadline: Duration,
    wait: bool,
    behind: &mut Vec<(usize, Fence)>,
) -> Result<ResumeReport> {
    let start = Instant::now();
    let _go_on = pool.begin_waits()?;
    let mut patience = Patience { memory_retry: pool.memory_retry(), start, deadline, late: 0 };
    let (mut resuming, mut mapped, mut transaction) = loop {
        let (mut resuming, mapped) = begin(all)?;
        let error = match take(pool, &mut resuming) {
            Ok(transaction) => break (resuming, mapped, transaction),
            Err(error) => error,
        };
        // Leaves all sections before asking reclaimers. A reclaimer may pause these objects, or
        // wait for a thread doing so. No object has taken a page yet.
        drop(resuming);
        patience.wait(error)?;
    };
    let mut report = ResumeReport { regions: resuming.len() as u64, ..ResumeReport::default() };
    report.waited_micros = start.elapsed().as_micros() as u64;
    let copying = Instant::now();
    let mut restored = restore(&mut resuming, &mut transaction, &mut report);
    if wait || restored.is_err() {
        // Also after a failure: the undo unmaps the pages, so all writes must end first.
        for (_, one) in &resuming {
            restored = host.wait(&mut one.contents()).and(restored);
        }
        for (_, contents) in &mut mapped {
            restored = host.wait(contents).and(restored);
        }
        report.copy_micros = copying.elapsed().as_micros() as u64;
    }
    if let Err(error) = restored {
        drop(transaction);
        tracing::warn!(%error, "a resume failed and is undone");
        return Err(error);
    }
    report.calls += transaction.commit().0.all;
    behind.append(&mut mapped);
    for (index, one) in resuming {
        behind.push((index, one.contents()));
        one.finish();
    }
    report.micros = start.elapsed().as_micros() as u64;
    pool.check();
    Ok(report)
}

/// Maps the pages of all objects, then submits the copies of their contents.
///
/// A copy takes a thousand times as long as a mapping. But CUDA maps through an engine that also
/// serves copies of one direction (which one, depends on the host). During copies a page takes a
/// millisecond instead of 40 us (H200, docs/performance.md, Regions). So all mappings precede the
/// first copy.
fn restore(
    resuming: &mut [(usize, Box<dyn Resuming + '_>)],
    transaction: &mut Transaction<'_>,
    report: &mut ResumeReport,
) -> Result<()> {
    resuming.iter_mut().try_for_each(|(_, one)| one.map(transaction, report))?;
    resuming.iter_mut().try_for_each(|(_, one)| one.fill(report))
}

/// Resumes in progress, and fences of already resident objects, each with its index.
type Begun<'a> = (Vec<(usize, Box<dyn Resuming + 'a>)>, Vec<(usize, Fence)>);

/// Enters the sections of all objects in the order of their numbers, so two threads cannot
/// deadlock.
fn begin<'a>(all: &[&'a dyn Pausable]) -> Result<Begun<'a>> {
    let mut numbered: Vec<_> = all.iter().enumerate().collect();
    numbered.sort_by_key(|(_, known)| known.id());
    let (mut resuming, mut mapped) = (Vec::new(), Vec::new());
    for (index, known) in numbered {
        match known.resuming()? {
            Some(one) => resuming.push((index, one)),
            // Contents of a resident object may still be in transfer.
            None => mapped.push((index, known.contents())),
        }
    }
    resuming.sort_by_key(|(index, _)| *index);
    Ok((resuming, mapped))
}

/// Takes the pages of all objects or of none.
fn take<'a>(
    pool: &'a Arc<PagePool>,
    resuming: &mut [(usize, Box<dyn Resuming + '_>)],
) -> Result<Transaction<'a>> {
    let mut transaction = Transaction::on(pool);
    transaction.expect_bytes(resuming.iter().map(|(_, one)| one.missing()).sum());
    resuming.iter_mut().try_for_each(|(_, one)| one.take(&mut transaction))?;
    Ok(transaction)
}

/// Retry state of a resume without enough memory.
struct Patience<'a> {
    memory_retry: MemoryRetry<'a>,
    start: Instant,
    deadline: Duration,
    late: u32,
}

impl Patience<'_> {
    /// Asks for memory. Returns when a retry is useful. The caller is in no section.
    ///
    /// # Errors
    /// The given error, if not out of memory or if no retry is useful.
    fn wait(&mut self, error: Error) -> Result<()> {
        if !error.is_out_of_memory() {
            return Err(error);
        }
        let helped = self.memory_retry.once(&error);
        let left = self.deadline.saturating_sub(self.start.elapsed());
        if left.is_zero() {
            self.late += 1;
            if !helped || self.late > TRIES {
                return Err(error);
            }
        } else if !helped {
            std::thread::sleep(PAUSE.min(left));
        }
        Ok(())
    }
}

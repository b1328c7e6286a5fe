//! The way back of everything that can step aside: several come back together or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::reclaim::Relief;
use super::{Change, Fence, HostPool, PagePool, Pausable, ResumeReport, Resuming};
use crate::error::{Error, Result};

/// How long to sleep before memory is asked for again.
const PAUSE: Duration = Duration::from_millis(2);
/// How often memory is asked for again after the deadline because somebody gave some back.
const TRIES: u32 = 8;

/// Resumes all of these or none, and returns when the contents are there.
///
/// # Errors
/// No memory, also after the deadline, or what the driver says: everything is paused as before.
pub(crate) fn resume(
    pool: &Arc<PagePool>,
    host: &HostPool,
    all: &[&dyn Pausable],
    deadline: Duration,
) -> Result<ResumeReport> {
    resume_into(pool, host, all, deadline, true, &mut Vec::new())
}

/// The same, with `wait` or without; and what is behind the contents of each, by its place.
///
/// # Errors
/// As [`resume`].
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
    let mut patience = Patience { relief: pool.relief(), start, deadline, late: 0 };
    let (mut coming, mut mapped, mut change) = loop {
        let (mut coming, mapped) = begin(all)?;
        let error = match take(pool, &mut coming) {
            Ok(change) => break (coming, mapped, change),
            Err(error) => error,
        };
        // Before reclaimers are asked this thread leaves all sections: a reclaimer may pause what is
        // to come back, or wait for a thread that does. Nothing of it has a page by now.
        drop(coming);
        patience.wait(error)?;
    };
    let mut report = ResumeReport { regions: coming.len() as u64, ..ResumeReport::default() };
    report.waited_micros = start.elapsed().as_micros() as u64;
    let copying = Instant::now();
    let mut restored = restore(&mut coming, &mut change, &mut report);
    if wait || restored.is_err() {
        // Also after a failure: what is mapped is unmapped next, and nothing may write there then.
        for (_, resuming) in &coming {
            restored = host.wait(&mut resuming.contents()).and(restored);
        }
        for (_, contents) in &mut mapped {
            restored = host.wait(contents).and(restored);
        }
        report.copy_micros = copying.elapsed().as_micros() as u64;
    }
    if let Err(error) = restored {
        drop(change);
        tracing::warn!(%error, "a resume failed and is undone");
        return Err(error);
    }
    report.calls += change.commit().0.all;
    behind.append(&mut mapped);
    for (index, resuming) in coming {
        behind.push((index, resuming.contents()));
        resuming.finish();
    }
    report.micros = start.elapsed().as_micros() as u64;
    pool.check();
    Ok(report)
}

/// Maps the pages of all, and begins to bring the contents back.
///
/// A copy takes a thousand times as long as mapping. But CUDA maps through an engine that copies of one direction go through too, which one
/// depends on the host: beside them a page takes a millisecond instead of 40 us (H200, docs/performance.md, Regions). So everything is
/// mapped before the first copy.
fn restore(
    coming: &mut [(usize, Box<dyn Resuming + '_>)],
    change: &mut Change<'_>,
    report: &mut ResumeReport,
) -> Result<()> {
    coming.iter_mut().try_for_each(|(_, resuming)| resuming.map(change, report))?;
    coming.iter_mut().try_for_each(|(_, resuming)| resuming.fill(report))
}

/// What comes back, by its place in the list, and the contents of what is mapped already.
type Begun<'a> = (Vec<(usize, Box<dyn Resuming + 'a>)>, Vec<(usize, Fence)>);

/// Enters the sections of all, in the order of their numbers, so that two threads do not wait for
/// each other.
fn begin<'a>(all: &[&'a dyn Pausable]) -> Result<Begun<'a>> {
    let mut numbered: Vec<_> = all.iter().enumerate().collect();
    numbered.sort_by_key(|(_, known)| known.id());
    let (mut coming, mut mapped) = (Vec::new(), Vec::new());
    for (index, known) in numbered {
        match known.resuming()? {
            Some(resuming) => coming.push((index, resuming)),
            // The contents may be on their way.
            None => mapped.push((index, known.contents())),
        }
    }
    coming.sort_by_key(|(index, _)| *index);
    Ok((coming, mapped))
}

/// Takes the pages of all or of none.
fn take<'a>(pool: &'a Arc<PagePool>, coming: &mut [(usize, Box<dyn Resuming + '_>)]) -> Result<Change<'a>> {
    let mut change = Change::on(pool);
    change.announce(coming.iter().map(|(_, resuming)| resuming.missing()).sum());
    coming.iter_mut().try_for_each(|(_, resuming)| resuming.take(&mut change))?;
    Ok(change)
}

/// How often and for how long a resume that is short of memory tries again.
struct Patience<'a> {
    relief: Relief<'a>,
    start: Instant,
    deadline: Duration,
    late: u32,
}

impl Patience<'_> {
    /// Asks for memory, and returns when the next try is worth it. The caller is in no section.
    ///
    /// # Errors
    /// This error, if it is not worth it any more or no lack of memory.
    fn wait(&mut self, error: Error) -> Result<()> {
        if !error.is_out_of_memory() {
            return Err(error);
        }
        let relieved = self.relief.once(&error);
        let left = self.deadline.saturating_sub(self.start.elapsed());
        if left.is_zero() {
            self.late += 1;
            if !relieved || self.late > TRIES {
                return Err(error);
            }
        } else if !relieved {
            std::thread::sleep(PAUSE.min(left));
        }
        Ok(())
    }
}

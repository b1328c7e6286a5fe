//! The way back of everything that can step aside: several come back together or not at all.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Change, Fence, HostPool, PagePool, Pausable, ResumeReport, Resuming};
use crate::error::Result;

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
    let mut report = ResumeReport::default();
    // Turns are taken in the order of numbers, so that two threads do not wait for each other.
    let mut numbered: Vec<_> = all.iter().enumerate().collect();
    numbered.sort_by_key(|(_, known)| known.id());
    let mut coming: Vec<(usize, Box<dyn Resuming + '_>)> = Vec::new();
    // Of what is mapped already, the contents may be on their way.
    let mut mapped: Vec<(usize, Fence)> = Vec::new();
    for (index, known) in numbered {
        match known.resuming()? {
            Some(resuming) => coming.push((index, resuming)),
            None => mapped.push((index, known.contents())),
        }
    }
    coming.sort_by_key(|(index, _)| *index);
    report.regions = coming.len() as u64;
    let mut change = take_all(pool, &mut coming, deadline)?;
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

/// Takes the pages of all, with patience until the deadline.
fn take_all<'a>(
    pool: &'a Arc<PagePool>,
    coming: &mut [(usize, Box<dyn Resuming + '_>)],
    deadline: Duration,
) -> Result<Change<'a>> {
    let start = Instant::now();
    let mut late = 0;
    let mut relief = pool.relief();
    loop {
        let mut change = Change::on(pool);
        change.announce(coming.iter().map(|(_, resuming)| resuming.missing()).sum());
        let error = match coming.iter_mut().try_for_each(|(_, resuming)| resuming.take(&mut change)) {
            Ok(()) => return Ok(change),
            Err(error) => error,
        };
        // What was taken goes back before anybody is asked.
        drop(change);
        if !error.is_out_of_memory() {
            return Err(error);
        }
        let relieved = relief.once(&error);
        let left = deadline.saturating_sub(start.elapsed());
        if left.is_zero() {
            late += 1;
            if !relieved || late > TRIES {
                return Err(error);
            }
        } else if !relieved {
            std::thread::sleep(PAUSE.min(left));
        }
    }
}

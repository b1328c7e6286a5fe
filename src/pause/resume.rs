//! Resume of several pausable objects: all or none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copies::HostCopy;
use super::move_out::call_hooks;
use super::state::PauseGuard;
use super::{PageKey, Pausable, Pausables, PausePage, Phase, ResumeReport};
use crate::error::{Error, Result};
use crate::pages::{Fence, Hold, MemoryRetry, PagePool, Transaction};

/// Between two attempts to get memory.
const PAUSE: Duration = Duration::from_millis(2);
/// Attempts after the deadline, each after a reclaimer freed memory.
const TRIES: u32 = 8;

/// Resumes all objects or none, in this order. With `wait`, returns when the contents are complete;
/// else the [contents](super::PauseState::contents) of each object have a fence. After an error all
/// stay paused.
pub(crate) fn resume(
    device: &Pausables,
    all: &[&dyn Pausable],
    deadline: Duration,
    wait: bool,
) -> Result<ResumeReport> {
    let (pool, host, start) = (device.pool(), device.host_pool(), Instant::now());
    let _go_on = pool.begin_waits()?;
    let mut patience = Patience { memory_retry: pool.memory_retry(), start, deadline, late: 0 };
    let (mut resuming, resident, mut transaction) = loop {
        let (mut resuming, resident) = begin(all)?;
        let error = match take(pool, &mut resuming) {
            Ok(transaction) => break (resuming, resident, transaction),
            Err(error) => error,
        };
        // A reclaimer may pause these objects, or wait for a thread doing so. No object has taken a
        // page yet.
        drop(resuming);
        patience.wait(error)?;
    };
    let mut report = ResumeReport { regions: resuming.len() as u64, ..ResumeReport::default() };
    report.waited_micros = start.elapsed().as_micros() as u64;
    let copying = Instant::now();
    let mut restored = restore(&mut resuming, &mut transaction, &mut report);
    if wait || restored.is_err() {
        // Also after a failure: the undo unmaps the pages.
        let arriving = resuming.iter().map(|one| one.contents.clone());
        for mut contents in arriving.chain(resident) {
            restored = host.wait(&mut contents).and(restored);
        }
        report.copy_micros = copying.elapsed().as_micros() as u64;
    }
    if let Err(error) = restored {
        drop(transaction);
        tracing::warn!(%error, "a resume failed and is undone");
        return Err(error);
    }
    report.calls += transaction.commit().0.all;
    resuming.into_iter().for_each(MoveIn::finish);
    report.micros = start.elapsed().as_micros() as u64;
    pool.check();
    Ok(report)
}

/// Maps all pages before the first copy: CUDA maps through an engine that also serves copies of one
/// direction, and during copies a page takes a millisecond instead of 40 us (H200,
/// docs/performance.md, Regions).
fn restore(
    resuming: &mut [MoveIn<'_>],
    transaction: &mut Transaction<'_>,
    report: &mut ResumeReport,
) -> Result<()> {
    let mut pages = resuming.iter().flat_map(|one| &one.pages);
    pages.try_for_each(|page| page.map(transaction, report))?;
    resuming.iter_mut().try_for_each(|one| one.fill(report))
}

/// Dropped before [`finish`](Self::finish), the object stays paused with its host copies.
struct MoveIn<'a> {
    object: &'a dyn Pausable,
    pages: Vec<PausePage>,
    contents: Fence,
    hold: Option<Hold<'a>>,
    /// Last: the section is left after all tables are updated.
    guard: PauseGuard<'a>,
}

impl<'a> MoveIn<'a> {
    /// Enters the section of an object; `None`: not paused.
    fn begin(object: &'a dyn Pausable) -> Result<Option<Self>> {
        if !object.usable() {
            return Ok(None);
        }
        let Some(guard) = PauseGuard::begin_resume(object)? else { return Ok(None) };
        let (hold, mut pages) = (object.hold(), object.pages());
        object
            .pause_state()
            .with_copies(|copies| pages.retain_mut(|page| page.take_copy(|key| copies.remove(&key))));
        Ok(Some(Self { object, pages, contents: Fence::default(), hold, guard }))
    }

    /// Submits copies and fills. After a failure too, the fence of the contents includes all
    /// submitted work.
    fn fill(&mut self, report: &mut ResumeReport) -> Result<()> {
        let device = self.object.pausables();
        if !self.pages.iter().any(PausePage::filled) {
            return Ok(());
        }
        let begun = self.pages.iter().try_for_each(|page| page.fill(device, report));
        device.host_pool().mark_in(&mut self.contents);
        begun
    }

    /// Completes the resume after the commit.
    fn finish(mut self) {
        let (object, state) = (self.object, self.object.pause_state());
        let moved: Vec<_> = self.pages.iter().map(PausePage::moved).collect();
        object.record(&moved, &self.contents);
        self.hold = None;
        let ranges = object.moved_ranges(false);
        let (copies, contents) = (self.take_copies(), std::mem::take(&mut self.contents));
        let generation = state.arrive(object, copies, contents, !ranges.is_empty());
        self.guard.set(Phase::Resident);
        call_hooks(object, generation, &ranges, false);
        let (id, tag, pages) = (object.id(), object.tag(), moved.len());
        tracing::info!(id, tag, pages, "resumed {}", state.what());
    }

    fn take_copies(&mut self) -> Vec<(PageKey, HostCopy)> {
        self.pages.drain(..).filter_map(PausePage::into_copy).collect()
    }
}

impl Drop for MoveIn<'_> {
    fn drop(&mut self) {
        let copies = self.take_copies();
        self.object.pause_state().with_copies(|known| known.extend(copies));
    }
}

/// Enters all sections in the order of their numbers, so two threads cannot deadlock. Also returns
/// the contents of resident objects, still in transfer.
fn begin<'a>(all: &[&'a dyn Pausable]) -> Result<(Vec<MoveIn<'a>>, Vec<Fence>)> {
    let mut numbered: Vec<_> = all.iter().enumerate().collect();
    numbered.sort_by_key(|(_, known)| known.id());
    let (mut resuming, mut resident) = (Vec::new(), Vec::new());
    for (index, known) in numbered {
        match MoveIn::begin(*known)? {
            Some(one) => resuming.push((index, one)),
            None => resident.push(known.pause_state().contents()),
        }
    }
    resuming.sort_by_key(|(index, _)| *index);
    Ok((resuming.into_iter().map(|(_, one)| one).collect(), resident))
}

/// Takes the pages of all objects or of none.
fn take<'a>(pool: &'a Arc<PagePool>, resuming: &mut [MoveIn<'_>]) -> Result<Transaction<'a>> {
    let mut transaction = Transaction::on(pool);
    transaction.expect_bytes(resuming.iter().flat_map(|one| &one.pages).map(PausePage::missing).sum());
    let mut pages = resuming.iter_mut().flat_map(|one| &mut one.pages);
    pages.try_for_each(|page| page.take(&mut transaction))?;
    Ok(transaction)
}

struct Patience<'a> {
    memory_retry: MemoryRetry<'a>,
    start: Instant,
    deadline: Duration,
    late: u32,
}

impl Patience<'_> {
    /// Returns when a retry is useful, else the given error. The caller is in no section.
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

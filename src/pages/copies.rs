//! Contents of pages on the host, and the way there: copies are given to one stream a page at a time, and a second thread does what is
//! to be done behind each.

use std::sync::Arc;
use std::sync::mpsc::channel;

use super::{Fence, HostPiece, HostPool, PagePool, PauseReport, RangeId, ResumeReport};
use crate::error::Result;

/// Bytes of a page and where they wait on the host.
#[derive(Debug)]
pub(crate) struct Run {
    /// From the page's beginning.
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) pieces: Vec<HostPiece>,
}

/// What the host has of a page.
#[derive(Debug, Default)]
pub(crate) struct HostCopy {
    /// By offset; none lies over another.
    pub(crate) runs: Vec<Run>,
    /// Of all runs, where that is wanted.
    pub(crate) sum: u64,
}

/// A page's contents on the way to the host.
#[derive(Debug)]
pub(crate) struct Copied {
    pub(crate) copy: HostCopy,
    pub(crate) done: Fence,
}

impl HostCopy {
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes).sum()
    }

    /// Whether it is of these bytes of the page, and of no others.
    pub(crate) fn is_of(&self, runs: &[(u64, u64)]) -> bool {
        self.runs.iter().map(|run| (run.offset, run.bytes)).eq(runs.iter().copied())
    }

    /// The run that has a byte of the page, and where in it.
    pub(crate) fn run_at(&self, offset: u64) -> Option<(&Run, u64)> {
        let behind = self.runs.partition_point(|run| run.offset <= offset);
        let run = self.runs.get(behind.checked_sub(1)?)?;
        let from = offset - run.offset;
        (from < run.bytes).then_some((run, from))
    }

    /// Adds what the host has of the bytes behind this page's, which has `page` of them.
    pub(crate) fn append(&mut self, next: HostCopy, page: u64) {
        self.runs.extend(next.runs.into_iter().map(|run| Run { offset: page + run.offset, ..run }));
    }
}

impl HostPool {
    /// Takes the memory of copies back, to be used again behind a fence.
    pub(crate) fn give_copies(&self, copies: impl IntoIterator<Item = HostCopy>, fence: &Fence) {
        let runs = copies.into_iter().flat_map(|copy| copy.runs);
        self.give(runs.flat_map(|run| run.pieces).collect(), fence.clone());
    }

    /// Gives the copies of a mapped page to the stream, of these runs of its bytes.
    ///
    /// # Errors
    /// No host memory, or what the driver says; nothing is kept then.
    pub(crate) fn save(
        &self,
        pool: &PagePool,
        (range, page): (RangeId, u64),
        runs: &[(u64, u64)],
        report: &mut PauseReport,
    ) -> Result<Copied> {
        let (mut copy, mut done) = (HostCopy::default(), Fence::default());
        let copied = runs.iter().try_for_each(|(offset, bytes)| {
            let pieces = self.take(*bytes)?;
            report.calls += pieces.len() as u64;
            let copied = self.copy_out(pool, (range, page + offset), &pieces, &mut done);
            copy.runs.push(Run { offset: *offset, bytes: *bytes, pieces });
            report.path = report.path.max(copied?);
            Ok(())
        });
        match copied {
            Ok(()) => Ok(Copied { copy, done }),
            Err(error) => {
                self.give_copies([copy], &done);
                Err(error)
            }
        }
    }

    /// Waits for a copy.
    ///
    /// # Errors
    /// What the driver says, again and again; the host memory is used again when nobody writes there any more.
    pub(crate) fn saved(&self, Copied { copy, mut done }: Copied) -> Result<HostCopy> {
        match self.wait(&mut done) {
            Ok(()) => Ok(copy),
            Err(error) => {
                self.give_copies([copy], &done);
                Err(error)
            }
        }
    }

    /// Gives the copies back to a mapped page to the stream; they are [marked](Self::mark_in) by the caller, those of many pages at once.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn load(
        &self,
        pool: &PagePool,
        (range, page): (RangeId, u64),
        copy: &HostCopy,
        report: &mut ResumeReport,
    ) -> Result<()> {
        copy.runs.iter().try_for_each(|run| {
            report.calls += run.pieces.len() as u64;
            let path = self.copy_in(pool, (range, page + run.offset), &run.pieces)?;
            report.path = report.path.max(path);
            report.copied_bytes += run.bytes;
            Ok(())
        })
    }
}

/// Calls `copy` for each page here and `finish` for it and what came of that on a second thread, in order.
pub(crate) fn behind_copies<P: Send, L: Send>(
    all: Vec<P>,
    mut copy: impl FnMut(&P) -> Option<Result<Copied>>,
    finish: impl Fn(P, Option<Result<Copied>>) -> L + Send + Sync,
) -> Vec<L> {
    let copied = all.into_iter().map(|page| {
        let copied = copy(&page);
        (page, copied)
    });
    // Shuttle knows its own threads only.
    if cfg!(feature = "shuttle") {
        let copied: Vec<_> = copied.collect();
        return copied.into_iter().map(|(page, copied)| finish(page, copied)).collect();
    }
    let finish = Arc::new(finish);
    let (to_second, pages) = channel::<(P, Option<Result<Copied>>)>();
    std::thread::scope(|scope| {
        let behind = Arc::clone(&finish);
        let second = move || pages.into_iter().map(|(page, copied)| behind(page, copied)).collect();
        match std::thread::Builder::new().spawn_scoped::<_, Vec<L>>(scope, second) {
            Ok(second) => {
                // The second thread takes everything until this end is dropped.
                copied.for_each(|page| drop(to_second.send(page)));
                drop(to_second);
                second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
            Err(_) => copied.map(|(page, copied)| finish(page, copied)).collect(),
        }
    })
}

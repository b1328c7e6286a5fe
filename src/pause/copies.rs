//! Host copies of pages: the calling thread submits copies to one stream, and a second thread
//! processes each page after its copy.

use std::sync::Arc;
use std::sync::mpsc::channel;

use super::{PauseReport, ResumeReport};
use crate::error::Result;
use crate::pages::{Fence, HostPiece, HostPool, PagePool, RangeId};

#[derive(Debug)]
struct Run {
    offset: u64,
    bytes: u64,
    pieces: Vec<HostPiece>,
}

#[derive(Debug, Default)]
pub(crate) struct HostCopy {
    /// By offset, without overlap.
    runs: Vec<Run>,
    /// If requested.
    sum: u64,
}

#[derive(Debug)]
pub(super) struct Copied {
    copy: HostCopy,
    done: Fence,
}

impl HostCopy {
    pub(crate) fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes).sum()
    }

    /// Checksum; 0 before [`add_sum`](Self::add_sum).
    pub(super) fn sum(&self) -> u64 {
        self.sum
    }

    pub(super) fn add_sum(&mut self, host: &HostPool) {
        let sums = self.runs.iter().map(|run| host.checksum(&run.pieces));
        self.sum = sums.fold(0, |all, sum| all.rotate_left(7) ^ sum);
    }

    pub(super) fn is_of(&self, runs: &[(u64, u64)]) -> bool {
        self.runs.iter().map(|run| (run.offset, run.bytes)).eq(runs.iter().copied())
    }

    /// Run with a byte of the page, and the offset in the run.
    fn run_at(&self, offset: u64) -> Option<(&Run, u64)> {
        let behind = self.runs.partition_point(|run| run.offset <= offset);
        let run = self.runs.get(behind.checked_sub(1)?)?;
        let from = offset - run.offset;
        (from < run.bytes).then_some((run, from))
    }

    /// Bytes from `offset` up to the end of a run.
    pub(crate) fn bytes_at(&self, offset: u64) -> u64 {
        self.run_at(offset).map_or(0, |(run, from)| run.bytes - from)
    }

    /// Reads at most [`bytes_at`](Self::bytes_at) bytes.
    pub(crate) fn read(&self, host: &HostPool, offset: u64, into: &mut [u8]) -> Result<()> {
        self.run_at(offset).map_or(Ok(()), |(run, from)| host.read(&run.pieces, from, into))
    }

    /// Appends the adjacent next page; `page`: bytes of this one.
    pub(crate) fn append(&mut self, next: HostCopy, page: u64) {
        self.runs.extend(next.runs.into_iter().map(|run| Run { offset: page + run.offset, ..run }));
    }
}

impl HostPool {
    /// Returns host memory for reuse after a fence.
    pub(super) fn give_copies(&self, copies: impl IntoIterator<Item = HostCopy>, fence: &Fence) {
        let runs = copies.into_iter().flat_map(|copy| copy.runs);
        self.give(runs.flat_map(|run| run.pieces).collect(), fence.clone());
    }

    /// Leaves no host memory in use after an error.
    pub(super) fn save(
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

    /// Waits for a copy; on error, its host memory is reused after it.
    pub(super) fn saved(&self, Copied { copy, mut done }: Copied) -> Result<HostCopy> {
        match self.wait(&mut done) {
            Ok(()) => Ok(copy),
            Err(error) => {
                self.give_copies([copy], &done);
                Err(error)
            }
        }
    }

    /// Submits copies; the caller [marks](Self::mark_in) many pages at once.
    pub(super) fn load(
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

/// Calls `copy` for each page on this thread, and `finish` on a second thread, in order.
pub(super) fn behind_copies<P: Send, L: Send>(
    all: Vec<P>,
    mut copy: impl FnMut(&P) -> Option<Result<Copied>>,
    finish: impl Fn(P, Option<Result<Copied>>) -> L + Send + Sync,
) -> Vec<L> {
    let copied = all.into_iter().map(|page| {
        let copied = copy(&page);
        (page, copied)
    });
    // Shuttle supports only its own threads.
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
                copied.for_each(|page| drop(to_second.send(page)));
                drop(to_second);
                second.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            }
            Err(_) => copied.map(|(page, copied)| finish(page, copied)).collect(),
        }
    })
}

//! Pause of one region.
//!
//! One stream copies the pages in order. A second thread unmaps and releases each page once its
//! copy is done, while later pages are copied. A failed page stays mapped, and the rest continues.

use std::time::{Duration, Instant};

use super::block_table::Phase;
use super::{Policy, Region};
use crate::error::{Error, Result};
use crate::pages::{Copied, Fence, HostCopy, Moved, PauseReport, RangeId, Transaction, behind_copies};
use crate::units::Address;

struct PausingPage {
    at: u64,
    range: RangeId,
    offset: u64,
    bytes: u64,
    /// Runs to be copied first.
    runs: Vec<(u64, u64)>,
    /// Bytes already on the host, and their checksum.
    clean: Option<(u64, u64)>,
}

struct PausedPage {
    page: PausingPage,
    /// New host copy, if copied.
    copy: Option<HostCopy>,
    /// `None`: still mapped. Else whether the driver accepted the release.
    gone: Option<bool>,
    copied: Option<Instant>,
    calls: u64,
    failure: Option<Error>,
}

impl Region {
    pub(super) fn pause_pages(&self, fence: Fence) -> Result<PauseReport> {
        let mut guard = self.enter_pause_section()?;
        let _go_on = self.device.pool().begin_waits()?;
        let start = Instant::now();
        let mut report = PauseReport::default();
        let (leaving, generation) = {
            let mut table = self.table.lock();
            let going = |policy: Policy, resident: bool| resident && policy != Policy::Keep;
            let any = table.extents.values().any(|extent| going(extent.policy, extent.page.is_some()));
            if table.phase == Phase::Paused && !any {
                return Ok(report);
            }
            report.regions = u64::from(table.phase == Phase::Resident);
            guard.back = Some(table.phase);
            table.phase = Phase::Pausing;
            (any, table.generation)
        };
        self.wait_for_users(fence)?;
        report.kept_bytes = self.table.lock().bytes_of(Policy::Keep);
        if leaving {
            let all = self.plan();
            let ranges: Vec<_> = all.iter().map(|page| (Address(page.at), page.bytes)).collect();
            self.call_hooks(generation, &ranges, true);
            self.move_out(all, &mut report);
        }
        guard.back = Some(Phase::Paused);
        drop(guard);
        report.micros = start.elapsed().as_micros() as u64;
        let (bytes, copied, failures) = (report.bytes, report.copied_bytes, report.failures.len());
        tracing::info!(region = self.id, tag = %self.tag, bytes, copied, failures, micros = report.micros, "region paused");
        self.device.pool().check();
        Ok(report)
    }

    /// Waits for the caller's fence and the work submitted to all streams of blocks.
    fn wait_for_users(&self, mut fence: Fence) -> Result<()> {
        let events = self.device.pool().events();
        fence.join(self.table.lock().users(events));
        fence.block(events, Duration::MAX).map(drop)
    }

    pub(super) fn call_hooks(&self, generation: u64, ranges: &[(Address, u64)], gone: bool) {
        let moved = Moved { tag: &self.tag, region: self.id, generation, ranges };
        self.device.pausables().call_hooks(&moved, gone);
    }

    fn plan(&self) -> Vec<PausingPage> {
        let table = self.table.lock();
        let there = table.extents.iter().filter(|(_, extent)| extent.page.is_some());
        let going = there.filter(|(_, extent)| extent.policy != Policy::Keep);
        let plan = going.map(|(at, extent)| {
            let known = extent.copy.as_ref();
            let copies = extent.policy == Policy::Backup && (known.is_none() || self.options.verify_clean);
            let runs = if copies { table.runs(*at, extent.bytes) } else { Vec::new() };
            // Blocks may have been freed during an earlier pause; checksums of different runs are
            // not comparable.
            let clean = known.filter(|copy| !copies || copy.is_of(&runs));
            let clean = clean.map(|copy| (copy.bytes(), copy.sum));
            let (range, offset, bytes) = (extent.range, extent.offset, extent.bytes);
            PausingPage { at: *at, range, offset, bytes, runs, clean }
        });
        plan.collect()
    }

    fn move_out(&self, all: Vec<PausingPage>, report: &mut PauseReport) {
        let copies: u64 = all.iter().flat_map(|page| &page.runs).map(|(_, bytes)| bytes).sum();
        if copies > 0
            && let Err(error) = self.device.host_pool().make_room(copies)
        {
            // Continues with the available room. Each page without room is reported.
            tracing::warn!(%error, copies, "the host has no room for all contents");
        }
        let start = Instant::now();
        let left = if copies > 0 {
            let (pool, host) = (self.device.pool(), self.device.host_pool());
            let copy = |page: &PausingPage| {
                let at = (page.range, page.offset);
                (!page.runs.is_empty()).then(|| host.save(pool, at, &page.runs, report))
            };
            behind_copies(all, copy, |page, copied| self.finish(page, copied))
        } else {
            all.into_iter().map(|page| self.finish(page, None)).collect()
        };
        let last = left.iter().filter_map(|page| page.copied).max();
        report.copy_micros = last.map_or(0, |last| last.duration_since(start).as_micros() as u64);
        self.note(left, report);
    }

    /// Unmaps and releases a page once its copy is done.
    fn finish(&self, page: PausingPage, copied: Option<Result<Copied>>) -> PausedPage {
        let (pool, host) = (self.device.pool(), self.device.host_pool());
        let mut left = PausedPage { page, copy: None, gone: None, copied: None, calls: 0, failure: None };
        match copied {
            None => {}
            Some(Err(error)) => {
                left.failure = Some(error);
                return left;
            }
            Some(Ok(copied)) => {
                let mut copy = match host.saved(copied) {
                    Ok(copy) => copy,
                    Err(error) => {
                        left.failure = Some(error);
                        return left;
                    }
                };
                left.copied = Some(Instant::now());
                if self.options.verify_clean {
                    let sums = copy.runs.iter().map(|run| host.checksum(&run.pieces));
                    copy.sum = sums.fold(0, |all, sum| all.rotate_left(7) ^ sum);
                }
                left.copy = Some(copy);
            }
        }
        let mut transaction = Transaction::on(pool);
        match transaction.unmap(left.page.range, left.page.offset, left.page.bytes) {
            Ok(()) => {
                left.gone = Some(transaction.commit_to_driver());
                left.calls = 2;
            }
            Err(error) => left.failure = Some(error),
        }
        left
    }

    fn note(&self, all: Vec<PausedPage>, report: &mut PauseReport) {
        let host = self.device.host_pool();
        let table = &mut *self.table.lock();
        for left in all {
            let PausedPage { page, copy, gone, calls, failure, .. } = left;
            report.calls += calls;
            report.failures.extend(failure);
            match gone {
                Some(taken) => {
                    report.pages += 1;
                    report.bytes += page.bytes;
                    if !taken {
                        let name = "a page was refused; it is given back by a later trim".to_owned();
                        report.failures.push(Error::Driver { call: "release", code: -1, name });
                    }
                }
                None => report.left_bytes += page.bytes,
            }
            match (&copy, page.clean) {
                (None, Some((bytes, _))) if gone.is_some() => report.clean_bytes += bytes,
                (Some(copy), Some((_, sum))) if copy.sum == sum => report.clean_bytes += copy.bytes(),
                (Some(copy), clean) => {
                    report.copied_bytes += copy.bytes();
                    if clean.is_some() {
                        report.stale_pages += 1;
                        tracing::error!(
                            region = self.id,
                            at = page.at,
                            "a page was written after its backup, and nobody said so"
                        );
                    }
                }
                _ => {}
            }
            let Some(extent) = table.extents.get_mut(&page.at) else { continue };
            if gone.is_some() {
                extent.page = None;
            }
            if let Some(copy) = copy
                && let Some(old) = extent.copy.replace(copy)
            {
                host.give_copies([old], &table.contents);
            }
        }
    }
}

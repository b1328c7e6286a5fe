use std::time::Instant;

use super::copies::{Copied, HostCopy};
use super::{Pausables, PauseReport, ResumeReport};
use crate::error::{Error, Result};
use crate::pages::{AccountId, Owner, PageId, RangeId, Transaction};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum PageKey {
    /// A region's page: a pause releases it, a resume maps a new one.
    Place(u64),
    /// A page of an arena, which stays in the pool without memory.
    Page(PageId),
}

/// A moved page: its key, its new memory if moved in, and whether the resume writes the page.
pub(crate) type MovedPage = (PageKey, Option<PageId>, bool);

pub(crate) struct PausePage {
    key: PageKey,
    at: (RangeId, u64),
    bytes: u64,
    /// Owner and account of new memory.
    taker: (Owner, AccountId),
    present: bool,
    /// Has addresses which do not exist in the driver.
    unmapped: bool,
    zero: bool,
    /// Copied by a pause: offset in the page and bytes.
    runs: Vec<(u64, u64)>,
    /// Copies known contents again, and compares.
    verify: bool,
    /// Bytes already on the host, and their checksum.
    clean: Option<(u64, u64)>,
    /// Taken by a resume.
    memory: Option<PageId>,
    copy: Option<HostCopy>,
}

pub(super) struct Left {
    page: PausePage,
    copied: Option<Instant>,
    /// Calls, and whether the driver took the memory; or why the page stays.
    gone: Result<(u64, bool)>,
}

impl PausePage {
    /// Creates a page mapped at `at`, with contents to discard.
    pub(crate) fn new(key: PageKey, at: (RangeId, u64), bytes: u64, taker: (Owner, AccountId)) -> Self {
        let (runs, clean, memory, copy) = (Vec::new(), None, None, None);
        let (present, unmapped, zero, verify) = (true, false, false, false);
        Self { key, at, bytes, taker, present, unmapped, zero, runs, verify, clean, memory, copy }
    }

    /// Has memory; has addresses which do not exist in the driver.
    pub(crate) fn resident(self, present: bool, unmapped: bool) -> Self {
        Self { present, unmapped, ..self }
    }

    pub(crate) fn zeroed(self) -> Self {
        Self { zero: true, ..self }
    }

    /// Makes a pause copy these parts, unless the host has a copy; with `verify` anyway, and
    /// compare.
    pub(crate) fn copied(self, runs: Vec<(u64, u64)>, verify: bool) -> Self {
        Self { runs, verify, ..self }
    }

    pub(super) fn key(&self) -> PageKey {
        self.key
    }

    pub(super) fn present(&self) -> bool {
        self.present
    }

    /// Decides the copy by the last one. Returns the bytes to be copied.
    pub(super) fn plan(&mut self, known: Option<&HostCopy>) -> u64 {
        let again = known.is_none() || self.verify;
        // Checksums of different runs are not comparable.
        let clean = known.filter(|copy| !again || copy.is_of(&self.runs));
        self.clean = clean.map(|copy| (copy.bytes(), copy.sum()));
        if !again {
            self.runs.clear();
        }
        self.runs.iter().map(|(_, bytes)| bytes).sum()
    }

    pub(super) fn save(&self, device: &Pausables, report: &mut PauseReport) -> Option<Result<Copied>> {
        let (pool, host) = (device.pool(), device.host_pool());
        (!self.runs.is_empty()).then(|| host.save(pool, self.at, &self.runs, report))
    }

    /// Unmaps and releases the page once its copy is done.
    pub(super) fn release(mut self, device: &Pausables, copied: Option<Result<Copied>>) -> Left {
        let (pool, host) = (device.pool(), device.host_pool());
        match copied.map(|copied| host.saved(copied?)).transpose() {
            Ok(copy) => self.copy = copy,
            Err(error) => return Left { page: self, copied: None, gone: Err(error) },
        }
        let copied = self.copy.is_some().then(Instant::now);
        if let Some(copy) = self.copy.as_mut().filter(|_| self.verify) {
            copy.add_sum(host);
        }
        let gone = match self.key {
            PageKey::Place(_) => {
                let mut transaction = Transaction::on(pool);
                let unmapped = transaction.unmap(self.at.0, self.at.1, self.bytes);
                unmapped.map(|()| (2, transaction.commit_to_driver()))
            }
            PageKey::Page(page) => pool.make_non_resident(page),
        };
        Left { page: self, copied, gone }
    }

    /// Takes the host copy for a resume; false if the page needs none. After an incomplete undo, a
    /// page with a copy may be mapped, with wrong contents.
    pub(super) fn take_copy(&mut self, remove: impl FnOnce(PageKey) -> Option<HostCopy>) -> bool {
        let whole = matches!(self.key, PageKey::Place(_)) && self.present;
        self.copy = if whole { None } else { remove(self.key) };
        !self.present || self.unmapped || self.copy.is_some()
    }

    pub(super) fn missing(&self) -> u64 {
        if self.present { 0 } else { self.bytes }
    }

    /// Whether a resume writes the page.
    pub(super) fn filled(&self) -> bool {
        self.zero || self.copy.is_some()
    }

    pub(super) fn take(&mut self, transaction: &mut Transaction<'_>) -> Result<()> {
        let (pool, (range, offset)) = (transaction.pool(), self.at);
        if self.present {
            return Ok(());
        }
        if matches!(self.key, PageKey::Place(_)) && !pool.mapped_in(range, offset, self.bytes).is_empty() {
            // Leftovers of an earlier resume whose undo failed.
            let mut leftovers = Transaction::on(pool);
            leftovers.unmap(range, offset, self.bytes)?;
            leftovers.commit();
        }
        self.memory = Some(transaction.take(self.bytes, self.taker.0, self.taker.1)?);
        Ok(())
    }

    pub(super) fn map(&self, transaction: &mut Transaction<'_>, report: &mut ResumeReport) -> Result<()> {
        match self.key {
            PageKey::Place(_) => transaction.map(self.at.0, self.at.1, self.memory.as_slice())?,
            PageKey::Page(page) => transaction.make_resident(page, self.memory)?,
        }
        report.pages += 1;
        report.bytes += self.bytes;
        Ok(())
    }

    pub(super) fn fill(&self, device: &Pausables, report: &mut ResumeReport) -> Result<()> {
        let (pool, host) = (device.pool(), device.host_pool());
        if let Some(copy) = &self.copy {
            host.load(pool, self.at, copy, report)?;
        }
        if self.zero {
            pool.fill(self.at.0, self.at.1, self.bytes, 0, host.stream_in()?)?;
            report.calls += 1;
            report.zeroed_bytes += self.bytes;
        }
        Ok(())
    }

    pub(super) fn moved(&self) -> MovedPage {
        (self.key, self.memory, self.filled())
    }

    pub(super) fn into_copy(self) -> Option<(PageKey, HostCopy)> {
        Some((self.key, self.copy?))
    }
}

impl Left {
    pub(super) fn copied(&self) -> Option<Instant> {
        self.copied
    }

    /// The page, if released.
    pub(super) fn moved(&self) -> Option<MovedPage> {
        self.gone.is_ok().then_some((self.page.key, None, false))
    }

    /// Returns its new copy.
    pub(super) fn count(self, report: &mut PauseReport) -> Option<(PageKey, HostCopy)> {
        let Self { page, gone, .. } = self;
        let left = gone.is_err();
        match gone {
            Ok((calls, taken)) => {
                report.calls += calls;
                report.pages += 1;
                report.bytes += page.bytes;
                if !taken {
                    let name = "a page was refused; it is given back by a later trim".to_owned();
                    report.failures.push(Error::Driver { call: "release", code: -1, name });
                }
            }
            Err(error) => {
                report.left_bytes += page.bytes;
                report.failures.push(error);
            }
        }
        match (&page.copy, page.clean) {
            (None, Some((bytes, _))) if !left => report.clean_bytes += bytes,
            (Some(copy), Some((_, sum))) if copy.sum() == sum => report.clean_bytes += copy.bytes(),
            (Some(copy), clean) => {
                report.copied_bytes += copy.bytes();
                if clean.is_some() {
                    report.stale_pages += 1;
                    let page = page.key;
                    tracing::error!(?page, "a page was written after its backup, and nobody said so");
                }
            }
            (None, _) => {}
        }
        page.into_copy()
    }
}

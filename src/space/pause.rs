//! Pause and resume of an arena. Spaces, blocks and the shared set are unaware of a pause: their
//! pages become *non-resident* and keep every address (`pages/non_resident.rs`).
//!
//! ```text
//!   pause    no space open; replays refused
//!            -> wait: fence, replays, recorded streams -> before_unmap
//!            -> copy pages owned by graph or eager spaces, and the persistent heap, to the host;
//!               unmap and release all pages, the copied ones after their copies
//!   resume   memory for every non-resident page -> map at all addresses; copy in
//!            -> after_map -> replays permitted, after the copies
//! ```
//!
//! Shared pages are not copied: their contents last for one replay. So live-out blocks of bump
//! spaces and under [`RetainPolicy::Share`](super::RetainPolicy) are lost. Pages are copied whole.
//! Private (exclusive) blocks stay resident, because peers may know their pages.
//!
//! The residency lock ([`Residency`](super::Residency)) guards the stage and the host copies.
//! [`PauseGuard`] is the exclusive section for moving pages.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::residency::Stage;
use super::{Common, Core, EagerSpace};
use crate::error::{Error, Result};
use crate::pages::{
    ArenaPage, Copied, Fence, Hold, HostCopy, Moved, Owner, PageId, Pausable, PauseReport, ResumeReport,
    Resuming, Transaction, behind_copies,
};
use crate::sync::yield_now;
use crate::units::Stream;

/// Result of one page of a pause.
struct PausedPage {
    page: ArenaPage,
    /// New host copy of the page.
    copy: Option<HostCopy>,
    copied: Option<Instant>,
    /// Number of calls, and whether the driver took the memory; or why the page stays.
    gone: Result<(u64, bool)>,
}

/// Exclusive section for moving an arena's pages. Sets the stage to `back` when dropped.
pub(super) struct PauseGuard<'a> {
    common: &'a Common,
    back: Stage,
}

impl Drop for PauseGuard<'_> {
    fn drop(&mut self) {
        let contents = self.common.residency.with(|residency_state| {
            residency_state.stage = self.back;
            residency_state.contents.clone()
        });
        if self.back == Stage::Resident {
            self.common.order.reopen(contents);
        }
        self.common.residency.pause_section.give();
    }
}

impl Common {
    fn number(&self) -> u64 {
        self.shared.arena()
    }

    /// Pauses the arena: frees all pages, as far as possible. See
    /// [`SharedVmmAllocator::pause`](crate::SharedVmmAllocator::pause).
    pub(crate) fn pause_pages(&self, fence: Fence) -> Result<PauseReport> {
        let driver = self.pool().driver();
        driver.capabilities().require_replacing(driver.info(), "its arenas stay")?;
        let start = Instant::now();
        let mut report = PauseReport::default();
        let _go_on = self.pool().begin_waits()?;
        let Some(mut guard) = self.begin_pause()? else { return Ok(report) };
        report.regions = u64::from(guard.back == Stage::Resident);
        report.kept_bytes = self.pool().held(self.exclusive_owner()).0;
        self.wait_for_users(fence)?;
        let pool = self.pool();
        // Unneeded contents need no copy.
        self.shared.settle_returning();
        self.heap.settle(pool);
        self.spare_ranges.clear(pool);
        let hold = pool.hold(self.number());
        let all: Vec<ArenaPage> =
            pool.arena_pages(self.number()).into_iter().filter(|page| page.present).collect();
        if !all.is_empty() {
            self.call_hooks(true);
            self.move_out(all, &mut report);
        }
        guard.back = Stage::Paused;
        drop(hold);
        drop(guard);
        report.micros = start.elapsed().as_micros() as u64;
        let (bytes, copied, failures) = (report.bytes, report.copied_bytes, report.failures.len());
        tracing::info!(
            arena = self.number(),
            bytes,
            copied,
            failures,
            micros = report.micros,
            "arena paused"
        );
        pool.check();
        Ok(report)
    }

    /// Excludes replays and new spaces until the result is dropped, and waits for all users of the
    /// pages.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the arena is resident, and those of
    /// [`pause_pages`](Self::pause_pages).
    pub(super) fn exclude_users(&self, fence: Fence) -> Result<PauseGuard<'_>> {
        let guard = self.begin_pause()?.filter(|guard| guard.back == Stage::Resident);
        let Some(guard) = guard else {
            return Err(Error::wrong_state("cannot shrink the arena: it is paused; resume it first"));
        };
        self.wait_for_users(fence)?;
        Ok(guard)
    }

    /// Enters the exclusive section and refuses replays. Returns `None` if all pages are already
    /// paused.
    fn begin_pause(&self) -> Result<Option<PauseGuard<'_>>> {
        loop {
            // Between two replays. The wait below does not hold the replay slot, so no cycle of
            // waits can form.
            let begun = self.order.between(|| self.try_begin_pause())??;
            if let Some(begun) = begun {
                return Ok(begun);
            }
            self.residency.pause_section.wait("the arena")?;
        }
    }

    /// Returns `None` while a different thread is in the exclusive section.
    #[expect(clippy::option_option, reason = "the turn may be another's, and there may be nothing to do")]
    fn try_begin_pause(&self) -> Result<Option<Option<PauseGuard<'_>>>> {
        if !self.residency.pause_section.try_take("the arena")? {
            return Ok(None);
        }
        let lent = self.pool().lent_bytes(None, self.shared.account()) > 0;
        let exported = self.pool().exported_of(self.number());
        let was = self.residency.with(|residency_state| {
            if residency_state.stage == Stage::Resident && lent {
                return Err(Error::wrong_state(format!(
                    "cannot pause arena {}: pages of it are on lease; recall the leases first",
                    self.number()
                )));
            }
            if residency_state.stage == Stage::Resident && !exported.is_empty() {
                return Err(Error::Exported { pages: exported });
            }
            if residency_state.stage == Stage::Resident && residency_state.open > 0 {
                return Err(Error::wrong_state(format!(
                    "cannot pause arena {}: {} spaces of it are open; seal or drop them first",
                    self.number(),
                    residency_state.open
                )));
            }
            let was = residency_state.stage;
            residency_state.stage = Stage::Pausing;
            Ok(was)
        });
        let was = match was {
            Ok(was) => was,
            Err(error) => {
                self.residency.pause_section.give();
                return Err(error);
            }
        };
        let guard = PauseGuard { common: self, back: was };
        if was == Stage::Paused && !self.pool().arena_pages(self.number()).iter().any(|page| page.present) {
            return Ok(Some(None));
        }
        self.order.shut();
        Ok(Some(Some(guard)))
    }

    /// Waits for the caller's fence, the replays, and the recorded streams of all blocks, also of
    /// freed blocks and dropped spaces.
    fn wait_for_users(&self, mut fence: Fence) -> Result<()> {
        fence.join(self.order.fence());
        fence.join(self.contents());
        for core in self.cores() {
            fence.join(core.users());
        }
        if let Some(eager) = self.eager_space() {
            fence.join(eager.users());
        }
        // Last: objects dropped meanwhile left their fences in the heap and pool.
        fence.join(self.heap.users());
        fence.join(self.pool().pending_fence(self.number()));
        fence.block(self.pool().events(), Duration::MAX).map(drop)
    }

    /// Returns the cores of all existing spaces, with and without graph. Waits for cores being
    /// dropped on other threads, which do not block.
    pub(super) fn cores(&self) -> Vec<Arc<Core>> {
        loop {
            let spaces: Vec<_> = self.spaces.lock().values().map(Weak::upgrade).collect();
            let retired: Vec<_> = self.retired.lock().values().map(Weak::upgrade).collect();
            let spaces = spaces.iter().map(|space| space.as_ref().map(|space| Arc::clone(space.core())));
            if let Some(all) = spaces.chain(retired).collect() {
                return all;
            }
            yield_now();
        }
    }

    /// Returns the eager space, if one exists. Waits like [`cores`](Self::cores).
    fn eager_space(&self) -> Option<Arc<EagerSpace>> {
        loop {
            let known = self.eager.lock().clone();
            let there = known.upgrade();
            if there.is_some() || known.ptr_eq(&Weak::new()) {
                return there;
            }
            yield_now();
        }
    }

    fn call_hooks(&self, gone: bool) {
        let ranges = self.pool().addresses(self.number());
        let returns = self.residency.with(|residency_state| residency_state.returns);
        let moved = Moved { tag: &self.tag, region: self.number(), generation: returns + 1, ranges: &ranges };
        self.device.pausables().call_hooks(&moved, gone);
    }

    fn move_out(&self, all: Vec<ArenaPage>, report: &mut PauseReport) {
        let (pool, host) = (self.pool(), self.device.host_pool());
        // Host copies of an earlier attempt are still valid, because nothing was replayed since.
        let known: HashMap<PageId, u64> = self.residency.with(|residency_state| {
            residency_state.copies.iter().map(|(page, copy)| (*page, copy.bytes())).collect()
        });
        let counts = |page: &ArenaPage| matches!(page.owner, Owner::Retained { .. } | Owner::Kept { .. });
        let copies = |page: &ArenaPage| counts(page) && !known.contains_key(&page.page);
        report.clean_bytes = all.iter().filter_map(|page| known.get(&page.page)).sum();
        let bytes: u64 = all.iter().filter(|page| copies(page)).map(|page| page.bytes).sum();
        if bytes > 0
            && let Err(error) = host.make_room(bytes)
        {
            // Continues with the available room; each page without room reports an error.
            tracing::warn!(%error, bytes, "the host has no room for all contents");
        }
        let start = Instant::now();
        let left: Vec<PausedPage> = if bytes > 0 {
            let copy =
                |page: &ArenaPage| copies(page).then(|| host.save(pool, page.at, &[(0, page.bytes)], report));
            behind_copies(all, copy, |page, copied| self.release_page(page, copied))
        } else {
            all.into_iter().map(|page| self.release_page(page, None)).collect()
        };
        let last = left.iter().filter_map(|page| page.copied).max();
        report.copy_micros = last.map_or(0, |last| last.duration_since(start).as_micros() as u64);
        for PausedPage { page, copy, gone, .. } in left {
            report.copied_bytes += copy.as_ref().map_or(0, HostCopy::bytes);
            if let Some(copy) = copy {
                self.residency.with(|residency_state| residency_state.copies.insert(page.page, copy));
            }
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
        }
    }

    /// Unmaps one page after its copy, and frees its memory.
    fn release_page(&self, page: ArenaPage, copied: Option<Result<Copied>>) -> PausedPage {
        let copy = match copied.map(|copied| copied.and_then(|copied| self.device.host_pool().saved(copied)))
        {
            None => None,
            Some(Ok(copy)) => Some(copy),
            Some(Err(error)) => return PausedPage { page, copy: None, copied: None, gone: Err(error) },
        };
        let copied = copy.is_some().then(Instant::now);
        let gone = self.pool().make_non_resident(page.page);
        PausedPage { page, copy, copied, gone }
    }
}

/// State of a resume in progress.
struct ArenaResume<'a> {
    common: &'a Common,
    /// Pages which are non-resident or have a host copy, with the memory taken for each.
    pages: Vec<(ArenaPage, Option<PageId>)>,
    copies: HashMap<PageId, HostCopy>,
    contents: Fence,
    finished: bool,
    hold: Option<Hold<'a>>,
    /// Last field, so the exclusive section ends after all state is written.
    guard: PauseGuard<'a>,
}

impl Resuming for ArenaResume<'_> {
    fn missing(&self) -> u64 {
        self.pages.iter().filter(|(page, _)| !page.present).map(|(page, _)| page.bytes).sum()
    }

    fn take(&mut self, transaction: &mut Transaction<'_>) -> Result<()> {
        let account = self.common.shared.account().id();
        for (page, memory) in &mut self.pages {
            *memory =
                if page.present { None } else { Some(transaction.take(page.bytes, page.owner, account)?) };
        }
        Ok(())
    }

    fn map(&mut self, transaction: &mut Transaction<'_>, report: &mut ResumeReport) -> Result<()> {
        for (page, memory) in &self.pages {
            transaction.make_resident(page.page, *memory)?;
            report.pages += 1;
            report.bytes += page.bytes;
        }
        Ok(())
    }

    fn fill(&mut self, report: &mut ResumeReport) -> Result<()> {
        let (pool, host) = (self.common.pool(), self.common.device.host_pool());
        if self.copies.is_empty() {
            return Ok(());
        }
        let mut copied =
            self.pages.iter().filter_map(|(page, _)| Some((page.at, self.copies.get(&page.page)?)));
        let begun = copied.try_for_each(|(at, copy)| host.load(pool, at, copy, report));
        host.mark_in(&mut self.contents);
        begun
    }

    fn contents(&self) -> Fence {
        self.contents.clone()
    }

    fn finish(mut self: Box<Self>) {
        self.finished = true;
        let (common, host) = (self.common, self.common.device.host_pool());
        let copies = std::mem::take(&mut self.copies);
        host.give_copies(copies.into_values(), &self.contents);
        common.pool().arrives(common.number(), self.contents.clone());
        self.hold = None;
        let contents = std::mem::take(&mut self.contents);
        common.residency.with(|residency_state| {
            residency_state.contents = contents;
            residency_state.returns += 1;
        });
        // Before the first replay: hooks renew registrations.
        common.call_hooks(false);
        self.guard.back = Stage::Resident;
        tracing::info!(arena = common.number(), pages = self.pages.len(), "arena resumed");
    }
}

impl Drop for ArenaResume<'_> {
    fn drop(&mut self) {
        if !self.finished {
            let copies = std::mem::take(&mut self.copies);
            self.common.residency.with(|residency_state| residency_state.copies = copies);
        }
    }
}

impl Pausable for Common {
    fn tag(&self) -> &str {
        &self.tag
    }

    fn id(&self) -> u64 {
        self.number()
    }

    fn pause(&self, fence: Fence) -> Result<PauseReport> {
        // A closed arena is not moved.
        if self.usable().is_err() { Ok(PauseReport::default()) } else { self.pause_pages(fence) }
    }

    fn pin_page(&self, page: PageId) -> Result<()> {
        self.pin_for_peers(page)
    }

    fn contents(&self) -> Fence {
        self.residency.contents(self.pool().events())
    }

    fn mark_on(&self, stream: Stream) -> Result<()> {
        self.order.mark_on(stream)
    }

    fn poll_pending(&self) {
        self.restore_replaced();
        self.shared.settle_returning();
    }

    fn give_up(&self, _limit: Duration) -> u64 {
        self.poll_pending();
        self.spare_ranges.clear(self.pool());
        // The pages are counted as free pages of the device.
        0
    }

    fn resuming(&self) -> Result<Option<Box<dyn Resuming + '_>>> {
        if self.usable().is_err() {
            return Ok(None);
        }
        self.residency.pause_section.take("the arena")?;
        let paused = self.residency.with(|residency_state| {
            let paused = residency_state.stage == Stage::Paused;
            if paused {
                residency_state.stage = Stage::Resuming;
            }
            paused.then(|| std::mem::take(&mut residency_state.copies))
        });
        let Some(copies) = paused else {
            self.residency.pause_section.give();
            return Ok(None);
        };
        let guard = PauseGuard { common: self, back: Stage::Paused };
        let hold = self.pool().hold(self.number());
        let arena_pages = self.pool().arena_pages(self.number()).into_iter();
        // If a resume was undone but a page could not be unmapped again, the page is mapped,
        // perhaps with wrong contents.
        let unsure = |page: &ArenaPage| page.unmapped || copies.contains_key(&page.page);
        let pages = arena_pages.filter(unsure).map(|page| (page, None)).collect();
        let contents = Fence::default();
        let hold = Some(hold);
        Ok(Some(Box::new(ArenaResume {
            common: self,
            pages,
            copies,
            contents,
            finished: false,
            hold,
            guard,
        })))
    }
}

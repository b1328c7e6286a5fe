//! Regions: tagged memory that can be paused (pages freed, addresses kept) and resumed. See
//! docs/design/regions.md.
//!
//! ```text
//!   resident ── pause ──> pausing ──> paused ── resume ──> resuming ──> resident
//!                 refused: resident     ^                     failed: paused, host contents valid
//!                                       '── pause again: failed pages are retried
//! ```
//!
//! Invariants:
//!
//! * Blocks of different policies are on different pages, because a page is released as a whole.
//! * A paused region keeps its addresses, blocks and, with the backup policy, its contents on the
//!   host.
//! * A resume of several regions is one transaction: all pages are mapped, or none.
//! * Freed bytes are reused after the work of their streams and the copies of the last resume.
//!
//! Pause and resume own the region's exclusive section (`pause/state.rs`), and hold no mutex while
//! pages move or hooks run. The mutex `Region::table` is locked before that of the pause state;
//! allocations and frees hold it across their own driver calls.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{
    Account, Fence, Limits, Owner, PageId, RangeId, Reclaimer, Reservation, Transaction, next_number,
};
use crate::pause::{HostCopy, PageKey, PauseReport, PauseState, Phase, ResumeReport, pause, resume};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, MAX_BYTES, Peers, Stream};

mod block_table;
mod options;
mod pause;
mod reclaim;
mod sizes;

use block_table::BlockTable;
pub use options::{Policy, RegionOptions, RegionStats};
use reclaim::PATIENCE;
use sizes::{LONGEST, Sizes};

const RANGE: u64 = 16 << 30;
type Mapped = Vec<(PageId, u64)>;

/// Tagged memory that can be paused: blocks at fixed addresses. Thread-safe. Dropping the last
/// handle frees all blocks, paused or not, after the work submitted to their streams.
pub struct Region {
    id: u64,
    tag: String,
    options: RegionOptions,
    sizes: Sizes,
    account: Account,
    table: Mutex<BlockTable>,
    pause_state: PauseState,
    device: Arc<Device>,
}

impl Region {
    /// Creates a region without memory; [`Error::InvalidPageSize`] for a page size the device
    /// cannot map.
    pub fn new(device: &Arc<Device>, tag: &str, options: RegionOptions) -> Result<Arc<Self>> {
        Self::in_account(device, tag, options, None)
    }

    /// Like [`new`](Self::new), with a parent account of the same device.
    pub fn in_account(
        device: &Arc<Device>,
        tag: &str,
        options: RegionOptions,
        above: Option<&Account>,
    ) -> Result<Arc<Self>> {
        let capabilities = device.driver().capabilities();
        let (granularity, fixed) = (capabilities.granularity, options.page_bytes);
        let longest = LONGEST.min(capabilities.largest_page) / granularity * granularity;
        let longest = longest.max(granularity);
        if !fixed.is_multiple_of(granularity) || fixed > capabilities.largest_page {
            return Err(Error::InvalidPageSize { what: "region page", bytes: fixed, granularity });
        }
        let id = next_number();
        let limits = Limits { most: options.budget_bytes, least: 0 };
        let region = Arc::new(Self {
            id,
            tag: tag.to_owned(),
            options,
            sizes: Sizes { granularity, fixed, longest },
            account: device.account(&format!("region {id} {tag:?}"), above, limits)?,
            table: Mutex::default(),
            pause_state: PauseState::new("the region"),
            device: Arc::clone(device),
        });
        let weak = Arc::downgrade(&region);
        device.pausables().add(weak);
        let reclaimer: Arc<dyn Reclaimer> = region.clone();
        device.add_reclaimer(&reclaimer);
        tracing::info!(region = id, tag, policy = ?options.policy, "region created");
        Ok(region)
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn owner(&self) -> Owner {
        Owner::Region { region: self.id }
    }

    /// Allocates a block, rounded up to 512 bytes, with the region's policy:
    /// `vmmgraph_region_allocate`.
    pub fn allocate(&self, bytes: u64, stream: Stream) -> Result<Address> {
        self.allocate_as(bytes, self.options.policy, stream)
    }

    /// Like [`allocate`](Self::allocate), with a policy for this block.
    pub fn allocate_as(&self, bytes: u64, policy: Policy, stream: Stream) -> Result<Address> {
        let bytes = BlockBytes::round_up(bytes)?.get();
        let mut memory_retry = self.device.pool().memory_retry();
        loop {
            match self.try_allocate(bytes, policy, stream) {
                Err(error) if memory_retry.helps_with(&error, || self.outwait(PATIENCE)) => {}
                result => return result,
            }
        }
    }

    fn try_allocate(&self, bytes: u64, policy: Policy, stream: Stream) -> Result<Address> {
        let pool = self.device.pool();
        let user = pool.events().keep(stream);
        let mut table = self.table.lock();
        self.reap(&mut table);
        self.pause_state.require(Phase::Resident)?;
        let placed = match table.place(bytes, policy, user) {
            None => {
                pool.refuse_hopeless(bytes)?;
                self.grow(&mut table, bytes, policy)?;
                table.place(bytes, policy, user)
            }
            placed => placed,
        };
        let at = placed.ok_or_else(|| Error::Internal { what: "a region grew by too little".into() })?;
        // The host has no contents of this block.
        let pages = table.pages_under(at, bytes);
        self.written(&pages);
        let mut contents = self.pause_state.unfinished_contents(pool.events());
        let waits = !contents.is_empty() && table.arrives(&pages);
        drop(table);
        let behind = if waits { contents.before_or_over(pool.events(), stream) } else { Ok(()) };
        behind.map(|()| at).inspect_err(|_| drop(self.free(at)))
    }

    /// Maps consecutive pages for `bytes`, minus the free bytes at the end.
    fn grow(&self, table: &mut BlockTable, bytes: u64, policy: Policy) -> Result<()> {
        let held = table.bytes_of(policy);
        let tail = table.tail(policy);
        let room = |need: u64| {
            let next = table.next_place().filter(|(.., room)| *room >= need);
            // After a failed undo, leftover mappings are freed with their range.
            next.filter(|(range, end, _)| self.device.pool().mapped_in(*range, *end, u64::MAX).is_empty())
        };
        for tight in [false, true] {
            let cut = |more| if tight { self.sizes.tight(more) } else { self.sizes.pages(more, held) };
            let pages = cut(bytes - tail);
            let at = room(pages.iter().sum());
            let pages = if at.is_some() { pages } else { cut(bytes) };
            match self.map(at.map(|(range, end, _)| (range, end)), &pages) {
                Ok((pages, reserved)) => {
                    reserved.into_iter().for_each(|range| table.add_range(range));
                    table.add_pages(policy, &pages);
                    return Ok(());
                }
                Err(error) if error.is_out_of_memory() && !tight => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::Internal { what: "a region can neither grow nor not".into() })
    }

    fn map(&self, at: Option<(RangeId, u64)>, pages: &[u64]) -> Result<(Mapped, Vec<Reservation>)> {
        let mut transaction = Transaction::on(self.device.pool());
        let all: u64 = pages.iter().sum();
        transaction.expect_bytes(all);
        let (range, offset) = match at {
            Some(at) => at,
            None => (transaction.reserve(RANGE.max(all).min(MAX_BYTES), self.id, Peers::NONE)?, 0),
        };
        let mut taken = Vec::new();
        for bytes in pages {
            taken.push((transaction.take(*bytes, self.owner(), self.account.id())?, *bytes));
        }
        let keys: Vec<_> = taken.iter().map(|(page, _)| *page).collect();
        transaction.map(range, offset, &keys)?;
        Ok((taken, transaction.commit().1))
    }

    /// Frees a block, even while paused. Its bytes are reused after the work submitted to its
    /// streams.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] and [`Error::DoubleFree`].
    pub fn free(&self, address: Address) -> Result<()> {
        let mut table = self.table.lock();
        if self.options.verify_clean && self.pause_state.phase() == Phase::Resident {
            // Checksums cover all live bytes of a page.
            let bytes = table.bytes_at(address)?;
            let pages = table.pages_under(address, bytes);
            self.written(&pages);
        }
        table.free(address, self.pause_state.contents(), self.device.pool().events())?;
        self.reap(&mut table);
        Ok(())
    }

    fn reap(&self, table: &mut BlockTable) {
        table.reap(&self.pause_state, self.device.pool(), self.device.host_pool());
    }

    fn written(&self, pages: &[u64]) {
        self.pause_state.forget(self.device.host_pool(), pages.iter().map(|at| PageKey::Place(*at)));
    }

    /// Adds a stream to a block: a free and a pause wait for the work submitted until then. Fails
    /// like [`free`](Self::free).
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.table.lock().use_on(address, self.device.pool().events().keep(stream))
    }

    /// Reports that a [`read_only`](RegionOptions::read_only) block (`None`: all blocks) was
    /// written after its backup: the next pause copies again.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the region is resident; as [`free`](Self::free).
    pub fn mark_written(&self, block: Option<Address>) -> Result<()> {
        let mut table = self.table.lock();
        self.pause_state.require(Phase::Resident)?;
        match block {
            Some(at) => {
                let bytes = table.bytes_at(at)?;
                self.written(&table.pages_under(at, bytes));
            }
            None => self.pause_state.forget_if(self.device.host_pool(), |_| true),
        }
        Ok(())
    }

    /// Reads the backup of a paused block from offset `skip`: `vmmgraph_region_get_backup`.
    pub fn get_backup(&self, block: Address, skip: u64, into: &mut [u8]) -> Result<()> {
        let mut table = self.table.lock();
        let bytes = table.bytes_at(block)?;
        self.pause_state.require(Phase::Paused)?;
        let length = into.len() as u64;
        if skip.checked_add(length).is_none_or(|end| end > bytes) {
            let limit = bytes.saturating_sub(skip);
            return Err(Error::InvalidSize { what: "a part of a backup", bytes: length, limit });
        }
        self.pause_state.with_copies(|copies| {
            // First, so a missing part writes nothing.
            let (mut at, end) = (block.0 + skip, block.0 + skip + length);
            let mut parts = Vec::new();
            while at < end {
                let page = table.page_at(at).and_then(|(key, offset)| Some((copies.get(&key)?, offset)));
                let found = page.map(|(copy, offset)| (copy, offset, copy.bytes_at(offset).min(end - at)));
                let part = found.filter(|(.., bytes)| *bytes > 0).ok_or_else(|| {
                    Error::wrong_state(
                        "cannot read the backup of the block: it has none; its policy must be backup and its region paused",
                    )
                })?;
                at += part.2;
                parts.push(part);
            }
            let mut rest = into;
            for (copy, offset, bytes) in parts {
                let (now, later) = std::mem::take(&mut rest).split_at_mut(bytes as usize);
                copy.read(self.device.host_pool(), offset, now)?;
                rest = later;
            }
            Ok(())
        })
    }

    /// Makes later work of a stream wait for contents being restored: `vmmgraph_region_before`.
    pub fn before(&self, stream: Stream) -> Result<()> {
        self.pause_state.require(Phase::Resident)?;
        self.pause_state.contents().before(self.device.pool().events(), stream)
    }

    /// Pauses this region, like [`Device::pause`].
    pub fn pause(&self, fence: Fence) -> Result<PauseReport> {
        pause(self, fence)
    }

    /// Resumes this region, like [`Device::resume`].
    pub fn resume(&self, deadline: Duration) -> Result<ResumeReport> {
        resume(self.device.pausables(), &[self], deadline, true)
    }

    /// Limits the physical bytes. `None`: only the limits of the ancestors. Frees nothing.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.account.set_limits(Limits { most: bytes, least: 0 });
    }

    /// Returns the current state, after releasing empty pages of freed blocks whose streams are
    /// done.
    #[must_use]
    pub fn stats(&self) -> RegionStats {
        let mut table = self.table.lock();
        self.reap(&mut table);
        let (live_bytes, free_bytes) = table.usage();
        let (resident_bytes, paused_bytes) = table.resident();
        let (pages, blocks) = table.counts();
        RegionStats {
            id: self.id,
            paused: self.pause_state.phase() == Phase::Paused,
            generation: self.pause_state.generation(),
            resident_bytes,
            paused_bytes,
            host_bytes: self.pause_state.with_copies(|copies| copies.values().map(HostCopy::bytes).sum()),
            pages,
            blocks,
            live_bytes,
            free_bytes,
            reserved_bytes: table.reserved(),
            account: self.account.stats(),
        }
    }
}

impl Device {
    /// Creates a region; several may have the same tag. Fails like [`Region::new`].
    pub fn region(self: &Arc<Self>, tag: &str, options: RegionOptions) -> Result<Arc<Region>> {
        Region::new(self, tag, options)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let pool = self.device.pool();
        let table = self.table.get_mut();
        let mut fence = self.pause_state.contents();
        fence.join(table.users(pool.events()));
        self.pause_state.forget_if(self.device.host_pool(), |_| true);
        pool.unmap_after(fence, table.leave());
        pool.check();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("tag", &self.tag).finish_non_exhaustive()
    }
}

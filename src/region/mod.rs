//! Regions: memory that steps aside and comes back at the same addresses.
//!
//! ```text
//!   Region            allocate, free, who uses what                     mod.rs  options.rs
//!   tags              several at a time, by tag, all or nothing         tags.rs
//!   pause  resume     one region's pages out and in                     pause.rs  resume.rs  turn.rs
//!   relief            what freed blocks leave, when memory is short     relief.rs
//!   books             pages' places, blocks, what waits                 books.rs      plain code
//!   sizes             how long a page is                                sizes.rs      plain code
//! ```
//!
//! ```text
//!   resident ── pause ──> pausing ──> paused ── resume ──> resuming ──> resident
//!                 refused: resident     ^                     failed: paused, host bytes valid
//!                                       '── pause again: what failed is tried again
//! ```
//!
//! Pausing and resuming have the region's *turn*, an exclusive section: they exclude each other, not `free`, `record_stream` and the
//! statistics. No lock is held while pages move, and no turn while a resume asks for memory.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{
    Account, Change, Fence, Holder, HostCopy, Limits, MoveTurn, PageId, Pausable, PauseReport, RangeId,
    Reclaimer, Reservation, ResumeReport, Resuming, next_number, resume,
};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, MAX_BYTES, Peers, Stream};

mod books;
mod options;
mod pause;
mod relief;
mod resume;
mod sizes;
mod tags;
mod turn;

use books::{Books, Phase};
pub use options::{Policy, RegionOptions, RegionStats};
use relief::PATIENCE;
use sizes::{LONGEST, Sizes};
pub use tags::Ready;

/// Addresses that are reserved at a time, in bytes, or as many as a block needs.
const RANGE: u64 = 16 << 30;
/// Pages that were mapped behind one another, and their bytes.
type Mapped = Vec<(PageId, u64)>;

/// Memory with a tag that can step aside: blocks at fixed addresses, whose pages go and come.
///
/// Thread-safe. Dropping the last handle ends all its blocks, paused or not, behind what their streams were given.
pub struct Region {
    id: u64,
    tag: String,
    options: RegionOptions,
    sizes: Sizes,
    account: Account,
    books: Mutex<Books>,
    turn: MoveTurn,
    device: Arc<Device>,
}

impl Region {
    /// A region without memory. See [`Device::region`].
    ///
    /// # Errors
    /// [`Error::InvalidPageSize`] for a page size that the device cannot map.
    pub fn new(device: &Arc<Device>, tag: &str, options: RegionOptions) -> Result<Arc<Self>> {
        Self::in_account(device, tag, options, None)
    }

    /// As [`new`](Self::new), with the region's account below one of the device's: a tenant's, a model's.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`Error::InvalidArgument`] for an account of another device.
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
            books: Mutex::new(Books::new()),
            turn: MoveTurn::default(),
            device: Arc::clone(device),
        });
        let weak = Arc::downgrade(&region);
        device.pausables().add(weak);
        let reclaimer: Arc<dyn Reclaimer> = region.clone();
        device.add_reclaimer(&reclaimer);
        tracing::info!(region = id, tag, policy = ?options.policy, "region created");
        Ok(region)
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    fn holder(&self) -> Holder {
        Holder::Region { region: self.id }
    }

    /// Allocates a block, used on `stream` first; its address stays the same for as long as it lives. Rounded up to 512 bytes. Where contents of blocks
    /// that are gone still [come back](Device::resume_async), the stream's later work waits for them, or the call if the stream is being captured.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the region is resident; no memory, budget or addresses; what the driver says. Nothing has changed.
    pub fn allocate(&self, bytes: u64, stream: Stream) -> Result<Address> {
        self.allocate_as(bytes, self.options.policy, stream)
    }

    /// As [`allocate`](Self::allocate), with a policy of the block's own.
    ///
    /// # Errors
    /// Those of [`allocate`](Self::allocate).
    pub fn allocate_as(&self, bytes: u64, policy: Policy, stream: Stream) -> Result<Address> {
        let bytes = BlockBytes::round_up(bytes)?.get();
        let mut relief = self.device.pool().relief();
        loop {
            match self.try_allocate(bytes, policy, stream) {
                Err(error) if relief.helps_with(&error, || self.outwait(PATIENCE)) => {}
                result => return result,
            }
        }
    }

    fn try_allocate(&self, bytes: u64, policy: Policy, stream: Stream) -> Result<Address> {
        let (pool, host) = (self.device.pool(), self.device.host_pool());
        let user = pool.events().keep(stream);
        let mut books = self.books.lock();
        books.settle(pool, host);
        books.require(Phase::Resident)?;
        let placed = match books.place(bytes, policy, user) {
            None => {
                pool.refuse_hopeless(bytes)?;
                self.grow(&mut books, bytes, policy)?;
                books.place(bytes, policy, user)
            }
            placed => placed,
        };
        let at = placed.ok_or_else(|| Error::Internal { what: "a region grew by too little".into() })?;
        // The host knows nothing of this block.
        let pages = books.pages_under(at, bytes);
        books.written(&pages, host);
        let arriving = books.arriving(&pages, pool.events());
        drop(books);
        let behind = arriving.map_or(Ok(()), |mut contents| contents.before_or_over(pool.events(), stream));
        behind.map(|()| at).inspect_err(|_| drop(self.free(at)))
    }

    /// Maps so many more bytes, less what is free at the end, behind one another.
    fn grow(&self, books: &mut Books, bytes: u64, policy: Policy) -> Result<()> {
        let held = books.bytes_of(policy);
        let tail = books.tail(policy);
        let room = |need: u64| {
            let last = books.last_range().filter(|(_, _, range)| range - books.end >= need);
            // What a failed undoing left there goes with its range.
            last.filter(|(range, ..)| self.device.pool().mapped_in(*range, books.end, u64::MAX).is_empty())
        };
        for tight in [false, true] {
            let cut = |more| if tight { self.sizes.tight(more) } else { self.sizes.pages(more, held) };
            let pages = cut(bytes - tail);
            let at = room(pages.iter().sum());
            let pages = if at.is_some() { pages } else { cut(bytes) };
            match self.map(at.map(|(range, ..)| (range, books.end)), &pages) {
                Ok((pages, reserved)) => {
                    reserved.into_iter().for_each(|range| books.add_range(range));
                    books.add_pages(policy, &pages);
                    return Ok(());
                }
                Err(error) if error.is_out_of_memory() && !tight => {}
                Err(error) => return Err(error),
            }
        }
        Err(Error::Internal { what: "a region can neither grow nor not".into() })
    }

    /// Maps new pages at a place, or at the beginning of a new range.
    fn map(&self, at: Option<(RangeId, u64)>, pages: &[u64]) -> Result<(Mapped, Vec<Reservation>)> {
        let mut change = Change::on(self.device.pool());
        let all: u64 = pages.iter().sum();
        change.announce(all);
        let (range, offset) = match at {
            Some(at) => at,
            None => (change.reserve(RANGE.max(all).min(MAX_BYTES), self.id, Peers::NONE)?, 0),
        };
        let mut taken = Vec::new();
        for bytes in pages {
            taken.push((change.take(*bytes, self.holder(), self.account.id())?, *bytes));
        }
        let keys: Vec<_> = taken.iter().map(|(page, _)| *page).collect();
        change.map(range, offset, &keys)?;
        Ok((taken, change.commit().1))
    }

    /// Frees a block, also while the region is paused. Its bytes are another's behind what its streams were given.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] and [`Error::DoubleFree`].
    pub fn free(&self, address: Address) -> Result<()> {
        let mut books = self.books.lock();
        if self.options.verify_clean && books.phase == Phase::Resident {
            // The sums are of all live bytes of a page.
            let bytes = books.bytes_at(address)?;
            let pages = books.pages_under(address, bytes);
            books.written(&pages, self.device.host_pool());
        }
        books.free(address, self.device.pool().events())?;
        books.settle(self.device.pool(), self.device.host_pool());
        Ok(())
    }

    /// Notes that a stream uses a block: a free and a pause wait for what it was given by then.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] and [`Error::DoubleFree`].
    pub fn record_stream(&self, address: Address, stream: Stream) -> Result<()> {
        self.books.lock().use_on(address, self.device.pool().events().keep(stream))
    }

    /// Says that a block was written since its backup, or (`None`) that all were: the next pause copies it again. Only where
    /// [`read_only`](RegionOptions::read_only) made it believe otherwise does it matter.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the region is resident; [`Error::ForeignPointer`] and [`Error::DoubleFree`].
    pub fn mark_written(&self, block: Option<Address>) -> Result<()> {
        let mut books = self.books.lock();
        books.require(Phase::Resident)?;
        let pages = match block {
            Some(at) => {
                let bytes = books.bytes_at(at)?;
                books.pages_under(at, bytes)
            }
            None => books.extents.keys().copied().collect(),
        };
        books.written(&pages, self.device.host_pool());
        Ok(())
    }

    /// Reads host bytes of a paused block, from `skip` on, without resuming: all of `into`, or nothing.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless the region is paused and all these bytes are on the host;
    /// [`Error::ForeignPointer`] and [`Error::DoubleFree`]; [`Error::InvalidSize`] beyond the block's end.
    pub fn get_backup(&self, block: Address, skip: u64, into: &mut [u8]) -> Result<()> {
        let mut books = self.books.lock();
        let bytes = books.bytes_at(block)?;
        books.require(Phase::Paused)?;
        let length = into.len() as u64;
        if skip.checked_add(length).is_none_or(|end| end > bytes) {
            let limit = bytes.saturating_sub(skip);
            return Err(Error::InvalidSize { what: "a part of a backup", bytes: length, limit });
        }
        // First all of it is found, so that nothing is written where a part is missing.
        let (mut at, end) = (block.0 + skip, block.0 + skip + length);
        let mut parts = Vec::new();
        while at < end {
            let (run, from) = books.backup_at(at).ok_or_else(|| {
                Error::wrong_state(
                    "cannot read the backup of the block: it has none; its policy must be backup and its region paused",
                )
            })?;
            let bytes = (run.bytes - from).min(end - at);
            parts.push((run, from, bytes));
            at += bytes;
        }
        let mut rest = into;
        for (run, from, bytes) in parts {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(bytes as usize);
            self.device.host_pool().read(&run.pieces, from, part)?;
            rest = others;
        }
        Ok(())
    }

    /// Makes later work of a stream wait for the contents that a resume without waiting still copies. Does not block.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless it is resident: what is paused, or on its way on another thread, must not be used; [`Error::StreamCapturing`];
    /// what the driver says.
    pub fn before(&self, stream: Stream) -> Result<()> {
        let mut contents = {
            let books = self.books.lock();
            books.require(Phase::Resident)?;
            books.contents.clone()
        };
        contents.before(self.device.pool().events(), stream)
    }

    /// Pauses this region only; see [`Device::pause`].
    ///
    /// # Errors
    /// Those of [`Device::pause`].
    pub fn pause(&self, fence: Fence) -> Result<PauseReport> {
        self.step_aside(fence)
    }

    /// Resumes this region only; see [`Device::resume`].
    ///
    /// # Errors
    /// Those of [`Device::resume`].
    pub fn resume(&self, deadline: Duration) -> Result<ResumeReport> {
        resume(self.device.pool(), self.device.host_pool(), &[self as &dyn Pausable], deadline)
    }

    /// Limits the bytes of physical memory it may hold; `None`: no limit but those above. Nothing is taken away.
    pub fn set_budget(&self, bytes: Option<u64>) {
        self.account.set_limits(Limits { most: bytes, least: 0 });
    }

    /// What it holds now. Pages go on which nothing is left, if what freed blocks waited for is over by now.
    #[must_use]
    pub fn stats(&self) -> RegionStats {
        let mut books = self.books.lock();
        books.settle(self.device.pool(), self.device.host_pool());
        let (live_bytes, free_bytes) = books.usage();
        let bytes = |there: bool| {
            let extents = books.extents.values().filter(|extent| extent.page.is_some() == there);
            extents.map(|extent| extent.bytes).sum()
        };
        let copies = books.extents.values().filter_map(|extent| extent.copy.as_ref());
        RegionStats {
            id: self.id,
            paused: books.phase == Phase::Paused,
            generation: books.generation,
            resident_bytes: bytes(true),
            paused_bytes: bytes(false),
            host_bytes: copies.map(HostCopy::bytes).sum(),
            pages: books.extents.len() as u64,
            blocks: books.blocks.len() as u64,
            live_bytes,
            free_bytes,
            reserved_bytes: books.reserved(),
            account: self.account.stats(),
        }
    }
}

impl Pausable for Region {
    fn tag(&self) -> &str {
        &self.tag
    }

    fn id(&self) -> u64 {
        self.id
    }

    fn pause(&self, fence: Fence) -> Result<PauseReport> {
        self.step_aside(fence)
    }

    fn resuming(&self) -> Result<Option<Box<dyn Resuming + '_>>> {
        self.coming_back()
    }

    fn contents(&self) -> Fence {
        self.books.lock().contents.clone()
    }

    fn give_up(&self, limit: Duration) -> u64 {
        self.give_up_freed(limit)
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let pool = self.device.pool();
        let (fence, remains) = self.books.get_mut().leave(pool.events(), self.device.host_pool());
        pool.finish(fence, remains);
        pool.check();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("id", &self.id).field("tag", &self.tag).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;

//! Private (exclusive) blocks: memory written by peers or preserved across replays, such as signal
//! pads. Each block is one page at its own addresses, so the page is whole wherever it is exported
//! or registered. It is never poisoned and stays in place, also while the arena is paused. The
//! table's lock is held across no driver call.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::Common;
use crate::error::{Error, Result};
use crate::pages::{Extent, Fence, Owner, PagePool, PendingUnmap, Reservation, Transaction};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, MAX_BYTES};

struct Exclusive {
    /// Contains the page, and spare addresses for its alignment.
    range: Reservation,
    bytes: u64,
}

#[derive(Default)]
pub(crate) struct Exclusives(Mutex<BTreeMap<Address, Exclusive>>);

impl Exclusives {
    pub(crate) fn all(&self) -> Vec<(Address, u64)> {
        self.0.lock().iter().map(|(at, block)| (*at, block.bytes)).collect()
    }

    fn hold(&self, base: Address, bytes: u64) -> bool {
        let blocks = self.0.lock();
        let before = blocks.range(..=base).next_back();
        before.is_some_and(|(at, block)| base.0.saturating_add(bytes) <= at.0 + block.bytes)
    }

    pub(super) fn end(&self, pool: &PagePool, fence: Fence) {
        let mut pending = PendingUnmap::default();
        for block in std::mem::take(&mut *self.0.lock()).into_values() {
            pending.join(block.range.leave());
        }
        pool.unmap_after(fence, pending);
    }
}

impl fmt::Debug for Exclusives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exclusives").finish_non_exhaustive()
    }
}

impl Common {
    pub(crate) fn exclusive_owner(&self) -> Owner {
        Owner::Exclusive { arena: self.shared.arena() }
    }

    fn whole(&self, bytes: u64, granularity: u64) -> Result<(u64, u64)> {
        let least = self.pool().driver().capabilities().granularity;
        let each = if granularity == 0 { self.shared.geometry().small() } else { granularity };
        if !each.is_power_of_two() || !each.is_multiple_of(least) || each > MAX_BYTES {
            let what = "granularity of an exclusive block";
            return Err(Error::InvalidPageSize { what, bytes: each, granularity: least });
        }
        let asked = BlockBytes::round_up(bytes)?;
        self.refuse_hopeless(asked)?;
        let whole = asked.get().next_multiple_of(each);
        if whole + each > MAX_BYTES {
            return Err(Error::InvalidSize {
                what: "exclusive block",
                bytes: whole,
                limit: MAX_BYTES - each,
            });
        }
        Ok((whole, each))
    }

    /// See
    /// [`SharedVmmAllocator::allocate_exclusive`](crate::SharedVmmAllocator::allocate_exclusive).
    pub(crate) fn allocate_exclusive(&self, bytes: u64, granularity: u64) -> Result<Address> {
        self.require_usable()?;
        let (whole, each) = self.whole(bytes, granularity)?;
        let _go_on = self.pool().begin_waits()?;
        let (range, offset) = self.with_memory_retry(|| self.map_exclusive(whole, each))?;
        let (zeroed, behind) = self.zero(&range, offset, whole);
        if let Err(error) = zeroed {
            self.pool().unmap_after(behind, range.leave());
            return Err(error);
        }
        let at = range.base().plus(offset);
        self.exclusives.0.lock().insert(at, Exclusive { range, bytes: whole });
        tracing::debug!(arena = self.shared.arena(), bytes = whole, "exclusive block allocated");
        Ok(at)
    }

    /// Maps one page at a multiple of `each`. Returns the range and the offset.
    fn map_exclusive(&self, whole: u64, each: u64) -> Result<(Reservation, u64)> {
        let mut transaction = Transaction::on(self.pool());
        let least = self.pool().driver().capabilities().granularity;
        let (range, base) = transaction.reserve_at(whole + each - least, 0, self.shared.remote_peers())?;
        let offset = base.0.next_multiple_of(each) - base.0;
        let page = transaction.take(whole, self.exclusive_owner(), self.shared.account().id())?;
        transaction.map(range, offset, &[page])?;
        let reserved = transaction.commit().1.pop();
        let lost = || Error::Internal { what: "a range that was reserved is not there".into() };
        Ok((reserved.ok_or_else(lost)?, offset))
    }

    /// Fills a block with zeros and waits. Also returns a fence after the fill.
    fn zero(&self, range: &Reservation, offset: u64, bytes: u64) -> (Result<()>, Fence) {
        let (mut fence, events) = (Fence::default(), self.pool().events());
        let filled = self.device.host_pool().stream_in().and_then(|stream| {
            let filled = range.fill(offset, bytes, 0, stream);
            fence.add(events, stream);
            filled
        });
        let done = filled.and_then(|()| fence.block(events, Duration::MAX).map(drop));
        (done, fence)
    }

    pub(crate) fn free_exclusive(&self, address: Address) -> Result<()> {
        self.require_usable()?;
        let block = self.exclusives.0.lock().remove(&address);
        let block = block.ok_or(Error::ForeignPointer { address })?;
        self.pool().unmap_after(self.order.fence(), block.range.leave());
        Ok(())
    }

    pub(crate) fn export_exclusive(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.require_usable()?;
        if bytes == 0 {
            let expected = "at least one";
            return Err(Error::InvalidArgument { what: "bytes of a range", value: 0, expected });
        }
        if !self.exclusives.hold(base, bytes) {
            return Err(Error::ForeignPointer { address: base });
        }
        self.pool().extents(base, bytes)
    }
}

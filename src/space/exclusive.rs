//! Exclusive blocks: memory that a graph's peers write to, or that keeps its contents from replay to replay (workspaces, signal pads, Lamport
//! buffers). Each is one page of its own at addresses of its own, which no space shows and nothing else lies on: so it is whole wherever it is
//! exported, registered or bound, is filled by nobody, and stays where it is until it is freed, also while its arena is paused.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use super::Common;
use crate::error::{Error, Result};
use crate::pages::{Change, Extent, Fence, Holder, PagePool, Remains, Reservation};
use crate::sync::Mutex;
use crate::units::{Address, BlockBytes, MAX_BYTES};

struct Exclusive {
    /// Their only page lies in here; the addresses around it are there to begin at a multiple.
    range: Reservation,
    bytes: u64,
}

/// An arena's exclusive blocks, by address.
#[derive(Default)]
pub(crate) struct Exclusives(Mutex<BTreeMap<Address, Exclusive>>);

impl Exclusives {
    /// Address and bytes of each, in order.
    pub(crate) fn all(&self) -> Vec<(Address, u64)> {
        self.0.lock().iter().map(|(at, block)| (*at, block.bytes)).collect()
    }

    /// Whether a range lies in one of them.
    fn hold(&self, base: Address, bytes: u64) -> bool {
        let blocks = self.0.lock();
        let before = blocks.range(..=base).next_back();
        before.is_some_and(|(at, block)| base.0.saturating_add(bytes) <= at.0 + block.bytes)
    }

    /// The arena is gone, and what still may use them is behind the fence.
    pub(super) fn end(&self, pool: &PagePool, fence: Fence) {
        let mut remains = Remains::default();
        for block in std::mem::take(&mut *self.0.lock()).into_values() {
            remains.join(block.range.leave());
        }
        pool.finish(fence, remains);
    }
}

impl fmt::Debug for Exclusives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Exclusives").finish_non_exhaustive()
    }
}

impl Common {
    /// Who has the pages of exclusive blocks.
    pub(crate) fn exclusive_holder(&self) -> Holder {
        Holder::Exclusive { arena: self.shared.arena() }
    }

    /// What a block's bytes and address are multiples of, and its bytes.
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
        // Those around it are reserved too.
        if whole + each > MAX_BYTES {
            return Err(Error::InvalidSize {
                what: "exclusive block",
                bytes: whole,
                limit: MAX_BYTES - each,
            });
        }
        Ok((whole, each))
    }

    /// A page of its own, all zero; see [`SharedVmmAllocator::allocate_exclusive`](crate::SharedVmmAllocator::allocate_exclusive).
    pub(crate) fn allocate_exclusive(&self, bytes: u64, granularity: u64) -> Result<Address> {
        self.usable()?;
        let (whole, each) = self.whole(bytes, granularity)?;
        let _go_on = self.pool().begin_waits()?;
        let (range, offset) = self.relieved(|| self.map_exclusive(whole, each))?;
        let (zeroed, behind) = self.zero(&range, offset, whole);
        if let Err(error) = zeroed {
            self.pool().finish(behind, range.leave());
            return Err(error);
        }
        let at = range.base().plus(offset);
        self.exclusives.0.lock().insert(at, Exclusive { range, bytes: whole });
        tracing::debug!(arena = self.shared.arena(), bytes = whole, "exclusive block allocated");
        Ok(at)
    }

    /// One page at a multiple of `each` in a range of its own, and where in that.
    fn map_exclusive(&self, whole: u64, each: u64) -> Result<(Reservation, u64)> {
        let mut change = Change::on(self.pool());
        let least = self.pool().driver().capabilities().granularity;
        let (range, base) = change.reserve_at(whole + each - least, 0, self.shared.remote_peers())?;
        let offset = base.0.next_multiple_of(each) - base.0;
        let page = change.take(whole, self.exclusive_holder(), self.shared.account().id())?;
        change.map(range, offset, &[page])?;
        let reserved = change.commit().1.pop();
        let lost = || Error::Internal { what: "a range that was reserved is not there".into() };
        Ok((reserved.ok_or_else(lost)?, offset))
    }

    /// Fills a block with zeros and waits for that: any stream and any peer may use it afterwards. And what the fill is behind.
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

    /// Gives a block's memory back behind the arena's replays.
    pub(crate) fn free_exclusive(&self, address: Address) -> Result<()> {
        self.usable()?;
        let block = self.exclusives.0.lock().remove(&address);
        let block = block.ok_or(Error::ForeignPointer { address })?;
        self.pool().finish(self.order.fence(), block.range.leave());
        Ok(())
    }

    /// The page behind a part of a block.
    pub(crate) fn export_exclusive(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.usable()?;
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

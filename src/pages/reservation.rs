//! Addresses reserved from the driver, and the pages mapped there.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::{PagePool, Pin};
use crate::error::{Error, Result};
use crate::units::Address;

/// A range of addresses and its mappings. Dropping it unmaps everything and gives the addresses back; whoever drops it has
/// made sure that the device no longer uses them.
pub struct Reservation {
    pool: Arc<PagePool>,
    range: Remains,
}

/// What a reservation is made of. While it waits in the pool for another try, its pins keep the pool alive: the pool
/// cannot go before everything in it has been given back.
pub(super) struct Remains {
    base: Address,
    len: u64,
    reserved: bool,
    /// Offset to the page mapped there.
    mapped: BTreeMap<u64, Pin>,
}

impl Reservation {
    /// Reserves `len` bytes of addresses, a multiple of the granularity. No memory is behind them.
    ///
    /// # Errors
    /// [`Error::OutOfAddresses`] or what the driver says.
    pub fn new(pool: &Arc<PagePool>, len: u64) -> Result<Self> {
        let base = pool.driver().reserve(len)?;
        pool.record(|stats| {
            stats.reserved_bytes += len;
            stats.reservations += 1;
        });
        let range = Remains { base, len, reserved: true, mapped: BTreeMap::new() };
        Ok(Self { pool: Arc::clone(pool), range })
    }

    /// The first address.
    #[must_use]
    pub fn base(&self) -> Address {
        self.range.base
    }

    /// Bytes of addresses.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.range.len
    }

    /// The pages mapped here, with their offsets, in address order.
    pub fn mapped(&self) -> impl Iterator<Item = (u64, &Pin)> {
        self.range.mapped.iter().map(|(offset, pin)| (*offset, pin))
    }

    /// Maps a page at a free offset and makes it accessible.
    ///
    /// # Errors
    /// What the driver says, with the page back in the caller's hands; nothing is mapped then, unless undoing failed as
    /// well: then the mapping stays recorded, without the page in return, until this range is dropped.
    pub fn map(&mut self, offset: u64, pin: Pin) -> Result<(), (Error, Option<Pin>)> {
        let at = self.range.base.plus(offset);
        let driver = self.pool.driver();
        let mapped = pin.handle().and_then(|handle| driver.map(at, pin.bytes(), handle));
        if let Err(error) = mapped {
            return Err((error, Some(pin)));
        }
        self.pool.record(|stats| {
            stats.maps += 1;
            stats.mappings += 1;
        });
        let access = driver.set_access(at, pin.bytes());
        self.range.mapped.insert(offset, pin);
        access.map_err(|error| {
            let pin = self.unmap(offset);
            (
                error,
                pin.inspect_err(|undo| tracing::error!(error = %undo, ?at, "undoing a mapping failed")).ok(),
            )
        })
    }

    /// Takes the page at `offset` away and returns it.
    ///
    /// # Errors
    /// What the driver says; the page stays mapped then.
    pub fn unmap(&mut self, offset: u64) -> Result<Pin> {
        self.range.unmap(&self.pool, offset)
    }

    /// Maps `pins` at their offsets, in place of everything mapped in the `len` bytes from `offset` on; returns the pages that
    /// were there, with their offsets.
    ///
    /// # Errors
    /// [`NotReplaced`] says whether the pages that were there are back in place. `pins` are dropped.
    pub fn replace(
        &mut self,
        offset: u64,
        len: u64,
        pins: Vec<(u64, Pin)>,
    ) -> Result<Vec<(u64, Pin)>, NotReplaced> {
        let mut old = Vec::new();
        for at in self.starts(offset, len) {
            match self.unmap(at) {
                Ok(pin) => old.push((at, pin)),
                Err(error) => return Err(self.restore(error, old)),
            }
        }
        let Err(error) = self.map_all(pins) else { return Ok(old) };
        for at in self.starts(offset, len).into_iter().rev() {
            if let Err(undo) = self.unmap(at) {
                tracing::error!(error = %undo, "undoing an exchange of pages failed");
                return Err(NotReplaced { error, restored: false });
            }
        }
        Err(self.restore(error, old))
    }

    fn starts(&self, offset: u64, len: u64) -> Vec<u64> {
        self.range.mapped.range(offset..offset + len).map(|(at, _)| *at).collect()
    }

    fn restore(&mut self, error: Error, old: Vec<(u64, Pin)>) -> NotReplaced {
        let result = self.map_all(old);
        if let Err(undo) = &result {
            tracing::error!(error = %undo, "undoing an exchange of pages failed");
        }
        NotReplaced { error, restored: result.is_ok() }
    }

    /// Maps pages at their offsets. Stops at the first failure, with the earlier ones mapped.
    fn map_all(&mut self, pins: Vec<(u64, Pin)>) -> Result<()> {
        pins.into_iter().try_for_each(|(at, pin)| self.map(at, pin).map_err(|(error, _)| error))
    }

    /// Leaves the range to the pool, to be torn down once the replays of this arena are done: for a range that the device may
    /// still be using.
    pub fn defer(mut self, arena: u64) {
        let range = self.take();
        self.pool.defer(arena, range);
    }

    fn take(&mut self) -> Remains {
        let empty = Remains { base: self.range.base, len: 0, reserved: false, mapped: BTreeMap::new() };
        std::mem::replace(&mut self.range, empty)
    }
}

/// A [`replace`](Reservation::replace) that failed.
#[derive(Debug)]
pub struct NotReplaced {
    /// Why.
    pub error: Error,
    /// Whether everything is mapped as before. If not, nothing of that part of the range can be relied on.
    pub restored: bool,
}

impl Remains {
    fn unmap(&mut self, pool: &PagePool, offset: u64) -> Result<Pin> {
        let nothing = || Error::Internal { what: format!("nothing is mapped at offset {offset:#x}") };
        let bytes = self.mapped.get(&offset).ok_or_else(nothing)?.bytes();
        pool.driver().unmap(self.base.plus(offset), bytes)?;
        pool.record(|stats| {
            stats.unmaps += 1;
            stats.mappings -= 1;
        });
        self.mapped.remove(&offset).ok_or_else(nothing)
    }

    /// Gives back all it can and reports the first refusal.
    pub(super) fn tear_down(&mut self, pool: &PagePool) -> Result<()> {
        let mut first = Ok(());
        for offset in self.mapped.keys().rev().copied().collect::<Vec<_>>() {
            first = first.and(self.unmap(pool, offset).map(drop));
        }
        first?;
        if self.reserved {
            pool.driver().free_addresses(self.base, self.len)?;
            self.reserved = false;
            pool.record(|stats| {
                stats.reserved_bytes -= self.len;
                stats.reservations -= 1;
            });
        }
        Ok(())
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if let Err(error) = self.range.tear_down(&self.pool) {
            tracing::warn!(%error, base = ?self.range.base, "the driver did not take a range back; kept for another try");
            let range = self.take();
            self.pool.keep(range);
        }
    }
}

impl fmt::Debug for Reservation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Remains { base, len, mapped, .. } = &self.range;
        write!(f, "Reservation({base:?} + {len:#x}, {} mappings)", mapped.len())
    }
}

//! Methods of the published design: one current space at a time.

use std::collections::HashMap;
use std::sync::Arc;

use super::SharedVmmAllocator;
use crate::error::{Error, Result};
use crate::space::{Phase, Space};
use crate::units::{Address, BlockBytes, Stream};

#[derive(Default)]
pub(super) struct Serial {
    current: Option<Arc<Space>>,
    sealed: HashMap<u64, Arc<Space>>,
}

/// Methods of the published design: one current space at a time, a bump space.
impl SharedVmmAllocator {
    /// Seals the current space, if any, and opens the next one. Blocks of earlier spaces stay valid
    /// until the arena is dropped. Fails like [`Space::seal`] (the current space stays) and
    /// [`open_space`](Self::open_space).
    pub fn switch_to_new_virtual_space(&self) -> Result<()> {
        let mut serial = self.serial.lock();
        self.common.require_resident()?;
        if let Some(current) = &serial.current
            && current.phase() == Phase::Open
        {
            current.seal()?;
        }
        let next = self.open_serial()?;
        if let Some(last) = serial.current.replace(next) {
            serial.sealed.insert(last.id(), last);
        }
        Ok(())
    }

    pub(super) fn begin_serial(&self) -> Result<()> {
        let first = self.open_serial()?;
        self.serial.lock().current = Some(first);
        Ok(())
    }

    fn open_serial(&self) -> Result<Arc<Space>> {
        self.prepare()?;
        let space = Space::open_bump(&self.common, self.reserve_bytes)?;
        // An arena always has a current space, which must not prevent every pause.
        space.core().defer();
        Ok(space)
    }

    /// Like [`Space::allocate`], in the current space, opened if there is none.
    pub fn allocate(&self, size: u64, stream: Stream) -> Result<Address> {
        // Before a space is opened.
        BlockBytes::round_up(size)?;
        let current = {
            let mut serial = self.serial.lock();
            match &serial.current {
                Some(current) => Arc::clone(current),
                None => Arc::clone(serial.current.insert(self.open_serial()?)),
            }
        };
        current.allocate(size, stream)
    }

    /// Like [`Space::free`], for the current space or an earlier one.
    pub fn deallocate(&self, address: Address) -> Result<()> {
        let foreign = Error::ForeignPointer { address };
        let (_, space) = self.common.pool().range_at(address).ok_or(foreign.clone())?;
        let found = {
            let serial = self.serial.lock();
            let current = serial.current.as_ref().filter(|current| current.id() == space);
            current.or_else(|| serial.sealed.get(&space)).map(Arc::clone)
        };
        found.ok_or(foreign)?.free(address)
    }

    /// Returns the current space, if one was opened.
    #[must_use]
    pub fn current_space(&self) -> Option<Arc<Space>> {
        self.serial.lock().current.clone()
    }

    /// Returns the largest need of any space in bytes: allocated bytes of a bump space, else the
    /// peak of live bytes.
    #[must_use]
    pub fn high_water_mark(&self) -> u64 {
        self.common.totals.high_water()
    }

    /// Returns the offset of the next block in the current space.
    #[must_use]
    pub fn current_offset(&self) -> u64 {
        self.current_space().map_or(0, |space| space.offset())
    }

    /// Returns the arena's physical bytes.
    #[must_use]
    pub fn mapped_size(&self) -> u64 {
        self.common.pool().account_bytes(self.common.shared.account())
    }

    /// Returns the bytes of addresses reserved by all spaces.
    #[must_use]
    pub fn reserved_size(&self) -> u64 {
        self.common.totals.reserved()
    }

    /// False after a caught bug closed the arena.
    #[must_use]
    pub fn is_initialized(&self) -> bool {
        self.common.require_usable().is_ok()
    }
}

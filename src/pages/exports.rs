//! Export pins: pages mapped by other processes. From before its export until the last process
//! closed it, a page is not freed, released, lent, replaced or given to a different owner. Without
//! mappings in this process it belongs to [`Owner::Exported`]. An atomic counter answers "no
//! exports" without the pool's mutex.

use std::os::fd::OwnedFd;

use slotmap::{Key, KeyData};

use super::pool::State;
use super::{Owner, PageId, PagePool};
use crate::driver::{FabricHandle, PageHandle, Sharing};
use crate::error::{Error, Result};
use crate::sync::atomic::Ordering;
use crate::units::Address;

impl PageId {
    /// Returns the key as a number, never reused in the device.
    #[must_use]
    pub fn number(self) -> u64 {
        self.data().as_ffi()
    }

    /// Returns the key with this number, or an unused key.
    #[must_use]
    pub fn of_number(number: u64) -> Self {
        let data = KeyData::from_ffi(number);
        // `from_ffi` rounds an invalid number to a valid key.
        if data.as_ffi() == number { data.into() } else { Self::null() }
    }
}

/// A part of a page and its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The page.
    pub page: PageId,
    /// Bytes from the page's start.
    pub offset: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// Address of the part.
    pub address: Address,
    /// Bytes of the whole page, for the importer.
    pub page_bytes: u64,
}

fn unknown(id: PageId) -> Error {
    let expected = "that of an arena's page, taken from an export";
    Error::InvalidArgument { what: "a page's number", value: id.number().into(), expected }
}

fn nobodys(id: PageId) -> Error {
    let expected = "that of a page with as many pins";
    Error::InvalidArgument { what: "a page's number", value: id.number().into(), expected }
}

fn too_many() -> Error {
    Error::InvalidArgument { what: "pins of a page", value: u32::MAX.into(), expected: "fewer" }
}

impl State {
    pub(super) fn require_unexported(&self, id: PageId) -> Result<()> {
        match self.pages.get(id) {
            Some(page) if page.exported > 0 => Err(Error::Exported { pages: vec![id.number()] }),
            _ => Ok(()),
        }
    }
}

impl PagePool {
    /// Fails for a page without an arena.
    pub(crate) fn arena_of(&self, id: PageId) -> Result<u64> {
        self.owner(id).and_then(Owner::arena).ok_or_else(|| unknown(id))
    }

    /// Adds export pins to a page of the arena.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for any other page; [`Error::Lent`]; [`Error::WrongState`] for a
    /// non-resident page.
    pub(crate) fn pin_export(&self, id: PageId, arena: u64, times: u32) -> Result<()> {
        let state = &mut *self.lock();
        let leases: Vec<u64> = state.lent.get(&id).map(super::lent::Lent::lease).into_iter().collect();
        let page = state.pages.get_mut(id).filter(|page| page.owner.arena() == Some(arena));
        let page = page.ok_or_else(|| unknown(id))?;
        if !leases.is_empty() {
            return Err(Error::Lent { leases });
        }
        if page.handle.is_none() || !page.unmapped.is_empty() {
            return Err(Error::wrong_state("cannot export the page: its arena is paused; resume it first"));
        }
        let before = page.exported;
        page.exported = before.checked_add(times).ok_or_else(too_many)?;
        if before == 0 {
            let bytes = page.bytes;
            self.count_exports(state, 1, bytes);
        }
        Ok(())
    }

    /// Adds export pins to a page used only by other processes.
    pub(crate) fn pin_abandoned(&self, id: PageId, times: u32) -> Result<()> {
        let mut state = self.lock();
        let page = state.pages.get_mut(id).filter(|page| page.owner == Owner::Exported);
        let page = page.ok_or_else(|| unknown(id))?;
        page.exported = page.exported.checked_add(times).ok_or_else(too_many)?;
        Ok(())
    }

    /// Removes export pins; one too many fails. After the last, a page without local users is free.
    pub(crate) fn unpin_export(&self, id: PageId, times: u32) -> Result<()> {
        let state = &mut *self.lock();
        let page = state.pages.get_mut(id).filter(|page| page.exported > 0).ok_or_else(|| nobodys(id))?;
        page.exported = page.exported.checked_sub(times).ok_or_else(|| nobodys(id))?;
        if page.exported == 0 {
            let bytes = page.bytes;
            self.count_exports(state, -1, bytes);
            state.free_if_unused(id);
        }
        Ok(())
    }

    fn count_exports(&self, state: &mut State, pages: i64, bytes: u64) {
        let all = &mut state.stats.exported_bytes;
        *all = all.saturating_add_signed(bytes as i64 * pages);
        let count = self.exported.load(Ordering::SeqCst).saturating_add_signed(pages);
        self.exported.store(count, Ordering::SeqCst);
    }

    /// Fails if the device was opened without sharing.
    pub(super) fn sharing(&self) -> Result<&dyn Sharing> {
        let sentence = "cannot share pages: the device was opened without sharing; open it with sharing by descriptors or fabric";
        self.driver().sharing().ok_or_else(|| Error::wrong_state(sentence))
    }

    /// The page must be export-pinned.
    pub(crate) fn export_descriptor(&self, id: PageId) -> Result<OwnedFd> {
        let (sharing, handle) = (self.sharing()?, self.exported_handle(id)?);
        // SAFETY: a page of the pool; pinned, so not released.
        unsafe { sharing.export(handle) }
    }

    pub(crate) fn export_fabric(&self, id: PageId) -> Result<FabricHandle> {
        let (sharing, handle) = (self.sharing()?, self.exported_handle(id)?);
        // SAFETY: as above.
        unsafe { sharing.export_fabric(handle) }
    }

    fn exported_handle(&self, id: PageId) -> Result<PageHandle> {
        let state = self.lock();
        let page = state.pages.get(id).filter(|page| page.exported > 0);
        page.and_then(|page| page.handle).ok_or_else(|| nobodys(id))
    }

    /// Whether the page is exported. Without exports on the device, reads one counter.
    #[must_use]
    pub fn is_exported(&self, id: PageId) -> bool {
        self.exported.load(Ordering::SeqCst) > 0
            && self.lock().pages.get(id).is_some_and(|page| page.exported > 0)
    }

    /// Numbers of exported pages that this arena's pause would release, in order.
    pub(crate) fn exported_of(&self, arena: u64) -> Vec<u64> {
        if self.exported.load(Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        let state = self.lock();
        let theirs = state.pages.iter().filter(|(_, page)| page.exported > 0);
        let mut pages: Vec<u64> = theirs
            .filter(|(_, page)| page.owner.movable_arena() == Some(arena))
            .map(|(id, _)| id.number())
            .collect();
        pages.sort_unstable();
        pages
    }

    /// Importers keep the memory.
    pub(super) fn forget_exports(&self) {
        let state = &mut *self.lock();
        let theirs = state.pages.iter().filter(|(_, page)| page.exported > 0);
        for id in theirs.map(|(id, _)| id).collect::<Vec<_>>() {
            if let Some(page) = state.pages.get_mut(id) {
                page.exported = 0;
            }
            state.free_if_unused(id);
        }
        state.stats.exported_bytes = 0;
        self.exported.store(0, Ordering::SeqCst);
    }

    /// Returns the parts of pages in an address range, in order.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] outside the device's ranges; [`Error::InvalidArgument`] if not all
    /// bytes are mapped.
    pub(crate) fn extents(&self, address: Address, bytes: u64) -> Result<Vec<Extent>> {
        let state = self.lock();
        let found = state.range_at(address).ok_or(Error::ForeignPointer { address })?;
        let from = address.0 - found.base.0;
        let to = from.saturating_add(bytes);
        let first = found.mapped.range(..=from).next_back().map_or(from, |(at, _)| *at);
        let (mut extents, mut next) = (Vec::new(), from);
        for (at, (page, page_bytes)) in found.mapped.range(first..to) {
            let (start, end) = (from.max(*at), to.min(at + page_bytes));
            if start != next || end <= start {
                break;
            }
            let address = found.base.plus(start);
            let (page, page_bytes) = (*page, *page_bytes);
            extents.push(Extent { page, offset: start - at, bytes: end - start, address, page_bytes });
            next = end;
        }
        if next == to {
            return Ok(extents);
        }
        let expected = "within the pages of the block";
        Err(Error::InvalidArgument { what: "bytes of a range", value: bytes.into(), expected })
    }
}

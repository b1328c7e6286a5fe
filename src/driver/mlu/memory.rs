//! Each mapping covers a whole page, with its own access call and unmap.

use super::api::{self, CnAddress, Handle};
use super::{MluDriver, out_of_memory};
use crate::driver::{Memory, NotMapped, PageHandle, Whole};
use crate::error::{Error, Result};
use crate::units::{Address, Peers};

impl MluDriver {
    fn out_of_memory(&self, requested: u64, error: Error) -> Error {
        match error {
            Error::Driver { code, .. } if out_of_memory(code) => Error::OutOfMemory {
                requested,
                free: self.free_bytes().unwrap_or(0),
                total: self.info.total_bytes,
                device: self.info.ordinal,
                space: None,
            },
            other => other,
        }
    }

    fn map_one(&self, at: Address, page: Whole) -> Result<()> {
        // SAFETY: a free place of our reservation, a live page of this size.
        self.call("cnMemMap", |api| unsafe {
            (api.cnMemMap)(CnAddress(at.0), page.bytes, 0, Handle(page.page.raw()), 0)
        })
        .map_err(|error| self.out_of_memory(page.bytes, error))
    }

    /// CNDrv allows exactly one descriptor.
    fn set_access(&self, at: Address, len: u64) -> Result<()> {
        let mut desc = api::access(self.info.ordinal);
        // SAFETY: one descriptor; the range is our mapping.
        self.call("cnMemSetAccess", |api| unsafe {
            (api.cnMemSetAccess)(CnAddress(at.0), len, &raw mut desc, 1)
        })
        .map_err(|error| self.out_of_memory(len, error))
    }

    fn unmap_one(&self, at: Address, len: u64) -> Result<()> {
        // SAFETY: our mapping, unused by the device.
        self.give_back("cnMemUnmap", |api| unsafe { (api.cnMemUnmap)(CnAddress(at.0), len) })
    }
}

// SAFETY: CNDrv's functions follow the contract, by its header (stand-in only).
unsafe impl Memory for MluDriver {
    fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        self.call("cnMemGetInfo", |api| unsafe { (api.cnMemGetInfo)(&raw mut free, &raw mut total) })?;
        Ok(free)
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let mut base = CnAddress(0);
        // SAFETY: valid out pointer; alignment 0 is the default.
        self.call("cnMemAddressReserve", |api| unsafe {
            (api.cnMemAddressReserve)(&raw mut base, len, 0, CnAddress(0), 0)
        })
        .map_err(|error| match error {
            Error::Driver { code, .. } if out_of_memory(code) => {
                Error::OutOfAddresses { requested: len, device: self.info.ordinal }
            }
            other => other,
        })?;
        Ok(Address(base.0))
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        // SAFETY: our reservation without mappings.
        self.give_back("cnMemAddressFree", |api| unsafe { (api.cnMemAddressFree)(CnAddress(base.0), len) })
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let (mut made, mut prop) = (Handle(0), api::allocation(self.info.ordinal));
        // SAFETY: valid pointers.
        self.call("cnMemCreate", |api| unsafe { (api.cnMemCreate)(&raw mut made, len, &raw mut prop, 0) })
            .map_err(|error| self.out_of_memory(len, error))?;
        // SAFETY: a new handle.
        Ok(unsafe { PageHandle::from_raw(made.0) })
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: our handle, released once.
        self.give_back("cnMemRelease", |api| unsafe { (api.cnMemRelease)(Handle(page.raw())) })
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let none = |error| NotMapped { error, mapped: 0 };
        self.capabilities.require_peers(peers).map_err(none)?;
        let mut maps = Vec::with_capacity(pages.len());
        let mut end = at;
        for page in pages {
            let mut made = self.map_one(end, *page);
            if made.is_ok() {
                maps.push((end, page.bytes));
                made = self.set_access(end, page.bytes);
            }
            if let Err(error) = made {
                // In reverse, so the first pages remain.
                let undone = maps.iter().rev().take_while(|(at, len)| self.unmap_one(*at, *len).is_ok());
                return Err(NotMapped { error, mapped: maps.len() - undone.count() });
            }
            end = end.plus(page.bytes);
        }
        Ok(())
    }

    unsafe fn grant(&self, _at: Address, _len: u64, peers: Peers) -> Result<()> {
        self.capabilities.require_peers(peers)
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        self.unmap_one(at, len)
    }
}

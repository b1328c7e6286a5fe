use std::ffi::c_void;
use std::ptr;

use super::api::{self, Handle, MemAttr};
use super::{AscendDriver, errors};
use crate::driver::{Memory, NotMapped, PageHandle, Whole};
use crate::error::{Error, Result};
use crate::units::{Address, Peers};

fn pointer(at: u64) -> *mut c_void {
    at as *mut c_void
}

fn handle(page: PageHandle) -> Handle {
    Handle(pointer(page.raw()))
}

impl AscendDriver {
    fn out_of_memory(&self, requested: u64, error: Error) -> Error {
        match error {
            Error::Driver { code, .. } if errors::out_of_memory(code) => Error::OutOfMemory {
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
        self.call("aclrtMapMem", |api| unsafe {
            (api.aclrtMapMem)(pointer(at.0), page.bytes as usize, 0, handle(page.page), 0)
        })
        .map_err(|error| self.out_of_memory(page.bytes, error))
    }

    fn unmap_one(&self, head: Address) -> Result<()> {
        // SAFETY: the start of our mapping, unused by the device.
        self.give_back("aclrtUnmapMem", |api| unsafe { (api.aclrtUnmapMem)(pointer(head.0)) })
    }
}

// SAFETY: ACL's functions follow the contract, by its documentation (stand-in only).
unsafe impl Memory for AscendDriver {
    fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        self.call("aclrtGetMemInfo", |api| unsafe {
            (api.aclrtGetMemInfo)(MemAttr(api::HBM), &raw mut free, &raw mut total)
        })?;
        Ok(free as u64)
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let none = Error::OutOfAddresses { requested: len, device: self.info.ordinal };
        if len > self.capabilities.largest_reservation {
            return Err(none);
        }
        let mut base = ptr::null_mut();
        // SAFETY: valid out pointer; alignment and flags must be 0.
        self.call("aclrtReserveMemAddress", |api| unsafe {
            (api.aclrtReserveMemAddress)(&raw mut base, len as usize, 0, ptr::null_mut(), 0)
        })
        .map_err(|error| match error {
            Error::Driver { code, .. } if errors::out_of_memory(code) => none,
            other => other,
        })?;
        Ok(Address(base as u64))
    }

    unsafe fn free_addresses(&self, base: Address, _len: u64) -> Result<()> {
        // SAFETY: our reservation without mappings.
        self.give_back("aclrtReleaseMemAddress", |api| unsafe {
            (api.aclrtReleaseMemAddress)(pointer(base.0))
        })
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let (mut made, prop) = (Handle(ptr::null_mut()), api::allocation(self.info.ordinal));
        // SAFETY: valid pointers.
        self.call("aclrtMallocPhysical", |api| unsafe {
            (api.aclrtMallocPhysical)(&raw mut made, len as usize, &raw const prop, 0)
        })
        .map_err(|error| self.out_of_memory(len, error))?;
        // SAFETY: a new handle.
        Ok(unsafe { PageHandle::from_raw(made.0 as u64) })
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: our handle, released once.
        self.give_back("aclrtFreePhysical", |api| unsafe { (api.aclrtFreePhysical)(handle(page)) })
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let none = |error| NotMapped { error, mapped: 0 };
        self.capabilities.require_peers(peers).map_err(none)?;
        let mut heads = Vec::with_capacity(pages.len());
        let mut end = at;
        for page in pages {
            if let Err(error) = self.map_one(end, *page) {
                // In reverse, so the first pages remain.
                let undone = heads.iter().rev().take_while(|head| self.unmap_one(**head).is_ok());
                return Err(NotMapped { error, mapped: heads.len() - undone.count() });
            }
            heads.push(end);
            end = end.plus(page.bytes);
        }
        Ok(())
    }

    unsafe fn grant(&self, _at: Address, _len: u64, peers: Peers) -> Result<()> {
        self.capabilities.require_peers(peers)
    }

    unsafe fn unmap(&self, at: Address, _len: u64) -> Result<()> {
        self.unmap_one(at)
    }
}

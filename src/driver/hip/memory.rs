//! For ROCm 7.0 to 7.13 (`access`) the mutex `ranges` is held during calls which map, unmap and
//! free addresses.

use std::ffi::c_void;
use std::ptr;

use super::api::{
    self, AccessDesc, AccessFlags, AllocationProp, AllocationType, Flags, Handle, HandleType, Location,
    LocationType,
};
use super::{HipDriver, PLATFORM, pointer};
use crate::driver::{Memory, NotMapped, PageHandle, Whole};
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, Peers};

fn location(ordinal: i32) -> Location {
    Location { kind: LocationType(api::LOCATION_DEVICE), id: ordinal }
}

pub(super) fn allocation(ordinal: i32) -> AllocationProp {
    AllocationProp {
        kind: AllocationType(api::PINNED),
        requested: HandleType(api::HANDLE_NONE),
        location: location(ordinal),
        win32: ptr::null_mut(),
        flags: [0; 8],
    }
}

fn access_by(ordinal: i32) -> AccessDesc {
    AccessDesc { location: location(ordinal), flags: AccessFlags(api::READ_WRITE) }
}

fn handle(page: PageHandle) -> Handle {
    Handle(page.0 as *mut c_void)
}

impl HipDriver {
    fn out_of_memory(&self, requested: u64, error: Error) -> Error {
        match error {
            Error::Driver { code: api::OUT_OF_MEMORY, .. } => Error::OutOfMemory {
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
        // SAFETY: a free place of our reservation, a live page.
        self.call("hipMemMap", |api| unsafe {
            (api.hipMemMap)(pointer(at), page.bytes as usize, 0, handle(page.page), Flags(0))
        })
        .map_err(|error| self.out_of_memory(page.bytes, error))
    }

    /// Names peers first: ROCm 7.14 breaks a mapping whose device had access before its peers
    /// (openxla/xla #46576).
    fn set_access(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        let mut access = [access_by(self.info.ordinal); 65];
        let mut count = 1;
        for (place, device) in access.iter_mut().zip(peers.iter()) {
            *place = access_by(device);
            count += 1;
        }
        // SAFETY: valid for `count` elements; an unmapped range is an error.
        self.call("hipMemSetAccess", |api| unsafe {
            (api.hipMemSetAccess)(pointer(at), len as usize, access.as_ptr(), count)
        })
        .map_err(|error| self.out_of_memory(len, error))
    }

    /// The error says whether the page is still mapped.
    fn map_with_access(&self, at: Address, page: Whole, peers: Peers) -> Result<(), (Error, bool)> {
        let Some(ranges) = &self.ranges else {
            self.map_one(at, page).map_err(|error| (error, false))?;
            return self.set_access(at, page.bytes, peers).map_err(|error| (error, !self.undo_map(at, page)));
        };
        // Held, as an unmap of an earlier mapping would invalidate the range.
        let mut ranges = ranges.lock();
        let first = ranges.begin(at).ok_or_else(|| {
            let problem = "this version of ROCm gives access only to mappings that follow a reservation's first one without a gap; 6.2 to 6.4 \
                           and 7.14 have no such defect"
                .to_owned();
            (Error::UnfitDriver { driver: PLATFORM.name, problem }, false)
        })?;
        self.map_one(at, page).map_err(|error| (error, false))?;
        match self.set_access(first, at.plus(page.bytes).0 - first.0, Peers::NONE) {
            Ok(()) => {
                ranges.map(at, page.bytes);
                Ok(())
            }
            Err(error) => {
                let undone = self.undo_map(at, page);
                if !undone {
                    ranges.map(at, page.bytes);
                }
                Err((error, !undone))
            }
        }
    }

    fn undo_map(&self, at: Address, page: Whole) -> bool {
        // SAFETY: mapped above and never used.
        self.give_back("hipMemUnmap", |api| unsafe { (api.hipMemUnmap)(pointer(at), page.bytes as usize) })
            .is_ok()
    }
}

// SAFETY: the runtime follows the contract, by its sources (tests/platforms/hip.rs).
unsafe impl Memory for HipDriver {
    fn free_bytes(&self) -> Result<u64> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers.
        self.call("hipMemGetInfo", |api| unsafe { (api.hipMemGetInfo)(&raw mut free, &raw mut total) })?;
        Ok(free as u64)
    }

    fn reserve(&self, len: u64) -> Result<Address> {
        let mut base = ptr::null_mut();
        // SAFETY: valid out pointer; alignment 0 is the default.
        self.call("hipMemAddressReserve", |api| unsafe {
            (api.hipMemAddressReserve)(&raw mut base, len as usize, 0, ptr::null_mut(), Flags(0))
        })
        .map_err(|error| match error {
            Error::Driver { code: api::OUT_OF_MEMORY, .. } => {
                Error::OutOfAddresses { requested: len, device: self.info.ordinal }
            }
            other => other,
        })?;
        let base = Address(base as u64);
        if let Some(ranges) = &self.ranges {
            ranges.lock().reserve(base, len);
        }
        Ok(base)
    }

    unsafe fn free_addresses(&self, base: Address, len: u64) -> Result<()> {
        // First: another thread may reserve freed addresses at once.
        let mut ranges = self.ranges.as_ref().map(Mutex::lock);
        // SAFETY: our reservation without mappings.
        self.give_back("hipMemAddressFree", |api| unsafe {
            (api.hipMemAddressFree)(pointer(base), len as usize)
        })?;
        if let Some(ranges) = &mut ranges {
            ranges.free(base);
        }
        Ok(())
    }

    fn create(&self, len: u64) -> Result<PageHandle> {
        let mut made = Handle(ptr::null_mut());
        let prop = allocation(self.info.ordinal);
        // SAFETY: valid pointers.
        self.call("hipMemCreate", |api| unsafe {
            (api.hipMemCreate)(&raw mut made, len as usize, &raw const prop, Flags(0))
        })
        .map_err(|error| self.out_of_memory(len, error))?;
        Ok(PageHandle(made.0 as u64))
    }

    unsafe fn release(&self, page: PageHandle) -> Result<()> {
        // SAFETY: our handle, released once.
        self.give_back("hipMemRelease", |api| unsafe { (api.hipMemRelease)(handle(page)) })
    }

    unsafe fn map(&self, at: Address, pages: &[Whole], peers: Peers) -> Result<(), NotMapped> {
        let mut starts = Vec::with_capacity(pages.len());
        let mut end = at;
        for page in pages {
            if let Err((error, stays)) = self.map_with_access(end, *page, peers) {
                if stays {
                    return Err(NotMapped { error, mapped: starts.len() + 1 });
                }
                // In reverse, so the first pages remain.
                let undone = starts.iter().rev().take_while(|(at, bytes)| {
                    // SAFETY: mapped above and never used.
                    unsafe { self.unmap(*at, *bytes) }.is_ok()
                });
                return Err(NotMapped { error, mapped: starts.len() - undone.count() });
            }
            starts.push((end, page.bytes));
            end = end.plus(page.bytes);
        }
        Ok(())
    }

    unsafe fn grant(&self, at: Address, len: u64, peers: Peers) -> Result<()> {
        self.set_access(at, len, peers)
    }

    unsafe fn unmap(&self, at: Address, len: u64) -> Result<()> {
        let mut ranges = self.ranges.as_ref().map(Mutex::lock);
        // SAFETY: our whole mapping, unused by the device.
        self.give_back("hipMemUnmap", |api| unsafe { (api.hipMemUnmap)(pointer(at), len as usize) })?;
        if let Some(ranges) = &mut ranges {
            ranges.unmap(at, len);
        }
        Ok(())
    }
}

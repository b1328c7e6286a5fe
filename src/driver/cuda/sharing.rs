//! Pages that other processes have too, by file descriptors: one a page that is exported, and none before.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use super::api::ShareApi;
use super::{Api, CudaDriver, Handles, PageHandle, Sharing, check};
use crate::error::{Error, Result};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const FILE_DESCRIPTOR: c_int = 1;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
const ATTRIBUTE_FILE_DESCRIPTOR: c_int = 103;

/// What pages are created for.
pub(super) fn handle_type(sharing: Handles) -> sys::CUmemAllocationHandleType {
    match sharing {
        Handles::None => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE,
        Handles::Fd => sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
    }
}

impl CudaDriver {
    /// Refuses what the device or its driver cannot.
    pub(super) fn check_sharing(api: &Api, device: sys::CUdevice, sharing: Handles) -> Result<()> {
        if sharing == Handles::None {
            return Ok(());
        }
        ShareApi::get()?;
        let mut supported = 0;
        // SAFETY: the out pointer is good.
        let code =
            unsafe { (api.cuDeviceGetAttribute)(&raw mut supported, ATTRIBUTE_FILE_DESCRIPTOR, device) };
        check(api, "cuDeviceGetAttribute", code)?;
        if supported == 0 { Err(sharing.refused()) } else { Ok(()) }
    }
}

// SAFETY: the driver's functions do what the module says, (conformance, on an H200, in one process).
unsafe impl Sharing for CudaDriver {
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        let share = ShareApi::get()?;
        let mut fd: c_int = -1;
        // SAFETY: a live page (precondition of the door), and room for a descriptor.
        self.call("cuMemExportToShareableHandle", |_| unsafe {
            (share.cuMemExportToShareableHandle)((&raw mut fd).cast::<c_void>(), page.0, FILE_DESCRIPTOR, 0)
        })?;
        if fd < 0 {
            return Err(Error::Internal { what: format!("the driver exported a page as {fd}") });
        }
        // SAFETY: a descriptor that the driver has just made for us.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(&self, fd: BorrowedFd<'_>, _len: u64) -> Result<PageHandle> {
        let share = ShareApi::get()?;
        let mut page = 0;
        // The descriptor is passed in the pointer's place.
        let handle = fd.as_raw_fd() as usize as *mut c_void;
        // SAFETY: the out pointer is good; any descriptor may be asked about, and it is not kept.
        self.call("cuMemImportFromShareableHandle", |_| unsafe {
            (share.cuMemImportFromShareableHandle)(&raw mut page, handle, FILE_DESCRIPTOR)
        })?;
        Ok(PageHandle(page))
    }
}

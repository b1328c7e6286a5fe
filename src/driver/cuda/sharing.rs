use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use cudarc::driver::sys;

use super::api::{AllocationProp, ShareApi};
use super::{Api, CudaDriver, DeviceOptions, Handles, Memory, PageHandle, Sharing, check, location};
use crate::driver::FabricHandle;
use crate::driver::sharing::{no_fabric, rdma_refused};
use crate::error::{Error, Result};

/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`
const FILE_DESCRIPTOR: c_int = 1;
/// `CU_MEM_HANDLE_TYPE_FABRIC`
const FABRIC: c_int = 8;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED`
const ATTRIBUTE_FILE_DESCRIPTOR: c_int = 103;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED`
const ATTRIBUTE_RDMA: c_int = 110;
/// `CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED`
const ATTRIBUTE_FABRIC: c_int = 128;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`
const PINNED: c_int = 1;

#[derive(Clone, Copy, Debug)]
pub(super) struct PageKind {
    pub(super) handles: Handles,
    pub(super) rdma: bool,
}

impl PageKind {
    /// Fails if the device lacks a requested attribute.
    pub(super) fn for_device(api: &Api, device: sys::CUdevice, options: DeviceOptions) -> Result<Self> {
        let has = |attribute| {
            let mut value = 0;
            // SAFETY: valid out pointer.
            let code = unsafe { (api.cuDeviceGetAttribute)(&raw mut value, attribute, device) };
            check(api, "cuDeviceGetAttribute", code).map(|()| value != 0)
        };
        let (mut handles, rdma) = (options.sharing, options.rdma);
        if handles != Handles::None {
            ShareApi::get()?;
            if !has(ATTRIBUTE_FILE_DESCRIPTOR)? {
                return Err(handles.refused());
            }
        }
        if handles == Handles::Fabric && !has(ATTRIBUTE_FABRIC).unwrap_or(false) {
            handles = Handles::Fd;
        }
        if rdma && !has(ATTRIBUTE_RDMA)? { Err(rdma_refused()) } else { Ok(Self { handles, rdma }) }
    }

    /// Unnamed fields must be zero.
    pub(super) fn of(self, ordinal: i32) -> AllocationProp {
        let handle_types = match self.handles {
            Handles::None => 0,
            Handles::Fd => FILE_DESCRIPTOR,
            Handles::Fabric => FILE_DESCRIPTOR | FABRIC,
        };
        AllocationProp {
            kind: PINNED,
            handle_types,
            location: location(ordinal),
            win32_handle_meta_data: ptr::null_mut(),
            compression: 0,
            gpu_direct_rdma: self.rdma.into(),
            usage: 0,
            reserved: [0; 4],
        }
    }
}

impl CudaDriver {
    /// Falls back to descriptors if no fabric page can be exported: devices may lack fabric
    /// channels.
    pub(super) fn try_fabric(&mut self) {
        if self.pages.handles != Handles::Fabric {
            return;
        }
        let tried = self.create(self.capabilities.granularity).and_then(|page| {
            // SAFETY: created above.
            let exported = unsafe { self.export_fabric(page) };
            // SAFETY: never mapped.
            exported.and(unsafe { self.release(page) })
        });
        if let Err(error) = tried {
            tracing::info!(device = self.info.ordinal, %error, "no handles of the fabric: pages are shared by descriptors");
            self.pages.handles = Handles::Fd;
        }
    }

    fn export_as<T>(&self, page: PageHandle, kind: c_int, mut into: T) -> Result<T> {
        let share = ShareApi::get()?;
        // SAFETY: a live page, and room for this handle type.
        self.call("cuMemExportToShareableHandle", |_| unsafe {
            (share.cuMemExportToShareableHandle)((&raw mut into).cast::<c_void>(), page.0, kind, 0)
        })?;
        Ok(into)
    }

    /// `handle`: the descriptor, or the address of the fabric handle.
    fn import_as(&self, handle: *mut c_void, kind: c_int) -> Result<PageHandle> {
        let share = ShareApi::get()?;
        let mut page = 0;
        // SAFETY: any value is allowed, and not kept.
        self.call("cuMemImportFromShareableHandle", |_| unsafe {
            (share.cuMemImportFromShareableHandle)(&raw mut page, handle, kind)
        })?;
        Ok(PageHandle(page))
    }
}

// SAFETY: the driver follows the contract (H200; fabric on the stand-in).
unsafe impl Sharing for CudaDriver {
    fn granted(&self) -> Handles {
        self.pages.handles
    }

    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        let fd: c_int = self.export_as(page, FILE_DESCRIPTOR, -1)?;
        if fd < 0 {
            return Err(Error::Internal { what: format!("the driver exported a page as {fd}") });
        }
        // SAFETY: a new descriptor.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    fn import(&self, fd: BorrowedFd<'_>, _len: u64) -> Result<PageHandle> {
        self.import_as(fd.as_raw_fd() as usize as *mut c_void, FILE_DESCRIPTOR)
    }

    unsafe fn export_fabric(&self, page: PageHandle) -> Result<FabricHandle> {
        if self.pages.handles != Handles::Fabric {
            return Err(no_fabric());
        }
        self.export_as(page, FABRIC, [0; 64])
    }

    fn import_fabric(&self, handle: &FabricHandle, _len: u64) -> Result<PageHandle> {
        if self.pages.handles != Handles::Fabric {
            return Err(no_fabric());
        }
        let mut handle = *handle;
        self.import_as((&raw mut handle).cast::<c_void>(), FABRIC)
    }
}

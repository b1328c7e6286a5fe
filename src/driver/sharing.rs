use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Driver, HostOptions, PageHandle};
use crate::error::{Error, Result};
use crate::units::Peers;

/// Handle types for exporting pages. Each includes the previous ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Handles {
    /// None: pages stay in this process.
    #[default]
    None,
    /// POSIX file descriptors, created at the export.
    Fd,
    /// [Fabric handles](FabricHandle), also for other hosts, if possible; else descriptors.
    Fabric,
}

/// `CUmemFabricHandle`: imports a page over the fabric.
pub type FabricHandle = [u8; 64];

impl Handles {
    /// Handle types granted by a driver.
    #[must_use]
    pub fn of(driver: &dyn Driver) -> Self {
        driver.sharing().map_or(Self::None, Sharing::granted)
    }

    pub(super) fn refused(self) -> Error {
        let expected = "none: this device has no handles that other processes can open";
        Error::InvalidArgument { what: "sharing", value: self as i128, expected }
    }
}

/// Options for opening a device. [`HostOptions`] convert.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// For the host only.
    pub host: HostOptions,
    /// Handle types for all pages; opening fails if unavailable. With [`Handles::None`],
    /// [`open`](super::open) still makes pages exportable by descriptors, if possible and if the
    /// environment has `NCCL_GRAPH_REGISTER=0`.
    pub sharing: Handles,
    /// Network cards may access the pages (CUDA's `gpuDirectRDMACapable`, which slows every map);
    /// opening fails if unavailable.
    pub rdma: bool,
    /// Peers with access to all pages: see [`Device::admit`](crate::Device::admit).
    pub peers: Peers,
}

pub(super) fn rdma_refused() -> Error {
    let expected = "0: network cards cannot be given this device's pages";
    Error::InvalidArgument { what: "rdma", value: 1, expected }
}

impl From<HostOptions> for DeviceOptions {
    fn from(host: HostOptions) -> Self {
        Self { host, ..Self::default() }
    }
}

/// Export and import of pages.
///
/// # Safety
/// As [`Memory`](super::Memory).
pub unsafe trait Sharing {
    /// Granted handle types.
    fn granted(&self) -> Handles {
        Handles::Fd
    }

    /// Returns a descriptor, owned by the caller, for [importing](Self::import) the page in another
    /// process. The memory exists while the page, the descriptor or an imported page exists.
    ///
    /// # Safety
    /// A live page, made by [`create`](super::Memory::create).
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd>;

    /// Imports an exported page of this or another process, used like any page. It takes no memory
    /// of this device, and keeps the memory, also without the descriptor. Fails for a wrong length,
    /// perhaps only at the map.
    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle>;

    /// As [`export`](Self::export), for other hosts too.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless [granted](Self::granted); driver errors.
    ///
    /// # Safety
    /// As [`export`](Self::export).
    unsafe fn export_fabric(&self, _page: PageHandle) -> Result<FabricHandle> {
        Err(no_fabric())
    }

    /// As [`import`](Self::import), by a fabric handle.
    fn import_fabric(&self, _handle: &FabricHandle, _len: u64) -> Result<PageHandle> {
        Err(no_fabric())
    }
}

pub(super) fn no_fabric() -> Error {
    Error::wrong_state(
        "cannot share pages by fabric handles: the device was not opened for them or its trial failed; open it with sharing by fabric",
    )
}

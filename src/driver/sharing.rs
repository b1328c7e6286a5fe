use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Driver, HostOptions, PageHandle};
use crate::error::{Error, Result};
use crate::units::Peers;

/// Handle types for exporting pages. Each level includes the previous ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Handles {
    /// None: pages stay in this process.
    #[default]
    None,
    /// POSIX file descriptors, created at the export.
    Fd,
    /// [Fabric handles](FabricHandle), valid on other hosts too, if possible; else descriptors.
    Fabric,
}

/// Handle for importing a page over the fabric: `CUmemFabricHandle`.
pub type FabricHandle = [u8; 64];

impl Handles {
    /// Returns the handle types granted by a driver.
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
    /// Network cards may access the pages (`gpuDirectRDMACapable` of CUDA, which makes every map
    /// slower); opening fails if unavailable.
    pub rdma: bool,
    /// Peer devices with access to all pages: see [`Device::admit`](crate::Device::admit).
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

/// Export and import of pages, for devices opened with sharing.
///
/// # Safety
/// As [`Memory`](super::Memory).
pub unsafe trait Sharing {
    /// Returns the granted handle types.
    fn granted(&self) -> Handles {
        Handles::Fd
    }

    /// Returns a descriptor, owned by the caller, for [importing](Self::import) the page in another
    /// process. The memory exists while the page, the descriptor or an imported page exists.
    ///
    /// # Safety
    /// A live page of this driver, made by [`create`](super::Memory::create).
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd>;

    /// Imports an exported page of this or another process. It is mapped, unmapped and released as
    /// any page, takes no memory of this device, and keeps the memory. The descriptor is not needed
    /// afterwards. Fails for a wrong length, perhaps only at the map.
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

//! Pages that other processes may have: what is asked for when a device is opened, and the part of the door that gives and takes them.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Driver, HostOptions, PageHandle};
use crate::error::{Error, Result};
use crate::units::Peers;

/// What other processes can be given a device's pages by; each is what stands before it too.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Handles {
    /// By nothing: pages stay in this process.
    #[default]
    None,
    /// By POSIX file descriptors, one a page. A page takes none before it is exported.
    Fd,
    /// By [fabric handles](FabricHandle), which reach other hosts, where the device makes one at a trial; else by descriptors.
    Fabric,
}

/// By what another process imports a page over the fabric, to be sent as it is: `CUmemFabricHandle`.
pub type FabricHandle = [u8; 64];

impl Handles {
    /// What a driver grants.
    #[must_use]
    pub fn of(driver: &dyn Driver) -> Self {
        driver.sharing().map_or(Self::None, Sharing::granted)
    }

    /// The answer of a device that cannot.
    pub(super) fn refused(self) -> Error {
        let expected = "none: this device has no handles that other processes can open";
        Error::InvalidArgument { what: "sharing", value: self as i128, expected }
    }
}

/// What a device is opened with. Host options alone are the defaults for the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceOptions {
    /// For the host only.
    pub host: HostOptions,
    /// What pages can be exported by, all or none of the device's; where that cannot be, opening fails. [`Handles::None`], the default: nothing is asked
    /// for. [`open`](super::open) has them by descriptors then all the same where it can and `NCCL_GRAPH_REGISTER=0` is in the environment.
    pub sharing: Handles,
    /// Whether network cards may read and write its pages (`gpuDirectRDMACapable` of CUDA, which makes every map dearer); where that cannot be, opening fails.
    pub rdma: bool,
    /// Other devices of the platform that may read and write all its pages: see [`Device::admit`](crate::Device::admit).
    pub peers: Peers,
}

/// The answer of a device whose pages network cards cannot reach.
pub(super) fn rdma_refused() -> Error {
    let expected = "0: network cards cannot be given this device's pages";
    Error::InvalidArgument { what: "rdma", value: 1, expected }
}

impl From<HostOptions> for DeviceOptions {
    fn from(host: HostOptions) -> Self {
        Self { host, ..Self::default() }
    }
}

/// Pages that other processes have too, which some platforms can, for devices that were opened so.
///
/// # Safety
/// As [`Memory`](super::Memory).
pub unsafe trait Sharing {
    /// What pages can be exported by.
    fn granted(&self) -> Handles {
        Handles::Fd
    }

    /// A descriptor by which another process can [import](Self::import) the page; the caller's. The page's memory stays, whatever happens to the page
    /// here, as long as the descriptor, or a page that was imported by it, does.
    ///
    /// # Safety
    /// A live page of this driver that [`create`](super::Memory::create) made.
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd>;

    /// A page over the memory of one that was exported, here or in another process: it is mapped, unmapped and released as any other, takes no
    /// memory of this device, and keeps that memory until it is released and mapped nowhere. The descriptor is not needed afterwards.
    ///
    /// # Errors
    /// What the driver says of a descriptor that is no page of that length; a platform that cannot tell the length says so when it is mapped.
    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle>;

    /// As [`export`](Self::export), for processes of other hosts too. The page's memory stays as long as the page does, and where it was imported.
    ///
    /// # Errors
    /// [`Error::WrongState`] unless that was [granted](Self::granted); what the driver says.
    ///
    /// # Safety
    /// As [`export`](Self::export).
    unsafe fn export_fabric(&self, _page: PageHandle) -> Result<FabricHandle> {
        Err(no_fabric())
    }

    /// As [`import`](Self::import), by a handle of the fabric.
    ///
    /// # Errors
    /// As [`export_fabric`](Self::export_fabric).
    fn import_fabric(&self, _handle: &FabricHandle, _len: u64) -> Result<PageHandle> {
        Err(no_fabric())
    }
}

pub(super) fn no_fabric() -> Error {
    Error::wrong_state(
        "cannot share pages by fabric handles: the device was not opened for them or its trial failed; open it with sharing by fabric",
    )
}

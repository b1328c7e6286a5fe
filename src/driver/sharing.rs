//! Pages that other processes may have: what is asked for when a device is opened, and the part of the door that gives and takes them.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Driver, HostOptions, PageHandle};
use crate::error::{Error, Result};

/// What other processes can be given a device's pages by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Handles {
    /// By nothing: pages stay in this process.
    #[default]
    None,
    /// By POSIX file descriptors, one a page. A page takes none before it is exported.
    Fd,
}

impl Handles {
    /// What a driver grants.
    #[must_use]
    pub fn of(driver: &dyn Driver) -> Self {
        if driver.sharing().is_some() { Self::Fd } else { Self::None }
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
    /// What pages can be exported by, all or none of the device's; where that cannot be, opening fails.
    pub sharing: Handles,
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
}

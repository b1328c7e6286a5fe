use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Handles, HostDriver, PageHandle, Sharing};
use crate::error::Result;

impl HostDriver {
    /// Returns the same unused device with exportable pages.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Handles) -> Self {
        self.sharing = sharing.min(Handles::Fd);
        self
    }
}

// SAFETY: `Memory` checks every rule of the contract.
unsafe impl Sharing for HostDriver {
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        self.memory.export(page.0).map_err(|r| self.refused("export", 0, r))
    }

    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle> {
        self.memory.import(fd, Some(len)).map(PageHandle).map_err(|r| self.refused("import", len, r))
    }
}

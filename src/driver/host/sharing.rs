//! The host's part of the door for pages that other processes have too.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::{Handles, HostDriver, PageHandle, Sharing};
use crate::error::Result;

impl HostDriver {
    /// The same device, not used yet, whose pages can be exported as said.
    #[must_use]
    pub fn with_sharing(mut self, sharing: Handles) -> Self {
        // There is no fabric to try.
        self.sharing = sharing.min(Handles::Fd);
        self
    }
}

// SAFETY: `Memory` checks every rule of the module itself, and refuses what breaks one.
unsafe impl Sharing for HostDriver {
    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        self.memory.export(page.0).map_err(|r| self.refused("export", 0, r))
    }

    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle> {
        self.memory.import(fd, Some(len)).map(PageHandle).map_err(|r| self.refused("import", len, r))
    }
}

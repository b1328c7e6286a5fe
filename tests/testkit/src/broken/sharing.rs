//! Exports and imports of pages, with flaws.

use std::os::fd::{BorrowedFd, OwnedFd};

use vmmgraph::driver::{Driver, FabricHandle, Handles, PageHandle, Sharing};
use vmmgraph::{Error, Result};

use super::{BrokenDriver, Flaw};

impl BrokenDriver {
    fn sharing_below(&self) -> Result<&dyn Sharing> {
        self.inner.sharing().ok_or(Error::Unsupported { device: self.info().ordinal })
    }
}

// SAFETY: as for memory.
unsafe impl Sharing for BrokenDriver {
    fn granted(&self) -> Handles {
        Handles::of(&*self.inner)
    }

    unsafe fn export_fabric(&self, page: PageHandle) -> Result<FabricHandle> {
        // SAFETY: the caller's contract.
        unsafe { self.sharing_below()?.export_fabric(page) }
    }

    fn import_fabric(&self, handle: &FabricHandle, len: u64) -> Result<PageHandle> {
        self.sharing_below()?.import_fabric(handle, len)
    }

    unsafe fn export(&self, page: PageHandle) -> Result<OwnedFd> {
        self.enter("export")?;
        // SAFETY: the caller's contract.
        unsafe { self.sharing_below()?.export(page) }
    }

    fn import(&self, fd: BorrowedFd<'_>, len: u64) -> Result<PageHandle> {
        self.enter("import")?;
        if self.is(Flaw::ImportsAnotherPage) {
            self.inner.create(len)
        } else {
            self.sharing_below()?.import(fd, len)
        }
    }
}

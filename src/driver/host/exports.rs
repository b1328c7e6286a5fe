//! Export and import of host pages: descriptors of their memory.

use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{SealFlags, fcntl_add_seals, fcntl_get_seals, fstat};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::{Memory, Page, Refusal};

/// Fixes the length: changes would fault in processes with the page mapped.
const FIXED: SealFlags = SealFlags::SHRINK.union(SealFlags::GROW);

fn refused(error: Errno) -> Refusal {
    match error {
        Errno::MFILE | Errno::NFILE => Refusal::OutOfDescriptors,
        _ => Refusal::Invalid("not a descriptor"),
    }
}

impl Memory {
    /// Exports a page, and fixes its length.
    pub fn export(&self, handle: u64) -> Result<OwnedFd, Refusal> {
        let state = self.state.lock();
        let page =
            state.pages.get(&handle).filter(|p| p.handles > 0).ok_or(Refusal::Invalid("not a page"))?;
        if page.imported {
            return Err(Refusal::NotSupported("an imported page is not exported again"));
        }
        fcntl_add_seals(&page.memory, FIXED).map_err(refused)?;
        fcntl_dupfd_cloexec(&page.memory, 0).map_err(refused)
    }

    /// Imports a page of `len` bytes, if known.
    pub fn import(&self, fd: BorrowedFd<'_>, len: Option<u64>) -> Result<u64, Refusal> {
        // It could be truncated while mapped.
        let seals = fcntl_get_seals(fd).map_err(|_| Refusal::Invalid("not the memory of a page"))?;
        let bytes = u64::try_from(fstat(fd).map_err(refused)?.st_size).unwrap_or(0);
        if !seals.contains(FIXED) || bytes == 0 {
            return Err(Refusal::Invalid("not the memory of a page"));
        }
        if len.is_some_and(|len| len != bytes) {
            return Err(Refusal::Invalid("not as long as the page"));
        }
        self.granular(&[bytes])?;
        let memory = fcntl_dupfd_cloexec(fd, 0).map_err(refused)?;
        let page = Page { memory, len: bytes, handles: 1, mappings: 0, imported: true };
        Ok(self.state.lock().enter(page))
    }
}

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Device;
use crate::driver::FabricHandle;
use crate::error::{Error, Result};
use crate::pages::PageId;
use crate::pause::Pausable;

/// Export pin of a page: while a clone lives, the page is not released, lent or paused, nor
/// replaced at an address named by [`Space::export`](crate::Space::export) before the seal. Keeps
/// the device open. Drop after every other process closed the page.
#[derive(Clone)]
pub struct PagePin(Arc<Pinned>);

struct Pinned {
    device: Arc<Device>,
    page: PageId,
}

impl PagePin {
    /// Returns the page.
    #[must_use]
    pub fn page(&self) -> PageId {
        self.0.page
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Err(error) = self.device.pool.unpin_export(self.page, 1) {
            tracing::error!(%error, "a pin of a page was taken away by somebody else");
        }
    }
}

impl fmt::Debug for PagePin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PagePin({})", self.0.page.number())
    }
}

/// Exported page: a descriptor for the import, and the export pin.
#[derive(Debug)]
pub struct ExportedPage {
    /// Send to the other process, then close.
    pub fd: OwnedFd,
    /// Drop after the other process closed the page or ended.
    pub pin: PagePin,
}

impl Device {
    /// Exports a page of an arena, by a key from [`Space::export`](crate::Space::export):
    /// `vmmgraph_device_export_page`. Other processes see all memory of the page, now and later.
    /// Refused during an [eager scope](crate::EagerScope).
    pub fn export_page(self: &Arc<Self>, page: PageId) -> Result<ExportedPage> {
        let pin = self.pin_page(page)?;
        Ok(ExportedPage { fd: self.pool.export_descriptor(page)?, pin })
    }

    /// Like [`export_page`](Self::export_page), also for processes of other hosts, on a device with
    /// [`Handles::Fabric`](crate::Handles::Fabric). The handle is valid as long as the pin.
    pub fn export_fabric(self: &Arc<Self>, page: PageId) -> Result<(FabricHandle, PagePin)> {
        let pin = self.pin_page(page)?;
        Ok((self.pool.export_fabric(page)?, pin))
    }

    /// Exports for callers with their own pin counts.
    pub(crate) fn export_fabric_unguarded(&self, page: PageId) -> Result<FabricHandle> {
        self.counted(page, || self.pool.export_fabric(page))
    }

    /// Exports for callers with their own pin counts.
    pub(crate) fn export_page_unguarded(&self, page: PageId) -> Result<OwnedFd> {
        self.counted(page, || self.pool.export_descriptor(page))
    }

    /// Removes the pin if the export fails.
    fn counted<T>(&self, page: PageId, export: impl FnOnce() -> Result<T>) -> Result<T> {
        self.page_exported(page, 1)?;
        let exported = export();
        if exported.is_err() {
            self.pool.unpin_export(page, 1)?;
        }
        exported
    }

    /// Pins a page without an export, before other processes use its memory in a different way.
    /// Fails like [`export_page`](Self::export_page).
    pub fn pin_page(self: &Arc<Self>, page: PageId) -> Result<PagePin> {
        self.page_exported(page, 1)?;
        Ok(PagePin(Arc::new(Pinned { device: Arc::clone(self), page })))
    }

    /// Adds export pins, or removes them if `delta` is negative.
    pub(crate) fn page_exported(&self, page: PageId, delta: i32) -> Result<()> {
        let (pool, times) = (&self.pool, delta.unsigned_abs());
        if delta == 0 {
            return Ok(());
        }
        if delta < 0 {
            return pool.unpin_export(page, times);
        }
        let Ok(arena) = pool.arena_of(page) else { return pool.pin_abandoned(page, times) };
        let owner = self.pausables.tagged(&[]).into_iter().find(|owner| owner.id() == arena);
        // First: a concurrent move of the page sees the pin, or `stay` sees the move.
        pool.pin_export(page, arena, times)?;
        let gone =
            Error::wrong_state("cannot export the page: its arena is gone; export it while the arena lives");
        let pinned = owner.ok_or(gone).and_then(|owner: Arc<dyn Pausable>| owner.pin_page(page));
        if pinned.is_err() {
            pool.unpin_export(page, times)?;
        }
        pinned
    }
}

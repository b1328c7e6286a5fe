//! Pages of the device that other processes have.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::Device;
use crate::driver::FabricHandle;
use crate::error::{Error, Result};
use crate::pages::{PageId, Pausable};

/// That others have a page: as long as this or a clone of it lives, the page is not given back, lent, paused, or exchanged for another at
/// an address that [`Space::export`](crate::Space::export) named before its seal. It keeps the device.
///
/// Ends when every process that has the page has closed it. What others do with the page afterwards is not seen here.
#[derive(Clone)]
pub struct PagePin(Arc<Pinned>);

struct Pinned {
    device: Arc<Device>,
    page: PageId,
}

impl PagePin {
    /// The page.
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

/// A page for another process: what it is imported by, and the pin that keeps it what it is.
#[derive(Debug)]
pub struct ExportedPage {
    /// To be sent to the other process, and closed here when it was.
    pub fd: OwnedFd,
    /// Ends when the other process has closed the page, or is gone.
    pub pin: PagePin,
}

impl Device {
    /// A page of an arena for other processes, by a name that [`Space::export`](crate::Space::export) gave: once a page, however many graphs show
    /// it. The arena may not be paused and no [eager](crate::EagerScope) work of it be under way.
    ///
    /// What other processes see of it is its memory, now and later: of a page that graphs share what each of them writes, and what lies beside.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the device was opened [without](Self::sharing), or the arena is in another state; [`Error::InvalidArgument`]
    /// for what is no page of an arena, or the page of an eager block; [`Error::Lent`]; what the driver says. Then nothing is pinned.
    pub fn export_page(self: &Arc<Self>, page: PageId) -> Result<ExportedPage> {
        let pin = self.pin_page(page)?;
        Ok(ExportedPage { fd: self.pool.export_descriptor(page)?, pin })
    }

    /// As [`export_page`](Self::export_page), for processes of other hosts too, on a device that was granted [`Handles::Fabric`](crate::Handles::Fabric).
    /// The handle is good as long as the pin is.
    ///
    /// # Errors
    /// As [`export_page`](Self::export_page); [`Error::WrongState`] without the fabric.
    pub fn export_fabric(self: &Arc<Self>, page: PageId) -> Result<(FabricHandle, PagePin)> {
        let pin = self.pin_page(page)?;
        Ok((self.pool.export_fabric(page)?, pin))
    }

    /// As [`export_fabric`](Self::export_fabric), for whoever counts its pins itself.
    pub(crate) fn export_fabric_unguarded(&self, page: PageId) -> Result<FabricHandle> {
        self.counted(page, || self.pool.export_fabric(page))
    }

    /// As [`export_page`](Self::export_page), for whoever counts its pins itself.
    pub(crate) fn export_page_unguarded(&self, page: PageId) -> Result<OwnedFd> {
        self.counted(page, || self.pool.export_descriptor(page))
    }

    /// Pins a page for what is exported of it; not if that fails.
    fn counted<T>(&self, page: PageId, export: impl FnOnce() -> Result<T>) -> Result<T> {
        self.page_exported(page, 1)?;
        let exported = export();
        if exported.is_err() {
            self.pool.unpin_export(page, 1)?;
        }
        exported
    }

    /// Pins a page without exporting it: before its memory is used by others in another way.
    ///
    /// # Errors
    /// As [`export_page`](Self::export_page), without the driver's.
    pub fn pin_page(self: &Arc<Self>, page: PageId) -> Result<PagePin> {
        self.page_exported(page, 1)?;
        Ok(PagePin(Arc::new(Pinned { device: Arc::clone(self), page })))
    }

    /// Pins a page so many times more, or less.
    ///
    /// # Errors
    /// As [`pin_page`](Self::pin_page); [`Error::InvalidArgument`] if it is not pinned so often. Then nothing has changed.
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
        // First, so that whoever would move it sees the pin or is seen.
        pool.pin_export(page, arena, times)?;
        let gone =
            Error::wrong_state("cannot export the page: its arena is gone; export it while the arena lives");
        let stays = owner.ok_or(gone).and_then(|owner: Arc<dyn Pausable>| owner.stay(page));
        if stays.is_err() {
            pool.unpin_export(page, times)?;
        }
        stays
    }
}

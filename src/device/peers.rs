//! Pages of other processes on this device.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::Device;
use crate::driver::FabricHandle;
use crate::error::{Error, Result};
use crate::pages::{Fence, NamedStream, PeerId, PeerSpan};
use crate::sync::Mutex;
use crate::units::{Address, Stream};

/// A page of another process, imported once, however many ranges show it. Its memory stays as long as this, or a [`PeerMap`] of it, does, whatever its
/// owner does; what it holds then is the owner's to say.
pub struct PeerPage {
    device: Arc<Device>,
    id: PeerId,
    bytes: u64,
}

impl PeerPage {
    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for PeerPage {
    fn drop(&mut self) {
        self.device.pool.close_peer(self.id);
    }
}

impl fmt::Debug for PeerPage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerPage({:?}, {} bytes)", self.id, self.bytes)
    }
}

/// A part of another process's page, as its owner's [`Extent`](crate::pages::Extent) says it.
#[derive(Clone, Copy, Debug)]
pub struct PeerExtent<'a> {
    /// The page.
    pub page: &'a PeerPage,
    /// Where in the page the part begins, in bytes.
    pub offset: u64,
    /// Its bytes.
    pub bytes: u64,
}

/// A range of another process at addresses of this one's own, in one piece. Dropping it unmaps the pages once what was given to the
/// [noted](Self::used_by) streams by then is done, and does not block.
pub struct PeerMap {
    device: Arc<Device>,
    /// `None`: it is being dropped.
    span: Option<PeerSpan>,
    at: Address,
    bytes: u64,
    users: Mutex<Vec<NamedStream>>,
}

impl PeerMap {
    /// Where the range begins.
    #[must_use]
    pub fn address(&self) -> Address {
        self.at
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Notes that work of a stream uses the range. The stream exists until this is dropped. Work on streams that are not noted is done by then.
    pub fn used_by(&self, stream: Stream) {
        let stream = self.device.pool.events().keep(stream);
        let mut users = self.users.lock();
        if !users.contains(&stream) {
            users.push(stream);
        }
    }
}

impl Drop for PeerMap {
    fn drop(&mut self) {
        let pool = &self.device.pool;
        let mut fence = Fence::default();
        self.users.get_mut().drain(..).for_each(|stream| fence.add_kept(pool.events(), stream));
        if let Some(span) = self.span.take() {
            pool.finish_peers(fence, span);
        }
    }
}

impl fmt::Debug for PeerMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PeerMap({:?} + {:#x})", self.at, self.bytes)
    }
}

impl Device {
    /// Imports a page that another process exported, `bytes` long, which its owner says. The descriptor is not needed afterwards.
    ///
    /// # Errors
    /// [`Error::WrongState`] if this device was opened [without](Self::sharing); [`Error::InvalidSize`]; what the driver says of a descriptor that is
    /// no page, and of one of another length, if it can tell: else mapping it fails.
    pub fn import(self: &Arc<Self>, fd: BorrowedFd<'_>, bytes: u64) -> Result<PeerPage> {
        self.imported(bytes, || self.pool.import(fd, bytes))
    }

    /// As [`import`](Self::import), by a handle of the fabric, from this host or another, on a device that was granted
    /// [`Handles::Fabric`](crate::Handles::Fabric).
    ///
    /// # Errors
    /// As [`import`](Self::import); [`Error::WrongState`] without the fabric.
    pub fn import_fabric(self: &Arc<Self>, handle: &FabricHandle, bytes: u64) -> Result<PeerPage> {
        self.imported(bytes, || self.pool.import_fabric(handle, bytes))
    }

    fn imported(self: &Arc<Self>, bytes: u64, import: impl FnOnce() -> Result<PeerId>) -> Result<PeerPage> {
        let can = self.driver().capabilities();
        if bytes == 0 || bytes > can.largest_page || !bytes.is_multiple_of(can.granularity) {
            return Err(Error::InvalidSize { what: "a peer's page", bytes, limit: can.largest_page });
        }
        Ok(PeerPage { device: Arc::clone(self), id: import()?, bytes })
    }

    /// Maps the parts of another process's range, one behind the other, at addresses of this process's own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for parts that do not make one range (pages are mapped whole: all but the first begin where their page does, and all
    /// but the last end there), and for pages of another device; no addresses, or what the driver says. Nothing is mapped then.
    pub fn map_peer(self: &Arc<Self>, extents: &[PeerExtent<'_>]) -> Result<PeerMap> {
        let refuse =
            |value: u64, what, expected| Err(Error::InvalidArgument { what, value: value.into(), expected });
        let Some(first) = extents.first() else {
            return refuse(0, "parts of a range", "at least one");
        };
        for (number, extent) in extents.iter().enumerate() {
            let (whole, last) = (extent.page.bytes, number + 1 == extents.len());
            let end = extent.offset.checked_add(extent.bytes).filter(|end| *end <= whole);
            if end.is_none() || extent.bytes == 0 {
                return refuse(
                    extent.bytes,
                    "bytes of a part",
                    "at least one, and no more than its page has",
                );
            }
            if number > 0 && extent.offset > 0 || !last && end != Some(whole) {
                let expected = "where the page does, and its end too, between two other parts";
                return refuse(extent.offset, "the beginning of a part", expected);
            }
            if !Arc::ptr_eq(&extent.page.device, self) {
                return refuse(number as u64, "the page of a part", "one that this device imported");
            }
        }
        let pages: Vec<PeerId> = extents.iter().map(|extent| extent.page.id).collect();
        let bytes = extents.iter().map(|extent| extent.bytes).sum();
        let span = self.pool.map_peers(&pages)?;
        let (at, users) = (span.base().plus(first.offset), Mutex::default());
        Ok(PeerMap { device: Arc::clone(self), span: Some(span), at, bytes, users })
    }
}

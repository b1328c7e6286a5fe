use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::Device;
use crate::driver::FabricHandle;
use crate::error::{Error, Result};
use crate::pages::{Fence, NamedStream, PeerId, PeerSpan};
use crate::sync::Mutex;
use crate::units::{Address, Stream};

/// An imported page. Its memory lives as long as this object or a [`PeerMap`], even if the exporter
/// is gone.
pub struct PeerPage {
    device: Arc<Device>,
    id: PeerId,
    bytes: u64,
}

impl PeerPage {
    /// Returns the bytes of the page.
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

/// A part of an imported page, as in the exporter's [`Extent`](crate::pages::Extent).
#[derive(Clone, Copy, Debug)]
pub struct PeerExtent<'a> {
    /// The page.
    pub page: &'a PeerPage,
    /// Bytes from the page's start.
    pub offset: u64,
    /// Bytes of the part.
    pub bytes: u64,
}

/// Contiguous mapping of a range of a different process. Drop unmaps after the work submitted so
/// far to the [recorded](Self::used_by) streams, without blocking.
pub struct PeerMap {
    device: Arc<Device>,
    /// `None` during drop.
    span: Option<PeerSpan>,
    at: Address,
    bytes: u64,
    users: Mutex<Vec<NamedStream>>,
}

impl PeerMap {
    /// Returns the start of the range.
    #[must_use]
    pub fn address(&self) -> Address {
        self.at
    }

    /// Returns the bytes of the range.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Records a stream that uses the range, and exists until this object is dropped. Other work
    /// must be done by then.
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
    /// Imports an exported page of `bytes`: `vmmgraph_device_import`. A wrong length may be
    /// detected only at the map.
    pub fn import(self: &Arc<Self>, fd: BorrowedFd<'_>, bytes: u64) -> Result<PeerPage> {
        self.imported(bytes, || self.pool.import(fd, bytes))
    }

    /// Like [`import`](Self::import), from a fabric handle of any host, on a device with
    /// [`Handles::Fabric`](crate::Handles::Fabric).
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

    /// Maps the parts of a range of a different process one after the other:
    /// `vmmgraph_peer_map_create`.
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
                let expected = "0, and its end the page's end, between two other parts";
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

//! Host buffer: source of units. Its mutex `used` guards the fences of all copies from and to it,
//! also while a copy is submitted.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::graph::Launches;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{CopyPath, Fence, HostPiece, Part, RangeId};
use crate::sync::Mutex;
use crate::units::{Address, Stream};

/// Whether unregistered memory is acceptable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Unregistered memory is an error.
    #[default]
    Required,
    /// Without registration, copies use small registered buffers, and the caller waits for each.
    Preferred,
}

static NEXT_CHANGE: AtomicU64 = AtomicU64::new(1);

/// Number of a change of contents or sources, increasing in the whole process. Called under the
/// lock of the changed object, by a writer of host memory before checking for launches: a launch
/// beginning meanwhile reads the new number in [`changes`], or the writer finds the launch.
pub(super) fn next_change() -> u64 {
    NEXT_CHANGE.fetch_add(1, Ordering::Relaxed)
}

/// Number of the next change: while it is the same, nothing has changed.
pub(super) fn changes() -> u64 {
    NEXT_CHANGE.load(Ordering::Relaxed)
}

#[derive(Default)]
struct Use {
    copies: Fence,
    changed: u64,
    /// Captured steps which read the buffer, once for each unit.
    graphs: Vec<Arc<Launches>>,
    /// All on one stream.
    stores: Fence,
}

impl Use {
    fn readers(&self) -> Result<Fence> {
        let mut readers = self.copies.clone();
        for (at, graph) in self.graphs.iter().enumerate() {
            if !self.graphs.iter().take(at).any(|before| Arc::ptr_eq(before, graph)) {
                readers.join(graph.over()?);
            }
        }
        Ok(readers)
    }

    fn users(&self) -> Result<Fence> {
        let mut users = self.readers()?;
        users.join(self.stores.clone());
        Ok(users)
    }
}

/// One piece of a device's [host pool](Device::host_pool). Keeps the device open, and returns to
/// the pool after all copies. Thread-safe. Buffers are equal if they are the same memory.
pub struct HostBuffer {
    piece: Option<HostPiece>,
    used: Mutex<Use>,
    device: Arc<Device>,
}

impl Device {
    /// Creates a host buffer with undefined contents.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for 0 bytes and for more than 1 GiB (the limit of one registration);
    /// [`Error::OutOfHostMemory`]; [`Error::HostNotRegistered`] with [`Pinning::Required`].
    pub fn host_buffer(self: &Arc<Self>, bytes: u64, pinning: Pinning) -> Result<Arc<HostBuffer>> {
        let piece = self.host_pool().take_whole(bytes, pinning == Pinning::Preferred)?;
        let used = Use { changed: next_change(), ..Use::default() };
        let used = Mutex::new(used);
        Ok(Arc::new(HostBuffer { piece: Some(piece), used, device: Arc::clone(self) }))
    }
}

impl HostBuffer {
    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Returns the size in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.piece.as_ref().map_or(0, HostPiece::bytes)
    }

    /// Whether the memory is registered with the device.
    #[must_use]
    pub fn registered(&self) -> bool {
        self.piece.as_ref().is_some_and(HostPiece::registered)
    }

    /// Returns the address. Before writing, [wait](Self::wait) for copies and keep rings from
    /// copying; afterwards, call [`changed`](Self::changed).
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.piece.as_ref().map_or(std::ptr::null_mut(), HostPiece::base)
    }

    /// Writes bytes at `at`: `vmmgraph_host_buffer_write`.
    pub fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        let host = self.device.host_pool();
        loop {
            let mut users = {
                let mut used = self.used.lock();
                let change = next_change();
                let mut users = used.users()?;
                if users.done(self.device.pool().events())? {
                    // Under the lock no copy begins, and a launch reads the change number after it
                    // began.
                    host.write(self.piece()?, at, from)?;
                    used.copies = Fence::default();
                    used.stores = Fence::default();
                    used.changed = change;
                    return Ok(());
                }
                users
            };
            host.wait(&mut users)?;
        }
    }

    /// Copies `bytes` bytes of the device to offset `at`: `vmmgraph_host_buffer_store`.
    ///
    /// # Safety
    /// `bytes` bytes are mapped at `from` on the device until the copy ends.
    pub unsafe fn store(&self, at: u64, from: Address, bytes: u64, stream: Stream) -> Result<()> {
        let (host, events) = (self.device.host_pool(), self.device.pool().events());
        let piece = self.piece()?;
        if at.checked_add(bytes).is_none_or(|end| end > piece.bytes()) {
            let limit = piece.bytes().saturating_sub(at);
            return Err(Error::InvalidSize { what: "a part of host memory", bytes, limit });
        }
        if !self.registered() {
            let (requested, held) = (bytes, piece.bytes());
            return Err(Error::HostNotRegistered { requested, held, registered: 0 });
        }
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        if bytes == 0 {
            return Ok(());
        }
        let out = host.stream_out()?;
        // Under the lock no copy begins, and a launch is refused or finds this store.
        let mut used = self.used.lock();
        let change = next_change();
        let mut behind = used.readers()?;
        behind.add_mark(events.record(stream)?);
        behind.before(events, out)?;
        used.changed = change;
        let mut this = Fence::default();
        // SAFETY: the caller's promise.
        let stored = unsafe { host.store_part(from, piece, (at, bytes), &mut this) };
        if stored.is_ok() {
            // All stores are on one stream, so this one is the last.
            used.stores = this;
        } else {
            used.stores.join(this);
        }
        stored
    }

    /// Makes later work of a stream wait for submitted [stores](Self::store). Does not block.
    pub fn before(&self, stream: Stream) -> Result<()> {
        let events = self.device.pool().events();
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        let mut stores = self.used.lock().stores.clone();
        stores.before(events, stream)
    }

    /// Reads bytes at `at`, after all submitted stores. [`Error::InvalidSize`] beyond the end.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let piece = self.piece()?;
        let host = self.device.host_pool();
        loop {
            let mut stores = {
                let mut used = self.used.lock();
                if used.stores.done(self.device.pool().events())? {
                    return host.read(std::slice::from_ref(piece), at, into);
                }
                used.stores.clone()
            };
            host.wait(&mut stores)?;
        }
    }

    /// Reports contents changed without [`write`](Self::write).
    pub fn changed(&self) {
        // Two statements: an assignment would take the number before the lock.
        let mut used = self.used.lock();
        used.changed = next_change();
    }

    /// Blocks until the buffer is unused: `vmmgraph_host_buffer_wait`.
    pub fn wait(&self) -> Result<()> {
        let mut users = self.used.lock().users()?;
        self.device.host_pool().wait(&mut users)
    }

    pub(super) fn part(&self, from: u64, bytes: u64) -> Result<Part<'_>> {
        if !self.registered() {
            let (requested, held) = (bytes, self.bytes());
            return Err(Error::HostNotRegistered { requested, held, registered: 0 });
        }
        Ok(Part { piece: self.piece()?, from, bytes })
    }

    /// Adds a reader, from its next launch on.
    pub(super) fn read_by(&self, graph: &Arc<Launches>) {
        self.used.lock().graphs.push(Arc::clone(graph));
    }

    /// Removes a reader, whose submitted launches may still read.
    pub(super) fn no_longer_read_by(&self, graph: &Arc<Launches>) {
        let mut used = self.used.lock();
        if let Some(at) = used.graphs.iter().position(|known| Arc::ptr_eq(known, graph)) {
            used.graphs.swap_remove(at);
        }
        used.copies.join(graph.last());
    }

    pub(super) fn last_change(&self) -> u64 {
        self.used.lock().changed
    }

    /// Adds running stores to `stores`.
    pub(super) fn last_change_and_stores(&self, stores: &mut Fence) -> Result<u64> {
        let mut used = self.used.lock();
        if !used.stores.done(self.device.pool().events())? {
            stores.join(used.stores.clone());
        }
        Ok(used.changed)
    }

    /// Submits a copy; `done` becomes its fence, also after an error.
    pub(super) fn load(&self, place: (RangeId, u64), part: (u64, u64), done: &mut Fence) -> Result<CopyPath> {
        let (host, pool) = (self.device.host_pool(), self.device.pool());
        let mut used = self.used.lock();
        if !used.stores.done(pool.events())? {
            used.stores.before(pool.events(), host.stream_in()?)?;
        }
        let mut this = Fence::default();
        let loaded = host.load_part(pool, place, self.piece()?, part, &mut this);
        if loaded.is_ok() {
            // All copies are on one stream, so this one is the last.
            used.copies = this.clone();
            *done = this;
        } else {
            used.copies.join(this.clone());
            done.join(this);
        }
        loaded
    }

    fn piece(&self) -> Result<&HostPiece> {
        self.piece
            .as_ref()
            .ok_or_else(|| Error::Internal { what: "a host buffer lacks its memory".to_owned() })
    }
}

impl PartialEq for HostBuffer {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Drop for HostBuffer {
    fn drop(&mut self) {
        let used = self.used.get_mut();
        let mut copies = std::mem::take(&mut used.copies);
        copies.join(std::mem::take(&mut used.stores));
        self.device.host_pool().give(self.piece.take().into_iter().collect(), copies);
    }
}

impl fmt::Debug for HostBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostBuffer({:p} + {:#x}, registered: {})", self.as_ptr(), self.bytes(), self.registered())
    }
}

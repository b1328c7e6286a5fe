//! Host memory that units are copied from: whole, from the device's host pool, and known to be read or not.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::graph::Launches;
use crate::device::Device;
use crate::error::{Error, Result};
use crate::pages::{CopyPath, Fence, HostPiece, Part, RangeId};
use crate::sync::Mutex;
use crate::units::{Address, Stream};

/// Whether memory that could not be registered with the device will do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// No: it is an error. Never falls back silently.
    #[default]
    Required,
    /// Yes: where registration is refused, copies go over the host pool's ring of small registered buffers, and the caller waits for each.
    Preferred,
}

static NEXT_CHANGE: AtomicU64 = AtomicU64::new(1);

/// Numbers of changes, of contents and of sources: a later change has a larger one, in the whole process.
///
/// Taken under the lock of what changes, and by who writes host memory before he asks whether a launch that reads it is being given: so that one
/// which begins meanwhile finds it in [`changes`], or is found.
pub(super) fn next_change() -> u64 {
    NEXT_CHANGE.fetch_add(1, Ordering::Relaxed)
}

/// The next number: as long as it is the same, nothing has changed.
pub(super) fn changes() -> u64 {
    NEXT_CHANGE.load(Ordering::Relaxed)
}

#[derive(Default)]
struct Use {
    /// Behind the copies from it that were given.
    copies: Fence,
    /// Which change of the contents was the last.
    changed: u64,
    /// The captured steps that read it, each as often as a unit of it does.
    graphs: Vec<Arc<Launches>>,
    /// Behind the copies to it that were given, which are on one stream.
    stores: Fence,
}

impl Use {
    /// Behind everything that reads it.
    fn readers(&self) -> Result<Fence> {
        let mut readers = self.copies.clone();
        for (at, graph) in self.graphs.iter().enumerate() {
            if !self.graphs.iter().take(at).any(|before| Arc::ptr_eq(before, graph)) {
                readers.join(graph.over()?);
            }
        }
        Ok(readers)
    }

    /// Behind everything that reads or writes it.
    fn users(&self) -> Result<Fence> {
        let mut users = self.readers()?;
        users.join(self.stores.clone());
        Ok(users)
    }
}

/// Host memory of a device's [host pool](Device::host_pool), in one piece at one address. It keeps the device open, and goes back to the pool behind
/// the copies from it and to it.
///
/// Thread-safe. Two are equal if they are the same memory.
pub struct HostBuffer {
    piece: Option<HostPiece>,
    used: Mutex<Use>,
    device: Arc<Device>,
}

impl Device {
    /// Host memory for the sources of a ring's units. Its contents are anything.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] for nothing and for more than 1 GiB, which is what is registered with one call;
    /// [`Error::OutOfHostMemory`]; [`Error::HostNotRegistered`] with [`Pinning::Required`].
    pub fn host_buffer(self: &Arc<Self>, bytes: u64, pinning: Pinning) -> Result<Arc<HostBuffer>> {
        let piece = self.host_pool().take_whole(bytes, pinning == Pinning::Preferred)?;
        let used = Use { changed: next_change(), ..Use::default() };
        let used = Mutex::new(used);
        Ok(Arc::new(HostBuffer { piece: Some(piece), used, device: Arc::clone(self) }))
    }
}

impl HostBuffer {
    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Its bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.piece.as_ref().map_or(0, HostPiece::bytes)
    }

    /// Whether it is registered with the device.
    #[must_use]
    pub fn registered(&self) -> bool {
        self.piece.as_ref().is_some_and(HostPiece::registered)
    }

    /// Where it begins in this process. Who writes there waits for the copies from it first ([`wait`](Self::wait)), lets no ring copy meanwhile, and
    /// says so afterwards ([`changed`](Self::changed)).
    #[must_use]
    pub fn as_ptr(&self) -> *mut u8 {
        self.piece.as_ref().map_or(std::ptr::null_mut(), HostPiece::base)
    }

    /// Writes bytes, from `at` on, when the copies from it and to it that were given, and the launches of captured steps that read it, are over. What rings hold of it is
    /// out of date from then on: the next use copies it again.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] beyond the end; [`Error::WrongState`] while a captured step that reads it is being launched; what the driver says of
    /// the copies. Nothing is written then.
    pub fn write(&self, at: u64, from: &[u8]) -> Result<()> {
        let host = self.device.host_pool();
        loop {
            let mut users = {
                let mut used = self.used.lock();
                let change = next_change();
                let mut users = used.users()?;
                if users.done(self.device.pool().events())? {
                    // Under the lock: no copy begins meanwhile, and a launch asks for the last change after it has begun.
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

    /// Copies `bytes` bytes of the device to it, from `at` on: behind what `stream` was given so far, behind the copies from it and the launches of captured steps that
    /// read it, and beside whatever comes later, by the engine of the other direction. Does not block. What rings hold of it is out of date from then
    /// on, as after a [`write`](Self::write): the next use copies it again, behind this.
    ///
    /// So what a step makes goes to the host between two steps, and is a source from the next one on. Who writes those bytes of the device again does so on a
    /// stream that was put [behind](Self::before).
    ///
    /// # Errors
    /// [`Error::InvalidSize`] beyond the end; [`Error::HostNotRegistered`]; [`Error::StreamCapturing`]; [`Error::WrongState`] while a captured step that reads
    /// it is being launched; what the driver says. The contents of those bytes are the old ones then, unless it was the copy that failed.
    ///
    /// # Safety
    /// So many bytes of the device are mapped there, until this is over.
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
        // Under the lock: no copy from it begins meanwhile, and a launch that reads it is refused or finds this one.
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
            // All are on one stream: what is behind this one is behind those before.
            used.stores = this;
        } else {
            used.stores.join(this);
        }
        stored
    }

    /// Makes later work of a stream wait for the [stores](Self::store) that were given: so that what they copy may be written again. Does not block.
    ///
    /// # Errors
    /// [`Error::StreamCapturing`]; what the driver says.
    pub fn before(&self, stream: Stream) -> Result<()> {
        let events = self.device.pool().events();
        if !events.ready(stream)? {
            return Err(Error::StreamCapturing { stream: stream.raw() });
        }
        let mut stores = self.used.lock().stores.clone();
        stores.before(events, stream)
    }

    /// Reads bytes, from `at` on, when the copies to it that were given are over.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] beyond the end; what the driver says of the copies.
    pub fn read(&self, at: u64, into: &mut [u8]) -> Result<()> {
        let piece = self.piece()?;
        let host = self.device.host_pool();
        loop {
            let mut stores = {
                // Nobody writes meanwhile.
                let mut used = self.used.lock();
                if used.stores.done(self.device.pool().events())? {
                    return host.read(std::slice::from_ref(piece), at, into);
                }
                used.stores.clone()
            };
            host.wait(&mut stores)?;
        }
    }

    /// Says that the contents were changed otherwise than by [`write`](Self::write): the next use of what rings hold of it copies it again.
    pub fn changed(&self) {
        // In two steps: of an assignment the right side is first, and the number would be taken without the lock.
        let mut used = self.used.lock();
        used.changed = next_change();
    }

    /// Blocks until the copies from it and to it that were given, and the launches of captured steps that read it, are over.
    ///
    /// # Errors
    /// [`Error::WrongState`] while one is being launched; what the driver says.
    pub fn wait(&self) -> Result<()> {
        let mut users = self.used.lock().users()?;
        self.device.host_pool().wait(&mut users)
    }

    /// A part of it for a copy in a graph.
    pub(super) fn part(&self, from: u64, bytes: u64) -> Result<Part<'_>> {
        if !self.registered() {
            let (requested, held) = (bytes, self.bytes());
            return Err(Error::HostNotRegistered { requested, held, registered: 0 });
        }
        Ok(Part { piece: self.piece()?, from, bytes })
    }

    /// A unit of a captured step is copied from it, from the next launch on.
    pub(super) fn read_by(&self, graph: &Arc<Launches>) {
        self.used.lock().graphs.push(Arc::clone(graph));
    }

    /// One is not any more: the launches that were given may still do so.
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

    /// The last change, and in `stores` what is behind the copies to it that are not over.
    pub(super) fn last_change_and_stores(&self, stores: &mut Fence) -> Result<u64> {
        let mut used = self.used.lock();
        if !used.stores.done(self.device.pool().events())? {
            stores.join(used.stores.clone());
        }
        Ok(used.changed)
    }

    /// Gives the copy of a part to the stream of copies; `done` is behind it, also if it fails.
    pub(super) fn load(&self, place: (RangeId, u64), part: (u64, u64), done: &mut Fence) -> Result<CopyPath> {
        let (host, pool) = (self.device.host_pool(), self.device.pool());
        let mut used = self.used.lock();
        if !used.stores.done(pool.events())? {
            used.stores.before(pool.events(), host.stream_in()?)?;
        }
        let mut this = Fence::default();
        let loaded = host.load_part(pool, place, self.piece()?, part, &mut this);
        if loaded.is_ok() {
            // All copies are on one stream: what is behind this one is behind those before.
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

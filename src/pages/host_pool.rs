//! The host memory of a device that pages' contents wait in: kept between uses, bounded, and given out in pieces.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copier::Copier;
use super::host_memory::HostMemory;
use super::host_room::check_host_room;
use super::{Events, Fence, HostPiece, Look, PagePool, RangeId, Stretches};
use crate::driver::SharedDriver;
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, Stream, checked_bytes};

/// Bytes that are registered with one call: more at a time would keep others of the machine waiting.
pub(super) const CHUNK: u64 = 1 << 30;
/// What chunks are multiples of, in bytes.
const GRAIN: u64 = 2 << 20;
/// What a piece is a multiple of, in bytes.
pub(super) const PIECE: u64 = 4096;
/// How often memory is asked for again when others took what came.
pub(super) const TRIES: u32 = 8;
/// How long the end of the device waits for copies.
const PATIENCE: Duration = Duration::from_secs(2);

/// How bytes went between host and device. The worst of what a report covers counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CopyPath {
    /// Nothing was copied.
    #[default]
    None,
    /// From and to registered memory: at the link's speed, beside the caller.
    Registered,
    /// Registration was refused: over a ring of small registered buffers, which threads empty and fill.
    Ring,
    /// Not even those: as the driver copies pageable memory.
    Pageable,
}

/// What the host pool holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Bytes held from the operating system.
    pub held_bytes: u64,
    /// Those of them that are registered with the device.
    pub registered_bytes: u64,
    /// Bytes that no contents are in.
    pub free_bytes: u64,
    /// The most it may hold; `None`: no limit.
    pub limit_bytes: Option<u64>,
}

#[derive(Default)]
pub(super) struct State {
    /// By base.
    chunks: BTreeMap<usize, HostMemory>,
    /// What nobody has; each chunk begins at a wall.
    free: Stretches,
    /// Given back, and perhaps still copied from or to.
    waiting: Vec<(Fence, Vec<HostPiece>)>,
    held: u64,
    /// Bytes that the operating system is being asked for.
    growing: u64,
    limit: Option<u64>,
}

/// The host memory of one device for the contents of pages. Thread-safe; no lock is held while memory is mapped or registered.
pub struct HostPool {
    driver: SharedDriver,
    pub(super) events: Arc<Events>,
    copier: Copier,
    pub(super) state: Mutex<State>,
}

impl HostPool {
    /// No memory yet.
    #[must_use]
    pub fn new(pool: &PagePool) -> Self {
        let (driver, events) = (SharedDriver::clone(pool.driver()), Arc::clone(pool.events()));
        Self { copier: Copier::new(&driver, &events), driver, events, state: Mutex::default() }
    }

    /// Limits the bytes it may hold; `None`: no limit. Nothing is taken away.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.state.lock().limit = bytes;
    }

    /// What it holds now.
    #[must_use]
    pub fn stats(&self) -> HostStats {
        let state = self.state.lock();
        let registered = state.chunks.values().filter(|chunk| chunk.registered());
        HostStats {
            held_bytes: state.held,
            registered_bytes: registered.map(|chunk| chunk.bytes() as u64).sum(),
            free_bytes: state.free.bytes(),
            limit_bytes: state.limit,
        }
    }

    /// Makes sure that it holds `bytes` at least, in use or not: mapped, faulted in, and registered where that is granted. Tries
    /// again to register what was refused.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] beyond [`MAX_BYTES`](crate::units::MAX_BYTES); [`Error::OutOfHostMemory`]
    /// beyond the limit, or if the machine has less available, with nothing taken. That registration is
    /// refused is no error: the [stats](Self::stats) say how much is registered.
    pub fn prepare(&self, bytes: u64) -> Result<()> {
        checked_bytes("host memory", bytes)?;
        let held = {
            let mut state = self.state.lock();
            state.settle(&self.events);
            state.held
        };
        self.register_again();
        self.grow(bytes.saturating_sub(held))
    }

    /// Gives back to the operating system what no contents are in; the bytes.
    ///
    /// # Errors
    /// What the driver says of ending a registration; that memory is kept for another try.
    pub fn trim(&self) -> Result<u64> {
        let mut unused = {
            let mut state = self.state.lock();
            state.settle(&self.events);
            state.take_unused(|_| true)
        };
        let (mut given, mut result) = (0, Ok(()));
        while let Some(mut chunk) = unused.pop() {
            match chunk.unregister() {
                Ok(()) => {
                    given += chunk.bytes() as u64;
                    self.state.lock().held -= chunk.bytes() as u64;
                }
                Err(error) => {
                    result = result.and(Err(error));
                    self.state.lock().add(chunk);
                }
            }
        }
        result.map(|()| given)
    }

    /// Tries again to register chunks that nothing is in.
    pub(super) fn register_again(&self) {
        if !self.driver.capabilities().register_host {
            return;
        }
        let again = self.state.lock().take_unused(|chunk| !chunk.registered());
        for mut chunk in again {
            // What is refused again serves as it is.
            let _ = chunk.register();
            self.state.lock().add(chunk);
        }
    }

    /// Maps, faults in and registers `bytes` more: all of them, or none.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(super) fn grow(&self, bytes: u64) -> Result<()> {
        let more = bytes.next_multiple_of(GRAIN);
        if more == 0 {
            return Ok(());
        }
        let held = {
            let mut state = self.state.lock();
            let held = state.held + state.growing;
            if let Some(limit) = state.limit
                && held + more > limit
            {
                return Err(Error::OutOfHostMemory { requested: more, held, limit, available: None });
            }
            state.growing += more;
            held
        };
        let made = self.make_chunks(more, held);
        let mut state = self.state.lock();
        state.growing -= more;
        // The chunks that were made before one failed go back to the operating system.
        for chunk in made? {
            state.held += chunk.bytes() as u64;
            state.add(chunk);
        }
        Ok(())
    }

    /// Chunks of `bytes` together, beside `held` that there are. No lock is held.
    fn make_chunks(&self, bytes: u64, held: u64) -> Result<Vec<HostMemory>> {
        let (mut chunks, mut left) = (Vec::new(), bytes);
        while left > 0 {
            // The rest as well, so that a request that cannot be met ends before it takes memory.
            check_host_room(left, held + (bytes - left))?;
            let more = left.min(CHUNK);
            let mut made = HostMemory::new(&self.driver, more as usize)?;
            if self.driver.capabilities().register_host
                && let Err(error) = made.register()
            {
                tracing::warn!(%error, bytes = more, "host memory could not be registered: copies of it are slower");
            }
            chunks.push(made);
            left -= more;
        }
        Ok(chunks)
    }

    /// Makes sure that so many bytes are free, for as long as nobody else takes them.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(crate) fn make_room(&self, bytes: u64) -> Result<()> {
        let free = {
            let mut state = self.state.lock();
            state.settle(&self.events);
            state.free.bytes()
        };
        self.grow(bytes.saturating_sub(free))
    }

    /// Pieces of `bytes` together, one after the other.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub(crate) fn take(&self, bytes: u64) -> Result<Vec<HostPiece>> {
        for _ in 0..TRIES {
            {
                let mut state = self.state.lock();
                state.settle(&self.events);
                if let Some(pieces) = state.take(bytes) {
                    return Ok(pieces);
                }
            }
            self.make_room(bytes.next_multiple_of(PIECE))?;
        }
        let held = self.state.lock().held;
        Err(Error::OutOfHostMemory { requested: bytes, held, limit: 0, available: None })
    }

    /// Takes pieces back, to be used again behind a fence.
    pub(crate) fn give(&self, pieces: Vec<HostPiece>, mut fence: Fence) {
        if pieces.is_empty() {
            return;
        }
        let over = fence.done(&self.events).unwrap_or(false);
        let mut state = self.state.lock();
        if over {
            pieces.into_iter().for_each(|piece| state.put(piece));
        } else {
            state.waiting.push((fence, pieces));
        }
    }

    /// Copies mapped bytes of a range into pieces of the same length; `done` is behind that, also if it fails half-way.
    ///
    /// # Errors
    /// What the driver says; [`Error::Internal`] if something is not mapped.
    pub(crate) fn copy_out(
        &self,
        pool: &PagePool,
        (range, offset): (RangeId, u64),
        pieces: &[HostPiece],
        done: &mut Fence,
    ) -> Result<CopyPath> {
        let bytes = pieces.iter().map(|piece| piece.bytes as u64).sum();
        let from = pool.mapped_at(range, offset, bytes)?;
        self.copier.copy_out(from, pieces, done)
    }

    /// Copies pieces to mapped bytes of a range, behind which the next [mark](Self::mark_in) is.
    ///
    /// # Errors
    /// As [`copy_out`](Self::copy_out).
    pub(crate) fn copy_in(
        &self,
        pool: &PagePool,
        (range, offset): (RangeId, u64),
        pieces: &[HostPiece],
    ) -> Result<CopyPath> {
        let bytes = pieces.iter().map(|piece| piece.bytes as u64).sum();
        let to = pool.mapped_at(range, offset, bytes)?;
        self.copier.copy_in(to, pieces)
    }

    /// Puts `done` behind all that was given to the stream of copies to the device.
    pub(crate) fn mark_in(&self, done: &mut Fence) {
        self.copier.mark_in(done);
    }

    /// Copies bytes of the device to the host; returns when they are there. On a stream of its own: a synchronous copy is one of the legacy default
    /// stream, which breaks the capture of any stream that this waits for (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` on an H200).
    ///
    /// # Errors
    /// What the driver says.
    ///
    /// # Safety
    /// They are mapped until this returns.
    pub(crate) unsafe fn fetch(&self, from: Address, into: &mut [u8]) -> Result<()> {
        let piece = HostPiece { at: into.as_mut_ptr() as usize, bytes: into.len(), registered: false };
        self.copier.copy_out(from, &[piece], &mut Fence::default()).map(drop)
    }

    /// Copies bytes of the device into pieces; the caller knows that they are mapped.
    pub(super) fn store(&self, from: Address, pieces: &[HostPiece], done: &mut Fence) -> Result<()> {
        self.copier.copy_out(from, pieces, done).map(drop)
    }

    /// The stream that copies from the device are on.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn stream_out(&self) -> Result<Stream> {
        self.copier.stream_out()
    }

    /// The stream that copies to the device are on.
    ///
    /// # Errors
    /// What the driver says.
    pub(crate) fn stream_in(&self) -> Result<Stream> {
        self.copier.stream_in()
    }

    /// Blocks until a fence of copies is over, whatever single calls of the driver say.
    ///
    /// # Errors
    /// What the driver says, again and again.
    pub(crate) fn wait(&self, fence: &mut Fence) -> Result<()> {
        self.copier.wait(fence)
    }

    /// Copies bytes out of pieces, from `skip` bytes behind their beginning on. Nobody copies to them.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] beyond the end of the last piece; nothing is copied then.
    pub(crate) fn read(&self, pieces: &[HostPiece], skip: u64, into: &mut [u8]) -> Result<()> {
        let (bytes, all) = (into.len() as u64, pieces.iter().map(HostPiece::bytes).sum::<u64>());
        if skip.checked_add(bytes).is_none_or(|end| end > all) {
            let limit = all.saturating_sub(skip);
            return Err(Error::InvalidSize { what: "a part of host memory", bytes, limit });
        }
        super::copier::read(pieces, skip as usize, into);
        Ok(())
    }

    /// A checksum of pieces that nobody copies to.
    pub(crate) fn checksum(&self, pieces: &[HostPiece]) -> u64 {
        super::copier::checksum(pieces)
    }
}

impl State {
    fn add(&mut self, chunk: HostMemory) {
        self.free.add_wall(chunk.base() as u64);
        self.free.add(chunk.base() as u64, chunk.bytes() as u64);
        self.chunks.insert(chunk.base(), chunk);
    }

    /// Takes chunks away that nothing is in; they still count as held.
    fn take_unused(&mut self, which: impl Fn(&HostMemory) -> bool) -> Vec<HostMemory> {
        let is_free = |chunk: &&HostMemory| self.free.covers(chunk.base() as u64, chunk.bytes() as u64);
        let unused = self.chunks.values().filter(is_free);
        let bases: Vec<_> = unused.filter(|chunk| which(chunk)).map(HostMemory::base).collect();
        let mut taken = Vec::new();
        for base in bases {
            let chunk = self.chunks.remove(&base);
            chunk.iter().for_each(|chunk| self.free.cut(base as u64, chunk.bytes() as u64));
            self.free.remove_wall(base as u64);
            taken.extend(chunk);
        }
        taken
    }

    pub(super) fn chunk_of(&self, at: usize) -> Option<&HostMemory> {
        self.chunks.range(..=at).next_back().map(|(_, chunk)| chunk)
    }

    /// The beginning of the smallest stretch that all of it fits in, of such chunks.
    pub(super) fn take_in(&mut self, bytes: u64, which: impl Fn(&HostMemory) -> bool) -> Option<usize> {
        let Self { chunks, free, .. } = self;
        let chunk_of = |at: u64| chunks.range(..=at as usize).next_back();
        free.take_where(bytes, |at| chunk_of(at).is_some_and(|(_, chunk)| which(chunk))).map(|at| at as usize)
    }

    /// The smallest stretch that all of it fits in, else the longest ones.
    fn take(&mut self, bytes: u64) -> Option<Vec<HostPiece>> {
        let mut left = usize::try_from(bytes).ok()?;
        let mut pieces = Vec::new();
        while left > 0 {
            let padded = (left as u64).next_multiple_of(PIECE);
            let fitting = self.free.take(padded).map(|at| (at, padded));
            let Some((at, used)) = fitting.or_else(|| self.free.take_longest()) else {
                pieces.into_iter().for_each(|piece| self.put(piece));
                return None;
            };
            let (at, used) = (at as usize, used as usize);
            let registered = self.chunk_of(at).is_some_and(HostMemory::registered);
            let length = left.min(used);
            pieces.push(HostPiece { at, bytes: length, registered });
            left -= length;
        }
        Some(pieces)
    }

    pub(super) fn put(&mut self, piece: HostPiece) {
        self.free.add(piece.at as u64, (piece.bytes as u64).next_multiple_of(PIECE));
    }

    pub(super) fn settle(&mut self, events: &Arc<Events>) {
        let (mut done, mut look) = (Vec::new(), Look::new(events));
        self.waiting.retain_mut(|(fence, pieces)| {
            let over = fence.done_at(&mut look).unwrap_or(false);
            if over {
                done.append(pieces);
            }
            !over
        });
        done.into_iter().for_each(|piece| self.put(piece));
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        let state = self.state.get_mut();
        let start = Instant::now();
        let mut over = true;
        for (fence, _) in &mut state.waiting {
            let left = PATIENCE.saturating_sub(start.elapsed());
            // Once more, since a single refusal says nothing of the copies.
            let done = fence.block(&self.events, left).or_else(|_| fence.block(&self.events, left));
            over &= done.unwrap_or(false);
        }
        if !over {
            tracing::error!(
                "copies of a device that closes do not end; their host memory stays with the process"
            );
            std::mem::forget(std::mem::take(&mut state.chunks));
        }
    }
}

impl fmt::Debug for HostPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostPool").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

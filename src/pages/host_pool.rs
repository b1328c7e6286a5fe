//! Host pool of a device: bounded host memory for the contents of paused pages, registered with the
//! device if the driver allows. The mutex is never held while memory is mapped, registered or
//! copied.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::copier::Copier;
use super::host_memory::HostMemory;
use super::host_room::check_host_room;
use super::{Events, Fence, HostPiece, PagePool, Poll, RangeId, Stretches};
use crate::driver::SharedDriver;
use crate::error::{Error, Result};
use crate::sync::Mutex;
use crate::units::{Address, Stream, checked_bytes};

/// Limit of one registration: longer ones would block other users of the machine.
pub(super) const CHUNK: u64 = 1 << 30;
const GRAIN: u64 = 2 << 20;
pub(super) const PIECE: u64 = 4096;
/// Attempts while other threads take new memory.
pub(super) const TRIES: u32 = 8;
/// Longest wait for copies when the device closes.
const PATIENCE: Duration = Duration::from_secs(2);

/// Path of copies between host and device: a report has the slowest used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CopyPath {
    /// No copies.
    #[default]
    None,
    /// Registered host memory: link speed, asynchronous.
    Registered,
    /// Registration was refused: a ring of small registered buffers, filled and emptied by threads.
    Ring,
    /// No registered buffers either: pageable memory.
    Pageable,
}

/// Memory of the host pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostStats {
    /// Bytes allocated from the operating system.
    pub held_bytes: u64,
    /// Part of `held_bytes` registered with the device.
    pub registered_bytes: u64,
    /// Bytes without contents.
    pub free_bytes: u64,
    /// Limit in bytes. `None`: no limit.
    pub limit_bytes: Option<u64>,
}

#[derive(Default)]
pub(super) struct State {
    chunks: BTreeMap<usize, HostMemory>,
    /// Each chunk begins at a wall, so no free part spans two.
    free: Stretches,
    /// Returned pieces, possibly in use by copies.
    waiting: Vec<(Fence, Vec<HostPiece>)>,
    held: u64,
    growing: u64,
    limit: Option<u64>,
}

/// Host memory of one device for contents of pages. Thread-safe.
pub struct HostPool {
    driver: SharedDriver,
    pub(super) events: Arc<Events>,
    copier: Copier,
    pub(super) state: Mutex<State>,
}

impl HostPool {
    /// Creates a pool without memory.
    #[must_use]
    pub fn new(pool: &PagePool) -> Self {
        let (driver, events) = (SharedDriver::clone(pool.driver()), Arc::clone(pool.events()));
        Self { copier: Copier::new(&driver, &events), driver, events, state: Mutex::default() }
    }

    /// Limits the bytes of the pool. Frees nothing.
    pub fn set_limit(&self, bytes: Option<u64>) {
        self.state.lock().limit = bytes;
    }

    /// Returns the current counts.
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

    /// Grows the pool to at least `bytes`, used or free: mapped, faulted in, and registered if
    /// possible. Also retries refused registrations, which are no error.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] above [`MAX_BYTES`](crate::units::MAX_BYTES);
    /// [`Error::OutOfHostMemory`] above the limit or the machine's available memory. Nothing has
    /// changed.
    pub fn prepare(&self, bytes: u64) -> Result<()> {
        checked_bytes("host memory", bytes)?;
        let held = {
            let mut state = self.state.lock();
            state.reap(&self.events);
            state.held
        };
        self.register_again();
        self.grow(bytes.saturating_sub(held))
    }

    /// Returns chunks without contents to the operating system. Returns their bytes.
    ///
    /// # Errors
    /// Driver errors at the end of a registration; this memory is kept for a retry.
    pub fn trim(&self) -> Result<u64> {
        let mut unused = {
            let mut state = self.state.lock();
            state.reap(&self.events);
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

    pub(super) fn register_again(&self) {
        if !self.driver.capabilities().register_host {
            return;
        }
        let again = self.state.lock().take_unused(|chunk| !chunk.registered());
        for mut chunk in again {
            let _ = chunk.register();
            self.state.lock().add(chunk);
        }
    }

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
        // After a failure, the chunks made return to the operating system.
        for chunk in made? {
            state.held += chunk.bytes() as u64;
            state.add(chunk);
        }
        Ok(())
    }

    /// Makes chunks in addition to `held` bytes. The caller has no lock.
    fn make_chunks(&self, bytes: u64, held: u64) -> Result<Vec<HostMemory>> {
        let (mut chunks, mut left) = (Vec::new(), bytes);
        while left > 0 {
            // All remaining bytes, so an impossible request takes no memory.
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

    /// Makes `bytes` free; other threads may take this memory.
    pub(crate) fn make_room(&self, bytes: u64) -> Result<()> {
        let free = {
            let mut state = self.state.lock();
            state.reap(&self.events);
            state.free.bytes()
        };
        self.grow(bytes.saturating_sub(free))
    }

    pub(crate) fn take(&self, bytes: u64) -> Result<Vec<HostPiece>> {
        for _ in 0..TRIES {
            {
                let mut state = self.state.lock();
                state.reap(&self.events);
                if let Some(pieces) = state.take(bytes) {
                    return Ok(pieces);
                }
            }
            self.make_room(bytes.next_multiple_of(PIECE))?;
        }
        let held = self.state.lock().held;
        Err(Error::OutOfHostMemory { requested: bytes, held, limit: 0, available: None })
    }

    /// Returns pieces, for reuse after a fence.
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

    /// Copies mapped bytes of a range into pieces of the same length. Adds the copies to `done`,
    /// also after a partial failure. Fails if a byte is unmapped.
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

    /// The next [`mark_in`](Self::mark_in) includes these copies.
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

    pub(crate) fn mark_in(&self, done: &mut Fence) {
        self.copier.mark_in(done);
    }

    /// Copies device bytes to the host and waits, on its own stream: a synchronous copy would break
    /// captures ordered with the legacy default stream (`CUDA_ERROR_STREAM_CAPTURE_IMPLICIT` on an
    /// H200).
    ///
    /// # Safety
    /// The bytes are mapped until the return.
    pub(crate) unsafe fn fetch(&self, from: Address, into: &mut [u8]) -> Result<()> {
        let piece = HostPiece { at: into.as_mut_ptr() as usize, bytes: into.len(), registered: false };
        self.copier.copy_out(from, &[piece], &mut Fence::default()).map(drop)
    }

    /// The caller has checked the mapping.
    pub(super) fn store(&self, from: Address, pieces: &[HostPiece], done: &mut Fence) -> Result<()> {
        self.copier.copy_out(from, pieces, done).map(drop)
    }

    pub(crate) fn stream_out(&self) -> Result<Stream> {
        self.copier.stream_out()
    }

    pub(crate) fn stream_in(&self) -> Result<Stream> {
        self.copier.stream_in()
    }

    /// Repeats waits refused by the driver.
    pub(crate) fn wait(&self, fence: &mut Fence) -> Result<()> {
        self.copier.wait(fence)
    }

    /// Reads bytes from `skip` on. No copy writes the pieces.
    pub(crate) fn read(&self, pieces: &[HostPiece], skip: u64, into: &mut [u8]) -> Result<()> {
        let (bytes, all) = (into.len() as u64, pieces.iter().map(HostPiece::bytes).sum::<u64>());
        if skip.checked_add(bytes).is_none_or(|end| end > all) {
            let limit = all.saturating_sub(skip);
            return Err(Error::InvalidSize { what: "a part of host memory", bytes, limit });
        }
        super::copier::read(pieces, skip as usize, into);
        Ok(())
    }

    /// No copy writes the pieces.
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

    /// Removes empty chunks, which still count as held.
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

    /// Takes the smallest fitting free part, in chunks accepted by `which`. Returns the address.
    pub(super) fn take_in(&mut self, bytes: u64, which: impl Fn(&HostMemory) -> bool) -> Option<usize> {
        let Self { chunks, free, .. } = self;
        let chunk_of = |at: u64| chunks.range(..=at as usize).next_back();
        free.take_where(bytes, |at| chunk_of(at).is_some_and(|(_, chunk)| which(chunk))).map(|at| at as usize)
    }

    /// Takes the smallest fitting free part, else the longest parts.
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

    pub(super) fn reap(&mut self, events: &Arc<Events>) {
        let (mut done, mut poll) = (Vec::new(), Poll::new(events));
        self.waiting.retain_mut(|(fence, pieces)| {
            let over = fence.done_at(&mut poll).unwrap_or(false);
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
            // Twice, since one refusal says nothing about the copies.
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

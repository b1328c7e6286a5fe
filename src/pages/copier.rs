//! Copies between device and host: one stream for each direction, and a ring of registered buffers
//! for unregistered host memory. The ring's mutex is held for a whole copy.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::host_memory::{HostMemory, copy_bytes};
use super::host_pool::CopyPath;
use super::waits::Wait;
use super::{Events, Fence, HostPiece};
use crate::driver::SharedDriver;
use crate::error::Result;
use crate::sync::Mutex;
use crate::units::{Address, Stream};

/// Long compared to the cost of starting a copy, short enough for the CPU caches.
const BUFFER: usize = 16 << 20;
const BUFFERS: usize = 4;
/// Attempts before a driver error is final.
const TRIES: u32 = 8;

pub(super) struct Copier {
    driver: SharedDriver,
    events: Arc<Events>,
    /// From the device, to the device.
    streams: Mutex<[Option<Stream>; 2]>,
    ring: Mutex<Ring>,
}

#[derive(Default)]
enum Ring {
    #[default]
    Untried,
    Refused,
    Made(Vec<HostMemory>),
}

struct Part {
    done: Fence,
    buffer: usize,
    host: usize,
    bytes: usize,
}

impl Copier {
    pub(super) fn new(driver: &SharedDriver, events: &Arc<Events>) -> Self {
        let (driver, events) = (SharedDriver::clone(driver), Arc::clone(events));
        Self { driver, events, streams: Mutex::default(), ring: Mutex::default() }
    }

    fn stream(&self, direction: usize) -> Result<Stream> {
        let mut streams = self.streams.lock();
        match streams[direction] {
            Some(stream) => Ok(stream),
            None => Ok(*streams[direction].insert(self.driver.stream_create()?)),
        }
    }

    pub(super) fn stream_out(&self) -> Result<Stream> {
        self.stream(0)
    }

    pub(super) fn stream_in(&self) -> Result<Stream> {
        self.stream(1)
    }

    pub(super) fn wait(&self, fence: &mut Fence) -> Result<()> {
        let _goes_on = Wait::begin(&self.driver);
        let mut tries = 0;
        loop {
            tries += 1;
            match fence.block(&self.events, Duration::MAX) {
                Err(_) if tries < TRIES => std::thread::yield_now(),
                result => return result.map(drop),
            }
        }
    }

    /// The caller has checked the mapping. Refused if the platform forbids waits now, as a copy
    /// needs a later wait.
    pub(super) fn copy_out(&self, from: Address, pieces: &[HostPiece], done: &mut Fence) -> Result<CopyPath> {
        self.driver.may_wait()?;
        let stream = self.stream(0)?;
        let mut from = from;
        let copied = pieces.iter().try_fold(CopyPath::None, |worst, piece| {
            let path = if piece.registered {
                // SAFETY: mapped, checked by the caller, who owns the piece until `done`.
                unsafe { self.driver.copy_to_host(from, piece.at as *mut u8, piece.bytes, stream) }?;
                CopyPath::Registered
            } else {
                self.through_ring(from, piece, stream, true)?
            };
            from = from.plus(piece.bytes as u64);
            Ok(worst.max(path))
        });
        done.add(&self.events, stream);
        copied
    }

    /// The next [`mark_in`](Self::mark_in) includes the copies. Refused as
    /// [`copy_out`](Self::copy_out).
    pub(super) fn copy_in(&self, to: Address, pieces: &[HostPiece]) -> Result<CopyPath> {
        self.driver.may_wait()?;
        let stream = self.stream(1)?;
        let mut to = to;
        pieces.iter().try_fold(CopyPath::None, |worst, piece| {
            let path = if piece.registered {
                // SAFETY: as in `copy_out`, until the mark.
                unsafe { self.driver.copy_from_host(to, piece.at as *const u8, piece.bytes, stream) }?;
                CopyPath::Registered
            } else {
                self.through_ring(to, piece, stream, false)?
            };
            to = to.plus(piece.bytes as u64);
            Ok(worst.max(path))
        })
    }

    pub(super) fn mark_in(&self, done: &mut Fence) {
        let stream = self.streams.lock()[1];
        if let Some(stream) = stream {
            done.add(&self.events, stream);
        }
    }

    /// Waits for the copy.
    fn through_ring(
        &self,
        device: Address,
        piece: &HostPiece,
        stream: Stream,
        out: bool,
    ) -> Result<CopyPath> {
        let mut ring = self.ring.lock();
        if matches!(*ring, Ring::Untried) {
            *ring = self.make_ring();
        }
        let Ring::Made(buffers) = &mut *ring else {
            let mut done = Fence::default();
            // SAFETY: mapped, checked by the caller, who owns the piece; waited for below.
            let copied = unsafe {
                if out {
                    self.driver.copy_to_host(device, piece.at as *mut u8, piece.bytes, stream)
                } else {
                    self.driver.copy_from_host(device, piece.at as *const u8, piece.bytes, stream)
                }
            };
            done.add(&self.events, stream);
            return self.wait(&mut done).and(copied).map(|()| CopyPath::Pageable);
        };
        let mut under_way: VecDeque<Part> = VecDeque::new();
        let mut result = Ok(());
        for (number, start) in (0..piece.bytes).step_by(BUFFER).enumerate() {
            if under_way.len() == buffers.len()
                && let Some(part) = under_way.pop_front()
            {
                result = result.and(self.finish(part, out));
            }
            if result.is_err() {
                break;
            }
            let (buffer, bytes) = (buffers[number % buffers.len()].base(), BUFFER.min(piece.bytes - start));
            let (host, at) = (piece.at + start, device.plus(start as u64));
            // SAFETY: mapped, checked by the caller; the previous part in the buffer is done.
            result = unsafe {
                if out {
                    self.driver.copy_to_host(at, buffer as *mut u8, bytes, stream)
                } else {
                    copy_bytes(host, buffer, bytes);
                    self.driver.copy_from_host(at, buffer as *const u8, bytes, stream)
                }
            };
            let mut done = Fence::default();
            done.add(&self.events, stream);
            under_way.push_back(Part { done, buffer, host, bytes });
        }
        // Also after a failure: the buffers are reused.
        for part in under_way {
            result = self.finish(part, out).and(result);
        }
        result.map(|()| CopyPath::Ring)
    }

    fn finish(&self, mut part: Part, out: bool) -> Result<()> {
        self.wait(&mut part.done)?;
        if out {
            // SAFETY: the device has written the buffer; the caller owns the piece.
            unsafe { copy_bytes(part.buffer, part.host, part.bytes) };
        }
        Ok(())
    }

    fn make_ring(&self) -> Ring {
        let mut buffers = Vec::new();
        while buffers.len() < BUFFERS && self.driver.capabilities().register_host {
            let made = HostMemory::new(&self.driver, BUFFER);
            let registered = made.and_then(|mut buffer| buffer.register().map(|()| buffer));
            match registered {
                Ok(buffer) => buffers.push(buffer),
                Err(error) => {
                    tracing::debug!(%error, buffers = buffers.len(), "no more buffers for the ring");
                    break;
                }
            }
        }
        if buffers.is_empty() { Ring::Refused } else { Ring::Made(buffers) }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        for stream in self.streams.get_mut().iter_mut().filter_map(Option::take) {
            // SAFETY: a stream of this object, without users.
            let destroyed = (0..TRIES).any(|_| unsafe { self.driver.stream_destroy(stream) }.is_ok());
            if !destroyed {
                tracing::warn!("the driver would not destroy a stream");
            }
        }
    }
}

impl fmt::Debug for Copier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Copier").finish_non_exhaustive()
    }
}

fn slices(pieces: &[HostPiece]) -> impl Iterator<Item = &[u8]> {
    // SAFETY: pool memory, alive while a piece exists; no copy to it runs.
    pieces.iter().map(|piece| unsafe { std::slice::from_raw_parts(piece.at as *const u8, piece.bytes) })
}

pub(super) fn read(pieces: &[HostPiece], mut skip: usize, mut into: &mut [u8]) {
    for bytes in slices(pieces) {
        let from = skip.min(bytes.len());
        let take = (bytes.len() - from).min(into.len());
        let (now, later) = std::mem::take(&mut into).split_at_mut(take);
        now.copy_from_slice(&bytes[from..from + take]);
        (into, skip) = (later, skip - from);
    }
}

/// The lengths are equal.
pub(super) fn write(piece: &HostPiece, from: &[u8]) {
    let bytes = piece.bytes.min(from.len());
    // SAFETY: live pool memory, read by no copy; `copy` permits overlap.
    unsafe { std::ptr::copy(from.as_ptr(), piece.at as *mut u8, bytes) };
}

/// A sum of eight-byte words which depends on every byte and its position.
pub(super) fn checksum(pieces: &[HostPiece]) -> u64 {
    const PRIME: u64 = 0x517c_c1b7_2722_0a95;
    let mut sum = 0_u64;
    let mut mix = |word: u64| sum = (sum.rotate_left(5) ^ word).wrapping_mul(PRIME);
    for bytes in slices(pieces) {
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| mix(u64::from_le_bytes(*word)));
        rest.iter().for_each(|byte| mix(u64::from(*byte)));
    }
    sum
}

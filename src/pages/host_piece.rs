use super::host_memory::HostMemory;
use super::host_pool::{CHUNK, CopyPath, HostPool, HostStats, PIECE, State, TRIES};
use super::{Fence, PagePool, RangeId};
use crate::error::{Error, Result};
use crate::units::Address;

/// A piece of the pool's memory, which its owner must return to the pool.
#[derive(Debug)]
pub struct HostPiece {
    pub(super) at: usize,
    pub(super) bytes: usize,
    pub(super) registered: bool,
}

impl HostPiece {
    pub(crate) fn base(&self) -> *mut u8 {
        self.at as *mut u8
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    pub(crate) fn registered(&self) -> bool {
        self.registered
    }

    /// A part is not returned to the pool.
    fn part(&self, skip: u64, bytes: u64) -> Result<Self> {
        if skip.checked_add(bytes).is_none_or(|end| end > self.bytes as u64) {
            let limit = (self.bytes as u64).saturating_sub(skip);
            return Err(Error::InvalidSize { what: "a part of host memory", bytes, limit });
        }
        Ok(Self { at: self.at + skip as usize, bytes: bytes as usize, registered: self.registered })
    }
}

impl HostPool {
    /// Takes one registered piece of `bytes`. Retries the registration of unregistered memory, and
    /// grows the pool only if no free part is long enough.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare); [`Error::InvalidSize`] for zero bytes, or more than one
    /// registration call allows; [`Error::HostNotRegistered`], unless `any` memory is accepted.
    pub(crate) fn take_whole(&self, bytes: u64, any: bool) -> Result<HostPiece> {
        if bytes == 0 || bytes > CHUNK {
            return Err(Error::InvalidSize { what: "a host buffer", bytes, limit: CHUNK });
        }
        for _ in 0..TRIES {
            for again in [true, false] {
                {
                    let mut state = self.state.lock();
                    state.reap(&self.events);
                    if let Some(piece) = state.take_whole(bytes, |chunk| chunk.registered()) {
                        return Ok(piece);
                    }
                }
                if again {
                    self.register_again();
                }
            }
            {
                let mut state = self.state.lock();
                if let Some(piece) = state.take_whole(bytes, |_| true) {
                    if any {
                        return Ok(piece);
                    }
                    state.put(piece);
                    drop(state);
                    let HostStats { held_bytes: held, registered_bytes: registered, .. } = self.stats();
                    return Err(Error::HostNotRegistered { requested: bytes, held, registered });
                }
            }
            self.grow(bytes)?;
        }
        let held = self.stats().held_bytes;
        Err(Error::OutOfHostMemory { requested: bytes, held, limit: 0, available: None })
    }

    /// Copies a part of a piece as [`copy_in`](Self::copy_in). Adds the copy to `done`, also after
    /// a partial failure.
    pub(crate) fn load_part(
        &self,
        pool: &PagePool,
        place: (RangeId, u64),
        piece: &HostPiece,
        (skip, bytes): (u64, u64),
        done: &mut Fence,
    ) -> Result<CopyPath> {
        let copied = self.copy_in(pool, place, &[piece.part(skip, bytes)?]);
        self.mark_in(done);
        copied
    }

    /// Copies to a part of a registered piece as [`copy_out`](Self::copy_out).
    ///
    /// # Safety
    /// The bytes are mapped at `from` until `done`.
    pub(crate) unsafe fn store_part(
        &self,
        from: Address,
        piece: &HostPiece,
        (skip, bytes): (u64, u64),
        done: &mut Fence,
    ) -> Result<()> {
        let part = piece.part(skip, bytes)?;
        if !part.registered {
            let (held, registered) = (piece.bytes as u64, 0);
            return Err(Error::HostNotRegistered { requested: bytes, held, registered });
        }
        self.store(from, &[part], done)
    }

    /// No copy reads the piece.
    pub(crate) fn write(&self, piece: &HostPiece, skip: u64, from: &[u8]) -> Result<()> {
        super::copier::write(&piece.part(skip, from.len() as u64)?, from);
        Ok(())
    }
}

impl State {
    /// Takes the smallest fitting free part, in chunks accepted by `which`.
    fn take_whole(&mut self, bytes: u64, which: impl Fn(&HostMemory) -> bool) -> Option<HostPiece> {
        let at = self.take_in(bytes.next_multiple_of(PIECE), which)?;
        let registered = self.chunk_of(at).is_some_and(HostMemory::registered);
        Some(HostPiece { at, bytes: bytes as usize, registered })
    }
}

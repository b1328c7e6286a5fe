//! Pages of other processes: imported, mapped as one span of addresses, and closed again. They are no pages of the pool: they take nothing of the
//! device's memory here, count toward no budget, and are given to nobody.
//!
//! What cannot go yet, because the device may still use it or the driver would not take it back, is plain data on the pool's list, as everything else
//! that waits (`deferred.rs`).

use std::os::fd::BorrowedFd;

use slotmap::SlotMap;

use super::{Fence, PagePool};
use crate::driver::{FabricHandle, PageHandle, Whole};
use crate::error::{Error, Result};
use crate::units::{Address, Peers};

slotmap::new_key_type! {
    /// A page of another process.
    pub(crate) struct PeerId;
}

#[derive(Debug)]
struct PeerPage {
    handle: PageHandle,
    bytes: u64,
    /// Whoever has it here: its importer and every span. 0: the driver would not take it back.
    users: u32,
}

/// Addresses at which pages of other processes show.
#[derive(Debug)]
pub(crate) struct PeerSpan {
    base: Address,
    bytes: u64,
    /// Where which page is mapped; from the end on those that are still to be unmapped.
    mapped: Vec<(u64, PeerId, u64)>,
}

impl PeerSpan {
    /// Its first address.
    pub(crate) fn base(&self) -> Address {
        self.base
    }
}

/// What a device has of other processes.
#[derive(Debug, Default)]
pub(super) struct PeerPages {
    pages: SlotMap<PeerId, PeerPage>,
    waiting: Vec<(Fence, PeerSpan)>,
}

impl PeerPages {
    /// Whether nothing is left.
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.waiting.is_empty()
    }

    /// What is waited for.
    pub(super) fn fences(&self) -> impl Iterator<Item = Fence> {
        self.waiting.iter().map(|(fence, _)| fence.clone())
    }

    /// What waits for a fence, or was refused.
    pub(super) fn pending(&self) -> usize {
        self.waiting.len() + self.pages.values().filter(|page| page.users == 0).count()
    }
}

fn closed() -> Error {
    Error::Internal { what: "a page of another process is gone".to_owned() }
}

impl PagePool {
    /// Imports a page of another process, for one user.
    ///
    /// # Errors
    /// [`Error::WrongState`] if the device was opened without; what the driver says.
    pub(crate) fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<PeerId> {
        let handle = self.sharing()?.import(fd, bytes)?;
        Ok(self.lock().foreign.pages.insert(PeerPage { handle, bytes, users: 1 }))
    }

    /// As [`import`](Self::import), by a handle of the fabric.
    ///
    /// # Errors
    /// As [`import`](Self::import), and without the fabric.
    pub(crate) fn import_fabric(&self, handle: &FabricHandle, bytes: u64) -> Result<PeerId> {
        let handle = self.sharing()?.import_fabric(handle, bytes)?;
        Ok(self.lock().foreign.pages.insert(PeerPage { handle, bytes, users: 1 }))
    }

    /// One user of a page of another process goes; behind the last it is closed.
    pub(crate) fn close_peer(&self, id: PeerId) {
        let page = {
            let pages = &mut self.lock().foreign.pages;
            let Some(page) = pages.get_mut(id) else { return };
            page.users = page.users.saturating_sub(1);
            if page.users > 0 {
                return;
            }
            let Some(page) = pages.remove(id) else { return };
            page
        };
        // SAFETY: nobody has it any more; it is off the list, so nobody else releases it.
        if let Err(error) = unsafe { self.driver().release(page.handle) } {
            tracing::warn!(%error, "the driver did not take a peer's page back; kept for another try");
            self.lock().foreign.pages.insert(page);
        }
    }

    /// Maps pages of other processes, one behind the other, whole.
    ///
    /// # Errors
    /// What the driver says; nothing is mapped then.
    pub(crate) fn map_peers(&self, pages: &[PeerId]) -> Result<PeerSpan> {
        let mut wholes = Vec::with_capacity(pages.len());
        {
            let known = &mut self.lock().foreign.pages;
            for id in pages {
                let page = known.get(*id).ok_or_else(closed)?;
                wholes.push(Whole { page: page.handle, bytes: page.bytes });
            }
            for id in pages {
                if let Some(page) = known.get_mut(*id) {
                    page.users += 1;
                }
            }
        }
        let bytes = wholes.iter().map(|whole| whole.bytes).sum();
        let base = match self.driver().reserve(bytes) {
            Ok(base) => base,
            Err(error) => {
                pages.iter().for_each(|id| self.close_peer(*id));
                return Err(error);
            }
        };
        // SAFETY: addresses just reserved, and pages that stay as long as they have users.
        let mapped = unsafe { self.driver().map(base, &wholes, Peers::NONE) };
        let there = mapped.as_ref().map_or_else(|not| not.mapped, |()| pages.len());
        let mut span = PeerSpan { base, bytes, mapped: Vec::with_capacity(there) };
        let mut at = 0;
        for (id, whole) in pages.iter().zip(&wholes).take(there) {
            span.mapped.push((at, *id, whole.bytes));
            at += whole.bytes;
        }
        match mapped {
            Ok(()) => Ok(span),
            Err(not) => {
                pages[there..].iter().for_each(|id| self.close_peer(*id));
                self.finish_peers(Fence::default(), span);
                Err(not.error)
            }
        }
    }

    /// Takes a span down behind a fence: at once if that is over, else as what waits in the pool.
    pub(crate) fn finish_peers(&self, mut fence: Fence, mut span: PeerSpan) {
        if fence.done(self.events()).unwrap_or(false) && self.tear_down_span(&mut span) {
            return;
        }
        self.lock().foreign.waiting.push((fence, span));
    }

    /// Whether all of it is gone; what is not is still in it.
    fn tear_down_span(&self, span: &mut PeerSpan) -> bool {
        while let Some((at, id, bytes)) = span.mapped.last().copied() {
            // SAFETY: one whole mapping of the span, which nobody uses behind its fence.
            if let Err(error) = unsafe { self.driver().unmap(span.base.plus(at), bytes) } {
                tracing::warn!(%error, "the driver did not unmap a peer's page; kept for another try");
                return false;
            }
            span.mapped.pop();
            self.close_peer(id);
        }
        // SAFETY: our reservation, in which nothing is mapped any more.
        match unsafe { self.driver().free_addresses(span.base, span.bytes) } {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the driver did not take a span back; kept for another try");
                false
            }
        }
    }

    /// Takes down what waits for a fence that is over, and tries again what was refused.
    pub(super) fn finish_peers_done(&self) {
        let (waiting, refused) = {
            let peers = &mut self.lock().foreign;
            if peers.is_empty() {
                return;
            }
            let refused = peers.pages.iter().filter(|(_, page)| page.users == 0).map(|(id, _)| id);
            let refused: Vec<PeerId> = refused.collect();
            (std::mem::take(&mut peers.waiting), refused)
        };
        refused.into_iter().for_each(|id| self.close_peer(id));
        waiting.into_iter().for_each(|(fence, span)| self.finish_peers(fence, span));
    }
}

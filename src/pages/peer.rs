//! Imported pages of other processes, mapped in spans of addresses. They are not pages of the pool:
//! no budget, no owner. Pending spans and refused pages are retried as in `pending_unmaps.rs`.

use std::os::fd::BorrowedFd;

use slotmap::SlotMap;

use super::{Fence, PagePool};
use crate::driver::{FabricHandle, PageHandle, Whole};
use crate::error::{Error, Result};
use crate::units::{Address, Peers};

slotmap::new_key_type! {
    pub(crate) struct PeerId;
}

#[derive(Debug)]
struct PeerPage {
    handle: PageHandle,
    bytes: u64,
    /// The importer and each span. 0: the driver refused the release.
    users: u32,
}

#[derive(Debug)]
pub(crate) struct PeerSpan {
    base: Address,
    bytes: u64,
    /// Offset, page and bytes. Unmapping removes entries from the end.
    mapped: Vec<(u64, PeerId, u64)>,
}

impl PeerSpan {
    pub(crate) fn base(&self) -> Address {
        self.base
    }
}

#[derive(Debug, Default)]
pub(super) struct PeerPages {
    pages: SlotMap<PeerId, PeerPage>,
    waiting: Vec<(Fence, PeerSpan)>,
}

impl PeerPages {
    pub(super) fn is_empty(&self) -> bool {
        self.pages.is_empty() && self.waiting.is_empty()
    }

    pub(super) fn fences(&self) -> impl Iterator<Item = Fence> {
        self.waiting.iter().map(|(fence, _)| fence.clone())
    }

    pub(super) fn pending(&self) -> usize {
        self.waiting.len() + self.pages.values().filter(|page| page.users == 0).count()
    }
}

fn closed() -> Error {
    Error::Internal { what: "a page of another process is gone".to_owned() }
}

impl PagePool {
    /// Imports a page with one user. Fails if the device was opened without sharing.
    pub(crate) fn import(&self, fd: BorrowedFd<'_>, bytes: u64) -> Result<PeerId> {
        let handle = self.sharing()?.import(fd, bytes)?;
        Ok(self.lock().foreign.pages.insert(PeerPage { handle, bytes, users: 1 }))
    }

    /// Imports from a fabric handle, as [`import`](Self::import).
    pub(crate) fn import_fabric(&self, handle: &FabricHandle, bytes: u64) -> Result<PeerId> {
        let handle = self.sharing()?.import_fabric(handle, bytes)?;
        Ok(self.lock().foreign.pages.insert(PeerPage { handle, bytes, users: 1 }))
    }

    /// Removes a user. After the last, the page is released.
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
        // SAFETY: without users and removed from the table: released once.
        if let Err(error) = unsafe { self.driver().release(page.handle) } {
            tracing::warn!(%error, "the driver did not take a peer's page back; kept for another try");
            self.lock().foreign.pages.insert(page);
        }
    }

    /// Maps whole pages one after the other at new addresses, or none.
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
        // SAFETY: new addresses, and pages kept by their users.
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

    /// Tears a span down after a fence: at once if done, else in a later call.
    pub(crate) fn finish_peers(&self, mut fence: Fence, mut span: PeerSpan) {
        if fence.done(self.events()).unwrap_or(false) && self.tear_down_span(&mut span) {
            return;
        }
        self.lock().foreign.waiting.push((fence, span));
    }

    /// Returns false if the driver refused; the rest stays in the span.
    fn tear_down_span(&self, span: &mut PeerSpan) -> bool {
        while let Some((at, id, bytes)) = span.mapped.last().copied() {
            // SAFETY: one whole mapping of the span, unused after its fence.
            if let Err(error) = unsafe { self.driver().unmap(span.base.plus(at), bytes) } {
                tracing::warn!(%error, "the driver did not unmap a peer's page; kept for another try");
                return false;
            }
            span.mapped.pop();
            self.close_peer(id);
        }
        // SAFETY: a reservation of this object without mappings.
        match unsafe { self.driver().free_addresses(span.base, span.bytes) } {
            Ok(()) => true,
            Err(error) => {
                tracing::warn!(%error, "the driver did not take a span back; kept for another try");
                false
            }
        }
    }

    pub(super) fn reap_peers(&self) {
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

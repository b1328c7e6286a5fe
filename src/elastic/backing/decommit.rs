//! Decommit: pages without backed blocks wait for their fence. The next call after the fence
//! notifies observers and unmaps the pages.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::super::planes::{Place, Run};
use super::super::table::Table;
use super::Backing;
use crate::error::Result;
use crate::pages::{AccountId, Fence, LentPlace, PendingUnmap, Reclaimer};
use crate::units::Stream;

/// Wait of one reclaim for fences of decommitted pages.
const PATIENCE: Duration = Duration::from_secs(2);

impl Backing {
    /// Returns the bytes of decommitted pages. Waits for pages being moved, not for the fence.
    pub(in super::super) fn decommit(&self, blocks: &Range<u64>, fence: &Fence) -> Result<u64> {
        let pages = self.when_not(|table| table.is_moving(blocks), |table| table.release(blocks, fence))?;
        self.reap();
        Ok(pages * self.page())
    }

    /// Does not wait: no thread moves pages of backed blocks. During a commit, its thread unmaps
    /// the pages, as the driver may be slow.
    pub(in super::super) fn release<R>(&self, release: impl FnOnce(&mut Table) -> R) -> R {
        let (released, left) = self.read(|table| (release(table), table.leave_to_commit()));
        if !left {
            self.reap();
        }
        released
    }

    /// Releases blocks on leased pages. Returns the bytes of pages without backed blocks, including
    /// pages which had none before; no block is backed there again before the unmap.
    pub(in super::super) fn give_back(
        &self,
        places: &[Place],
        blocks: &[Range<u64>],
        fence: &Fence,
    ) -> Result<u64> {
        let comes = |table: &Table| table.blocks_on(places).iter().any(|blocks| table.is_coming(blocks));
        let pages = self.when_not(comes, |table| table.give_back(places, blocks, fence))?;
        self.reap();
        Ok(pages * self.page())
    }

    pub(in super::super) fn places(&self, lent: &[LentPlace]) -> Vec<Place> {
        let number = |id| self.ranges.iter().position(|range| range.id() == id);
        lent.iter().filter_map(|(id, offset)| Some((number(*id)?, offset / self.page()))).collect()
    }

    /// Unmaps decommitted pages with finished fences and returns the bytes.
    pub(in super::super) fn reap(&self) -> u64 {
        let events = self.device.pool().events();
        let going = self.read(|table| table.take_done(events));
        if going.is_empty() {
            return 0;
        }
        let unmapping = Unmapping { backing: self, runs: going };
        self.notify(&unmapping.runs, true);
        for run in &unmapping.runs {
            if let Ok(range) = self.range(run.range) {
                let mut pending = PendingUnmap::default();
                pending.add_part(range.id(), run.first * self.page(), run.pages() * self.page());
                // Not as a pending unmap: a page that stays may be committed again before the
                // retry.
                self.device.pool().unmap_now(pending);
            }
        }
        unmapping.end() * self.page()
    }

    /// Makes a stream wait for previous users of committed pages.
    pub(in super::super) fn before(&self, stream: Stream) -> Result<()> {
        let mut earlier = self.read(|table| table.earlier());
        earlier.before(self.device.pool().events(), stream)
    }
}

/// Pages being unmapped: at its end, also after a panic, the table equals the mappings.
struct Unmapping<'a> {
    backing: &'a Backing,
    runs: Vec<Run>,
}

impl Unmapping<'_> {
    fn end(mut self) -> u64 {
        self.note()
    }

    fn note(&mut self) -> u64 {
        let (backing, runs) = (self.backing, std::mem::take(&mut self.runs));
        backing.table.change(|table| table.unmapped(&runs, |place| backing.is_mapped(place)))
    }
}

impl Drop for Unmapping<'_> {
    fn drop(&mut self) {
        self.note();
    }
}

impl Reclaimer for Backing {
    /// Unmaps decommitted pages, and waits for their fences if necessary.
    fn reclaim(&self, bytes: u64) -> u64 {
        let mut given = self.reap();
        if given < bytes {
            let start = Instant::now();
            for mut fence in self.read(|table| table.fences()) {
                let _ = fence.block(self.device.pool().events(), PATIENCE.saturating_sub(start.elapsed()));
            }
            given += self.reap();
        }
        given
    }

    fn account(&self) -> Option<AccountId> {
        Some(self.account.id())
    }

    fn cost(&self) -> u64 {
        0
    }
}

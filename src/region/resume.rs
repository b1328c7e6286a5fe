//! Resume of one region: takes pages, maps the old addresses, then copies the contents.
//!
//! The host contents are kept until the resume has succeeded.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::block_table::Phase;
use super::pause_section::PauseGuard;
use super::{Policy, Region};
use crate::error::Result;
use crate::pages::{Fence, HostCopy, PageId, PagePool, RangeId, ResumeReport, Resuming, Transaction};
use crate::units::Address;

struct Place {
    range: RangeId,
    offset: u64,
    bytes: u64,
    policy: Policy,
    page: Option<PageId>,
    copy: Option<HostCopy>,
}

/// A running resume; owns the region's exclusive section.
struct RegionResume<'a> {
    region: &'a Region,
    places: BTreeMap<u64, Place>,
    contents: Fence,
    finished: bool,
    /// Last field: the section is left after the tables are updated.
    guard: PauseGuard<'a>,
}

impl Region {
    /// Begins a resume. `None`: not paused.
    pub(super) fn begin_resume(&self) -> Result<Option<Box<dyn Resuming + '_>>> {
        let mut guard = self.enter_pause_section()?;
        let mut table = self.table.lock();
        if table.phase != Phase::Paused {
            drop(table);
            return Ok(None);
        }
        guard.back = Some(Phase::Paused);
        table.phase = Phase::Resuming;
        if !self.options.verify_clean {
            // Checksums compared by `verify_clean` need the original pages.
            table.join_places(|bytes, held| self.sizes.join(bytes, held));
        }
        let gone = table.extents.iter_mut().filter(|(_, extent)| extent.page.is_none());
        let places = gone.map(|(at, extent)| {
            let (range, offset, bytes, policy) = (extent.range, extent.offset, extent.bytes, extent.policy);
            (*at, Place { range, offset, bytes, policy, page: None, copy: extent.copy.take() })
        });
        let places = places.collect();
        drop(table);
        Ok(Some(Box::new(RegionResume {
            region: self,
            places,
            contents: Fence::default(),
            finished: false,
            guard,
        })))
    }
}

impl Place {
    fn filled(&self) -> bool {
        self.copy.is_some() || self.policy == Policy::Zero
    }
}

/// Unmaps leftovers of an earlier resume whose undo failed.
fn clear(pool: &Arc<PagePool>, place: &Place) -> Result<()> {
    if pool.mapped_in(place.range, place.offset, place.bytes).is_empty() {
        return Ok(());
    }
    let mut transaction = Transaction::on(pool);
    transaction.unmap(place.range, place.offset, place.bytes)?;
    transaction.commit();
    Ok(())
}

impl Resuming for RegionResume<'_> {
    fn missing(&self) -> u64 {
        self.places.values().map(|place| place.bytes).sum()
    }

    fn take(&mut self, transaction: &mut Transaction<'_>) -> Result<()> {
        let (owner, account) = (self.region.owner(), self.region.account.id());
        for place in self.places.values_mut() {
            clear(transaction.pool(), place)?;
            place.page = Some(transaction.take(place.bytes, owner, account)?);
        }
        Ok(())
    }

    fn map(&mut self, transaction: &mut Transaction<'_>, report: &mut ResumeReport) -> Result<()> {
        for place in self.places.values() {
            let Place { range, offset, bytes, page: Some(page), .. } = place else { continue };
            transaction.map(*range, *offset, &[*page])?;
            report.pages += 1;
            report.bytes += *bytes;
        }
        Ok(())
    }

    fn fill(&mut self, report: &mut ResumeReport) -> Result<()> {
        let device = &self.region.device;
        let (pool, host) = (device.pool(), device.host_pool());
        if !self.places.values().any(Place::filled) {
            return Ok(());
        }
        let begun = self.places.values().try_for_each(|place| {
            if let Some(copy) = &place.copy {
                host.load(pool, (place.range, place.offset), copy, report)?;
            }
            if place.policy == Policy::Zero {
                pool.fill(place.range, place.offset, place.bytes, 0, host.stream_in()?)?;
                report.calls += 1;
                report.zeroed_bytes += place.bytes;
            }
            Ok(())
        });
        host.mark_in(&mut self.contents);
        begun
    }

    fn contents(&self) -> Fence {
        self.contents.clone()
    }

    fn finish(mut self: Box<Self>) {
        self.finished = true;
        let (region, host) = (self.region, self.region.device.host_pool());
        let (generation, ranges) = {
            let table = &mut *region.table.lock();
            table.contents = std::mem::take(&mut self.contents);
            for (at, place) in std::mem::take(&mut self.places) {
                let Some(extent) = table.extents.get_mut(&at) else { continue };
                extent.arrives = place.copy.is_some() || place.policy == Policy::Zero;
                (extent.page, extent.copy) = (place.page, place.copy);
            }
            if !region.options.read_only {
                // Writable from now on.
                let all: Vec<_> = table.extents.keys().copied().collect();
                table.written(&all, host);
            }
            // Includes pages announced by a pause but not unmapped.
            let moved = table.extents.iter().filter(|(_, extent)| extent.policy != Policy::Keep);
            let ranges: Vec<_> = moved.map(|(at, extent)| (Address(*at), extent.bytes)).collect();
            table.phase = Phase::Resident;
            table.generation += u64::from(!ranges.is_empty());
            (table.generation, ranges)
        };
        self.guard.back = Some(Phase::Resident);
        if !ranges.is_empty() {
            region.call_hooks(generation, &ranges, false);
        }
        tracing::info!(region = region.id, tag = %region.tag, pages = ranges.len(), "region resumed");
    }
}

impl Drop for RegionResume<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let table = &mut *self.region.table.lock();
        for (at, place) in std::mem::take(&mut self.places) {
            if let Some(extent) = table.extents.get_mut(&at) {
                extent.copy = place.copy;
            }
        }
    }
}

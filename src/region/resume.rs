//! One region comes back: its pages are taken, mapped at the old addresses, and the contents copied behind that.
//!
//! The host's bytes are let go when all is there.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::books::Phase;
use super::turn::Turn;
use super::{Policy, Region};
use crate::error::Result;
use crate::pages::{Change, Fence, HostCopy, PageId, PagePool, RangeId, ResumeReport, Resuming};
use crate::units::Address;

/// A place whose page is to come.
struct Place {
    range: RangeId,
    offset: u64,
    bytes: u64,
    policy: Policy,
    page: Option<PageId>,
    copy: Option<HostCopy>,
}

/// A region on its way back. It has the region's turn.
struct Coming<'a> {
    region: &'a Region,
    places: BTreeMap<u64, Place>,
    contents: Fence,
    finished: bool,
    /// Last, so that it ends when everything is written down.
    turn: Turn<'a>,
}

impl Region {
    /// Begins to resume; `None`: there is nothing to do.
    pub(super) fn coming_back(&self) -> Result<Option<Box<dyn Resuming + '_>>> {
        let mut turn = self.take_turn()?;
        let mut books = self.books.lock();
        if books.phase != Phase::Paused {
            drop(books);
            return Ok(None);
        }
        turn.back = Some(Phase::Paused);
        books.phase = Phase::Resuming;
        if !self.options.verify_clean {
            // The sums that this compares are those of pages as they were.
            books.join_places(|bytes, held| self.sizes.join(bytes, held));
        }
        let gone = books.extents.iter_mut().filter(|(_, extent)| extent.page.is_none());
        let places = gone.map(|(at, extent)| {
            let (range, offset, bytes, policy) = (extent.range, extent.offset, extent.bytes, extent.policy);
            (*at, Place { range, offset, bytes, policy, page: None, copy: extent.copy.take() })
        });
        let places = places.collect();
        drop(books);
        Ok(Some(Box::new(Coming { region: self, places, contents: Fence::default(), finished: false, turn })))
    }
}

impl Place {
    /// Whether what it held comes back, or zeros.
    fn filled(&self) -> bool {
        self.copy.is_some() || self.policy == Policy::Zero
    }
}

/// Takes away what is still mapped at a place because undoing an earlier resume failed as well.
fn clear(pool: &Arc<PagePool>, place: &Place) -> Result<()> {
    if pool.mapped_in(place.range, place.offset, place.bytes).is_empty() {
        return Ok(());
    }
    let mut change = Change::on(pool);
    change.unmap(place.range, place.offset, place.bytes)?;
    change.commit();
    Ok(())
}

impl Resuming for Coming<'_> {
    fn missing(&self) -> u64 {
        self.places.values().map(|place| place.bytes).sum()
    }

    fn take(&mut self, change: &mut Change<'_>) -> Result<()> {
        let (holder, account) = (self.region.holder(), self.region.account.id());
        for place in self.places.values_mut() {
            clear(change.pool(), place)?;
            place.page = Some(change.take(place.bytes, holder, account)?);
        }
        Ok(())
    }

    fn map(&mut self, change: &mut Change<'_>, report: &mut ResumeReport) -> Result<()> {
        for place in self.places.values() {
            let Place { range, offset, bytes, page: Some(page), .. } = place else { continue };
            change.map(*range, *offset, &[*page])?;
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
            let books = &mut *region.books.lock();
            books.contents = std::mem::take(&mut self.contents);
            for (at, place) in std::mem::take(&mut self.places) {
                let Some(extent) = books.extents.get_mut(&at) else { continue };
                extent.arrives = place.copy.is_some() || place.policy == Policy::Zero;
                (extent.page, extent.copy) = (place.page, place.copy);
            }
            if !region.options.read_only {
                // It may be written from now on.
                let all: Vec<_> = books.extents.keys().copied().collect();
                books.written(&all, host);
            }
            // Also those that a pause announced and could not take away.
            let moved = books.extents.iter().filter(|(_, extent)| extent.policy != Policy::Keep);
            let ranges: Vec<_> = moved.map(|(at, extent)| (Address(*at), extent.bytes)).collect();
            books.phase = Phase::Resident;
            books.generation += u64::from(!ranges.is_empty());
            (books.generation, ranges)
        };
        self.turn.back = Some(Phase::Resident);
        if !ranges.is_empty() {
            region.tell(generation, &ranges, false);
        }
        tracing::info!(region = region.id, tag = %region.tag, pages = ranges.len(), "region resumed");
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        if self.finished {
            return;
        }
        let books = &mut *self.region.books.lock();
        for (at, place) in std::mem::take(&mut self.places) {
            if let Some(extent) = books.extents.get_mut(&at) {
                extent.copy = place.copy;
            }
        }
    }
}

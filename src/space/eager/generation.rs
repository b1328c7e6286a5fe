//! One generation of eager addresses, with the pages mapped there.

use std::collections::BTreeSet;

use super::slots::Slots;
use super::{EagerSpace, slots::CLASSES};
use crate::error::{Error, Result};
use crate::pages::{Fence, PageNo, PendingUnmap, Reservation};
use crate::space::Common;
use crate::space::layout::{Layout, Place};
use crate::units::Address;

#[derive(Debug)]
pub(super) struct Generation {
    pub(super) layout: Layout,
    pub(super) ranges: Vec<Reservation>,
    pub(super) slots: Slots,
    pub(super) mapped: u64,
    /// Fence after users of blocks freed since the generation became old.
    pub(super) readers: Fence,
}

impl Generation {
    pub(super) fn new(layout: Layout) -> Self {
        let (ranges, slots, readers) = (Vec::new(), Slots::default(), Fence::default());
        Self { layout, ranges, slots, mapped: 0, readers }
    }

    pub(super) fn reserved(&self) -> u64 {
        self.ranges.iter().map(Reservation::bytes).sum()
    }

    pub(super) fn address(&self, place: Place) -> Address {
        self.ranges[place.range].base().plus(place.offset)
    }

    pub(super) fn place_of(&self, address: Address) -> Option<Place> {
        let mut ranges = self.ranges.iter().enumerate();
        ranges.find_map(|(range, found)| found.offset_of(address).map(|offset| Place { range, offset }))
    }

    /// Whether the addresses are many times the size of the pages.
    pub(super) fn sprawls(&self) -> bool {
        const SLOTS: usize = 64;
        let numbers: usize = CLASSES.into_iter().map(|class| self.layout.numbers(class)).sum();
        self.layout.page_slots().count() > SLOTS + 8 * numbers
    }

    pub(super) fn unmap(&mut self, common: &Common, fence: Fence, gone: impl Fn(PageNo) -> bool) {
        let (mut pending, mut bytes) = (PendingUnmap::default(), 0);
        for (range, offset, no) in self.layout.page_slots().filter(|(.., no)| gone(*no)) {
            let page = common.shared.page_bytes(no.class);
            pending.add_part(self.ranges[range].id(), offset, page);
            bytes += page;
        }
        self.note_mapped(common, bytes, 0);
        common.pool().unmap_after(fence, pending);
    }

    pub(super) fn leave(mut self, common: &Common, fence: Fence) {
        common.totals.note_reserved(self.reserved(), 0);
        let mapped = self.mapped;
        self.note_mapped(common, mapped, 0);
        let mut pending = PendingUnmap::default();
        self.ranges.drain(..).for_each(|range| pending.join(range.leave()));
        common.pool().unmap_after(fence, pending);
    }

    pub(super) fn note_mapped(&mut self, common: &Common, before: u64, after: u64) {
        self.mapped = (self.mapped + after).saturating_sub(before);
        common.totals.note_mapped(before, after);
    }

    pub(super) fn audit(&self, space: &EagerSpace, scope: bool) -> Result<()> {
        let pool = space.common.pool();
        let wrong = |what: String| Err(Error::Internal { what: format!("{space:?}: {what}") });
        for class in CLASSES {
            let taken = self.slots.taken(class).len() as u64 + self.slots.own(class);
            if taken != self.slots.of(class).len() as u64 {
                return wrong(format!("two numbers of {class:?} pages are one of the arena's"));
            }
        }
        let pages: BTreeSet<_> = self.slots.all().iter().map(|(_, slot)| slot.page).collect();
        if pages.len() != self.slots.all().len() {
            return wrong("two numbers have one page".into());
        }
        for (range, offset, no) in self.layout.page_slots() {
            if !self.layout.holds(no) {
                continue;
            }
            let Some(slot) = self.slots.get(no) else { return wrong(format!("{no:?} has no page")) };
            let shown = pool.mapped_in(self.ranges[range].id(), offset, 1);
            if shown.first().map(|mapped| mapped.page) != Some(slot.page) {
                return wrong(format!("{no:?} does not show {:?} at {offset:#x}", slot.page));
            }
            let own = pool.owner(slot.page) == Some(space.own());
            if own != slot.shared.is_none() || !own && !scope {
                return wrong(format!("{:?} under a live block is {:?}'s", slot.page, pool.owner(slot.page)));
            }
        }
        Ok(())
    }
}

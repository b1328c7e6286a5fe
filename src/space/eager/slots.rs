use std::collections::BTreeSet;

use crate::pages::{Class, PageId, PageNo, SharedSet};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Slot {
    pub(super) page: PageId,
    /// Number in the shared set; `None` for an own page. Before an update, `page` may differ.
    pub(super) shared: Option<u32>,
}

#[derive(Debug, Default)]
pub(super) struct Slots {
    small: Vec<Slot>,
    large: Vec<Slot>,
}

pub(super) const CLASSES: [Class; 2] = [Class::Small, Class::Large];

impl Slots {
    pub(super) fn of(&self, class: Class) -> &Vec<Slot> {
        match class {
            Class::Small => &self.small,
            Class::Large => &self.large,
        }
    }

    pub(super) fn of_mut(&mut self, class: Class) -> &mut Vec<Slot> {
        match class {
            Class::Small => &mut self.small,
            Class::Large => &mut self.large,
        }
    }

    pub(super) fn get(&self, no: PageNo) -> Option<Slot> {
        self.of(no.class).get(no.index as usize).copied()
    }

    pub(super) fn set(&mut self, no: PageNo, slot: Slot) {
        if let Some(place) = self.of_mut(no.class).get_mut(no.index as usize) {
            *place = slot;
        }
    }

    pub(super) fn all(&self) -> Vec<(PageNo, Slot)> {
        let of = |class| {
            let slots = self.of(class).iter().enumerate();
            slots.map(move |(index, slot)| (PageNo { class, index: index as u32 }, *slot))
        };
        CLASSES.into_iter().flat_map(of).collect()
    }

    pub(super) fn own(&self, class: Class) -> u64 {
        self.of(class).iter().filter(|slot| slot.shared.is_none()).count() as u64
    }

    pub(super) fn taken(&self, class: Class) -> BTreeSet<u32> {
        self.of(class).iter().filter_map(|slot| slot.shared).collect()
    }

    /// Chooses shared numbers so that eager work and graphs together need few pages. Excludes fixed
    /// pages, and leased ones unless mapped. Prefers numbers with a page.
    pub(super) fn assign(&mut self, shared: &SharedSet, lent: &BTreeSet<u32>) {
        for class in CLASSES {
            let lowest_free = |taken: &BTreeSet<u32>| lowest_free(shared, class, taken, lent);
            let mut taken = self.taken(class);
            for slot in self.of_mut(class) {
                let Some(number) = slot.shared else { continue };
                let no = PageNo { class, index: number };
                let on_lease = class == Class::Large && lent.contains(&number);
                if shared.is_pinned(no) || on_lease && shared.listed(no) != Some(slot.page) {
                    let free = lowest_free(&taken);
                    taken.remove(&number);
                    taken.insert(free);
                    slot.shared = Some(free);
                }
            }
            while let Some(highest) = taken.last().copied() {
                let free = lowest_free(&taken);
                if free > highest || shared.listed(PageNo { class, index: free }).is_none() {
                    break;
                }
                let found = self.of_mut(class).iter_mut().find(|slot| slot.shared == Some(highest));
                let Some(slot) = found else { break };
                slot.shared = Some(free);
                taken.remove(&highest);
                taken.insert(free);
            }
        }
    }
}

/// Lowest usable number; only large pages are leased.
pub(super) fn lowest_free(
    shared: &SharedSet,
    class: Class,
    taken: &BTreeSet<u32>,
    lent: &BTreeSet<u32>,
) -> u32 {
    let free = |index: &u32| {
        let on_lease = class == Class::Large && lent.contains(index);
        !taken.contains(index) && !on_lease && !shared.is_pinned(PageNo { class, index: *index })
    };
    (0..u32::MAX).find(free).unwrap_or(u32::MAX)
}

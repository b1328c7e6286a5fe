//! ROCm 7.0 to 7.13 count mappings in `hipMemSetAccess` from the reservation's first one, so calls
//! for later mappings fail (ROCm/rocm-systems #2451, #2516, #6977). There each call names all
//! mappings up to the new ones, without a gap.

use std::collections::BTreeMap;

use crate::units::Address;

/// First version with the defect.
const COUNTS_FROM_FIRST: i32 = 70_000_000;
/// First later version without it (mori #640).
const COUNTS_NO_MORE: i32 = 71_400_000;

pub(super) fn counts_from_first(version: i32) -> bool {
    (COUNTS_FROM_FIRST..COUNTS_NO_MORE).contains(&version)
}

#[derive(Debug, Default)]
pub(super) struct Ranges {
    /// Base to length and mappings (address to length).
    reserved: BTreeMap<u64, (u64, BTreeMap<u64, u64>)>,
}

impl Ranges {
    pub(super) fn reserve(&mut self, base: Address, len: u64) {
        self.reserved.insert(base.0, (len, BTreeMap::new()));
    }

    pub(super) fn free(&mut self, base: Address) {
        self.reserved.remove(&base.0);
    }

    pub(super) fn map(&mut self, at: Address, len: u64) {
        if let Some((_, (_, mapped))) = self.reserved.range_mut(..=at.0).next_back() {
            mapped.insert(at.0, len);
        }
    }

    pub(super) fn unmap(&mut self, at: Address, len: u64) {
        if let Some((_, (_, mapped))) = self.reserved.range_mut(..=at.0).next_back() {
            mapped.retain(|start, _| !(at.0..at.0 + len).contains(start));
        }
    }

    /// Where a call for a new mapping at `at` begins. `None`: a gap precedes `at`.
    pub(super) fn begin(&self, at: Address) -> Option<Address> {
        let (_, (_, mapped)) = self.reserved.range(..=at.0).next_back()?;
        let mut before = mapped.range(..at.0);
        let Some((first, len)) = before.next() else { return Some(at) };
        let mut end = first + len;
        for (start, len) in before {
            if *start != end {
                return None;
            }
            end += len;
        }
        (end == at.0).then_some(Address(*first))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defect_is_that_of_rocm_7_0_up_to_7_14() {
        let defective = [70_051_831, 70_100_000, 70_253_211, 71_399_999].map(counts_from_first);
        assert_eq!(defective, [true; 4]);
        assert_eq!([60_241_134, 60_443_483, 71_400_000, 100_000_000].map(counts_from_first), [false; 4]);
    }

    #[test]
    fn a_call_begins_at_the_first_mapping_unless_there_is_a_gap() {
        let mut ranges = Ranges::default();
        ranges.reserve(Address(0x1000), 0x1000);
        ranges.reserve(Address(0x2000), 0x1000);
        assert_eq!(ranges.begin(Address(0x1800)), Some(Address(0x1800)));
        ranges.map(Address(0x1200), 0x100);
        ranges.map(Address(0x1300), 0x200);
        assert_eq!(ranges.begin(Address(0x1500)), Some(Address(0x1200)));
        assert_eq!(ranges.begin(Address(0x1100)), Some(Address(0x1100)), "nothing is mapped before it");
        assert_eq!(ranges.begin(Address(0x1600)), None, "a gap");
        assert_eq!(ranges.begin(Address(0x2100)), Some(Address(0x2100)), "another reservation");
        ranges.unmap(Address(0x1200), 0x100);
        assert_eq!(ranges.begin(Address(0x1500)), Some(Address(0x1300)));
        ranges.free(Address(0x1000));
        assert_eq!(ranges.begin(Address(0x1500)), None);
    }
}

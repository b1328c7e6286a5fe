//! Hash over the plan of a capture, equal in every process: compares captures across ranks.

use super::layout::Place;
use crate::pages::{Class, PageNo};
use crate::units::{BlockBytes, Geometry, mix};

/// Covers page sizes, the page of each slot, place and bytes of each block in order, and live-out
/// blocks. Excludes addresses, handles and other spaces. Places and bytes are multiples of 512, so
/// all other inputs have distinct tags in their lowest nine bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LayoutHash(u64);

impl LayoutHash {
    pub(super) fn new(geometry: Geometry) -> Self {
        let mut hash = Self(0);
        hash.add(geometry.small());
        hash.add(geometry.large());
        hash
    }

    pub(super) fn get(self) -> u64 {
        self.0
    }

    pub(super) fn page(&mut self, no: PageNo) {
        let class = match no.class {
            Class::Small => 1,
            Class::Large => 2,
        };
        self.add(u64::from(no.index) << 9 | class);
    }

    pub(super) fn block(&mut self, place: Place, bytes: BlockBytes) {
        self.add(place.offset + ((place.range as u64) << 48));
        self.add(bytes.get());
    }

    pub(super) fn remote(&mut self) {
        self.add(6);
    }

    /// Adds a persistent block without its place, which depends on other spaces.
    pub(super) fn kept(&mut self, bytes: BlockBytes) {
        self.add(!bytes.get());
    }

    pub(super) fn end(&mut self, policy: u64, placed: &[u64], kept: &[u64]) {
        self.add(policy << 9 | 3);
        placed.iter().for_each(|serial| self.add(serial << 9 | 4));
        kept.iter().for_each(|serial| self.add(serial << 9 | 5));
    }

    fn add(&mut self, value: u64) {
        self.0 = mix(self.0, value);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    const MIB: u64 = 1 << 20;

    fn new() -> LayoutHash {
        LayoutHash::new(Geometry::new(2 * MIB, 16 * MIB, 4096).unwrap())
    }

    /// Ranks may run different builds: the values are part of the interface.
    #[test]
    fn it_is_the_same_number_everywhere() {
        let mut hash = new();
        assert_eq!(hash.get(), 0xb8eb_bc40_63cc_3f7e);
        hash.page(PageNo { class: Class::Large, index: 7 });
        hash.block(Place { range: 1, offset: 3 * MIB }, BlockBytes::round_up(4096).unwrap());
        hash.kept(BlockBytes::round_up(512).unwrap());
        hash.end(2, &[1], &[]);
        assert_eq!(hash.get(), 0xd3a1_85c2_8579_8ddc);
    }

    #[test]
    fn everything_that_goes_in_counts_and_so_does_the_order() {
        let block = |range, offset, bytes| {
            let mut hash = new();
            hash.block(Place { range, offset }, BlockBytes::round_up(bytes).unwrap());
            hash
        };
        let page = |class, index| {
            let mut hash = new();
            hash.page(PageNo { class, index });
            hash
        };
        let end = |policy, placed: &[u64], kept: &[u64]| {
            let mut hash = new();
            hash.end(policy, placed, kept);
            hash
        };
        let mut remote = new();
        remote.remote();
        remote.block(Place { range: 0, offset: 0 }, BlockBytes::round_up(512).unwrap());
        let mut kept = new();
        kept.kept(BlockBytes::round_up(512).unwrap());
        let (mut one, mut other) = (page(Class::Small, 0), page(Class::Small, 1));
        one.page(PageNo { class: Class::Small, index: 1 });
        other.page(PageNo { class: Class::Small, index: 0 });
        let all = [
            new(),
            remote,
            LayoutHash::new(Geometry::new(2 * MIB, 32 * MIB, 4096).unwrap()),
            LayoutHash::new(Geometry::new(4 * MIB, 16 * MIB, 4096).unwrap()),
            block(0, 0, 512),
            block(0, 512, 512),
            block(1, 0, 512),
            block(0, 0, 1024),
            page(Class::Small, 0),
            page(Class::Large, 0),
            page(Class::Large, 1),
            one,
            other,
            kept,
            end(0, &[], &[]),
            end(1, &[], &[]),
            end(0, &[1], &[]),
            end(0, &[], &[1]),
            end(0, &[1, 2], &[]),
        ];
        let different: HashSet<u64> = all.iter().map(|hash| hash.get()).collect();
        assert_eq!(different.len(), all.len());
    }
}

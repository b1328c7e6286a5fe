//! Slab: packs small blocks into one page. Plain code over granule numbers, without driver and
//! addresses.

use std::num::NonZeroU16;

use crate::units::BLOCK_GRANULE;

/// A page divided into granules of [`BLOCK_GRANULE`] bytes. A block takes the lowest gap with
/// enough room.
///
/// Bit `g` of `taken` is set exactly if granule `g` belongs to a live block. At a block's first
/// granule, `lengths` and `serials` hold its granules and serial; other `lengths` are `None`.
#[derive(Debug)]
pub(crate) struct Slab {
    taken: Box<[u64]>,
    lengths: Box<[Option<NonZeroU16>]>,
    serials: Box<[u64]>,
    live: u32,
    /// Upper bound, so full slabs need no search.
    longest_gap: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NotABlock {
    /// Inside a live block.
    Inside,
    /// In a gap.
    Gap,
}

impl Slab {
    /// `bytes` is a power of two from one granule to
    /// [`MAX_SMALL_PAGE`](crate::units::MAX_SMALL_PAGE).
    pub(crate) fn new(bytes: u64) -> Self {
        let granules = (bytes / BLOCK_GRANULE) as usize;
        let mut taken = vec![0; granules.div_ceil(64)].into_boxed_slice();
        if granules < 64 {
            // Bits after the last granule are taken.
            taken[0] = u64::MAX << granules;
        }
        Self {
            taken,
            lengths: vec![None; granules].into_boxed_slice(),
            serials: vec![0; granules].into_boxed_slice(),
            live: 0,
            longest_gap: granules as u32,
        }
    }

    pub(crate) fn live(&self) -> u32 {
        self.live
    }

    /// Returns the first granule; `None` if no gap is long enough.
    pub(crate) fn allocate(&mut self, granules: u32, serial: u64) -> Option<u32> {
        if granules > self.longest_gap {
            return None;
        }
        let Some(start) = self.find_gap(granules) else {
            self.longest_gap = granules - 1;
            return None;
        };
        self.mark(start, granules, true);
        self.lengths[start as usize] = NonZeroU16::new(granules as u16);
        self.serials[start as usize] = serial;
        self.live += 1;
        Some(start)
    }

    pub(crate) fn block(&self, start: u32) -> Result<u32, NotABlock> {
        if let Some(Some(length)) = self.lengths.get(start as usize) {
            return Ok(u32::from(length.get()));
        }
        let inside = self.taken.get(start as usize / 64).is_some_and(|word| word >> (start % 64) & 1 == 1);
        Err(if inside { NotABlock::Inside } else { NotABlock::Gap })
    }

    pub(crate) fn serial(&self, start: u32) -> u64 {
        self.serials[start as usize]
    }

    /// Returns the block's granules.
    pub(crate) fn free(&mut self, start: u32) -> Result<u32, NotABlock> {
        let granules = self.block(start)?;
        self.lengths[start as usize] = None;
        self.mark(start, granules, false);
        self.live -= 1;
        self.longest_gap = self.lengths.len() as u32;
        Ok(granules)
    }

    /// Live blocks as (start, granules, serial), lowest first.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (u32, u32, u64)> {
        let lengths = self.lengths.iter().zip(&self.serials).enumerate();
        lengths.filter_map(|(start, (length, serial))| {
            length.map(|n| (start as u32, u32::from(n.get()), *serial))
        })
    }

    fn find_gap(&self, granules: u32) -> Option<u32> {
        let (mut start, mut length) = (0, 0);
        for (index, &word) in self.taken.iter().enumerate() {
            if word == u64::MAX {
                length = 0;
                continue;
            }
            let mut bit = 0;
            while bit < 64 {
                let rest = word >> bit;
                if rest & 1 == 1 {
                    length = 0;
                    bit += rest.trailing_ones();
                } else {
                    if length == 0 {
                        start = index as u32 * 64 + bit;
                    }
                    let gap = rest.trailing_zeros().min(64 - bit);
                    length += gap;
                    if length >= granules {
                        return Some(start);
                    }
                    bit += gap;
                }
            }
        }
        None
    }

    fn mark(&mut self, start: u32, granules: u32, taken: bool) {
        let (mut at, end) = (start, start + granules);
        while at < end {
            let bits = (64 - at % 64).min(end - at);
            let mask = (u64::MAX >> (64 - bits)) << (at % 64);
            let word = &mut self.taken[at as usize / 64];
            *word = if taken { *word | mask } else { *word & !mask };
            at += bits;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    struct Naive(Vec<Option<u32>>);

    impl Naive {
        fn allocate(&mut self, n: u32) -> Option<u32> {
            let n = n as usize;
            let start =
                (0..=self.0.len().checked_sub(n)?).find(|s| self.0[*s..s + n].iter().all(Option::is_none))?;
            self.0[start..start + n].fill(Some(start as u32));
            Some(start as u32)
        }

        fn free(&mut self, start: u32) -> Option<u32> {
            if start > 0 && self.0[start as usize - 1] == Some(start) {
                return None;
            }
            let mine = self.0.iter_mut().filter(|owner| **owner == Some(start));
            let n = mine.map(|owner| *owner = None).count() as u32;
            (n > 0).then_some(n)
        }
    }

    proptest! {
        #[test]
        fn places_and_frees_exactly_as_the_naive_twin(
            log in 0u32..13,
            ops in proptest::collection::vec((any::<bool>(), 0u32..5000), 1..300),
        ) {
            let granules = 1u32 << log;
            let mut slab = Slab::new(u64::from(granules) * BLOCK_GRANULE);
            let mut naive = Naive(vec![None; granules as usize]);
            for (allocate, number) in ops {
                if allocate {
                    let n = 1 + number % granules.min(1 + number / 7);
                    prop_assert_eq!(slab.allocate(n, 0), naive.allocate(n));
                } else {
                    prop_assert_eq!(slab.free(number % granules).ok(), naive.free(number % granules));
                }
                let starts = slab.blocks().map(|(start, ..)| start).collect::<Vec<_>>();
                prop_assert_eq!(slab.live() as usize, starts.len());
            }
        }
    }

    #[test]
    fn what_is_not_a_block_says_why() {
        let mut slab = Slab::new(64 * BLOCK_GRANULE);
        assert_eq!(slab.allocate(4, 7), Some(0));
        assert_eq!(slab.blocks().collect::<Vec<_>>(), [(0, 4, 7)]);
        assert_eq!(slab.free(1), Err(NotABlock::Inside));
        assert_eq!(slab.free(4), Err(NotABlock::Gap));
        assert_eq!(slab.free(0), Ok(4));
        assert_eq!(slab.free(0), Err(NotABlock::Gap));
        assert_eq!(slab.free(64), Err(NotABlock::Gap));
    }
}

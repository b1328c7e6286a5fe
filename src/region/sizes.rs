//! Page sizes of a region. A driver call costs the same for 2 MiB and for 1 GiB, but the unfilled
//! part of the last page is waste: pages grow with the region, an eighth of its size, in powers of
//! two, interchangeable among regions. A longer block, and any block of at least 64 MiB, has its
//! own pages of its exact size.

pub(super) const LONGEST: u64 = 1 << 30;
/// A block with its own pages.
const LONG: u64 = 64 << 20;
/// Of the region's current size.
const SHARE: u64 = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sizes {
    pub(super) granularity: u64,
    /// 0: automatic.
    pub(super) fixed: u64,
    pub(super) longest: u64,
}

impl Sizes {
    /// Page sizes to add at least `bytes` to a region of `held` bytes.
    pub(super) fn pages(self, bytes: u64, held: u64) -> Vec<u64> {
        if self.fixed > 0 {
            return vec![self.fixed; bytes.div_ceil(self.fixed) as usize];
        }
        let grown = self.grown(held);
        if bytes <= grown && bytes < LONG { vec![grown] } else { self.tight(bytes) }
    }

    /// Largest shared page. A resume also merges places up to this size.
    fn grown(self, held: u64) -> u64 {
        let share = (held / SHARE).min(self.longest);
        if share < self.granularity { self.granularity } else { 1 << share.ilog2() }
    }

    /// Whether neighbouring places may become one page.
    pub(super) fn join(self, bytes: [u64; 2], held: u64) -> bool {
        self.fixed == 0 && bytes[0] + bytes[1] <= self.grown(held)
    }

    /// Page sizes with the least waste.
    pub(super) fn tight(self, bytes: u64) -> Vec<u64> {
        if self.fixed > 0 {
            return self.pages(bytes, 0);
        }
        let mut pages = vec![self.longest; (bytes / self.longest) as usize];
        let rest = (bytes % self.longest).next_multiple_of(self.granularity);
        pages.extend((rest > 0).then_some(rest));
        pages
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const SIZES: Sizes = Sizes { granularity: 2 * MIB, fixed: 0, longest: LONGEST };

    #[test]
    fn many_small_blocks_and_one_large_one_take_few_pages() {
        for tensors in [1_u64, 512, 8192] {
            let each = (16 << 30) / tensors;
            let (mut held, mut free, mut pages) = (0, 0, 0);
            for _ in 0..tensors {
                if free < each {
                    let more = SIZES.pages(each - free, held);
                    pages += more.len();
                    held += more.iter().sum::<u64>();
                    free += more.iter().sum::<u64>();
                }
                free -= each;
            }
            assert!(pages <= 100, "{tensors} tensors take {pages} pages");
            assert!(held - (16 << 30) <= held / SHARE, "{tensors} tensors waste {} bytes", held - (16 << 30));
        }
    }

    #[test]
    fn long_blocks_waste_less_than_a_granule_each() {
        for each in [64 * MIB, 585 * MIB + 4096, 3 << 30] {
            let mut held = 0;
            for blocks in 1..=28 {
                held += SIZES.pages(each, held).iter().sum::<u64>();
                assert!(
                    held - blocks * each < blocks * 2 * MIB,
                    "{blocks} blocks of {each} bytes take {held}"
                );
            }
        }
    }

    #[test]
    fn places_are_joined_to_what_the_region_would_take_and_never_where_lengths_are_fixed() {
        assert!(SIZES.join([2 * MIB, 6 * MIB], 64 * MIB));
        assert!(!SIZES.join([2 * MIB, 8 * MIB], 64 * MIB));
        assert!(SIZES.join([LONGEST / 2; 2], 64 * LONGEST));
        assert!(!SIZES.join([LONGEST; 2], 64 * LONGEST));
        assert!(!Sizes { fixed: 2 * MIB, ..SIZES }.join([2 * MIB; 2], 64 * LONGEST));
    }

    #[test]
    fn pages_cover_what_is_asked_and_are_of_allowed_lengths() {
        for bytes in [1, 512, 2 * MIB, 3 * MIB, LONGEST - 1, LONGEST + 1, 5 * LONGEST / 2] {
            for held in [0, MIB, 100 * MIB, 64 * LONGEST] {
                for fixed in [0, 32 * MIB] {
                    let sizes = Sizes { fixed, ..SIZES };
                    for pages in [sizes.pages(bytes, held), sizes.tight(bytes)] {
                        assert!(pages.iter().sum::<u64>() >= bytes);
                        assert!(
                            pages.iter().all(|page| page % (2 * MIB) == 0 && *page <= LONGEST && *page > 0)
                        );
                        assert!(fixed == 0 || pages.iter().all(|page| *page == fixed));
                    }
                }
            }
        }
    }
}

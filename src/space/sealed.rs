//! What is left of a placement when its capture has ended: the blocks that are still live, and nothing else.

use super::layout::{Live, NotLive, Place, Usage};

/// The blocks that were live at the seal. Nothing is placed any more, so they are a sorted table of a few bytes each.
#[derive(Debug)]
pub(crate) struct Sealed {
    /// By place. A block that was freed since has serial 0, which no block was given.
    blocks: Box<[Live]>,
    /// The blocks that were live when the most bytes were.
    peak: Box<[Live]>,
    usage: Usage,
    pages: (usize, usize),
    /// For each range one bit for each small page's worth of its addresses: whether any block ever lay there.
    used: Box<[Box<[u64]>]>,
}

impl Sealed {
    /// The live blocks, what is in use, and how many small and other pages the space shows.
    pub(crate) fn new(mut blocks: Vec<Live>, usage: Usage, pages: (usize, usize)) -> Self {
        blocks.sort_unstable_by_key(|live| live.place);
        Self { blocks: blocks.into_boxed_slice(), peak: Box::default(), usage, pages, used: Box::default() }
    }

    /// Keeps where blocks ever lay: for each range one bit for each small page's worth of addresses.
    pub(crate) fn with_used(self, used: Box<[Box<[u64]>]>) -> Self {
        Self { used, ..self }
    }

    /// Whether any block ever lay on a small page's worth of addresses of a range. True where that is not known.
    pub(crate) fn was_used(&self, range: usize, unit: u64) -> bool {
        let word = self.used.get(range).and_then(|used| used.get(unit as usize / 64));
        word.is_none_or(|word| word >> (unit % 64) & 1 == 1)
    }

    /// Keeps what was live when the most bytes were.
    pub(crate) fn with_peak(self, peak: Vec<Live>) -> Self {
        Self { peak: peak.into_boxed_slice(), ..self }
    }

    /// The blocks that were live when the most bytes were.
    pub(crate) fn at_peak(&self) -> Vec<Live> {
        self.peak.to_vec()
    }

    /// What is in use now.
    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    /// Numbers of small and other pages the space has used.
    pub(crate) fn pages(&self) -> (usize, usize) {
        self.pages
    }

    /// The live blocks, by place.
    pub(crate) fn blocks(&self) -> Vec<Live> {
        self.blocks.iter().copied().filter(|live| live.serial > 0).collect()
    }

    /// Frees the block at a place; its bytes.
    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        let live = &mut self.blocks[find(&self.blocks, place)?];
        live.serial = 0;
        self.usage.remove(live.bytes);
        Ok(live.bytes)
    }

    /// Whether a live block begins at a place.
    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        find(&self.blocks, place).map(|_| ())
    }

    /// Whether a live block covers a byte from `from` to `to` of a range.
    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        let behind = self.blocks.partition_point(|live| live.place < Place { range, offset: to });
        // No two of them overlap, freed ones included: each was live at the seal. So their ends are in order too.
        let before = self.blocks[..behind].iter().rev();
        let mut near =
            before.take_while(|live| live.place.range == range && live.place.offset + live.bytes > from);
        near.any(|live| live.serial > 0)
    }
}

/// The index of the live block that begins at a place.
fn find(blocks: &[Live], place: Place) -> Result<usize, NotLive> {
    match blocks.binary_search_by_key(&place, |live| live.place) {
        Ok(found) if blocks[found].serial > 0 => Ok(found),
        Ok(_) => Err(NotLive::FreedBefore),
        Err(_) => Err(NotLive::Foreign),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_freed_block_is_told_from_a_stranger_and_covers_nothing() {
        let at = |range, offset| Place { range, offset };
        let live = |place, bytes, serial| Live { place, bytes, serial };
        let usage = Usage { blocks: 3, bytes: 7680, peak_bytes: 9000, allocations: 12 };
        let blocks = vec![live(at(1, 512), 1024, 9), live(at(0, 4096), 6144, 3), live(at(0, 0), 512, 12)];
        let mut sealed = Sealed::new(blocks, usage, (2, 5));
        assert_eq!(sealed.blocks().iter().map(|live| live.serial).collect::<Vec<_>>(), [12, 3, 9]);
        assert!(
            sealed.covered(0, 8192, 12288) && !sealed.covered(0, 512, 4096) && !sealed.covered(1, 1536, 4096)
        );
        assert_eq!(sealed.free(at(0, 4096)), Ok(6144));
        assert_eq!(sealed.free(at(0, 4096)), Err(NotLive::FreedBefore));
        assert_eq!(sealed.check(at(0, 4608)), Err(NotLive::Foreign));
        assert_eq!(sealed.check(at(0, 0)), Ok(()));
        assert!(
            !sealed.covered(0, 8192, 12288) && sealed.covered(0, 0, 4096) && sealed.covered(1, 1024, 4096)
        );
        assert_eq!((sealed.usage().blocks, sealed.usage().bytes, sealed.pages()), (2, 1536, (2, 5)));
    }
}

//! Placement of a space after its seal: the live-out blocks only.

use super::layout::{Live, NotLive, Place, Usage};

/// Sorted table of the blocks live at the seal; nothing is placed any more.
#[derive(Debug)]
pub(crate) struct Sealed {
    /// Sorted by place. Serial 0 marks a block freed since.
    blocks: Box<[Live]>,
    peak: Box<[Live]>,
    usage: Usage,
    pages: (usize, usize),
    /// For each range, one bit per small-page unit ever used.
    used: Box<[Box<[u64]>]>,
}

impl Sealed {
    pub(crate) fn new(mut blocks: Vec<Live>, usage: Usage, pages: (usize, usize)) -> Self {
        blocks.sort_unstable_by_key(|live| live.place);
        Self { blocks: blocks.into_boxed_slice(), peak: Box::default(), usage, pages, used: Box::default() }
    }

    pub(crate) fn with_used(self, used: Box<[Box<[u64]>]>) -> Self {
        Self { used, ..self }
    }

    /// True if unknown.
    pub(crate) fn was_used(&self, range: usize, unit: u64) -> bool {
        let word = self.used.get(range).and_then(|used| used.get(unit as usize / 64));
        word.is_none_or(|word| word >> (unit % 64) & 1 == 1)
    }

    pub(crate) fn with_peak(self, peak: Vec<Live>) -> Self {
        Self { peak: peak.into_boxed_slice(), ..self }
    }

    pub(crate) fn at_peak(&self) -> Vec<Live> {
        self.peak.to_vec()
    }

    pub(crate) fn usage(&self) -> Usage {
        self.usage
    }

    pub(crate) fn pages(&self) -> (usize, usize) {
        self.pages
    }

    pub(crate) fn blocks(&self) -> Vec<Live> {
        self.blocks.iter().copied().filter(|live| live.serial > 0).collect()
    }

    pub(crate) fn free(&mut self, place: Place) -> Result<u64, NotLive> {
        let live = &mut self.blocks[find(&self.blocks, place)?];
        live.serial = 0;
        self.usage.remove(live.bytes);
        Ok(live.bytes)
    }

    pub(crate) fn check(&self, place: Place) -> Result<(), NotLive> {
        find(&self.blocks, place).map(|_| ())
    }

    pub(crate) fn covered(&self, range: usize, from: u64, to: u64) -> bool {
        let behind = self.blocks.partition_point(|live| live.place < Place { range, offset: to });
        // None overlap, so ends are sorted, too.
        let before = self.blocks[..behind].iter().rev();
        let mut near =
            before.take_while(|live| live.place.range == range && live.place.offset + live.bytes > from);
        near.any(|live| live.serial > 0)
    }
}

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

use std::ops::Range;

use crate::error::Result;
use crate::units::{checked_product, checked_size};

/// Range number, and page number in the range.
pub(super) type Place = (usize, u64);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Run {
    pub(super) range: usize,
    pub(super) first: u64,
    /// One past the last page.
    pub(super) end: u64,
}

impl Run {
    pub(super) fn pages(&self) -> u64 {
        self.end - self.first
    }

    pub(super) fn places(self) -> impl Iterator<Item = Place> {
        (self.first..self.end).map(move |page| (self.range, page))
    }
}

pub(super) fn runs_of(places: impl IntoIterator<Item = Place>) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    for (range, page) in places {
        match runs.last_mut() {
            Some(run) if run.range == range && run.end == page => run.end += 1,
            _ => runs.push(Run { range, first: page, end: page + 1 }),
        }
    }
    runs
}

/// Layout of a cache's planes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvLayout {
    /// Each plane has its own addresses with consecutive blocks, as attention kernels prefer: at
    /// least one mapping a plane.
    #[default]
    ByPlane,
    /// Block after block, each with all its planes: the fewest mappings.
    ByBlock,
}

#[derive(Clone, Debug)]
pub(super) struct Shape {
    layout: KvLayout,
    planes: Vec<u64>,
    /// Offset of each plane in a block of all planes.
    offsets: Vec<u64>,
    block: u64,
    most: u64,
    page: u64,
}

impl Shape {
    /// Fails without planes, for a plane of 0 bytes, and beyond the address space.
    pub(super) fn new(layout: KvLayout, planes: &[u64], most: u64) -> Result<Self> {
        let whole = |bytes| checked_size("a KV block (the sum of its planes)", bytes);
        let (mut offsets, mut block) = (Vec::new(), 0_u64);
        for bytes in planes {
            offsets.push(block);
            block = whole(block + checked_size("a block of a plane", *bytes)?)?;
        }
        whole(block)?;
        checked_product("a KV cache (blocks_most times a block)", most, block)?;
        Ok(Self { layout, planes: planes.to_vec(), offsets, block, most, page: 1 })
    }

    pub(super) fn with_pages(self, page: u64) -> Self {
        Self { page, ..self }
    }

    /// Shape of a buffer: its blocks are its pages.
    pub(super) fn of_pages(bytes: u64, page: u64) -> Result<Self> {
        Ok(Self::new(KvLayout::ByPlane, &[page], bytes.div_ceil(page))?.with_pages(page))
    }

    pub(super) fn page(&self) -> u64 {
        self.page
    }

    pub(super) fn most(&self) -> u64 {
        self.most
    }

    pub(super) fn planes(&self) -> &[u64] {
        &self.planes
    }

    pub(super) fn layout(&self) -> KvLayout {
        self.layout
    }

    pub(super) fn block(&self) -> u64 {
        self.block
    }

    fn strides(&self) -> &[u64] {
        match self.layout {
            KvLayout::ByPlane => &self.planes,
            KvLayout::ByBlock => std::slice::from_ref(&self.block),
        }
    }

    pub(super) fn lengths(&self) -> Vec<u64> {
        self.strides().iter().map(|stride| stride * self.most).collect()
    }

    /// Range and offset of a block in a plane, and the bytes to the next block.
    pub(super) fn place(&self, plane: usize, block: u64) -> Option<(usize, u64, u64)> {
        let bytes = *self.planes.get(plane)?;
        if block >= self.most {
            return None;
        }
        match self.layout {
            KvLayout::ByPlane => Some((plane, bytes * block, bytes)),
            KvLayout::ByBlock => Some((0, self.block * block + self.offsets.get(plane)?, self.block)),
        }
    }

    /// Pages of blocks, one run for each address range.
    pub(super) fn pages(&self, blocks: &Range<u64>) -> Vec<Run> {
        let run = |(range, stride): (usize, &u64)| Run {
            range,
            first: blocks.start * stride / self.page,
            end: (blocks.end * stride).div_ceil(self.page),
        };
        if blocks.is_empty() { Vec::new() } else { self.strides().iter().enumerate().map(run).collect() }
    }

    /// Blocks on a page, also partial ones.
    pub(super) fn blocks_on(&self, (range, page): Place) -> Range<u64> {
        let stride = self.strides().get(range).copied().unwrap_or(1);
        let end = ((page + 1) * self.page).div_ceil(stride).min(self.most);
        page * self.page / stride..end
    }

    pub(super) fn blocks_a_page(&self) -> u64 {
        self.strides().iter().map(|stride| (self.page / stride).max(1)).max().unwrap_or(1).min(self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn blocks_of_both_layouts_lie_behind_one_another_and_on_their_pages() {
        let planes = [1000, 3000];
        let by_plane = Shape::new(KvLayout::ByPlane, &planes, 100).unwrap().with_pages(4096);
        assert_eq!(by_plane.lengths(), [100_000, 300_000]);
        assert_eq!(by_plane.place(1, 7), Some((1, 21_000, 3000)));
        assert_eq!(
            by_plane.pages(&(4..9)),
            [Run { range: 0, first: 0, end: 3 }, Run { range: 1, first: 2, end: 7 }]
        );
        assert_eq!(
            (by_plane.blocks_on((0, 1)), by_plane.blocks_on((1, 2)), by_plane.blocks_on((0, 24))),
            (4..9, 2..5, 98..100)
        );
        assert_eq!(by_plane.blocks_a_page(), 4);
        let by_block = Shape::new(KvLayout::ByBlock, &planes, 100).unwrap().with_pages(4096);
        assert_eq!(by_block.lengths(), [400_000]);
        assert_eq!(
            (by_block.place(0, 7), by_block.place(1, 7)),
            (Some((0, 28_000, 4000)), Some((0, 29_000, 4000)))
        );
        assert_eq!(by_block.pages(&(1..3)), [Run { range: 0, first: 0, end: 3 }]);
        assert_eq!((by_block.place(2, 0), by_block.place(0, 100), by_block.blocks_a_page()), (None, None, 1));
    }

    #[test]
    fn what_cannot_be_addressed_is_refused() {
        for (planes, most) in
            [(&[][..], 5), (&[0], 5), (&[5], 0), (&[1 << 40], 1 << 40), (&[1 << 46, 1 << 46], 1)]
        {
            assert!(matches!(Shape::new(KvLayout::ByPlane, planes, most), Err(Error::InvalidSize { .. })));
        }
    }
}

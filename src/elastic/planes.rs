//! Where the blocks of a cache lie. Arithmetic.

use std::ops::Range;

use super::books::Run;
use crate::error::Result;
use crate::units::{checked_product, checked_size};

/// How the planes of a cache lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvLayout {
    /// Each plane has addresses of its own, its blocks behind one another, as attention kernels like it best. A block range costs a
    /// mapping for each plane at least.
    #[default]
    ByPlane,
    /// One range of addresses, block after block, in each the planes behind one another. A block range costs the fewest mappings.
    ByBlock,
}

/// Planes, blocks and pages of a cache.
#[derive(Clone, Debug)]
pub(super) struct Shape {
    layout: KvLayout,
    /// Bytes of a block in each plane.
    planes: Vec<u64>,
    /// Where a plane begins in a block of all planes.
    offsets: Vec<u64>,
    /// Bytes of a block of all planes.
    block: u64,
    most: u64,
    page: u64,
}

impl Shape {
    /// # Errors
    /// [`Error::InvalidSize`] for no plane, a plane without bytes, and more than can be addressed.
    pub(super) fn new(layout: KvLayout, planes: &[u64], most: u64) -> Result<Self> {
        let (mut offsets, mut block) = (Vec::new(), 0_u64);
        for bytes in planes {
            offsets.push(block);
            block =
                checked_size("a block of all planes", block + checked_size("a block of a plane", *bytes)?)?;
        }
        checked_size("a cache without planes", block)?;
        checked_product("a cache of all its blocks", most, block)?;
        Ok(Self { layout, planes: planes.to_vec(), offsets, block, most, page: 1 })
    }

    /// With pages of these bytes.
    pub(super) fn with_pages(self, page: u64) -> Self {
        Self { page, ..self }
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

    /// Bytes of a block of all planes.
    pub(super) fn block(&self) -> u64 {
        self.block
    }

    /// From one block to the next, in each range of addresses.
    fn strides(&self) -> &[u64] {
        match self.layout {
            KvLayout::ByPlane => &self.planes,
            KvLayout::ByBlock => std::slice::from_ref(&self.block),
        }
    }

    /// Bytes of each range of addresses.
    pub(super) fn lengths(&self) -> Vec<u64> {
        self.strides().iter().map(|stride| stride * self.most).collect()
    }

    /// The range, and the bytes in it, where a plane of a block lies; and the bytes from one block to the next.
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

    /// The pages that a range of blocks lies on, one run for each range of addresses.
    pub(super) fn pages(&self, blocks: &Range<u64>) -> Vec<Run> {
        let run = |(range, stride): (usize, &u64)| Run {
            range,
            first: blocks.start * stride / self.page,
            end: (blocks.end * stride).div_ceil(self.page),
        };
        if blocks.is_empty() { Vec::new() } else { self.strides().iter().enumerate().map(run).collect() }
    }

    /// The blocks that lie on a page, wholly or in part.
    pub(super) fn blocks_on(&self, range: usize, page: u64) -> Range<u64> {
        let stride = self.strides().get(range).copied().unwrap_or(1);
        let end = ((page + 1) * self.page).div_ceil(stride).min(self.most);
        page * self.page / stride..end
    }

    /// How many blocks behind one another come and go together, as far as pages divide into blocks: the most that share a page.
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
            (by_plane.blocks_on(0, 1), by_plane.blocks_on(1, 2), by_plane.blocks_on(0, 24)),
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

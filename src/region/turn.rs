//! Who may move a region's pages: one thread at a time, apart from the lock of the books, which is held for moments only.

use super::Region;
use super::books::Phase;
use crate::error::Result;

impl Region {
    /// Waits until nobody moves its pages, and keeps others from it.
    pub(super) fn take_turn(&self) -> Result<Turn<'_>> {
        self.turn.take("the region")?;
        Ok(Turn { region: self, back: None })
    }
}

/// The right to move a region's pages. Where it ends, the region is as `back` says, if that says something.
pub(super) struct Turn<'a> {
    region: &'a Region,
    pub(super) back: Option<Phase>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        {
            let mut books = self.region.books.lock();
            if let Some(back) = self.back {
                books.phase = back;
            }
            books.settle(self.region.device.pool(), self.region.device.host_pool());
        }
        self.region.turn.give();
    }
}

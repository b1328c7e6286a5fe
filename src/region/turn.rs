//! Exclusive section for moving a region's pages. Held during a pause or resume; the mutex `books`
//! is held for short updates only.

use super::Region;
use super::books::Phase;
use crate::error::Result;

impl Region {
    pub(super) fn take_turn(&self) -> Result<Turn<'_>> {
        self.turn.take("the region")?;
        Ok(Turn { region: self, back: None })
    }
}

/// The section. At its end, the region's phase is set to `back`, if set.
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

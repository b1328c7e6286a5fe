//! Who may move a region's pages: one thread at a time, apart from the lock of the books, which is held for moments only.

use super::Region;
use super::books::Phase;
use crate::error::{Error, Result};
use crate::pages::HookGuard;
use crate::sync::thread_token;

impl Region {
    /// Waits until nobody moves its pages, and keeps others from it.
    pub(super) fn take_turn(&self) -> Result<Turn<'_>> {
        let me = thread_token();
        self.turn.wait_for(|thread| {
            if *thread == 0 {
                *thread = me;
                return Some(Ok(()));
            }
            if *thread == me {
                let (expected, found) = ("at rest", "being paused or resumed by this thread");
                return Some(Err(Error::WrongState { what: "the region", expected, found }));
            }
            HookGuard::refuse().err().map(Err)
        })?;
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
        self.region.turn.change(|thread| *thread = 0);
    }
}

//! Exclusive section for moving a region's pages. Held during a pause or resume; the mutex `table`
//! is held for short updates only.

use super::Region;
use super::block_table::Phase;
use crate::error::Result;

impl Region {
    pub(super) fn enter_pause_section(&self) -> Result<PauseGuard<'_>> {
        self.pause_section.take("the region")?;
        Ok(PauseGuard { region: self, back: None })
    }
}

/// The section. At its end, the region's phase is set to `back`, if set.
pub(super) struct PauseGuard<'a> {
    region: &'a Region,
    pub(super) back: Option<Phase>,
}

impl Drop for PauseGuard<'_> {
    fn drop(&mut self) {
        {
            let mut table = self.region.table.lock();
            if let Some(back) = self.back {
                table.phase = back;
            }
            table.settle(self.region.device.pool(), self.region.device.host_pool());
        }
        self.region.pause_section.give();
    }
}

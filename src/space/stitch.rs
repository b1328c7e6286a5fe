//! Carries out what a layout plans: maps the pages, and undoes that exactly if it fails.

use super::lane::Lane;
use super::layout::{Layout, Place};
use super::{Common, Placement, State};
use crate::error::{Error, Result};
use crate::pages::Change;
use crate::units::BlockBytes;

impl State {
    /// Stitches pages together behind new addresses for a block that the layout finds no room for, in a space of this number that has
    /// seen this version of the shared set. On failure nothing has changed.
    pub(super) fn stitch(
        &mut self,
        common: &Common,
        (space, seen): (u64, u64),
        bytes: BlockBytes,
        lane: Lane,
    ) -> Result<Place> {
        let Placement::Stitched(layout) = &mut self.placement else {
            return Err(Error::Internal { what: "only a stitched space stitches".into() });
        };
        let layout = layout.get_or_insert_with(|| Box::new(Layout::new(common.shared.geometry())));
        let growth = layout.plan(bytes, lane);
        let mut change = Change::on(common.pool());
        change.announce(growth.pages.iter().map(|no| common.shared.page_bytes(no.class)).sum());
        let known = self.ranges.get(growth.range).map(|range| range.id());
        let mapped = (|| {
            let peers = if lane.remote { common.shared.remote_peers() } else { common.shared.peers() };
            let range = known.map_or_else(|| change.reserve(growth.range_bytes, space, peers), Ok)?;
            let pages = self.pages_of(common, (space, seen), &mut change, &growth.pages)?;
            change.map(range, growth.offset, &pages)
        })();
        if let Err(error) = mapped {
            self.undo(change);
            return Err(error);
        }
        let (done, reserved) = change.commit();
        self.adopt(common, done, reserved);
        growth.pages.iter().for_each(|no| self.layout_hash.page(*no));
        match &mut self.placement {
            Placement::Stitched(Some(layout)) => Ok(layout.commit(&growth)),
            _ => Err(Error::Internal { what: "only a stitched space stitches".into() }),
        }
    }
}

//! Executes the plan of a layout: maps the pages in one transaction.

use super::lane::Lane;
use super::layout::{Layout, Place};
use super::spare_ranges::Spare;
use super::{Common, Placement, State};
use crate::error::{Error, Result};
use crate::pages::Transaction;
use crate::units::BlockBytes;

impl State {
    /// Maps pages at new addresses for a block of `space`, which has seen version `seen` of the
    /// shared set. Changes nothing on error.
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
        let mut transaction = Transaction::on(common.pool());
        transaction.expect_bytes(growth.pages.iter().map(|no| common.shared.page_bytes(no.class)).sum());
        let known = self.ranges.get(growth.range).map(|range| range.id());
        let mut spare = None;
        let mapped = (|| {
            let pages = self.pages_of(common, (space, seen), &mut transaction, &growth.pages)?;
            let peers = if lane.remote { common.shared.remote_peers() } else { common.shared.peers() };
            let range = match known {
                Some(range) => range,
                None => {
                    let asked = (growth.range_bytes, peers);
                    spare = common.spare_ranges.take(common.pool(), asked, &pages, space);
                    if let Some(spare) = &spare {
                        return spare.cut(&mut transaction, pages.len());
                    }
                    transaction.reserve(growth.range_bytes, space, peers)?
                }
            };
            transaction.map(range, growth.offset, &pages).map(|()| 0)
        })();
        let shown = match mapped {
            Ok(shown) => shown,
            Err(error) => {
                self.undo(transaction);
                spare.into_iter().for_each(|spare| common.drop_spare(spare));
                return Err(error);
            }
        };
        let (done, mut reserved) = transaction.commit();
        self.note_mapped(common, 0, shown);
        reserved.extend(spare.map(Spare::into_range));
        self.adopt(common, done, reserved);
        growth.pages.iter().for_each(|no| self.layout_hash.page(*no));
        match &mut self.placement {
            Placement::Stitched(Some(layout)) => Ok(layout.commit(&growth)),
            _ => Err(Error::Internal { what: "only a stitched space stitches".into() }),
        }
    }
}

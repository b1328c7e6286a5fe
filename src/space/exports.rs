//! What is behind a space's addresses, for other processes.

use super::{Common, Core, Phase, Placement, Space};
use crate::error::{Error, Result};
use crate::pages::{Extent, Holder, PageId};
use crate::units::Address;

impl Space {
    /// The pages behind a range of the space's addresses, such as a block's, in order. Asks nothing of the driver and pins nothing: ranks can compare
    /// what they have, and each page is [exported](crate::Device::export_page) once, however many graphs show it.
    ///
    /// What is said counts as long as the space shows these pages. A seal exchanges pages under retained blocks: of those that were named here before
    /// and are pinned it exchanges none, and fails ([`Error::Exported`]); of others, ask again after it.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`] for addresses that are not the space's; [`Error::InvalidArgument`] if not all of the range has pages;
    /// [`Error::WrongState`] while the arena is paused, or if pages were given to eager work that the next replay replaces.
    pub fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.core().export(base, bytes)
    }
}

impl Core {
    fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        let common = &self.common;
        common.usable()?;
        common.require_resident()?;
        if bytes == 0 {
            let expected = "at least one";
            return Err(Error::InvalidArgument { what: "bytes of a range", value: 0, expected });
        }
        let mut state = self.state.lock();
        if state.phase == Phase::Broken {
            return Err(Error::wrong_state(
                "cannot export the range: the driver broke its space earlier; drop the space and capture again",
            ));
        }
        let last = Address(base.0.saturating_add(bytes - 1));
        let kept = state.kept.live().any(|(at, len, _)| at <= base && last.0 < at.0 + len);
        if state.range_of(base).is_none() && !kept {
            return Err(Error::ForeignPointer { address: base });
        }
        let extents = common.pool().extents(base, bytes)?;
        let ours = [common.shared.holder(), self.own(), Holder::Kept { arena: common.shared.arena() }];
        for extent in &extents {
            if !common.pool().holder(extent.page).is_some_and(|holder| ours.contains(&holder)) {
                return Err(Error::wrong_state(
                    "cannot export the range: eager work has replaced pages of its space; replay its graph first",
                ));
            }
        }
        if state.phase == Phase::Open && matches!(state.placement, Placement::Stitched(_)) {
            state.told.extend(extents.iter().map(|extent| extent.page));
        }
        Ok(extents)
    }
}

impl Common {
    /// A page of the arena, which is pinned, stays what it is from now on; that of an exclusive block does so anyway.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for the page of an eager block, which goes with that; [`Error::WrongState`] while eager work, at whose end it could
    /// go, is under way, or the arena is paused, going or coming.
    pub(super) fn stay_for_others(&self, page: PageId) -> Result<()> {
        self.usable()?;
        if self.pool().holder(page) == Some(self.exclusive_holder()) {
            // Nothing moves it.
            return Ok(());
        }
        self.require_resident()?;
        let eager = self.eager.lock().upgrade();
        if eager.is_some_and(|eager| self.pool().holder(page) == Some(eager.own())) {
            let expected = "that of a page of a graph, as an export names it";
            let value = page.number().into();
            return Err(Error::InvalidArgument { what: "a page's number", value, expected });
        }
        self.shared.stay()
    }
}

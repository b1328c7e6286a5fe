use super::{Common, Core, Phase, Placement, Space};
use crate::error::{Error, Result};
use crate::pages::{Extent, Owner, PageId};
use crate::units::Address;

impl Space {
    /// Returns the pages of a range of the space's addresses, in order: `vmmgraph_space_export`. A
    /// seal fails ([`Error::Exported`]) rather than replace a pinned page returned here.
    pub fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        self.core().export(base, bytes)
    }
}

impl Core {
    fn export(&self, base: Address, bytes: u64) -> Result<Vec<Extent>> {
        let common = &self.common;
        common.require_usable()?;
        common.require_resident()?;
        if bytes == 0 {
            let expected = "at least one";
            return Err(Error::InvalidArgument { what: "bytes of a range", value: 0, expected });
        }
        let mut state = self.state.lock();
        if state.stage.phase() == Phase::Broken {
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
        let ours = [common.shared.owner(), self.own(), Owner::Kept { arena: common.shared.arena() }];
        for extent in &extents {
            if !common.pool().owner(extent.page).is_some_and(|owner| ours.contains(&owner)) {
                return Err(Error::wrong_state(
                    "cannot export the range: eager work has replaced pages of its space; replay its graph first",
                ));
            }
        }
        if state.stage.phase() == Phase::Open && matches!(state.placement, Placement::Stitched(_)) {
            state.exported.extend(extents.iter().map(|extent| extent.page));
        }
        Ok(extents)
    }
}

impl Common {
    /// Fixes a pinned page of the arena in place.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a page of an eager block; [`Error::WrongState`] during eager
    /// work, which may take the page, and unless the arena is resident.
    pub(super) fn pin_for_peers(&self, page: PageId) -> Result<()> {
        self.require_usable()?;
        if self.pool().owner(page) == Some(self.exclusive_owner()) {
            return Ok(());
        }
        self.require_resident()?;
        let eager = self.registry.try_eager();
        if eager.is_some_and(|eager| self.pool().owner(page) == Some(eager.own())) {
            let expected = "that of a graph's page, taken from an export";
            let value = page.number().into();
            return Err(Error::InvalidArgument { what: "a page's number", value, expected });
        }
        self.shared.note_export()
    }
}

//! Preserves values written to live blocks between capture and seal, which may replace the pages.
//! The caller saves the contents before and writes them back after.

use std::fmt;
use std::sync::Arc;

use super::core::State;
use super::{Core, RetainPolicy};
use crate::error::{Error, Result};
use crate::pages::{Events, NamedStream};
use crate::units::{Address, Stream};

/// Live blocks of a space about to be sealed. While this exists, freed blocks stay allocated, so no
/// write-back hits a new block.
pub struct PreservedBlocks {
    core: Arc<Core>,
    blocks: Vec<(Address, u64)>,
}

/// Blocks freed meanwhile, with the streams which may still read each.
pub(super) type Postponed = Vec<(Address, Vec<NamedStream>)>;

impl PreservedBlocks {
    pub(crate) fn begin(core: &Arc<Core>, policy: RetainPolicy) -> Result<Self> {
        let state = &mut *core.state.lock();
        if state.postponed.is_some() {
            return Err(Error::wrong_state(
                "cannot seal with contents preserved: another call is sealing this space; wait for that one",
            ));
        }
        state.postponed = Some(Vec::new());
        Ok(Self { core: Arc::clone(core), blocks: state.replaceable(policy) })
    }

    /// Returns address and bytes of each block whose pages the seal may replace, by address.
    #[must_use]
    pub fn blocks(&self) -> &[(Address, u64)] {
        &self.blocks
    }
}

impl Drop for PreservedBlocks {
    fn drop(&mut self) {
        let state = &mut *self.core.state.lock();
        for (address, readers) in state.postponed.take().into_iter().flatten() {
            if let Err(error) = self.core.let_go(state, address, readers) {
                tracing::warn!(%error, space = self.core.id, "a block that was freed during a seal stays");
            }
        }
    }
}

impl fmt::Debug for PreservedBlocks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreservedBlocks")
            .field("space", &self.core.id)
            .field("blocks", &self.blocks.len())
            .finish()
    }
}

impl State {
    pub(super) fn postpone(
        &mut self,
        events: &Arc<Events>,
        address: Address,
        readers: &[Stream],
    ) -> Result<()> {
        if self.postponed.iter().flatten().any(|(freed, _)| *freed == address) {
            return Err(Error::DoubleFree { address });
        }
        match self.range_of(address) {
            Some(place) => self.placement.check(place).map_err(|why| why.at(address))?,
            None => self.kept.check(address)?,
        }
        let readers = events.name_readers(readers);
        readers.iter().for_each(|stream| events.keep_named(*stream));
        self.postponed.get_or_insert_default().push((address, readers));
        Ok(())
    }

    fn replaceable(&self, policy: RetainPolicy) -> Vec<(Address, u64)> {
        let Some(layout) = self.placement.layout() else { return Vec::new() };
        let moves = |range| match policy {
            RetainPolicy::Retain => true,
            RetainPolicy::ShareRemote => !layout.is_remote(range),
            RetainPolicy::Share | RetainPolicy::InPlace => false,
        };
        let live = layout.blocks().into_iter().filter(|live| moves(live.place.range));
        let mut blocks: Vec<_> = live.map(|live| (self.address(live.place), live.bytes)).collect();
        blocks.sort_unstable();
        blocks
    }
}

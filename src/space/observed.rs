//! Records of a space for people: label, place in the user's program, trace of blocks.

use std::collections::HashMap;

use super::block::Origin;
use super::layout::Place;
use super::{Core, Events, Space, TracedBlock};
use crate::error::{Error, Result};
use crate::units::Address;

/// Limit of a label and of a site, in bytes.
const MOST: u64 = 1 << 10;

fn kept(what: &'static str, text: &str) -> Result<Option<String>> {
    let bytes = text.len() as u64;
    if bytes > MOST {
        return Err(Error::InvalidSize { what, bytes, limit: MOST });
    }
    Ok((!text.is_empty()).then(|| text.to_owned()))
}

#[derive(Debug)]
pub(super) struct Observed {
    label: Option<String>,
    site: Option<String>,
    events: Option<Events>,
    origins: Option<HashMap<Address, Origin>>,
}

impl Observed {
    pub(super) fn new(trace_events: bool, trace_blocks: bool) -> Self {
        let (events, origins) = (trace_events.then(Events::default), trace_blocks.then(HashMap::new));
        Self { label: None, site: None, events, origins }
    }

    pub(super) fn label(&self) -> Option<String> {
        self.label.clone()
    }

    pub(super) fn site(&self) -> Option<String> {
        self.site.clone()
    }

    pub(super) fn traces_events(&self) -> bool {
        self.events.is_some()
    }

    pub(super) fn traced_blocks(&self) -> Option<Vec<TracedBlock>> {
        self.events.as_ref().map(|events| events.blocks().to_vec())
    }

    /// `number` returns the number of the block in its space.
    pub(super) fn allocated(
        &mut self,
        place: Place,
        address: Address,
        bytes: u64,
        number: impl FnOnce() -> u64,
    ) {
        if let Some(events) = &mut self.events {
            events.allocated(place, address, bytes, number());
        }
    }

    pub(super) fn freed(&mut self, place: Place) {
        if let Some(events) = &mut self.events {
            events.freed(place);
        }
    }

    pub(super) fn end(&mut self) {
        self.events.iter_mut().for_each(Events::end);
    }

    pub(super) fn add_origin(&mut self, block: Address, origin: Option<Origin>) {
        if let (Some(origins), Some(origin)) = (&mut self.origins, origin) {
            origins.insert(block, origin);
        }
    }

    pub(super) fn remove_origin(&mut self, block: Address) {
        if let Some(origins) = &mut self.origins {
            origins.remove(&block);
        }
    }

    pub(super) fn origin(&self, block: Address) -> Option<&Origin> {
        self.origins.as_ref()?.get(&block)
    }
}

impl Space {
    /// Names the space ("decode 64") in statistics, log lines, out-of-memory errors and the page
    /// map. Empty: no label.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] above 1024 bytes.
    pub fn set_label(&self, label: &str) -> Result<()> {
        let label = kept("the label of a space", label)?;
        self.core().state.lock().observed.label = label;
        Ok(())
    }

    /// Sets the place of the capture in the program ("model.py:120") for the page map. Empty: none.
    ///
    /// # Errors
    /// [`Error::InvalidSize`] above 1024 bytes.
    pub fn set_site(&self, site: &str) -> Result<()> {
        let site = kept("the site of a space", site)?;
        self.core().state.lock().observed.site = site;
        Ok(())
    }

    /// Returns the label, if any.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        self.core().label()
    }
}

impl Core {
    pub(super) fn label(&self) -> Option<String> {
        self.state.lock().observed.label()
    }
}

use serde::Serialize;

use super::Common;
use crate::error::{Error, Result};
use crate::pages::Capturing;
use crate::pause::Opened;

/// Stage in the life of a space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Phase {
    /// Under capture.
    Open,
    /// Captured: may be replayed, and live-out (retained) blocks may be freed.
    Sealed,
    /// The graph is gone; memory under live blocks remains.
    Retired,
    /// The driver refused an undo: the space can only be dropped.
    Broken,
}

impl Phase {
    fn name(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Sealed => "sealed",
            Self::Retired => "retired",
            Self::Broken => "broken",
        }
    }
}

pub(super) struct Stage {
    phase: Phase,
    /// Prevents a pause of the arena until the seal. In a current space: from its first block on.
    opened: Option<Opened>,
    /// Counts as a running capture of the device until a seal begins.
    capture: Option<Capturing>,
}

impl Stage {
    pub(super) fn open(opened: Opened, capture: Option<Capturing>) -> Self {
        Self { phase: Phase::Open, opened: Some(opened), capture }
    }

    pub(super) fn phase(&self) -> Phase {
        self.phase
    }

    pub(super) fn require(&self, expected: Phase) -> Result<()> {
        if self.phase == expected {
            return Ok(());
        }
        let found = self.phase.name();
        let remedy = if self.phase == Phase::Open { "seal it first" } else { "open a new space" };
        Err(Error::wrong_state(format!("cannot use the space: it is {found}; {remedy}")))
    }

    pub(super) fn defer(&mut self) {
        self.opened = None;
    }

    /// Begins at the first block of a bump space.
    pub(super) fn begin_capture(&mut self, common: &Common) -> Result<()> {
        if self.opened.is_none() {
            self.opened = Some(common.pause_state.open()?);
        }
        self.capture.get_or_insert_with(|| common.pool().capture());
        Ok(())
    }

    pub(super) fn end_capture(&mut self) {
        self.capture = None;
    }

    pub(super) fn seal(&mut self) {
        (self.phase, self.opened) = (Phase::Sealed, None);
    }

    pub(super) fn retire(&mut self) {
        (self.phase, self.opened, self.capture) = (Phase::Retired, None, None);
    }

    pub(super) fn break_off(&mut self) {
        self.phase = Phase::Broken;
    }
}
